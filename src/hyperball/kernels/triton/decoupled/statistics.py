"""Triton kernels of a fused block's BatchNorm: its statistics, and the sums that its backward needs."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.decoupled.epilogue import (
    act,
    channel_tile,
    leak_tile,
    lift_of,
    operator_tiles,
    raised,
    response,
)
from hyperball.kernels.triton.maps import fetch
from hyperball.kernels.triton.rows import inverse


@triton.jit
def own_channels(C: tl.constexpr, PARTS: tl.constexpr, BC: tl.constexpr) -> tl.tensor:
    """This program's group, its part of the group's channels, which of these there are, and their numbers."""
    group, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    real = part * BC + tl.arange(0, BC) < C
    return group, part, real, group * C + part * BC + tl.arange(0, BC)


@triton.jit
def tile_of(
    tile: tl.tensor, rows: tl.tensor, at: tl.tensor, real: tl.tensor, OUT: tl.constexpr, BM: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The rows of a tile, which of them there are, its mask and where it lies."""
    row = tl.cast(tile, tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    return row, inside, inside[:, None] & real[None, :], row[:, None] * OUT + at[None, :]


@triton.jit
def responses(
    y: tl.tensor, n: tl.tensor, spot: tl.tensor, group: tl.tensor, q: tl.tensor, slopes: tl.tensor, turns: tl.tensor,
    lift: tl.tensor, GROUPS: tl.constexpr, ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr,
    TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr,
    LIFT: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the convolution gave at `spot`, a tile's (rows, inside, mask, where), the lengths, and the `response`."""
    row, inside, mask, where = spot
    value = raised(fetch(y, where, mask, EVEN), lift, LIFT)
    length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
    f, s, h1, c, g, g1 = response(
        value, length, q, slopes, turns, ROW, ANG, PIECES, TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST
    )
    return value, length, f, s, h1, c, g, g1


@triton.jit
def statistics_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, scalars: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, means: tl.tensor, squares: tl.tensor, rows: tl.tensor, tiles: tl.tensor,
    GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """By program and channel: the mean of f and Σ (f - mean)² over its rows, summed about the first tile's mean."""
    group, _part, real, at = own_channels(C, PARTS, BC)
    OUT: tl.constexpr = GROUPS * C
    q = operator_tiles(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
    lift = lift_of(scalars, LIFT)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    base = tl.zeros([1, BC], tl.float32)
    plain, square = tl.zeros([BM, BC], tl.float32), tl.zeros([BM, BC], tl.float32)
    for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(rows, BM)), num_stages=AHEAD):
        row, inside, mask, where = tile_of(tile, rows, at, real, OUT, BM)
        _value, _length, f, _s, _h1, _c, _g, _g1 = responses(
            y, n, (row, inside, mask, where), group, q, slopes, turns, lift, GROUPS, ROW, ANG, PIECES, TURNS, ROOT_EPS,
            EPS, FACTOR, STRETCH, LIFT, FAST, EVEN,
        )  # fmt: skip
        if tile == first:
            base = (tl.sum(f, axis=0) / tl.maximum(tl.sum(tl.where(inside, 1.0, 0.0), axis=0), 1.0))[None, :]
        away = f - base
        if not EVEN:
            away = tl.where(inside[:, None], away, 0.0)
        plain += away
        square += away * away
    count = tl.minimum(tl.maximum(rows - first.to(tl.int64) * BM, 1), tiles * BM).to(tl.float32)
    put_statistics(means, squares, plain, square, base, count, tl.program_id(1) * OUT + at, real)


@triton.jit
def put_statistics(
    means: tl.tensor, squares: tl.tensor, plain: tl.tensor, square: tl.tensor, base: tl.tensor, count: tl.tensor,
    where: tl.tensor, real: tl.tensor,
) -> None:  # fmt: skip
    """Mean and Σ (f - mean)² of `count` rows from Σ (f - base) and Σ (f - base)²."""
    shift = tl.sum(plain, axis=0) / count
    tl.store(means + where, tl.sum(base, axis=0) + shift, mask=real)
    tl.store(squares + where, tl.maximum(tl.sum(square, axis=0) - shift * shift * count, 0.0), mask=real)


@triton.jit
def combine(
    means: tl.tensor, squares: tl.tensor, channel: tl.tensor, real: tl.tensor, rows: tl.tensor,
    per_program: tl.tensor, programs: tl.tensor, OUT: tl.constexpr, BP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Mean and variance over all rows from every program's mean and Σ (f - mean)²; BP >= programs."""
    part = tl.arange(0, BP)
    mask = (part < programs)[:, None] & real[None, :]
    where = part[:, None] * OUT + channel[None, :]
    middle = tl.load(means + where, mask=mask, other=0.0)
    inner = tl.load(squares + where, mask=mask, other=0.0)
    # The kernel walks from the last rows to the first: program i holds block programs - 1 - i.
    size = tl.minimum(tl.maximum(rows - (programs - 1 - part) * per_program, 0), per_program).to(tl.float32)
    mean = tl.sum(middle * (size / rows)[:, None], axis=0)
    apart = tl.where(mask, middle - mean[None, :], 0.0)
    return mean, tl.sum(inner + apart * apart * size[:, None], axis=0) / rows


@triton.jit
def normalize_kernel(
    means: tl.tensor, squares: tl.tensor, gamma: tl.tensor, shift: tl.tensor, stats: tl.tensor, rows: tl.tensor,
    per_program: tl.tensor, programs: tl.tensor, OUT: tl.constexpr, BN_EPS: tl.constexpr, AFFINE: tl.constexpr,
    BATCH: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """stats = mean, variance, 1/sqrt(variance + eps), scale and shift of BatchNorm, from the programs' parts.

    Without BATCH, `means` and `squares` are the running mean and variance themselves.
    """
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    real = channel < OUT
    if BATCH:
        total, var = combine(means, squares, channel, real, rows, per_program, programs, OUT, BP)
    else:
        total = tl.load(means + channel, mask=real, other=0.0).to(tl.float32)
        var = tl.load(squares + channel, mask=real, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt_rn(var + BN_EPS)
    weight, bias = tl.full([BC], 1.0, tl.float32), tl.zeros([BC], tl.float32)
    if AFFINE:
        weight = tl.load(gamma + channel, mask=real, other=1.0).to(tl.float32)
        bias = tl.load(shift + channel, mask=real, other=0.0).to(tl.float32)
    tl.store(stats + channel, total, mask=real)
    tl.store(stats + OUT + channel, var, mask=real)
    tl.store(stats + 2 * OUT + channel, rstd, mask=real)
    tl.store(stats + 3 * OUT + channel, weight * rstd, mask=real)
    tl.store(stats + 4 * OUT + channel, bias - total * weight * rstd, mask=real)


@triton.jit
def incoming(
    v: tl.tensor, source: tl.tensor, r: tl.tensor, dr: tl.tensor, f: tl.tensor, a: tl.tensor, b: tl.tensor,
    slope: tl.tensor, where: tl.tensor, mask: tl.tensor, row: tl.tensor, inside: tl.tensor, ACT: tl.constexpr,
    SOURCE: tl.constexpr, LENGTHS: tl.constexpr, EVEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The gradient of z, where x' = act(z): dx' = v + x'·dr/r, times act'(z); and z where PReLU needs it.

    SOURCE says whence x' comes: "rebuild" from f, "output" x' itself, "residual" from f and the residual,
    "done" where v is that gradient already.
    """
    g = fetch(v, where, mask, EVEN)
    z = g
    if SOURCE != "done":
        if SOURCE == "output":
            z = fetch(source, where, mask, EVEN)
            made = z
        else:
            z = f * a + b
            if SOURCE == "residual":
                z += fetch(source, where, mask, EVEN)
            made = act(z, slope, ACT)
        if LENGTHS:
            along = fetch(dr, row, inside, EVEN) * inverse(fetch(r, row, inside, EVEN))
            g += made * along[:, None]
        if ACT == "relu":
            g = tl.where(z > 0, g, 0.0)
    return g, z


@triton.jit
def reduce_kernel(
    v: tl.tensor, source: tl.tensor, r: tl.tensor, dr: tl.tensor, leak: tl.tensor, stats: tl.tensor, y: tl.tensor,
    n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, scalars: tl.tensor, slopes: tl.tensor,
    turns: tl.tensor, out: tl.tensor, parts: tl.tensor, rows: tl.tensor, tiles: tl.tensor, GROUPS: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, SOURCE: tl.constexpr, LENGTHS: tl.constexpr,
    WRITE: tl.constexpr, AHEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """By program and channel: Σ g, Σ g·(f - mean) and PReLU's Σ dx'·min(z, 0); g itself where WRITE."""
    group, _part, real, at = own_channels(C, PARTS, BC)
    OUT: tl.constexpr = GROUPS * C
    q = operator_tiles(p, factor, stretch, at, real, OUT, ALPHA, BETA, RHO, SHAPE, BEND, FACTOR, STRETCH)
    mean, slope = channel_tile(stats, at, real, True), leak_tile(leak, at, real, ACT, LEAK)
    a, b = channel_tile(stats + 3 * OUT, at, real, True), channel_tile(stats + 4 * OUT, at, real, True)
    lift = lift_of(scalars, LIFT)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    plain, cross = tl.zeros([BM, BC], tl.float32), tl.zeros([BM, BC], tl.float32)
    leaks = tl.zeros([BC], tl.float32)
    for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(rows, BM)), num_stages=AHEAD):
        row, inside, mask, where = tile_of(tile, rows, at, real, OUT, BM)
        _value, _length, f, _s, _h1, _c, _g, _g1 = responses(
            y, n, (row, inside, mask, where), group, q, slopes, turns, lift, GROUPS, ROW, ANG, PIECES, TURNS, ROOT_EPS,
            EPS, FACTOR, STRETCH, LIFT, FAST, EVEN,
        )  # fmt: skip
        g, z = incoming(v, source, r, dr, f, a, b, slope, where, mask, row, inside, ACT, SOURCE, LENGTHS, EVEN)
        if ACT == "prelu":
            leaks += tl.sum(tl.where(z <= 0, g * z, 0.0), axis=0)
            g = tl.where(z > 0, g, g * slope)
        if WRITE:
            g = g.to(out.dtype.element_ty)
            tl.store(out + where, g, mask=mask)
            g = g.to(tl.float32)
        plain += g
        cross += g * (f - mean)
    target = parts + tl.program_id(1) * 3 * OUT + at
    tl.store(target, tl.sum(plain, axis=0), mask=real)
    tl.store(target + OUT, tl.sum(cross, axis=0), mask=real)
    if ACT == "prelu":
        tl.store(target + 2 * OUT, leaks, mask=real)


@triton.jit
def coefficients_kernel(
    parts: tl.tensor, stats: tl.tensor, out: tl.tensor, rows: tl.tensor, programs: tl.tensor, OUT: tl.constexpr,
    BATCH: tl.constexpr, LEAKS: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """out = dγ, dβ, dslope, and (b, c) of df = scale·g + b + c·(f - mean), which are 0 with running statistics."""
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    real = channel < OUT
    plain = tl.zeros([BC], tl.float32)
    cross = tl.zeros([BC], tl.float32)
    leaks = tl.zeros([BC], tl.float32)
    for first in range(0, programs, BP):
        part = first + tl.arange(0, BP)
        mask = (part < programs)[:, None] & real[None, :]
        where = part[:, None] * (3 * OUT) + channel[None, :]
        plain += tl.sum(tl.load(parts + where, mask=mask, other=0.0), axis=0)
        cross += tl.sum(tl.load(parts + where + OUT, mask=mask, other=0.0), axis=0)
        if LEAKS:
            leaks += tl.sum(tl.load(parts + where + 2 * OUT, mask=mask, other=0.0), axis=0)
    rstd = tl.load(stats + 2 * OUT + channel, mask=real, other=1.0)
    scale = tl.load(stats + 3 * OUT + channel, mask=real, other=1.0)
    tl.store(out + channel, cross * rstd, mask=real)
    tl.store(out + OUT + channel, plain, mask=real)
    tl.store(out + 2 * OUT + channel, leaks, mask=real)
    if BATCH:
        tl.store(out + 3 * OUT + channel, -scale * plain / rows, mask=real)
        tl.store(out + 4 * OUT + channel, -scale * rstd * rstd * cross / rows, mask=real)
    else:
        tl.store(out + 3 * OUT + channel, tl.zeros([BC], tl.float32), mask=real)
        tl.store(out + 4 * OUT + channel, tl.zeros([BC], tl.float32), mask=real)
