"""Robust pooling in a PointNet on ModelNet40 with outliers, and projections before a classifier."""

from __future__ import annotations

from typing import Any

from hyperball.experiments.protocols import pointnet, projected, shorter
from hyperball.experiments.table import Entry, Experiment, Reduction, published
from hyperball.training.recipe import Recipe

SOURCE = "Du, Adaptive robust pooling and projections in deep declarative networks"
ONE_RATE = "fixed and adaptive poolings share one learning rate, which moves the result more than learning c does"
POOLS = {"max": "max", "quadratic": "mean"}


def quick_points(recipe: Recipe) -> Recipe:
    return shorter(recipe, 1 / 10, **{"data.train_size": 1200, "data.test_size": 600, "data.points": 256})


def quick_images(recipe: Recipe) -> Recipe:
    return shorter(recipe, 1 / 15, **{"data.train_size": 2000, "data.test_size": 1000, "precision": "fp32"})


POINTS = Reduction(quick_points, "6 of 60 epochs on 1,200 clouds of 256 points, tested on 600")
IMAGES = Reduction(quick_images, "6 of 90 epochs on 2,000 images, tested on 1,000")


def pool_text(row: str) -> str:
    """The pooling of a row such as "huber adaptive", whose c (barron: shape) is learned."""
    penalty, _, how = row.partition(" ")
    if penalty in POOLS:
        return POOLS[penalty]
    learned = "learn_shape=True" if penalty == "barron" else "learn_c=True"
    return f"{penalty}({learned})" if how == "adaptive" else penalty


def test_outliers() -> Experiment:
    """Trained on clean clouds, tested with a growing share of outliers."""
    facts = published()["ddn_pooling_test_outliers"]
    shares = {f"{share} %": {"outliers": int(share) / 100} for share in facts["outlier_percent"]}
    cells = tuple(
        Entry(
            row, "trained clean", pointnet(pool_text(row)), values["0"][0], conditions=shares,
            published_conditions={f"{share} %": pair[0] for share, pair in values.items()},
        )
        for row, values in facts["cells"].items()
    )  # fmt: skip
    return Experiment(
        "pooling-test-outliers", "Robust pooling, outliers in the test alone, ModelNet40", SOURCE, "top1", cells,
        notes=(ONE_RATE,), reduction=POINTS,
    )  # fmt: skip


def all_outliers() -> Experiment:
    """Trained and tested with the same share of outliers."""
    facts = published()["ddn_pooling_train_and_test_outliers"]
    cells = tuple(
        Entry(row, f"{share} %", pointnet(pool_text(row)).override({"data.outliers": int(share) / 100}), pair[0])
        for row, values in facts["cells"].items()
        for share, pair in values.items()
    )
    return Experiment(
        "pooling-outliers", "Robust pooling, outliers in training and test, ModelNet40", SOURCE, "top1", cells,
        notes=(ONE_RATE,), reduction=POINTS,
    )  # fmt: skip


SETS = {f"{norm} {surface}": f"{norm}_{surface}" for norm in ("l1", "l2", "linf") for surface in ("sphere", "ball")}


def projection_text(projection: str, how: str) -> str:
    return f"{projection}(learn={how == 'adaptive'})"


def projections_cifar10() -> Experiment:
    """All six projections before the classifier of a ResNet-18 with a stem for 32×32 images, and a control."""
    facts = published()["ddn_projection_cifar10"]["cells"]["resnet18"]
    entries = [
        Entry("none", "no projection", projected("cifar10", "resnet18", None, stem="cifar"), facts["none"]["top1"])
    ]
    for row, projection in SETS.items():
        for how in ("fixed", "adaptive"):
            value: Any = facts.get(row, {}).get(how, {}).get("top1")
            recipe = projected("cifar10", "resnet18", projection_text(projection, how), stem="cifar")
            entries.append(Entry(row, how, recipe, value))
    notes = (
        "32×32 images and a stem of one 3×3 convolution; the published networks saw 224×224",
        "published mAP covers six classes and ranks raw logits; records hold it beside mAP over all classes and ECE",
    )
    return Experiment(
        "projections-cifar10", "Projections before the classifier, CIFAR-10", SOURCE, "top1", tuple(entries),
        notes=notes, reduction=IMAGES,
    )  # fmt: skip
