"""Robust pooling, tested with outliers after every epoch: what choosing an epoch is worth."""

from __future__ import annotations

from hyperball.experiments.pictures import under_conditions
from hyperball.experiments.protocols import shorter
from hyperball.experiments.table import Experiment, Reduction, published
from hyperball.experiments.tables.declarative.pooling import (
    ALSO,
    BEST,
    CLOUDS,
    EACH_EPOCH,
    PROTOCOL,
    SOURCE,
    PooledRow,
    rows_of,
    tested_entry,
)
from hyperball.training.recipe import Recipe

CHOSEN_AMONG = ("quadratic", "pseudo_huber fixed", "huber fixed", "welsch fixed")
LONGER = 4  # at the scale quick that is as many epochs as were published
TRAINED_LONGER = ("quadratic", "pseudo_huber fixed")
BEGUN = (*CHOSEN_AMONG, "pseudo_huber adaptive", "huber adaptive")
FIRST = 15  # epochs of the published schedule, before its rate is first halved


def quick_epochs(recipe: Recipe) -> Recipe:
    """A quarter of the epochs with fewer points; the first epochs of the published schedule are what they are."""
    if recipe.epochs == FIRST:
        return recipe.override({"precision": "fp32"})
    return shorter(recipe, 1 / 4, **{"data.points": 256}, precision="fp32")


def table() -> Experiment:
    """What choosing an epoch by tests with outliers gives: four networks, tested with them after every epoch."""
    facts = published()["ddn_pooling_test_outliers"]
    known = rows_of(facts)
    rows = [row for row in known if row[0] in CHOSEN_AMONG]
    longer: list[PooledRow] = [
        (f"{row}, four times as long (control)", "control", shorter(recipe, LONGER), {})
        for row, _, recipe, _ in rows
        if row in TRAINED_LONGER
    ]
    begun: list[PooledRow] = [
        (f"{row}, the first {FIRST} epochs as published (control)", "control", recipe.override({"epochs": FIRST}), {})
        for row, _, recipe, _ in known
        if row in BEGUN
    ]
    cells = tuple(tested_entry(*row, ("0", *EACH_EPOCH)) for row in (*rows, *longer, *begun))
    return Experiment(
        "pooling-epochs", "Robust pooling, tested with outliers after every epoch, ModelNet40", SOURCE, "top1", cells,
        notes=(
            BEST, "at the scale quick, four times as long is as long as published: 60 epochs",
            f"the first {FIRST} epochs are the beginning of the published schedule, with all points, at every scale",
            CLOUDS,
        ),
        reduction=Reduction(quick_epochs, "15 of 60 epochs on all clouds with 256 points; fp32"),
        also=ALSO, draws=(under_conditions,), protocol=PROTOCOL,
    )  # fmt: skip
