"""A published table: its entries over seeds as jobs, and what their records say beside the paper's numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hyperball import data
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs.conditions import conditions_in
from hyperball.experiments.jobs.devices import check_device
from hyperball.experiments.jobs.runners import Job, reason_of, recipe_in
from hyperball.experiments.results.broken import damage, leave_out
from hyperball.experiments.results.robust_numbers import attacked_numbers
from hyperball.experiments.results.text import NOTHING, columns, part_of, spread
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Entry, Experiment
from hyperball.on_disk import METRICS, RECORD, cell_name
from hyperball.training.files import FileError
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.record import CONDITIONS, Record, read_metrics, thinned
from hyperball.verdicts import CHANCE, LOST, better, ends_at_chance, in_order, order_words, percent_of

CURVE = 60  # evaluations that a record keeps


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
            known = recipe_in(self.folder).start.weights
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


def check_data(jobs: Sequence[Job]) -> None:
    """Refuse a device or a set that is not there, or broken, before a process is started for every cell that needs it.

    A device is also refused on which cells cannot compute.
    """
    for accelerator, precision in dict.fromkeys((job.accelerator, job.cell.recipe.precision) for job in jobs):
        check_device(accelerator, precision)
    for name, root in dict.fromkeys((job.cell.recipe.data.name, job.data_root) for job in jobs):
        data.load(name, root)


def annotate(experiment: Experiment, scale: Scale, jobs: Sequence[Job]) -> None:
    """Say in every finished record which cell of which table it is, by which protocol, and how its accuracy rose."""
    entries = {entry.name: entry for entry in experiment.entries}
    for job in jobs:
        known = job.trains and job.cell.label in entries
        if known and job.is_done and not (record := Record.read(job.folder)).experiment:
            about = about_cell(experiment, scale, entries[job.cell.label], job.cell.seed)
            replace(record, experiment=about, curve=curve_of(job.folder)).write(job.folder)


def about_cell(experiment: Experiment, scale: Scale, entry: Entry, seed: int) -> dict[str, Any]:
    return {
        "table": experiment.name, "title": experiment.title, "source": experiment.source,
        "row": entry.row, "column": entry.column, "kind": entry.kind, "published": entry.published,
        "scale": scale, "protocol": experiment.words(scale), "seed": seed,
    }  # fmt: skip


def curve_of(folder: Path) -> list[list[float]]:
    """A few [epoch, top-1] of a run's evaluations; none where its metrics are broken, which is named."""
    try:
        lines = [line for line in read_metrics(folder / METRICS) if line["kind"] == "evaluation"]
        return thinned([[line["epoch"], line["top1"]] for line in lines], CURVE)
    except (FileError, KeyError) as error:
        leave_out(folder / METRICS, reason_of(error))
        return []


@dataclass(frozen=True)
class Comparison:
    """One number of a table: the paper's, and ours over seeds (the last iterate) with the best epoch beside it.

    `also` holds further metrics over seeds, `published_also` the paper's numbers of them, `diverged` the seeds whose
    networks did not converge and are not among the values.
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
    diverged: tuple[int, ...] = ()

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
        done = [job for job in jobs if job.cell.label == entry.name and counts(job)]
        lines += compared(experiment, entry, done)
    return lines


def counts(job: Job) -> bool:
    """Whether a job is done; a record that cannot be read is named."""
    problem = damage(job.folder) if (job.folder / RECORD).exists() else ""
    if problem:
        leave_out(job.folder / RECORD, problem)
    return not problem and job.is_done


def compared(experiment: Experiment, entry: Entry, ended: Sequence[Job]) -> list[Comparison]:
    """The comparisons of one entry: the test set as it is, then under each condition."""
    read = {job.cell.seed: Record.read(job.folder) for job in ended if not job.diverged}
    whole = [(job, {} if job.diverged else read[job.cell.seed].results) for job in ended]
    diverged = tuple(job.cell.seed for job, results in whole if job.diverged or guesses(job, results))
    kept = [(job, results) for job, results in whole if results and job.cell.seed not in diverged]
    done, records = [job for job, _ in kept], [results for _, results in kept]
    seeds = tuple(job.cell.seed for job in done)
    last, best = ([results[which] for results in records if results.get(which)] for which in ("last", "best"))
    lines = [
        Comparison(
            entry.row, entry.column, entry.published, values_of(experiment.metric, last),
            values_of(experiment.metric, best), entry.kind,
            {name: values_of(name, last) for name in experiment.also}, dict(entry.also), seeds, diverged,
        )
    ]  # fmt: skip
    tested = [(job.cell.seed, found) for job in done if (found := conditions_in(job.folder))]
    for condition in entry.conditions:
        held = [(seed, found[condition]) for seed, found in tested if condition in found]
        results = [found for _, found in held]
        changes = entry.conditions[condition]
        epochs = [found for seed, _ in held if (found := best_under(read[seed], condition, changes))]
        lines.append(
            Comparison(
                entry.row, f"{entry.column}, {condition}", entry.published_conditions.get(condition),
                values_of(experiment.metric, results), values_of(experiment.metric, epochs), entry.kind,
                {name: values_of(name, results) for name in experiment.also},
                dict(entry.also_conditions.get(condition, {})), tuple(seed for seed, _ in held), diverged,
            )
        )  # fmt: skip
    for name, paper, robust in attacked_numbers(entry.attacks, {job.cell.seed: job.folder for job in done}):
        values = tuple(robust.values())
        lines.append(
            Comparison(
                entry.row,
                f"{entry.column}, {name}",
                paper,
                values,
                (),
                entry.kind,
                seeds=tuple(robust),
                diverged=diverged,
            )
        )
    return lines


def best_under(record: Record, condition: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The best epoch under a condition, where every evaluation tested that very one; nothing where none did."""
    if record.recipe.get("log", {}).get(CONDITIONS, {}).get(condition) != dict(changes):
        return {}
    found: dict[str, Any] = (record.results.get(CONDITIONS) or {}).get(condition, {}).get("best", {})
    return found


