"""Reproduce a published table: train its entries over seeds, test them under its conditions, compare with the paper."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hyperball import data
from hyperball.data import Dataset
from hyperball.experiments.grid import Cell
from hyperball.experiments.robust_numbers import attacked_numbers
from hyperball.experiments.runners import Job
from hyperball.experiments.table import Entry, Experiment, Finished, Scale, cell_name
from hyperball.training import evaluate
from hyperball.training.fields import RecipeError
from hyperball.training.files import FileError, read_tree, write_json
from hyperball.training.recipe import Recipe
from hyperball.training.record import METRICS, RECIPE, Record, read_metrics, thinned

CONDITIONS, PICTURES = "conditions.json", "pictures"
CURVE = 60  # evaluations that a record keeps
ERRORS = {"error": "top1", "top5_error": "top5"}


def jobs_of(
    experiment: Experiment, seeds: Sequence[int], out: Path, data_root: str | None = None, accelerator: str = "auto"
) -> list[Job]:
    """One job an entry and seed, each in a folder of its own, entry by entry of the first seed first."""
    return [job_of(entry, seed, out, data_root, accelerator) for seed in seeds for entry in experiment.entries]


@dataclass(frozen=True)
class Follower(Job):
    """A job that begins with the weights of another one."""

    after: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return self.after

    def missing(self) -> str:
        """As for any job, wherever the folder of the other one lay."""
        try:
            known = Recipe.from_file(self.folder / RECIPE).start.weights
        except (FileError, RecipeError):
            return super().missing()
        if known is None or not Path(known).as_posix().endswith(self.after[0]):
            return super().missing()
        cell = replace(self.cell, recipe=self.cell.recipe.override({"start.weights": known}))
        return Job(cell, self.folder).missing()


def job_of(entry: Entry, seed: int, out: Path, data_root: str | None, accelerator: str) -> Job:
    """The job of an entry and seed, after that of the entry and the same seed whose weights it begins with."""
    if entry.start is None:
        cell = Cell(entry.name, seed, entry.recipe.override({"seed": seed}))
        return Job(cell, out / cell.name, data_root, accelerator)
    before = f"{cell_name(*entry.start)}/seed-{seed}"
    cell = Cell(entry.name, seed, entry.recipe.override({"seed": seed, "start.weights": str(out / before)}))
    return Follower(cell, out / cell.name, data_root, accelerator, (before,))


def annotate(experiment: Experiment, scale: Scale, jobs: Sequence[Job]) -> None:
    """Say in every finished record which cell of which table it is, by which protocol, and how its accuracy rose."""
    entries = {entry.name: entry for entry in experiment.entries}
    for job in jobs:
        if job.is_done and not (record := Record.read(job.folder)).experiment:
            about = about_cell(experiment, scale, entries[job.cell.label], job.cell.seed)
            replace(record, experiment=about, curve=curve_of(job.folder)).write(job.folder)


def about_cell(experiment: Experiment, scale: Scale, entry: Entry, seed: int) -> dict[str, Any]:
    return {
        "table": experiment.name, "title": experiment.title, "source": experiment.source,
        "row": entry.row, "column": entry.column, "kind": entry.kind, "published": entry.published,
        "scale": scale, "protocol": experiment.words(scale), "seed": seed,
    }  # fmt: skip


def curve_of(folder: Path) -> list[list[float]]:
    """A few [epoch, top-1] of a run's evaluations."""
    points = [[line["epoch"], line["top1"]] for line in read_metrics(folder / METRICS) if line["kind"] == "evaluation"]
    return thinned(points, CURVE)


