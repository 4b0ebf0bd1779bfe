"""Table 4 of Decoupled Networks: ResNet-32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hyperball.experiments.pictures import errors_under_conditions
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment
from hyperball.experiments.tables.dcnet.cifar import (
    FRESH,
    FRESH_STATISTICS,
    SGD,
    STATISTICS,
    UNPUBLISHED,
    angular_table,
    spared,
    with_spared,
)
from hyperball.experiments.tables.dcnet.ours import resnet32_combinations
from hyperball.training.recipe import Recipe

CURVES = {("baseline", "cosine"), ("tanh", "cosine"), ("linear", "cosine"), ("linear", "square_cosine")}  # figure 4
SHARED = ("tanh", "cosine")  # with table 1
RATES = {"": 0.1, ", lr 0.03": 0.03, ", lr 0.3": 0.3}


def sgd_with_cosine(rate: float) -> Recipe:
    """The control that the paper lacks: plain ResNet-32, SGD with Nesterov momentum, cosine, weight decay on all."""
    return cifar("cifar100", "resnet32").override({
        **SGD, "optimizer.lr": rate, "optimizer.decay": "all", "schedule.name": "cosine", "schedule.milestones": [],
        "model.options": {},
    })  # fmt: skip


def logged(row: str, column: str) -> dict[str, Any]:
    """What a cell logs beside the others: for figure 4 tests with fresh statistics, for table 1 lengths of filters."""
    fresh = FRESH if (row, column) in CURVES else {}
    return {**fresh, "log.norms": (row, column) == SHARED}


def table() -> Experiment:
    """ResNet-32, with plain networks beside the paper's: of less decay, and under SGD with cosine at three rates."""
    notes = (
        UNPUBLISHED, "the paper's baseline (26.69) is worse than its CNN-9's (26.01): see SGD, lr 0.1 and two more",
        f"{STATISTICS}; the controls under SGD have torch's momentum 0.1",
        "tanh+cosine is also a cell of table 1, trained once: lengths of its filters are logged for that",
    )  # fmt: skip
    made = angular_table("dcnet_table4", "dcnet-table4", "resnet32", "ResNet-32, CIFAR-100", notes)
    cells = (replace(entry, recipe=entry.recipe.override(logged(entry.row, entry.column))) for entry in made.entries)
    rates = (
        Entry(f"baseline, SGD with cosine{text} (control)", "cosine", sgd_with_cosine(rate), kind="control")
        for text, rate in RATES.items()
    )
    controls = (spared(cifar("cifar100", "resnet32"), "cosine"), *rates)
    return replace(
        made, notes=(*with_spared(made.notes, "classifier and BatchNorm"), FRESH_STATISTICS),
        draws=(*made.draws, errors_under_conditions),
        entries=(*cells, *controls, *resnet32_combinations("cifar100")),
    )  # fmt: skip
