"""The jobs of a published table: one an entry and seed, those behind that begin with the weights of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hyperball import data
from hyperball.experiments.devices import check_device
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs.job import Job, recipe_in
from hyperball.experiments.table import Entry, Experiment
from hyperball.files import FileError
from hyperball.on_disk import cell_name
from hyperball.training.recipe.fields import RecipeError


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
