"""Triton kernels of frozen layers: one pass from a convolution's output to the activation and its rows' lengths.

z = act(factor·y·s(n) + shift + residual) for cosine, act(factor·n·s(n)·g(y/n) + shift + residual) otherwise. A program
computes the norms n of its rows from the lengths r of the input's rows, or reads them where they are given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.decoupled.epilogue import (
    channel_tile,
    leak_tile,
    lift_of,
    put_tile,
    raised,
    response,
    slot,
)
from hyperball.kernels.triton.maps import FLOAT_MAX, fetch, joined, row_length
from hyperball.kernels.triton.rows import fast_tanh, tanh_of

FAR = tl.constexpr(1.1805916207174113e21)  # 2^70
NEAR = tl.constexpr(8.470329472543003e-22)  # 2^-70


@triton.jit
def root_of(sums: tl.tensor, great: tl.tensor, little: tl.tensor) -> tl.tensor:
    """sqrt(Σ v²) from Σ v², Σ (v·2^-70)² and Σ (v·2^70)²: one of them neither overflows nor vanishes."""
    length = tl.where(sums < 1e-30, tl.sqrt(little) * NEAR, tl.sqrt(sums))
    return tl.where(sums > 1e37, tl.minimum(tl.sqrt(great) * FAR, FLOAT_MAX), length)


@triton.jit
def narrow_lengths_kernel(
    x: tl.tensor, r: tl.tensor, rows: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr
) -> None:
    """r[row, group] = ‖x[row, channels of the group]‖ for a few channels, which a thread reads one after the other."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    sums = tl.zeros([BM], tl.float32)
    great, little = sums, sums
    for channel in tl.static_range(C):
        value = tl.load(x + (row * GROUPS + group) * C + channel, mask=inside, other=0.0).to(tl.float32)
        sums += value * value
        great += (value * NEAR) * (value * NEAR)
        little += (value * FAR) * (value * FAR)
    tl.store(r + row * GROUPS + group, root_of(sums, great, little), mask=inside)


