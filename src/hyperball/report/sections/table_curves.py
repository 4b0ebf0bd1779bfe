"""The curves of a published table: convergence, accuracy against outliers, learned radii, and its own pictures."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence

from hyperball.report.charts import Chart, Series, apart
from hyperball.report.page import Gallery
from hyperball.report.sections import lines as curves
from hyperball.report.sections.join import ERRORS, Joined

MOST_CHARTS, MOST_RADII = 4, 4


def convergence(joined: Joined) -> Gallery:
    """Test error (or accuracy) and loss over steps: one chart a column, one line a row."""
    with_runs = [line for line in joined.lines if line.runs and not joined.split(line.number.column)[1]]
    charts: list[Chart] = []
    columns, cut = curves.first_of(
        list(dict.fromkeys(line.number.column for line in with_runs)), MOST_CHARTS, "columns"
    )
    for column in columns:
        groups = [
            (f"{line.number.row}, {line.variant}" if line.variant else line.number.row, line.operator, line.runs)
            for line in with_runs
            if line.number.column == column
        ]
        is_error = joined.table.metric in ERRORS
        value, word = (curves.error, "Test error") if is_error else (curves.accuracy, "Test accuracy")
        shown = curves.run_chart(f"{word}, %: {column}", "", groups, lambda run: run.evaluations, value, unit=" %")
        losses = curves.run_chart(
            f"Test loss: {column}", "", groups, lambda run: run.evaluations, curves.loss, log=True
        )
        charts += [chart for chart in (shown, losses) if any(len(line.points) > 1 for line in chart.series)]
    return Gallery("Convergence", tuple(charts), f"{cut}." if cut else "")


def outliers(joined: Joined) -> Gallery:
    """Accuracy over the share of outliers in the test, ours and the paper's with one scale."""
    ours: dict[str, list[tuple[float, float, float]]] = {}
    theirs: dict[str, list[tuple[float, float]]] = {}
    operators = {}
    for line in joined.lines:
        share = re.fullmatch(r"(?:.*, )?(\d+(?:\.\d+)?) ?%", line.number.column)
        if share is None:
            continue
        row, at = line.number.row, float(share[1])
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


def outlier_chart(title: str, series: Sequence[Series]) -> Chart:
    drawn, cut = curves.first_of(series, curves.MOST_LINES, "lines")
    return Chart(title, "% of points", "%", tuple(drawn), " %", cut, (0.0, 100.0))


def band_of(points: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """The widths of points (x, y, width), or nothing where all are 0."""
    return tuple(width for _, _, width in points) if any(width for _, _, width in points) else ()


def radii(joined: Joined) -> Gallery:
    """Learned radii of the first cells that have any."""
    charts, seen = [], set()
    for line in joined.lines:
        run = line.runs[0] if line.runs else None
        if run is not None and line.operator not in seen and sum(bool(p.radii) for p in run.evaluations) > 1:
            seen.add(line.operator)
            charts.append(curves.radii_chart(f"{line.number.row}, {joined.split(line.number.column)[0]}", run))
    shown, cut = curves.first_of(charts, MOST_RADII, "networks")
    return Gallery("Learned radii", tuple(shown), f"{cut}." if cut else "")
