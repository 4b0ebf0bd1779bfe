"""The Triton kernel of robust pooling's implicit gradient: see `pooling_gradient`, whose formulas it computes."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling import fetch, gap_around
from hyperball.kernels.triton.pooling_terms import bounded, gain_slope, terms
from hyperball.kernels.triton.row_access import row_numbers, row_offset, somewhere, tap_offset

DAMPING = tl.constexpr(1e-3)


@triton.jit
def moments(
    P: tl.constexpr, y: tl.tensor, x: tl.tensor, w: tl.tensor, inside: tl.tensor, c: tl.tensor, over: tl.tensor,
    far: tl.tensor, shape: tl.tensor, limit: tl.tensor, WEIGHTED: tl.constexpr, SHAPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ w·(psi', s, z·psi', z·ds/dshape) of one tile."""
    z = tl.where(inside, y - x, 0.0)
    _, h, s = terms(P, z, c, over, far, shape)
    if P == "barron":
        h, s = tl.minimum(h, limit), tl.minimum(s, limit)
    if WEIGHTED:
        h, held = h * w, s * w
    else:
        h, held = tl.where(inside, h, 0.0), tl.where(inside, s, 0.0)
    bend = tl.zeros_like(h)
    if SHAPE:
        bend = z * gain_slope(z, held, over, shape)
    return (
        tl.sum(h, axis=1, keep_dims=True), tl.sum(held, axis=1, keep_dims=True),
        tl.sum(z * h, axis=1, keep_dims=True), tl.sum(bend, axis=1, keep_dims=True),
    )  # fmt: skip


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
    """v·w·psi'/D of every sample, D = max(Σ w·psi', 1e-3·Σ w·s); -v·psi/D of its weight; the row's c and shape."""
    number = row_numbers(WIDE, BR)
    live = number < rows
    row = tl.where(live, number, 0)
    if RAGGED:
        begin = tl.load(offsets + row // columns).to(tl.int64)
        n = (tl.load(offsets + row // columns + 1).to(tl.int64) - begin).to(tl.int32)
        start = begin * columns + row % columns
        x_row, w_row, out_row, dw_row = x_pointer + start, w_pointer + start, share_pointer + start, dw_pointer + start
    else:
        n = tl.zeros([BR, 1], tl.int32) + taps
        x_row = x_pointer + row_offset(row, r1, r2, r3, x0, x1, x2, x3)
        w_row = w_pointer + row_offset(row, r1, r2, r3, w0, w1, w2, w3)
        out = row_offset(row, r1, r2, r3, o0, o1, o2, o3)
        out_row, dw_row = share_pointer + out, dw_pointer + out
    n = tl.where(live, n, 0)
    longest = tl.max(tl.max(n, axis=1), axis=0)
    c = tl.zeros([BR, 1], tl.float32) + c_number
    if C_TENSOR:
        c = tl.load(c_pointer + row_offset(row, r1, r2, r3, c0, c1, c2, c3)).to(tl.float32)
    shape = tl.zeros([BR, 1], tl.float32) + shape_number
    if SHAPE_TENSOR:
        shape = tl.load(shape_pointer + row_offset(row, r1, r2, r3, a0, a1, a2, a3)).to(tl.float32)
    shape = tl.minimum(tl.maximum(shape, -1e15), 1e15)
    v = tl.load(v_pointer + row_offset(row, r1, r2, r3, v0, v1, v2, v3)).to(tl.float32)
    given = tl.load(y_pointer + row)
    y = bounded(given)
    broken = given != given
    held_c = tl.minimum(tl.maximum(c, 1e-36), 1e37)
    over, far = 1.0 / held_c, tl.minimum(1e18 * held_c, 1.6e38)
    if P == "welsch":
        far = tl.minimum(1e4 * held_c, 1.6e38)
    if P == "barron":
        over = 1.0 / (held_c * tl.sqrt(tl.maximum(tl.abs(shape - 2.0), 1e-6)))
    limit = 3.4028234663852886e38 / (8.0 * tl.maximum(n, 1).to(tl.float32))

    x, w, inside = fetch(x_row, w_row, 0, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
    x = bounded(x)
    total, gains, moment, bend = moments(
        P, y, x, w, inside, held_c, over, far, shape, limit, WEIGHTED, SHAPE_TENSOR and P == "barron"
    )
    if LOOP:
        for at in range(BN, longest, BN):
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            total1, gains1, moment1, bend1 = moments(
                P, y, bounded(xt), wt, there, held_c, over, far, shape, limit, WEIGHTED,
                SHAPE_TENSOR and P == "barron",
            )  # fmt: skip
            total, gains, moment, bend = total + total1, gains + gains1, moment + moment1, bend + bend1
    divisor = tl.maximum(total, gains * DAMPING)
    positive = tl.where(divisor > 0, divisor, 1.0)
    scale = tl.where(divisor > 0, v / positive, 0.0)
    radius = scale * moment
    by_middle = (total <= 0) & ((P == "huber") | (P == "absolute"))
    left, right = y, y
    on_left, on_right = tl.full([BR, 1], 1.0, tl.float32), tl.full([BR, 1], 1.0, tl.float32)
    if somewhere(by_middle & live):
        _, _, left, right = gap_around(
            y,
            x,
            w,
            inside,
            1.0,
            x_row,
            w_row,
            n,
            longest,
            inner,
            xs0,
            xs1,
            ws0,
            ws1,
            WEIGHTED,
            EVEN,
            FLAT,
            WIDE,
            LOOP,
            BN,
        )
        on_left = tl.sum(tl.where(inside & (x == left), 1.0, 0.0), axis=1, keep_dims=True)
        on_right = tl.sum(tl.where(inside & (x == right), 1.0, 0.0), axis=1, keep_dims=True)
        if LOOP:
            for at in range(BN, longest, BN):
                xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
                xt = bounded(xt)
                on_left += tl.sum(tl.where(there & (xt == left), 1.0, 0.0), axis=1, keep_dims=True)
                on_right += tl.sum(tl.where(there & (xt == right), 1.0, 0.0), axis=1, keep_dims=True)
        pull = 0.5 * v * (tl.where(on_left > 0, y - left, 0.0) + tl.where(on_right > 0, y - right, 0.0))
        radius = tl.where(by_middle, pull, radius)
    if C_TENSOR:
        radius = tl.where(broken, float("nan"), radius / c)
        tl.store(dc_pointer + number, radius, mask=live)
    if SHAPE_TENSOR:
        tl.store(dshape_pointer + number, tl.where(broken, float("nan"), -v * bend / positive), mask=live)
    on_left, on_right = tl.maximum(on_left, 1.0), tl.maximum(on_right, 1.0)
    for at in range(0, longest, BN):
        t = at + tl.arange(0, BN)[None, :]
        xt, wt, there = x, w, inside
        if LOOP:
            xt, wt, there = fetch(x_row, w_row, at, n, inner, xs0, xs1, ws0, ws1, WEIGHTED, EVEN, FLAT, WIDE, BN)
            xt = bounded(xt)
        z = y - xt
        psi, h, s = terms(P, z, held_c, over, far, shape)
        if P == "barron":
            h, s = tl.minimum(h, limit), tl.minimum(s, limit)
            psi = s * z
        share = h * wt * scale if WEIGHTED else h * scale
        if P == "huber" or P == "absolute":
            halves = tl.where(xt == left, 0.5 / on_left, 0.0) + tl.where(xt == right, 0.5 / on_right, 0.0)
            share = tl.where(by_middle, v * halves, share)
        share = tl.where(there, tl.where(broken, float("nan"), share), 0.0)
        where = tap_offset(t, inner, os0, os1, FLAT, WIDE)
        tl.store(out_row + where, share.to(share_pointer.dtype.element_ty), mask=t < n)
        if DW:
            dw = tl.where(by_middle, 0.0, -v * psi / positive)
            dw = tl.where(broken, float("nan"), dw)
            tl.store(dw_row + where, dw.to(dw_pointer.dtype.element_ty), mask=t < n)
