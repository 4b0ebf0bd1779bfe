"""One cell of a grid in its own process: `python -m hyperball.experiments.cell RECIPE RUN DATA_ROOT ACCELERATOR`."""

from __future__ import annotations

import sys
from pathlib import Path

from hyperball._errors import report
from hyperball.training import Recipe, train
from hyperball.training.fields import RecipeError
from hyperball.training.loop import Diverged
from hyperball.training.record import has_diverged

INPUTS = "the inputs"  # not finite, they are a mistake of the data


def train_cell(recipe: Recipe, run_dir: Path, data_root: str | None = None, accelerator: str = "auto") -> None:
    """Train a cell, or go on with it; a network that does not converge is a result, and recorded."""
    start = recipe.start.weights
    if start is not None and has_diverged(Path(start)):
        raise RecipeError(f"`start.weights` must be of a trained network, but {start} did not converge")
    try:
        train(recipe, run_dir, resume=True, data_root=data_root, accelerator=accelerator)
    except Diverged as error:
        if error.where == INPUTS:
            raise
        error.record.write(run_dir)
        print(f"did not converge: {error}", flush=True)


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
