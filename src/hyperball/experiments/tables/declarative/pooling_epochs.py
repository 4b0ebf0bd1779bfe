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
    rows_of,
    tested_entry,
)
from hyperball.training.recipe import Recipe

CHOSEN_AMONG = ("quadratic", "pseudo_huber fixed", "huber fixed", "welsch fixed")


def quick_epochs(recipe: Recipe) -> Recipe:
    return shorter(recipe, 1 / 4, **{"data.points": 256}, precision="fp32")


def table() -> Experiment:
    """What choosing an epoch by tests with outliers gives: four networks, tested with them after every epoch."""
    facts = published()["ddn_pooling_test_outliers"]
    cells = tuple(tested_entry(*row, ("0", *EACH_EPOCH)) for row in rows_of(facts) if row[0] in CHOSEN_AMONG)
    return Experiment(
        "pooling-epochs", "Robust pooling, tested with outliers after every epoch, ModelNet40", SOURCE, "top1", cells,
        notes=(BEST, CLOUDS),
        reduction=Reduction(quick_epochs, "15 of 60 epochs on all clouds with 256 points; fp32"),
        also=ALSO, draws=(under_conditions,), protocol=PROTOCOL,
    )  # fmt: skip
