"""Everything that a results folder holds: runs, tables, attacks, benchmarks, figures, and what had to be left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from hyperball.report.files import RecordError, read_object, walk
from hyperball.report.kinds import Record, reader_of
from hyperball.report.records import CONDITIONS, RUN_FILES, LeftOut, Run, holds_run, read_run, relative

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
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder")
    found = Found(root)
    for place, files in walk(root):
        if place.name == "checkpoints":
            continue
        if holds_run(place, files):
            add_run(found, place)
        for name in files:
            if name.endswith(".json") and name not in (*RUN_FILES, CONDITIONS) and not name.startswith(IGNORED):
                add_record(found, place / name)
    return found


def add_run(found: Found, place: Path) -> None:
    name = relative(place, found.root)
    try:
        found.runs.append(read_run(place, name))
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
