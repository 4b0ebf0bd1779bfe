"""Train, resume and evaluate: from a recipe or a run's folder to a record."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hyperball.data import Dataset
from hyperball.on_disk import CHECKPOINTS, RECIPE, RECORD
from hyperball.training.loop import Run
from hyperball.training.measures.evaluation import Evaluator
from hyperball.training.measures.metrics import Metrics
from hyperball.training.network import Network, build_network
from hyperball.training.pretrained import put, weights_of
from hyperball.training.process.engine import Decision, Engine, build_engine, decide_capture, settings
from hyperball.training.process.interrupts import listening, resume_command, together
from hyperball.training.progress import Progress, Silent
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import DataConfig
from hyperball.training.sets import Source, condition_inputs, for_evaluation, held_source, load_set
from hyperball.training.storage.checkpoint import CheckpointError, saved_steps
from hyperball.training.storage.folder import check_folder, held, own_checkpoint
from hyperball.training.storage.record import Record, write_recipe
from hyperball.training.storage.state import restore


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
    check_folder(recipe, folder, resume)
    if (folder / RECIPE).exists() and (folder / RECORD).exists():
        return Record.read(folder)
    with settings(recipe):
        engine = build_engine(recipe, accelerator, devices)
        source = held_source(recipe, Source(data_root, download, dataset))
        found = load_set(recipe.data, source)
        conditions = condition_inputs(recipe, found, source)
        listener = progress if progress and engine.is_first else Silent()
        command = resume_command(folder, data_root, accelerator, devices)
        run = Run(recipe, folder, engine, found, listener, command, conditions)
        with begin(recipe, folder, engine, resume):
            if saved_steps(folder / CHECKPOINTS):
                checkpoint, notes = own_checkpoint(recipe, folder)
                restore(run, checkpoint)
                for text in notes:
                    run.note(text)
            elif (folder / RECIPE).exists():
                run.note("there was no checkpoint to resume from; begun anew")
            if engine.is_first:
                write_recipe(folder, recipe)
            with listening() as flag, together(run.command, engine.world_size):
                return run.fit(flag)


def begin(recipe: Recipe, folder: Path, engine: Engine, resume: bool) -> contextlib.ExitStack:
    """Hold the folder with the first process, and check it again, for all processes or none."""
    stack = contextlib.ExitStack()
    refusal: Exception | None = None
    if engine.is_first:
        try:
            stack.enter_context(held(folder))
            check_folder(recipe, folder, resume)
            if (folder / RECORD).exists():
                raise CheckpointError(f"another process has just finished the run in {folder}")
        except (ValueError, RuntimeError, OSError) as error:
            refusal = error
    if engine.agree(int(refusal is not None)):
        stack.close()
        raise refusal or CheckpointError(f"the first process cannot train into {folder}")
    return stack


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
    found = load_set(recipe.data, Source(data_root, dataset=dataset), used=())
    return _trained(recipe, found, Path(run_dir), average)


def _trained(recipe: Recipe, dataset: Dataset, run_dir: Path, average: bool) -> Network:
    """The network with the weights of the latest whole checkpoint."""
    checkpoint, _ = own_checkpoint(recipe, run_dir)
    network, homotopy = build_network(recipe, dataset)
    if homotopy is not None:
        homotopy.load_state_dict(checkpoint.info["homotopy"])
    put(network.model, weights_of(checkpoint, average), str(checkpoint.path), strict=True)
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
    """The metrics of a run's latest checkpoint on the test split of its set, or of that of another `data`.

    Fields of `data` that concern training alone are refused where they are neither the run's nor the default.
    """
    recipe = read_recipe(run_dir)
    with settings(recipe):
        engine = build_engine(recipe, accelerator)
        own = load_set(recipe.data, Source(data_root, dataset=dataset), used=("test",) if data is None else ())
        network = _trained(recipe, own, Path(run_dir), average).to(engine.device)
        chosen = recipe.data if data is None else for_evaluation(data, recipe.data)
        held_set = dataset if chosen.name == recipe.data.name else None
        other = own if data is None else load_set(chosen, Source(data_root, dataset=held_set), used=("test",))
        if other.classes != own.classes:
            raise RecipeError(f"`data` must have the {len(own.classes)} classes of {own.name}, got {other.name}")
        captured: Decision = decide_capture(recipe, engine.device.type, 1, False)
        options = {"size": chosen.image_size, "workers": chosen.workers}
        return Evaluator(engine, network, other, recipe.log.evaluation_batch, captured, options).measure()
