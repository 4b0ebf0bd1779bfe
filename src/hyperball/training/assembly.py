"""From a recipe to the parts of a run: network, optimizer, schedule, batches, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperball.convert import Homotopy
from hyperball.data import Dataset, Files
from hyperball.optim import WeightedGradients, WeightProjection
from hyperball.training.measures.evaluation import Evaluator
from hyperball.training.network import Network, build_network, check_shape
from hyperball.training.process.distributed import synchronize
from hyperball.training.process.engine import Engine, decide_capture, decide_compile
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import STATISTICS
from hyperball.training.sets import Feed, train_feed
from hyperball.training.statistics import normalizations, relative_radii
from hyperball.training.update import optimizers
from hyperball.training.update.average import Average
from hyperball.training.update.objective import Objective
from hyperball.training.update.optimizers import Rates
from hyperball.training.update.schedule import Schedule
from hyperball.training.update.step import Parts, Step


@dataclass
class Assembly:
    """All parts of a run."""

    network: Network
    feed: Feed
    parts: Parts
    step: Step
    rates: Rates
    schedule: Schedule
    evaluator: Evaluator
    projection: WeightProjection | None
    homotopy: Homotopy | None
    total_steps: int


def assemble(
    recipe: Recipe, engine: Engine, dataset: Dataset, conditions: Mapping[str, Tensor] | None = None
) -> Assembly:
    """Build the parts of a run on the engine's device; `conditions` are the inputs of further tests by name."""
    if recipe.adversarial.method != "none" and dataset.kind != "images":
        raise RecipeError(f"`adversarial.method` is for images, got {dataset.name}, a set of {dataset.kind}")
    feed = train_feed(recipe, dataset, engine.device, engine.rank, engine.world_size)
    total = recipe.total_steps(len(feed))
    if recipe.homotopy.steps > total:
        raise RecipeError(f"`homotopy.steps` must be at most the {total} steps of the run, got {recipe.homotopy.steps}")
    network, homotopy = build_network(recipe, dataset, recipe.start.weights)
    if engine.world_size > 1:
        synchronize(network, engine.device, recipe.engine.synchronize)
    network.train().to(engine.device)
    if engine.device.type == "cuda" and recipe.engine.channels_last and dataset.kind == "images":
        network.to(memory_format=torch.channels_last)
    check_statistics(recipe, network, len(feed))
    feed.set(0, 0)
    check_shape(network, feed.take()[0][:2], recipe.model.name)
    parts, projection = build_parts(recipe, engine, network, feed)
    parts.homotopy = homotopy
    kinds = (engine.device.type, engine.world_size)
    captured = decide_capture(recipe, *kinds, streamed=isinstance(dataset.train, Files))
    options = {"size": recipe.data.image_size, "workers": recipe.data.workers}
    return Assembly(
        network, feed, parts,
        Step(engine, recipe, parts, decide_compile(recipe, *kinds, total), captured),
        Rates(parts.inner, recipe.optimizer),
        Schedule(recipe.schedule, total, len(feed)),
        Evaluator(engine, network, dataset, recipe.log.evaluation_batch, captured, options, conditions),
        projection, homotopy, total,
    )  # fmt: skip


def check_statistics(recipe: Recipe, network: Network, batches: int) -> None:
    """Refuse tests with statistics computed anew of a network that has none, or of more batches than there are."""
    for name, changes in recipe.log.conditions.items():
        if changes.get(STATISTICS, 0) > batches:
            raise RecipeError(
                f"`log.conditions.{name}.{STATISTICS}` must be at most the {batches} batches of an epoch, got "
                f"{changes[STATISTICS]}"
            )
        if STATISTICS in changes and not (normalizations(network) or relative_radii(network)):
            raise RecipeError(
                f"`log.conditions.{name}.{STATISTICS}` needs a network with running means, of normalization or of "
                f"relative radii, got {recipe.model.name} without any"
            )


def build_parts(recipe: Recipe, engine: Engine, network: Network, feed: Feed) -> tuple[Parts, WeightProjection | None]:
    """Optimizer and what hangs on it, set up by Fabric."""
    regularizers = recipe.regularizers
    optimizer = optimizers.build(network.model, recipe.optimizer, engine.device)
    wrapped, fabric_optimizer = engine.fabric.setup(network, optimizer)
    alone = engine.world_size == 1
    parts = Parts(
        network,
        network if alone else wrapped,
        fabric_optimizer,
        feed,
        Objective(recipe, network, None if alone else network),
    )
    if regularizers.weighted_gradients == "grad":
        parts.weighted = WeightedGradients(network.model, "grad")
    elif regularizers.weighted_gradients == "update":
        WeightedGradients(network.model, "update").attach(optimizer)
    if regularizers.ema is not None:
        parts.average = Average(network.model, regularizers.ema)
    projection = None
    if recipe.projection.every is not None:
        projection = WeightProjection(network.model, recipe.projection.every, recipe.projection.scale)
        parts.after.append(projection.step)
    return parts, projection
