"""The records of one table at one scale, as they lie in a folder of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.pictures import filter_lengths
from hyperball.experiments.plan import SOURCE
from hyperball.experiments.records.broken import damage, leave_out
from hyperball.experiments.results.collecting import seeds_in
from hyperball.experiments.results.comparison import Comparison, compare, doubts_of
from hyperball.experiments.results.lengths import length_rows
from hyperball.experiments.scales import SCALES, Scale
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables import TABLES, is_part
from hyperball.on_disk import RECORD
from hyperball.verdicts import AGREES, Verdict, verdict
from hyperball.verdicts import compares as comparable


@dataclass(frozen=True)
class Found:
    """The records of one table at one scale; of those that lie there, `foreign` and `broken` ones are left out."""

    experiment: Experiment
    scale: Scale
    lines: tuple[Comparison, ...]
    foreign: int = 0
    broken: int = 0
    remarks: tuple[str, ...] = ()
    lengths: tuple[tuple[str, ...], ...] = ()

    @property
    def measured(self) -> list[Comparison]:
        """Those with a value, or with networks that did not converge."""
        return [line for line in self.lines if line.values or line.diverged]

    @property
    def is_part(self) -> bool:
        return is_part(self.experiment)

    @property
    def is_attacked(self) -> bool:
        return any(entry.attacks for entry in self.experiment.entries)

    @property
    def shown(self) -> list[Comparison]:
        """Those whose difference to the paper's is printed: a quick reduction shows an order, not numbers."""
        return [line for line in self.measured if compares(line) and self.scale != "quick"]

    @property
    def beside(self) -> list[Comparison]:
        """Those that are held against the paper's: at the published schedule alone, as shorter ones show an order."""
        return [line for line in self.measured if compares(line) and self.scale == "paper"]

    def is_close(self, line: Comparison) -> bool:
        """Whether ours is within 1.5 points of the paper's, or better; or both did not converge."""
        return self.verdict(line) in AGREES

    def verdict(self, line: Comparison) -> Verdict:
        return verdict(self.experiment.metric, line.published, line.difference, bool(line.diverged))


def compares(line: Comparison) -> bool:
    """Whether ours can be held against the paper's: two numbers, or networks that did not converge."""
    return comparable(line.published, line.difference, bool(line.diverged))


def scales_of(name: str, results: Path) -> Iterator[Found]:
    """A table at every scale of which there are records, the published one first."""
    whole = TABLES[name]()
    if not isinstance(whole, Experiment):
        return
    for scale in reversed(SCALES):
        folder = results / f"{whole.family or name}-{scale}"
        records = [path for path in folder.glob(f"*/seed-*/{RECORD}") if path.parents[1].name != SOURCE]
        if records:
            experiment = whole.at(scale)
            jobs = jobs_of(experiment, seeds_in(folder), folder)
            remarks = tuple(doubts_of(experiment, jobs))
            only_lengths = experiment.draws == (filter_lengths,)
            lengths = tuple(length_rows(experiment, [job for job in jobs if job.is_done])) if only_lengths else ()
            counts = left_out(records, kin(whole, scale), folder)
            yield Found(experiment, scale, tuple(compare(experiment, jobs)), *counts, remarks, lengths)


def kin(whole: Experiment, scale: Scale) -> list[Experiment]:
    """The tables, at a scale, whose runs lie in the folder of a table's: itself, and those of its family."""
    family = whole.family or whole.name
    made = (TABLES[name]() for name in TABLES)
    others = [table for table in made if isinstance(table, Experiment) and (table.family or table.name) == family]
    return [table.at(scale) for table in others]


def left_out(records: Sequence[Path], tables: Iterable[Experiment], folder: Path) -> tuple[int, int]:
    """How many records are of other recipes than their cells', and how many are broken; each is named."""
    jobs = {job.folder: job for table in tables for job in jobs_of(table, seeds_in(folder), folder)}
    foreign = broken = 0
    for path in records:
        if reason := damage(path.parent):
            broken += 1
        elif path.parent not in jobs:
            foreign, reason = foreign + 1, "it lies in the folder of no cell of the table"
        elif reason := jobs[path.parent].missing():
            foreign += 1
        if reason:
            said = reason.removeprefix(f"{path}: ").replace(f"{path} ", "it ", 1)
            leave_out(path, said.replace(f"{path.parent} holds a run", "it is", 1))
    return foreign, broken
