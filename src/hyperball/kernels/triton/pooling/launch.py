"""Launches of the robust pooling kernels on views [*rows, *taps] of any strides, and on ragged segments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.triton.pooling import backward as pooling_backward
from hyperball.kernels.triton.pooling import kernels as pooling
from hyperball.kernels.triton.row_access import (
    ROW_LEVELS,
    TAP_LEVELS,
    Layout,
    Level,
    Tile,
    collapse,
    layout,
    padded,
    tile_for,
)

Parameter = float | Tensor


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Launches inside go to x's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def in_memory_order(view: Tensor, split: int) -> list[int]:
    """The row dimensions from the widest stride to the narrowest: neighboring rows are neighbors in memory."""
    strides = view.stride()
    return sorted(range(split), key=lambda d: -strides[d])


def placed(tensor: Tensor, order: list[int]) -> Tensor:
    """The row dimensions in this order; taps stay behind them."""
    return tensor.permute([*order, *range(len(order), tensor.dim())])


def put_back(tensor: Tensor, order: list[int]) -> Tensor:
    """The inverse of `placed`."""
    inverse = [order.index(d) for d in range(len(order))]
    return tensor.permute([*inverse, *range(len(order), tensor.dim())])


class Rows(NamedTuple):
    """Views and per-row tensors in one order of the rows, and their layout."""

    views: list[Tensor]
    per_row: list[Tensor]
    layout: Layout
    order: list[int]
    n: int

    @property
    def shape(self) -> torch.Size:
        return self.views[0].shape[: len(self.order)]


def described(views: list[Tensor], per_row: list[Tensor], tap_dims: int) -> Rows:
    """Rows as the kernels find them; what has too many strides is copied."""
    split = views[0].dim() - tap_dims
    order = in_memory_order(views[0], split)
    views, per_row = [placed(view, order) for view in views], [placed(held, order) for held in per_row]
    found = layout(views, per_row, split)
    if found is None:
        views, per_row = [view.contiguous() for view in views], [held.contiguous() for held in per_row]
        found = layout(views, per_row, split)
        assert found is not None
    return Rows(views, per_row, found, order, views[0].shape[split:].numel())


def tensors_of(c: Parameter, shape: Parameter) -> list[Tensor]:
    return [held for held in (c, shape) if isinstance(held, Tensor)]


def numbers_of(c: Parameter, shape: Parameter) -> tuple[float, float]:
    """The numbers, 1 in the place of a tensor."""
    first, second = (1.0 if isinstance(held, Tensor) else float(held) for held in (c, shape))
    return first, second


def parameters(rows: Rows, c: Parameter, shape: Parameter, fill: Tensor) -> tuple[list[Tensor], list[int]]:
    """(pointers, row strides) of c and shape, whose tensors come first among the per-row ones."""
    held, at, views = iter(rows.per_row), len(rows.views), len(rows.views)
    pointers: list[Tensor] = []
    strides: list[int] = []
    for given in (c, shape):
        if isinstance(given, Tensor):
            pointers.append(next(held))
            strides.extend(rows.layout.row_strides(at))
            at += 1
        else:
            pointers.append(fill)
            strides.extend((0,) * ROW_LEVELS)
    assert at <= views + 2
    return pointers, strides


def settings(
    penalty: str, weighted: bool, c: Parameter, shape: Parameter, n: int | None, flat: bool, wide: bool, tile: Tile
) -> dict[str, Any]:
    """The constants of a launch; n is None where rows are ragged.

    No product is fused into a sum: where a lane holds one sample, the two lanes that add their products would round
    differently, decide differently whether a row is solved, and leave each other in the loop.
    """
    return {
        "P": penalty,
        "WEIGHTED": weighted,
        "C_TENSOR": isinstance(c, Tensor),
        "SHAPE_TENSOR": isinstance(shape, Tensor),
        "RAGGED": n is None,
        "EVEN": n == tile.BN,
        "FLAT": flat,
        "WIDE": wide,
        "LOOP": tile.loop,
        "BR": tile.BR,
        "BN": tile.BN,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


def pool(
    view: Tensor, weights: Tensor | None, penalty: str, c: Parameter, shape: Parameter, tap_dims: int
) -> tuple[Tensor, Tensor]:
    """(y, steps) of the rows of a view in float32 or less; c and shape are numbers or [*rows]."""
    given = [view] if weights is None else [view, weights.expand_as(view)]
    rows = described(given, tensors_of(c, shape), tap_dims)
    y = torch.empty(rows.shape, dtype=torch.float32, device=view.device)
    steps = torch.empty(rows.shape, dtype=torch.int32, device=view.device)
    if y.numel():
        where, x, w = rows.layout, rows.views[0], rows.views[-1]
        pointers, strides = parameters(rows, c, shape, x)
        tile = tile_for(rows.n, where.row_contiguous(), weights is not None or penalty == "barron")
        last = len(rows.views) - 1
        with on_device(view):
            pooling.forward_kernel[-(-y.numel() // tile.BR),](
                x, w, *pointers, x, y, steps, *numbers_of(c, shape), y.numel(), rows.n, where.inner,
                *where.row_sizes(), *where.row_strides(0), *where.tap_strides(0), *where.row_strides(last),
                *where.tap_strides(last), *strides, 1,
                **settings(
                    penalty, weights is not None, c, shape, rows.n, where.flat,
                    where.is_wide(len(rows.views)), tile,
                ),
            )  # fmt: skip
    return put_back(y, rows.order), put_back(steps, rows.order)


class Pulled(NamedTuple):
    """The gradients of every tap, of its weight, and of each row's c and shape; None where not asked for."""

    taps: Tensor
    weights: Tensor | None
    c: Tensor | None
    shape: Tensor | None


