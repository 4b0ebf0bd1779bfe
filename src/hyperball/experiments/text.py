"""Numbers over seeds and tables of them, for a terminal."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

NOTHING = "–"
DIVERGED = "N/C"  # the papers' word for a network that did not converge
SCATTERED = 5.0  # points of standard deviation beyond which a mean describes no single network
APART = 1.0  # points between two numbers of a paper whose order is looked at


def spread(values: Sequence[float], diverged: int = 0, digits: int = 2) -> str:
    """mean ± standard deviation, and how many did not converge; a dash without a value.

    Where seeds are far apart each is told: "12.67 ± 21.94 {0.0, 0.0, 38.0}".
    """
    if not values:
        return DIVERGED if diverged else NOTHING
    told = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        deviation = statistics.stdev(values)
        told += f" ± {deviation:.{digits}f}"
        if deviation > SCATTERED:
            told += f" {{{', '.join(f'{value:.1f}' for value in values)}}}"
    return f"{told} ({diverged} {DIVERGED})" if diverged else told


def told_order(cells: Sequence[tuple[str, str, float, float]]) -> str:
    """How many pairs of cells (row, column, ours, paper's) are in the paper's order, in words; nothing without a pair.

    Pairs are those in a row or column that the paper has a point or more apart. Columns that are conditions, such as
    attacks, are harder or easier for every row: there pairs are those in a column.
    """
    names = {column for _, column, _, _ in cells}
    hard = {name for name in names if name.endswith("%") or any(name.startswith(f"{base}, ") for base in names)}
    pairs = [
        (a[2] - b[2], a[3] - b[3])
        for a, b in itertools.combinations(cells, 2)
        if a[1] == b[1] or (a[0] == b[0] and not {a[1], b[1]} & hard)
    ]
    wide = [(ours, theirs) for ours, theirs in pairs if abs(theirs) >= APART]
    kept = sum(ours * theirs > 0 for ours, theirs in wide)
    words = "pairs in a row or column, a point or more apart in the paper, are in its order"
    return f"{kept} of {len(wide)} {words}" if wide else ""


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
