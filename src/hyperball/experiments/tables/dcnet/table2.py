"""Table 2 of Decoupled Networks: CNN-9 without BatchNorm."""

from __future__ import annotations

from dataclasses import replace

from hyperball.experiments.pictures import convergence, first_filters
from hyperball.experiments.protocols import UNTRAINED, cifar
from hyperball.experiments.table import Entry, Experiment
from hyperball.experiments.tables.dcnet.cifar import (
    angular_table,
    spared,
    with_spared,
)

NO_BIAS = (
    "convolutions and linear layers have no bias, and there is no BatchNorm to shift what they give, in a control they "
    "have one; whether the paper's plain network without BatchNorm had any is published nowhere"
)


def table() -> Experiment:
    """CNN-9 without BatchNorm."""
    notes = (UNTRAINED, NO_BIAS)
    made = angular_table(
        "dcnet_table2", "dcnet-table2", "cnn9", "CNN-9 without BatchNorm, CIFAR-100", notes, norm="none"
    )
    plain = cifar("cifar100", "cnn9", norm="none")
    controls = (
        spared(plain, "cosine"),
        Entry(
            "baseline, biases (control)", "cosine", plain.override({"model.options": {"bias": True}}), kind="control"
        ),
    )
    return replace(
        made, entries=(*made.entries, *controls), notes=with_spared(made.notes, "classifier"),
        draws=(convergence, first_filters),
    )  # fmt: skip
