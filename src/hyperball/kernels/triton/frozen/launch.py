"""Launches of frozen layers: norms, torch's convolution with constant filters, and one pass over its output.

Everything that depends on the layer and on the input's shape is found once: a call makes the tensors and the launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hyperball.kernels.triton.call import Launch, ordered
from hyperball.kernels.triton.decoupled import launch
from hyperball.kernels.triton.decoupled.code import Code
from hyperball.kernels.triton.decoupled.layer import described
from hyperball.kernels.triton.decoupled.ops import dense, memory_format, on_its_device
from hyperball.kernels.triton.frozen import kernels as frozen
from hyperball.kernels.window import Window
from hyperball.rows import Value

MOST_TAPS, LEAST_CHANNELS = 9, 512  # of a window whose norms a program computes by itself, and of a group
LIFT_BLOCK = 1024
TUNING = {"frozen": (2048, 4), "pooled": (512, 1)}  # elements of a tile, and warps of a program
STEPS = 8  # rows of a pooled output that a program computes, one after the other
NARROW, NARROW_BLOCK = 8, 1024  # channels of a group that a thread reads by itself, and rows of a program then
MOST_ROWS = 2**31 - 2**16  # where a program divides row numbers, which have 32 bits


class Pool(NamedTuple):
    """A max pooling: kernel, stride and padding."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]


class After(NamedTuple):
    """What follows a convolution: an activation, PReLU's slopes (0: one for all, 1: one a channel), a residual, lengths
    that leave beside the activation, and a max pooling.
    """

    activation: str = "none"
    leak: int = 0
    residual: bool = False
    carry: bool = False
    pool: tuple[tuple[int, int], ...] | None = None  # a `Pool`


@dataclass(eq=False)
class Prepared:
    """A frozen layer for one dtype and device: filters with channels last, and what its kernels are told."""

    filters: Tensor
    longest: Tensor
    pointers: tuple[Tensor, ...]
    constants: dict[str, Any]
    plans: dict[Any, Plan] = field(default_factory=dict)

    @property
    def lifts(self) -> bool:
        return self.filters.dtype == torch.float16


class Box(NamedTuple):
    """A launch of norms: how many there are, how many largest ones by block it leaves, and the width of the map."""

    launch: Launch
    norms: int
    peaks: int
    width: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches for an input of one shape; `shape` is the output's."""

    arguments: tuple[Any, ...]  # of torch.convolution behind the filters; none for a linear map
    lengths: Launch
    count: int  # of the lengths
    boxes: tuple[Box, ...]  # launches of norms, one after the other
    final: Launch
    shape: torch.Size
    rows: int
    carry: bool
    pooled: bool


def prepare(
    filters: Tensor, magnitude: Value, angular: Value, factor: Tensor | None, stretch: Tensor | None,
    shift: Tensor | None, longest: Tensor, dtype: torch.dtype,
) -> Prepared:  # fmt: skip
    """The layer with these filters in this dtype, and with f + shift for its response f."""
    device, channels = filters.device, filters.shape[0]
    held = torch.empty(filters.shape, dtype=dtype, device=device, memory_format=memory_format(filters)).copy_(filters)
    code, slots = described(magnitude, angular, None, filters)
    p = torch.ones(6, channels, device=device)
    for row, slot in zip(p, slots[:5], strict=False):
        if slot is not None:
            row.copy_(slot)
    p[5] = 1.0 / p[2]
    slopes, turns = slots[7], slots[8]
    wide = [None if t is None else t.to(device, torch.float32).contiguous() for t in (factor, stretch, shift)]
    constants = constants_of(code, slots, slopes, turns, wide, dtype, device)
    scalars = torch.ones(2, device=device)
    given = (wide[0], wide[1], scalars, slopes, turns, wide[2])
    pointers = (p, *[p if t is None else t for t in given])
    return Prepared(held, longest.to(device), pointers, constants)


