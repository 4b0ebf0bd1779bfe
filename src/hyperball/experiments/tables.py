"""The published tables and figures by name."""

from __future__ import annotations

from collections.abc import Callable

from hyperball.experiments import dcnet, declarative, figures, imagenet, ours, projections, robustness, runtime
from hyperball.experiments.runtime import Timing
from hyperball.experiments.table import Experiment
from hyperball.rows import nearest

TRAINED: dict[str, Callable[[], Experiment]] = {
    "dcnet-table1": dcnet.table1,
    "dcnet-table2": dcnet.table2,
    "dcnet-table3": dcnet.table3,
    "dcnet-table4": dcnet.table4,
    "dcnet-table5": dcnet.table5,
    "dcnet-table6": imagenet.table6,
    "dcnet-table6-imagewoof": imagenet.table6_imagewoof,
    "dcnet-table7": robustness.table7,
    "dcnet-table8": robustness.table8,
    "dcnet-figures-mnist": figures.mnist,
    "dcnet-figure4": dcnet.figure4,
    "dcnet-norms": dcnet.norms,
    "pooling-outliers": declarative.all_outliers,
    "pooling-test-outliers": declarative.test_outliers,
    "pooling-epochs": declarative.epochs,
    "projections-cifar10": projections.cifar10,
    "projections-imagewoof": projections.imagewoof,
    "projections-cifar10-networks": projections.cifar10_networks,
    "projections-imagewoof-networks": projections.imagewoof_networks,
    "architectures": ours.architectures,
}
TIMED: dict[str, Callable[[], Timing]] = {
    "pooling-runtime": runtime.pooling,
    "projections-runtime": runtime.projections,
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
