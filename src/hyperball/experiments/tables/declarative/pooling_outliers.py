"""Robust pooling, trained and tested with the same share of outliers."""

from __future__ import annotations

from hyperball.experiments.pictures import learned_radii
from hyperball.experiments.table import Entry, Experiment, published
from hyperball.experiments.tables.declarative.pooling import (
    ALSO,
    BEST,
    NOTES,
    PAPERS_MAP,
    POINTS,
    PROTOCOL,
    SOURCE,
    rows_of,
)

STANDS_STILL = "truncated_quadratic adaptive"  # its c has no gradient: the fixed row once more


def table() -> Experiment:
    """Trained and tested with the same share of outliers."""
    facts = published()["ddn_pooling_train_and_test_outliers"]
    cells = []
    rows = [entry for entry in rows_of(facts) if entry[0] != STANDS_STILL]
    for row, kind, recipe, pairs in rows:
        for share in facts["outlier_percent"]:
            top1, precision = pairs.get(share, (None, None))
            also = {} if precision is None else {PAPERS_MAP: precision}
            changed = recipe.override({"data.outliers": int(share) / 100})
            cells.append(Entry(row, f"{share} %", changed, top1, kind=kind, also=also))
    return Experiment(
        "pooling-outliers", "Robust pooling, outliers in training and test, ModelNet40", SOURCE, "top1", tuple(cells),
        notes=(*NOTES, BEST, "without outliers networks are those of pooling-test-outliers, trained once for both"),
        reduction=POINTS, also=ALSO, draws=(learned_radii,), protocol=PROTOCOL,
    )  # fmt: skip
