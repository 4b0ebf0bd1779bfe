"""One cell of a grid in its own process: `python -m hyperball.experiments.cell RECIPE RUN DATA_ROOT ACCELERATOR`."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

from hyperball._errors import report
from hyperball.training import Recipe, train


class Busy(RuntimeError):
    """A cell is in the hands of another process."""


def train_cell(recipe: Recipe, run_dir: Path, data_root: str | None = None, accelerator: str = "auto") -> None:
    """Train a cell, or go on with it; one process at a time."""
    with alone(run_dir):
        train(recipe, run_dir, resume=True, data_root=data_root, accelerator=accelerator)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder, or refuse: a grid whose parent was killed may have left a process at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Busy(f"another process is training {folder}") from None
        yield


def main(arguments: list[str]) -> int:
    """0 when the run is done, else the exit code and the line of `hyperball train`."""
    recipe, run_dir, data_root, accelerator = arguments
    try:
        train_cell(Recipe.from_file(recipe), Path(run_dir), data_root or None, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
