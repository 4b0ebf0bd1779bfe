"""Everything that a results folder holds: runs, tables, attacks, benchmarks, figures, and what had to be left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hyperball.report.files import RecordError, clipped, read_object, walk
from hyperball.report.kinds import Attack, Published, Record, Robustness, reader_of
from hyperball.report.records import (
    CONDITIONS,
    RUN_FILES,
    LeftOut,
    Run,
    holds_run,
    left_beside,
    left_closed,
    read_run,
    relative,
    root_of,
)
from hyperball.report.tables import protocol

Kind = TypeVar("Kind")
IGNORED = ("plan-", "cell.json")  # what a process was told to do, which its record says again
SUMMARY = {"cells", "done", "missing", "results"}  # a grid's own, which says again what its runs say
UNKNOWN = "no kind of record that this page knows: no `kind`, and not the fields of a table, attack or benchmark"


@dataclass
class Found:
    """What a folder holds, in the order of names."""

    root: Path
    runs: list[Run] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The records of one kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def __len__(self) -> int:
        return len(self.runs) + len(self.records)


def read_folder(folder: str | Path) -> Found:
    """All records in a folder and below; what cannot be read is named and left out."""
    found = Found(root_of(folder))
    for place in walk(found.root):
        if place.folder.name == "checkpoints":
            continue
        found.left_out += left_closed(place, found.root)
        if holds_run(place):
            add_run(found, place.folder)
        for name in place.files:
            if name.endswith(".json") and name not in (*RUN_FILES, CONDITIONS) and not name.startswith(IGNORED):
                add_record(found, place.folder / name)
    drop_copies_of_runs(found)
    drop_copies_of_attacks(found)
    return found


def add_run(found: Found, place: Path) -> None:
    name = relative(place, found.root)
    try:
        found.runs.append(read_run(place, name))
        found.left_out += left_beside(found.runs[-1])
    except RecordError as error:
        found.left_out.append(LeftOut(name, str(error)))


def add_record(found: Found, path: Path) -> None:
    name = relative(path, found.root)
    try:
        tree = read_object(path)
        reader = reader_of(tree, path)
        if reader is not None:
            found.records.append(reader(tree, path, name))
        elif not set(tree) >= SUMMARY:
            raise RecordError(UNKNOWN)
    except RecordError as error:
        found.left_out.append(LeftOut(name, str(error)))


def drop_copies_of_runs(found: Found) -> None:
    """Keep one of runs with one recipe, seed and results in a cell, so that a copy is no further seed.

    It is the first of those that were tested most.
    """
    tables = {record.folder for record in found.of(Published)}
    kept: dict[tuple[str, ...], Run] = {}
    copies: dict[Path, Run] = {}
    for run in sorted(found.runs, key=lambda run: -run.tested):
        results = json.dumps(run.results, sort_keys=True)
        key = (cell_of(run, tables), run.scale, run.status, protocol(run.recipe), clipped(run.seed), results)
        first = kept.setdefault(key, run)
        if first is not run:
            copies[run.folder] = run
            found.left_out.append(LeftOut(run.name, f"a copy of {first.name} (recipe, seed and results): counted once"))
    found.runs = [run for run in found.runs if run.folder not in copies]
    found.records = [record for record in found.records if not copies.keys() & set((found.root / record.name).parents)]


def cell_of(run: Run, tables: set[Path]) -> str:
    """The folder of a table's cell that a run lies in; nothing for a run of no table."""
    inside = [folder for folder in list(run.folder.parents) if folder in tables]
    return str(inside[0] / run.folder.relative_to(inside[0]).parts[0]) if inside else ""


def drop_copies_of_attacks(found: Found) -> None:
    """Keep the first of attack records and curves that say the same of one network."""
    owners = {run.folder: run for run in found.runs}
    kept: dict[tuple[str, ...], Record] = {}
    copies = set()
    for record in found.records:
        if isinstance(record, Attack | Robustness) and (recipe := recipe_of(record, owners)):
            held = record.points if isinstance(record, Robustness) else (record.clean, record.attacks, record.worst)
            text = json.dumps([recipe, record.conditions, held], sort_keys=True, default=str)
            first = kept.setdefault((type(record).__name__, text), record)
            if first is not record:
                copies.add(id(record))
                found.left_out.append(LeftOut(record.name, f"a copy of {first.name}: counted once"))
    found.records = [record for record in found.records if id(record) not in copies]


def owner(path: Path, owners: Mapping[Path, Run]) -> Run | None:
    """The run in whose folder, or in a folder of whose folder, a record lies."""
    return next((owners[folder] for folder in list(path.parents)[:3] if folder in owners), None)


def recipe_of(entry: Attack | Robustness, owners: Mapping[Path, Run]) -> dict[str, Any]:
    """The recipe of the network that was attacked; empty where nothing says so."""
    held = owner(entry.path, owners)
    recipe = entry.recipe if isinstance(entry, Attack) else {}
    return recipe or (held.recipe if held is not None else {})
