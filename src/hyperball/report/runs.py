"""Curves of groups of runs over epochs, with thin lines of single seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from hyperball.report.charts import Chart, Series
from hyperball.report.records import Point, Run
from hyperball.report.tables import Group

Value = Callable[[Point], float | None]


def scaled(point: Point, name: str) -> float | None:
    value = point.values.get(name)
    return None if value is None else 100 * value


def curves(
    title: str,
    y_label: str,
    groups: Sequence[Group],
    lines: Callable[[Run], Sequence[Point]],
    value: Value,
    unit: str = "",
) -> Chart:
    """One line a group: the mean over its seeds at the steps they share, and thin lines of the seeds."""
    series = []
    for entry, color in zip(groups, colors(groups), strict=True):
        single = [
            tuple((point.epoch, found) for point in lines(run) if (found := value(point)) is not None)
            for run in entry.runs
        ]
        single = [line for line in single if line]
        if single:
            series.append(Series(entry.label, mean_line(single), color, tuple(single) if len(single) > 1 else ()))
    return Chart(title, "epoch", y_label, tuple(series), unit)


def loss_curves(title: str, groups: Sequence[Group], lines: Callable[[Run], Sequence[Point]]) -> Chart:
    return replace(curves(title, "", groups, lines, lambda point: point.values.get("loss")), log=True)


def colors(groups: Sequence[Group]) -> list[int]:
    """0, the baseline's, for the first plain group; 1, 2, … for the others."""
    plain = next((index for index, entry in enumerate(groups) if entry.is_plain), None)
    others = iter(range(1, len(groups) + 1))
    return [0 if index == plain else next(others) for index in range(len(groups))]


def mean_line(lines: Sequence[tuple[tuple[float, float], ...]]) -> tuple[tuple[float, float], ...]:
    """The mean of the lines at those x that all of them have."""
    maps = [dict(line) for line in lines]
    shared = [x for x, _ in lines[0] if all(x in other for other in maps)]
    return tuple((x, statistics.fmean(other[x] for other in maps)) for x in shared)


def has_radii(entry: Group) -> bool:
    return any(point.radii for point in entry.runs[0].evaluations)


def radii_chart(entry: Group) -> Chart:
    """The mean radius of every layer over time, of a group's first seed."""
    run = entry.runs[0]
    layers = dict.fromkeys(layer for point in run.evaluations for layer in point.radii)
    series = tuple(
        Series(layer, tuple((p.epoch, p.radii[layer]) for p in run.evaluations if layer in p.radii), number)
        for number, layer in enumerate(layers, 1)
    )
    seed = f", seed {run.recipe.get('seed', 0)}" if len(entry.runs) > 1 else ""
    return Chart(f"Radii: {entry.label}", "epoch", "", series, note=f"the mean of each layer{seed}")
