"""Table 8 of Decoupled Networks: black-box attacks."""

from __future__ import annotations

from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet.attacks import experiment


def table() -> Experiment:
    """Black box."""
    return experiment("dcnet_table8", "Black-box attacks, CNN-9 for attacks, CIFAR-10")
