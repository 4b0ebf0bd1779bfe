"""Figure 4 of Decoupled Networks: the convergence of ResNet-32."""

from __future__ import annotations

from dataclasses import replace

from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet import table4
from hyperball.experiments.tables.dcnet.cifar import (
    CODE,
    DECAY,
    FRESH_STATISTICS,
    SOURCE,
    STATISTICS,
)


def table() -> Experiment:
    """The convergence of ResNet-32: the curves of four cells of table 4."""
    whole = table4.table()
    return replace(
        whole, name="dcnet-figure4", title="Convergence of ResNet-32, CIFAR-100", source=f"{SOURCE}, figure 4",
        family="dcnet-table4",
        entries=tuple(entry for entry in whole.entries if (entry.row, entry.column) in table4.CURVES),
        notes=(
            "which operators it shows is chosen here; the runs are those of table 4, which draws all of its cells",
            *CODE, DECAY, STATISTICS, FRESH_STATISTICS,
        ),
    )  # fmt: skip
