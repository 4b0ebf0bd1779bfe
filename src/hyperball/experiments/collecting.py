"""Records of finished cells, copied to where they are kept: small, and never written over."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball.experiments.attack_jobs import doubts_of
from hyperball.experiments.broken import leave_out
from hyperball.experiments.pictures import convergence, filter_lengths, learned_radii
from hyperball.experiments.reproduce import CONDITIONS, PICTURES, as_data, compare, conditions_in, finished_of, jobs_of
from hyperball.experiments.robustness_record import ROBUSTNESS
from hyperball.experiments.runners import Job, foreign
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Draw, Experiment, Finished
from hyperball.training.files import FileError, read_tree, write_bytes, write_json
from hyperball.training.record import METRICS, RECIPE, RECORD, Record, encoded, read_metrics, thinned

TABLE = "table.json"
LINES = 60  # of every kind, that a kept metrics.jsonl holds
FROM_RECORDS: tuple[Draw, ...] = (convergence, filter_lengths, learned_radii)  # other pictures need weights


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
        difference = foreign(known, job.cell.recipe)
    except FileError as error:
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


def keep_pictures(experiment: Experiment, pictures: Sequence[Path], out: Path) -> list[str]:
    """Draw curves from all records that are kept, copy pictures of networks; sentences on what was left as it is.

    Curves that are there are not replaced by fewer, a network's picture not by that of another seed.
    """
    said, drawn = [], dict[str, dict[str, Any]]()
    finished = finished_of(experiment, jobs_of(experiment, seeds_in(out), out))
    for make in experiment.draws:
        if make in FROM_RECORDS:
            drawn |= make([run for run in finished if is_drawable(make, run)])
    for name, picture in drawn.items():
        path = out / PICTURES / f"{name}.json"
        lost = lost_series(path, picture)
        if lost:
            said.append(f"kept {path} as it is: the records in {out} have no curve of {lost[0]}")
        elif picture["series"]:
            write_json(path, {"experiment": experiment.name, **picture})
    for path in pictures:
        target = out / PICTURES / path.name
        if path.stem not in drawn and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return said


def is_drawable(make: Draw, run: Finished) -> bool:
    """Whether a run's metrics can be drawn; a run whose metrics are broken is named."""
    try:
        make([run])
    except (FileError, KeyError, TypeError, ValueError, AttributeError) as error:
        leave_out(run.folder / METRICS, f"it cannot be drawn ({type(error).__name__}: {error})")
        return False
    return True


def lost_series(path: Path, picture: Mapping[str, Any]) -> list[str]:
    """The series of a picture's file that the one which would take its place lacks."""
    try:
        held = [str(series["name"]) for series in read_tree(path)["series"]]
    except (FileError, KeyError, TypeError):
        return []
    names = {series["name"] for series in picture["series"]}
    return [name for name in held if name not in names]


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
