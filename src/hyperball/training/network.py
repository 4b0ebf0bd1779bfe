"""The network of a recipe: normalization inside, so that it maps images in [0, 1], or clouds, to logits."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from hyperball import models
from hyperball.convert import Homotopy
from hyperball.data import Dataset, Files, Normalization
from hyperball.training.pretrained import load_weights
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import ModelConfig


class Network(nn.Module):
    """logits = model((x − mean) / std); without a normalization, model(x).

    The state dict that matters is that of `model`; mean and std are not saved.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalization: Normalization | None = None) -> None:
        super().__init__()
        self.model = model
        self.normalized = normalization is not None
        for name in ("mean", "std") if normalization is not None else ():
            values = torch.tensor(getattr(normalization, name)).view(-1, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x - self.mean) / self.std if self.normalized else x)


def build_network(recipe: Recipe, dataset: Dataset, weights: str | None = None) -> tuple[Network, Homotopy | None]:
    """The network of a recipe for a set: seeded or pretrained, and what moves it from plain to decoupled, if asked.

    With a homotopy the plain network is built, and `weights` are those of a plain one.
    """
    config = recipe.model
    plain = config.override({"magnitude": None, "angular": "cosine", "weighting": "none"})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = build_model(plain if recipe.homotopy.steps else config, dataset)
    if weights is not None:
        load_weights(model, weights)
    homotopy = None
    if recipe.homotopy.steps:
        target = {"magnitude": config.magnitude, "angular": config.angular, "weighting": config.weighting}
        homotopy = Homotopy(model, target, recipe.homotopy.steps)
    return Network(model, dataset.normalization if dataset.kind == "images" else None), homotopy


@torch.no_grad()
def check_shape(network: nn.Module, x: Tensor, name: str) -> None:
    """Raise a RecipeError where the network does not take a batch of such samples."""
    mode = network.training
    try:
        network.eval()(x)
    except (RuntimeError, ValueError) as error:
        shape = "x".join(str(size) for size in x.shape[1:])
        reason = str(error).strip().partition("\n")[0]
        raise RecipeError(f"`model.name` {name!r} does not take samples of {shape} ({reason})") from error
    finally:
        network.train(mode)
    if len(x) == 1:
        check_alone(network, x, name)


def check_alone(network: nn.Module, x: Tensor, name: str) -> None:
    """Raise a RecipeError where a network cannot train on a batch of one, as statistics of one sample are none."""
    with torch.random.fork_rng():
        try:
            copy.deepcopy(network).train()(x)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise RecipeError(f"`batch_size` must be at least 2 for {name!r}, got 1 ({reason})") from error


def build_model(config: ModelConfig, dataset: Dataset) -> nn.Module:
    """The bare model for a set's classes and channels."""
    arguments = config.arguments
    if dataset.kind == "images" and "/" not in config.name and config.name in models.names():
        options = models.describe(config.name).options
        if "in_channels" in options:
            arguments.setdefault("in_channels", channels(dataset))
    try:
        return models.create(config.name, num_classes=len(dataset.classes), **arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"`model`: {error}") from error


def channels(dataset: Dataset) -> int:
    """The channels of a set's images; files are decoded to three."""
    return 3 if isinstance(dataset.train, Files) else int(dataset.train.inputs.shape[1])
