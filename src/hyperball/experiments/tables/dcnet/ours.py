"""Operators and combinations that the paper lacks, as rows of its tables.

The pseudo-Huber ball is barron of shape 1, h(n) = n/sqrt(1 + n²/ρ²): the derivative of a pseudo-Huber penalty, a ball
without its corner.
"""

from __future__ import annotations

from typing import Any

from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry
from hyperball.training.recipe import Recipe

PSEUDO_HUBER_BALL = "barron(shape=1.0)"
LEARNED_SHAPE = "barron(learn_shape=True)"
OPERATORS = {
    "pseudo-Huber ball (ours)": PSEUDO_HUBER_BALL,
    "barron, learned shape (ours)": LEARNED_SHAPE,
}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "baseline, RobustBatchNorm (ours)": {"norm": "robust"},
    "tanh, RobustBatchNorm (ours)": {"norm": "robust", "magnitude": "tanh"},
    "baseline, robust pooling (ours)": {"pool": "huber"},
    "tanh, robust pooling (ours)": {"pool": "huber", "magnitude": "tanh"},
    "tanh, learned robust pooling (ours)": {"pool": "barron(learn_shape=True)", "magnitude": "tanh"},
}


def ours(row: str, column: str, recipe: Recipe) -> Entry:
    return Entry(row, column, recipe, kind="ours")


def cnn9_combinations(data: str) -> list[Entry]:
    """Rows for CNN-9: two operators in all columns; robust normalization, and robust pooling for max pooling."""
    cells = [
        ours(row, f"{angular}, {words}", cifar(data, "cnn9", magnitude=text, angular=angular, activation=activation))
        for row, text in OPERATORS.items()
        for activation, words in (("none", "no relu"), ("relu", "relu"))
        for angular in ("cosine", "square_cosine")
    ]
    return cells + [ours(row, "cosine, relu", cifar(data, "cnn9", **parts)) for row, parts in COMBINATIONS.items()]


def resnet32_combinations(data: str) -> list[Entry]:
    """Rows for ResNet-32, where robust pooling stands for the global average."""
    cells = [
        ours(row, angular, cifar(data, "resnet32", magnitude=text, angular=angular))
        for row, text in OPERATORS.items()
        for angular in ("cosine", "square_cosine")
    ]
    return cells + [ours(row, "cosine", cifar(data, "resnet32", **parts)) for row, parts in COMBINATIONS.items()]
