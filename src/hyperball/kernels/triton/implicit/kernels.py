"""Convolutions of stride 1 as implicit GEMMs, whose epilogue is the decoupled one: f, or dx = dgrad(dy) + x·T.

A program computes BB images by BH rows by BW columns of its output, and NB blocks of BO channels of these. Tiles are
fetched by tensor descriptors, which give zeros outside of the map; channels are the rows of the products, [BO, BM].
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CellType, FunctionType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hyperball.kernels.triton.call import Direct, Launch, handles, ordered
from hyperball.kernels.triton.decoupled.epilogue import lift_of, operator_tiles, raised, response
from hyperball.kernels.triton.decoupled.launch import power
from hyperball.kernels.triton.implicit.choice import Box, Tile, box
from hyperball.kernels.triton.maps import bounded

View = tuple[list[int], list[int], list[int]]  # shape, strides and block of a descriptor
KEPT = 256  # pairs of addresses whose descriptions are kept


@triton.jit
def corner(
    H: tl.tensor, W: tl.tensor, C: tl.constexpr, WIDTH: tl.constexpr, BB: tl.constexpr, BH: tl.constexpr,
    BW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first channel, image, row and column of this program, of whose C channels it computes WIDTH.

    Programs are counted in one dimension, the channels first: of the others a grid has at most 65,535.
    """
    PARTS: tl.constexpr = (C + WIDTH - 1) // WIDTH
    place = tl.program_id(0)
    first, place = place % PARTS * WIDTH, place // PARTS
    across, down = tl.cdiv(W, BW), tl.cdiv(H, BH)
    w, place = place % across * BW, place // across
    return first, place // down * BB, place % down * BH, w


@triton.jit
def products(
    inputs: tl.tensor, filters: tl.tensor, first: tl.tensor, b: tl.tensor, h: tl.tensor, w: tl.tensor,
    IN: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STEP_H: tl.constexpr,
    STEP_W: tl.constexpr, BACKWARD: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr, NB: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BO, BM] by block: Σ filters[tap]·inputs[b, h + STEP_H·tap_h, w + STEP_W·tap_w], over taps and IN channels.

    Filters are [O, taps·C], contracted over C forward and over O backward.
    """
    PARTS: tl.constexpr = (IN + BK - 1) // BK
    accs = ()
    for _ in tl.static_range(NB):
        accs = accs + (tl.zeros([BO, BM], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for step in range(KH * KW * PARTS):
        tap, k = step // PARTS, step % PARTS * BK
        tile = inputs.load([b, h + tap // KW * STEP_H, w + tap % KW * STEP_W, k]).reshape(BM, BK).T
        made = ()
        for block in tl.static_range(NB):
            if BACKWARD:
                rows = filters.load([k, tap * C + first + block * BO]).T
            else:
                rows = filters.load([first + block * BO, tap * IN + k])
            made = made + (tl.dot(rows, tile, accs[block], input_precision="ieee"),)  # type: ignore[assignment]  # noqa: RUF005
        accs = made
    return accs


@triton.jit
def positions_of(
    b: tl.tensor, h: tl.tensor, w: tl.tensor, images: tl.tensor, H: tl.tensor, W: tl.tensor, BB: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The positions of a box, and which of them are on the map."""
    row = tl.arange(0, BB * BH * BW)
    image, down, across = b + row // (BH * BW), h + row // BW % BH, w + row % BW
    return (image.to(tl.int64) * H + down) * W + across, (image < images) & (down < H) & (across < W)


