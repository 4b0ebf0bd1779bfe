"""Records that cannot be read: named on stderr, once each, and left out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def leave_out(path: Path, reason: str) -> None:
    print(f"left out {path}: {reason}", file=sys.stderr)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def odd_number(metrics: Any) -> str:
    """Why something is no mapping of names to numbers or None; "" where it is."""
    if not isinstance(metrics, Mapping):
        return f"must map names to numbers, got {metrics!r}"
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            return f"`{name}` must be a number, got {value!r}"
    return ""
