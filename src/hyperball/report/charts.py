"""Line charts: lines, bands and reference lines over a common axis, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hyperball.report.drawing.axes import Axis, ends, is_positive, is_wide, label, log_ticks, short, ticks
from hyperball.report.drawing.svg import Key, Picture, Safe, element, path, svg

WIDTH, HEIGHT = 460.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 12.0, 40.0
GAP, DIGIT = 10.0, 9.0  # room at the left that a long number needs: a gap, and so much for each of its characters
COLORS = 10
DASHES = 6
MOST_POINTS, MOST_MARKS = 100, 12


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), and a band's half widths around it; color 0 is the baseline's.

    `operator` is what the page's filter knows the line by; `dash` tells lines of one color apart.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    color: int = 1
    band: tuple[float, ...] = ()
    operator: str = ""
    dash: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis; values are shown with `unit`.

    `log` asks for a logarithmic axis, which is drawn where all values are positive and differ by more than ten times,
    or where the other axis is logarithmic too (`log_x`). `table` (one a line), `scale` and `operator` are what the
    page's filter knows it by, beside the operators of its lines.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    unit: str = ""
    note: str = ""
    y_range: tuple[float, float] | None = None
    log: bool = False
    log_x: bool = False
    references: tuple[tuple[float, str], ...] = field(default=())
    table: str = ""
    scale: str = ""
    operator: str = ""


@dataclass(frozen=True)
class Drawing:
    """A chart with the axes of its picture; series hold what can be drawn."""

    chart: Chart
    series: tuple[Series, ...]
    across: Axis
    up: Axis
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]

    @property
    def y_texts(self) -> tuple[str, ...]:
        return tick_texts(self.y_ticks, self.up.log)


def tick_texts(marks: Sequence[float], log: bool) -> tuple[str, ...]:
    return tuple(short(value) if log or len(marks) < 2 else label(value, marks) for value in marks)


def draw(chart: Chart) -> Drawing:
    """Scale a chart to its picture; lines without a finite point are left out."""
    series = apart([entry for entry in map(cleaned, chart.series) if entry.points])
    lines = [line for entry in series for line in (entry.points, *edges(entry, chart.unit))]
    everything = [point for line in lines for point in line]
    xs = [x for x, _ in everything]
    ys = [y for _, y in everything] + [value for value, _ in chart.references]
    log_x = chart.log_x and is_positive(xs)
    log = chart.log and (is_positive(ys) if log_x else is_wide(ys))
    x_ticks = log_ticks(xs) if log_x else ticks(xs)
    y_ticks = log_ticks(ys) if log else ticks(ys if chart.y_range is None else list(chart.y_range))
    left = max(LEFT, GAP + DIGIT * max(map(len, tick_texts(y_ticks, log))))
    across = Axis(*ends(x_ticks, xs), left, WIDTH - RIGHT, log_x)
    up = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log)
    inside = tuple(mark for mark in x_ticks if across.low <= mark <= across.high)
    return Drawing(chart, series, across, up, inside, tuple(y_ticks))


def apart(series: Sequence[Series]) -> tuple[Series, ...]:
    """The lines, each with a color and dashes that no line before it has: first other dashes, then another color."""
    taken: set[tuple[int, int]] = set()
    found = []
    for entry in series:
        color = entry.color % COLORS
        wanted = [(color, (entry.dash + k) % DASHES) for k in range(DASHES)]
        others = [(1 + (color + k) % (COLORS - 1), dash) for dash in range(DASHES) for k in range(COLORS - 1)]
        style = next((style for style in (*wanted, *others) if style not in taken), wanted[0])
        taken.add(style)
        found.append(replace(entry, color=style[0], dash=style[1]))
    return tuple(found)


def edges(series: Series, unit: str = "") -> tuple[tuple[tuple[float, float], ...], ...]:
    """The lower and the upper edge of a band."""
    if not series.band:
        return ()
    pairs = list(zip(series.points, series.band, strict=True))
    heights = [y for _, y in series.points]
    least = 0.0 if min(heights) >= 0 else -math.inf  # no band of an error rate lies below zero
    most = 100.0 if unit.strip() == "%" and max(heights) <= 100 else math.inf  # nor above all
    return (
        tuple((x, max(y - width, least)) for (x, y), width in pairs),
        tuple((x, min(y + width, most)) for (x, y), width in pairs),
    )


def picture(chart: Chart) -> Picture:
    """The chart as SVG, with what the page's script needs for exact numbers."""
    drawing = draw(chart)
    lines = [line(entry, drawing) for entry in drawing.series]
    drawn = svg(
        WIDTH, HEIGHT, grid(drawing), *references(drawing), *lines,
        label=f"{chart.title}: {', '.join(entry.name for entry in drawing.series)}", class_="plot", tabindex="0",
        data_x=drawing.across.text, data_y=drawing.up.text, data_unit=chart.unit, data_over=chart.x_label,
    )  # fmt: skip
    keys = tuple(Key(entry.name, entry.color, entry.operator, entry.dash) for entry in drawing.series)
    scale = "logarithmic scale" if drawing.up.log else ""
    note = "; ".join(filter(None, (chart.note, scale)))
    return Picture(
        chart.title, drawn, chart.y_label, note, keys, table=chart.table, scale=chart.scale, operator=chart.operator
    )


