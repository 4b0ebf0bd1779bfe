"""The papers' protocols as recipes.

Liu et al., Decoupled Networks (CVPR 2018), with the authors' code where the paper is silent; Du, Adaptive Robust
Pooling and Projections in Deep Declarative Networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyperball.convert.heads import PROJECTIONS, parse_projection
from hyperball.nn.projection import DEFAULT_RADIUS
from hyperball.training.recipe import Recipe

UNTRAINED = 'where the paper has "N/C" it could not train the network'
CIFAR_STEPS = 42_500
CIFAR_MILESTONES = (20_000, 30_000, 37_500)
IMAGENET_STEPS = 700_000
IMAGENET_MILESTONES = (200_000, 375_000, 550_000)
ORTHONORMAL = 0.5e-5
RADIUS_RATE = 0.01  # published, of r itself
SHAPE_RATE = 9 / 4  # shape = 3·sigmoid(raw) moves by 2/3 of raw where it is 1
AUTHORS_NORM = {"norm_eps": 1e-3, "norm_momentum": 0.001}


def cifar(data: str, model: str, precision: str = "bf16", **operator: Any) -> Recipe:
    """Adam 1e-3, batch 128, 42,500 steps, divided by 10 at 20,000, 30,000 and 37,500; mirror-padded crops and flips.

    With a `magnitude`, filters are projected every 100 steps and the orthonormal term is added, as the authors do.
    """
    decoupled = operator.get("magnitude") is not None
    options = AUTHORS_NORM if operator.get("norm") != "none" else {}
    return Recipe.from_dict({
        "data": {"name": data, "crop": "mirror", "pad": 4, "flip": True},
        "model": {"name": model, "options": options, **operator},
        "optimizer": {"name": "adam", "lr": 1e-3, "weight_decay": 5e-4, "decay": "weights+norms"},
        "schedule": {"name": "step", "unit": "steps", "milestones": CIFAR_MILESTONES},
        "regularizers": {"label_smoothing": 0.01, "orthogonality": ORTHONORMAL if decoupled else 0.0},
        "projection": {"every": 100 if decoupled and operator.get("weighting", "none") == "none" else None},
        "steps": CIFAR_STEPS, "batch_size": 128, "precision": precision,
        "log": {"checkpoint_every": 10, "evaluate_every": 2},
    })  # fmt: skip


def pointnet(pool: str, precision: str = "fp32") -> Recipe:
    """PointNet without transforms on ModelNet40: SGD 0.9, lr 0.001 halved every 20 of 60 epochs, batch 24.

    What a pooling learns has the rate of all else. It is log c, which at the start, c = 1, moves c as c itself would;
    for the shape it is logit(shape/3), whose rate is 9/4 of that so that the first step is the same too.
    """
    rate = 1e-3
    return Recipe.from_dict({
        "data": {"name": "modelnet40"},
        "model": {"name": "pointnet", "pool": pool},
        "optimizer": {
            "name": "sgd", "lr": rate, "momentum": 0.9,
            "radius_lr": rate * SHAPE_RATE if "learn_shape=True" in pool else None,
        },
        "schedule": {"name": "step", "every": 20, "gamma": 0.5},
        "epochs": 60, "batch_size": 24, "precision": precision, "log": {"checkpoint_every": 10},
    })  # fmt: skip


def projected(data: str, model: str, projection: str | None, **options: Any) -> Recipe:
    """A projected classifier: SGD 0.9, decay 1e-4, 90 epochs, lr 0.1 divided by 10 every 30, the radius at 0.01.

    Networks are trained on random parts of 8 to 100 % of an image, as in the published code.
    """
    return Recipe.from_dict({
        "data": {"name": data, "flip": True, "crop": "part"},
        "model": {"name": model, "projection": projection, "options": options},
        "optimizer": {
            "name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "decay": "all",
            "radius_lr": radius_rate(projection), "radius_schedule": "constant",
        },
        "schedule": {"name": "step", "every": 30},
        "epochs": 90, "batch_size": 128, "precision": "bf16", "log": {"checkpoint_every": 10},
    })  # fmt: skip


def radius_rate(projection: str | None) -> float | None:
    """0.01/r², with which a step of log r moves r at its start as one of 0.01 of r itself; None without a learned r."""
    if projection is None:
        return None
    name, given = parse_projection(projection)
    if not given.get("learn", True):
        return None
    radius: float = given.get("radius") or DEFAULT_RADIUS[PROJECTIONS[name][0]]
    return RADIUS_RATE / radius**2


def imagenet(model: str, norm: str, operator: Mapping[str, Any]) -> Recipe:
    """SGD 0.9, lr 0.1, batch 40, 700,000 steps, divided by 10 at 200,000, 375,000 and 550,000; PReLU."""
    decoupled = operator.get("magnitude") is not None
    return Recipe.from_dict({
        "data": {"name": "imagenet", "flip": True, "image_size": 224, "workers": 16},
        "model": {
            "name": model, "norm": norm, "activation": "prelu", "options": AUTHORS_NORM if norm != "none" else {},
            **operator,
        },
        "optimizer": {
            "name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "decay": "weights+norms",
        },
        "schedule": {"name": "step", "unit": "steps", "milestones": IMAGENET_MILESTONES},
        "regularizers": {"orthogonality": ORTHONORMAL if decoupled else 0.0},
        "projection": {"every": 100 if decoupled else None},
        "steps": IMAGENET_STEPS, "batch_size": 40, "precision": "bf16",
    })  # fmt: skip


def mnist_features(operator: Mapping[str, Any], adversarial: bool) -> Recipe:
    """CNN-9 for attacks with two features on MNIST: Adam 3e-3, batch 128, 20 epochs, divided by 10 at 10 and 15.

    With alpha = 1, as published, two bounded features are no longer than about 1, and logits grow with the weights of
    the classifier alone, which at 1e-3 such a schedule leaves too short to tell ten classes apart. Adversarial training
    takes FGSM of epsilon 0.1 on every other half of the loss; the paper says neither.
    """
    return Recipe.from_dict({
        "data": {"name": "mnist"},
        "model": {"name": "cnn9_features", **operator},
        "optimizer": {"name": "adam", "lr": 3e-3},
        "schedule": {"name": "step", "milestones": [10, 15]},
        "adversarial": {"method": "fgsm", "epsilon": 0.1, "share": 0.5} if adversarial else {},
        "epochs": 20, "batch_size": 128, "precision": "fp32",
    })  # fmt: skip


def shorter(recipe: Recipe, factor: float, **overrides: Any) -> Recipe:
    """The schedule compressed by a factor, milestones with it; milestones in epochs may become fractions."""
    marks, whole = recipe.schedule.milestones, recipe.schedule.unit == "steps"
    compressed = [max(1, round(mark * factor)) if whole else mark * factor for mark in marks]
    changes: dict[str, Any] = {"schedule.milestones": compressed} if marks else {}
    for name in ("steps", "epochs"):
        total = getattr(recipe, name)
        if total is not None:
            changes[name] = max(1, round(total * factor))
    if recipe.schedule.every is not None:
        changes["schedule.every"] = recipe.schedule.every * factor
    for name in ("schedule.warmup", "homotopy.steps"):
        section, _, key = name.partition(".")
        length = getattr(getattr(recipe, section), key)
        if length:
            changes[name] = type(length)(length * factor)
    return recipe.override({**changes, **overrides})
