"""Which jobs are left to do beside a folder of kept records: those of cells of which it lacks something."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hyperball.experiments.jobs.runners import Job


def lacking(jobs: Sequence[Job], out: Path, kept: Path) -> list[Job]:
    """All jobs of a cell that is not whole in `kept`, and those that they need, in their order.

    Weights are kept nowhere: what needs those of a cell needs it trained.
    """
    whole = {job.folder for job in jobs}
    whole -= {job.folder for job in jobs if not job.is_kept(kept / job.folder.relative_to(out))}
    wanted = with_needs((job for job in jobs if job.folder not in whole), {job.cell.name: job for job in jobs})
    return [job for job in jobs if job.cell.name in wanted]


def with_needs(first: Iterable[Job], known: dict[str, Job]) -> set[str]:
    """The names of jobs and of all that they need, one by way of another."""
    waiting, found = list(first), set[str]()
    while waiting:
        job = waiting.pop()
        if job.cell.name not in found:
            found.add(job.cell.name)
            waiting += [known[name] for name in job.needs if name in known]
    return found