def measure_conditions(experiment: Experiment, jobs: Sequence[Job], count: int = 1) -> None:
    """Measure every finished network under the further conditions of its entry, once, in up to `count` processes."""
    conditions = {entry.name: entry.conditions for entry in experiment.entries}
    waiting = [
        (job, wanted)
        for job in jobs
        if (wanted := conditions[job.cell.label]) and job.is_done and not (job.folder / CONDITIONS).exists()
    ]
    if min(count, len(waiting)) < 2:
        for job, wanted in waiting:
            measure_one(job, wanted)
        return
    with ProcessPoolExecutor(min(count, len(waiting)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(measure_one, *zip(*waiting, strict=True)))


def measure_one(job: Job, conditions: Mapping[str, Mapping[str, Any]]) -> None:
    """Measure one network under every condition, and write down what was found."""
    found = {name: measured(job, changes) for name, changes in conditions.items()}
    write_json(job.folder / CONDITIONS, found)


def measured(job: Job, changes: Mapping[str, Any]) -> dict[str, Any]:
    config, root = job.cell.recipe.data, job.data_root
    dataset = whole_set(config.name, root)
    changed = config.override(changes)
    return evaluate(job.folder, data=changed, data_root=root, dataset=dataset, accelerator=job.accelerator).as_dict()


@lru_cache(maxsize=1)
def whole_set(name: str, root: str | None) -> Dataset:
    """A set that many evaluations share, read once."""
    return data.load(name, root)


def draw(experiment: Experiment, jobs: Sequence[Job], out: Path) -> list[Path]:
    """Write the pictures of an experiment's finished runs as plain data, one file each."""
    entries = {entry.name: entry for entry in experiment.entries}
    finished = [
        Finished(entries[job.cell.label], job.cell.seed, job.folder, job.data_root, job.accelerator)
        for job in jobs
        if job.is_done
    ]
    written = []
    for make in experiment.draws if finished else ():
        for name, picture in make(finished).items():
            path = out / PICTURES / f"{name}.json"
            write_json(path, {"experiment": experiment.name, **picture})
            written.append(path)
    return written


@dataclass(frozen=True)
class Comparison:
    """One number of a table: the paper's, and ours over seeds (the last iterate) with the best epoch beside it.

    `also` holds further metrics over seeds, `published_also` the paper's numbers of them.
    """

    row: str
    column: str
    published: float | str | None
    values: tuple[float, ...]
    best: tuple[float, ...]
    kind: str = "published"
    also: dict[str, tuple[float, ...]] = field(default_factory=dict)
    published_also: dict[str, float] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        known = isinstance(self.published, int | float)
        return None if self.mean is None or not known else self.mean - float(self.published)  # type: ignore[arg-type]


def compare(experiment: Experiment, jobs: Sequence[Job]) -> list[Comparison]:
    """Every number of the table, those of further conditions behind the others."""
    lines = []
    for entry in experiment.entries:
        done = [job for job in jobs if job.cell.label == entry.name and job.is_done]
        lines += compared(experiment, entry, done)
    return lines


def compared(experiment: Experiment, entry: Entry, done: Sequence[Job]) -> list[Comparison]:
    """The comparisons of one entry: the test set as it is, then under each condition."""
    records = [Record.read(job.folder).results for job in done]
    seeds = tuple(job.cell.seed for job in done)
    last, best = ([results[which] for results in records if results.get(which)] for which in ("last", "best"))
    lines = [
        Comparison(
            entry.row, entry.column, entry.published, values_of(experiment.metric, last),
            values_of(experiment.metric, best), entry.kind,
            {name: values_of(name, last) for name in experiment.also}, dict(entry.also), seeds,
        )
    ]  # fmt: skip
    tested = [(job.cell.seed, found) for job in done if (found := conditions_in(job.folder))]
    for condition in entry.conditions:
        held = [(seed, found[condition]) for seed, found in tested if condition in found]
        results = [found for _, found in held]
        lines.append(
            Comparison(
                entry.row, f"{entry.column}, {condition}", entry.published_conditions.get(condition),
                values_of(experiment.metric, results), (), entry.kind,
                {name: values_of(name, results) for name in experiment.also},
                dict(entry.also_conditions.get(condition, {})), tuple(seed for seed, _ in held),
            )
        )  # fmt: skip
    for name, paper, robust in attacked_numbers(entry.attacks, {job.cell.seed: job.folder for job in done}):
        values = tuple(robust.values())
        lines.append(
            Comparison(entry.row, f"{entry.column}, {name}", paper, values, (), entry.kind, seeds=tuple(robust))
        )
    return lines


def conditions_in(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_tree(folder / CONDITIONS)
    except FileError:
        return {}
    return found


def values_of(metric: str, results: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """A metric in percent, of every result that has it; "error" is 100 less top-1."""
    name = ERRORS.get(metric, metric)
    found = [100 * result[name] for result in results if result.get(name) is not None]
    return tuple(100 - value for value in found) if metric in ERRORS else tuple(found)


def table(experiment: Experiment, lines: Sequence[Comparison]) -> str:
    """The comparison for a terminal."""
    head = ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds", *experiment.also)
    rows = [head, *(told(line) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    texts = []
    for row in rows:
        left = [row[i].ljust(widths[i]) for i in (0, 1)]
        texts.append("  ".join([*left, *(row[i].rjust(widths[i]) for i in range(2, len(head)))]).rstrip())
    return "\n".join(texts)


def told(line: Comparison) -> tuple[str, ...]:
    best = f"{statistics.fmean(line.best):.2f}" if line.best else "–"
    paper = "–" if line.published is None else str(line.published)
    difference = "–" if line.difference is None else f"{line.difference:+.2f}"
    also = (f"{statistics.fmean(found):.2f}" if found else "–" for found in line.also.values())
    return (line.row, line.column, spread(line.values), best, paper, difference, str(len(line.values)), *also)


def spread(values: Sequence[float]) -> str:
    """mean ± standard deviation; a dash without a value."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def as_data(experiment: Experiment, scale: Scale, lines: Sequence[Comparison]) -> dict[str, Any]:
    """The comparison as plain data, for the report."""
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "metric": experiment.metric,
        "scale": scale,
        "protocol": experiment.words(scale),
        "reduction": None if scale == "paper" else experiment.words(scale),
        "notes": list(experiment.notes),
        "numbers": [number_of(line) for line in lines],
    }


def number_of(line: Comparison) -> dict[str, Any]:
    """A comparison as plain data, with the means of further metrics by name and the paper's beside them."""
    held = asdict(line)
    also, papers = held.pop("also"), held.pop("published_also")
    means = {name: round(statistics.fmean(values), 3) for name, values in also.items() if values}
    beside = {f"{name}, paper": value for name, value in papers.items()}
    return {**held, "mean": line.mean, "std": line.std, "difference": line.difference, **means, **beside}
