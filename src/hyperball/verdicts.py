"""How numbers of ours are held against a paper's: chance, nearness and order, the same in every table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from hyperball.on_disk import is_number

LOST = "N/C"  # the papers' word for a network that did not converge
NEAR = 1.5  # points from a paper's number that count as reproduced
APART = 1.0  # points between two numbers of a paper whose order is looked at
WIDTH = 3.0  # standard errors from chance that are no better than it
GUESSING = 1e-6  # of the loss of guessing: a loss so near to it is that of a network whose logits are all alike
CLASSES = {
    "cifar10": 10, "cifar100": 100, "fashion-mnist": 10, "imagenet": 1000, "imagewoof": 10, "mnist": 10,
    "modelnet40": 40, "tiny-imagenet": 200,
}  # fmt: skip
COMMONEST = {"imagewoof": 429 / 3929, "mnist": 1135 / 10_000, "modelnet40": 100 / 2468}  # class of an uneven test set
CHANCE = (
    f'"{LOST}" is a network that did not converge: its numbers are not finite, its last top-1 accuracy is within '
    f"{WIDTH:g} standard errors of chance, 1 in so many classes or the share of the commonest, on the images tested, "
    "or its loss is that of guessing, the logarithm of the number of classes, to six digits"
)
COMPLEMENTS = {"error": "top1", "top5_error": "top5"}  # errors, and the accuracies that they are 100 % less
METRICS = {"error": "Test error, %", "top1": "Test accuracy, %", "top5_error": "Top-5 test error, %"}
Verdict = Literal["better", "near", "worse", "contradicts"]
AGREES: tuple[Verdict, ...] = ("better", "near")
CONTRADICTION = "the paper's did not converge, ours did"


def is_chance(top1: float, images: float, guesses: Sequence[float]) -> bool:
    """|top-1 - p| <= 3·sqrt(p·(1 - p) / n) with n images, for p one of the guesses or what lies between them."""
    widths = [WIDTH * math.sqrt(p * (1 - p) / images) for p in guesses]
    low, high = (sign * max(sign * p + width for p, width in zip(guesses, widths, strict=True)) for sign in (-1, 1))
    return low <= top1 <= high


def ends_at_chance(data: object, last: Mapping[str, Any], images: object = None) -> bool:
    """Whether a last evaluation on a known set is no better than guessing; `images` where it does not say how many."""
    classes = CLASSES.get(data) if isinstance(data, str) else None
    top1, count, loss = last.get("top1"), last.get("samples") or images, last.get("loss")
    if classes is None or not is_positive(count) or not (is_positive(top1) or top1 == 0):
        return False
    if is_number(loss) and math.isclose(loss, math.log(classes), rel_tol=GUESSING):
        return True
    even = 1 / classes
    return is_chance(top1, count, (even, COMMONEST.get(str(data), even)))


def is_positive(value: object) -> TypeGuard[float]:
    """Whether a value is a number > 0 of a bearable size."""
    return is_number(value) and value > 0


def percent_of(metric: str, results: Mapping[str, Any]) -> float | None:
    """A metric in percent, where results have it; errors are 100 less an accuracy."""
    value = results.get(COMPLEMENTS.get(metric, metric))
    if value is None:
        return None
    percent = float(100 * value)
    return 100 - percent if metric in COMPLEMENTS else percent


def is_error(metric: str) -> bool:
    """Whether less of a metric is better."""
    return metric.endswith("error") or metric == "ece"


def better(metric: str) -> str:
    """Which way is better, in words."""
    return "lower is better" if is_error(metric) else "higher is better"


def gain(metric: str, difference: float) -> float:
    """By how much ours is better than the paper's, from ours less the paper's."""
    return -difference if is_error(metric) else difference


def compares(published: float | str | None, difference: float | None, lost: bool) -> bool:
    """Whether ours, which was measured, can be held against the paper's: two numbers, or one that did not converge."""
    return difference is not None or published == LOST or (lost and published is not None)


def verdict(metric: str, published: float | str | None, difference: float | None, lost: bool) -> Verdict:
    """Ours against the paper's, where they compare.

    A network that is lost in both, be it with one seed of ours, is as published; lost here alone it is a miss, and one
    that is lost in the paper alone contradicts it.
    """
    if published == LOST:
        return "better" if lost else "contradicts"
    if difference is None or lost:
        return "worse"
    won = gain(metric, difference)
    return "better" if won >= 0 else "near" if won >= -NEAR else "worse"


def in_order(cells: Sequence[tuple[str, str, float, float]]) -> tuple[int, int]:
    """Of the pairs of cells (row, column, ours, paper's) that are looked at, how many are in the paper's order.

    Pairs are those in a row or column that the paper has a point or more apart. Columns that are conditions, such as
    attacks, are harder or easier for every row: there pairs are those in a column.
    """
    hard = conditions(column for _, column, _, _ in cells)
    gaps = [
        (a[2] - b[2], a[3] - b[3])
        for a, b in itertools.combinations(cells, 2)
        if a[1] == b[1] or (a[0] == b[0] and not {a[1], b[1]} & hard)
    ]
    wide = [(ours, theirs) for ours, theirs in gaps if abs(theirs) >= APART]
    return sum(ours * theirs > 0 for ours, theirs in wide), len(wide)


def conditions(columns: Iterable[str]) -> set[str]:
    """The columns that are conditions: shares in percent, and what other columns begin: "natural, fgsm"."""
    names = set(columns)
    return {name for name in names if name.endswith("%") or any(name.startswith(f"{base}, ") for base in names)}


def order_words(counts: tuple[int, int]) -> str:
    """How many pairs are in the paper's order, in words; nothing without a pair."""
    kept, total = counts
    words = "pairs in a row or column, a point or more apart in the paper, are in its order"
    return f"{kept} of {total} {words}" if total else ""