def constants_of(
    code: Code, slots: list[Any], slopes: Tensor | None, turns: Tensor | None, wide: list[Tensor | None],
    dtype: torch.dtype, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The kernel's constants that belong to the operator; a parameter that is a tensor is None among them."""
    names = ("alpha", "beta", "rho", "shape", "bend")
    numbers = {
        name.upper(): None if slot is not None else (1.0 if getattr(code, name) is None else getattr(code, name))
        for name, slot in zip(names, slots[:5], strict=True)
    }
    return {
        **numbers, "ROW": code.radial, "ANG": code.angular, "PIECES": 1 if slopes is None else slopes.shape[0],
        "TURNS": 1 if turns is None else turns.shape[0], "ROOT_EPS": code.eps**0.5, "EPS": code.angular_eps,
        "FACTOR": wide[0] is not None, "STRETCH": wide[1] is not None, "SHIFT": wide[2] is not None,
        "LIFT": dtype == torch.float16, "FAST": device.type == "cuda" and dtype != torch.float32,
    }  # fmt: skip


def planned(held: Prepared, shape: torch.Size, window: Window, given: tuple[Any, ...]) -> Plan:
    """The launches for inputs of a shape, [batch, channels, *spatial] or [rows, features]; `given` is an `After`."""
    after = After(*given)
    after = after._replace(carry=carries(after, window.groups, held.filters.shape[0]))
    settings = ([*window.stride], [before for before, _ in window.padding], [*window.dilation])
    groups, device = window.groups, held.filters.device
    g = launch.geometry(shape, held.filters.shape[2:], *map(tuple, settings), groups)
    outputs = held.filters.shape[0]
    values = {**held.constants, "GROUPS": groups, "C": outputs // groups}
    rows, point = len(shape) == 2, is_point(window)
    small = len(shape) == 4 and not is_wide(window) and values["C"] >= LEAST_CHANNELS
    small = small and max(g.positions, g.rows) * groups < MOST_ROWS
    box = not point and (not small or held.lifts or after.pool is not None)
    if after.pool is None:
        final, spatial = epilogue_launch(values, g, box or point, after, device), g.out[5 - len(shape) :]
    else:
        final, spatial = pooled_launch(values, g, after, device)
    boxes = box_launches(held, shape, settings, groups, is_wide(window)) if box else ()
    lengths = lengths_launch(g.rows, groups, shape[1] // groups, device)
    made = torch.Size((shape[0], outputs, *(() if rows else spatial)))
    arguments = () if rows else (*settings, False, (0,) * window.dims, groups)
    return Plan(
        arguments, lengths, g.rows * groups, boxes, final, made, made.numel() // outputs, after.carry,
        after.pool is not None,
    )  # fmt: skip


def carries(after: After, groups: int, channels: int) -> bool:
    """Whether lengths leave beside the activation: of one group and, behind a pooling, of channels in one part."""
    return after.carry and groups == 1 and (after.pool is None or channels <= launch.width_for(channels))


def lengths_launch(rows: int, groups: int, channels: int, device: torch.device) -> Launch:
    """The launch of the lengths of the rows of an input."""
    if channels > NARROW:
        return launch.lengths_launch(rows, groups, channels, device)
    grid = (-(-rows // NARROW_BLOCK), groups)
    return Launch(frozen.narrow_lengths_kernel, grid, (rows, groups, channels, NARROW_BLOCK), 4, device)


def box_launches(held: Prepared, shape: torch.Size, settings: Any, groups: int, wide: bool) -> tuple[Box, ...]:
    """The launches of the norms of patches from lengths; a wide window goes along rows first, then along columns."""
    taps = tuple(held.filters.shape[2:])
    if len(taps) != 2 or not wide:
        return (box_launch(held, shape, taps, settings, groups),)
    along = [(fill, each[1]) for fill, each in zip((1, 0, 1), settings, strict=True)]
    down = [(each[0], fill) for fill, each in zip((1, 0, 1), settings, strict=True)]
    first = box_launch(held, shape, (1, taps[1]), along, groups)
    between = torch.Size((*shape[:3], first.width))
    return first, box_launch(held, between, (taps[0], 1), down, groups)


def box_launch(held: Prepared, shape: torch.Size, taps: tuple[int, ...], settings: Any, groups: int) -> Box:
    g = launch.geometry(shape, taps, *map(tuple, settings), groups)
    made, programs = launch.box_launch(g, 0.0, False, held.lifts, held.filters.device)
    return Box(made, g.positions * groups, 2 * max(1, programs), g.out[2])


def is_point(window: Window) -> bool:
    """Whether the norms are the lengths of the input's rows as they are."""
    return not window.kernel or window.is_point


def is_wide(window: Window) -> bool:
    taps = 1
    for size in window.kernel:
        taps *= size
    return taps > MOST_TAPS


def epilogue_launch(values: dict[str, Any], g: Any, given: bool, after: After, device: torch.device) -> Launch:
    """The pass over a convolution's output; `given` says that norms come as such, whatever the window."""
    t = tiles(TUNING["frozen"], g.positions, values["C"])
    window = (1,) * 8 if given else flat(g.window)
    sizes = (16,) * 4 if given else (*g.size[1:], *g.out[1:])
    rest = {
        **values, **dict(zip(("KH", "KW", "SH", "SW", "PH", "PW", "EH", "EW"), window, strict=True)),
        **dict(zip(("H", "W", "OH", "OW"), sizes, strict=True)), **t.constants(), "rows": g.positions,
        "BOX": not given, "ACT": after.activation, "LEAK": after.leak, "RESIDUAL": after.residual,
        "LENGTHS": after.carry,
    }  # fmt: skip
    kernel = frozen.frozen_kernel
    return Launch(kernel, (t.programs, values["GROUPS"]), ordered(kernel, 13, rest), t.warps, device)


def flat(window: tuple[int, ...]) -> tuple[int, ...]:
    """Of taps, steps, padding and gaps in three dimensions, those of the last two."""
    return tuple(window[3 * kind + axis] for kind in range(4) for axis in (1, 2))


def pooled_launch(values: dict[str, Any], g: Any, after: After, device: torch.device) -> tuple[Launch, tuple[int, int]]:
    """The pass that pools too, and the size of its output."""
    pool = Pool(*(after.pool or ()))
    _, H, W = g.out
    taps = zip((H, W), pool.kernel, pool.stride, pool.padding, strict=True)
    QH, QW = (launch.output_size(size, kernel, stride, pad, 1) for size, kernel, stride, pad in taps)
    t = tiles(TUNING["pooled"], QW, values["C"])
    strips = -(-QH // STEPS)
    rest = {
        **values, **t.constants(), "EVEN": t.parts * t.BC == values["C"], "across": t.programs, "strips": strips,
        "H": H, "W": W, "QH": QH, "QW": QW,
        "KH": pool.kernel[0], "KW": pool.kernel[1], "SH": pool.stride[0], "SW": pool.stride[1],
        "PH": pool.padding[0], "PW": pool.padding[1], "SHARED": int(pool.kernel[0] == pool.stride[0] + 1),
        "STEPS": STEPS, "ACT": after.activation, "LEAK": after.leak, "LENGTHS": after.carry,
    }  # fmt: skip
    kernel = frozen.pooled_kernel
    grid = (g.images * strips * t.programs, values["GROUPS"])
    return Launch(kernel, grid, ordered(kernel, 12, rest), t.warps, device), (QH, QW)


def tiles(tuning: tuple[int, int], rows: int, channels: int) -> launch.Tiles:
    elements, warps = tuning
    width = launch.width_for(channels)
    parts, height = -(-channels // width), max(1, elements // width)
    even = rows % height == 0 and parts * width == channels
    return launch.Tiles(height, width, parts, 1, max(1, -(-rows // height)), warps, even)


@on_its_device
def run(
    x: Tensor, held: Prepared, plan: Plan, lengths: Tensor | None, leak: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The activation and, where the plan carries them, its rows' lengths; `lengths` are those of x's rows, if known."""
    x, filters, pointers = dense(x), held.filters, held.pointers
    if lengths is None:
        lengths = launch.floats(x.device, plan.count)
        plan.lengths(x, lengths)
    n, peaks = lengths, None
    for box in plan.boxes:
        before, n, peaks = n, launch.floats(x.device, box.norms), launch.floats(x.device, box.peaks)
        box.launch(before, n, peaks)
    if held.lifts:
        filters, pointers = lifted(held, by_rows(n) if peaks is None else peaks)
    y = dense(torch.convolution(x, filters, None, *plan.arguments) if plan.arguments else linear(x, filters))
    p = pointers[0]
    r = torch.empty(plan.rows if plan.carry else 1, device=x.device)
    leak = p if leak is None else leak
    if plan.pooled:
        out = torch.empty(plan.shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
        plan.final(y, n, *pointers, leak, out, r)
    else:
        out = y  # in place
        plan.final(y, n, *pointers, leak, p if residual is None else dense(residual), y, r)
    return out, r if plan.carry else None


def by_rows(lengths: Tensor) -> Tensor:
    """Two blocks, of which the second holds the largest length: what `lifted` reads behind the sums."""
    return lengths.amax().expand(2).contiguous()


def lifted(held: Prepared, peaks: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Filters over a power of two that keeps float16 from overflowing, and pointers with that power of two."""
    filters, scalars = torch.empty_like(held.filters), torch.empty(2, device=peaks.device)
    size = filters.numel()
    rest = (peaks.shape[0] // 2, size, LIFT_BLOCK)
    _lift(rest, -(-size // LIFT_BLOCK), peaks.device)(held.filters, held.longest, peaks, filters, scalars)
    return filters, (*held.pointers[:3], scalars, *held.pointers[4:])


@launch.kept
def _lift(rest: tuple[int, ...], programs: int, device: torch.device) -> Launch:
    return Launch(frozen.lift_kernel, (programs,), rest, 4, device)
