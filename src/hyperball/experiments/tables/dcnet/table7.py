"""Table 7 of Decoupled Networks: white-box attacks."""

from __future__ import annotations

from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet.attacks import experiment


def table() -> Experiment:
    """White box."""
    return experiment("dcnet_table7", "White-box attacks, CNN-9 for attacks, CIFAR-10")
