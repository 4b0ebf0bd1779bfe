"""Ours against the paper's in one picture a table: a dot for every number of the published schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hyperball.experiments.headings import heading
from hyperball.report.drawing.axes import Axis, label, ticks
from hyperball.report.drawing.svg import Key, Picture, Safe, element, path, svg
from hyperball.report.sections.join import Joined, Line
from hyperball.report.sections.lines import MOST_LINES, colors, first_of
from hyperball.report.sections.published import is_share, metric_words
from hyperball.verdicts import NEAR, is_error

SIDE, TOP, BOTTOM = 320.0, 10.0, 40.0
LEFT, RIGHT = (40.0, 10.0, 9.0), (18.0, 4.0, 5.0)  # room for ticks: at the least, and a gap with so much a character
FEWEST = 3  # dots that a picture is worth


def against_paper(joined: Joined) -> Picture | None:
    """The picture of a table; None at another scale, for times, and where there is next to nothing to compare."""
    table = joined.table
    held = [line for line in joined.one_a_cell if line.difference is not None]
    if table.scale != "paper" or not is_share(table.metric) or len(held) < FEWEST:
        return None
    values = [number for line in held for number in pair(line)]
    marks = ticks(values)
    longest = max(len(label(mark, marks)) for mark in marks)
    left, right = (max(least, gap + longest * each) for least, gap, each in (LEFT, RIGHT))
    across = Axis(marks[0], marks[-1], left, SIDE - right)
    up = Axis(marks[0], marks[-1], SIDE - BOTTOM, TOP)
    names = list(dict.fromkeys(line.operator for line in held))
    styles = dict(zip(names, colors(names), strict=True))
    groups = [dots(name, [line for line in held if line.operator == name], styles[name], across, up) for name in names]
    drawn = svg(
        SIDE, SIDE, frame(marks, across, up), *groups, label=f"{table.title}: ours against the paper's",
        class_="plot square", tabindex="0", data_x=across.text, data_y=up.text,
    )  # fmt: skip
    side = "below" if is_error(table.metric) else "above"
    named, cut = first_of(names, MOST_LINES, "names")
    note = "; ".join(filter(None, (f"{side} the line ours is better", cut)))
    keys = tuple(Key(name, styles[name], name, swatch=True) for name in named)
    return Picture(
        heading(table.title, table.source),
        drawn,
        metric_words(table.metric),
        note,
        keys,
        table=table.experiment,
        scale=table.scale,
    )


def pair(line: Line) -> tuple[float, float]:
    """(the paper's, ours) of a number that has both."""
    assert line.mean is not None
    assert line.difference is not None
    return line.mean - line.difference, line.mean


def frame(marks: Sequence[float], across: Axis, up: Axis) -> Safe:
    """Ticks, the line of equal numbers, the band of those that count as reproduced, and the names of the axes."""
    low, high = marks[0], marks[-1]
    corners = [(low, low + NEAR), (high - NEAR, high), (high, high), (high, high - NEAR), (low + NEAR, low), (low, low)]
    parts = [element("path", class_="corridor", d=path((across(x), up(y)) for x, y in corners) + "Z")]
    for value in marks:
        parts.append(element("path", class_="grid", d=f"M{across.start:g} {up(value):g}H{across.end:g}"))
        parts.append(element("text", label(value, marks), x=across.start - 6, y=up(value) + 4, text_anchor="end"))
        parts.append(element("text", label(value, marks), x=across(value), y=up.start + 16, text_anchor="middle"))
    parts += [
        element("path", class_="axis", d=f"M{across.start:g} {up.start:g}H{across.end:g}"),
        element("path", class_="reference", d=path([(across(low), up(low)), (across(high), up(high))])),
        element("text", "paper", class_="over", x=across.end, y=up.start + 32, text_anchor="end"),
        element("text", "ours", x=across.start + 6, y=up.end + 10),
    ]
    return Safe("".join(parts))


def dots(name: str, lines: Sequence[Line], color: int, across: Axis, up: Axis) -> Safe:
    """The dots of one operator, with what the page's script says of each."""
    places = [pair(line) for line in lines]
    told = [
        f"{line.number.row}, {line.number.column}\nours {line.text}, paper {line.number.published}, "
        f"difference {line.difference:+.2f}, {line.seeds} seed{'' if line.seeds == 1 else 's'}"
        for line in lines
    ]
    circles = [element("circle", class_="dot", cx=across(x), cy=up(y), r=3.4) for x, y in places]
    held = " ".join(f"{x:.6g},{y:.6g}" for x, y in places)
    return element(
        "g", *circles, class_=f"s{color}", data_name=name, data_operator=name, data_p=held, data_told=json.dumps(told)
    )
