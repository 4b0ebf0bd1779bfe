"""Launches of the Triton kernels on tensors: tiles, grids and scratch memory.

Activations come as dense channels-last tensors [batch, channels, *spatial] or as rows [rows, channels].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from hyperball.kernels.triton import epilogue, maps
from hyperball.kernels.triton.code import Code

SMALL_BLOCK = 1024
# By kernel: elements of a tile, warps of a program, and programs a processor (0: one for every tile).
TUNING = {
    "lengths": (2048, 4, 0),
    "add": (4096, 8, 0),
    "forward": (2048, 4, 0),
    "statistics": (2048, 4, 4),
    "reduce": (2048, 4, 4),
    "backward": (1024, 4, 8),
}


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

    def constants(self) -> dict[str, Any]:
        return {"EVEN": self.even, "PARTS": self.parts, "BM": self.BM, "BC": self.BC}

    @property
    def per_program(self) -> int:
        return self.tiles * self.BM


def width_for(channels: int, most: int = 128) -> int:
    """Channels of a tile: a power of two up to `most`, one that divides the channels if it need not be below 32."""
    divisor = channels & -channels
    return min(divisor if divisor >= 32 else power(channels), most)


def tiles_for(kernel: str, rows: int, channels: int, device: torch.device, groups: int = 1) -> Tiles:
    """How a kernel cuts so many rows, by its tuning."""
    elements, warps, most = TUNING[kernel]
    width = width_for(channels)
    parts = -(-channels // width)
    height = max(1, elements // width)
    count = max(1, -(-rows // height))
    each = max(1, -(-count * parts * groups // (most * processors(device.index)))) if most else 1
    even = rows % height == 0 and parts * width == channels
    return Tiles(height, width, parts, each, -(-count // each), warps, even)


@dataclass(frozen=True)
class Geometry:
    """A convolution's window over the maps, as three dimensions; a linear layer's rows are one image of 1×1 windows."""

    images: int
    size: tuple[int, int, int]
    out: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]

    @property
    def positions(self) -> int:
        return self.images * self.out[0] * self.out[1] * self.out[2]

    @property
    def rows(self) -> int:
        return self.images * self.size[0] * self.size[1] * self.size[2]

    def arguments(self, groups: int) -> tuple[Any, ...]:
        return (*self.size, *self.out, groups, *self.kernel, *self.stride, *self.padding, *self.dilation)


def output_size(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def geometry(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Geometry:
    """The window of this convolution, or of a linear layer where x is [rows, features]."""
    if x.dim() == 2:
        one = (1, 1, 1)
        return Geometry(1, (1, 1, x.shape[0]), (1, 1, x.shape[0]), one, one, (0, 0, 0), one)
    lead = 3 - (x.dim() - 2)

    def full(values: Sequence[int], fill: int) -> tuple[int, int, int]:
        a, b, c = (fill,) * lead + tuple(values)
        return a, b, c

    size, kernel = full(x.shape[2:], 1), full(weight.shape[2:], 1)
    step, pad, gap = full(stride, 1), full(padding, 0), full(dilation, 1)
    a, b, c = (output_size(*each) for each in zip(size, kernel, step, pad, gap, strict=True))
    return Geometry(x.shape[0], size, (a, b, c), kernel, step, pad, gap)


def lengths(x: Tensor, rows: int, groups: int) -> Tensor:
    """r[row, group], float32."""
    channels = x.shape[1] // groups
    out = torch.empty(rows * groups, device=x.device, dtype=torch.float32)
    t = tiles_for("lengths", rows, channels, x.device)
    if out.numel():
        maps.lengths_kernel[t.programs, groups](
            x, out, rows, groups, channels, t.parts, t.even, t.BM, t.BC, num_warps=t.warps
        )
    return out


def box(r: Tensor, g: Geometry, groups: int, eps: float, sums: bool, peaks: bool) -> tuple[Tensor, Tensor, Tensor]:
    """n[position, group]; by block, Σ sqrt(n² + eps) and max n."""
    count = g.out[0] * g.out[1] * g.out[2] * groups
    block = min(power(count), SMALL_BLOCK)
    blocks = -(-count // block)
    n = torch.empty(g.positions * groups, device=r.device, dtype=torch.float32)
    parts = torch.empty(2, max(1, g.images * blocks), device=r.device, dtype=torch.float32)
    if n.numel():
        maps.box_kernel[g.images * blocks,](
            r, n, parts[0], parts[1], blocks, *g.arguments(groups), eps**0.5, sums, peaks, block, num_warps=4
        )
    return n, parts[0], parts[1]


def box_transposed(
    t: Tensor, n: Tensor, r: Tensor | None, pulls: Tensor | None, g: Geometry, groups: int, eps: float
) -> Tensor:
    """T = boxᵀ(t + K/sqrt(n² + eps)), or r·T where r is given."""
    count = g.size[0] * g.size[1] * g.size[2] * groups
    block = min(power(count), SMALL_BLOCK)
    blocks = -(-count // block)
    out = torch.empty(g.rows * groups, device=n.device, dtype=torch.float32)
    channels = 1 if pulls is None else pulls.numel()
    if out.numel():
        maps.box_transposed_kernel[g.images * blocks,](
            t, n, n if r is None else r, n if pulls is None else pulls, out, g.positions * groups, blocks,
            *g.arguments(groups), eps**0.5, pulls is not None, channels, power(channels), r is not None, t.shape[0],
            block, num_warps=4,
        )  # fmt: skip
    return out


def add_along(dx: Tensor, x: Tensor, along: Tensor, rows: int, groups: int) -> None:
    """dx += x·T in place, both dense with channels last."""
    channels = x.shape[1] // groups
    t = tiles_for("add", rows, channels, x.device)
    if dx.numel():
        maps.add_along_kernel[t.programs, groups](dx, x, along, rows, groups, channels, t.BM, t.BC, num_warps=t.warps)


def steps(slots: Sequence[Tensor | None]) -> list[int]:
    """How far apart two channels' values of a parameter lie: -1 where it is no tensor."""
    return [-1 if held is None else (1 if held.numel() > 1 else 0) for held in slots]


