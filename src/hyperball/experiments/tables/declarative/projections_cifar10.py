"""Projections before the classifier of a ResNet-18 on CIFAR-10."""

from __future__ import annotations

from hyperball.experiments.pictures import convergence, learned_radii
from hyperball.experiments.protocols import projected, shorter
from hyperball.experiments.table import Experiment, Reduction, published
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.experiments.tables.declarative.projections import (
    ALSO,
    BIAS,
    NOTES,
    entries,
    with_fewer_features,
)
from hyperball.training.recipe import Recipe

WIDTH = 64  # channels at the start


def quick_cifar(recipe: Recipe) -> Recipe:
    small = {"width": WIDTH // 4, "stem": "imagenet"}
    return shorter(
        recipe, 1 / 10, **{"data.crop": "zero", "precision": "fp32"},
        **{"model.options": {**recipe.model.options, **small}}, **with_fewer_features(recipe.model.projection, 1 / 4),
    )  # fmt: skip


def table() -> Experiment:
    """All six projections before the classifier of a ResNet-18 with a stem for 32×32 images, and a control."""
    facts = published()["ddn_projection_cifar10"]["cells"]["resnet18"]
    cells = entries(facts, lambda text: projected("cifar10", "resnet18", text, stem="cifar", classifier_bias=True))
    return Experiment(
        "projections-cifar10", "Projections before the classifier, CIFAR-10", SOURCE, "top1", cells,
        notes=(
            "32×32 images and a stem of one 3×3 convolution",
            "training sees random parts of 8 to 100 % of an image, and flips, as in the published code, which enlarges "
            "to 256×256 before and takes them at 224×224, and tests at 256×256",
            BIAS, *NOTES,
            "other networks: projections-cifar10-networks",
        ),
        also=ALSO,
        protocol="the published schedule, but 32×32 instead of 224×224 images and a stem for them",
        reduction=Reduction(
            quick_cifar,
            "9 of 90 epochs; 32×32 pixels of images padded with 4 black ones on each side instead of parts of 8 to "
            f"100 %; {WIDTH // 4} channels instead of {WIDTH} at the start and torchvision's stem, which leaves one "
            "pixel in the end; L1 radii a quarter and L2 radii half as long, for 128 features instead of 512; fp32",
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip
