"""Lines of runs over their steps: the mean of the seeds, and their standard deviation as a band."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hyperball.report.charts import COLORS, Chart, Series
from hyperball.report.records import Point, Run
from hyperball.report.tables import family_of

Entry = TypeVar("Entry")
MOST_LINES = 12
BAND = "mean, and a band of ± one standard deviation over seeds"
Points = tuple[tuple[float, float], ...]
Value = Callable[[Point], float | None]

# The same operator has the same color in every picture; 0 is for what others are compared with.
COLOR_OF = {
    "baseline": 0, "max": 0, "tanh": 1, "huber": 1, "ball": 2, "welsch": 2, "sphere": 3, "quadratic": 3,
    "linear": 4, "pseudo_huber": 4, "seg": 5, "truncated_quadratic": 5, "log": 6, "mix": 7, "barron": 8,
    "l1_ball": 1, "l1_sphere": 2, "l2_ball": 3, "l2_sphere": 4, "linf_ball": 7, "linf_sphere": 8,
}  # fmt: skip


def colors(names: Sequence[str]) -> list[int]:
    """A color for each name: that of the operator it begins with, else the next one that no operator here has."""
    wanted = [COLOR_OF.get(family_of(name)) for name in names]
    free = [color for color in range(1, COLORS) if color not in wanted] or list(range(1, COLORS))
    following = itertools.cycle(free)
    return [next(following) if color is None else color for color in wanted]


def first_of(
    entries: Sequence[Entry], most: int, word: str, name: Callable[[Entry], str] | None = None
) -> tuple[Sequence[Entry], str]:
    """The first entries that a picture has room for, and "12 of 16 lines" where there are more, without which."""
    if len(entries) <= most:
        return entries, ""
    without = "" if name is None else f", without {'; '.join(map(name, entries[most:]))}"
    return entries[:most], f"{most} of {len(entries)} {word}{without}"


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
    """One line a group (name, operator, runs), at most twelve; seeds that share no step have no mean to draw."""
    found = []
    for name, operator, runs in groups:
        held = [line for run in runs if (line := over_steps(run, points, value))]
        found += [(name, operator, len(held), *mean_and_band(held))] if held else []
    lines = [entry for entry in found if entry[3]]
    drawn, cut = first_of(lines, MOST_LINES, "lines", lambda line: line[0])
    chosen = colors([operator or name for name, operator, *_ in drawn])
    series = tuple(
        Series(name, mean, color, band=band, operator=operator)
        for (name, operator, _, mean, band), color in zip(drawn, chosen, strict=True)
    )
    apart = len(found) - len(lines)
    notes = [BAND if any(seeds > 1 for _, _, seeds, *_ in drawn) else "", cut]
    notes.append(f"not drawn: {apart} whose seeds share no step" if apart else "")
    return Chart(title, "step", label, series, note="; ".join(filter(None, notes)), **options)  # type: ignore[arg-type]


def error(point: Point) -> float | None:
    top1 = point.values.get("top1")
    return None if top1 is None else 100 * (1 - top1)


def accuracy(point: Point) -> float | None:
    top1 = point.values.get("top1")
    return None if top1 is None else 100 * top1


def trained(point: Point, is_error: bool) -> float | None:
    """The error, or the accuracy, in percent, of the batches of training before a report."""
    share = point.values.get("accuracy")
    return None if share is None else 100 * (1 - share if is_error else share)


def loss(point: Point) -> float | None:
    return point.values.get("loss")
