"""Table 3 of Decoupled Networks: CNN-9 with BatchNorm, with and without ReLU."""

from __future__ import annotations

from hyperball.experiments.pictures import convergence, first_filters, learned_radii
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment, published
from hyperball.experiments.tables.dcnet.cifar import (
    CODE,
    DECAY,
    LAST,
    QUICK_CNN9,
    SOURCE,
    STATISTICS,
    UNPUBLISHED,
    operator,
    spared,
    with_spared,
)
from hyperball.experiments.tables.dcnet.ours import cnn9_combinations

LINEAR = (
    "without ReLU, max pooling keeps the plain network from being linear; in a control it is mean pooling, so that the "
    "trained network is linear"
)


def table() -> Experiment:
    """CNN-9 with BatchNorm, with and without ReLU."""
    facts = published()["dcnet_table3"]
    cells = []
    for row, values in facts["cells"].items():
        for column, value in values.items():
            angular, activation = column.split(", ")
            options = {"activation": "none" if activation == "no relu" else "relu"}
            if value is not None:
                recipe = cifar(facts["dataset"], "cnn9", **operator(row, angular), **options)
                cells.append(Entry(row, column, recipe, value))
    return Experiment(
        "dcnet-table3", "CNN-9 with BatchNorm, with and without ReLU, CIFAR-100", f"{SOURCE}, table 3", "error",
        (*cells, *plain_controls(facts["dataset"]), *cnn9_combinations(facts["dataset"])),
        notes=with_spared((LAST, UNPUBLISHED, *CODE, DECAY, STATISTICS, LINEAR), "classifier and BatchNorm"),
        reduction=QUICK_CNN9, draws=(convergence, first_filters, learned_radii),
    )  # fmt: skip


def plain_controls(data: str) -> list[Entry]:
    """What the paper leaves open of its plain networks: decay on filters, and what is not linear without ReLU."""
    pooled = cifar(data, "cnn9", activation="none", pool="quadratic")
    return [
        spared(cifar(data, "cnn9", activation="relu"), "cosine, relu"),
        Entry("baseline, mean pooling, no relu (control)", "cosine, no relu", pooled, kind="control"),
    ]
