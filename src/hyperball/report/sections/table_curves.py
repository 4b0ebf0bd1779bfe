"""The curves of a published table: convergence, accuracy against outliers, learned radii, and its own pictures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from hyperball.on_disk import is_number
from hyperball.report.charts import Chart, Series, apart
from hyperball.report.page import Gallery
from hyperball.report.records import Run
from hyperball.report.sections import lines as curves
from hyperball.report.sections.join import Joined, Line
from hyperball.report.sections.radii import Network, radii_gallery
from hyperball.verdicts import COMPLEMENTS

MOST_COLUMNS = 4
SHARE = re.compile(r"(?:.*, )?(\d+(?:\.\d+)?) ?%")
SLOW = 0.01  # a momentum of normalization at which tests in the middle of training lag behind


def convergence(joined: Joined) -> Gallery:
    """Error (or accuracy) and loss, in tests and in training, over steps: two charts a column each, one line a row."""
    with_runs = [line for line in joined.lines if line.runs and not joined.split(line.number.column)[1]]
    columns, cut = curves.first_of(
        list(dict.fromkeys(line.number.column for line in with_runs)), MOST_COLUMNS, "columns"
    )
    drawn = [
        column_charts(column, groups_of(with_runs, column), joined.table.metric in COMPLEMENTS) for column in columns
    ]
    ordered = [chart for half in (slice(0, 2), slice(2, 4)) for charts in drawn for chart in charts[half]]
    charts = [chart for chart in ordered if any(len(line.points) > 1 for line in chart.series)]
    said = (f"{cut}." if cut else "", lag([run for line in with_runs for run in line.runs]))
    return Gallery("Convergence", tuple(charts), " ".join(filter(None, said)))


def groups_of(lines: Sequence[Line], column: str) -> list[tuple[str, str, Sequence[Run]]]:
    """The names, operators and runs of a column's rows."""
    return [
        (f"{line.number.row}, {line.variant}" if line.variant else line.number.row, line.operator, line.runs)
        for line in lines
        if line.number.column == column
    ]


def column_charts(column: str, groups: Sequence[tuple[str, str, Sequence[Run]]], is_error: bool) -> list[Chart]:
    """Error or accuracy, then loss, each in tests and, beside it, in training."""
    word = "error" if is_error else "accuracy"
    in_training = partial(curves.trained, is_error=is_error)
    share: dict[str, Any] = {"unit": " %"}
    charts = []
    for title, of_training, value, options in (
        (f"Test {word}, %", False, curves.error if is_error else curves.accuracy, share),
        (f"Training {word}, %", True, in_training, share),
        ("Test loss", False, curves.loss, {"log": True}),
        ("Training loss", True, curves.loss, {"log": True}),
    ):
        points = (lambda run: run.training) if of_training else (lambda run: run.evaluations)
        charts.append(curves.run_chart(f"{title}: {column}", "", groups, points, value, **options))
    return charts


def lag(runs: Sequence[Run]) -> str:
    """Why tests lag behind the training, where normalization follows as slowly as in one paper's code."""
    momenta = {value for run in runs if is_number(value := run.field("model.options.norm_momentum"))}
    slow = [value for value in momenta if 0 < value <= SLOW]
    if not slow:
        return ""
    return (
        f"Tests normalize by running statistics, which with a momentum of {min(slow):g} are about {1 / min(slow):,.0f} "
        "steps old: while weights move fast, tests lag behind, and not equally in all rows. What is drawn of training, "
        "on augmented batches with statistics of their own, does not."
    )


def outliers(joined: Joined) -> Gallery:
    """Accuracy over the share of outliers in the test, ours and the paper's with one scale."""
    ours: dict[str, list[tuple[float, float, float]]] = {}
    theirs: dict[str, list[tuple[float, float]]] = {}
    operators = {}
    for line in joined.lines:
        row, at = line.number.row, share_of(joined, line.number.column)
        if at is None:
            continue
        operators[row] = line.operator
        if line.mean is not None:
            width = statistics.stdev(line.values) if len(line.values) > 1 else 0.0
            ours.setdefault(row, []).append((at, line.mean, width))
        if isinstance(line.number.published, int | float):
            theirs.setdefault(row, []).append((at, float(line.number.published)))
    names = list(dict.fromkeys([*ours, *theirs]))
    plain = [Series(row, ((0.0, 0.0),), color) for row, color in zip(names, curves.colors(names), strict=True)]
    style = {entry.name: (entry.color, entry.dash) for entry in apart(plain)}
    mine = tuple(
        Series(row, tuple((x, y) for x, y, _ in sorted(points)), style[row][0], dash=style[row][1],
               operator=operators[row], band=band_of(sorted(points)))
        for row, points in ours.items() if len(points) > 1
    )  # fmt: skip
    paper_lines = tuple(
        Series(row, tuple(sorted(points)), style[row][0], operator=operators[row], dash=style[row][1])
        for row, points in theirs.items()
        if len(points) > 1
    )
    charts = [
        outlier_chart(f"Under outliers: {who}", held) for who, held in (("ours", mine), ("the paper", paper_lines))
    ]
    return Gallery("Against the share of outliers", tuple(chart for chart in charts if chart.series) if mine else ())


def share_of(joined: Joined, column: str) -> float | None:
    """The share of outliers that a column was tested with, in percent: 0 in the one that others add outliers to."""
    found = SHARE.fullmatch(column)
    if found is not None:
        return float(found[1])
    others = [SHARE.fullmatch(other) for other in joined.columns if joined.split(other)[0] == column]
    shares = [float(other[1]) for other in others if other is not None]
    return 0.0 if shares and 0.0 not in shares else None


def outlier_chart(title: str, series: Sequence[Series]) -> Chart:
    drawn, cut = curves.first_of(series, curves.MOST_LINES, "lines", lambda line: line.name)
    return Chart(title, "% of points", "%", tuple(drawn), " %", cut, (0.0, 100.0))


def band_of(points: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """The widths of points (x, y, width), or nothing where all are 0."""
    return tuple(width for _, _, width in points) if any(width for _, _, width in points) else ()


def radii(joined: Joined) -> Gallery:
    """Learned radii of the networks, each by its first seed."""
    first = [line for line in joined.lines if line.runs and not joined.split(line.number.column)[1]]
    return radii_gallery(
        [Network(f"{line.number.row}, {line.number.column}", line.operator, line.runs[0]) for line in first]
    )
