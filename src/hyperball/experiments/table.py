"""A published table as data: its cells, each a recipe with the paper's number beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from hyperball.rows import nearest
from hyperball.training.recipe import Recipe

Scale = Literal["quick", "paper"]


@dataclass(frozen=True)
class Reduction:
    """What `--scale quick` makes of a recipe, and that in words."""

    apply: Callable[[Recipe], Recipe]
    words: str


@dataclass(frozen=True)
class Entry:
    """One number of a table.

    Args:
        row, column: where it stands.
        recipe: what trains the network, at the paper's scale.
        published: the paper's number, a word such as "N/C" (did not converge), or None where the paper has none.
        conditions: further tests of the trained network, by name: overrides of `recipe.data` such as {"outliers": 0.5}.
        published_conditions: the paper's number under each of them.
    """

    row: str
    column: str
    recipe: Recipe
    published: float | str | None = None
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published_conditions: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A name for folders: "tanh--cosine-relu"."""
        return f"{slug(self.row)}--{slug(self.column)}"


@dataclass(frozen=True)
class Experiment:
    """A published table, how its numbers are made, and what to know when reading them.

    Args:
        metric: a name of `hyperball.training.Metrics`, or "error" for 100 - top-1.
        reduction: what `--scale quick` makes of the recipes.
        notes: what the paper leaves open and what was chosen, and controls that it lacks.
    """

    name: str
    title: str
    source: str
    metric: str
    entries: tuple[Entry, ...]
    reduction: Reduction
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`entries` of {self.name} has {twice[0]!r} twice")

    def at(self, scale: Scale) -> Experiment:
        """The experiment with every recipe at this scale."""
        if scale == "paper":
            return self
        if scale != "quick":
            raise ValueError(f"`scale` must be 'quick' or 'paper', got {scale!r}")
        return replace(
            self, entries=tuple(replace(entry, recipe=self.reduction.apply(entry.recipe)) for entry in self.entries)
        )

    def select(self, wanted: Iterable[str]) -> Experiment:
        """The cells whose name, row or column is wanted; all of them where nothing is."""
        asked = tuple(wanted)
        if not asked:
            return self
        known = {text for entry in self.entries for text in (entry.name, entry.row, entry.column)}
        for text in asked:
            if text not in known:
                raise ValueError(f"{self.name} has no cell {text!r}; {nearest(text, sorted(known))}")
        chosen = [entry for entry in self.entries if {entry.name, entry.row, entry.column} & set(asked)]
        return replace(self, entries=tuple(chosen))


def slug(text: str) -> str:
    """Lower case, with a dash for whatever a file name should not hold."""
    return re.sub(r"[^a-z0-9_.=+]+", "-", text.lower()).strip("-")


@cache
def published() -> dict[str, Any]:
    """The papers' numbers, by table."""
    text = resources.files("hyperball.experiments").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables
