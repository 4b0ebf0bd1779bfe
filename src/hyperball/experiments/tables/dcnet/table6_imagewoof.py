"""The questions of table 6 of Decoupled Networks at the size of Imagewoof."""

from __future__ import annotations

from hyperball.experiments.pictures import convergence
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet.resnet18 import EPOCHS, QUESTIONS, QUICK, SOURCE, entries, unsaid


def table() -> Experiment:
    """The same questions on ten classes: does it start from the plain network, is BatchNorm needed?"""
    reduced = (
        f"Imagewoof instead of ImageNet: {EPOCHS} epochs of 112×112 images in batches of 128 instead of 700,000 steps "
        "of 40, milestones at the same shares, BatchNorm's momentum 0.05; no number of the paper compares"
    )
    return Experiment(
        "dcnet-table6-imagewoof", "Table 6's questions on Imagewoof, top-1 error", SOURCE, "error", entries(True),
        notes=(reduced, *QUESTIONS, unsaid("crops of 112×112 out of 128×128 pixels, half of the authors'")),
        reduction=QUICK, draws=(convergence,), protocol=reduced,
    )  # fmt: skip