@triton.jit
def window_length(
    r: tl.tensor, row: tl.tensor, inside: tl.tensor, group: tl.tensor, H: tl.tensor, W: tl.tensor, OH: tl.tensor,
    OW: tl.tensor, G: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """n = sqrt(Σ_window r²); squares of r, of r·2^70 and of r·2^-70, so that none overflows or vanishes."""
    ow, place = row % OW, row // OW
    oh, first = place % OH, (place // OH) * H
    sums = tl.zeros_like(row).to(tl.float32)
    great, little = sums, sums
    for a in tl.static_range(KH):
        h = oh * SH - PH + a * EH
        for b in tl.static_range(KW):
            w = ow * SW - PW + b * EW
            real = inside & (h >= 0) & (h < H) & (w >= 0) & (w < W)
            value = tl.load(r + ((first + h) * W + w) * G + group, mask=real, other=0.0)
            sums += value * value
            great += (value * NEAR) * (value * NEAR)
            little += (value * FAR) * (value * FAR)
    return root_of(sums, great, little)


@triton.jit
def activated(z: tl.tensor, leak: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """ReLU, PReLU or nothing; a NaN stays one."""
    if ACT == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "prelu":
        z = tl.where(z > 0, z, z * leak)
    return z


@triton.jit
def tiles_at(
    p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, at: tl.tensor, real: tl.tensor, OUT: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`epilogue.operator_tiles`, with 1/rho read where rho is no number: row 5 of p."""
    alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
    rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
    over, bend = slot(p, at, real, 5, OUT, RHO), slot(p, at, real, 4, OUT, BEND)
    if RHO is not None:
        over = 1.0 / rho
    times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
    return alpha, beta, rho, over, shape, bend, times, longer


@triton.jit
def over_norm(n: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """1/n for n > 0; FAST by the GPU's own instruction, to a relative 2^-23."""
    if FAST:
        one = tl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=f,f", [n], dtype=tl.float32, is_pure=True, pack=1)
    else:
        one = 1.0 / n
    return one


@triton.jit
def scaled(
    y: tl.tensor, n: tl.tensor, q: tl.tensor, slopes: tl.tensor, turns: tl.tensor, ROW: tl.constexpr,
    ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr, FAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """f = factor·y·s(u), or factor·n·s(u)·g(y/n), in the fewest instructions for the commonest operators."""
    alpha, _beta, _rho, over, _shape, _bend, times, _longer = q
    if ROW == "tanh" and ANG == "cosine" and not STRETCH:
        held = tl.maximum(n, 1e-30)
        f = y * (alpha * over_norm(held, FAST))
        f = f * (fast_tanh(held * over) if FAST else tanh_of(held * over))
        if FACTOR:
            f = f * times
    elif ROW == "linear" and ANG == "square_cosine":
        f = (y * (alpha * over_norm(tl.maximum(n, 1e-30), FAST))) * tl.abs(y)
        if FACTOR:
            f = f * times
    else:
        f, _s, _h1, _c, _g, _g1 = response(
            y, n, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST
        )
    return f


@triton.jit
def shifted(f: tl.tensor, shift: tl.tensor, at: tl.tensor, real: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """f + shift, one number a channel."""
    if SHIFT:
        f += tl.load(shift + at, mask=real, other=0.0)[None, :]
    return f


@triton.jit
def frozen_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, scalars: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, shift: tl.tensor, leak: tl.tensor, residual: tl.tensor, out: tl.tensor,
    r: tl.tensor, rows: tl.tensor, H: tl.tensor, W: tl.tensor, OH: tl.tensor, OW: tl.tensor, GROUPS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    EH: tl.constexpr, EW: tl.constexpr, BOX: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr,
    ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr, SHIFT: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, RESIDUAL: tl.constexpr, LENGTHS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """z and its rows' lengths r; n are norms, or with BOX the lengths of the input's rows; the last rows first."""
    group = tl.program_id(1)
    OUT: tl.constexpr = GROUPS * C
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if not BOX:  # whose row numbers, which it divides, have 32 bits
        block = block.to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    inside = row < rows
    lift = lift_of(scalars, LIFT)
    long = tl.zeros([BM], tl.float32)
    for part in tl.static_range(PARTS):
        real = part * BC + tl.arange(0, BC) < C
        at = group * C + part * BC + tl.arange(0, BC)
        mask = inside[:, None] & real[None, :]
        where = row.to(tl.int64)[:, None] * OUT + at[None, :]
        value = raised(fetch(y, where, mask, EVEN), lift, LIFT)
        if part == 0:  # behind the first load, which it does not wait for
            if BOX:
                norm = window_length(
                    n, row, inside, group, H, W, OH, OW, GROUPS, KH, KW, SH, SW, PH, PW, EH, EW
                )[:, None]  # fmt: skip
            else:
                norm = fetch(n, row.to(tl.int64) * GROUPS + group, inside, EVEN)[:, None]
        q = tiles_at(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
        f = scaled(value, norm, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST)
        f = shifted(f, shift, at, real, SHIFT)
        if RESIDUAL:
            f += fetch(residual, where, mask, EVEN)
        z = activated(f, leak_tile(leak, at, real, ACT, LEAK), ACT)
        put_tile(out, where, z.to(out.dtype.element_ty), mask, EVEN)
        if LENGTHS:  # of z before it is rounded, which is as close as the rounded one
            if not EVEN:
                z = tl.where(mask, z, 0.0)
            long = row_length(z) if PARTS == 1 else joined(long, row_length(z))
    if LENGTHS:
        tl.store(r + row, long, mask=inside)


@triton.jit
def best_of_row(
    y: tl.tensor, n: tl.tensor, slopes: tl.tensor, turns: tl.tensor, q: tl.tensor, lift: tl.tensor, shift: tl.tensor,
    slope: tl.tensor, first: tl.tensor, h: tl.tensor, qw: tl.tensor, group: tl.tensor, at: tl.tensor, real: tl.tensor,
    H: tl.tensor, W: tl.tensor, GROUPS: tl.constexpr, OUT: tl.constexpr, KW: tl.constexpr, SW: tl.constexpr,
    PW: tl.constexpr, ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr,
    ROOT_EPS: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr,
    FAST: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The largest z (before ReLU, behind PReLU, which need not increase) of KW neighbors in row h of an image.

    What lies outside of the map is the nearest inside, which is in the same window.
    """
    best = tl.full([BM, BC], float("-inf"), tl.float32)
    h = tl.minimum(tl.maximum(h, 0), H - 1)
    for b in tl.static_range(KW):
        w = tl.minimum(tl.maximum(qw * SW - PW + b, 0), W - 1)
        source = (first + h) * W + w
        value = fetch(y, source[:, None] * OUT + at[None, :], real[None, :], EVEN)
        norm = tl.load(n + source * GROUPS + group)[:, None]
        f = scaled(
            raised(value, lift, LIFT), norm, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH,
            FAST,
        )  # fmt: skip
        z = f + shift
        if ACT == "prelu":
            z = activated(z, slope, ACT)
        best = tl.maximum(best, z, propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def pooled_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, scalars: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, shift: tl.tensor, leak: tl.tensor, out: tl.tensor, r: tl.tensor,
    across: tl.tensor, strips: tl.tensor, H: tl.tensor, W: tl.tensor, QH: tl.tensor, QW: tl.tensor,
    GROUPS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, SHARED: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, SHIFT: tl.constexpr, LIFT: tl.constexpr,
    FAST: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, LENGTHS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """The largest z of every window of a max pooling, and those rows' lengths; n are norms.

    A program takes BM columns of STEPS rows of the output; with SHARED a window's last row is the next one's first.
    """
    group = tl.program_id(1)
    OUT: tl.constexpr = GROUPS * C
    block = tl.program_id(0)
    qw = (block % across) * BM + tl.arange(0, BM)
    start = ((block // across) % strips) * STEPS
    image = (block // across // strips).to(tl.int64)
    inside = qw < QW
    lift = lift_of(scalars, LIFT)
    for part in tl.static_range(PARTS):
        real = part * BC + tl.arange(0, BC) < C
        at = group * C + part * BC + tl.arange(0, BC)
        q = tiles_at(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
        slope = leak_tile(leak, at, real, ACT, LEAK)
        lower = shifted(tl.zeros([1, BC], tl.float32), shift, at, real, SHIFT)
        last = tl.full([BM, BC], float("-inf"), tl.float32)
        if SHARED:
            last = best_of_row(
                y, n, slopes, turns, q, lift, lower, slope, image * H, start * SH - PH, qw, group, at, real, H, W,
                GROUPS, OUT, KW, SW, PW, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, LIFT, FAST, EVEN,
                ACT, BM, BC,
            )  # fmt: skip
        for step in range(STEPS):
            best = tl.full([BM, BC], float("-inf"), tl.float32)
            if SHARED:
                best = last
            for a in tl.static_range(SHARED, KH):
                last = best_of_row(
                    y, n, slopes, turns, q, lift, lower, slope, image * H, (start + step) * SH - PH + a, qw, group, at,
                    real, H, W, GROUPS, OUT, KW, SW, PW, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, LIFT,
                    FAST, EVEN, ACT, BM, BC,
                )  # fmt: skip
                best = tl.maximum(best, last, propagate_nan=tl.PropagateNan.ALL)
            if ACT == "relu":
                best = activated(best, slope, ACT)
            written = inside & (start + step < QH)
            row = (image * QH + start + step) * QW + qw
            mask = written[:, None] & real[None, :]
            tl.store(out + row[:, None] * OUT + at[None, :], best.to(out.dtype.element_ty), mask=mask)
            if LENGTHS:  # where all channels are one part
                tl.store(r + row, row_length(tl.where(mask, best, 0.0)), mask=written)


@triton.jit
def lift_kernel(
    filters: tl.tensor, longest: tl.tensor, peaks: tl.tensor, lowered: tl.tensor, scalars: tl.tensor,
    blocks: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """filters over the power of two that keeps |y| <= n·longest within float16, which is the second of `scalars`."""
    peak = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(peaks + blocks + at, mask=at < blocks, other=0.0))
    bound = tl.maximum(tl.max(peak, axis=0) * tl.maximum(tl.load(longest).to(tl.float32), 1.0), 1.0)
    guard = tl.exp2(tl.maximum(tl.ceil(tl.log2(bound)) - 15.0, 0.0))
    tl.store(scalars + 1, guard, mask=tl.program_id(0) == 0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(filters + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(lowered + at, (value / guard).to(lowered.dtype.element_ty), mask=at < size)
