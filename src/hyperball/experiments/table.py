"""A published table as data: its cells, each a recipe with the paper's number beside it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from hyperball.experiments.plan import Attacks
from hyperball.experiments.protocols import shorter
from hyperball.experiments.scales import COMPRESSIONS, SCALES, Scale
from hyperball.on_disk import cell_name
from hyperball.training.recipe import Recipe

Kind = Literal["published", "control", "ours"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PUBLISHED = "the published schedule"


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
        kind: "published", a "control" that the paper lacks, or an operator of "ours".
        start: the row and column of the entry whose trained weights this one begins with.
        also: the paper's numbers of further metrics, by the names of `hyperball.training.Metrics`.
        also_conditions: those under each condition.
        attacks: what the trained network is attacked with.
    """

    row: str
    column: str
    recipe: Recipe
    published: float | str | None = None
    conditions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    published_conditions: Mapping[str, float | None] = field(default_factory=dict)
    kind: Kind = "published"
    start: tuple[str, str] | None = None
    also: Mapping[str, float] = field(default_factory=dict)
    also_conditions: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    attacks: Attacks | None = None

    @property
    def name(self) -> str:
        """A name for folders: "tanh--cosine-relu"."""
        return cell_name(self.row, self.column)


@dataclass(frozen=True)
class Finished:
    """A trained entry: where its run lies, and how it can be loaded again."""

    entry: Entry
    seed: int
    folder: Path
    data_root: str | None = None
    accelerator: str = "auto"


Draw = Callable[[Sequence[Finished]], Mapping[str, dict[str, Any]]]  # pictures by name, as plain data


@dataclass(frozen=True)
class Experiment:
    """A published table, how its numbers are made, and what to know when reading them.

    Args:
        metric: a name of `hyperball.training.Metrics`, "error" for 100 - top-1 or "top5_error" for 100 - top-5.
        reduction: what `--scale quick` makes of the recipes.
        notes: what the paper leaves open and what was chosen, and controls that it lacks.
        also: further metrics to show beside it.
        draws: pictures of the finished runs.
        family: the name that tables with the same runs share; None is the table's own.
        protocol: what the scale "paper" is, where it is not the published schedule.
        scale: that of the recipes.
    """

    name: str
    title: str
    source: str
    metric: str
    entries: tuple[Entry, ...]
    reduction: Reduction
    notes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    draws: tuple[Draw, ...] = ()
    family: str | None = None
    protocol: str = PUBLISHED
    scale: Scale = "paper"

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"`entries` of {self.name} has {twice[0]!r} twice")

    def at(self, scale: Scale) -> Experiment:
        """The experiment with every recipe at this scale: as published, its schedule compressed, or reduced.

        One that is at the scale stays as it is: a schedule is compressed once.
        """
        if scale not in SCALES:
            raise ValueError(f"`scale` must be one of {', '.join(SCALES)}, got {scale!r}")
        if scale == self.scale:
            return self
        if self.scale != "paper":
            raise ValueError(f"`scale` of {self.name}, which is at {self.scale}, must be {self.scale}, got {scale!r}")
        apply = self.reduction.apply if scale == "quick" else partial(shorter, factor=1 / COMPRESSIONS[scale])
        entries = tuple(rescaled(entry, scale, apply) for entry in self.entries)
        return replace(self, entries=entries, scale=scale)

    def words(self, scale: Scale) -> str:
        """What a scale makes of the published protocol."""
        if scale == "quick":
            return self.reduction.words
        coarse = sorted({entry.recipe.precision for entry in self.entries} - {"fp32"})
        precision = f"{' and '.join(coarse)} instead of the papers' fp32" if coarse else ""
        if scale == "paper":
            return "; ".join(filter(None, (self.protocol, precision)))
        told = f"the schedule compressed by {COMPRESSIONS[scale]}, milestones likewise"
        other = "" if self.protocol == PUBLISHED else self.protocol
        return "; ".join(filter(None, (told, other, precision, "all else as at the scale paper")))

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, and what networks are attacked with at this scale."""
        attacks = dict.fromkeys(entry.attacks.words() for entry in self.entries if entry.attacks is not None)
        return (*self.notes, *attacks)

    def select(self, wanted: Iterable[str]) -> Experiment:
        """The cells whose name, row, column or kind is wanted, and those that they begin with; all where nothing is."""
        asked = set(wanted)
        if not asked:
            return self
        known = {text for entry in self.entries for text in handles(entry)}
        for text in sorted(asked - known):
            raise ValueError(f"{self.name} has no cell {text!r}; {suggestion(text, self.entries)}")
        chosen = [entry for entry in self.entries if handles(entry) & asked]
        needed = {entry.start for entry in chosen}
        return replace(
            self, entries=tuple(e for e in self.entries if handles(e) & asked or (e.row, e.column) in needed)
        )


def rescaled(entry: Entry, scale: Scale, apply: Callable[[Recipe], Recipe]) -> Entry:
    """An entry with its recipe, and that of the network on which attacks are made, at a scale."""
    attacks = entry.attacks
    if attacks is not None:
        attacks = attacks.trained(apply(attacks.source))
        attacks = attacks.reduced() if scale == "quick" else attacks
    return replace(entry, recipe=apply(entry.recipe), attacks=attacks)


def handles(entry: Entry) -> set[str]:
    """What `--cells` may call an entry."""
    return {entry.name, entry.row, entry.column, entry.kind}


def suggestion(text: str, entries: Sequence[Entry]) -> str:
    """What `--cells` may have meant: the nearest name in any case, else all rows, columns and kinds."""
    known = {name.lower(): name for entry in entries for name in sorted(handles(entry))}
    close = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {known[close[0]]!r}?"
    parts = {name: dict.fromkeys(getattr(entry, name) for entry in entries) for name in ("row", "column", "kind")}
    told = ", ".join(f"{name}s ({'; '.join(names)})" for name, names in parts.items())
    return f"known: {told}, and cells such as {entries[0].name}"


@cache
def published() -> dict[str, Any]:
    """The papers' numbers, by table."""
    text = resources.files("hyperball.experiments").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables
