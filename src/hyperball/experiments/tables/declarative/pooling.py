"""What the tables of robust pooling share: a PointNet on ModelNet40, its rows, and how it is tested with outliers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyperball.experiments.protocols import pointnet, shorter
from hyperball.experiments.table import Entry, Kind, Reduction
from hyperball.training.recipe import Recipe

SOURCE = "Du, Adaptive robust pooling and projections in deep declarative networks"
CLOUDS = (
    "networks see all points of a cloud: 2,048 in the paper, 1,024 in the copy of ModelNet40 used here, which a third "
    "party sampled from the same CAD models"
)
NOTES = (
    "fixed and adaptive poolings share one learning rate, which in the paper moves pseudo-Huber more than learning c "
    "does; c is learned as log c and barron's shape as logit(shape/3), at rates whose first steps are those of c and "
    "shape themselves; a c that has fallen moves c² times as far; the code published with the paper learns c as "
    "softplus(raw) and shape as 3·sigmoid(raw), whose first steps are 0.4 of these",
    "the c of an adaptive truncated quadratic has a zero gradient almost everywhere, as moving c a little moves no "
    "sample in or out: its record shows c staying at 1, and its row equals the fixed one up to rounding; with outliers "
    "in training it is left out",
    "the paper's mAP, as its code computes it, is voc6_softmax: the interpolated one of the first six classes, ranked "
    "by probabilities; records of before it was measured here have none; map6_raw ranks raw logits of these classes, "
    "map_raw and map_softmax cover all",
    "RobustBatchNorm is there with the network's dropout, whose zeros take the robust scale of a channel to 0 where "
    "they are half of a batch, and without it; a control shows what leaving dropout out does by itself",
    CLOUDS,
)
BEST = (
    "the paper's numbers may be of best epochs: the code published with it tests after each of 60 epochs, on the test "
    "set with the outliers of that number, and prints the highest accuracy and the highest mAP of all epochs; ours are "
    "of the last epoch, with the best one beside it where every epoch was tested"
)
PROTOCOL = "the published schedule, with 1,024 instead of 2,048 points a cloud, which is what the copy used here has"
POOLS = {"max": "max", "quadratic": "mean"}
PAPERS_MAP = "voc6_softmax"
BESIDE = ("map6_raw", "map_raw", "map_softmax", "ece")
ALSO = (PAPERS_MAP, *BESIDE)
LACKING: dict[str, Kind] = {
    "truncated_quadratic adaptive": "control", "barron adaptive": "control", "median": "control",
}  # fmt: skip
# The published network drops 30 % of the features before it normalizes them. Of a batch of 24, 12 or more are then 0
# in 8 of 256 channels, and where half of a channel coincides, the scale of a RobustBatchNorm at its c of 1 is 0 or
# nearly so: features and gradients grow a hundredfold, and the network does not train. A second row has no dropout, and
# a control shows what that does by itself.
NO_DROPOUT: dict[str, Any] = {"model.options": {"dropout": 0.0}}
CHANGED: dict[str, tuple[Kind, str, dict[str, Any]]] = {
    "pseudo_huber adaptive, no dropout": ("control", "pseudo_huber(learn_c=True)", NO_DROPOUT),
    "max, tanh (ours)": ("ours", "max", {"model.magnitude": "tanh"}),
    "pseudo_huber adaptive, tanh (ours)": ("ours", "pseudo_huber(learn_c=True)", {"model.magnitude": "tanh"}),
    "welsch adaptive, tanh (ours)": ("ours", "welsch(learn_c=True)", {"model.magnitude": "tanh"}),
    "pseudo_huber adaptive, RobustBatchNorm (ours)": ("ours", "pseudo_huber(learn_c=True)", {"model.norm": "robust"}),
    "pseudo_huber adaptive, no dropout, RobustBatchNorm (ours)": (
        "ours", "pseudo_huber(learn_c=True)", {"model.norm": "robust", **NO_DROPOUT},
    ),
}  # fmt: skip


def quick_points(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1200, "data.test_size": 600, "data.points": 256}
    return shorter(recipe, 1 / 10, **sizes, precision="fp32")


POINTS = Reduction(quick_points, "6 of 60 epochs on 1,200 clouds of 256 points, tested on 600; fp32")


def pool_text(row: str) -> str:
    """The pooling of a row such as "huber adaptive", whose c (barron: shape) is learned."""
    penalty, _, how = row.partition(" ")
    if penalty in POOLS or penalty == "median":
        return POOLS.get(penalty, penalty)
    learned = "learn_shape=True" if penalty == "barron" else "learn_c=True"
    return f"{penalty}({learned})" if how == "adaptive" else penalty


def network(pool: str) -> Recipe:
    """The published PointNet, its matrix products in tf32."""
    return pointnet(pool, "tf32")


PooledRow = tuple[str, Kind, Recipe, dict[str, list[float]]]  # with the published [top-1, mAP-6] by share


def rows_of(facts: dict[str, Any]) -> list[PooledRow]:
    """Every row with its kind, recipe and published numbers: the paper's, those it lacks, ours."""
    rows: list[PooledRow] = [
        (row, "published", network(pool_text(row)), pairs) for row, pairs in facts["cells"].items()
    ]
    rows += [(row, kind, network(pool_text(row)), {}) for row, kind in LACKING.items() if row not in facts["cells"]]
    return rows + [(row, kind, network(pool).override(changes), {}) for row, (kind, pool, changes) in CHANGED.items()]


EACH_EPOCH = ("10", "30", "50", "70")  # shares of outliers with which a network is tested after every epoch too


def tested_entry(row: str, kind: Kind, recipe: Recipe, pairs: dict[str, list[float]], shares: Sequence[str]) -> Entry:
    """A network trained on clean clouds, and tested with shares of outliers, some of them after every epoch."""
    tests = {f"{share} %": {"outliers": int(share) / 100} for share in shares if share != "0"}
    each = {name: tests[name] for share in EACH_EPOCH if (name := f"{share} %") in tests}
    known = {f"{share} %": pairs[share] for share in shares if share != "0" and pairs}
    return Entry(
        row, "trained clean", recipe.override({"log.conditions": each}), pairs["0"][0] if pairs else None,
        conditions=tests, published_conditions={name: pair[0] for name, pair in known.items()}, kind=kind,
        also={PAPERS_MAP: pairs["0"][1]} if pairs else {},
        also_conditions={name: {PAPERS_MAP: pair[1]} for name, pair in known.items()},
    )  # fmt: skip
