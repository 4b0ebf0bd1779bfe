"""Tables 1 to 5 of Decoupled Networks, on CIFAR: ways of training, CNN-9 without and with BatchNorm, ResNet-32."""

from __future__ import annotations

from typing import Any

from hyperball.experiments.protocols import cifar, shorter
from hyperball.experiments.table import Entry, Experiment, Reduction, published
from hyperball.training.recipe import Recipe

SOURCE = "Liu et al., Decoupled Networks, CVPR 2018"
MAGNITUDES = {"seg": "seg(beta=0.5)"}
UNPUBLISHED = "alpha, beta of log and mix are published nowhere: 1 and (1, 1)"
LAST = "the last iterate; the paper may print the best epoch on the test set"


def quick(recipe: Recipe) -> Recipe:
    """The schedule in 125 steps of small batches, one pass, with running statistics that follow faster."""
    options = dict(recipe.model.options)
    if "norm_momentum" in options:
        options["norm_momentum"] = 0.05
    sizes = {"batch_size": 32, "data.train_size": 4000, "data.test_size": 1000, "model.options": options}
    return shorter(recipe, 1 / 340, precision="fp32", **sizes)


QUICK = Reduction(
    quick,
    "125 steps instead of 42,500, milestones likewise, in batches of 32 instead of 128: one pass over 4,000 of 50,000 "
    "images; tested on 1,000 of 10,000; fp32; BatchNorm's momentum 0.05 instead of 0.001",
)


def operator(row: str, angular: str) -> dict[str, Any]:
    """The operator of a row and a column; nothing for the baseline."""
    return {} if row == "baseline" else {"magnitude": MAGNITUDES.get(row, row), "angular": angular}


def angular_table(key: str, name: str, model: str, title: str, notes: tuple[str, ...], **options: Any) -> Experiment:
    """A table of magnitudes (rows) and angular functions (columns)."""
    facts = published()[key]
    cells = tuple(
        Entry(row, column, cifar(facts["dataset"], model, **operator(row, column), **options), value)
        for row, values in facts["cells"].items()
        for column, value in values.items()
        if value is not None
    )
    return Experiment(name, title, f"{SOURCE}, table {key[-1]}", "error", cells, notes=(LAST, *notes), reduction=QUICK)


def table1() -> Experiment:
    """Weighted operators, and three ways of optimizing one without weights."""
    facts = published()["dcnet_table1"]
    base = {"magnitude": facts["operator"], "angular": facts["angular"]}
    plain = {"projection.every": None}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "weighting=linear": ({"weighting": "linear"}, {}),
        "weighting=joint (eq 15)": ({"weighting": "joint"}, {}),
        "weighting=split (eq 16)": ({"weighting": "split"}, {}),
        "gradients=standard": ({}, plain),
        "gradients=projection": ({}, {}),
        "gradients=weighted": ({}, {**plain, "regularizers.weighted_gradients": "grad"}),
    }
    cells = tuple(
        Entry(row, "tanh+cosine", cifar("cifar100", "resnet32", **base, **ways[row][0]).override(ways[row][1]), value)
        for row, value in facts["cells"].items()
    )
    notes = (LAST, "the network is inferred: 21.17 is table 4's tanh+cosine")
    return Experiment(
        "dcnet-table1", "Weighted operators and ways of optimizing", f"{SOURCE}, table 1", "error", cells,
        notes=notes, reduction=QUICK,
    )  # fmt: skip


def table2() -> Experiment:
    """CNN-9 without BatchNorm."""
    notes = ('"N/C" is a network that the paper could not train',)
    return angular_table(
        "dcnet_table2", "dcnet-table2", "cnn9", "CNN-9 without BatchNorm, CIFAR-100", notes, norm="none"
    )


def table3() -> Experiment:
    """CNN-9 with BatchNorm, with and without ReLU."""
    facts = published()["dcnet_table3"]
    cells = []
    for row, values in facts["cells"].items():
        for column, value in values.items():
            angular, activation = column.split(", ")
            options = {"activation": "none" if activation == "no relu" else "relu"}
            if value is not None:
                recipe = cifar(facts["dataset"], "cnn9", **operator(row, angular), **options)
                cells.append(Entry(row, column, recipe, value))
    return Experiment(
        "dcnet-table3", "CNN-9 with BatchNorm, with and without ReLU, CIFAR-100", f"{SOURCE}, table 3", "error",
        tuple(cells), notes=(LAST, UNPUBLISHED), reduction=QUICK,
    )  # fmt: skip


def tuned_sgd() -> Recipe:
    """The control that the paper lacks: plain ResNet-32, SGD with Nesterov momentum, cosine, weight decay on all."""
    return cifar("cifar100", "resnet32").override({
        "optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.nesterov": True, "optimizer.decay": "all",
        "schedule.name": "cosine", "schedule.milestones": [], "model.options": {},
    })  # fmt: skip


def table4() -> Experiment:
    """ResNet-32, with a tuned SGD baseline beside the paper's."""
    notes = (UNPUBLISHED, "the paper's baseline (26.69) is worse than its CNN-9's (26.01): see the SGD control")
    made = angular_table("dcnet_table4", "dcnet-table4", "resnet32", "ResNet-32, CIFAR-100", notes)
    control = Entry("baseline, tuned SGD (control)", "cosine", tuned_sgd())
    return Experiment(
        made.name, made.title, made.source, made.metric, (*made.entries, control), notes=made.notes, reduction=QUICK
    )  # fmt: skip


def table5() -> Experiment:
    """DCNet-32 with a weight-normalized softmax, on CIFAR-10 and CIFAR-100."""
    facts = published()["dcnet_table5"]["cells"]
    rows = {
        "dcnet32 tanh+cosine": {"magnitude": "tanh", "angular": "cosine"},
        "dcnet32 linear+square_cosine": {"magnitude": "linear", "angular": "square_cosine"},
    }
    cells = tuple(
        Entry(row, data, cifar(data, "resnet32", **rows[row]), value)
        for row in rows
        for data, value in facts[row].items()
    )
    return Experiment(
        "dcnet-table5", "DCNet-32 beside far deeper networks", f"{SOURCE}, table 5", "error", cells,
        notes=(LAST,), reduction=QUICK,
    )  # fmt: skip
