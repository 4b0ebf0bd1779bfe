"""Tables 1 to 5 of Decoupled Networks, on CIFAR: ways of training, CNN-9 without and with BatchNorm, ResNet-32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hyperball.experiments.ours import cnn9_combinations, resnet32_combinations
from hyperball.experiments.pictures import convergence, filter_lengths, first_filters, learned_radii
from hyperball.experiments.protocols import CIFAR_STEPS, cifar, shorter
from hyperball.experiments.table import Entry, Experiment, Reduction, published
from hyperball.training.recipe import Recipe

SOURCE = "Liu et al., Decoupled Networks, CVPR 2018"
MAGNITUDES = {"seg": "seg(beta=0.5)"}
UNPUBLISHED = "alpha, beta of log and mix are published nowhere: 1 and (1, 1)"
LAST = "the last iterate; the paper may print the best epoch on the test set"
PRECISION = (
    "except at the scale quick, activations and matrix products are in bf16, weights and statistics in fp32; the "
    "authors' code has fp32 throughout"
)
SMOOTHING = "label smoothing 0.01 as in the authors' code; the paper says plain softmax"
STATISTICS = (
    "except at the scale quick, BatchNorm's momentum is 0.001 as in the authors' code (running statistics begin at the "
    "first batch, which is ours): while the learning rate is high, a test measures weights with statistics about 1,000 "
    "steps old, and lags behind the training; at the end the weights hardly move and it does not"
)
DECAY = (
    "L2 5e-4 spares decoupled filters, as in the authors' code; which weights of a plain network it acts on is "
    "published nowhere: here on all"
)
CODE = (PRECISION, SMOOTHING)
NO_BIAS = (
    "convolutions and linear layers have no bias, and there is no BatchNorm to shift what they give, in a control they "
    "have one; whether the paper's plain network without BatchNorm had any is published nowhere"
)
LINEAR = (
    "without ReLU, max pooling keeps the plain network from being linear; in a control it is mean pooling, so that the "
    "trained network is linear"
)


SPARED = {"optimizer.decay": "classifier+norms"}


def quick(recipe: Recipe, part: float = 1 / 340, **more: Any) -> Recipe:
    """The schedule in a few steps of small batches, one pass, with running statistics that follow faster."""
    options = {**recipe.model.options, **more.pop("options", {})}
    if "norm_momentum" in options:
        options["norm_momentum"] = 0.05
    sizes = {"batch_size": 32, "data.train_size": round(32 * CIFAR_STEPS * part), "data.test_size": 1000}
    return shorter(recipe, part, precision="fp32", **{**sizes, "model.options": options, **more})


def quick_cnn9(recipe: Recipe) -> Recipe:
    """600 steps of a narrow CNN-9 on CIFAR-10, with mean pooling unless a cell has a pooling of its own."""
    pool = recipe.model.pool or "quadratic"
    narrow = {"width": 16, "features": 256}
    return quick(
        recipe, 12 / 850, options=narrow, **{"data.name": "cifar10", "data.test_size": 2000, "model.pool": pool}
    )


def narrow_resnet32(recipe: Recipe, **more: Any) -> Recipe:
    """600 steps of a narrow ResNet-32."""
    return quick(recipe, 12 / 850, options={"width": 16}, **{"data.test_size": None, **more})


def quick_resnet32(recipe: Recipe) -> Recipe:
    """The same on CIFAR-10."""
    return narrow_resnet32(recipe, **{"data.name": "cifar10"})


QUICK = Reduction(
    quick,
    "125 steps instead of 42,500, milestones likewise, in batches of 32 instead of 128: one pass over 4,000 of 50,000 "
    "images; tested on 1,000 of 10,000; fp32; BatchNorm's momentum 0.05 instead of 0.001",
)
QUICK_CNN9 = Reduction(
    quick_cnn9,
    "CIFAR-10; CNN-9 of 16, 32 and 64 channels instead of 64, 128 and 256; mean instead of max pooling, so that the "
    "plain network without ReLU is linear; 600 steps instead of 42,500, milestones likewise, in batches of 32 instead "
    "of 128: one pass over 19,200 of 50,000 images; tested on 2,000 of 10,000; fp32; BatchNorm's momentum 0.05 instead "
    "of 0.001",
)
NARROW_RESNET32 = Reduction(
    narrow_resnet32,
    "ResNet-32 of 16, 32 and 64 channels instead of 96, 192 and 384; 600 steps instead of 42,500, milestones likewise, "
    "in batches of 32 instead of 128: one pass over 19,200 of 50,000 images; fp32; BatchNorm's momentum 0.05 instead "
    "of 0.001",
)
QUICK_RESNET32 = Reduction(quick_resnet32, f"CIFAR-10; {NARROW_RESNET32.words}")
REDUCTIONS = {"cnn9": QUICK_CNN9, "resnet32": QUICK_RESNET32}


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
    return Experiment(
        name, title, f"{SOURCE}, table {key[-1]}", "error", cells, notes=(LAST, *notes, *CODE, DECAY),
        reduction=REDUCTIONS[model], draws=(convergence,),
    )  # fmt: skip


def table1() -> Experiment:
    """Weighted operators, and three ways of optimizing one without weights."""
    facts = published()["dcnet_table1"]
    base = {"magnitude": facts["operator"], "angular": facts["angular"]}
    plain: dict[str, Any] = {"projection.every": None, "log.norms": True}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "weighting=linear": ({"weighting": "linear"}, {}),
        "weighting=joint (eq 15)": ({"weighting": "joint"}, {}),
        "weighting=split (eq 16)": ({"weighting": "split"}, {}),
        "gradients=standard": ({}, plain),
        "gradients=projection": ({}, {"log.norms": True}),
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


def norms() -> Experiment:
    """How long filters and their gradients are under the three ways of optimizing, in runs of table 1."""
    whole = table1()
    return replace(
        whole, name="dcnet-norms", title="Lengths of filters and gradients under three ways of optimizing",
        source=f"{SOURCE}, section 3 and table 1", draws=(filter_lengths,), family="dcnet-table1",
        entries=tuple(entry for entry in whole.entries if entry.row.startswith("gradients=")),
    )  # fmt: skip


def table2() -> Experiment:
    """CNN-9 without BatchNorm."""
    notes = ('"N/C" is a network that the paper could not train', NO_BIAS)
    made = angular_table(
        "dcnet_table2", "dcnet-table2", "cnn9", "CNN-9 without BatchNorm, CIFAR-100", notes, norm="none"
    )
    plain = cifar("cifar100", "cnn9", norm="none")
    controls = (
        Entry("baseline, no decay on filters (control)", "cosine", plain.override(SPARED), kind="control"),
        Entry(
            "baseline, biases (control)", "cosine", plain.override({"model.options": {"bias": True}}), kind="control"
        ),
    )
    told = tuple(f"{DECAY}, in a control on its classifier" if note == DECAY else note for note in made.notes)
    return replace(made, entries=(*made.entries, *controls), notes=told, draws=(convergence, first_filters))


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
        (*cells, *plain_controls(facts["dataset"]), *cnn9_combinations(facts["dataset"])),
        notes=(LAST, UNPUBLISHED, *CODE, f"{DECAY}, in a control on its classifier and BatchNorm", STATISTICS, LINEAR),
        reduction=QUICK_CNN9, draws=(convergence, first_filters, learned_radii),
    )  # fmt: skip


def plain_controls(data: str) -> list[Entry]:
    """What the paper leaves open of its plain networks: decay on filters, and what is not linear without ReLU."""
    spared = cifar(data, "cnn9", activation="relu").override(SPARED)
    pooled = cifar(data, "cnn9", activation="none", pool="quadratic")
    return [
        Entry("baseline, no decay on filters (control)", "cosine, relu", spared, kind="control"),
        Entry("baseline, mean pooling, no relu (control)", "cosine, no relu", pooled, kind="control"),
    ]


SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.nesterov": True}
RATES = {"": 0.1, ", lr 0.03": 0.03, ", lr 0.3": 0.3}


def sgd_with_cosine(rate: float) -> Recipe:
    """The control that the paper lacks: plain ResNet-32, SGD with Nesterov momentum, cosine, weight decay on all."""
    return cifar("cifar100", "resnet32").override({
        **SGD, "optimizer.lr": rate, "optimizer.decay": "all", "schedule.name": "cosine", "schedule.milestones": [],
        "model.options": {},
    })  # fmt: skip


def table4() -> Experiment:
    """ResNet-32, with a baseline under SGD with cosine, at three learning rates, beside the paper's."""
    notes = (
        UNPUBLISHED, "the paper's baseline (26.69) is worse than its CNN-9's (26.01): see SGD, lr 0.1 and two more",
        f"{STATISTICS}; the controls under SGD have torch's momentum 0.1",
        "tanh+cosine is also a cell of table 1, trained once: lengths of its filters are logged for that",
    )  # fmt: skip
    made = angular_table("dcnet_table4", "dcnet-table4", "resnet32", "ResNet-32, CIFAR-100", notes)
    cells = (
        replace(entry, recipe=entry.recipe.override({"log.norms": (entry.row, entry.column) == ("tanh", "cosine")}))
        for entry in made.entries
    )
    controls = [
        Entry(f"baseline, SGD with cosine{text} (control)", "cosine", sgd_with_cosine(rate), kind="control")
        for text, rate in RATES.items()
    ]
    return replace(made, entries=(*cells, *controls, *resnet32_combinations("cifar100")))


FIGURE4 = {("baseline", "cosine"), ("tanh", "cosine"), ("linear", "cosine"), ("linear", "square_cosine")}


def figure4() -> Experiment:
    """The convergence of ResNet-32: the curves of four cells of table 4."""
    whole = table4()
    return replace(
        whole, name="dcnet-figure4", title="Convergence of ResNet-32, CIFAR-100", source=f"{SOURCE}, figure 4",
        family="dcnet-table4",
        entries=tuple(entry for entry in whole.entries if (entry.row, entry.column) in FIGURE4),
        notes=(
            "which operators it shows is chosen here; the runs are those of table 4, which draws all of its cells",
            *CODE, DECAY, STATISTICS,
        ),
    )  # fmt: skip


def table5() -> Experiment:
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
