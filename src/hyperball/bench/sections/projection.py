"""What a projection adds to a training step of ResNet-18, and the L1 projection against sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperball.bench.case import DTYPES, Aim, Case, Make, Setting
from hyperball.bench.sections.networks import network, training_step
from hyperball.bench.sections.pool import step_of
from hyperball.bench.timing import Step
from hyperball.functional import project

WITHOUT, SORTED = "no projection", "sort and prefix sums"
AGAIN = "no projection, again"  # the same network twice: what differs from 1 here is noise
PROJECTIONS = ("l2_ball(radius=15)", "l1_ball(radius=250)", "linf_ball(radius=3)")
STEP_AIM = 1.01
SORT_AIM = 1 / 5
SHAPE = (2048, 1024)
RADII = (1.0, 10.0, 250.0)  # supports of about 3, 40 and 470 of 1,024 elements
OURS = "L1 ball"


def build_step(options: dict[str, Any], batch: int, size: int, dtype: str, setting: Setting, sets: int) -> list[Step]:
    model = network("resnet18", setting, **options).train()
    return [training_step(model, batch, size, setting, dtype)] * sets


def in_a_step(dtype: str, setting: Setting) -> Case:
    """Projections of the features before ResNet-18's classifier, with the BatchNorm that stands before them."""
    batch, size = (128, 224) if setting.on_gpu else (2, 64) if setting.quick else (4, 112)
    options: dict[str, dict[str, Any]] = {
        WITHOUT: {},
        AGAIN: {},
        **{text: {"projection": text} for text in PROJECTIONS},
    }
    made: dict[str, Make] = {
        name: partial(build_step, given, batch, size, dtype, setting) for name, given in options.items()
    }
    modes = setting.modes[:1]
    aims: dict[tuple[str, ...], Aim] = {(text, WITHOUT): Aim(STEP_AIM) for text in PROJECTIONS if setting.on_gpu}
    return Case(
        "projection",
        f"resnet18, batch {batch}, {size}²",
        "training step",
        dtype,
        made,
        (WITHOUT,),
        modes,
        aims,
        threads=setting.threads,
    )


def sorted_l1_ball(x: Tensor, radius: float) -> Tensor:
    """y = sgn(x) max(|x| - tau, 0), tau = max(0, max_k (sum of the k largest |x| - r) / k), by sorting."""
    size = x.abs()
    ordered = size.sort(dim=-1, descending=True).values
    thresholds = (ordered.cumsum(-1) - radius) / torch.arange(1, x.shape[-1] + 1, device=x.device)
    tau = thresholds.amax(-1, keepdim=True).clamp_min(0)
    return x.sign() * (size - tau).relu()


def build_rows(call: Callable[[Tensor], Tensor], setting: Setting, sets: int) -> list[Step]:
    generator = torch.Generator(setting.device).manual_seed(0)
    made = [torch.randn(SHAPE, generator=generator, device=setting.device) for _ in range(sets)]
    return [step_of(call, x, "forward") for x in made]


def against_sorting(radius: float, setting: Setting) -> Case:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        SORTED: lambda x: sorted_l1_ball(x, radius), OURS: lambda x: project(x, radius, p=1)
    }  # fmt: skip
    made: dict[str, Make] = {name: partial(build_rows, call, setting) for name, call in calls.items()}
    bytes_each = 2 * torch.Size(SHAPE).numel() * DTYPES["fp32"].itemsize
    title = f"{SHAPE[0]}×{SHAPE[1]}, radius {radius:g}"
    return Case(
        "projection", title, "forward", "fp32", made, (SORTED,), setting.modes[:1],
        {} if setting.on_gpu else {(OURS, SORTED): Aim(SORT_AIM)}, threads=None if setting.on_gpu else 1,
        bytes_each=bytes_each,
    )  # fmt: skip


def generated(setting: Setting) -> Iterator[Case]:
    yield in_a_step(setting.dtypes("bf16" if setting.on_gpu else "fp32")[0], setting)
    for radius in RADII[:1] if setting.quick else RADII:
        yield against_sorting(radius, setting)


def cases(setting: Setting) -> list[Case]:
    """The comparisons of this section."""
    return list(generated(setting))


def notes(setting: Setting) -> list[str]:
    return []
