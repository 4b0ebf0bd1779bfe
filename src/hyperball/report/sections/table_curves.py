"""The curves of a published table: convergence, accuracy against outliers, learned radii, and its own pictures."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Sequence
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
    """Accuracy over the share of outliers in the test with one scale: ours, the paper's, and at our best epochs.

    These, which a share of outliers chose for itself, are drawn where tests under outliers followed every epoch.
    """
    tested = [(line, at) for line in joined.lines if (at := share_of(joined, line.number.column)) is not None]
    ours, best = (shares_of(tested, operator.attrgetter(name)) for name in ("values", "best"))
    theirs = shares_of(tested, lambda line: (line.number.published,))
    names = list(dict.fromkeys([*ours, *theirs, *best]))
    plain = [Series(row, ((0.0, 0.0),), color) for row, color in zip(names, curves.colors(names), strict=True)]
    style = {entry.name: (entry.color, entry.dash) for entry in apart(plain)}
    families = {line.number.row: line.operator for line, _ in tested}
    drawn = {"ours": ours, "the paper": theirs, "ours, the best epoch for each share": best}
    charts = [
        outlier_chart(f"Under outliers: {who}", [
            Series(row, tuple((x, y) for x, y, _ in points), style[row][0], dash=style[row][1],
                   operator=families[row], band=band_of(points))
            for row, points in held.items() if len(points) > 1
        ])
        for who, held in drawn.items()
    ]  # fmt: skip
    shown = [chart for chart in charts if chart.series] if charts[0].series else []
    return Gallery("Against the share of outliers", tuple(shown))


def shares_of(
    tested: Sequence[tuple[Line, float]], values: Callable[[Line], Sequence[Any]]
) -> dict[str, list[tuple[float, float, float]]]:
    """By row, in the order of shares: the share, the mean over seeds, and their standard deviation."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for line, at in tested:
        held = [float(value) for value in values(line) if is_number(value)]
        if held:
            width = statistics.stdev(held) if len(held) > 1 else 0.0
            rows.setdefault(line.number.row, []).append((at, statistics.fmean(held), width))
    return {row: sorted(points) for row, points in rows.items()}


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
