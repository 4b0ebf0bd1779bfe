"""Table 5 of Decoupled Networks: DCNet-32 beside far deeper networks."""

from __future__ import annotations

from hyperball.experiments.pictures import convergence
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment, published
from hyperball.experiments.tables.dcnet.cifar import (
    CODE,
    LAST,
    NARROW_RESNET32,
    SGD,
    SOURCE,
    STATISTICS,
)
from hyperball.training.recipe import Recipe


def table() -> Experiment:
    """DCNet-32 with a weight-normalized softmax, on CIFAR-10 and CIFAR-100, under Adam and under SGD."""
    facts = published()["dcnet_table5"]["cells"]
    rows = {
        "dcnet32 tanh+cosine": {"magnitude": "tanh", "angular": "cosine"},
        "dcnet32 linear+square_cosine": {"magnitude": "linear", "angular": "square_cosine"},
    }
    cells = []
    for row, operator in rows.items():
        for data, value in facts[row].items():
            adam = normalized(cifar(data, "resnet32", **operator))
            cells.append(Entry(row, data, adam, value))
            cells.append(Entry(f"{row}, SGD (control)", data, adam.override(SGD), kind="control"))
    notes = (
        LAST, "the classifier is a weight-normalized softmax, NormalizedLinear",
        "the paper does not say which optimizer made these numbers: the rows under Adam, as in its other tables, stand "
        "beside them, the controls under SGD are to be read against the same numbers",
        "SGD: lr 0.1, Nesterov momentum 0.9, milestones and decay as under Adam; radii learn at 0.1 too",
        "the weights of the normalized classifier are not decayed, as its output does not depend on their length",
        *(f"{row} of the paper: {values}" for row, values in facts.items() if row not in rows),
        *CODE, STATISTICS,
    )  # fmt: skip
    return Experiment(
        "dcnet-table5", "DCNet-32 beside far deeper networks", f"{SOURCE}, table 5", "error", tuple(cells),
        notes=notes, reduction=NARROW_RESNET32, draws=(convergence,),
    )  # fmt: skip


def normalized(recipe: Recipe) -> Recipe:
    return recipe.override({"model.options": {**recipe.model.options, "classifier_normalized": True}})
