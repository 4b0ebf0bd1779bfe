"""Triton's epilogue over activations, f or act(BatchNorm(f) + residual), and what its backward shares with it.

A tile is [BM rows, BC channels], a part of one group's channels; a program walks over consecutive tiles, so that sums
over positions stay in registers and leave as one partial a program: no atomics, and the same order every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.maps import fetch, joined, row_length
from hyperball.kernels.triton.rows import angular, inverse, radial


@triton.jit
def slot(
    p: tl.tensor, at: tl.tensor, inside: tl.tensor, SLOT: tl.constexpr, OUT: tl.constexpr, CONSTANT: tl.constexpr
) -> tl.tensor:
    """A parameter as a [1, channels] tile: a number, or row SLOT of p."""
    if CONSTANT is None:
        value = tl.load(p + SLOT * OUT + at, mask=inside, other=1.0)[None, :]
    else:
        value = tl.full([1, 1], CONSTANT, tl.float32)
    return value


@triton.jit
def channel_tile(v: tl.tensor, at: tl.tensor, inside: tl.tensor, GIVEN: tl.constexpr) -> tl.tensor:
    """A per-channel vector as a [1, channels] tile; ones where there is none."""
    if GIVEN:
        value = tl.load(v + at, mask=inside, other=1.0).to(tl.float32)[None, :]
    else:
        value = tl.full([1, 1], 1.0, tl.float32)
    return value


@triton.jit
def operator_tiles(
    p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, at: tl.tensor, real: tl.tensor, OUT: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The operator at channels `at`: alpha, beta, rho, 1/rho, shape, bend, factor and stretch, as tiles."""
    alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
    rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
    bend = slot(p, at, real, 4, OUT, BEND)
    times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
    return alpha, beta, rho, 1.0 / rho, shape, bend, times, longer


@triton.jit
def response(
    y: tl.tensor, n: tl.tensor, q: tl.tensor, slopes: tl.tensor, turns: tl.tensor, ROW: tl.constexpr,
    ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr,
    FACTOR: tl.constexpr, STRETCH: tl.constexpr, FAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """f = factor·y·s(u) for cosine, factor·n·s(u)·g(y/n) otherwise, u = n·stretch; with s, h', c, g and g'."""
    alpha, beta, rho, over, shape, bend, times, longer = q
    u = n
    if STRETCH:
        u = n * longer
    s, h1 = radial(ROW, u, alpha, beta, rho, over, shape, slopes, PIECES, ROOT_EPS, FAST)
    if ANG == "cosine":
        c, g, g1 = y, y, y
        f = y * s
    else:
        c = y * inverse(n)
        g, g1 = angular(ANG, c, bend, turns, TURNS, EPS)
        f = g * (n * s)
    if FACTOR:
        f = f * times
    return f, s, h1, c, g, g1


@triton.jit
def lift_of(scalars: tl.tensor, LIFT: tl.constexpr) -> tl.tensor:
    """What float16 took off: the second of `scalars`; 1 in other dtypes."""
    lift = 1.0
    if LIFT:
        lift = tl.load(scalars + 1)
    return lift


@triton.jit
def raised(value: tl.tensor, lift: tl.tensor, LIFT: tl.constexpr) -> tl.tensor:
    """value·lift."""
    if LIFT:
        value = value * lift
    return value


@triton.jit
def put_tile(start: tl.tensor, where: tl.tensor, value: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> None:
    """Store a tile; without a mask where nothing lies outside."""
    if EVEN:
        tl.store(start + where, value)
    else:
        tl.store(start + where, value, mask=mask)


@triton.jit
def act(z: tl.tensor, leak: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """ReLU, PReLU or nothing."""
    if ACT == "relu":
        z = tl.maximum(z, 0.0)
    elif ACT == "prelu":
        z = tl.where(z > 0, z, z * leak)
    return z


@triton.jit
def leak_tile(
    leak: tl.tensor, at: tl.tensor, real: tl.tensor, ACT: tl.constexpr, LEAK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """PReLU's slopes as a [1, channels] tile, one for all (LEAK 0) or one a channel (1); 0 for other activations."""
    if ACT == "prelu":
        slope = tl.load(leak + at * LEAK, mask=real, other=0.0).to(tl.float32)[None, :]
    else:
        slope = tl.zeros([1, 1], tl.float32)
    return slope


@triton.jit
def forward_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, scalars: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, stats: tl.tensor, leak: tl.tensor, residual: tl.tensor, out: tl.tensor,
    r: tl.tensor, rows: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, RESIDUAL: tl.constexpr,
    LENGTHS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """f, or act(scale·f + shift + residual) and its rows' lengths; the last rows first: they may still be cached."""
    group = tl.program_id(1)
    OUT: tl.constexpr = GROUPS * C
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
    lift = lift_of(scalars, LIFT)
    long = tl.zeros([BM], tl.float32)
    for part in tl.static_range(PARTS):
        real = part * BC + tl.arange(0, BC) < C
        at = group * C + part * BC + tl.arange(0, BC)
        q = operator_tiles(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
        mask = inside[:, None] & real[None, :]
        where = row[:, None] * OUT + at[None, :]
        value = raised(fetch(y, where, mask, EVEN), lift, LIFT)
        f, _s, _h1, _c, _g, _g1 = response(
            value, length, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST
        )
        if NORM:
            f = f * channel_tile(stats + 3 * OUT, at, real, True) + channel_tile(stats + 4 * OUT, at, real, True)
        if RESIDUAL:
            f += fetch(residual, where, mask, EVEN)
        f = act(f, leak_tile(leak, at, real, ACT, LEAK), ACT).to(out.dtype.element_ty)
        put_tile(out, where, f, mask, EVEN)
        if LENGTHS:
            held = f.to(tl.float32)
            if not EVEN:
                held = tl.where(mask, held, 0.0)
            long = row_length(held) if PARTS == 1 else joined(long, row_length(held))
    if LENGTHS:
        tl.store(r + row, long, mask=inside)
