"""What tables 1 to 5 of Decoupled Networks share: notes, short schedules, magnitudes against angular functions."""

from __future__ import annotations

from typing import Any

from hyperball.experiments.pictures import convergence
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
FRESH = {"log.conditions": {"fresh statistics": {"statistics": 16}}}
FRESH_STATISTICS = (
    "except at the scale quick, the networks of figure 4 are tested after every other epoch with statistics of 16 "
    "training batches beside the running ones, which shows how they converge; such tests are no numbers of the table, "
    "and records made before have none"
)
DECAY = (
    "L2 5e-4 spares decoupled filters, as in the authors' code; which weights of a plain network it acts on is "
    "published nowhere: here on all"
)
CODE = (PRECISION, SMOOTHING)
SPARED = {"optimizer.decay": "classifier+norms"}
SGD = {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.nesterov": True}


def quick(recipe: Recipe, part: float = 1 / 340, **more: Any) -> Recipe:
    """The schedule in a few steps of small batches, one pass, with running statistics that follow faster."""
    options = {**recipe.model.options, **more.pop("options", {})}
    if "norm_momentum" in options:
        options["norm_momentum"] = 0.05
    sizes = {"batch_size": 32, "data.train_size": round(32 * CIFAR_STEPS * part), "data.test_size": 1000}
    rest = {"model.options": options, "log.conditions": {}}
    return shorter(recipe, part, precision="fp32", **{**sizes, **rest, **more})


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


def spared(recipe: Recipe, column: str) -> Entry:
    """The control of a plain network whose filters do not decay, as those of decoupled ones do not."""
    return Entry("baseline, no decay on filters (control)", column, recipe.override(SPARED), kind="control")


def with_spared(notes: tuple[str, ...], kept: str) -> tuple[str, ...]:
    """The notes of a table with that control, which says where decay is kept."""
    return tuple(f"{note}, in a control on its {kept}" if note == DECAY else note for note in notes)


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
