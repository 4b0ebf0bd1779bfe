"""Triton kernels over activations: the epilogue and its backward, alone or fused with BatchNorm and an activation.

A tile is [BM rows, BC channels], a part of one group's channels; a program walks over consecutive tiles, so that sums
over positions stay in registers and leave as one partial a program: no atomics, and the same order every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.maps import FLOAT_MAX, fetch, joined, row_length
from hyperball.kernels.triton.rows import (
    angular,
    bend_slope,
    inverse,
    radial,
    radial_post,
    radial_slope,
    ramp,
    turn,
)


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
def respond(
    y: tl.tensor, n: tl.tensor, factor: tl.tensor, stretch: tl.tensor, alpha: tl.tensor, beta: tl.tensor,
    rho: tl.tensor, over: tl.tensor, shape: tl.tensor, bend: tl.tensor, slopes: tl.tensor, turns: tl.tensor,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, FAST: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """f = factor·y·s(u) for cosine, factor·n·s(u)·g(y/n) otherwise, u = n·stretch; with s, h', c, g and g'."""
    u = n
    if STRETCH:
        u = n * stretch
    s, h1 = radial(ROW, u, alpha, beta, rho, over, shape, slopes, PIECES, ROOT_EPS, FAST)
    if ANG == "cosine":
        c, g, g1 = y, y, y
        f = y * s
    else:
        c = y * inverse(n)
        g, g1 = angular(ANG, c, bend, turns, TURNS, EPS)
        f = g * (n * s)
    if FACTOR:
        f = f * factor
    return f, s, h1, c, g, g1


@triton.jit
def act(z: tl.tensor, leak: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """ReLU, PReLU or nothing."""
    if ACT == "relu":
        z = tl.maximum(z, 0.0)
    elif ACT == "prelu":
        z = tl.where(z > 0, z, z * leak)
    return z


@triton.jit
def forward_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, lift: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, scale: tl.tensor, shift: tl.tensor, leak: tl.tensor, residual: tl.tensor,
    out: tl.tensor, r: tl.tensor, rows: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, RESIDUAL: tl.constexpr,
    LENGTHS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """f, or act(scale·f + shift + residual) and its rows' lengths; the last rows first: they may still be cached."""
    group = tl.program_id(1)
    OUT: tl.constexpr = GROUPS * C
    guard = 1.0
    if LIFT:
        guard = tl.load(lift)
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BM + tl.arange(0, BM)
    inside = row < rows
    length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
    long = tl.zeros([BM], tl.float32)
    for part in tl.static_range(PARTS):
        channel = part * BC + tl.arange(0, BC)
        real = channel < C
        at = group * C + channel
        alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
        rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
        bend = slot(p, at, real, 4, OUT, BEND)
        over = 1.0 / rho
        times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
        mask = inside[:, None] & real[None, :]
        where = row[:, None] * OUT + at[None, :]
        value = fetch(y, where, mask, EVEN)
        if LIFT:
            value = value * guard
        f, _s, _h1, _c, _g, _g1 = respond(
            value, length, times, longer, alpha, beta, rho, over, shape, bend, slopes, turns, ROW, ANG, PIECES,
            TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST,
        )  # fmt: skip
        if NORM:
            f = f * channel_tile(scale, at, real, True) + channel_tile(shift, at, real, True)
        if RESIDUAL:
            f += fetch(residual, where, mask, EVEN)
        if ACT == "prelu":
            f = act(f, tl.load(leak + at * LEAK, mask=real, other=0.0).to(tl.float32)[None, :], ACT)
        else:
            f = act(f, 0.0, ACT)
        f = f.to(out.dtype.element_ty)
        if EVEN:
            tl.store(out + where, f)
        else:
            tl.store(out + where, f, mask=mask)
        if LENGTHS:
            held = f.to(tl.float32)
            if not EVEN:
                held = tl.where(mask, held, 0.0)
            long = row_length(held) if PARTS == 1 else joined(long, row_length(held))
    if LENGTHS:
        tl.store(r + row, long, mask=inside)


