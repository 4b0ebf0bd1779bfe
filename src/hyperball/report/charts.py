"""Line charts as plain geometry, which a template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 12.0, 40.0
COLORS = 8
MOST_POINTS = 200


@dataclass(frozen=True)
class Series:
    """One line: points (x, y), and thin lines of which it is the mean; color 0 is the baseline's."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: int = 1
    thin: tuple[tuple[tuple[float, float], ...], ...] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis; values are shown with `unit`, on a logarithmic axis if `log` and all are positive."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    unit: str = ""
    note: str = ""
    y_range: tuple[float, float] | None = None
    log: bool = False


@dataclass(frozen=True)
class Tick:
    place: float
    text: str


@dataclass(frozen=True)
class Mark:
    """A point to hover over."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    name: str
    color: int
    path: str
    thin: tuple[str, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Drawing:
    """A chart in the coordinates of its picture."""

    chart: Chart
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


def draw(chart: Chart) -> Drawing:
    """Scale a chart to its picture; lines without a finite point are left out."""
    series = [entry for entry in map(cleaned, chart.series) if entry.points]
    everything = [p for entry in series for line in (entry.points, *entry.thin) for p in line]
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    log = chart.log and bool(ys) and min(ys) > 0
    x_ticks = ticks(xs)
    y_ticks = log_ticks(ys) if log else ticks(ys if chart.y_range is None else list(chart.y_range))
    across = Axis(*ends(x_ticks, xs), LEFT, WIDTH - RIGHT)
    up = Axis(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, log)

    def place(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(across(x), up(y)) for x, y in points]

    def said(entry: Series, point: tuple[float, float]) -> str:
        return f"{entry.name}: {short(point[1])}{chart.unit} at {chart.x_label} {short(point[0])}"

    lines = tuple(
        Line(
            entry.name, entry.color % COLORS, path(place(entry.points)),
            tuple(path(place(thin)) for thin in entry.thin if thin),
            tuple(Mark(*place([p])[0], said(entry, p)) for p in entry.points),
        )
        for entry in series
    )  # fmt: skip
    texts = [f"{value:g}" for value in y_ticks] if log else [label(value, y_ticks) for value in y_ticks]
    return Drawing(
        chart,
        tuple(Tick(across(value), label(value, x_ticks)) for value in x_ticks if across.low <= value <= across.high),
        tuple(Tick(up(value), text) for value, text in zip(y_ticks, texts, strict=True)),
        lines,
    )


@dataclass(frozen=True)
class Axis:
    """Maps low…high to start…end, and what lies beyond to the nearer end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = (math.log10(number) for number in (low, high, max(value, low)))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around the values; powers alone where that would be many."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        marks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        first = max((i for i, mark in enumerate(marks) if mark <= low), default=0)
        last = min((i for i, mark in enumerate(marks) if mark >= high), default=len(marks) - 1)
        marks = marks[first : max(last, first + 1) + 1]
        if len(marks) <= 8:
            break
    return marks


def cleaned(series: Series) -> Series:
    """Finite points alone, and not more than a picture shows."""
    return Series(series.name, thinned(series.points), series.color, tuple(map(thinned, series.thin)))


def thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    stride = max(1, math.ceil(len(finite) / MOST_POINTS))
    kept = finite[::stride]
    return tuple(kept if not finite or kept[-1] == finite[-1] else [*kept, finite[-1]])


def path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g} {y:g}" for x, y in points)


def ticks(values: Sequence[float], count: int = 5) -> list[float]:
    """About `count` round numbers, from just below the least value to just above the largest."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def ends(marks: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: that of the values where given, else that of the ticks."""
    low, high = (min(values), max(values)) if values else (marks[0], marks[-1])
    return (low, high) if high > low else (marks[0], marks[-1])


def label(value: float, marks: Sequence[float]) -> str:
    """A tick's text with as many digits as the distance of the ticks needs."""
    step = marks[1] - marks[0]
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    if round(step, digits) != round(step, digits + 1):
        digits += 1
    if digits > 6 or abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def short(value: float) -> str:
    return f"{value:.4g}"
