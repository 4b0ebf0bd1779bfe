"""The numbers of a published table: what the records of its runs say over seeds, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperball.experiments.jobs.job import Job
from hyperball.experiments.records.broken import damage, leave_out
from hyperball.experiments.records.conditions import conditions_in
from hyperball.experiments.records.robust_numbers import attacked_numbers, told_doubts
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Entry, Experiment
from hyperball.experiments.text import NOTHING, beside, columns, part_of, spread
from hyperball.on_disk import RECORD
from hyperball.training.storage.record import CONDITIONS, Record
from hyperball.verdicts import CHANCE, LOST, better, in_order, order_words, percent_of


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


@dataclass(frozen=True)
class Standing:
    """The runs of an entry that its numbers are made of, with their results, and the seeds that did not converge."""

    runs: tuple[tuple[Job, Record], ...]
    diverged: tuple[int, ...]

    @property
    def folders(self) -> dict[int, Path]:
        """Where they lie, by seed."""
        return {job.cell.seed: job.folder for job, _ in self.runs}


def standing(entry: Entry, jobs: Sequence[Job]) -> Standing:
    """Those of an entry's jobs that are done and ended above chance."""
    done = [job for job in jobs if job.cell.label == entry.name and counts(job)]
    read = [(job, Record.read(job.folder)) for job in done]
    lost = tuple(job.cell.seed for job, record in read if job.diverged or record.is_at_chance)
    return Standing(tuple((job, record) for job, record in read if record.results and job.cell.seed not in lost), lost)


def counts(job: Job) -> bool:
    """Whether a job is done; a record that cannot be read is named."""
    problem = damage(job.folder) if (job.folder / RECORD).exists() else ""
    if problem:
        leave_out(job.folder / RECORD, problem)
    return not problem and job.is_done


def compare(experiment: Experiment, jobs: Sequence[Job]) -> list[Comparison]:
    """Every number of the table, those of further conditions and attacks behind the others of their entry."""
    lines = []
    for entry in experiment.entries:
        held = standing(entry, jobs)
        lines.append(as_trained(experiment, entry, held))
        lines += under_conditions(experiment, entry, held)
        lines += under_attacks(entry, held)
    return lines


def as_trained(experiment: Experiment, entry: Entry, held: Standing) -> Comparison:
    """The number of an entry on the test set as it is."""
    found = [record.results for _, record in held.runs]
    last, best = ([results[which] for results in found if results.get(which)] for which in ("last", "best"))
    return Comparison(
        entry.row, entry.column, entry.published, values_of(experiment.metric, last),
        values_of(experiment.metric, best), entry.kind, {name: values_of(name, last) for name in experiment.also},
        dict(entry.also), tuple(held.folders), held.diverged,
    )  # fmt: skip


def under_conditions(experiment: Experiment, entry: Entry, held: Standing) -> Iterator[Comparison]:
    """The numbers of an entry under further conditions."""
    tested = [(job.cell.seed, record, conditions_in(job.folder)) for job, record in held.runs]
    for condition, changes in entry.conditions.items():
        measured = [(seed, record, found[condition]) for seed, record, found in tested if condition in found]
        last = [found for _, _, found in measured]
        best = [found for _, record, _ in measured if (found := best_under(record, condition, changes))]
        yield Comparison(
            entry.row, f"{entry.column}, {condition}", entry.published_conditions.get(condition),
            values_of(experiment.metric, last), values_of(experiment.metric, best), entry.kind,
            {name: values_of(name, last) for name in experiment.also},
            dict(entry.also_conditions.get(condition, {})), tuple(seed for seed, _, _ in measured), held.diverged,
        )  # fmt: skip


def under_attacks(entry: Entry, held: Standing) -> Iterator[Comparison]:
    """The numbers of an entry under attacks."""
    for name, paper, robust in attacked_numbers(entry.attacks, held.folders):
        column, values = f"{entry.column}, {name}", tuple(robust.values())
        yield Comparison(
            entry.row, column, paper, values, (), entry.kind, seeds=tuple(robust), diverged=held.diverged
        )  # fmt: skip


def best_under(record: Record, condition: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The best epoch under a condition, where every evaluation tested that very one; nothing where none did."""
    if record.recipe.get("log", {}).get(CONDITIONS, {}).get(condition) != dict(changes):
        return {}
    found: dict[str, Any] = (record.results.get(CONDITIONS) or {}).get(condition, {}).get("best", {})
    return found


def doubts_of(experiment: Experiment, jobs: Sequence[Job]) -> list[str]:
    """What to know before believing the numbers under attack, of the networks that these are of."""
    folders = {
        entry.name: list(standing(entry, jobs).folders.values())
        for entry in experiment.entries
        if entry.attacks is not None
    }
    return told_doubts(experiment, folders)


def values_of(metric: str, results: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """A metric in percent, of every result that has it."""
    found = (percent_of(metric, result) for result in results)
    return tuple(value for value in found if value is not None)


def head(experiment: Experiment) -> tuple[str, ...]:
    """The columns of a table that has one row a number."""
    return ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds", *experiment.also)


def row(line: Comparison, difference: str) -> tuple[str, ...]:
    """The texts of one number, with its difference to the paper's."""
    count = len(line.values)
    also = (beside(values, line.published_also.get(name), count) for name, values in line.also.items())
    return (
        line.row, line.column, spread(line.values, len(line.diverged)), part_of(line.best, count),
        NOTHING if line.published is None else str(line.published), difference,
        str(count + len(line.diverged)), *also,
    )  # fmt: skip


def table(experiment: Experiment, lines: Sequence[Comparison], scale: Scale = "paper") -> str:
    """The comparison for a terminal; a quick reduction shows an order, and no differences."""
    differs = scale != "quick"
    rows = [row(line, difference_of(line) if differs else NOTHING) for line in lines]
    text = columns([head(experiment), *rows], left=2)
    known = differs and any(line.difference is not None for line in lines)
    sign = f"difference: ours less the paper's; {better(experiment.metric)}" if known else ""
    return "\n".join(filter(None, (text, sign, order_of(lines))))


def difference_of(line: Comparison) -> str:
    return NOTHING if line.difference is None else f"{line.difference:+.2f}"


def order_of(lines: Sequence[Comparison]) -> str:
    """How far our numbers are in the paper's order, which is all that a short schedule can show."""
    return order_words(pairs_in_order(lines))


def pairs_in_order(lines: Sequence[Comparison]) -> tuple[int, int]:
    return in_order([
        (line.row, line.column, line.mean, line.mean - line.difference)
        for line in lines
        if line.mean is not None and line.difference is not None
    ])  # fmt: skip


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