@triton.jit
def statistics_kernel(
    y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, lift: tl.tensor,
    slopes: tl.tensor, turns: tl.tensor, means: tl.tensor, squares: tl.tensor, rows: tl.tensor, tiles: tl.tensor,
    GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, ANG: tl.constexpr,
    PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr, FACTOR: tl.constexpr,
    STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr,
    BC: tl.constexpr,
) -> None:  # fmt: skip
    """By program and channel: the mean of f and Σ (f - mean)² over its rows, summed about the first tile's mean."""
    group = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BC + tl.arange(0, BC)
    real = channel < C
    at = group * C + channel
    OUT: tl.constexpr = GROUPS * C
    alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
    rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
    bend = slot(p, at, real, 4, OUT, BEND)
    over = 1.0 / rho
    times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
    guard = 1.0
    if LIFT:
        guard = tl.load(lift)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(rows, BM))
    base = tl.zeros([1, BC], tl.float32)
    plain = tl.zeros([BM, BC], tl.float32)
    square = tl.zeros([BM, BC], tl.float32)
    for tile in range(first, last):
        row = tl.cast(tile, tl.int64) * BM + tl.arange(0, BM)
        inside = row < rows
        mask = inside[:, None] & real[None, :]
        value = fetch(y, row[:, None] * OUT + at[None, :], mask, EVEN)
        if LIFT:
            value = value * guard
        length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
        f, _s, _h1, _c, _g, _g1 = respond(
            value, length, times, longer, alpha, beta, rho, over, shape, bend, slopes, turns, ROW, ANG, PIECES,
            TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST,
        )  # fmt: skip
        if tile == first:
            filled = tl.maximum(tl.sum(tl.where(inside, 1.0, 0.0), axis=0), 1.0)
            base = (tl.sum(f, axis=0) / filled)[None, :]
        away = f - base
        if not EVEN:
            away = tl.where(inside[:, None], away, 0.0)
        plain += away
        square += away * away
    begin = first.to(tl.int64) * BM
    count = tl.minimum(tl.maximum(rows - begin, 1), tiles * BM).to(tl.float32)
    shift = tl.sum(plain, axis=0) / count
    mean = tl.sum(base, axis=0) + shift
    spread = tl.maximum(tl.sum(square, axis=0) - shift * shift * count, 0.0)
    where = tl.program_id(1) * OUT + at
    tl.store(means + where, mean, mask=real)
    tl.store(squares + where, spread, mask=real)


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
    n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor, lift: tl.tensor, slopes: tl.tensor,
    turns: tl.tensor, out: tl.tensor, parts: tl.tensor, rows: tl.tensor, tiles: tl.tensor, GROUPS: tl.constexpr,
    C: tl.constexpr, PARTS: tl.constexpr, ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr,
    TURNS: tl.constexpr, ROOT_EPS: tl.constexpr, EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    RHO: tl.constexpr, SHAPE: tl.constexpr, BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr,
    LIFT: tl.constexpr, FAST: tl.constexpr, EVEN: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr,
    SOURCE: tl.constexpr, LENGTHS: tl.constexpr, WRITE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """By program and channel: Σ g, Σ g·(f - mean) and PReLU's Σ dx'·min(z, 0); g itself where WRITE."""
    group = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BC + tl.arange(0, BC)
    real = channel < C
    at = group * C + channel
    OUT: tl.constexpr = GROUPS * C
    alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
    rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
    bend = slot(p, at, real, 4, OUT, BEND)
    over = 1.0 / rho
    times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
    mean = channel_tile(stats, at, real, True)
    a, b = channel_tile(stats + 3 * OUT, at, real, True), channel_tile(stats + 4 * OUT, at, real, True)
    if ACT == "prelu":
        slope = tl.load(leak + at * LEAK, mask=real, other=0.0).to(tl.float32)[None, :]
    else:
        slope = 0.0
    guard = 1.0
    if LIFT:
        guard = tl.load(lift)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(rows, BM))
    plain = tl.zeros([BM, BC], tl.float32)
    cross = tl.zeros([BM, BC], tl.float32)
    leaks = tl.zeros([BC], tl.float32)
    for tile in range(first, last):
        row = tl.cast(tile, tl.int64) * BM + tl.arange(0, BM)
        inside = row < rows
        mask = inside[:, None] & real[None, :]
        where = row[:, None] * OUT + at[None, :]
        value = fetch(y, where, mask, EVEN)
        if LIFT:
            value = value * guard
        length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
        f, _s, _h1, _c, _g, _g1 = respond(
            value, length, times, longer, alpha, beta, rho, over, shape, bend, slopes, turns, ROW, ANG, PIECES,
            TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST,
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
    where = tl.program_id(1) * 3 * OUT + at
    tl.store(parts + where, tl.sum(plain, axis=0), mask=real)
    tl.store(parts + where + OUT, tl.sum(cross, axis=0), mask=real)
    if ACT == "prelu":
        tl.store(parts + where + 2 * OUT, leaks, mask=real)


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


@triton.jit
def backward_kernel(
    v: tl.tensor, source: tl.tensor, r: tl.tensor, dr: tl.tensor, leak: tl.tensor, stats: tl.tensor,
    inner: tl.tensor, y: tl.tensor, n: tl.tensor, p: tl.tensor, factor: tl.tensor, stretch: tl.tensor,
    lift: tl.tensor, slopes: tl.tensor, turns: tl.tensor, dy: tl.tensor, t: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, tiles: tl.tensor, GROUPS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    ROW: tl.constexpr, ANG: tl.constexpr, PIECES: tl.constexpr, TURNS: tl.constexpr, ROOT_EPS: tl.constexpr,
    EPS: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, RHO: tl.constexpr, SHAPE: tl.constexpr,
    BEND: tl.constexpr, FACTOR: tl.constexpr, STRETCH: tl.constexpr, LIFT: tl.constexpr, FAST: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, LEAK: tl.constexpr, SOURCE: tl.constexpr,
    LENGTHS: tl.constexpr, SLOTS: tl.constexpr, AT_ALPHA: tl.constexpr, AT_BETA: tl.constexpr,
    AT_RHO: tl.constexpr, AT_SHAPE: tl.constexpr, AT_BEND: tl.constexpr, AT_FACTOR: tl.constexpr,
    AT_STRETCH: tl.constexpr, AT_SLOPES: tl.constexpr, AT_TURNS: tl.constexpr, SLOPE_ROWS: tl.constexpr,
    TURN_ROWS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
) -> None:  # fmt: skip
    """dy = df·∂f/∂y, t = Σ df·∂f/∂n / n over the tile's channels, and by program and channel what parameters need.

    AT_… is the row of a parameter's gradient in `parts`, -1 where it is not needed.
    """
    group = tl.program_id(0) // PARTS
    part = (tl.program_id(0) % PARTS).to(tl.int64)
    channel = (tl.program_id(0) % PARTS) * BC + tl.arange(0, BC)
    real = channel < C
    at = group * C + channel
    OUT: tl.constexpr = GROUPS * C
    alpha, beta = slot(p, at, real, 0, OUT, ALPHA), slot(p, at, real, 1, OUT, BETA)
    rho, shape = slot(p, at, real, 2, OUT, RHO), slot(p, at, real, 3, OUT, SHAPE)
    bend = slot(p, at, real, 4, OUT, BEND)
    over = 1.0 / rho
    times, longer = channel_tile(factor, at, real, FACTOR), channel_tile(stretch, at, real, STRETCH)
    if NORM:
        mean, a = channel_tile(stats, at, real, True), channel_tile(stats + 3 * OUT, at, real, True)
        b = channel_tile(stats + 4 * OUT, at, real, True)
        bent = channel_tile(inner + 4 * OUT, at, real, True)
        level = channel_tile(inner + 3 * OUT, at, real, True) - bent * mean
    else:
        a, b = 1.0, 0.0
    if ACT == "prelu":
        slope = tl.load(leak + at * LEAK, mask=real, other=0.0).to(tl.float32)[None, :]
    else:
        slope = 0.0
    guard = 1.0
    if LIFT:
        guard = tl.load(lift)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(rows, BM))
    s_alpha = tl.zeros([BM if AT_ALPHA >= 0 else 1, BC], tl.float32)
    s_beta = tl.zeros([BM if AT_BETA >= 0 else 1, BC], tl.float32)
    s_rho = tl.zeros([BM if AT_RHO >= 0 else 1, BC], tl.float32)
    s_shape = tl.zeros([BM if AT_SHAPE >= 0 else 1, BC], tl.float32)
    s_bend = tl.zeros([BM if AT_BEND >= 0 else 1, BC], tl.float32)
    s_factor = tl.zeros([BM if AT_FACTOR >= 0 else 1, BC], tl.float32)
    s_stretch = tl.zeros([BM if AT_STRETCH >= 0 else 1, BC], tl.float32)
    s_slopes = tl.zeros([SLOPE_ROWS, BC], tl.float32)
    s_turns = tl.zeros([TURN_ROWS, BC], tl.float32)
    for tile in range(first, last):
        row = tl.cast(tile, tl.int64) * BM + tl.arange(0, BM)
        inside = row < rows
        mask = inside[:, None] & real[None, :]
        where = row[:, None] * OUT + at[None, :]
        value = fetch(y, where, mask, EVEN)
        if LIFT:
            value = value * guard
        length = fetch(n, row * GROUPS + group, inside, EVEN)[:, None]
        f, s, h1, c, g, g1 = respond(
            value, length, times, longer, alpha, beta, rho, over, shape, bend, slopes, turns, ROW, ANG, PIECES,
            TURNS, ROOT_EPS, EPS, FACTOR, STRETCH, FAST,
        )  # fmt: skip
        df, z = incoming(v, source, r, dr, f, a, b, slope, where, mask, row, inside, ACT, SOURCE, LENGTHS, EVEN)
        if ACT == "prelu" and SOURCE != "done":
            df = tl.where(z > 0, df, df * slope)
        if NORM:
            df = a * df + (level + bent * f)
            if not EVEN:
                df = tl.where(inside[:, None], df, 0.0)
        scaled = df
        if FACTOR:
            scaled = df * times
        if ANG == "cosine":
            slope_y = scaled * s
            weighted, base = scaled * value, df * value
            slope_n = tl.sum(tl.broadcast_to(weighted * (h1 - s), [BM, BC]), axis=1)
        else:
            tilt = s * g1
            slope_y = scaled * tilt
            weighted, base = scaled * g * length, df * g * length
            slope_n = tl.sum(scaled * (h1 * g - tilt * c), axis=1)
        if LIFT:
            slope_y = slope_y * guard
        tl.store(dy + where, tl.broadcast_to(slope_y, [BM, BC]).to(dy.dtype.element_ty), mask=mask)
        upon = tl.sum(inverse(length), axis=1)
        if ANG == "cosine":
            slope_n = slope_n * upon
        slope_n = tl.minimum(tl.maximum(slope_n * upon, -FLOAT_MAX), FLOAT_MAX)
        tl.store(t + part * rows * GROUPS + row * GROUPS + group, slope_n, mask=inside)
        u = length
        if STRETCH:
            u = length * longer
        if AT_ALPHA >= 0:
            s_alpha += weighted * radial_slope(ROW, 0, u, s, h1, rho, over, shape)
        if AT_BETA >= 0:
            s_beta += weighted * radial_slope(ROW, 1, u, s, h1, rho, over, shape)
        if AT_RHO >= 0:
            s_rho += weighted * radial_slope(ROW, 2, u, s, h1, rho, over, shape)
        if AT_SHAPE >= 0:
            s_shape += weighted * radial_slope(ROW, 3, u, s, h1, rho, over, shape)
        if AT_BEND >= 0:
            s_bend += scaled * (length * s) * bend_slope(ANG, c, g, bend)
        if AT_FACTOR >= 0:
            s_factor += base * s
        if AT_STRETCH >= 0:
            s_stretch += weighted * (h1 - s) * inverse(longer)
        if AT_SLOPES >= 0:
            ratio = tl.maximum(u * over, 1e-20)
            for j in tl.static_range(PIECES):
                total = tl.sum(weighted * (ramp(ratio, j, PIECES) / ratio), axis=0)
                s_slopes += tl.where((tl.arange(0, SLOPE_ROWS) == j)[:, None], total[None, :], 0.0)
        if AT_TURNS >= 0:
            for j in tl.static_range(TURNS):
                total = tl.sum(scaled * (length * s) * turn(c, j, TURNS), axis=0)
                s_turns += tl.where((tl.arange(0, TURN_ROWS) == j)[:, None], total[None, :], 0.0)
    target = parts + tl.program_id(1).to(tl.int64) * (SLOTS * OUT) + at
    if AT_ALPHA >= 0:
        total = tl.sum(s_alpha * radial_post(ROW, 0, alpha, over), axis=0)
        tl.store(target + AT_ALPHA * OUT, total, mask=real)
    if AT_BETA >= 0:
        total = tl.sum(s_beta * radial_post(ROW, 1, alpha, over), axis=0)
        tl.store(target + AT_BETA * OUT, total, mask=real)
    if AT_RHO >= 0:
        total = tl.sum(s_rho * radial_post(ROW, 2, alpha, over), axis=0)
        tl.store(target + AT_RHO * OUT, total, mask=real)
    if AT_SHAPE >= 0:
        total = tl.sum(s_shape * radial_post(ROW, 3, alpha, over), axis=0)
        tl.store(target + AT_SHAPE * OUT, total, mask=real)
    if AT_BEND >= 0:
        tl.store(target + AT_BEND * OUT, tl.sum(s_bend, axis=0), mask=real)
    if AT_FACTOR >= 0:
        tl.store(target + AT_FACTOR * OUT, tl.sum(s_factor, axis=0), mask=real)
    if AT_STRETCH >= 0:
        tl.store(target + AT_STRETCH * OUT, tl.sum(s_stretch, axis=0), mask=real)
    if AT_SLOPES >= 0:
        j = tl.arange(0, SLOPE_ROWS)
        keep = (j < PIECES)[:, None] & real[None, :]
        tl.store(target[None, :] + (AT_SLOPES + j[:, None]) * OUT, s_slopes, mask=keep)
    if AT_TURNS >= 0:
        j = tl.arange(0, TURN_ROWS)
        keep = (j < TURNS)[:, None] & real[None, :]
        tl.store(target[None, :] + (AT_TURNS + j[:, None]) * OUT, s_turns, mask=keep)
