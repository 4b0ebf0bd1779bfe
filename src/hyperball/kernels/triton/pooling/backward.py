"""The Triton kernel of robust pooling's implicit gradient, by the formulas of `hyperball.kernels.pooling.gradient`."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.samples import (
    fetch_scaled,
    gap_around,
    law_of,
    parameter,
    place_rows,
    row_sum,
    start_of,
    weighted,
)
from hyperball.kernels.triton.pooling.terms import bounded, gain_slope, terms
from hyperball.kernels.triton.row_access import row_numbers, row_offset, somewhere, tap_offset

DAMPING = tl.constexpr(1e-3)


@triton.jit
def held_terms(P: tl.constexpr, z: tl.tensor, law: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """psi, psi' and s of residuals; barron's so that a row of them does not overflow."""
    c, over, far, shape = law
    psi, h, s = terms(P, z, c, over, far, shape)
    if P == "barron":
        h, s = tl.minimum(h, limit), tl.minimum(s, limit)
        psi = s * z
    return psi, h, s


@triton.jit
def moments(
    P: tl.constexpr, y: tl.tensor, tile: tl.tensor, law: tl.tensor, limit: tl.tensor, WEIGHTED: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ w·(psi', s, z·psi', z·ds/dshape) of one tile; where y is NaN, of z = 0."""
    x, w, inside = tile
    z = tl.where(inside & (y == y), y - x, 0.0)
    _, h, s = held_terms(P, z, law, limit)
    h, s = weighted(h, w, inside, WEIGHTED), weighted(s, w, inside, WEIGHTED)
    bend = tl.zeros_like(h)
    if SHAPE:
        bend = z * gain_slope(z, s, law[1], law[3])
    return row_sum(h), row_sum(s), row_sum(z * h), row_sum(bend)


