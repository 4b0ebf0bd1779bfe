"""Triton kernels of robust batch normalization: the passes over x of a forward and of a backward.

x is [images, channels, length] in one piece, with channels last (LAST: rows of channels) or not. Channels last, a
tile is BM rows by BK channels; otherwise BM images by BK positions of one channel, and unit u of a channel is images
u // blocks and positions u % blocks. How samples are cut depends on their number alone, so that the bits of a channel
do not depend on how many there are. Sums leave each program as parts [channels, 5, programs].
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.batch_norm.solve import (
    begin,
    channel_start,
    radius_of,
    sample_offset,
    settle,
    some,
)
from hyperball.kernels.triton.batch_norm.terms import advanced, begun, expectation, influence
from hyperball.kernels.triton.maps import fetch

LEAST = tl.constexpr(1e-3)  # the least curvature, as a share of the samples, that a derivative divides by


@triton.jit
def hypotenuse(s: tl.tensor, ROOT: tl.constexpr) -> tl.tensor:
    """sqrt(s² + ROOT²), ROOT > 0, without overflow."""
    longest = tl.maximum(s, ROOT)
    share = tl.minimum(s, ROOT) / longest
    return tl.where(s == s, longest * tl.sqrt_rn(1.0 + share * share), s)


@triton.jit
def own_channels(C: tl.tensor, LAST: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """The channels of this program, [BK] or [1], and which of them there are."""
    if LAST:
        channel = tl.program_id(0) * BK + tl.arange(0, BK)
    else:
        channel = tl.program_id(0) + tl.arange(0, 1)
    return channel, channel < C


@triton.jit
def tile_of(
    unit: tl.tensor, channel: tl.tensor, real: tl.tensor, images: tl.tensor, length: tl.tensor, blocks: tl.tensor,
    C: tl.tensor, LAST: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Offsets and mask of a unit's tile."""
    if LAST:
        row = tl.cast(unit, tl.int64) * BM + tl.arange(0, BM)
        where = row[:, None] * C + channel[None, :]
        mask = (row < images)[:, None] & real[None, :]
    else:
        image = tl.cast(unit // blocks, tl.int64) * BM + tl.arange(0, BM)
        at = (unit % blocks) * BK + tl.arange(0, BK)
        where = (image[:, None] * C + channel[None, :]) * length + at[None, :]
        mask = (image < images)[:, None] & (at < length)[None, :]
    return where, mask


@triton.jit
def kept(value: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """The value where there is a sample, else 0."""
    if not EVEN:
        value = tl.where(mask, value, 0.0)
    return value


@triton.jit
def folded(tile: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """The sum of a tile by channel."""
    if LAST:
        total = tl.sum(tile, axis=0)
    else:
        total = tl.sum(tl.sum(tile, axis=1, keep_dims=True), axis=0)
    return total


@triton.jit
def put_parts(
    parts: tl.tensor, channel: tl.tensor, real: tl.tensor, a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor,
    e: tl.tensor, program: tl.tensor, programs: tl.tensor, LAST: tl.constexpr,
) -> None:  # fmt: skip
    """Five sums of each channel to their places."""
    place = parts + channel.to(tl.int64) * 5 * programs + program
    tl.store(place, folded(a, LAST), mask=real)
    tl.store(place + programs, folded(b, LAST), mask=real)
    tl.store(place + 2 * programs, folded(c, LAST), mask=real)
    tl.store(place + 3 * programs, folded(d, LAST), mask=real)
    tl.store(place + 4 * programs, folded(e, LAST), mask=real)


@triton.jit
def part_total(
    parts: tl.tensor, channel: tl.tensor, k: tl.constexpr, programs: tl.tensor, BP: tl.constexpr
) -> tl.tensor:
    """Sum k of one channel over the programs, [1]; BP >= programs."""
    part = tl.arange(0, BP)[:, None]
    place = parts + (channel.to(tl.int64) * 5 + k)[None, :] * programs + part
    return tl.sum(tl.load(place, mask=part < programs, other=0.0), axis=0)


@triton.jit
def follow(
    running_mean: tl.tensor, running_var: tl.tensor, m: tl.tensor, s: tl.tensor, channel: tl.tensor, real: tl.tensor,
    momentum: tl.tensor, n: tl.tensor,
) -> None:  # fmt: skip
    """running ← running + momentum·(batch - running), with the variance's factor n/(n - 1)."""
    mean = tl.load(running_mean + channel, mask=real, other=0.0).to(tl.float32)
    var = tl.load(running_var + channel, mask=real, other=0.0).to(tl.float32)
    count = tl.cast(n, tl.float32)
    mean += momentum * (m - mean)
    var += momentum * (s * s * (count / (count - 1.0)) - var)
    tl.store(running_mean + channel, mean.to(running_mean.dtype.element_ty), mask=real)
    tl.store(running_var + channel, var.to(running_var.dtype.element_ty), mask=real)


@triton.jit
def gain_and_bias(
    weight: tl.tensor, bias: tl.tensor, s: tl.tensor, channel: tl.tensor, real: tl.tensor, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ROOT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """weight/sqrt(s² + eps), and the bias."""
    gain = 1.0 / hypotenuse(s, ROOT)
    shift = tl.zeros_like(s)
    if WEIGHT:
        gain = tl.load(weight + channel, mask=real, other=1.0).to(tl.float32) * gain
    if BIAS:
        shift = tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)
    return gain, shift


@triton.jit
def solve_kernel(
    x: tl.tensor, c: tl.tensor, weight: tl.tensor, bias: tl.tensor, running_mean: tl.tensor, running_var: tl.tensor,
    walk: tl.tensor, stats: tl.tensor, y: tl.tensor, n: tl.tensor, length: tl.tensor, C: tl.tensor,
    c_value: tl.tensor, c_stride: tl.tensor, momentum: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr,
    GIVEN: tl.constexpr, TOLERANCE: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, WRITE: tl.constexpr,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TRACK: tl.constexpr, ROOT: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, K: tl.constexpr,
) -> None:  # fmt: skip
    """(m, s) of S channels from BN samples in registers: with WHOLE all, and with WRITE y; else a walk's start."""
    channel = tl.program_id(0) * S + tl.arange(0, S)
    real = channel < C
    bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)
    beta, _change = expectation(P, bound, SHAPE)
    first = channel_start(channel, length, LAST)
    i = tl.arange(0, BN)[:, None]
    where = first[None, :] + sample_offset(i, n, length, C, LAST, not WHOLE)
    inside = i < n
    tile = tl.load(x + where, mask=inside & real[None, :], other=0.0).to(tl.float32)
    count = tl.cast(tl.minimum(n, BN), tl.float32)
    data = (tile, inside, first, real, n, length, C, count)
    m, s = begin(P, SHAPE, x, data, bound, beta, LAST, not WHOLE, K)
    m, s = settle(P, SHAPE, data, bound, beta, m, s, ~real, TOLERANCE, LAST, MODE, 1 if WHOLE else 0, BN)
    if WHOLE:
        tl.store(stats + channel, m, mask=real)
        tl.store(stats + C + channel, s, mask=real)
        if WRITE:
            if TRACK:
                follow(running_mean, running_var, m, s, channel, real, momentum, n)
            gain, shift = gain_and_bias(weight, bias, s, channel, real, WEIGHT, BIAS, ROOT)
            out = (tile - m[None, :]) * gain[None, :] + shift[None, :]
            tl.store(y + where, out.to(y.dtype.element_ty), mask=inside & real[None, :])
    else:
        tl.store(walk + 2 * C + channel, m, mask=real)
        tl.store(walk + 3 * C + channel, s, mask=real)
        tl.store(walk + 9 * C + channel, tl.zeros_like(s), mask=real)


@triton.jit
def sums_kernel(
    x: tl.tensor, c: tl.tensor, walk: tl.tensor, parts: tl.tensor, images: tl.tensor, length: tl.tensor,
    blocks: tl.tensor, C: tl.tensor, units: tl.tensor, each: tl.tensor, c_value: tl.tensor, c_stride: tl.tensor,
    P: tl.constexpr, SHAPE: tl.constexpr, GIVEN: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    TURN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Sums of psi, chi and psi'·t^k for k = 0, 1, 2 at the (m, s) to look at; with TURN from the last samples on.

    Every other pass turns, so that it begins with what the one before has left in the cache.
    """
    channel, real = own_channels(C, LAST, BK)
    if some((tl.load(walk + 9 * C + channel, mask=real, other=1.0) == 0.0) & real):
        m = tl.load(walk + 2 * C + channel, mask=real, other=0.0)[None, :]
        over = (1.0 / tl.load(walk + 3 * C + channel, mask=real, other=1.0))[None, :]
        bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)[None, :]
        program = tl.program_id(1)
        if TURN:
            program = tl.num_programs(1) - 1 - program
        zero = tl.zeros([BM, BK], tl.float32)
        psi, chi, h0, h1, h2 = zero, zero, zero, zero, zero
        for pair in range(program * each, tl.minimum((program + 1) * each, units), 2):
            where, mask = tile_of(pair, channel, real, images, length, blocks, C, LAST, BM, BK)
            then, other = tile_of(pair + 1, channel, real, images, length, blocks, C, LAST, BM, BK)
            first, second = fetch(x, where, mask, EVEN), fetch(x, then, other, EVEN)  # both are on their way
            p, q, a, b, d = influence(P, (first - m) * over, bound, SHAPE, True)
            psi += kept(p, mask, EVEN)
            chi += kept(q, mask, EVEN)
            h0 += kept(a, mask, EVEN)
            h1 += kept(b, mask, EVEN)
            h2 += kept(d, mask, EVEN)
            p, q, a, b, d = influence(P, (second - m) * over, bound, SHAPE, True)
            psi += kept(p, other, EVEN)
            chi += kept(q, other, EVEN)
            h0 += kept(a, other, EVEN)
            h1 += kept(b, other, EVEN)
            h2 += kept(d, other, EVEN)
        put_parts(parts, channel, real, psi, chi, h0, h1, h2, program, tl.num_programs(1), LAST)


@triton.jit
def update_kernel(
    parts: tl.tensor, c: tl.tensor, walk: tl.tensor, n: tl.tensor, C: tl.tensor, programs: tl.tensor,
    c_value: tl.tensor, c_stride: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr, GIVEN: tl.constexpr,
    FIRST: tl.constexpr, TOLERANCE: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """One step of a channel's walk from the sums of all programs."""
    channel = tl.program_id(0) + tl.arange(0, 1)
    place = walk + channel
    settled = tl.load(place + 9 * C) != 0.0
    if some(~settled):
        share = 1.0 / tl.cast(n, tl.float32)
        p, q = part_total(parts, channel, 0, programs, BP) * share, part_total(parts, channel, 1, programs, BP) * share
        a, b = part_total(parts, channel, 2, programs, BP) * share, part_total(parts, channel, 3, programs, BP) * share
        d = part_total(parts, channel, 4, programs, BP) * share
        bound = radius_of(c, c_value, c_stride, channel, channel < C, GIVEN)
        beta, _change = expectation(P, bound, SHAPE)
        next_m, next_s = tl.load(place + 2 * C), tl.load(place + 3 * C)
        if FIRST:
            m, s, psi, chi, h0, h1, h2 = next_m, next_s, p, q, a, b, d
            next_m, next_s, settled = begun(m, s, psi, chi, h0, h1, h2, bound, beta, TOLERANCE)
        else:
            m, s, psi, chi = tl.load(place), tl.load(place + C), tl.load(place + 4 * C), tl.load(place + 5 * C)
            h0, h1, h2 = tl.load(place + 6 * C), tl.load(place + 7 * C), tl.load(place + 8 * C)
            m, s, psi, chi, h0, h1, h2, next_m, next_s, settled = advanced(
                m, s, psi, chi, h0, h1, h2, next_m, next_s, settled, p, q, a, b, d, bound, beta, TOLERANCE
            )
        tl.store(place, m)
        tl.store(place + C, s)
        tl.store(place + 2 * C, next_m)
        tl.store(place + 3 * C, next_s)
        tl.store(place + 4 * C, psi)
        tl.store(place + 5 * C, chi)
        tl.store(place + 6 * C, h0)
        tl.store(place + 7 * C, h1)
        tl.store(place + 8 * C, h2)
        tl.store(place + 9 * C, tl.where(settled, 1.0, 0.0))


@triton.jit
def finish_kernel(
    x: tl.tensor, c: tl.tensor, walk: tl.tensor, stats: tl.tensor, n: tl.tensor, length: tl.tensor, C: tl.tensor,
    c_value: tl.tensor, c_stride: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr, GIVEN: tl.constexpr,
    TOLERANCE: tl.constexpr, LAST: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
) -> None:  # fmt: skip
    """stats = (m, s): those of walks that have settled, and the others' after as many steps as they take."""
    channel = tl.program_id(0) * S + tl.arange(0, S)
    real = channel < C
    place = walk + channel
    next_m, next_s = tl.load(place + 2 * C, mask=real, other=0.0), tl.load(place + 3 * C, mask=real, other=1.0)
    settled = tl.load(place + 9 * C, mask=real, other=1.0) != 0.0
    if some(~settled):
        bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)
        beta, _change = expectation(P, bound, SHAPE)
        m, s = tl.load(place, mask=real, other=0.0), tl.load(place + C, mask=real, other=1.0)
        m, s = tl.where(settled, next_m, m), tl.where(settled, next_s, s)
        first = channel_start(channel, length, LAST)
        data = (x, real, first, real, n, length, C, tl.cast(n, tl.float32))
        next_m, next_s = settle(P, SHAPE, data, bound, beta, m, s, settled, TOLERANCE, LAST, "memory", 1, BN)
    tl.store(stats + channel, next_m, mask=real)
    tl.store(stats + C + channel, next_s, mask=real)


@triton.jit
def normalize_kernel(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, stats: tl.tensor, running_mean: tl.tensor,
    running_var: tl.tensor, y: tl.tensor, n: tl.tensor, images: tl.tensor, length: tl.tensor, blocks: tl.tensor,
    C: tl.tensor, units: tl.tensor, each: tl.tensor, momentum: tl.tensor, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    TRACK: tl.constexpr, ROOT: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, TURN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """y = (x - m)·weight/sqrt(s² + eps) + bias; the first program of a channel lets its running statistics follow."""
    channel, real = own_channels(C, LAST, BK)
    m, s = tl.load(stats + channel, mask=real, other=0.0), tl.load(stats + C + channel, mask=real, other=1.0)
    gain, shift = gain_and_bias(weight, bias, s, channel, real, WEIGHT, BIAS, ROOT)
    program = tl.program_id(1)
    if TURN:
        program = tl.num_programs(1) - 1 - program
    if TRACK and program == 0:
        follow(running_mean, running_var, m, s, channel, real, momentum, n)
    for unit in range(program * each, tl.minimum((program + 1) * each, units)):
        where, mask = tile_of(unit, channel, real, images, length, blocks, C, LAST, BM, BK)
        out = (fetch(x, where, mask, EVEN) - m[None, :]) * gain[None, :] + shift[None, :]
        tl.store(y + where, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def reduce_kernel(
    v: tl.tensor, x: tl.tensor, c: tl.tensor, stats: tl.tensor, parts: tl.tensor, images: tl.tensor,
    length: tl.tensor, blocks: tl.tensor, C: tl.tensor, units: tl.tensor, each: tl.tensor, c_value: tl.tensor,
    c_stride: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr, GIVEN: tl.constexpr, ROOT: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Sums of v, v·(x - m)/sqrt(s² + eps) and psi'·t^k for k = 0, 1, 2: all that the gradients need."""
    channel, real = own_channels(C, LAST, BK)
    m = tl.load(stats + channel, mask=real, other=0.0)[None, :]
    s = tl.load(stats + C + channel, mask=real, other=1.0)
    over, narrow = (1.0 / s)[None, :], (1.0 / hypotenuse(s, ROOT))[None, :]
    bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)[None, :]
    program = tl.program_id(1)
    zero = tl.zeros([BM, BK], tl.float32)
    plain, cross, h0, h1, h2 = zero, zero, zero, zero, zero
    for unit in range(program * each, tl.minimum((program + 1) * each, units)):
        where, mask = tile_of(unit, channel, real, images, length, blocks, C, LAST, BM, BK)
        away, g = fetch(x, where, mask, EVEN) - m, fetch(v, where, mask, EVEN)
        _psi, _chi, a, b, d = influence(P, away * over, bound, SHAPE, False)
        plain += g
        cross += g * (away * narrow)
        h0 += kept(a, mask, EVEN)
        h1 += kept(b, mask, EVEN)
        h2 += kept(d, mask, EVEN)
    put_parts(parts, channel, real, plain, cross, h0, h1, h2, program, tl.num_programs(1), LAST)


@triton.jit
def coefficients_kernel(
    parts: tl.tensor, c: tl.tensor, weight: tl.tensor, stats: tl.tensor, out: tl.tensor, n: tl.tensor, C: tl.tensor,
    programs: tl.tensor, c_value: tl.tensor, c_stride: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr,
    GIVEN: tl.constexpr, WEIGHT: tl.constexpr, ROOT: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """out = dweight, dbias, dc, and gain, shift, growth of dx = gain·v + psi'·(shift + growth·t).

    (shift, growth)·s·n = H⁻¹·(s·g_m, s·g_s), H = mean psi'·(1, t)(1, t)ᵀ with what is nearly singular held at LEAST.
    """
    channel = tl.program_id(0) + tl.arange(0, 1)
    real = channel < C
    count = tl.cast(n, tl.float32)
    plain, cross = part_total(parts, channel, 0, programs, BP), part_total(parts, channel, 1, programs, BP)
    h0, h1 = part_total(parts, channel, 2, programs, BP) / count, part_total(parts, channel, 3, programs, BP) / count
    slope_tt = part_total(parts, channel, 4, programs, BP) / count
    s = tl.load(stats + C + channel)
    divisor = hypotenuse(s, ROOT)
    gain, _shift = gain_and_bias(weight, weight, s, channel, real, WEIGHT, False, ROOT)
    held, h2 = tl.maximum(h0, LEAST), tl.maximum(slope_tt, LEAST)
    determinant = tl.maximum(held * h2 - h1 * h1, held * h2 * LEAST)
    first, second = -plain * (gain * s), -cross * (gain * s) * (s / divisor)
    shift = (h2 * first - h1 * second) / determinant
    growth = (held * second - h1 * first) / determinant
    bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)
    beta, change = expectation(P, bound, SHAPE)
    tl.store(out + channel, cross)
    tl.store(out + C + channel, plain)
    tl.store(out + 2 * C + channel, (growth * (beta - slope_tt - change * 0.5) - shift * h1) / bound)
    tl.store(out + 3 * C + channel, gain)
    tl.store(out + 4 * C + channel, shift / s / count)
    tl.store(out + 5 * C + channel, growth / s / count)


@triton.jit
def apply_kernel(
    v: tl.tensor, x: tl.tensor, c: tl.tensor, stats: tl.tensor, coefficients: tl.tensor, dx: tl.tensor,
    images: tl.tensor, length: tl.tensor, blocks: tl.tensor, C: tl.tensor, units: tl.tensor, each: tl.tensor,
    c_value: tl.tensor, c_stride: tl.tensor, P: tl.constexpr, SHAPE: tl.constexpr, GIVEN: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """dx = gain·v + psi'·shift + psi'·t·growth, from the last samples on."""
    channel, real = own_channels(C, LAST, BK)
    m = tl.load(stats + channel, mask=real, other=0.0)[None, :]
    over = (1.0 / tl.load(stats + C + channel, mask=real, other=1.0))[None, :]
    gain = tl.load(coefficients + 3 * C + channel, mask=real, other=0.0)[None, :]
    shift = tl.load(coefficients + 4 * C + channel, mask=real, other=0.0)[None, :]
    growth = tl.load(coefficients + 5 * C + channel, mask=real, other=0.0)[None, :]
    bound = radius_of(c, c_value, c_stride, channel, real, GIVEN)[None, :]
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    for unit in range(program * each, tl.minimum((program + 1) * each, units)):
        where, mask = tile_of(unit, channel, real, images, length, blocks, C, LAST, BM, BK)
        t = (fetch(x, where, mask, EVEN) - m) * over
        _psi, _chi, slope, slope_t, _slope_tt = influence(P, t, bound, SHAPE, False)
        g = fetch(v, where, mask, EVEN) * gain + slope * shift + slope_t * growth
        tl.store(dx + where, g.to(dx.dtype.element_ty), mask=mask)
