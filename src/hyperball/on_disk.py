"""What runs, records and tables are called on disk, and what counts as a number there.

Those who write files and those who read them without torch share these words, so that they cannot come to differ.
"""

from __future__ import annotations

import re
from typing import Any, TypeGuard

RECORD, RECIPE, METRICS, CHECKPOINTS = "record.json", "recipe.json", "metrics.jsonl", "checkpoints"
FORMAT = 1  # of a record
FINISHED, DIVERGED = "finished", "diverged"  # the status of a record; a diverged network has no results
CHANGEABLE = ("log.", "engine.")  # parts of a recipe that do not determine numbers
LARGEST = 1e100  # what lies beyond is no measurement, and would overflow the arithmetic of an axis


def cell_name(row: str, column: str) -> str:
    """The folder of a cell in that of its table."""
    return f"{slug(row)}--{slug(column)}"


def slug(text: str) -> str:
    """Lower case, with a dash for whatever a file name should not hold."""
    return re.sub(r"[^a-z0-9_.=+]+", "-", text.lower()).strip("-")


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of a bearable size, which NaN and true are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def deeper_than(tree: Any, limit: int) -> bool:
    """Whether mappings and lists are nested deeper, without recursion and with shared parts seen once a level."""
    level = [tree]
    for _ in range(limit + 1):
        found = {
            id(child): child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        }
        level = list(found.values())
    return bool(level)
