"""The published tables and figures by name, one file each: its cells as recipes, with the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable

from hyperball.experiments.runtime import Timing
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables import architectures
from hyperball.experiments.tables.dcnet import (
    figure4,
    figures_mnist,
    norms,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table6_imagewoof,
    table7,
    table8,
)
from hyperball.experiments.tables.declarative import (
    pooling_epochs,
    pooling_outliers,
    pooling_runtime,
    pooling_test_outliers,
    projections_cifar10,
    projections_cifar10_networks,
    projections_imagewoof,
    projections_imagewoof_networks,
    projections_runtime,
)
from hyperball.rows import nearest

TRAINED: dict[str, Callable[[], Experiment]] = {
    "dcnet-table1": table1.table,
    "dcnet-table2": table2.table,
    "dcnet-table3": table3.table,
    "dcnet-table4": table4.table,
    "dcnet-table5": table5.table,
    "dcnet-table6": table6.table,
    "dcnet-table6-imagewoof": table6_imagewoof.table,
    "dcnet-table7": table7.table,
    "dcnet-table8": table8.table,
    "dcnet-figures-mnist": figures_mnist.table,
    "dcnet-figure4": figure4.table,
    "dcnet-norms": norms.table,
    "pooling-outliers": pooling_outliers.table,
    "pooling-test-outliers": pooling_test_outliers.table,
    "pooling-epochs": pooling_epochs.table,
    "projections-cifar10": projections_cifar10.table,
    "projections-imagewoof": projections_imagewoof.table,
    "projections-cifar10-networks": projections_cifar10_networks.table,
    "projections-imagewoof-networks": projections_imagewoof_networks.table,
    "architectures": architectures.table,
}
TIMED: dict[str, Callable[[], Timing]] = {
    "pooling-runtime": pooling_runtime.table,
    "projections-runtime": projections_runtime.table,
}
TABLES: dict[str, Callable[[], Experiment | Timing]] = {**TRAINED, **TIMED}


def experiment(name: str) -> Experiment | Timing:
    """The table of that name."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; {nearest(name.lower(), TABLES)}")
    return TABLES[name]()


def trained(name: str) -> Experiment:
    """The table of that name, whose cells are networks."""
    if name not in TRAINED:
        experiment(name)
        raise ValueError(f"{name} is a table of times; the others are {', '.join(TRAINED)}")
    return TRAINED[name]()


def is_part(table: Experiment) -> bool:
    """Whether all cells of a table are those of another, after which its family is called: a figure of their curves."""
    return table.family in TABLES


def whole_of(table: Experiment) -> Experiment:
    """The table of which another is a part; a table that is none is its own."""
    whole = TABLES[table.family]() if table.family in TABLES else table
    assert isinstance(whole, Experiment)
    return whole
