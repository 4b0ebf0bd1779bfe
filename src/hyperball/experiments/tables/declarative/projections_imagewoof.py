"""Projections before the classifier of a ResNet-18 on Imagewoof."""

from __future__ import annotations

from functools import partial

from hyperball.experiments.pictures import convergence, learned_radii
from hyperball.experiments.protocols import shorter
from hyperball.experiments.table import Entry, Experiment, Reduction, published
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.experiments.tables.declarative.projections import (
    ALSO,
    BIAS,
    CROPS,
    DOGS,
    NOTES,
    SMALL_DOGS,
    dogs,
    entries,
)
from hyperball.training.recipe import Recipe


def quick_imagewoof(recipe: Recipe) -> Recipe:
    small = {
        "data.image_size": 64,
        "data.workers": 2,
        "data.crop": "window",
        "model.options": {**recipe.model.options, "width": 16},
    }
    return shorter(recipe, 1 / 3, **small, precision="fp32")


SLOWER = {"optimizer.lr": 0.01}
AT_ANOTHER_RATE = (("none", "no projection"), ("BatchNorm alone (control)", "no projection"), ("l2 sphere", "adaptive"))
RATE = (
    "BatchNorm before the classifier divides gradients by the deviation of each feature, so that a rate may be too "
    "large for one head and not for another: three controls have 0.01 instead of 0.1"
)


def at_another_rate(entry: Entry) -> Entry:
    """The control of an entry that learns at 0.01."""
    row = f"{entry.row.removesuffix(' (control)')}, learning rate 0.01 (control)"
    return Entry(row, entry.column, entry.recipe.override(SLOWER), kind="control")


def table() -> Experiment:
    """All six projections before the classifier of a ResNet-18, from an image folder, and controls."""
    facts = published()["ddn_projection_imagewoof"]["cells"]["resnet18"]
    cells = entries(facts, partial(dogs, "resnet18", classifier_bias=True))
    controls = tuple(at_another_rate(entry) for entry in cells if (entry.row, entry.column) in AT_ANOTHER_RATE)
    return Experiment(
        "projections-imagewoof", "Projections before the classifier, Imagewoof", SOURCE, "top1", (*cells, *controls),
        notes=(BIAS, CROPS, *NOTES, DOGS, RATE, "other networks: projections-imagewoof-networks"),
        also=ALSO, protocol=SMALL_DOGS,
        reduction=Reduction(
            quick_imagewoof,
            "30 of 90 epochs on images of 64×64 pixels, random ones of 73×73 instead of parts of 8 to 100 %; 16 "
            "channels instead of 64 at the start; fp32",
        ),
        draws=(convergence, learned_radii),
    )  # fmt: skip
