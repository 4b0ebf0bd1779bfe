"""Projections before the classifiers of the published networks, on CIFAR-10 and Imagewoof, and BatchNorm alone.

ResNet-18 has tables of its own, on CIFAR-10 at 32×32 pixels; there the other networks see images as large as published.
On Imagewoof all see 112×112 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hyperball.experiments.declarative import BESIDE, SOURCE
from hyperball.experiments.pictures import convergence, learned_radii
from hyperball.experiments.protocols import projected, shorter
from hyperball.experiments.table import Entry, Experiment, Kind, Reduction, published
from hyperball.training.recipe import Recipe

SETS = {f"{norm} {surface}": f"{norm}_{surface}" for norm in ("l1", "l2", "linf") for surface in ("sphere", "ball")}
BATCH_NORM = "l2_ball(radius=1000000.0, learn=False)"  # no feature vector is that long: BatchNorm alone
NETWORKS = {  # by the names of the published tables
    "googlenet": "torchvision/googlenet", "densenet121": "torchvision/densenet121",
    "alexnet": "torchvision/alexnet", "vgg11": "torchvision/vgg11",
}  # fmt: skip
PLAIN = (NETWORKS["alexnet"], NETWORKS["vgg11"])  # nothing in them normalizes: 0.1 is too much
SLOWLY = {"optimizer.lr": 0.01, "schedule": {"name": "constant"}}  # theirs in the code published with the paper
PUBLISHED_SIZE, DOG_SIZE = 224, 112
SMALL_DOGS = (
    f"the published schedule, but {DOG_SIZE}×{DOG_SIZE} instead of {PUBLISHED_SIZE}×{PUBLISHED_SIZE} images, which is "
    "what the copy of Imagewoof used here has"
)
CROPS = (
    "training sees random parts of 8 to 100 % of an image, and flips, as in the published code, here of the central "
    "128×128 pixels and at 112×112, there of all and at 224×224; tests see the center of 128×128, there of 256×256"
)
BEST = (
    "the paper's numbers may be of best epochs: the code published with it prints the highest accuracy and the highest "
    "mAP of all tests, one after each epoch; ours are of the last epoch"
)
DOGS = (
    "classes are in the order of the official folders, whatever a copy calls them: mAP is of the first six there, "
    "Shih-Tzu to Australian terrier"
)
NOTES = (
    "the published networks saw 224×224 images",
    BEST,
    "the paper's mAP, as its code computes it, is voc6_raw: the interpolated one of the first six classes, ranked by "
    "raw logits, which projections change by construction; records of before it was measured here have map6_raw alone, "
    "which is not interpolated; map_raw and map_softmax cover all classes, ece is the calibration error",
    "the slides say that the adaptive L∞ projections fail; no number is published for any L∞",
    '"BatchNorm alone" is the head without its projection',
    "a radius r is learned as log r, at 0.01/r² for the r at the start: its first steps are those of r itself at the "
    "published 0.01; r stays positive that way, so that a radius that falls to zero or below it, as an r learned "
    "itself can, and may have for the slides' L∞, is no way of failing here",
    "except at the scale quick, networks compute in bf16; tests compute the classifier in fp32, as rounded logits "
    "would tie, which lowers mAP",
)
PAPERS_MAP = "voc6_raw"
ALSO = (PAPERS_MAP, *BESIDE)
BIAS = "the classifier has a bias, as torchvision's ResNet-18"


def quick_cifar(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 2000, "data.test_size": 1000, "data.crop": "zero", "precision": "fp32"}
    return shorter(recipe, 1 / 15, **sizes, **{"model.options": {**recipe.model.options, "width": 16}})


def quick_imagewoof(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1000, "data.test_size": 500, "precision": "fp32", "batch_size": 32}
    small = {
        "data.image_size": 64,
        "data.workers": 2,
        "data.crop": "window",
        "model.options": {**recipe.model.options, "width": 16},
    }
    return shorter(recipe, 1 / 15, **sizes, **small)


def projection_text(projection: str, how: str) -> str:
    return f"{projection}(learn={how == 'adaptive'})"


def entries(facts: dict[str, Any], make: Callable[[str | None], Recipe], of: str = "") -> tuple[Entry, ...]:
    """No projection, BatchNorm alone, and the six sets with fixed and learned radii; `of` begins every row."""
    none = facts["none"]
    made = [
        Entry(f"{of}none", "no projection", make(None), none["top1"], also={PAPERS_MAP: none["map"]}),
        Entry(f"{of}BatchNorm alone (control)", "no projection", make(BATCH_NORM), kind="control"),
    ]
    for row, projection in SETS.items():
        for how in ("fixed", "adaptive"):
            held = facts.get(row, {}).get(how, {})
            also = {PAPERS_MAP: held["map"]} if held else {}
            recipe = make(projection_text(projection, how))
            kind: Kind = "published" if held else "control"
            made.append(Entry(f"{of}{row}", how, recipe, held.get("top1"), kind=kind, also=also))
    return tuple(made)


def cifar10() -> Experiment:
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
            "6 of 90 epochs on 2,000 images, tested on 1,000; 32×32 pixels of images padded with 4 black ones on each "
            "side instead of parts of 8 to 100 %; 16 channels instead of 64 at the start; fp32",
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip


def dogs(network: str, projection: str | None, **options: Any) -> Recipe:
    """A projected classifier on Imagewoof, whose images are decoded once."""
    held = {"data.workers": 8, "data.image_size": DOG_SIZE, "log.evaluate_every": 5}
    return projected("imagewoof", network, projection, **options).override(held)


def imagewoof() -> Experiment:
    """The same on Imagewoof, from an image folder."""
    facts = published()["ddn_projection_imagewoof"]["cells"]["resnet18"]
    return Experiment(
        "projections-imagewoof", "Projections before the classifier, Imagewoof", SOURCE, "top1",
        entries(facts, partial(dogs, "resnet18", classifier_bias=True)),
        notes=(BIAS, CROPS, *NOTES, DOGS, "other networks: projections-imagewoof-networks"),
        also=ALSO, protocol=SMALL_DOGS,
        reduction=Reduction(
            quick_imagewoof,
            "6 of 90 epochs on 1,000 images of 64×64 pixels in batches of 32, tested on 500; random 64×64 pixels of "
            "73×73 instead of parts of 8 to 100 %; 16 channels instead of 64 at the start; fp32",
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip


def network_entries(table: str, make: Callable[[str, str | None], Recipe]) -> tuple[Entry, ...]:
    """The entries of every published network but ResNet-18; `make` takes a network and a projection."""
    made: list[Entry] = []
    for name, facts in published()[table]["cells"].items():
        if name in NETWORKS:
            made += entries(facts, partial(make, NETWORKS[name]), f"{name}, ")
    return tuple(made)


def quick_networks(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1000, "data.test_size": 500, "precision": "fp32", "batch_size": 32}
    side = {"model.options": {"enlarge": 64}} if recipe.model.options else {"data.image_size": 64, "data.workers": 2}
    return shorter(recipe, 1 / 30, **sizes, **side)


QUICK_NETWORKS = Reduction(
    quick_networks, "3 of 90 epochs on 1,000 images of 64×64 pixels in batches of 32, tested on 500; fp32"
)


def cifar10_networks() -> Experiment:
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


def imagewoof_networks() -> Experiment:
    """The same before the classifiers of torchvision's GoogLeNet and DenseNet-121, from an image folder."""
    return Experiment(
        "projections-imagewoof-networks", "Projections in two more networks, Imagewoof", SOURCE, "top1",
        network_entries("ddn_projection_imagewoof", dogs),
        notes=("torchvision's networks; GoogLeNet without its auxiliary classifiers", CROPS, *NOTES, DOGS),
        also=ALSO, reduction=QUICK_NETWORKS, draws=(learned_radii,), protocol=SMALL_DOGS,
    )  # fmt: skip
