"""Lines of runs over their steps: the mean of the seeds, and their standard deviation as a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from hyperball.report.charts import Chart, Series
from hyperball.report.records import Point, Run

MOST_LINES = 12
Points = tuple[tuple[float, float], ...]
Value = Callable[[Point], float | None]

# The same operator has the same color in every picture; 0 is for what others are compared with.
COLOR_OF = {
    "plain": 0, "nn.Conv2d": 0, "nn.Linear": 0,
    "baseline": 0, "max": 0, "none": 0, "tanh": 1, "huber": 1, "ball": 2, "welsch": 2, "sphere": 3,
    "mean": 3, "quadratic": 3, "linear": 4, "pseudo_huber": 4, "seg": 5, "truncated_quadratic": 5, "log": 6, "mix": 7,
    "barron": 8,
}  # fmt: skip


def colors(names: Sequence[str]) -> list[int]:
    """A color for each name: that of the operator it begins with where that is free, else the next free one."""
    wanted = [COLOR_OF.get(name.replace(",", " ").replace("(", " ").split(" ")[0]) for name in names]
    taken: set[int] = set()
    chosen: list[int | None] = []
    for color in wanted:
        chosen.append(None if color is None or color in taken else color)
        taken |= {color} if color is not None else set()
    free = iter(color for color in range(1, len(names) + 20) if color not in taken)
    return [1 + (next(free) - 1) % 9 if color is None else color for color in chosen]


def mean_and_band(lines: Sequence[Points]) -> tuple[Points, tuple[float, ...]]:
    """The mean of lines at those x that all of them have, and the standard deviation there (nothing for one line)."""
    maps = [dict(line) for line in lines]
    shared = [x for x, _ in lines[0] if all(x in other for other in maps)]
    columns = [[other[x] for other in maps] for x in shared]
    means = [math.fsum(column) / len(column) for column in columns]
    band = tuple(map(deviation, columns, means)) if len(lines) > 1 else ()
    return tuple(zip(shared, means)), band


def deviation(values: Sequence[float], mean: float) -> float:
    """√(Σ (x − mean)² / (n − 1)), which `statistics.stdev` computes in fractions, far slower than a page needs."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def over_steps(run: Run, points: Callable[[Run], Iterable[Point]], value: Value) -> Points:
    return tuple((point.step, found) for point in points(run) if (found := value(point)) is not None)


def run_chart(
    title: str,
    label: str,
    groups: Sequence[tuple[str, str, Sequence[Run]]],
    points: Callable[[Run], Iterable[Point]],
    value: Value,
    **options: object,
) -> Chart:
    """One line a group (name, operator, runs), at most twelve."""
    drawn = [entry for entry in groups if any(over_steps(run, points, value) for run in entry[2][:1])]
    series = []
    for (name, operator, runs), color in zip(drawn[:MOST_LINES], colors([entry[0] for entry in drawn]), strict=False):
        mean, band = mean_and_band([line for run in runs if (line := over_steps(run, points, value))])
        series.append(Series(name, mean, color, band=band, operator=operator))
    seeds = max((len(runs) for _, _, runs in drawn), default=0)
    notes = ["mean, and a band of ± one standard deviation over seeds"] if seeds > 1 else []
    notes += [f"{MOST_LINES} of {len(drawn)} lines"] if len(drawn) > MOST_LINES else []
    return Chart(title, "step", label, tuple(series), note="; ".join(notes), **options)  # type: ignore[arg-type]


def error(point: Point) -> float | None:
    top1 = point.values.get("top1")
    return None if top1 is None else 100 * (1 - top1)


def accuracy(point: Point) -> float | None:
    top1 = point.values.get("top1")
    return None if top1 is None else 100 * top1


def loss(point: Point) -> float | None:
    return point.values.get("loss")


def radii_chart(name: str, run: Run) -> Chart:
    """The mean radius of every layer over the steps of one run."""
    layers = list(dict.fromkeys(layer for point in run.evaluations for layer in point.radii))
    series = tuple(
        Series(layer, tuple((p.step, p.radii[layer]) for p in run.evaluations if layer in p.radii), number)
        for number, layer in enumerate(layers[:MOST_LINES], 1)
    )
    more = f"; {MOST_LINES} of {len(layers)} layers" if len(layers) > MOST_LINES else ""
    return Chart(f"Radii: {name}", "step", "", series, note=f"the mean of each layer, seed {run.seed}{more}")
