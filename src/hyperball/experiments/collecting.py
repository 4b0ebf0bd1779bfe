"""Records of finished cells, copied to where they are kept: small, and never written over."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyperball.experiments.attack_jobs import doubts_of
from hyperball.experiments.reproduce import CONDITIONS, PICTURES, as_data, compare, conditions_in, jobs_of
from hyperball.experiments.robustness_record import ROBUSTNESS
from hyperball.experiments.runners import Job
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Experiment
from hyperball.training.files import FileError, read_tree, write_bytes, write_json
from hyperball.training.folder import unlike
from hyperball.training.recipe import Recipe
from hyperball.training.record import METRICS, RECIPE, RECORD, Record, encoded, read_metrics, thinned

TABLE = "table.json"
LINES = 60  # of every kind, that a kept metrics.jsonl holds


def collect(jobs: Sequence[Job], out: Path) -> list[str]:
    """Copy what finished runs say of themselves, without their weights; sentences on what was left as it is.

    A record that is there stays: one of the same recipe is only completed, one of another protocol is named.
    """
    said = []
    for job in jobs:
        if job.is_done and job.trains:
            kept = keep(job, out / job.cell.name)
            said += [kept] if kept else []
    return said


def keep(job: Job, target: Path) -> str:
    """Copy one run, or complete its copy; why it was not, where it was not."""
    if (target / RECORD).exists():
        reason = another(job, target)
        if reason:
            return f"kept {target} as it is: {reason}"
    else:
        target.mkdir(parents=True, exist_ok=True)
        lines = thin(read_metrics(job.folder / METRICS))
        write_bytes(target / METRICS, "".join(encoded(line) for line in lines).encode())
        write_json(target / RECIPE, job.cell.recipe.to_dict())
        shutil.copyfile(job.folder / RECORD, target / RECORD)
    kept = conditions_in(target)
    measured = {**conditions_in(job.folder), **kept}
    if measured != kept:
        write_json(target / CONDITIONS, measured)
    if (job.folder / ROBUSTNESS).exists():  # it grows with every attack
        shutil.copyfile(job.folder / ROBUSTNESS, target / ROBUSTNESS)
    return ""


def another(job: Job, target: Path) -> str:
    """Why a kept record is not that of a job's run, or nothing if it is."""
    try:
        known = Record.read(target)
        difference = unlike(Recipe.from_dict(known.recipe), job.cell.recipe)
    except (FileError, ValueError) as error:
        return str(error)
    if difference:
        return f"it is of another protocol: {difference}"
    own = Record.read(job.folder)
    if (known.status, known.results) != (own.status, own.results):
        return "it is another run of the same recipe"
    return ""


def thin(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """A few lines of every kind, in the order of steps."""
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    kept = {id(line) for kind in kinds for line in thinned([line for line in lines if line["kind"] == kind], LINES)}
    return [line for line in lines if id(line) in kept]


def keep_pictures(pictures: Sequence[Path], out: Path) -> None:
    """Copy pictures; one that is there is replaced, as it is drawn from the records."""
    for path in pictures:
        (out / PICTURES).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / PICTURES / path.name)


def write_table(experiment: Experiment, scale: Scale, folder: Path, shrinks: bool = True) -> str:
    """Write table.json: every number of the table beside what the folder's records say, over all seeds found there.

    Unless it `shrinks`, a table that holds more is left as it is, which is said.
    """
    jobs = jobs_of(experiment, seeds_in(folder), folder)
    path = folder / (TABLE if experiment.family is None else f"{experiment.name}.json")
    tree = as_data(experiment, scale, compare(experiment, jobs), doubts_of(experiment, jobs))
    lost = [] if shrinks else fewer(path, tree)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"kept {path} as it is: the records in {folder} have fewer numbers of {lost[0]}{more}"
    write_json(path, tree)
    return ""


def fewer(path: Path, tree: dict[str, Any]) -> list[str]:
    """The cells of which a table holds more values than the one that would take its place."""
    try:
        held = {(n["row"], n["column"]): len(n["values"]) for n in read_tree(path)["numbers"]}
    except (FileError, KeyError, TypeError):
        return []
    counts = {(n["row"], n["column"]): len(n["values"]) for n in tree["numbers"]}
    return [f"{row}, {column}" for (row, column), count in held.items() if counts.get((row, column), 0) < count]


def seeds_in(folder: Path) -> list[int]:
    """The seeds of the runs in a table's folder."""
    found = {path.name.removeprefix("seed-") for path in folder.glob("*/seed-*")}
    return sorted(int(text) for text in found if text.isdecimal())
