"""Launches of the kernels of robust batch normalization: how samples are cut, and what is launched once a call.

Channels of up to `WHOLE` samples are solved by one launch, which mostly writes y too. Others take a launch on a sample,
`PASSES` pairs of launches over all samples, one for what these leave, and one that writes y. What depends on sizes and
numbers alone is found once and kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.triton.batch_norm import kernels
from hyperball.kernels.triton.call import Launch, ordered
from hyperball.kernels.triton.row_access import power

WHOLE = 8192  # samples of a channel that a program keeps in registers
PASSES = 4  # over all samples, of which three are the rule
ROUGH, CLOSE = 1e-2, 1e-4  # lengths of the last step on a sample and on all: after one of d the error is of order d²
BESIDE = 32  # channels of a tile where they lie last
kept = functools.lru_cache(maxsize=4096)


class Setup(NamedTuple):
    """What launches depend on beside tensors; `c` is None where it is a tensor, `momentum` where nothing follows."""

    images: int
    channels: int
    length: int
    last: bool
    penalty: str
    shape: float
    eps: float
    c: float | None
    c_stride: int
    weight: bool
    bias: bool
    momentum: float | None
    device: torch.device

    @property
    def samples(self) -> int:
        """Samples of a channel."""
        return self.images * self.length

    def values(self) -> dict[str, Any]:
        """The kernels' arguments that follow from these alone."""
        return {
            "n": self.samples, "images": self.images, "length": self.length, "C": self.channels, "P": self.penalty,
            "SHAPE": self.shape, "GIVEN": self.c is None, "c_value": 0.0 if self.c is None else self.c,
            "c_stride": self.c_stride, "momentum": self.momentum or 0.0, "TRACK": self.momentum is not None,
            "WEIGHT": self.weight, "BIAS": self.bias, "ROOT": self.eps**0.5, "LAST": self.last,
            "TOLERANCE": CLOSE,
        }  # fmt: skip


class Cut(NamedTuple):
    """Tiles of BM by BK, `blocks` of them beside each other in an image, `each` of `units` for a program."""

    BM: int
    BK: int
    blocks: int
    units: int
    each: int
    EVEN: bool
    grid: tuple[int, int]

    @property
    def programs(self) -> int:
        """Those of one channel."""
        return self.grid[1]


