"""Times of a ResNet-18 with a projection before its classifier."""

from __future__ import annotations

from typing import Any

import torch

from hyperball import models
from hyperball.experiments.runtime import Call, Subject, Timing, quotient
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import published
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.experiments.tables.declarative.projections import SETS, projection_text


def network_call(projection: str | None, size: int, batch: int, device: torch.device) -> Call:
    """A ResNet-18 in evaluation, forward."""
    options = {} if projection is None else {"projection": projection}
    network = models.create("resnet18", 10, **options).to(device).eval()
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)

    def forward() -> Any:
        with torch.no_grad():
            return network(x)

    return forward


def projection_subjects(scale: Scale) -> tuple[Subject, ...]:
    facts = published()["ddn_projection_runtime"]["cells"]
    size, batch = (64, 8) if scale == "quick" else (224, 128)

    plain = facts["none"][0]

    def made(row: str, column: str, number: float | None, text: str | None) -> Subject:
        over, ratio = (None, None) if text is None else (("none", "no projection"), quotient(number, plain))
        return Subject(row, column, number, lambda device: network_call(text, size, batch, device), batch, over, ratio)

    subjects = [made("none", "no projection", plain, None)]
    for row, projection in SETS.items():
        for how, number in zip(("fixed", "adaptive"), facts.get(row, (None, None)), strict=True):
            subjects.append(made(row, how, number, projection_text(projection, how)))
    return tuple(subjects)


def table() -> Timing:
    """A whole ResNet-18 with each projection before its classifier, an image."""
    return Timing(
        "projections-runtime", "Time of a ResNet-18 with projections", f"{SOURCE}, slides", "milliseconds an image",
        projection_subjects,
        lambda scale: "forward of 8 images of 64×64 pixels" if scale == "quick" else "forward of 128 images of 224×224",
        (
            "the paper's device and batch are not those used here: ratios alone compare",
            "ratio: to the network without a projection",
        ),
    )  # fmt: skip