def grid(drawing: Drawing) -> Safe:
    """Horizontal lines, ticks and the name of the horizontal axis."""
    left, right, bottom, parts = drawing.across.start, WIDTH - RIGHT, HEIGHT - BOTTOM, []
    for value, text in zip(drawing.y_ticks, drawing.y_texts, strict=True):
        at = drawing.up(value)
        parts.append(element("path", class_="grid", d=f"M{left:g} {at:g}H{right:g}"))
        parts.append(element("text", text, x=left - 7, y=at + 4, text_anchor="end"))
    parts.append(element("path", class_="axis", d=f"M{left:g} {bottom:g}H{right:g}"))
    for value, text in zip(drawing.x_ticks, tick_texts(drawing.x_ticks, drawing.across.log), strict=True):
        parts.append(element("text", text, x=drawing.across(value), y=bottom + 17, text_anchor="middle"))
    parts.append(element("text", drawing.chart.x_label, class_="over", x=right, y=bottom + 34, text_anchor="end"))
    return Safe("".join(parts))


def references(drawing: Drawing) -> list[Safe]:
    """Dashed lines across the picture, each with its name."""
    found = []
    for value, name in drawing.chart.references:
        at = drawing.up(value)
        left = drawing.across.start
        found.append(element("path", class_="reference", d=f"M{left:g} {at:g}H{WIDTH - RIGHT:g}"))
        found.append(element("text", name, class_="reference", x=left + 4, y=at - 5))
    return found


def line(entry: Series, drawing: Drawing) -> Safe:
    """A line with its band and values."""

    def place(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(drawing.across(x), drawing.up(y)) for x, y in points]

    parts = []
    if entry.band:
        low, high = edges(entry, drawing.chart.unit)
        parts.append(element("path", class_="band", d=path([*place(low), *reversed(place(high))]) + "Z"))
    parts.append(element("path", class_="line", d=path(place(entry.points))))
    if len(entry.points) <= MOST_MARKS:
        parts += [element("circle", class_="dot", cx=x, cy=y, r=2.6) for x, y in place(entry.points)]
    widths = entry.band or (None,) * len(entry.points)
    held = " ".join(
        f"{x:.6g},{y:.5g}" + ("" if width is None else f",{width:.3g}")
        for (x, y), width in zip(entry.points, widths, strict=True)
    )
    return element(
        "g", *parts, class_=f"s{entry.color} d{entry.dash}", data_name=entry.name,
        data_operator=entry.operator or None, data_p=held,
    )  # fmt: skip


def cleaned(series: Series) -> Series:
    """Finite points alone, and not more than a picture shows."""
    if len(series.band) == len(series.points) and series.band:
        held = [(*point, width) for point, width in zip(series.points, series.band, strict=True)]
        kept = thinned(held)
        return replace(series, points=tuple((p[0], p[1]) for p in kept), band=tuple(p[2] for p in kept))
    return replace(series, points=tuple((p[0], p[1]) for p in thinned(series.points)), band=())


def thinned(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    finite = [p for p in points if all(map(math.isfinite, p))]
    stride = max(1, math.ceil(len(finite) / MOST_POINTS))
    kept = finite[::stride]
    return kept if not finite or kept[-1] == finite[-1] else [*kept, finite[-1]]
