"""Architecture against operator: an open question of Decoupled Networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperball.experiments.protocols import cifar, shorter
from hyperball.experiments.table import Experiment, Reduction
from hyperball.experiments.tables.dcnet.ours import LEARNED_SHAPE, ours
from hyperball.training.recipe import Recipe

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "cnn9": ("cnn9", {}),
    "vgg11": ("torchvision/vgg11_bn", {"small_head": True}),
    "googlenet": ("torchvision/googlenet", {}),
    "resnet18": ("resnet18", {"stem": "cifar"}),
    "resnet32": ("resnet32", {}),
}
MAGNITUDES = {"tanh": "tanh", "linear": "linear", "ball": "ball", "barron, learned shape": LEARNED_SHAPE}


def architecture_recipe(model: str, options: Mapping[str, Any], magnitude: str | None, angular: str) -> Recipe:
    """The CIFAR protocol on CIFAR-10 with torch's own settings of normalization, which other people's models have."""
    operator = {} if magnitude is None else {"magnitude": magnitude, "angular": angular}
    return cifar("cifar10", model, **operator).override({"model.options": dict(options)})


NARROW: dict[str, dict[str, int]] = {
    "cnn9": {"width": 16, "features": 256},
    "resnet18": {"width": 16},
    "resnet32": {"width": 16},
}


def quick_architecture(recipe: Recipe) -> Recipe:
    """600 steps of small batches, one pass; our networks narrow, other people's, whose maps are small here, whole."""
    options = {**recipe.model.options, **NARROW.get(recipe.model.name, {})}
    sizes = {"batch_size": 32, "data.train_size": 19_200, "model.options": options}
    return shorter(recipe, 12 / 850, precision="fp32", **sizes)


def table() -> Experiment:
    """Does an operator help every architecture? A grid of networks, magnitudes and angular functions."""
    operators = {"baseline": (None, "cosine")} | {
        f"{row}, {angular}": (magnitude, angular)
        for row, magnitude in MAGNITUDES.items()
        for angular in ("cosine", "square_cosine")
    }
    cells = [
        ours(row, name, architecture_recipe(model, options, *operator))
        for name, (model, options) in ARCHITECTURES.items()
        for row, operator in operators.items()
    ]
    return Experiment(
        "architectures", "Architecture against operator, CIFAR-10", "An open question of Decoupled Networks", "error",
        tuple(cells),
        notes=(
            "torchvision's VGG-11 with BatchNorm and GoogLeNet see 32×32 images through their stems for 224×224; VGG's "
            "classifier is one linear layer, as its three, for 7×7 positions, have 120 of its 129 million weights",
            "1×1 convolutions of shortcuts and classifiers stay plain",
            "no paper has these networks in one table; BatchNorm has torch's eps and momentum in all of them",
        ),
        protocol="the schedule that Decoupled Networks has for CIFAR, in a table that no paper has",
        reduction=Reduction(
            quick_architecture,
            "16 channels at the start of CNN-9, ResNet-18 and ResNet-32 instead of 64, 64 and 96; 600 steps instead of "
            "42,500, milestones likewise, in batches of 32 instead of 128: one pass over 19,200 of 50,000 images; fp32",
        ),
    )  # fmt: skip
