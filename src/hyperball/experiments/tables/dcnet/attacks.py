"""What tables 7 and 8 of Decoupled Networks share: CNN-9 for attacks on CIFAR-10, white box and black box.

Both tables are about the same networks, trained naturally and on FGSM images, so they share their runs. Beside the
paper's FGSM and BIM stand what the field trusts (PGD with restarts, AutoAttack, Square), the budgets at which the
paper's numbers would lie, and rows that the paper lacks: RobustBatchNorm, and training on clean and FGSM images alike.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.protocols import cifar
from hyperball.experiments.table import Entry, Experiment, Kind, Reduction, published
from hyperball.experiments.tables.dcnet.cifar import QUICK, SOURCE
from hyperball.training.recipe import Recipe

FAMILY = "dcnet-robustness"
EPSILON = 8 / 255
SWEEP = ("0", "1/255", "2/255", "3/255", "4/255", "6/255", "8/255", "12/255", "16/255")
PGD, QUICK_PGD = "pgd-50x5", "pgd-10x2"
WHITE = {"fgsm": "fgsm", "bim": "bim"}
BLACK = {"transfer fgsm": "transfer(attack='fgsm')", "transfer bim": "transfer(attack='bim')"}
PARTS = (
    Part("images", {**WHITE, **BLACK, PGD: "pgd(steps=50, restarts=5)"}, checks=256),
    Part("sweep", {**WHITE, **BLACK}, SWEEP, images=2000),
    Part("sample", {"square": "square", "auto": "auto"}, images=1000),
)
LAST = (Part("auto-all", {"auto on all images": "auto"}),)
QUICK_PARTS = (
    Part("images", {**WHITE, **BLACK, QUICK_PGD: "pgd(steps=10, restarts=2)"}, images=40, checks=16),
    Part("sweep", {**WHITE, **BLACK}, ("0", "2/255", "8/255"), images=40),
    Part("sample", {"square": "square(queries=50)"}, images=40),
)
STRONG = (PGD, QUICK_PGD, "auto", "auto on all images", "square")
SHOWN = {"dcnet_table7": (*WHITE, *STRONG), "dcnet_table8": (*BLACK, "square")}
OPERATORS = ("baseline", "sphere", "ball", "tanh")
CONTROLS = ("baseline", "tanh")
COLUMNS = {"natural": {}, "adversarial": {"adversarial.method": "fgsm", "adversarial.epsilon": EPSILON}}
HALF = {"adversarial.share": 0.5}
NOTES = (
    "published nowhere, chosen here: epsilon 8/255 for pixels in [0, 1], BIM 10 steps of 2/255, adversarial training "
    "on FGSM images alone at 8/255, cosine for the angle",
    "black box: images made on a baseline trained naturally with another seed, one a seed",
    "standard gradients without tricks: no weight projection, no orthonormal term, no label smoothing",
    "natural accuracy is that of the last iterate; the paper may print the best epoch on the test set",
)
REDUCTION = Reduction(
    QUICK.apply,
    f"{QUICK.words}; fewer attacks on fewer images, PGD with 10 steps and 2 starts, Square with 50 queries, no "
    "AutoAttack",
)


def network(row: str, **options: Any) -> Recipe:
    """CNN-9 for attacks under the protocol of CIFAR, without the authors' tricks."""
    operator = {} if row == "baseline" else {"magnitude": row, "angular": "cosine"}
    return cifar("cifar10", "cnn9_adv", **operator, **options).override({
        "projection.every": None, "regularizers.orthogonality": 0.0, "regularizers.label_smoothing": 0.0,
        "log.evaluate_every": 4, "log.checkpoint_every": 25, "engine.compile": False,
    })  # fmt: skip


def numbers(column: str, row: str) -> dict[str, float]:
    """The paper's numbers of one network in both tables, by the names of attacks; "none" is natural accuracy."""
    white, black = (published()[key]["cells"][column] for key in ("dcnet_table7", "dcnet_table8"))
    own = {name: white[name][row] for name in ("none", *WHITE)}
    return own | {f"transfer {name}": black[name][row] for name in WHITE}


def entry(key: str, row: str, column: str, recipe: Recipe, known: dict[str, float], kind: Kind) -> Entry:
    attacks = Attacks(PARTS, network("baseline"), LAST, known, SHOWN[key], QUICK_PARTS)
    return Entry(row, column, recipe.override(COLUMNS[column]), known.get("none"), kind=kind, attacks=attacks)


def entries(key: str) -> tuple[Entry, ...]:
    """The paper's networks first, then the controls."""
    made = [
        entry(key, row, column, network(row), numbers(column, row), "published")
        for column in COLUMNS
        for row in OPERATORS
    ]
    for column in COLUMNS:
        for row in CONTROLS:
            label = f"{row}, RobustBatchNorm"
            made.append(entry(key, label, column, network(row, norm="robust"), {}, "control"))
    for row in CONTROLS:
        half = entry(key, f"{row}, half clean", "adversarial", network(row), {}, "control")
        assert half.attacks is not None
        made.append(replace(half, recipe=half.recipe.override(HALF), attacks=replace(half.attacks, rank=1)))
    return tuple(made)


def experiment(key: str, title: str) -> Experiment:
    return Experiment(
        key.replace("_", "-"), title, f"{SOURCE}, table {key[-1]}", "top1", entries(key), REDUCTION, NOTES,
        family=FAMILY,
    )  # fmt: skip