@triton.jit
def all_moments(
    P: tl.constexpr, y: tl.tensor, tile: tl.tensor, law: tl.tensor, limit: tl.tensor, unit: tl.tensor,
    place: tl.tensor, SHAPE: tl.constexpr, WEIGHTED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`moments` of whole rows."""
    total, gains, moment, bend = moments(P, y, tile, law, limit, WEIGHTED, SHAPE)
    if LOOP:
        for at in range(BN, place[3], BN):
            part = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            total1, gains1, moment1, bend1 = moments(P, y, part, law, limit, WEIGHTED, SHAPE)
            total, gains, moment, bend = total + total1, gains + gains1, moment + moment1, bend + bend1
    return total, gains, moment, bend


@triton.jit
def equal_to(value: tl.tensor, tile: tl.tensor) -> tl.tensor:
    """How many samples of a tile have this value."""
    x, _w, inside = tile
    return row_sum(tl.where(inside & (x == value), 1.0, 0.0))


@triton.jit
def neighbors(
    y: tl.tensor, tile: tl.tensor, unit: tl.tensor, place: tl.tensor, WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
    FLAT: tl.constexpr, WIDE: tl.constexpr, LOOP: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The samples nearest to y on both sides, and how many have their values."""
    _, _, left, right = gap_around(y, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
    on_left, on_right = equal_to(left, tile), equal_to(right, tile)
    if LOOP:
        for at in range(BN, place[3], BN):
            part = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
            on_left += equal_to(left, part)
            on_right += equal_to(right, part)
    return left, right, on_left, on_right


@triton.jit
def backward_kernel(
    v_pointer: tl.tensor, y_pointer: tl.tensor, x_pointer: tl.tensor, w_pointer: tl.tensor, c_pointer: tl.tensor,
    shape_pointer: tl.tensor, offsets: tl.tensor, share_pointer: tl.tensor, dw_pointer: tl.tensor,
    dc_pointer: tl.tensor, dshape_pointer: tl.tensor, c_number: tl.tensor, shape_number: tl.tensor, rows: tl.tensor,
    taps: tl.tensor, inner: tl.tensor, r1: tl.tensor, r2: tl.tensor, r3: tl.tensor, x0: tl.tensor, x1: tl.tensor,
    x2: tl.tensor, x3: tl.tensor, xs0: tl.tensor, xs1: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor,
    w3: tl.tensor, ws0: tl.tensor, ws1: tl.tensor, c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor,
    a0: tl.tensor, a1: tl.tensor, a2: tl.tensor, a3: tl.tensor, o0: tl.tensor, o1: tl.tensor, o2: tl.tensor,
    o3: tl.tensor, os0: tl.tensor, os1: tl.tensor, v0: tl.tensor, v1: tl.tensor, v2: tl.tensor, v3: tl.tensor,
    columns: tl.tensor, P: tl.constexpr, WEIGHTED: tl.constexpr, C_TENSOR: tl.constexpr, SHAPE_TENSOR: tl.constexpr,
    DW: tl.constexpr, RAGGED: tl.constexpr, EVEN: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    LOOP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """v·w·psi'/D of every sample, D = max(Σ w·psi', 1e-3·Σ w·s); -v·psi/D of its weight; the row's c and shape.

    A row whose y is NaN gives NaN where it holds a sample and v is not 0, else 0.
    """
    number = row_numbers(WIDE, BR)
    live = number < rows
    row = tl.where(live, number, 0)
    sizes, x_taps, out_taps = (r1, r2, r3), (xs0, xs1), (os0, os1)
    place = place_rows(
        x_pointer, w_pointer, offsets, row, live, taps, inner, sizes, (x0, x1, x2, x3), (w0, w1, w2, w3), x_taps,
        (ws0, ws1), columns, RAGGED, BR,
    )  # fmt: skip
    n, longest = place[2], place[3]
    out = start_of(offsets, row, sizes, (o0, o1, o2, o3), columns, RAGGED)
    c = parameter(c_pointer, c_number, row, sizes, (c0, c1, c2, c3), C_TENSOR, BR)
    shape = parameter(shape_pointer, shape_number, row, sizes, (a0, a1, a2, a3), SHAPE_TENSOR, BR)
    law = law_of(P, c, tl.minimum(tl.maximum(shape, -1e15), 1e15), 1e37)
    v = tl.load(v_pointer + row_offset(row, sizes, (v0, v1, v2, v3))).to(tl.float32)
    given = tl.load(y_pointer + row)
    y, broken = bounded(given), given != given
    limit = 3.4028234663852886e38 / (8.0 * tl.maximum(n, 1).to(tl.float32))
    unit = tl.full([BR, 1], 1.0, tl.float32)

    tile = fetch_scaled(place, 0, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
    total, gains, moment, bend = all_moments(
        P, y, tile, law, limit, unit, place, SHAPE_TENSOR and P == "barron", WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN
    )
    divisor = tl.maximum(total, gains * DAMPING)
    positive = tl.where(divisor > 0, divisor, 1.0)
    scale = tl.where(divisor > 0, v / positive, 0.0)
    radius = scale * moment
    fate = tl.where((v != 0) & (gains != 0), float("nan"), 0.0)  # of a broken row: one without a sample has no gains
    by_middle = (total <= 0) & ((P == "huber") | (P == "absolute"))
    left, right = y, y
    on_left, on_right = tl.full([BR, 1], 1.0, tl.float32), tl.full([BR, 1], 1.0, tl.float32)
    if somewhere(by_middle & live):
        left, right, on_left, on_right = neighbors(y, tile, unit, place, WEIGHTED, EVEN, FLAT, WIDE, LOOP, BN)
        pull = 0.5 * v * (tl.where(on_left > 0, y - left, 0.0) + tl.where(on_right > 0, y - right, 0.0))
        radius = tl.where(by_middle, pull, radius)
    if C_TENSOR:
        tl.store(dc_pointer + number, tl.where(broken, fate, radius / c), mask=live)
    if SHAPE_TENSOR:
        tl.store(dshape_pointer + number, tl.where(broken, fate, -v * bend / positive), mask=live)
    on_left, on_right = tl.maximum(on_left, 1.0), tl.maximum(on_right, 1.0)
    for at in range(0, longest, BN):
        t = at + tl.arange(0, BN)[None, :]
        xt, wt, there = tile
        if LOOP:
            xt, wt, there = fetch_scaled(place, at, unit, WEIGHTED, EVEN, FLAT, WIDE, BN)
        psi, h, _s = held_terms(P, y - xt, law, limit)
        share = h * wt * scale if WEIGHTED else h * scale
        if P == "huber" or P == "absolute":
            halves = tl.where(xt == left, 0.5 / on_left, 0.0) + tl.where(xt == right, 0.5 / on_right, 0.0)
            share = tl.where(by_middle, v * halves, share)
        share = tl.where(there, tl.where(broken, fate, share), 0.0)
        where = out + tap_offset(t, inner, out_taps, FLAT, WIDE)
        tl.store(share_pointer + where, share.to(share_pointer.dtype.element_ty), mask=t < n)
        if DW:
            dw = tl.where(by_middle, 0.0, -v * psi / positive)
            dw = tl.where(broken, fate, dw)
            tl.store(dw_pointer + where, dw.to(dw_pointer.dtype.element_ty), mask=t < n)