def taps_to_move(weight: Tensor) -> int:
    """How many taps a filter has if its channels do not already lie last in memory, else 1."""
    taps = weight[0, 0].numel() if weight.shape[0] and weight.shape[1] else 1
    return taps if taps > 1 and weight.shape[1] > 1 and weight.is_contiguous() else 1


def prepare(
    weight: Tensor, filters: Tensor, slots: Sequence[Tensor | None], running: Tensor | None, sums: Tensor,
    peaks: Tensor, positions: int, code: Code,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fill `filters` with unit filters; m, the parameters p [5, channels], and the radius's unit and the lift."""
    channels = weight.shape[0]
    m = torch.empty(channels, device=weight.device, dtype=torch.float32)
    p = torch.empty(5, channels, device=weight.device, dtype=torch.float32)
    scalars = torch.empty(2, device=weight.device, dtype=torch.float32)
    size = weight.numel() // max(channels, 1)
    lift = filters.dtype == torch.float16
    pointers = [weight if held is None else held for held in slots]
    maps.prepare_kernel[max(channels, 1),](
        weight, filters, m, p, scalars, scalars[1:], *pointers, sums, peaks, weight if running is None else running,
        sums.numel(), positions, channels, size, *steps(slots), code.unit, code.rho or 0.0, lift, taps_to_move(weight),
        min(power(size), 2048), min(power(sums.numel()), SMALL_BLOCK), num_warps=4,
    )  # fmt: skip
    return m, p, scalars


def finish(
    weight: Tensor, grad: Tensor | None, m: Tensor, lift: Tensor, parts: Tensor, rho: Tensor | None, unit: Tensor,
    code: Code, half: bool, rho_slot: int,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """dw, the parameters' gradients [slots, channels], and the channels' pulls on the unit of a relative radius."""
    programs, count, channels = parts.shape
    dw = None if grad is None else torch.empty_like(weight)
    sums = torch.empty(max(count, 1), channels, device=m.device, dtype=torch.float32)
    pulls = torch.empty(channels, device=m.device, dtype=torch.float32)
    size = weight.numel() // max(channels, 1)
    maps.finish_kernel[max(channels, 1),](
        weight, weight if grad is None else grad, m, lift, weight if dw is None else dw, parts, sums, unit,
        m if rho is None else rho, pulls, programs, channels, size, count, rho_slot, code.unit,
        steps([rho])[0], code.rho or 0.0, half, grad is not None, taps_to_move(weight), min(power(size), 2048),
        min(power(programs), 1024), num_warps=4,
    )  # fmt: skip
    return dw, sums, pulls


@dataclass(frozen=True)
class Operands:
    """What every kernel over activations reads: the response y, the norms n and the operator."""

    y: Tensor
    n: Tensor
    p: Tensor
    lift: Tensor
    factor: Tensor | None
    stretch: Tensor | None
    slopes: Tensor | None
    turns: Tensor | None
    code: Code
    slots: tuple[bool, ...]
    groups: int

    @property
    def rows(self) -> int:
        return self.n.numel() // self.groups

    @property
    def channels(self) -> int:
        return self.p.shape[1] // self.groups

    def pointers(self) -> tuple[Tensor, ...]:
        optional = (self.factor, self.stretch, self.lift, self.slopes, self.turns)
        return (self.y, self.n, self.p, *(self.p if held is None else held for held in optional))

    def constants(self) -> dict[str, Any]:
        code = self.code
        numbers = {
            name.upper(): None if tensor else (1.0 if number is None else number)
            for name, tensor, number in zip(
                ("alpha", "beta", "rho", "shape", "bend"), self.slots,
                (code.alpha, code.beta, code.rho, code.shape, code.bend), strict=True,
            )
        }  # fmt: skip
        if code.unit != "none":
            numbers["RHO"] = None
        return {
            **numbers,
            "GROUPS": self.groups,
            "C": self.channels,
            "ROW": code.radial,
            "ANG": code.angular,
            "PIECES": 1 if self.slopes is None else self.slopes.numel(),
            "TURNS": 1 if self.turns is None else self.turns.numel(),
            "ROOT_EPS": code.eps**0.5,
            "EPS": code.angular_eps,
            "FACTOR": self.factor is not None,
            "STRETCH": self.stretch is not None,
            "LIFT": self.y.dtype == torch.float16,
            "FAST": self.y.is_cuda and self.y.dtype != torch.float32,
        }


@dataclass(frozen=True)
class Block:
    """What follows the convolution in a fused block: BatchNorm's stats, an activation, a residual and lengths."""

    stats: Tensor
    activation: str = "none"
    leak: Tensor | None = None
    residual: Tensor | None = None
    lengths: bool = False


def forward(o: Operands, block: Block | None = None) -> tuple[Tensor, Tensor]:
    """f, or act(BatchNorm(f) + residual), like y; and the lengths of its rows (one number where they are not asked)."""
    out = torch.empty_like(o.y)
    wanted = block is not None and block.lengths
    r = torch.empty(o.rows if wanted else 1, device=o.y.device, dtype=torch.float32)
    t = tiles_for("forward", o.rows, o.channels, o.y.device)
    p = o.p
    stats = p if block is None else block.stats
    leak = None if block is None else block.leak
    residual = None if block is None else block.residual
    if out.numel():
        epilogue.forward_kernel[t.programs, o.groups](
            *o.pointers(), stats[3], stats[4], p if leak is None else leak, p if residual is None else residual, out,
            r, o.rows, **o.constants(), NORM=block is not None,
            ACT="none" if block is None else block.activation, LEAK=max(steps([leak])[0], 0),
            RESIDUAL=residual is not None, LENGTHS=wanted, **t.constants(), num_warps=t.warps,
        )  # fmt: skip
    return out, r


def batch_statistics(
    o: Operands, weight: Tensor | None, bias: Tensor | None, eps: float, running: tuple[Tensor, Tensor] | None
) -> Tensor:
    """[5, channels]: mean, variance, 1/sqrt(variance + eps), scale and shift, of this batch or as running."""
    channels = o.p.shape[1]
    stats = torch.empty(5, channels, device=o.p.device, dtype=torch.float32)
    t = tiles_for("statistics", o.rows, o.channels, o.y.device, o.groups)
    if running is None:
        parts = torch.empty(2, t.programs, channels, device=o.p.device, dtype=torch.float32)
        means, squares = parts[0], parts[1]
        epilogue.statistics_kernel[o.groups * t.parts, t.programs](
            *o.pointers(),
            means,
            squares,
            o.rows,
            t.tiles,
            **o.constants(),
            **t.constants(),
            num_warps=t.warps,
        )
    else:
        means, squares = running
    wide = 8
    epilogue.normalize_kernel[-(-channels // wide),](
        means, squares, o.p if weight is None else weight, o.p if bias is None else bias, stats, o.rows, t.per_program,
        t.programs, channels, eps, weight is not None, running is None, wide, power(t.programs), num_warps=8,
    )  # fmt: skip
    return stats


@dataclass(frozen=True)
class Incoming:
    """The gradient of a block's output, and what the gradient before its activation is formed from."""

    v: Tensor
    source: str = "done"
    held: Tensor | None = None
    lengths: Tensor | None = None
    dlengths: Tensor | None = None
    activation: str = "none"
    leak: Tensor | None = None

    def pointers(self) -> tuple[Tensor, ...]:
        optional = (self.held, self.lengths, self.dlengths, self.leak)
        return (self.v, *(self.v if held is None else held for held in optional))

    def constants(self) -> dict[str, Any]:
        return {
            "ACT": self.activation,
            "LEAK": max(steps([self.leak])[0], 0),
            "SOURCE": self.source,
            "LENGTHS": self.dlengths is not None,
        }


def reduce(o: Operands, i: Incoming, stats: Tensor, batch: bool, write: bool) -> tuple[Tensor, Tensor]:
    """[5, channels]: dγ, dβ, dslope and the coefficients of df; and the gradient before the activation, if written."""
    channels = o.p.shape[1]
    t = tiles_for("reduce", o.rows, o.channels, o.y.device, o.groups)
    parts = torch.empty(t.programs, 3, channels, device=o.p.device, dtype=torch.float32)
    out = torch.empty_like(o.y) if write else o.y
    inner = torch.empty(5, channels, device=o.p.device, dtype=torch.float32)
    epilogue.reduce_kernel[o.groups * t.parts, t.programs](
        *i.pointers(), stats, *o.pointers(), out, parts, o.rows, t.tiles, **o.constants(), **i.constants(),
        WRITE=write, **t.constants(), num_warps=t.warps,
    )  # fmt: skip
    wide = 8
    epilogue.coefficients_kernel[-(-channels // wide),](
        parts, stats, inner, o.rows, t.programs, channels, batch, i.activation == "prelu", wide,
        min(power(t.programs), 1024), num_warps=8,
    )  # fmt: skip
    return inner, out


PARAMETERS = ("alpha", "beta", "rho", "shape", "bend", "factor", "stretch", "slopes", "turns")


def placed(o: Operands, needed: Sequence[bool]) -> tuple[dict[str, int], int]:
    """In which row of the gradients each needed parameter begins (-1: not needed), and how many rows there are."""
    sizes = [1] * 7 + [0 if held is None else held.numel() for held in (o.slopes, o.turns)]
    places, count = {}, 0
    for name, size, need in zip(PARAMETERS, sizes, needed, strict=True):
        places[name] = count if need else -1
        count += size if need else 0
    return places, count


def backward(
    o: Operands, i: Incoming, stats: Tensor | None, inner: Tensor | None, places: dict[str, int], count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dy like y, t = dn/n by part of the channels, and parameters' gradients [programs, places, channels]."""
    channels = o.p.shape[1]
    t = tiles_for("backward", o.rows, o.channels, o.y.device, o.groups)
    dy = torch.empty_like(o.y)
    along = torch.empty(t.parts, o.n.numel(), device=o.n.device, dtype=torch.float32)
    parts = torch.empty(t.programs, count, channels, device=o.p.device, dtype=torch.float32)
    constants = {f"AT_{name.upper()}": place for name, place in places.items()}
    if dy.numel():
        epilogue.backward_kernel[o.groups * t.parts, t.programs](
            *i.pointers(), o.p if stats is None else stats, o.p if inner is None else inner, *o.pointers(), dy, along,
            parts, o.rows, t.tiles, **o.constants(), **i.constants(), NORM=stats is not None, SLOTS=count,
            **constants, SLOPE_ROWS=power(1 if o.slopes is None else o.slopes.numel()),
            TURN_ROWS=power(1 if o.turns is None else o.turns.numel()), **t.constants(), num_warps=t.warps,
        )  # fmt: skip
    return dy, along, parts


def track(
    length: tuple[Tensor, Tensor, Tensor] | None, norm: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    momentum: float, unbiased: float,
) -> None:  # fmt: skip
    """Update (running, batches) by the unit, and (running mean, running variance, batches) by BatchNorm's stats."""
    some: Any = (length or norm or (None,))[0]
    running, batches, unit = length or (some, some, some)
    running_mean, running_var, counted, stats = norm or (some, some, some, some)
    channels = running_mean.numel() if norm else 1
    maps.track_kernel[1,](
        running, batches, unit, stats, stats[1] if norm else some, running_mean, running_var, counted, channels,
        power(channels), length is not None, norm is not None, momentum, unbiased, num_warps=4,
    )  # fmt: skip
