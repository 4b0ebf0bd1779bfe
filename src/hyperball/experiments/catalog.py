"""Recipes by name: the two sets that need no download, and the published protocols for plain baselines.

An operator is put in with `recipe.override({"model.magnitude": "tanh"})`; weight projection and the orthonormal term of
the CIFAR protocol act on decoupled layers, and so are left to the variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyperball.experiments.protocols import cifar, pointnet
from hyperball.training.recipe import Recipe


@dataclass(frozen=True)
class Named:
    """A recipe and a sentence about it."""

    about: str
    recipe: Recipe


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with these changes; `epochs` without `steps` replaces them, and the other way round."""
    for given, other in (("epochs", "steps"), ("steps", "epochs")):
        if changes.get(given) is not None and other not in changes:
            changes = {**changes, other: None}
    return recipe.override(changes)


RECIPES = {
    "digits": Named(
        "a small CNN on scikit-learn's digits, 10 epochs, no download",
        Recipe.from_dict({
            "data": {"name": "digits"}, "model": {"name": "digits"}, "optimizer": {"name": "adamw", "lr": 3e-3},
            "epochs": 10, "batch_size": 64,
        }),
    ),
    "clouds": Named(
        "a small PointNet with max pooling on procedural point clouds, 10 epochs, no download",
        Recipe.from_dict({
            "data": {"name": "clouds"}, "model": {"name": "points", "pool": "max"},
            "optimizer": {"name": "adam", "lr": 3e-3}, "epochs": 10, "batch_size": 50,
        }),
    ),
    "cifar10": Named("CNN-9 on CIFAR-10 as published, 42,500 steps", cifar("cifar10", "cnn9", "fp32")),
    "cifar100": Named("CNN-9 on CIFAR-100 as published, 42,500 steps", cifar("cifar100", "cnn9", "fp32")),
    "modelnet40": Named(
        "PointNet with max pooling on ModelNet40 as published, 60 epochs",
        pointnet("max"),
    ),
}  # fmt: skip
