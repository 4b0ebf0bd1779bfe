"""Rows and columns of a table as its paper prints them: one place a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_COLUMNS, MOST_CONDITIONS = 6, 12
CLEAN = "test set"  # what a column is called that adds no condition to others which do


@dataclass(frozen=True)
class Layout:
    """Rows, columns, and where each place's number stands among all."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    places: dict[tuple[str, str], int]


def layout(cells: Sequence[tuple[str, str, str]]) -> Layout | None:
    """The layout of (row, column, condition); None where they would not fit or a place would hold two numbers.

    Conditions such as attacks become the columns where there are any, and the columns a part of the rows.
    """
    turned = any(condition for _, _, condition in cells)
    many = len({column for _, column, _ in cells}) > 1
    places: dict[tuple[str, str], int] = {}
    for at, (row, column, condition) in enumerate(cells):
        whole = f"{row}, {column}" if turned and many else row
        places[whole, (condition or CLEAN) if turned else column] = at
    rows, columns = (tuple(dict.fromkeys(place[i] for place in places)) for i in (0, 1))
    fits = 2 <= len(columns) <= (MOST_CONDITIONS if turned else MOST_COLUMNS)
    return Layout(rows, columns, places) if fits and len(rows) >= 2 and len(places) == len(cells) else None
