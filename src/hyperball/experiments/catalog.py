"""Recipes by name: the two sets that need no download, and the published protocols for plain baselines.

Protocols: Liu et al., Decoupled Networks (CIFAR); Du, Adaptive Robust Pooling (ModelNet40). An operator is put in with
`recipe.override({"model.magnitude": "tanh"})`; weight projection and the orthonormal term of the CIFAR protocol act on
decoupled layers, and so are left to the variant.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyperball.training.recipe import Recipe


@dataclass(frozen=True)
class Named:
    """A recipe and a sentence about it."""

    about: str
    recipe: Recipe


def cifar(name: str) -> Recipe:
    """CNN-9 as published: 42,500 steps of Adam, divided by 10 at 20,000, 30,000 and 37,500."""
    return Recipe.from_dict({
        "data": {"name": name, "crop": "mirror", "pad": 4, "flip": True},
        "model": {"name": "cnn9", "options": {"norm_eps": 1e-3, "norm_momentum": 0.001}},
        "optimizer": {"name": "adam", "lr": 1e-3, "weight_decay": 5e-4, "decay": "weights+norms"},
        "schedule": {"name": "step", "unit": "steps", "milestones": [20000, 30000, 37500]},
        "regularizers": {"label_smoothing": 0.01},
        "steps": 42500,
        "batch_size": 128,
    })  # fmt: skip


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
    "cifar10": Named("CNN-9 on CIFAR-10 as published, 42,500 steps", cifar("cifar10")),
    "cifar100": Named("CNN-9 on CIFAR-100 as published, 42,500 steps", cifar("cifar100")),
    "modelnet40": Named(
        "PointNet with max pooling on ModelNet40 as published, 60 epochs",
        Recipe.from_dict({
            "data": {"name": "modelnet40"}, "model": {"name": "pointnet", "pool": "max"},
            "optimizer": {"name": "sgd", "lr": 1e-3, "momentum": 0.9},
            "schedule": {"name": "step", "every": 20, "gamma": 0.5}, "epochs": 60, "batch_size": 24,
        }),
    ),
}  # fmt: skip