@triton.jit
def implicit_forward_kernel(
    inputs: tl.tensor, filters: tl.tensor, f: tl.tensor, y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor,
    stretch: tl.tensor, scalars: tl.tensor, slopes: tl.tensor, turns: tl.tensor, images: tl.tensor, H: tl.tensor,
    W: tl.tensor, IN: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STEP_H: tl.constexpr,
    STEP_W: tl.constexpr, FIRST_H: tl.constexpr, FIRST_W: tl.constexpr, ROW: tl.constexpr,
    ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr, BB: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BO: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """y = conv(inputs), and f = g(n, y) of y as it is stored."""
    first, b, h, w = corner(H, W, C, NB * BO, BB, BH, BW)
    accs = products(
        inputs, filters, first, b, h + FIRST_H, w + FIRST_W, IN, C, KH, KW, STEP_H, STEP_W, False, BB * BH * BW, BO,
        NB, BK,
    )  # fmt: skip
    position, inside = positions_of(b, h, w, images, H, W, BB, BH, BW)
    length = tl.load(n + position, mask=inside, other=0.0)[:, None]
    lift = lift_of(scalars, LIFT)
    for block in tl.static_range(NB):
        at = first + block * BO + tl.arange(0, BO)
        real = at < C
        mask = inside[:, None] & real[None, :]
        where = position[:, None] * C + at[None, :]
        held = accs[block].T.to(f.dtype.element_ty)
        tl.store(y + where, held, mask=mask)
        q = operator_tiles(p, factor, stretch, at, real, C, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
        out, _s, _h1, _c, _g, _g1 = response(
            raised(held.to(tl.float32), lift, LIFT), length, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS,
            FACTOR, STRETCH, FAST,
        )  # fmt: skip
        tl.store(f + where, out.to(f.dtype.element_ty), mask=mask)


@triton.jit
def implicit_backward_kernel(
    inputs: tl.tensor, filters: tl.tensor, dx: tl.tensor, x: tl.tensor, along: tl.tensor, level: tl.tensor,
    pulls: tl.tensor, images: tl.tensor, H: tl.tensor, W: tl.tensor, positions: tl.tensor, IN: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    FIRST_H: tl.constexpr, FIRST_W: tl.constexpr, PULLS: tl.constexpr, BP: tl.constexpr, BB: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, BO: tl.constexpr, NB: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dgrad(inputs) + x·T, T = along + K·level; C are the channels of x, IN those of dy.

    K, the mean of the IN pulls over so many positions, is asked for before the products and summed after them.
    """
    pull = tl.zeros([BP], tl.float32)
    if PULLS:
        pull = tl.load(pulls + tl.arange(0, BP), mask=tl.arange(0, BP) < IN, other=0.0)
    first, b, h, w = corner(H, W, C, NB * BO, BB, BH, BW)
    accs = products(
        inputs, filters, first, b, h + FIRST_H, w + FIRST_W, IN, C, KH, KW, STEP_H, STEP_W, True, BB * BH * BW, BO,
        NB, BK,
    )  # fmt: skip
    position, inside = positions_of(b, h, w, images, H, W, BB, BH, BW)
    factor = tl.load(along + position, mask=inside, other=0.0)
    if PULLS:
        even = tl.load(level + position, mask=inside, other=0.0)
        factor = bounded(factor + tl.sum(pull, axis=0) / positions * even)
    for block in tl.static_range(NB):
        at = first + block * BO + tl.arange(0, BO)
        mask = inside[:, None] & (at < C)[None, :]
        where = position[:, None] * C + at[None, :]
        value = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
        # Rounded first, as two passes would: that halves what changes its layout.
        held = accs[block].T.to(dx.dtype.element_ty).to(tl.float32)
        tl.store(dx + where, (held + value * factor[:, None]).to(dx.dtype.element_ty), mask=mask)


class Described(Launch):
    """A launch whose first two tensors are read by descriptors of these views."""

    __slots__ = ("ready", "stages", "views")

    def __init__(
        self, kernel: Any, grid: Sequence[int], rest: tuple[Any, ...], tile: Tile, views: tuple[View, View],
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(kernel, grid, rest, tile.warps, device)
        self.stages, self.views = tile.stages, views
        self.ready: dict[tuple[Any, ...], DirectDescribed] = {}

    def __call__(self, *tensors: Tensor) -> None:
        tensors = (*[aligned(t) for t in tensors[:2]], *tensors[2:])
        kinds: tuple[Any, ...] = tuple([tensor.dtype for tensor in tensors])
        if any([tensor.data_ptr() & 15 for tensor in tensors]):
            kinds += tuple([tensor.data_ptr() & 15 == 0 for tensor in tensors])
        made = self.compiled.get(kinds)
        if made is None:
            self.first(kinds, tensors)
            return
        ready = self.ready.get(kinds)
        if ready is None:
            ready = self.ready[kinds] = DirectDescribed(self, made)
        try:
            ready(made[3](self.index), *[tensor.data_ptr() for tensor in tensors])
        except (AttributeError, TypeError):  # a Triton whose launchers take other arguments: nothing was launched
            self.compiled[kinds] = None
            self.first(kinds, tensors)

    def first(self, kinds: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        """Launch as Triton does, and keep what the next launch of such tensors needs."""
        read = [TensorDescriptor(t, *view) for t, view in zip(tensors[:2], self.views, strict=True)]
        arguments = (*read, *tensors[2:])
        made = self.kernel[self.grid](*arguments, *self.rest, num_warps=self.warps, num_stages=self.stages)
        if kinds not in self.compiled:
            self.compiled[kinds] = handles(made, arguments, self.rest)

    def direct(self, kinds: tuple[torch.dtype, ...]) -> DirectDescribed | None:
        """The launch for addresses of such dtypes, all multiples of 16; None where it is not compiled."""
        made = self.compiled.get(kinds)
        return None if made is None else DirectDescribed(self, made)


class DirectDescribed(Direct):
    """A compiled launch, called with the stream and one address a tensor, the first two of which are described.

    Descriptions depend on addresses alone, and memory that is used over again has few: what Triton makes of them is
    kept, and given to the function that Triton gives it to.
    """

    __slots__ = ("above", "known", "views")

    def __init__(self, launch: Described, made: tuple[Any, ...]) -> None:
        super().__init__(launch, made)
        self.views = launch.views
        self.known: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.above, self.run = self.run, beneath(self.run)

    def __call__(self, stream: int, *addresses: int) -> None:
        described = addresses[:2]
        read = self.known.get(described) or self.described(described)
        self.run(*self.grid, stream, *self.middle, *read, *addresses[2:], *self.rest)

    def described(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """What stands for the descriptors of two addresses among the arguments."""
        read = tuple([Description(at, *view) for at, view in zip(addresses, self.views, strict=True)])
        if self.run is not self.above:
            expanded = passed_on(self.above, (*self.grid, 0, *self.middle), read)
            if expanded is None:
                self.run = self.above
            read = expanded or read
        if len(self.known) >= KEPT:
            self.known.clear()
        self.known[addresses] = read
        return read


def beneath(run: Any) -> Any:
    """What a launcher of Triton's gives its arguments to once it has described tensors, or the launcher itself."""
    try:
        return dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))["launcher"].cell_contents
    except (AttributeError, KeyError, TypeError, ValueError):  # a launcher of another kind
        return run


def passed_on(run: Any, before: tuple[Any, ...], read: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a launcher passes on in place of descriptions, asked by a function beneath it that keeps its arguments.

    None where what is before and behind them does not come through as it was given.
    """
    seen: list[tuple[Any, ...]] = []
    mark, keep = object(), CellType(lambda *given: seen.append(given))
    names = run.__code__.co_freevars
    cells = tuple([keep if name == "launcher" else cell for name, cell in zip(names, run.__closure__, strict=True)])
    try:
        FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, cells)(*before, *read, mark)
    except Exception:  # whatever another Triton's launcher does with a mark
        return None
    given = seen[0] if len(seen) == 1 else ()
    through = given[: len(before)] == before and len(given) > len(before) + 1 and given[-1] is mark
    return given[len(before) : -1] if through else None


class Description:
    """What Triton's launchers read of a descriptor, without a tensor."""

    __slots__ = ("address", "block_shape", "padding", "shape", "strides")

    def __init__(self, address: int, shape: list[int], strides: list[int], block: list[int]) -> None:
        self.address, self.shape, self.strides, self.block_shape = address, shape, strides, block
        self.padding = "zero"

    @property
    def base(self) -> Description:
        return self

    def data_ptr(self) -> int:
        return self.address


def aligned(t: Tensor) -> Tensor:
    """t, or a copy where it does not begin at a multiple of 16 bytes, as what is described must."""
    return t.clone() if t.data_ptr() & 15 else t


def map_sizes(shape: Sequence[int], flat: bool) -> tuple[int, int, int]:
    """Images, rows and columns; flat maps are one row."""
    images, h, w = shape[0], shape[2], shape[3]
    return (1, 1, images * h * w) if flat else (images, h, w)


def launch_of(
    kernel: Any, inputs: Sequence[int], output: Sequence[int], weight: Sequence[int], window: tuple[Any, ...],
    tile: Tile, device: torch.device, constants: dict[str, Any],
) -> Described:  # fmt: skip
    """The launch of a kernel from maps of shape `inputs` to maps of shape `output`."""
    backward = kernel is implicit_backward_kernel
    taps, padding, dilation = tuple(weight[2:]), window[1], window[2]
    sign = -1 if backward else 1
    flat = taps == (1, 1) and not any(padding)
    (n, h, w), sizes = map_sizes(inputs, flat), map_sizes(output, flat)
    at: Box = box(tile.BM, *sizes)
    c, channels, row = inputs[1], output[1], weight[1] * taps[0] * taps[1]
    views: tuple[View, View] = (
        ([n, h, w, c], [h * w * c, w * c, c, 1], [*at, tile.BK]),
        ([weight[0], row], [row, 1], [tile.BK, tile.BO] if backward else [tile.BO, tile.BK]),
    )
    values = {
        **constants, **at._asdict(), "images": sizes[0], "H": sizes[1], "W": sizes[2], "IN": c, "C": channels,
        "KH": taps[0], "KW": taps[1], "STEP_H": sign * dilation[0], "STEP_W": sign * dilation[1],
        "FIRST_H": -sign * padding[0], "FIRST_W": -sign * padding[1], "BO": tile.BO, "NB": tile.NB, "BK": tile.BK,
    }  # fmt: skip
    count = -(-channels // (tile.NB * tile.BO))
    for size, block in zip(sizes, at, strict=True):
        count *= -(-size // block)
    rest = ordered(kernel, 7 if backward else 11, values)
    return Described(kernel, (count,), rest, tile, views, device)


def forward_launch(
    shape: Sequence[int], output: Sequence[int], weight: Sequence[int], window: tuple[Any, ...], tile: Tile, rule: Any
) -> Described:
    """The launch of y and f: of (x, filters, f, y, n, p, factor, stretch, scalars, slopes, turns)."""
    return launch_of(implicit_forward_kernel, shape, output, weight, window, tile, rule.device, rule.constants)


def backward_launch(
    shape: Sequence[int], output: Sequence[int], weight: Sequence[int], window: tuple[Any, ...], tile: Tile,
    device: torch.device, pulls: bool,
) -> Described:  # fmt: skip
    """The launch of dx = dgrad(dy) + x·T, of (dy, filters, dx, x, along, level, pulls): x of `shape`, y of `output`.

    T is `along`, and with `pulls` their mean over positions times `level` more.
    """
    positions = output[0] * output[2] * output[3]
    constants = {"PULLS": pulls, "BP": power(output[1]) if pulls else 1, "positions": positions}
    return launch_of(implicit_backward_kernel, output, shape, weight, window, tile, device, constants)
