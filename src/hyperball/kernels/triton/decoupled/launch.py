"""Launches of the Triton kernels over maps and filters: tiles, grids and scratch memory.

Activations come as dense channels-last tensors [batch, channels, *spatial] or as rows [rows, channels]. What depends
on sizes alone is found once and kept: a `Launch` with its grid and all of its arguments but the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hyperball.kernels.triton import maps
from hyperball.kernels.triton.call import Launch
from hyperball.kernels.triton.decoupled import begin, finish
from hyperball.kernels.triton.decoupled.code import Code

SMALL_BLOCK = 1024
KEPT = 4096  # launches of a kind that are kept
# By kernel: elements of a tile, warps of a program, programs a processor (0: one for every tile), and tiles on the way.
TUNING = {
    "lengths": (2048, 4, 0, 1),
    "add": (4096, 8, 0, 1),
    "forward": (2048, 4, 0, 1),
    "statistics": (2048, 4, 4, 3),
    "reduce": (2048, 4, 4, 3),
    "backward": (1024, 4, 8, 3),
    "alone": (1024, 4, 8, 3),  # the backward without BatchNorm
}
WHOLE = 128  # channels up to which a row is added in one piece: parts of 64 bytes took thrice the time of whole rows
kept = functools.lru_cache(maxsize=KEPT)


@functools.lru_cache(maxsize=64)
def processors(index: int | None) -> int:
    return 4 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def power(n: int) -> int:
    return int(triton.next_power_of_2(max(int(n), 1)))


@dataclass(frozen=True)
class Tiles:
    """How rows are cut: BM rows by BC channels a tile, `parts` tiles beside each other, `tiles` tiles a program."""

    BM: int
    BC: int
    parts: int
    tiles: int
    programs: int
    warps: int
    even: bool
    ahead: int = 1

    def constants(self) -> dict[str, Any]:
        return {"EVEN": self.even, "PARTS": self.parts, "AHEAD": self.ahead, "BM": self.BM, "BC": self.BC}

    @property
    def per_program(self) -> int:
        return self.tiles * self.BM


def width_for(channels: int, most: int = 128) -> int:
    """Channels of a tile: a power of two up to `most`, one that divides the channels if it need not be below 32."""
    divisor = channels & -channels
    return min(divisor if divisor >= 32 else power(channels), most)


@kept
def tiles_for(kernel: str, rows: int, channels: int, device: torch.device, groups: int = 1) -> Tiles:
    """How a kernel cuts so many rows, by its tuning; tiles that need a mask are loaded when it is their turn."""
    elements, warps, most, ahead = TUNING[kernel]
    width = min(power(channels), WHOLE) if kernel == "add" and channels < WHOLE else width_for(channels)
    parts = -(-channels // width)
    height = max(1, elements // width)
    count = max(1, -(-rows // height))
    each = max(1, -(-count * parts * groups // (most * processors(device.index)))) if most else 1
    even = rows % height == 0 and parts * width == channels
    return Tiles(height, width, parts, each, -(-count // each), warps, even, ahead if even else 1)


@dataclass(frozen=True, eq=False)
class Geometry:
    """A convolution's window over the maps, as three dimensions; a linear layer's rows are one image of 1×1 windows."""

    images: int
    size: tuple[int, int, int]
    out: tuple[int, int, int]
    window: tuple[int, ...]
    groups: int
    positions: int
    rows: int

    def arguments(self) -> tuple[int, ...]:
        return (*self.size, *self.out, self.groups, *self.window)


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


@kept
def geometry(
    shape: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
    dilation: tuple[int, ...], groups: int,
) -> Geometry:  # fmt: skip
    """The window of a convolution of an input of this shape, or of a linear layer where it is [rows, features]."""
    if len(shape) == 2:
        one, rows = (1, 1, 1), shape[0]
        return Geometry(1, (1, 1, rows), (1, 1, rows), (*one, *one, 0, 0, 0, *one), 1, rows, rows)
    lead = 3 - (len(shape) - 2)

    def full(values: Sequence[int], fill: int) -> tuple[int, int, int]:
        a, b, c = (fill,) * lead + tuple(values)
        return a, b, c

    size, taps = full(shape[2:], 1), full(kernel, 1)
    step, pad, gap = full(stride, 1), full(padding, 0), full(dilation, 1)
    a, b, c = (output_size(*each) for each in zip(size, taps, step, pad, gap, strict=True))
    rows = shape[0] * size[0] * size[1] * size[2]
    return Geometry(shape[0], size, (a, b, c), (*taps, *step, *pad, *gap), groups, shape[0] * a * b * c, rows)


def output_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor [batch, channels, *spatial] with its channels last."""
    strides, step = [1], shape[1]
    for size in reversed(shape[2:]):
        strides.insert(1, step)
        step *= size
    return step, *strides


