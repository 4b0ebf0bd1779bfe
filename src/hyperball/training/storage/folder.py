"""A run's folder: what it may hold before a training begins, and one training at a time in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hyperball.locks import locked
from hyperball.on_disk import CHANGEABLE, CHECKPOINTS, RECIPE, RECORD
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.storage.checkpoint import Checkpoint, CheckpointError, load_checkpoint, saved_steps
from hyperball.training.storage.record import Record, has_diverged
from hyperball.training.update.offender import NonFiniteError

LOCK = ".training.lock"
TORN = ".step-*.tmp"  # what `save_checkpoint` was writing
HELD: set[int] = set()  # descriptors of the locks of this process


def check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Refuse a folder that holds a run, or when resuming one of another recipe or one that did not converge."""
    if not (folder / RECIPE).exists():
        if saved_steps(folder / CHECKPOINTS):
            raise CheckpointError(
                f"{folder} holds checkpoints but no {RECIPE}; put it back, or train into another folder"
            )
        return
    if not resume:
        raise RecipeError(f"{folder} already holds a run; resume it, or train into another folder")
    difference = unlike(Recipe.from_file(folder / RECIPE), recipe)
    if difference:
        raise RecipeError(f"{folder} holds a run of another recipe: {difference}")
    if has_diverged(folder):
        failure = Record.read(folder).failure
        raise NonFiniteError(failure.get("step", 0), f"{failure.get('where')}, as {folder / RECORD} says")


def unlike(known: Recipe, asked: Recipe) -> str:
    """The first field in which two recipes differ, of those that determine a run's numbers; "" where none does."""
    changed = {key: pair for key, pair in known.differences(asked).items() if not key.startswith(CHANGEABLE)}
    if not changed:
        return ""
    key, (old, new) = next(iter(changed.items()))
    more = f", and {len(changed) - 1} more differ" if len(changed) > 1 else ""
    return f"`{key}` is {old!r} there and {new!r} here{more}"


def own_checkpoint(recipe: Recipe, folder: Path) -> tuple[Checkpoint, list[str]]:
    """The latest whole checkpoint of a run's folder, which must be of the run's recipe, and notes on damaged ones."""
    checkpoint, notes = load_checkpoint(folder / CHECKPOINTS)
    try:
        difference = unlike(Recipe.from_dict(checkpoint.info["recipe"]), recipe)
    except (KeyError, RecipeError) as error:
        raise CheckpointError(f"{checkpoint.path} holds no recipe that can be read ({error})") from None
    if difference:
        raise CheckpointError(f"{checkpoint.path} is of another recipe: {difference}")
    return checkpoint, notes


@contextlib.contextmanager
def held(folder: Path, doing: str = "training into") -> Iterator[None]:
    """Hold the folder while the block lasts, or refuse where another process does; a killed one holds nothing.

    What a killed training left of a checkpoint that it was writing is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = locked(folder / LOCK)
    if descriptor is None:
        raise CheckpointError(f"another process is {doing} {folder}; wait for it, or choose another folder")
    HELD.add(descriptor)
    try:
        for torn in (folder / CHECKPOINTS).glob(TORN):
            torn.unlink(missing_ok=True)
        yield
    finally:
        HELD.discard(descriptor)
        (folder / LOCK).unlink(missing_ok=True)
        os.close(descriptor)


def _let_go() -> None:
    """A worker that outlives a killed training must not hold its lock."""
    for descriptor in HELD:
        os.close(descriptor)
    HELD.clear()


os.register_at_fork(after_in_child=_let_go)
