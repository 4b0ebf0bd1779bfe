"""Figures 1, 6 and 7 of Decoupled Networks: two-dimensional features of MNIST."""

from __future__ import annotations

from hyperball.experiments.pictures import first_filters, two_features
from hyperball.experiments.protocols import mnist_features
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.training.recipe import Recipe

ROWS = ("baseline", "sphere", "ball", "tanh")


def quick(recipe: Recipe) -> Recipe:
    """750 steps; two features are learned slowly, so these are small, at a higher rate that falls late."""
    sizes = {"data.train_size": 8000, "data.test_size": 2000, "batch_size": 32}
    return recipe.override({**sizes, "epochs": 3, "optimizer.lr": 1e-2, "schedule.milestones": [2.1, 2.7]})


def mnist() -> Experiment:
    """Plain and decoupled networks with two features, trained on images as they are and on attacked ones."""
    cells = tuple(
        Entry(row, column, mnist_features({} if row == "baseline" else {"magnitude": row}, column == "adversarial"))
        for row in ROWS
        for column in ("natural", "adversarial")
    )
    return Experiment(
        "dcnet-figures-mnist", "Two-dimensional features of MNIST, natural and adversarial training",
        "Liu et al., Decoupled Networks, CVPR 2018, figures 1, 6 and 7", "error", cells,
        notes=(
            "the paper prints pictures and no numbers; schedule, epsilon (0.1) and share (0.5) are chosen here",
        ),
        reduction=Reduction(
            quick,
            "3 of 20 epochs on 8,000 of 60,000 images in batches of 32 instead of 128, tested on 2,000; Adam 1e-2 "
            "instead of 1e-3, divided by 10 after 2.1 and 2.7 epochs",
        ),
        draws=(two_features, first_filters),
    )  # fmt: skip
