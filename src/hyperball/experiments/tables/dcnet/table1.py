"""Table 1 of Decoupled Networks: weighted operators, and three ways of optimizing one without weights."""

from __future__ import annotations

from typing import Any

from hyperball.experiments.pictures import convergence, filter_lengths
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment, published
from hyperball.experiments.tables.dcnet.cifar import (
    CODE,
    FRESH,
    LAST,
    QUICK_RESNET32,
    SOURCE,
    STATISTICS,
)


def table() -> Experiment:
    """Weighted operators, and three ways of optimizing one without weights."""
    facts = published()["dcnet_table1"]
    base = {"magnitude": facts["operator"], "angular": facts["angular"]}
    plain: dict[str, Any] = {"projection.every": None, "log.norms": True}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "weighting=linear": ({"weighting": "linear"}, {}),
        "weighting=joint (eq 15)": ({"weighting": "joint"}, {}),
        "weighting=split (eq 16)": ({"weighting": "split"}, {}),
        "gradients=standard": ({}, plain),
        "gradients=projection": ({}, {"log.norms": True, **FRESH}),  # table 4's tanh+cosine, which figure 4 shows
        "gradients=weighted": ({}, {**plain, "regularizers.weighted_gradients": "grad"}),
    }
    cells = tuple(
        Entry(row, "tanh+cosine", cifar("cifar100", "resnet32", **base, **ways[row][0]).override(ways[row][1]), value)
        for row, value in facts["cells"].items()
    )
    updates = {**plain, "regularizers.weighted_gradients": "update"}
    control = Entry(
        "gradients=weighted updates (control)", "tanh+cosine", cifar("cifar100", "resnet32", **base).override(updates),
        kind="control",
    )  # fmt: skip
    notes = (
        LAST, "the network is inferred: 21.17 is table 4's tanh+cosine",
        "Adam does not feel the scale of a gradient: weighting it does next to nothing, weighting the update does",
        *CODE, STATISTICS,
    )  # fmt: skip
    return Experiment(
        "dcnet-table1", "Weighted operators and ways of optimizing", f"{SOURCE}, table 1", "error", (*cells, control),
        notes=notes, reduction=QUICK_RESNET32, draws=(convergence, filter_lengths),
    )  # fmt: skip
