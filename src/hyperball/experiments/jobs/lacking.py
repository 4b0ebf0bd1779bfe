"""Which jobs are left to do beside a folder of kept records: those of cells of which it lacks something.

Weights are kept nowhere: what needs those of a kept cell needs it trained again. A kept record is never completed from
another run than its own, so what such a record lacks cannot be had, unless the run is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hyperball.experiments.jobs.cell import guesses
from hyperball.experiments.jobs.ends import End
from hyperball.experiments.jobs.job import Job, another
from hyperball.experiments.records.broken import damage
from hyperball.training.storage.record import has_diverged


def lacking(jobs: Sequence[Job], out: Path, kept: Path) -> tuple[list[Job], list[End]]:
    """The jobs of cells that are not whole in `kept` with those that they need, and those that cannot be done, why."""
    beside = Beside({job.cell.name: job for job in jobs}, out, kept)
    unkept = [job for job in jobs if not job.is_kept(beside.place(job))]
    stuck = [End(job, reason) for job in unkept if (reason := beside.hindrance(job))]
    names = {end.job.cell.name for end in stuck}
    wanted = with_needs((job for job in unkept if job.cell.name not in names), beside.known)
    return [job for job in jobs if job.cell.name in wanted], stuck


def with_needs(first: Iterable[Job], known: dict[str, Job]) -> set[str]:
    """The names of jobs and of all that they need, one by way of another."""
    waiting, found = list(first), set[str]()
    while waiting:
        job = waiting.pop()
        if job.cell.name not in found:
            found.add(job.cell.name)
            waiting += [known[name] for name in job.needs if name in known]
    return found


@dataclass
class Beside:
    """Jobs by name, the folder of their runs, and that of kept records."""

    known: dict[str, Job]
    out: Path
    kept: Path
    found: dict[str, str] = field(default_factory=dict)

    def place(self, job: Job) -> Path:
        """Where the record of a job's cell is kept."""
        return self.kept / job.folder.relative_to(self.out)

    def hindrance(self, job: Job) -> str:
        """Why a job that is not kept cannot be done for the kept records; nothing where it can."""
        name = job.cell.name
        if name not in self.found:
            reasons = (self.other_run(job), *(self.lost_need(job, self.known[need]) for need in self.needs(job)))
            self.found[name] = next(filter(None, reasons), "")
        return self.found[name]

    def needs(self, job: Job) -> list[str]:
        return [name for name in job.needs if name in self.known]

    def other_run(self, job: Job) -> str:
        """Why what a job finds would not be of the run that is kept as its cell's: that one's weights are gone."""
        place = self.place(job)
        trained = next(one for one in self.known.values() if one.trains and one.folder == job.folder)
        if damage(place) or (trained.is_done and not another(trained, place)):
            return ""
        lack = job.lack_in(place).removeprefix(f"{place} ")
        return f"{place} is kept without it ({lack}), and its weights are gone; move that away to train the cell anew"

    def lost_need(self, job: Job, need: Job) -> str:
        """Why a job cannot begin with what it needs."""
        place = self.place(need)
        if has_diverged(place) or (job.trains and not damage(place) and guesses(place)):
            return f"it needs {need.cell.name}, which did not converge"
        reason = "" if need.is_kept(place) else self.hindrance(need)
        return f"it needs {need.cell.name}: {reason}" if reason else ""
