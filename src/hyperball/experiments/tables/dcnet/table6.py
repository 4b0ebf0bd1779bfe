"""Table 6 of Decoupled Networks: ResNet-18 on ImageNet, from an image folder."""

from __future__ import annotations

from hyperball.experiments.pictures import convergence
from hyperball.experiments.protocols import UNTRAINED
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables.dcnet.resnet18 import QUESTIONS, QUICK, SOURCE, entries, unsaid

MOMENTUM = "except at the scale quick, BatchNorm's momentum is 0.001 as in the authors' code for CIFAR"


def table() -> Experiment:
    """ImageNet in full, from an image folder."""
    return Experiment(
        "dcnet-table6", "ResNet-18 on ImageNet, top-5 error of center crops", SOURCE, "top5_error", entries(False),
        notes=(*QUESTIONS, UNTRAINED, MOMENTUM, unsaid("random parts of 8 to 100 %")), reduction=QUICK, also=("top1",),
        draws=(convergence,),
    )  # fmt: skip
