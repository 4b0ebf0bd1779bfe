"""Records of finished cells, copied to where they are kept: small, whole, and never written over."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperball.experiments.jobs.drawing import PICTURES, drawn_by, finished_of, write_picture
from hyperball.experiments.jobs.ends import reason_of
from hyperball.experiments.jobs.job import Job, another
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.pictures import (
    CURVES,
    convergence,
    errors_under_conditions,
    filter_lengths,
    learned_radii,
    under_conditions,
)
from hyperball.experiments.records.broken import damage
from hyperball.experiments.records.conditions import CONDITIONS, conditions_in
from hyperball.experiments.records.robustness import ROBUSTNESS
from hyperball.experiments.results.annotation import annotate
from hyperball.experiments.results.comparison import as_data, compare, doubts_of
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Draw, Experiment
from hyperball.experiments.tables import TRAINED, whole_of
from hyperball.files import FileError, read_tree, write_bytes, write_json
from hyperball.on_disk import METRICS, RECIPE, RECORD
from hyperball.training.storage.record import Record, encoded, read_metrics, thinned

TABLE = "table.json"
NOT_KEPT = "could not keep"
SEEDS = range(2**63)  # that a recipe may have
LINES = 60  # of every kind, that a kept metrics.jsonl holds
FROM_RECORDS: tuple[Draw, ...] = (  # other pictures need weights
    convergence, errors_under_conditions, filter_lengths, learned_radii, under_conditions,
)  # fmt: skip


@dataclass
class Keeper:
    """Writes down what the runs of a table in `out` found, and keeps it in `kept` where that is a folder.

    Both may be done at any time and again: as cells end, and when the work ends or is interrupted. Folders that cannot
    be made are refused before the work.
    """

    table: Experiment
    scale: Scale
    out: Path
    kept: Path | None
    told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for folder in filter(None, (self.out, self.kept)):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} cannot be written to")

    def keep_cells(self, jobs: Sequence[Job]) -> None:
        """Say in finished records which cells they are, and keep them."""
        with named(self.out):
            annotate(self.table, self.scale, jobs)
        self.say([] if self.kept is None else collect(jobs, self.kept))

    def keep_all(self, jobs: Sequence[Job]) -> None:
        """All of these cells, the table over all that lie there, and the pictures."""
        self.keep_cells(jobs)
        with named(self.out):
            write_table(self.table, self.scale, self.out)
        if self.kept is not None:
            self.keep_numbers(self.kept)

    def keep_numbers(self, kept: Path) -> None:
        """The table and the pictures beside the kept records; where these cannot be kept, the work goes on."""
        pictures = sorted((self.out / PICTURES).glob("*.json"))
        try:
            self.say(keep_pictures(whole_of(self.table).at(self.scale), pictures, kept))
            self.say([write_table(self.table, self.scale, kept, shrinks=False)])
        except OSError as error:
            self.say([f"{NOT_KEPT} the table and the pictures in {kept}: {error.strerror or error}"])

    @property
    def has_lost(self) -> bool:
        """Whether the records of a run could not be kept."""
        return any(sentence.startswith(NOT_KEPT) for sentence in self.told)

    def say(self, sentences: Sequence[str]) -> None:
        """Print what was not said before."""
        for sentence in filter(None, sentences):
            if sentence not in self.told:
                self.told.add(sentence)
                print(sentence, flush=True)


@contextmanager
def named(folder: Path) -> Iterator[None]:
    """An error of the system that names no file, such as a full disk, names the folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def collect(jobs: Sequence[Job], out: Path) -> list[str]:
    """Copy what finished runs say of themselves, without their weights; sentences on what was not copied.

    A record that is there stays: one of the same run is completed, one of another run or protocol is named. One that
    cannot be read is none, and replaced.
    """
    said = []
    for job in jobs:
        if job.trains and job.is_done:
            target = out / job.cell.name
            try:
                said += keep(job, target)
            except Exception as error:
                said.append(f"{NOT_KEPT} {job.folder} as {target}: {reason_of(error)}")
    return said


def keep(job: Job, target: Path) -> list[str]:
    """Copy one run, or complete its copy: whatever is not there or cannot be read, the record last; what is to say."""
    if problem := damage(job.folder):
        return [f"{NOT_KEPT} {job.folder}: {problem}"]
    if reason := another(job, target):
        return [f"kept {target} as it is: {reason}"]
    said = keep_metrics(job.folder / METRICS, target / METRICS)
    is_new, broken = not (target / RECORD).exists(), damage(target)
    if not (target / RECIPE).exists() or broken or replace(job, folder=target).missing():
        write_json(target / RECIPE, portable(job.cell.recipe.to_dict()))
    if broken:
        keep_record(job, target)
        said += [] if is_new else [f"replaced {target / RECORD}, which could not be read: {broken}"]
    kept = conditions_in(target)
    measured = {**conditions_in(job.folder), **kept}
    if measured != kept:
        write_json(target / CONDITIONS, measured)
    return said + keep_attacks(job.folder / ROBUSTNESS, target / ROBUSTNESS)


def keep_record(job: Job, target: Path) -> None:
    """Copy the record of a run, without the folder in which the network lay that it begins with.

    Where that network is another run than the one that is kept beside it, the copy says so.
    """
    if job.cell.recipe.start.weights is None:
        write_bytes(target / RECORD, (job.folder / RECORD).read_bytes())
        return
    tree = read_tree(job.folder / RECORD)
    strange = [note for name in job.needs if (note := another_start(name, job.folder, target))]
    write_json(
        target / RECORD, {**tree, "recipe": portable(tree["recipe"]), "notes": [*tree.get("notes", ()), *strange]}
    )


