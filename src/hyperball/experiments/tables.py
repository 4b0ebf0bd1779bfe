"""The published tables by name."""

from __future__ import annotations

from collections.abc import Callable

from hyperball.experiments import dcnet, declarative
from hyperball.experiments.table import Experiment
from hyperball.rows import nearest

TABLES: dict[str, Callable[[], Experiment]] = {
    "dcnet-table1": dcnet.table1,
    "dcnet-table2": dcnet.table2,
    "dcnet-table3": dcnet.table3,
    "dcnet-table4": dcnet.table4,
    "dcnet-table5": dcnet.table5,
    "pooling-outliers": declarative.all_outliers,
    "pooling-test-outliers": declarative.test_outliers,
    "projections-cifar10": declarative.projections_cifar10,
}


def experiment(name: str) -> Experiment:
    """The table of that name."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; {nearest(name, TABLES)}")
    return TABLES[name]()
