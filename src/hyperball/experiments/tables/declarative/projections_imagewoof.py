"""Projections before the classifier of a ResNet-18 on Imagewoof."""

from __future__ import annotations

from functools import partial

from hyperball.experiments.pictures import convergence, learned_radii
from hyperball.experiments.protocols import shorter
from hyperball.experiments.table import Experiment, Reduction, published
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
    sizes = {"data.train_size": 1000, "data.test_size": 500, "precision": "fp32", "batch_size": 32}
    small = {
        "data.image_size": 64,
        "data.workers": 2,
        "data.crop": "window",
        "model.options": {**recipe.model.options, "width": 16},
    }
    return shorter(recipe, 1 / 15, **sizes, **small)


def table() -> Experiment:
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
