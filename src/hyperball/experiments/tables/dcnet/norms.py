"""How long filters and gradients are under the three ways of optimizing of table 1."""

from __future__ import annotations

from dataclasses import replace

from hyperball.experiments.pictures import filter_lengths
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet import table1
from hyperball.experiments.tables.dcnet.cifar import (
    SOURCE,
)


def table() -> Experiment:
    """How long filters and their gradients are under the three ways of optimizing, in runs of table 1."""
    whole = table1.table()
    return replace(
        whole, name="dcnet-norms", title="Lengths of filters and gradients under three ways of optimizing",
        source=f"{SOURCE}, section 3 and table 1", draws=(filter_lengths,), family="dcnet-table1",
        entries=tuple(entry for entry in whole.entries if entry.row.startswith("gradients=")),
    )  # fmt: skip
