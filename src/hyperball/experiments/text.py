"""Numbers over seeds, and tables of them, as texts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hyperball.verdicts import LOST

NOTHING = "–"
APART = 1.5
SCATTERED = 5.0  # points of standard deviation beyond which a mean describes no single network


def spread(values: Sequence[float], diverged: int = 0, digits: int = 2) -> str:
    """mean ± standard deviation, and how many did not converge; a dash without a value.

    Where seeds are far apart each is told: "12.67 ± 21.94 {0.0, 0.0, 38.0}".
    """
    if not values:
        return LOST if diverged else NOTHING
    told = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        deviation = statistics.stdev(values)
        told += f" ± {deviation:.{digits}f}"
        if deviation > SCATTERED:
            told += f" {{{', '.join(f'{value:.1f}' for value in values)}}}"
    return f"{told} ({diverged} {LOST})" if diverged else told


def part_of(values: Sequence[float], count: int, digits: int = 2) -> str:
    """The mean of what so many networks have, and of how many where some lack it: "52.00 [1 of 3]"."""
    if not values:
        return NOTHING
    told = f"{statistics.fmean(values):.{digits}f}"
    return told if len(values) >= count else f"{told} [{len(values)} of {count}]"


def beside(values: Sequence[float], paper: float | None, count: int, diverged: int = 0) -> str:
    """What so many networks have, the paper's number in parentheses, and of how many where some lack it."""
    told = spread(values, diverged)
    if paper is not None:
        told += f" ({paper:g})"
    held = len(values) + diverged
    return f"{told} [{held} of {count}]" if 0 < held < count else told


def seed_words(counts: Iterable[int]) -> str:
    """Over how many seeds numbers were measured: "3 seeds", "1 to 3 seeds"; nothing without a number."""
    told = sorted(set(counts))
    if len(told) > 1:
        return f"{told[0]} to {told[-1]} seeds"
    return f"{told[0]} seed{'' if told[0] == 1 else 's'}" if told else ""


def far_apart(budgets: Sequence[float]) -> bool:
    """Whether the largest of some budgets is more than 1.5 times the smallest: their mean is that of no network."""
    return max(budgets) > APART * min(budgets)


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of texts as aligned columns, the first so many of them to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        parts = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
