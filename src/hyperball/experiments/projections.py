"""Projections before the classifier of a ResNet-18, on CIFAR-10 and Imagewoof, with a control of BatchNorm alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyperball.experiments.declarative import ALSO, SOURCE
from hyperball.experiments.pictures import convergence, learned_radii
from hyperball.experiments.protocols import projected, shorter
from hyperball.experiments.table import Entry, Experiment, Reduction, published
from hyperball.training.recipe import Recipe

SETS = {f"{norm} {surface}": f"{norm}_{surface}" for norm in ("l1", "l2", "linf") for surface in ("sphere", "ball")}
BATCH_NORM = "l2_ball(radius=1000000.0, learn=False)"  # no feature vector is that long: BatchNorm alone
NOTES = (
    "the published networks saw 224×224 images",
    "map6_raw ranks raw logits of the first six classes as published, which projections change by construction; "
    "map_raw and map_softmax cover all classes, ece is the calibration error",
    "the slides say that the adaptive L∞ projections fail; no number is published for any L∞",
    '"BatchNorm alone" is the head without its projection',
)


def not_built(table: str) -> str:
    """The published networks of a table that no entry stands for."""
    others = ", ".join(name for name in published()[table]["cells"] if name != "resnet18")
    return f"published and not built here, all on 224×224 images: {others}"


def quick_cifar(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 2000, "data.test_size": 1000, "precision": "fp32"}
    return shorter(recipe, 1 / 15, **sizes, **{"model.options": {**recipe.model.options, "width": 16}})


def quick_imagewoof(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1000, "data.test_size": 500, "precision": "fp32", "batch_size": 32}
    small = {"data.image_size": 64, "data.workers": 2, "model.options": {"width": 16}}
    return shorter(recipe, 1 / 15, **sizes, **small)


def projection_text(projection: str, how: str) -> str:
    return f"{projection}(learn={how == 'adaptive'})"


def entries(facts: dict[str, Any], make: Callable[[str | None], Recipe]) -> tuple[Entry, ...]:
    """No projection, BatchNorm alone, and the six sets with fixed and learned radii."""
    none = facts["none"]
    made = [
        Entry("none", "no projection", make(None), none["top1"], also={"map6_raw": none["map"]}),
        Entry("BatchNorm alone (control)", "no projection", make(BATCH_NORM), kind="control"),
    ]
    for row, projection in SETS.items():
        for how in ("fixed", "adaptive"):
            held = facts.get(row, {}).get(how, {})
            also = {"map6_raw": held["map"]} if held else {}
            recipe = make(projection_text(projection, how))
            made.append(Entry(row, how, recipe, held.get("top1"), kind="published" if held else "control", also=also))
    return tuple(made)


def cifar10() -> Experiment:
    """All six projections before the classifier of a ResNet-18 with a stem for 32×32 images, and a control."""
    facts = published()["ddn_projection_cifar10"]["cells"]["resnet18"]
    cells = entries(facts, lambda text: projected("cifar10", "resnet18", text, stem="cifar"))
    return Experiment(
        "projections-cifar10", "Projections before the classifier, CIFAR-10", SOURCE, "top1", cells,
        notes=("32×32 images and a stem of one 3×3 convolution", *NOTES, not_built("ddn_projection_cifar10")),
        also=ALSO, protocol="the published schedule, but 32×32 instead of 224×224 images and a stem for them",
        reduction=Reduction(
            quick_cifar, "6 of 90 epochs on 2,000 images, tested on 1,000; 16 channels instead of 64 at the start; fp32"
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip


def imagewoof() -> Experiment:
    """The same on Imagewoof, from an image folder."""
    facts = published()["ddn_projection_imagewoof"]["cells"]["resnet18"]

    def make(text: str | None) -> Recipe:
        return projected("imagewoof", "resnet18", text).override({"data.workers": 8})

    return Experiment(
        "projections-imagewoof", "Projections before the classifier, Imagewoof", SOURCE, "top1", entries(facts, make),
        notes=(*NOTES, not_built("ddn_projection_imagewoof")), also=ALSO,
        reduction=Reduction(
            quick_imagewoof,
            "6 of 90 epochs on 1,000 images of 64×64 pixels in batches of 32, tested on 500; 16 channels instead of 64 "
            "at the start; fp32",
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip
