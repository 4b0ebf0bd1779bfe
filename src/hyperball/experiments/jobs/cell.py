"""One cell of a grid in a process: `python -m hyperball.experiments.jobs.cell RECIPE RUN DATA_ROOT ACCELERATOR`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hyperball._errors import report
from hyperball.files import FileError
from hyperball.locks import locked
from hyperball.on_disk import RECORD
from hyperball.training import Recipe, train
from hyperball.training.loop import Diverged
from hyperball.training.process.allocator import keep_freed_memory
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.storage.folder import LOCK
from hyperball.training.storage.record import Record, has_diverged

INPUTS = "the inputs"  # not finite, they are a mistake of the data
PATIENCE = 30.0  # seconds in which a process whose runner was killed saves itself
PAUSE = 0.1


def train_cell(recipe: Recipe, run_dir: Path, data_root: str | None = None, accelerator: str = "auto") -> None:
    """Train a cell, or go on with it; a network that does not converge is a result, and recorded."""
    start = recipe.start.weights
    if start is not None and (has_diverged(Path(start)) or guesses(Path(start))):
        raise RecipeError(f"`start.weights` must be of a trained network, but {start} did not converge")
    wait_for(run_dir)
    check_record(run_dir)
    try:
        train(recipe, run_dir, resume=True, data_root=data_root, accelerator=accelerator)
    except Diverged as error:
        if error.where == INPUTS:
            raise
        error.record.write(run_dir)
        print(f"did not converge: {error}", flush=True)


def check_record(run_dir: Path) -> None:
    """Refuse a folder whose record cannot be read, with what would do."""
    if (run_dir / RECORD).exists():
        try:
            Record.read(run_dir)
        except FileError as error:
            raise FileError(f"{error}; remove it, and the run goes on from its last checkpoint") from None


def guesses(run_dir: Path) -> bool:
    """Whether a folder holds the record of a run that ended at chance."""
    try:
        return Record.read(run_dir).is_at_chance
    except FileError:
        return False


def wait_for(run_dir: Path) -> None:
    """Wait a little while another process holds the folder; one that still does is refused by training."""
    last = time.monotonic() + PATIENCE
    while is_held(run_dir) and time.monotonic() < last:
        time.sleep(PAUSE)


def is_held(run_dir: Path) -> bool:
    """Whether another process trains into a folder."""
    if not (run_dir / LOCK).exists():
        return False
    descriptor = locked(run_dir / LOCK)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def main(arguments: list[str]) -> int:
    """0 when the run is done, else the exit code and the line of `hyperball train`."""
    recipe, run_dir, data_root, accelerator = arguments
    keep_freed_memory()
    try:
        train_cell(Recipe.from_file(recipe), Path(run_dir), data_root or None, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
