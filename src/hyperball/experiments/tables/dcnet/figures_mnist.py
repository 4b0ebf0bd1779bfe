"""Figures 1, 6 and 7 of Decoupled Networks: two-dimensional features of MNIST."""

from __future__ import annotations

from hyperball.experiments.pictures import first_filters, two_features
from hyperball.experiments.protocols import mnist_features
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.training.recipe import Recipe

ROWS = ("baseline", "sphere", "ball", "tanh")


def quick(recipe: Recipe) -> Recipe:
    """1,875 steps of a narrow network; two features are learned slowly, so batches are small.

    With alpha = 1 two bounded features are no longer than about 1, and logits are as small as the classifier's weights
    are: so short a schedule ends at 30 % error then.
    """
    sizes = {"data.train_size": 20_000, "data.test_size": 2000, "batch_size": 32, "model.options": {"width": 8}}
    operator = recipe.model.magnitude
    longer = {} if operator is None else {"model.magnitude": f"{operator}(alpha=10)"}
    return recipe.override({**sizes, **longer, "schedule.milestones": [2.1, 2.7], "epochs": 3})


def table() -> Experiment:
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
            "alpha is 1, as published: two bounded features are then no longer than about 1, and logits grow with the "
            "weights of the classifier alone; Adam's rate of 3e-3, three times that of the other tables, is for that",
        ),
        reduction=Reduction(
            quick,
            "3 of 20 epochs on 20,000 of 60,000 images in batches of 32 instead of 128, tested on 2,000; 8, 16 and 32 "
            "channels instead of 32, 64 and 128; alpha 10 instead of 1; divided by 10 after 2.1 and 2.7 epochs",
        ),
        draws=(two_features, first_filters),
        protocol="a schedule chosen here: 20 epochs of Adam at 3e-3, divided by 10 after 10 and 15; none is published",
    )  # fmt: skip
