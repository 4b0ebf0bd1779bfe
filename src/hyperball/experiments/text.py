"""Numbers over seeds and tables of them, for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NOTHING = "–"
DIVERGED = "N/C"  # the papers' word for a network that did not converge


def spread(values: Sequence[float], diverged: int = 0, digits: int = 2) -> str:
    """mean ± standard deviation, and how many did not converge; a dash without a value."""
    if not values:
        return DIVERGED if diverged else NOTHING
    told = f"{statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        told += f" ± {statistics.stdev(values):.{digits}f}"
    return f"{told} ({diverged} {DIVERGED})" if diverged else told


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
