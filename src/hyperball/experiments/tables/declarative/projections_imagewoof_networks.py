"""Projections before the classifiers of two more networks on Imagewoof."""

from __future__ import annotations

from hyperball.experiments.pictures import learned_radii
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.experiments.tables.declarative.projections import (
    ALSO,
    CROPS,
    DOGS,
    NOTES,
    QUICK_NETWORKS,
    SMALL_DOGS,
    dogs,
    network_entries,
)


def table() -> Experiment:
    """The same before the classifiers of torchvision's GoogLeNet and DenseNet-121, from an image folder."""
    return Experiment(
        "projections-imagewoof-networks", "Projections in two more networks, Imagewoof", SOURCE, "top1",
        network_entries("ddn_projection_imagewoof", dogs),
        notes=("torchvision's networks; GoogLeNet without its auxiliary classifiers", CROPS, *NOTES, DOGS),
        also=ALSO, reduction=QUICK_NETWORKS, draws=(learned_radii,), protocol=SMALL_DOGS,
    )  # fmt: skip
