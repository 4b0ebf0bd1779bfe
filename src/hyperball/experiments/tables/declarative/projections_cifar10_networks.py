"""Projections before the classifiers of four more networks on CIFAR-10."""

from __future__ import annotations

from hyperball.experiments.pictures import learned_radii
from hyperball.experiments.protocols import projected
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.experiments.tables.declarative.projections import (
    ALSO,
    NETWORKS,
    NOTES,
    PUBLISHED_SIZE,
    QUICK_NETWORKS,
    network_entries,
)
from hyperball.training.recipe import Recipe

PLAIN = (NETWORKS["alexnet"], NETWORKS["vgg11"])  # nothing in them normalizes: 0.1 is too much
SLOWLY = {"optimizer.lr": 0.01, "schedule": {"name": "constant"}}  # theirs in the code published with the paper


def table() -> Experiment:
    """The same before the classifiers of torchvision's GoogLeNet, DenseNet-121, AlexNet and VGG-11."""

    def make(network: str, text: str | None) -> Recipe:
        recipe = projected("cifar10", network, text, enlarge=PUBLISHED_SIZE)
        return recipe.override(SLOWLY) if network in PLAIN else recipe

    return Experiment(
        "projections-cifar10-networks", "Projections in four more networks, CIFAR-10", SOURCE, "top1",
        network_entries("ddn_projection_cifar10", make),
        notes=(
            "torchvision's networks; GoogLeNet without its auxiliary classifiers, VGG-11 without BatchNorm",
            "AlexNet and VGG-11, which have no BatchNorm, have lr 0.01 to the end, as in the published code: with the "
            "0.1 of the others they stay at chance",
            "training sees random parts of 8 to 100 % of an image, flipped and enlarged to 224×224, of 32×32 pixels "
            "before; the published code enlarges to 256×256, takes such parts of that, and tests at 256×256",
            "in the published code DenseNet-121 has no BatchNorm before its projection; here it has",
            *NOTES[1:],
        ),
        also=ALSO, reduction=QUICK_NETWORKS, draws=(learned_radii,),
        protocol="the published schedule, but parts of images before enlarging, and lr 0.01 to the end for AlexNet and "
        "VGG-11, as the published code has it",
    )  # fmt: skip