def floats(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, device=device, dtype=torch.float32)


def lengths(x: Tensor, rows: int, groups: int) -> Tensor:
    """r[row, group], float32."""
    out = floats(x.device, rows * groups)
    if rows:
        lengths_launch(rows, groups, x.shape[1] // groups, x.device)(x, out)
    return out


@kept
def lengths_launch(rows: int, groups: int, channels: int, device: torch.device) -> Launch:
    """The launch of r[row, group] from x."""
    t = tiles_for("lengths", rows, channels, device)
    rest = (rows, groups, channels, t.parts, t.even, t.BM, t.BC)
    return Launch(maps.lengths_kernel, (t.programs, groups), rest, t.warps, device)


def blocks_of(size: tuple[int, int, int], groups: int) -> tuple[int, int]:
    """Into how many blocks of how many entries the map of one image is cut."""
    count = size[0] * size[1] * size[2] * groups
    block = min(power(count), SMALL_BLOCK)
    return -(-count // block), block


def box(r: Tensor, g: Geometry, eps: float, sums: bool, peaks: bool) -> tuple[Tensor, Tensor]:
    """n[position, group]; by block, Σ sqrt(n² + eps), and behind them max n."""
    launch, programs = box_launch(g, eps, sums, peaks, r.device)
    n, parts = floats(r.device, g.positions * g.groups), floats(r.device, 2 * max(1, programs))
    if programs:
        launch(r, n, parts)
    return n, parts


@kept
def box_launch(g: Geometry, eps: float, sums: bool, peaks: bool, device: torch.device) -> tuple[Launch, int]:
    """The launch of n[position, group] and, by block, Σ sqrt(n² + eps), behind them max n, from r; and the blocks."""
    blocks, block = blocks_of(g.out, g.groups)
    rest = (blocks, *g.arguments(), eps**0.5, sums, peaks, block)
    return Launch(maps.box_kernel, (g.images * blocks,), rest, 4, device), g.images * blocks


@kept
def box_transposed_launch(g: Geometry, eps: float, channels: int, parts: int, device: torch.device) -> Launch:
    """The launch of r·T, T = boxᵀ(t + K/sqrt(n² + eps)), from t, n, r and so many channels' pulls."""
    blocks, block = blocks_of(g.size, g.groups)
    pulls = (channels > 0, max(channels, 1), power(channels))
    rest = (g.positions * g.groups, blocks, *g.arguments(), eps**0.5, *pulls, parts, block)
    return Launch(maps.box_transposed_kernel, (g.images * blocks,), rest, 4, device)


@kept
def add_launch(rows: int, groups: int, channels: int, pulling: int, positions: int, device: torch.device) -> Launch:
    """The launch of dx += x·T in place, both dense with channels last; T = along + K·level, K of so many channels."""
    t = tiles_for("add", rows, channels, device)
    pulls = (pulling > 0, max(pulling, 1), power(pulling))
    rest = (rows, positions, groups, channels, *pulls, t.even, t.BM, t.BC)
    return Launch(maps.add_along_kernel, (t.programs, groups), rest, t.warps, device)


def steps(slots: Sequence[Tensor | None]) -> tuple[int, ...]:
    """How far apart two channels' values of a parameter lie: -1 where it is no tensor."""
    return tuple([-1 if held is None else (1 if held.numel() > 1 else 0) for held in slots])


def taps_to_move(weight: Tensor) -> int:
    """How many taps a filter has if its channels do not already lie last in memory, else 1."""
    shape = weight.shape
    taps = weight.numel() // (shape[0] * shape[1]) if shape[0] and shape[1] else 1
    return taps if taps > 1 and shape[1] > 1 and weight.is_contiguous() else 1


@kept
def prepare_launch(
    channels: int, size: int, taps: int, slots: tuple[int, ...], code: Code, lift: bool, track: bool, blocks: int,
    positions: int, device: torch.device,
) -> Launch:  # fmt: skip
    """The launch of unit filters, m, the parameters p [5, channels], and the radius's unit and the lift.

    With `track` the running mean follows the unit of this batch.
    """
    rest = (
        blocks, positions, channels, size, *slots, code.unit, code.rho or 0.0, lift, track, taps,
        min(power(size), 2048), min(power(blocks), SMALL_BLOCK),
    )  # fmt: skip
    return Launch(begin.prepare_kernel, (max(channels, 1),), rest, 4, device)


@kept
def prepare_box_launch(
    channels: int, size: int, taps: int, slots: tuple[int, ...], code: Code, g: Geometry, device: torch.device
) -> Launch:
    """`prepare_launch`, and beside it n[position, group] from r, where neither a unit nor a lift depends on it."""
    blocks, block = blocks_of(g.out, g.groups)
    rest = (
        blocks, *g.size, *g.out, channels, size, *slots, code.unit, code.rho or 0.0, taps, min(power(size), 2048),
        g.groups, *g.window, block,
    )  # fmt: skip
    return Launch(begin.prepare_box_kernel, (channels + g.images * blocks,), rest, 4, device)


def finish_arguments(
    programs: int, count: int, channels: int, size: int, taps: int, step: int, code: Code, half: bool, filters: bool,
    rho_slot: int,
) -> tuple[Any, ...]:  # fmt: skip
    """What ends a backward is told: the programs that left parts, and the constants of `finish_channel`."""
    return (
        programs, channels, size, count, rho_slot, code.unit, step, code.rho or 0.0, half, filters, taps,
        min(power(size), 2048), min(power(programs), 1024),
    )  # fmt: skip


@kept
def finish_launch(given: tuple[Any, ...], device: torch.device) -> Launch:
    """The launch of dw, the parameters' gradients [slots, channels], and the channels' pulls on a relative unit."""
    return Launch(finish.finish_kernel, (max(given[1], 1),), given, 4, device)


@kept
def finish_box_launch(
    given: tuple[Any, ...], g: Geometry, eps: float, pulls: bool, parts: int, device: torch.device
) -> Launch:
    """`finish_launch`, and beside it boxᵀ(t) and boxᵀ(1/sqrt(n² + eps)), from t and n."""
    blocks, block = blocks_of(g.size, g.groups)
    programs, channels, *constants = given
    rest = (
        programs, g.positions * g.groups, blocks, *g.size, *g.out, channels, *constants, g.groups, *g.window, eps**0.5,
        pulls, parts, block,
    )  # fmt: skip
    return Launch(finish.finish_box_kernel, (channels + g.images * blocks,), rest, 4, device)


def track(
    length: tuple[Tensor, Tensor, Tensor] | None, norm: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    momentum: float, unbiased: float,
) -> None:  # fmt: skip
    """Update (running, batches) by the unit, and (running mean, running variance, batches) by BatchNorm's stats."""
    some: Any = (length or norm or (None,))[0]
    running, batches, unit = length or (some, some, some)
    running_mean, running_var, counted, stats = norm or (some, some, some, some)
    channels = running_mean.numel() if norm else 1
    launch = _track(channels, length is not None, norm is not None, momentum, unbiased, some.device)
    launch(running, batches, unit, stats, running_mean, running_var, counted)


@kept
def _track(channels: int, length: bool, norm: bool, momentum: float, unbiased: float, device: torch.device) -> Launch:
    rest = (channels, power(channels), length, norm, momentum, unbiased)
    return Launch(maps.track_kernel, (1,), rest, 4, device)
