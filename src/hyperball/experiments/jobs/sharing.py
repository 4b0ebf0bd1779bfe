"""Runs that two tables have in common: trained for one of them, and taken over by the other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperball.experiments.jobs.job import Job
from hyperball.files import FileError, read_tree
from hyperball.on_disk import RECIPE, RECORD
from hyperball.training.storage.record import Record

LEFT = ("conditions.json", "robustness.json", "attacks", "*.lock", "log.txt", "cell.json")  # of a run that is copied


def take_over(jobs: Iterable[Job], out: Path) -> list[str]:
    """Copy to jobs that have not begun what tables beside `out` have finished of the same recipes; what was copied."""
    waiting = [job for job in jobs if job.trains and not job.folder.exists()]
    known = finished_beside(out) if waiting else {}
    said = []
    for job in waiting:
        asked = job.cell.recipe
        held = known.get(key_of(asked.to_dict()), [])
        source = next((folder for folder, tested in held if asked.log.conditions.items() <= tested.items()), None)
        if source is not None and copied(source, job):
            said.append(f"{job.cell.name}: taken over from {source}")
    return said


def finished_beside(out: Path) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """The folders of finished runs of other tables, and what their evaluations tested further, by their recipes."""
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for path in sorted(out.parent.glob(f"*/*/seed-*/{RECORD}")):
        if not path.is_relative_to(out):
            try:
                tree = read_tree(path.parent / RECIPE)
                tested = dict(tree["log"].get("conditions", {}))
                found.setdefault(key_of(tree), []).append((path.parent, tested))
            except (FileError, AttributeError, KeyError, TypeError, ValueError):
                continue
    return found


def key_of(tree: dict[str, Any]) -> str:
    """What of a recipe makes a run: all but how it was computed and logged, other than lengths of filters."""
    kept = {name: part for name, part in tree.items() if name not in ("engine", "log")}
    return json.dumps({**kept, "norms": tree["log"].get("norms", False)}, sort_keys=True)


def copied(source: Path, job: Job) -> bool:
    """Copy a run whole or not at all; it must be of the job's recipe by its record, too."""
    made = job.folder.with_name(f".{job.folder.name}.taken")
    shutil.rmtree(made, ignore_errors=True)
    try:
        shutil.copytree(source, made, ignore=shutil.ignore_patterns(*LEFT))
        record = Record.read(made)
        note = f"trained once for two tables: a copy of {'/'.join(source.parts[-3:])}"
        replace(record, experiment={}, notes=[*record.notes, note]).write(made)
        made.rename(job.folder)
    except (FileError, OSError):
        shutil.rmtree(made, ignore_errors=True)
        return False
    if job.is_done:
        return True
    shutil.rmtree(job.folder)
    return False
