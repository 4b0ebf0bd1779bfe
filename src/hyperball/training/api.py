"""Train, resume and evaluate: from a recipe or a run's folder to a record."""

from __future__ import annotations

from pathlib import Path

from hyperball.data import Dataset
from hyperball.training.checkpoint import CheckpointError, load_checkpoint, saved_steps
from hyperball.training.engine import Decision, build_engine, decide_capture, settings
from hyperball.training.evaluation import Evaluator
from hyperball.training.fields import RecipeError
from hyperball.training.interrupts import listening
from hyperball.training.loop import Run
from hyperball.training.metrics import Metrics
from hyperball.training.network import Network, build_network
from hyperball.training.pretrained import put, weights_of
from hyperball.training.progress import Progress, Silent
from hyperball.training.recipe import DataConfig, Recipe
from hyperball.training.record import CHECKPOINTS, RECIPE, RECORD, Record, write_recipe
from hyperball.training.sets import Source, load_set

CHANGEABLE = ("log.", "engine.")  # parts of a recipe that a resumed run may change


def train(
    recipe: Recipe,
    run_dir: str | Path,
    *,
    resume: bool = False,
    data_root: str | Path | None = None,
    download: bool = False,
    dataset: Dataset | None = None,
    accelerator: str = "auto",
    devices: int | str = "auto",
    progress: Progress | None = None,
) -> Record:
    """Train a recipe into a folder, which gets recipe.json, metrics.jsonl, checkpoints/ and, at the end, record.json.

    A folder that holds a run is refused unless `resume`, which continues from its latest whole checkpoint, or returns
    the record of a run that is done. `dataset` is used in place of the set that the recipe names. `devices` counts
    the processes of DDP ("auto": one, or what torchrun started).
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"`recipe` must be a hyperball.training.Recipe, got {type(recipe).__name__}")
    folder = Path(run_dir)
    if (folder / RECIPE).exists():
        check_folder(recipe, folder, resume)
        if (folder / RECORD).exists():
            return Record.read(folder)
    with settings(recipe):
        engine = build_engine(recipe, accelerator, devices)
        found = load_set(recipe.data, Source(data_root, download, dataset))
        run = Run(recipe, folder, engine, found, progress if progress and engine.is_first else Silent())
        if saved_steps(folder / CHECKPOINTS):
            checkpoint, notes = load_checkpoint(folder / CHECKPOINTS)
            run.restore(checkpoint)
            for text in notes:
                run.note(text)
        if engine.is_first:
            write_recipe(folder, recipe)
        with listening() as flag:
            return run.fit(flag)


def check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Refuse a folder that holds a run, or one of another recipe when resuming."""
    if not resume:
        raise RecipeError(f"{folder} already holds a run; resume it, or train into another folder")
    known = Recipe.from_file(folder / RECIPE)
    changed = {key: pair for key, pair in known.differences(recipe).items() if not key.startswith(CHANGEABLE)}
    if changed:
        key, (old, asked) = next(iter(changed.items()))
        raise RecipeError(
            f"{folder} holds a run of another recipe: `{key}` is {old!r} there and {asked!r} here"
            + (f", and {len(changed) - 1} more differ" if len(changed) > 1 else "")
        )


def resume(
    run_dir: str | Path,
    *,
    data_root: str | Path | None = None,
    dataset: Dataset | None = None,
    accelerator: str = "auto",
    devices: int | str = "auto",
    progress: Progress | None = None,
) -> Record:
    """Continue the run of a folder with the recipe it was begun with."""
    return train(
        read_recipe(run_dir), run_dir, resume=True,
        data_root=data_root, dataset=dataset, accelerator=accelerator, devices=devices, progress=progress,
    )  # fmt: skip


def read_recipe(run_dir: str | Path) -> Recipe:
    """The recipe of a run's folder."""
    path = Path(run_dir) / RECIPE
    if not path.exists():
        raise CheckpointError(f"{run_dir} holds no run: there is no {RECIPE} in it")
    return Recipe.from_file(path)


def load_model(
    run_dir: str | Path,
    *,
    data_root: str | Path | None = None,
    dataset: Dataset | None = None,
    average: bool = True,
) -> Network:
    """The network of a run's latest checkpoint, in evaluation mode: images in [0, 1], or clouds, to logits.

    With `average`, the averaged weights where the recipe kept some.
    """
    recipe = read_recipe(run_dir)
    return _trained(recipe, load_set(recipe.data, Source(data_root, dataset=dataset)), Path(run_dir), average)


def _trained(recipe: Recipe, dataset: Dataset, run_dir: Path, average: bool) -> Network:
    """The network with the weights of the latest whole checkpoint."""
    checkpoint, _ = load_checkpoint(run_dir / CHECKPOINTS)
    network, homotopy = build_network(recipe, dataset)
    if homotopy is not None:
        homotopy.load_state_dict(checkpoint.info["homotopy"])
    put(network.model, weights_of(checkpoint, average), str(checkpoint.path))
    network.eval()
    return network


def evaluate(
    run_dir: str | Path,
    *,
    data: DataConfig | None = None,
    data_root: str | Path | None = None,
    dataset: Dataset | None = None,
    accelerator: str = "auto",
    average: bool = True,
) -> Metrics:
    """The metrics of a run's latest checkpoint on the test split of its set, or of that of another `data`."""
    recipe = read_recipe(run_dir)
    with settings(recipe):
        engine = build_engine(recipe, accelerator)
        own = load_set(recipe.data, Source(data_root, dataset=dataset))
        network = _trained(recipe, own, Path(run_dir), average).to(engine.device)
        other = own if data is None else load_set(data, Source(data_root))
        if other.classes != own.classes:
            raise RecipeError(f"`data` must have the {len(own.classes)} classes of {own.name}, got {other.name}")
        captured: Decision = decide_capture(recipe, engine.device.type, 1, False)
        options = {"size": recipe.data.image_size, "workers": recipe.data.workers}
        return Evaluator(engine, network, other, recipe.log.evaluation_batch, captured, options).measure()
