"""A cell of a table or grid, where its run lies, and whether what lies there is it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from hyperball.experiments.grid import Cell
from hyperball.experiments.records.broken import damage
from hyperball.files import FileError, write_json
from hyperball.on_disk import RECIPE, RECORD
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.storage.folder import unlike
from hyperball.training.storage.record import Record, has_diverged

LOG = "log.txt"


@dataclass(frozen=True)
class Job:
    """A cell and where it is run."""

    cell: Cell
    folder: Path
    data_root: str | None = None
    accelerator: str = "auto"
    trains: ClassVar[bool] = True

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.folder / LOG

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of cells that must be done before this one begins."""
        return ()

    def command(self) -> list[str]:
        """What its process is started with, after what that reads has been written."""
        recipe = self.folder / "cell.json"
        write_json(recipe, self.cell.recipe.to_dict())
        module = "hyperball.experiments.jobs.cell"
        return [module, str(recipe), str(self.folder), self.data_root or "", self.accelerator]

    @property
    def is_done(self) -> bool:
        """Whether the folder holds a finished run of this very recipe; what else it may hold, training refuses."""
        return not self.missing()

    def is_kept(self, folder: Path) -> bool:
        """Whether a folder of records without weights holds what this job finds."""
        return not self.lack_in(folder)

    def lack_in(self, folder: Path) -> str:
        """Why it does not; nothing if it does."""
        return damage(folder) or replace(self, folder=folder).missing()

    @property
    def diverged(self) -> bool:
        """Whether the folder says that the network did not converge."""
        return has_diverged(self.folder)

    def missing(self) -> str:
        """Why the folder does not hold a run of this recipe that came to an end, or nothing if it does."""
        if not (self.folder / RECORD).exists():
            return "there is no finished run"
        try:
            record, known = Record.read(self.folder), recipe_in(self.folder)
        except (FileError, RecipeError) as error:
            return str(error)
        strange = foreign(record, known)
        if strange:
            return f"{self.folder / RECORD} is of another recipe than {RECIPE} beside it: {strange}"
        difference = unlike(known, self.cell.recipe)
        return f"{self.folder} holds a run of another recipe: {difference}" if difference else ""


def recipe_in(folder: Path) -> Recipe:
    """The recipe of a run's folder: that of recipe.json or, where there is none, the record's own."""
    path = folder / RECIPE
    return Recipe.from_file(path) if path.exists() else Recipe.from_dict(Record.read(folder).recipe)


def foreign(record: Record, known: Recipe) -> str:
    """Where a record's own recipe is not that of its folder, of what determines numbers; "" where it is.

    The folder in which the network that a run begins with lay may be called otherwise.
    """
    try:
        own = Recipe.from_dict(record.recipe)
    except RecipeError as error:
        return f"that of the record cannot be read ({error})"
    starts = [recipe.start.weights for recipe in (own, known)]
    if all(starts) and len({Path(str(start)).parts[-2:] for start in starts}) == 1:
        own = own.override({"start.weights": starts[1]})
    return unlike(own, known)


def another(job: Job, target: Path) -> str:
    """Why a kept record is not that of a job's run; nothing if it is, or if there is none that can be read."""
    if damage(target):
        return ""
    known, own = Record.read(target), Record.read(job.folder)
    difference = foreign(known, job.cell.recipe)
    if difference:
        return f"it is of another protocol: {difference}"
    if (known.status, known.results) != (own.status, own.results):
        return "it is another run of the same recipe"
    return ""