def pull(
    grad: Tensor, y: Tensor, view: Tensor, weights: Tensor | None, penalty: str, c: Parameter, shape: Parameter,
    tap_dims: int, of_weights: bool,
) -> Pulled:  # fmt: skip
    """From the gradient of y, those of a view's taps [*rows, *taps] and of its rows' parameters."""
    out = torch.empty_like(view)
    given = [view, *([] if weights is None else [weights.expand_as(view)]), out]
    per_row = [*tensors_of(c, shape), grad.expand(y.shape)]
    rows = described(given, per_row, tap_dims)
    fresh = rows.views[-1]  # a copy where `described` had to make one; then it is what the kernel fills
    dw = (
        torch.empty_strided(fresh.shape, fresh.stride(), dtype=torch.float32, device=view.device)
        if of_weights
        else None
    )
    dc, dshape = (
        torch.empty(rows.shape, dtype=torch.float32, device=view.device) if isinstance(held, Tensor) else None
        for held in (c, shape)
    )
    seen = placed(y, rows.order).contiguous()
    if y.numel():
        where, x, w = rows.layout, rows.views[0], rows.views[len(rows.views) - 2]
        pointers, strides = parameters(rows, c, shape, x)
        tile = tile_for(rows.n, where.row_contiguous(), weights is not None or penalty == "barron")
        held, last = len(rows.views) - 2, len(rows.views) - 1
        total = len(rows.views) + len(per_row) - 1
        with on_device(view):
            pooling_backward.backward_kernel[-(-y.numel() // tile.BR),](
                rows.per_row[-1], seen, x, w, *pointers, x, fresh, seen if dw is None else dw,
                seen if dc is None else dc, seen if dshape is None else dshape, *numbers_of(c, shape), y.numel(),
                rows.n,
                where.inner, *where.row_sizes(), *where.row_strides(0), *where.tap_strides(0), *where.row_strides(held),
                *where.tap_strides(held), *strides, *where.row_strides(last), *where.tap_strides(last),
                *where.row_strides(total), 1, DW=of_weights,
                **settings(
                    penalty, weights is not None, c, shape, rows.n, where.flat,
                    where.is_wide(len(rows.views)), tile,
                ),
            )  # fmt: skip
    if fresh.data_ptr() != out.data_ptr():
        out.copy_(put_back(fresh, rows.order))
    back = [None if held is None else put_back(held, rows.order) for held in (dw, dc, dshape)]
    return Pulled(out, *back)


SEGMENT_TILE = {True: Tile(16, 64, 4, True), False: Tile(4, 256, 4, True)}  # by whether there are columns to read


def segment_levels(size: tuple[int, int], per_row: list[Tensor]) -> list[Level]:
    levels = padded(collapse(size, [held.stride() for held in per_row]), ROW_LEVELS, len(per_row))
    assert levels is not None
    return levels


def segment_rows(x: Tensor, offsets: Tensor, c: Parameter, shape: Parameter, *more: Tensor) -> Rows:
    """Rows segment·columns + column; their beginnings are read from the offsets."""
    per_row = [*tensors_of(c, shape), *more]
    levels = segment_levels((offsets.numel() - 1, x.shape[1]), per_row)
    none = [Level(1, (0,))] * TAP_LEVELS
    return Rows([], per_row, Layout(levels, none), [], 0)


def pool_segments(
    x: Tensor, weights: Tensor | None, offsets: Tensor, penalty: str, c: Parameter, shape: Parameter
) -> tuple[Tensor, Tensor]:
    """(y, steps), [S, D], of the segments of x, [N, D]; c and shape are numbers or [S, D]."""
    x, offsets = x.contiguous(), offsets.contiguous()
    rows = segment_rows(x, offsets, c, shape)
    size = (offsets.numel() - 1, x.shape[1])
    y = torch.empty(size, dtype=torch.float32, device=x.device)
    steps = torch.empty(size, dtype=torch.int32, device=x.device)
    if y.numel():
        tile = SEGMENT_TILE[x.shape[1] >= 8]
        pointers, strides = parameters(rows, c, shape, y)
        held = x if weights is None else weights.contiguous()
        step = (0, x.shape[1])
        with on_device(x):
            pooling.forward_kernel[-(-y.numel() // tile.BR),](
                x, held, *pointers, offsets, y, steps, *numbers_of(c, shape), y.numel(), 0, 1,
                *rows.layout.row_sizes(), 0, 0, 0, 0, *step, 0, 0, 0, 0, *step, *strides, x.shape[1],
                **settings(penalty, weights is not None, c, shape, None, True, x.numel() >= 2**31, tile),
            )  # fmt: skip
    return y, steps


def pull_segments(
    grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, offsets: Tensor, penalty: str, c: Parameter,
    shape: Parameter, of_weights: bool,
) -> Pulled:  # fmt: skip
    """From the gradient of y, [S, D], those of x and of the weights, [N, D], and of the segments' parameters."""
    x, offsets, seen = x.contiguous(), offsets.contiguous(), y.contiguous()
    rows = segment_rows(x, offsets, c, shape, grad.expand(y.shape))
    out = torch.zeros_like(x)  # a sample outside every segment has no gradient
    dw = torch.zeros_like(x, dtype=torch.float32) if of_weights else None
    dc, dshape = (torch.empty_like(seen) if isinstance(held, Tensor) else None for held in (c, shape))
    if y.numel() and x.numel():
        tile = SEGMENT_TILE[x.shape[1] >= 8]
        pointers, strides = parameters(rows, c, shape, seen)
        held = x if weights is None else weights.contiguous()
        step, none = (0, x.shape[1]), (0, 0, 0, 0)
        with on_device(x):
            pooling_backward.backward_kernel[-(-y.numel() // tile.BR),](
                rows.per_row[-1], seen, x, held, *pointers, offsets, out, seen if dw is None else dw,
                seen if dc is None else dc, seen if dshape is None else dshape, *numbers_of(c, shape), y.numel(), 0, 1,
                *rows.layout.row_sizes(), *none, *step, *none, *step, *strides, *none, *step,
                *rows.layout.row_strides(len(rows.per_row) - 1), x.shape[1], DW=of_weights,
                **settings(penalty, weights is not None, c, shape, None, True, x.numel() >= 2**31, tile),
            )  # fmt: skip
    return Pulled(out, dw, dc, dshape)
