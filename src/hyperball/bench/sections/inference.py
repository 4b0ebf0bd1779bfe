"""A frozen decoupled ResNet-18, BatchNorm folded in, against a plain one in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from hyperball.bench.case import DTYPES, Aim, Case, Make, Setting
from hyperball.bench.sections.networks import NETWORKS, evaluation_step, images, network
from hyperball.bench.timing import Step
from hyperball.freeze import freeze

PLAIN, COMPILED = "plain", "plain, compiled"
GPU_AIM, CPU_AIM = 1.10, 1.25
SIZE = 224


def settled(options: dict[str, Any], setting: Setting) -> nn.Module:
    """A network whose radii differ from channel to channel and whose running statistics are those of data."""
    model = network("resnet18", setting, **options)
    for name, parameter in model.named_parameters():
        if name.endswith("ratio"):
            nn.init.uniform_(parameter, 0.8, 1.2)
    with torch.no_grad():
        model.train()(images(4, 64, setting)[0])
    return model.eval()


def build(options: dict[str, Any], batch: int, dtype: str, compiled: bool, setting: Setting, sets: int) -> list[Step]:
    model: Any = settled(options, setting)
    if options:
        model = freeze(model)
    if dtype in ("bf16", "fp16"):
        model = model.to(DTYPES[dtype])
    called = torch.compile(model, dynamic=False) if compiled else model
    given = [images(batch, SIZE, setting, seed)[0].to(DTYPES[dtype]) for seed in range(sets)]
    return [evaluation_step(called, x, setting, "fp32") for x in given]


def case(batch: int, dtype: str, setting: Setting, threads: int | None = None) -> Case:
    made: dict[str, Make] = {
        name: partial(build, options, batch, dtype, False, setting) for name, options in NETWORKS.items()
    }
    references: tuple[str, ...] = (PLAIN,)
    if setting.on_gpu and not setting.quick:
        made[COMPILED] = partial(build, {}, batch, dtype, True, setting)
        references = (PLAIN, COMPILED)
    aim = Aim(GPU_AIM if setting.on_gpu else CPU_AIM)
    aims: dict[tuple[str, ...], Aim] = {(name, PLAIN, setting.modes[0]): aim for name in NETWORKS if name != PLAIN}
    title = f"resnet18, batch {batch}" + (f", {threads} thread" if threads else "")
    return Case(
        "inference", title, "frozen inference", dtype, made, references, setting.modes, aims, threads=threads,
    )  # fmt: skip


def generated(setting: Setting) -> Iterator[Case]:
    dtype = setting.dtypes("bf16" if setting.on_gpu else "fp32")[0]
    if setting.on_gpu:
        yield case(128, dtype, setting)
        return
    for batch in (1,) if setting.quick else (1, 8):
        for threads in setting.counts_of_threads[-1:] if setting.quick else setting.counts_of_threads:
            yield case(batch, dtype, setting, threads)


def cases(setting: Setting) -> list[Case]:
    """The comparisons of this section."""
    return list(generated(setting))


def notes(setting: Setting) -> list[str]:
    return []