def cut_for(setup: Setup, tile: int, pace: int, most: int) -> Cut:
    """So many samples a tile, multiples of so many tiles a program, and at most so many programs a channel."""
    width = BESIDE if setup.last else min(power(setup.length), tile)
    height = min(tile // width, power(setup.images))
    blocks = 1 if setup.last else -(-setup.length // width)
    units = -(-setup.images // height) * blocks
    each = pace * max(1, -(-units // (pace * most)))
    aside = setup.channels if setup.last else setup.length
    even = setup.images % height == 0 and aside % width == 0 and units % pace == 0
    return Cut(
        height, width, blocks, units, each, even,
        (-(-setup.channels // width) if setup.last else setup.channels, -(-units // each)),
    )  # fmt: skip


def summed(setup: Setup) -> Cut:
    """How a pass that sums is cut: into few enough programs a channel for their parts to be added at once."""
    return cut_for(setup, 1024, 8, 512 if setup.last else 64)


def mapped(setup: Setup) -> Cut:
    """How a pass that writes is cut."""
    return cut_for(setup, 2048, 2, 65535)


def launch(kernel: Any, tensors: int, grid: tuple[int, ...], warps: int, setup: Setup, **more: Any) -> Launch:
    return Launch(kernel, grid, ordered(kernel, tensors, {**setup.values(), **more}), warps, setup.device)


def over(cut: Cut) -> dict[str, Any]:
    """The kernels' arguments that a cut gives."""
    return {key: value for key, value in cut._asdict().items() if key != "grid"}


def solve_launch(setup: Setup) -> tuple[Launch, bool]:
    """Of channels in registers: all their samples where they are few, else a spread; and whether it writes y.

    Where channels lie last and a program has few of them, another launch writes whole pieces of memory.
    """
    whole = setup.samples <= WHOLE
    size = max(power(setup.samples), 16) if whole else 2048 if setup.last else 4096
    beside = min(8, max(2, 8192 // size)) if setup.last else 1
    ranked = 32 if beside == 8 else 64
    warps = min(16, max(size * beside // 512, ranked * ranked * beside // 1024))
    writes = whole and beside in (1, 8)
    more = {
        "WHOLE": whole, "WRITE": writes, "MODE": "part" if setup.samples < size else "full", "S": beside, "BN": size,
        "K": ranked, "TOLERANCE": CLOSE if whole else ROUGH,
    }  # fmt: skip
    return launch(kernels.solve_kernel, 9, (-(-setup.channels // beside),), warps, setup, **more), writes


def pass_launches(setup: Setup) -> list[tuple[Launch, Launch]]:
    """The sums and the step of every pass."""
    cut, made = summed(setup), []
    for k in range(PASSES):
        sums = launch(kernels.sums_kernel, 4, cut.grid, 4, setup, **over(cut), TURN=k % 2 == 1)
        held = {"programs": cut.programs, "BP": power(cut.programs), "FIRST": k == 0}
        made.append((sums, launch(kernels.update_kernel, 3, (setup.channels,), 1, setup, **held)))
    return made


def finish_launch(setup: Setup) -> Launch:
    beside, size = (16, 128) if setup.last else (1, 2048)
    grid = (-(-setup.channels // beside),)
    return launch(kernels.finish_kernel, 4, grid, 8, setup, S=beside, BN=size)


def normalize_launch(setup: Setup) -> Launch:
    cut = mapped(setup)
    return launch(kernels.normalize_kernel, 7, cut.grid, 4, setup, **over(cut), TURN=True)


class Forward(NamedTuple):
    """The launches of a forward; passes and finish are for channels that no program holds whole."""

    solve: Launch
    writes: bool
    whole: bool
    passes: list[tuple[Launch, Launch]]
    finish: Launch
    normalize: Launch
    programs: int


@kept
def forward_plan(setup: Setup) -> Forward:
    return Forward(
        *solve_launch(setup), setup.samples <= WHOLE, pass_launches(setup), finish_launch(setup),
        normalize_launch(setup), summed(setup).programs,
    )  # fmt: skip


class Backward(NamedTuple):
    """The sums; the gradients of weight, bias and c with the coefficients of dx; and dx."""

    sums: Launch
    coefficients: Launch
    write: Launch
    programs: int


@kept
def backward_plan(setup: Setup) -> Backward:
    sums, writes = summed(setup), mapped(setup)
    held = {"programs": sums.programs, "BP": power(sums.programs)}
    return Backward(
        launch(kernels.reduce_kernel, 5, sums.grid, 4, setup, **over(sums)),
        launch(kernels.coefficients_kernel, 5, (setup.channels,), 1, setup, **held),
        launch(kernels.apply_kernel, 6, writes.grid, 4, setup, **over(writes)),
        sums.programs,
    )


def floats(setup: Setup, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=setup.device)


def forward(
    x: Tensor, c: Tensor | None, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, Tensor] | None,
    setup: Setup,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y in x's layout, and (m, s) of every channel, [2, C]; x is dense."""
    plan = forward_plan(setup)
    y, stats = torch.empty_like(x), floats(setup, 2, setup.channels)
    radius, gain, shift = (stats if held is None else held for held in (c, weight, bias))
    mean, var = running or (stats, stats)
    walk = stats if plan.whole else floats(setup, 10, setup.channels)
    plan.solve(x, radius, gain, shift, mean, var, walk, stats, y)
    if not plan.whole:
        parts = floats(setup, setup.channels, 5, plan.programs)
        for sums, step in plan.passes:
            sums(x, radius, walk, parts)
            step(parts, radius, walk)
        plan.finish(x, radius, walk, stats)
    if not plan.writes:
        plan.normalize(x, gain, shift, stats, mean, var, y)
    return y, stats


def backward(
    v: Tensor, x: Tensor, c: Tensor | None, weight: Tensor | None, stats: Tensor, setup: Setup
) -> tuple[Tensor, Tensor]:
    """dx in x's layout, and the gradients of weight, bias and c of every channel among [6, C]; v and x are dense."""
    plan = backward_plan(setup)
    dx, out = torch.empty_like(x), floats(setup, 6, setup.channels)
    parts = floats(setup, setup.channels, 5, plan.programs)
    radius, gain = (stats if held is None else held for held in (c, weight))
    plan.sums(v, x, radius, stats, parts)
    plan.coefficients(parts, radius, gain, stats, out)
    plan.write(v, x, radius, stats, out, dx)
    return dx, out
