"""What a conversion did: as data, and printed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Replaced:
    """One layer that was replaced: its path, its class before, and what it is."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Kept:
    """One layer that was left as it is, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Difference:
    """max |y − y'| over the outputs before and after on a batch, and that relative to max |y|."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class Report:
    """Layers replaced and kept, parameters before and added, and the difference of the outputs on a batch, if any."""

    model: str
    operator: str | None
    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]
    parameters: int
    added_parameters: int
    difference: Difference | None = None
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Lists, texts, numbers and None alone, ready for JSON; numbers that are not finite are texts ("nan")."""
        plain = asdict(self)
        gap = plain["difference"] or {}
        plain["difference"] = {key: one if math.isfinite(one) else str(one) for key, one in gap.items()} or None
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    def __str__(self) -> str:
        share = 100.0 * self.added_parameters / max(self.parameters, 1)
        lines = [
            f"{self.model}: {len(self.replaced)} layers replaced, {len(self.kept)} kept"
            + (f"; operator {self.operator}" if self.operator else ""),
            f"  parameters: {self.parameters:,} before, {self.added_parameters:,} added ({share:.3g} %)",
        ]
        lines += [f"  {count} × {change}" for change, count in self._changes().items()]
        lines += [f"  kept: {names} ({reason})" for reason, names in self._reasons().items()]
        if self.difference is not None:
            relative, absolute = self.difference.relative, self.difference.absolute
            lines.append(
                f"  output difference on the batch: {absolute:.3g} at most, {relative:.3g} of the largest output"
            )
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def _changes(self) -> Counter[str]:
        return Counter(f"{entry.before} → {entry.after}" for entry in self.replaced)

    def _reasons(self) -> dict[str, str]:
        """The kept layers' names by reason, shortened where there are many."""
        groups: dict[str, list[str]] = {}
        for entry in self.kept:
            groups.setdefault(entry.reason, []).append(entry.name or "the model")
        return {reason: shortened(names) for reason, names in groups.items()}


def shortened(names: list[str], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