def guesses(job: Job, results: Mapping[str, Any]) -> bool:
    """Whether a network ended at chance, which the papers too call not converging."""
    config = job.cell.recipe.data
    return ends_at_chance(config.name, results.get("last") or {}, config.test_size)


def values_of(metric: str, results: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """A metric in percent, of every result that has it."""
    found = (percent_of(metric, result) for result in results)
    return tuple(value for value in found if value is not None)


def table(experiment: Experiment, lines: Sequence[Comparison], scale: Scale = "paper") -> str:
    """The comparison for a terminal; a quick reduction shows an order, and no differences."""
    head = ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds", *experiment.also)
    differs = scale != "quick"
    text = columns([head, *(told(line, differs) for line in lines)], left=2)
    known = differs and any(line.difference is not None for line in lines)
    sign = f"difference: ours less the paper's; {better(experiment.metric)}" if known else ""
    return "\n".join(filter(None, (text, sign, order_of(lines))))


def order_of(lines: Sequence[Comparison]) -> str:
    """How far our numbers are in the paper's order, which is all that a short schedule can show."""
    return order_words(pairs_in_order(lines))


def pairs_in_order(lines: Sequence[Comparison]) -> tuple[int, int]:
    return in_order([
        (line.row, line.column, line.mean, line.mean - line.difference)
        for line in lines
        if line.mean is not None and line.difference is not None
    ])  # fmt: skip


def told(line: Comparison, differs: bool) -> tuple[str, ...]:
    """The texts of one line, with its difference to the paper's where it `differs`."""
    best = part_of(line.best, len(line.values))
    paper = NOTHING if line.published is None else str(line.published)
    difference = NOTHING if line.difference is None or not differs else f"{line.difference:+.2f}"
    also = (f"{statistics.fmean(found):.2f}" if found else NOTHING for found in line.also.values())
    ours = spread(line.values, len(line.diverged))
    count = len(line.values) + len(line.diverged)
    return (line.row, line.column, ours, best, paper, difference, str(count), *also)


def as_data(
    experiment: Experiment, scale: Scale, lines: Sequence[Comparison], doubts: Sequence[str] = ()
) -> dict[str, Any]:
    """The comparison as plain data, for the report; `doubts` are what `told_doubts` says."""
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "metric": experiment.metric,
        "scale": scale,
        "protocol": experiment.words(scale),
        "reduction": None if scale == "paper" else experiment.words(scale),
        "notes": list(notes_of(experiment, lines)),
        "doubts": list(doubts),
        "numbers": [number_of(line) for line in lines],
    }


def notes_of(experiment: Experiment, lines: Sequence[Comparison]) -> tuple[str, ...]:
    """The notes of a table, and what "N/C" means where that stands in it."""
    lost = any(line.diverged or line.published == LOST for line in lines)
    return (*experiment.all_notes, *([CHANCE] if lost else []))


def number_of(line: Comparison) -> dict[str, Any]:
    """A comparison as plain data, with the means of further metrics by name and the paper's beside them."""
    held = asdict(line)
    also, papers = held.pop("also"), held.pop("published_also")
    means = {name: round(statistics.fmean(values), 3) for name, values in also.items() if values}
    beside = {f"{name}, paper": value for name, value in papers.items()}
    return {**held, "mean": line.mean, "std": line.std, "difference": line.difference, **means, **beside}
