"""The backward of a projection onto a box in Triton: one launch for x and, where asked for, for both bounds.

Every element is a row of `row_access`, so that x and its gradient may have any strides and bounds may be broadcast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hyperball.kernels.triton.pooling.launch import Rows, described, on_device, put_back
from hyperball.kernels.triton.row_access import ROW_LEVELS, row_offset

Bound = float | Tensor
BLOCK, WARPS = 1024, 4


@triton.jit
def bound_at(
    pointer: tl.tensor, number: tl.tensor, at: tl.tensor, sizes: tl.tensor, strides: tl.tensor, live: tl.tensor,
    GIVEN: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A bound at elements `at`: of a tensor, or one number."""
    if GIVEN:
        bound = tl.load(pointer + row_offset(at, sizes, strides), mask=live, other=0.0).to(tl.float32)
    else:
        bound = tl.zeros([BN], tl.float32) + number
    return bound


@triton.jit
def backward_kernel(
    v_pointer: tl.tensor, x_pointer: tl.tensor, low_pointer: tl.tensor, high_pointer: tl.tensor, dx_pointer: tl.tensor,
    dlow_pointer: tl.tensor, dhigh_pointer: tl.tensor, low_number: tl.tensor, high_number: tl.tensor,
    count: tl.tensor, r1: tl.tensor, r2: tl.tensor, r3: tl.tensor, x0: tl.tensor, x1: tl.tensor, x2: tl.tensor,
    x3: tl.tensor, v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor, d0: tl.tensor, d1: tl.tensor,
    d2: tl.tensor, d3: tl.tensor, l0: tl.tensor, l1: tl.tensor, l2: tl.tensor, l3: tl.tensor, h0: tl.tensor,
    h1: tl.tensor, h2: tl.tensor, h3: tl.tensor, LOW: tl.constexpr, HIGH: tl.constexpr, DLOW: tl.constexpr,
    DHIGH: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """v goes to x where low <= x <= high, on a bound too, else to the bound that y is; a NaN is no bound's."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    at = first * BN + tl.arange(0, BN)
    live, sizes = at < count, (r1, r2, r3)
    v = tl.load(v_pointer + row_offset(at, sizes, (v0, v1, v2, v3)), mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_pointer + row_offset(at, sizes, (x0, x1, x2, x3)), mask=live, other=0.0).to(tl.float32)
    low = bound_at(low_pointer, low_number, at, sizes, (l0, l1, l2, l3), live, LOW, BN)
    high = bound_at(high_pointer, high_number, at, sizes, (h0, h1, h2, h3), live, HIGH, BN)
    below = (x < low) | (low != low)
    above = (tl.where(below, low, x) > high) | (high != high)
    where = row_offset(at, sizes, (d0, d1, d2, d3))
    tl.store(dx_pointer + where, tl.where(below | above, 0.0, v).to(dx_pointer.dtype.element_ty), mask=live)
    if DLOW:
        tl.store(dlow_pointer + at, tl.where(below & ~above, v, 0.0), mask=live)
    if DHIGH:
        tl.store(dhigh_pointer + at, tl.where(above, v, 0.0), mask=live)


def placed_bounds(rows: Rows, low: Bound, high: Bound, x: Tensor) -> tuple[list[Tensor], list[int], list[float]]:
    """(pointers, row strides, numbers) of the bounds, whose tensors come after x, v and dx among the views."""
    pointers: list[Tensor] = []
    strides: list[int] = []
    at = 3
    for held in (low, high):
        if isinstance(held, Tensor):
            pointers.append(rows.views[at])
            strides.extend(rows.layout.row_strides(at))
            at += 1
        else:
            pointers.append(rows.views[0])
            strides.extend((0,) * ROW_LEVELS)
    return pointers, strides, [rounded(held, x.dtype) for held in (low, high)]


def rounded(bound: Bound, dtype: torch.dtype) -> float:
    """A number as x's dtype holds it, which is what x is compared with."""
    if isinstance(bound, Tensor):
        return 0.0
    return float(bound) if dtype == torch.float32 else float(torch.tensor(bound, dtype=dtype))


def pull(
    v: Tensor, x: Tensor, low: Bound, high: Bound, of_low: bool, of_high: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, in its layout, and of the bounds in float32 and x's shape, None where not asked for."""
    dx = torch.empty_like(x)
    bounds = [held.expand(x.shape) for held in (low, high) if isinstance(held, Tensor)]
    rows = described([x, v, dx, *bounds], [], 0)
    where, (x_view, v_view, dx_view) = rows.layout, rows.views[:3]
    dlow, dhigh = (
        torch.empty(rows.shape, dtype=torch.float32, device=x.device) if wanted else None
        for wanted in (of_low, of_high)
    )
    pointers, strides, numbers = placed_bounds(rows, low, high, x)
    with on_device(x):
        backward_kernel[-(-x.numel() // BLOCK),](
            v_view, x_view, *pointers, dx_view, dx_view if dlow is None else dlow, dx_view if dhigh is None else dhigh,
            *numbers, x.numel(), *where.row_sizes(), *where.row_strides(0), *where.row_strides(1),
            *where.row_strides(2), *strides, LOW=isinstance(low, Tensor), HIGH=isinstance(high, Tensor),
            DLOW=of_low, DHIGH=of_high, WIDE=where.is_wide(len(rows.views)), BN=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    if dx_view.data_ptr() != dx.data_ptr():  # too many strides: the kernel wrote a copy
        dx.copy_(put_back(dx_view, rows.order))
    dlow, dhigh = (None if held is None else put_back(held, rows.order) for held in (dlow, dhigh))
    return dx, dlow, dhigh
