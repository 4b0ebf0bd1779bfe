"""The scales of a table, from the shortest to the published one."""

from __future__ import annotations

from typing import Literal, get_args

Scale = Literal["quick", "quarter", "half", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
COMPRESSIONS: dict[str, int] = {"quarter": 4, "half": 2}