def another_start(name: str, folder: Path, target: Path) -> str:
    """That the cell with which a run begins is another run than the one kept beside it; nothing where it is that."""
    own, kept = folder.parents[1] / name, target.parents[1] / name
    if damage(own) or damage(kept):
        return ""
    own_results, kept_results = Record.read(own).results, Record.read(kept).results
    if own_results == kept_results:
        return ""
    told = [(results.get("last") or {}).get("top1") for results in (own_results, kept_results)]
    shares = [f"{value:.4f}" if isinstance(value, int | float) else "none" for value in told]
    return f"it begins with another run of {name} than the one kept beside it: top-1 {shares[0]} instead of {shares[1]}"


def portable(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe's tree in which the network that a run begins with is named by its cell and seed, wherever it lay."""
    start = recipe.get("start") or {}
    if start.get("weights") is None:
        return recipe
    return {**recipe, "start": {**start, "weights": "/".join(Path(start["weights"]).parts[-2:])}}


def keep_attacks(source: Path, target: Path) -> list[str]:
    """Copy what attacks found, which grows with every part, unless a copy holds what it lacks or other numbers."""
    if not source.exists():
        return []
    found, kept = found_by_attacks(source), found_by_attacks(target)
    lost = [kind_and_name for kind_and_name, numbers in kept.items() if found.get(kind_and_name) != numbers]
    if lost:
        return [f"kept {target} as it is: {source} lacks what that has of {lost[0][1]}, or has other numbers"]
    write_bytes(target, source.read_bytes())
    return []


def found_by_attacks(path: Path) -> dict[tuple[str, str], Any]:
    """What a record says of attacks at one budget and at many, by kind and name; nothing where it cannot be read."""
    try:
        tree = read_tree(path)
        return {
            (kind, line["name"]): [line[key] for key in ("attack", "epsilon", "images", "accuracy")]
            for kind in ("attacks", "sweeps")
            for line in tree[kind]
        }
    except (FileError, KeyError, TypeError):
        return {}


def keep_metrics(source: Path, target: Path) -> list[str]:
    """Copy a few lines of a run's metrics, unless a copy that can be read is there; why not, where they are broken."""
    try:
        if target.exists() and read_metrics(target):
            return []
    except FileError:
        pass
    try:
        lines = thin(read_metrics(source))
    except FileError as error:
        return [f"kept no {METRICS} of {source.parent}: {error}"]
    if lines or not target.exists():
        write_bytes(target, "".join(encoded(line) for line in lines).encode())
    return []


def thin(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """A few lines of every kind, in the order of steps."""
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    kept = {id(line) for kind in kinds for line in thinned([line for line in lines if line["kind"] == kind], LINES)}
    return [line for line in lines if id(line) in kept]


def keep_pictures(experiment: Experiment, pictures: Sequence[Path], out: Path) -> list[str]:
    """Draw curves from all records that are kept, copy pictures of networks; sentences on what was left as it is.

    Curves of runs that are not kept are not copied. Curves that are there are not replaced by fewer, a network's
    picture not by that of another seed.
    """
    said, drawn = [], dict[str, dict[str, Any]]()
    finished = finished_of(experiment, jobs_of(experiment, seeds_in(out), out))
    for make in experiment.draws:
        if make in FROM_RECORDS:
            drawn |= drawn_by(make, finished)
    for name, picture in drawn.items():
        path = out / PICTURES / f"{name}.json"
        lost = lost_series(path, picture)
        if lost:
            said.append(f"kept {path} as it is: the records in {out} have no curve of {lost[0]}")
        elif picture["series"]:
            write_picture(experiment, name, picture, out)
    for path in pictures:
        target = out / PICTURES / path.name
        if not target.exists() and not are_curves(path):
            write_bytes(target, path.read_bytes())
    return said


def are_curves(path: Path) -> bool:
    """Whether a picture is of curves, or none at all."""
    try:
        return bool(read_tree(path)["kind"] == CURVES)
    except (FileError, KeyError, TypeError):
        return True


def lost_series(path: Path, picture: Mapping[str, Any]) -> list[str]:
    """The series of a picture's file that the one which would take its place lacks."""
    try:
        held = [str(series["name"]) for series in read_tree(path)["series"]]
    except (FileError, KeyError, TypeError):
        return []
    names = {series["name"] for series in picture["series"]}
    return [name for name in held if name not in names]


def table_file(experiment: Experiment) -> str:
    """The name of a table's numbers beside its records; tables of one family lie in one folder."""
    return TABLE if experiment.family is None else f"{experiment.name}.json"


def kept_table(results: Path, name: str, scale: str) -> Path:
    """Where a folder of results keeps the numbers of a table, which need not be one of ours."""
    found = TRAINED[name]() if name in TRAINED else None
    if found is None:
        return results / f"{name}-{scale}" / TABLE
    return results / f"{found.family or name}-{scale}" / table_file(found)


def write_table(experiment: Experiment, scale: Scale, folder: Path, shrinks: bool = True) -> str:
    """Write table.json: every number of the table beside what the folder's records say, over all seeds found there.

    Unless it `shrinks`, a table that holds more is left as it is, which is said.
    """
    jobs = jobs_of(experiment, seeds_in(folder), folder)
    path = folder / table_file(experiment)
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
    """The seeds of the runs in a table's folder; what is no seed of a recipe is the name of no run."""
    found = {path.name.removeprefix("seed-") for path in folder.glob("*/seed-*")}
    return sorted(seed for text in found if text.isdecimal() and (seed := int(text)) in SEEDS)
