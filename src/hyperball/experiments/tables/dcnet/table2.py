"""Table 2 of Decoupled Networks: CNN-9 without BatchNorm."""

from __future__ import annotations

from dataclasses import replace

from hyperball.experiments.pictures import convergence, first_filters
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment
from hyperball.experiments.tables.dcnet.cifar import (
    DECAY,
    SPARED,
    angular_table,
)

NO_BIAS = (
    "convolutions and linear layers have no bias, and there is no BatchNorm to shift what they give, in a control they "
    "have one; whether the paper's plain network without BatchNorm had any is published nowhere"
)


def table() -> Experiment:
    """CNN-9 without BatchNorm."""
    notes = ('"N/C" is a network that the paper could not train', NO_BIAS)
    made = angular_table(
        "dcnet_table2", "dcnet-table2", "cnn9", "CNN-9 without BatchNorm, CIFAR-100", notes, norm="none"
    )
    plain = cifar("cifar100", "cnn9", norm="none")
    controls = (
        Entry("baseline, no decay on filters (control)", "cosine", plain.override(SPARED), kind="control"),
        Entry(
            "baseline, biases (control)", "cosine", plain.override({"model.options": {"bias": True}}), kind="control"
        ),
    )
    told = tuple(f"{DECAY}, in a control on its classifier" if note == DECAY else note for note in made.notes)
    return replace(made, entries=(*made.entries, *controls), notes=told, draws=(convergence, first_filters))
