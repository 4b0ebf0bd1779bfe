"""Triton kernels that find the location and scale of every channel: on a sample, on all samples, and what these leave.

`solve_kernel` keeps samples of its channels in registers: all of them where they are few, which ends in y, else a
spread of them, whose estimate is within a few percent. `sums_kernel` and `update_kernel` are one step of Newton's
each, over all samples; programs whose channels have settled return at once. `finish_kernel` walks on with the channels
that so many steps leave, and nests brackets around what has not settled then, however long that takes.
A walk, [10, C], is m, s, the (m, s) to look at next, the totals at the former, and whether the channel has settled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.batch_norm.terms import (
    EPS,
    FARTHEST,
    LEAST_SCALE,
    advanced,
    balanced,
    begun,
    influence,
)

STEPS = tl.constexpr(16)  # Newton steps before a channel is handed to nested brackets
INNER, OUTER = tl.constexpr(60), tl.constexpr(80)  # bounds of the brackets' loops, which end when they are narrow
GREATEST = tl.constexpr(3.4028234663852886e38 / 4)


@triton.jit
def some(condition: tl.tensor) -> tl.tensor:
    """Whether it holds for any channel of the program."""
    return tl.max(condition.to(tl.int32), axis=0) > 0


@triton.jit
def radius_of(
    c: tl.tensor, c_value: tl.tensor, c_stride: tl.tensor, channel: tl.tensor, real: tl.tensor, GIVEN: tl.constexpr
) -> tl.tensor:
    """c by channel, of a tensor or one number."""
    if GIVEN:
        value = tl.load(c + channel * c_stride, mask=real, other=1.0).to(tl.float32)
    else:
        value = tl.zeros_like(channel).to(tl.float32) + c_value
    return tl.where(value > FARTHEST, FARTHEST, value)


@triton.jit
def channel_start(channel: tl.tensor, length: tl.tensor, LAST: tl.constexpr) -> tl.tensor:
    """Where a channel's first sample lies."""
    start = channel.to(tl.int64)
    if not LAST:
        start = start * length
    return start


@triton.jit
def sample_offset(
    i: tl.tensor, n: tl.tensor, length: tl.tensor, channels: tl.tensor, LAST: tl.constexpr, SPREAD: tl.constexpr
) -> tl.tensor:
    """Where sample i of n lies behind its channel's first; SPREAD takes them at multiples of the golden ratio."""
    i = i.to(tl.int64)
    if SPREAD:
        i = ((((i * 2654435769) & 4294967295) >> 8) * n) >> 24
    if LAST:
        offset = i * channels
    else:
        offset = (i // length) * channels * length + i % length
    return offset


@triton.jit
def totals(
    P: tl.constexpr, SHAPE: tl.constexpr, data: tl.tensor, m: tl.tensor, s: tl.tensor, c: tl.tensor,
    LAST: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Means of psi, chi and psi'·t^k for k = 0, 1, 2 at (m, s): over the tile in `data`, or over all samples.

    MODE says where samples are: "full" in a tile, "part" in some of one (`inside`), "memory" behind a pointer.
    """
    x, inside, first, real, n, length, channels, count = data
    middle, over, bound = m[None, :], (1.0 / s)[None, :], c[None, :]
    if MODE == "memory":
        zero = tl.zeros([BN, m.shape[0]], tl.float32)
        psi, chi, h0, h1, h2 = zero, zero, zero, zero, zero
        for tile in range(0, tl.cdiv(n, BN)):
            i = tl.cast(tile, tl.int64) * BN + tl.arange(0, BN)[:, None]
            mask = i < n
            where = first[None, :] + sample_offset(i, n, length, channels, LAST, False)
            t = (tl.load(x + where, mask=mask & real[None, :], other=0.0).to(tl.float32) - middle) * over
            p, q, a, b, d = influence(P, t, bound, SHAPE, True)
            psi += tl.where(mask, p, 0.0)
            chi += tl.where(mask, q, 0.0)
            h0 += tl.where(mask, a, 0.0)
            h1 += tl.where(mask, b, 0.0)
            h2 += tl.where(mask, d, 0.0)
    else:
        t = (x - middle) * over
        psi, chi, h0, h1, h2 = influence(P, t, bound, SHAPE, True)
        if MODE == "part":
            psi, chi, h0 = tl.where(inside, psi, 0.0), tl.where(inside, chi, 0.0), tl.where(inside, h0, 0.0)
            h1, h2 = tl.where(inside, h1, 0.0), tl.where(inside, h2, 0.0)
    share = 1.0 / count
    return (
        tl.sum(psi, axis=0) * share, tl.sum(chi, axis=0) * share, tl.sum(h0, axis=0) * share,
        tl.sum(h1, axis=0) * share, tl.sum(h2, axis=0) * share,
    )  # fmt: skip


@triton.jit
def extremes(data: tl.tensor, LAST: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr) -> tl.tensor:
    """The smallest and largest finite sample of each channel."""
    x, inside, first, real, n, length, channels, _count = data
    if MODE == "memory":
        low = tl.full([BN, first.shape[0]], GREATEST, tl.float32)
        high = -low
        for tile in range(0, tl.cdiv(n, BN)):
            i = tl.cast(tile, tl.int64) * BN + tl.arange(0, BN)[:, None]
            mask = (i < n) & real[None, :]
            where = first[None, :] + sample_offset(i, n, length, channels, LAST, False)
            value = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.where(mask, value, GREATEST))
            high = tl.maximum(high, tl.where(mask, value, -GREATEST))
    else:
        low, high = tl.where(inside, x, GREATEST), tl.where(inside, x, -GREATEST)
    lowest, highest = tl.min(low, axis=0), tl.max(high, axis=0)
    lowest = tl.minimum(tl.maximum(lowest, -GREATEST), GREATEST)
    return lowest, tl.minimum(tl.maximum(highest, -GREATEST), GREATEST)


@triton.jit
def walked(
    P: tl.constexpr, SHAPE: tl.constexpr, data: tl.tensor, c: tl.tensor, beta: tl.tensor, m: tl.tensor, s: tl.tensor,
    settled: tl.tensor, TOLERANCE: tl.constexpr, LAST: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(m, s) after Newton steps until all channels have settled, STEPS of them at most; and which have."""
    next_m, next_s = m, s
    zero = tl.zeros_like(s)
    psi, chi, h0, h1, h2 = zero, zero, zero, zero, zero
    k = 0
    while some(~settled) & (k <= STEPS):
        p, q, a, b, d = totals(P, SHAPE, data, next_m, next_s, c, LAST, MODE, BN)
        if k == 0:
            psi, chi, h0, h1, h2 = p, q, a, b, d
            next_m, next_s, rest = begun(m, s, psi, chi, h0, h1, h2, c, beta, TOLERANCE)
            settled = settled | rest
        else:
            m, s, psi, chi, h0, h1, h2, next_m, next_s, settled = advanced(
                m, s, psi, chi, h0, h1, h2, next_m, next_s, settled, p, q, a, b, d, c, beta, TOLERANCE
            )
        k += 1
    return tl.where(settled, next_m, m), tl.where(settled, next_s, s), settled


@triton.jit
def located(
    P: tl.constexpr, SHAPE: tl.constexpr, data: tl.tensor, c: tl.tensor, m: tl.tensor, s: tl.tensor, low: tl.tensor,
    high: tl.tensor, running: tl.tensor, LAST: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """m with mean psi((x - m)/s) = 0, and the totals there: Newton inside the bracket, bisection elsewhere."""
    last = high - low
    before = high - low
    zero = tl.zeros_like(s)
    chi, h0, h1, h2 = zero, zero, zero, zero
    k = 0
    while some(running) & (k < INNER):
        psi, chi, h0, h1, h2 = totals(P, SHAPE, data, m, s, c, LAST, MODE, BN)
        low, high = tl.where(psi >= 0.0, m, low), tl.where(psi <= 0.0, m, high)
        step, rounding = s * psi / tl.maximum(h0, 1e-6), (tl.abs(m) + s) * (4.0 * EPS)
        size = tl.abs(step)
        fits = (m + step >= low) & (m + step <= high) & (2.0 * size <= before) & (size > rounding)
        target = tl.where(fits, m + step, low * 0.5 + high * 0.5)
        running = running & ~((size <= rounding) & balanced(psi, chi, h0, c)) & (high - low > 2.0 * rounding)
        size = tl.abs(target - m)
        m = tl.where(running, target, m)
        before, last = tl.where(running, last, before), tl.where(running, size, last)
        k += 1
    return m, chi, h0, h1, h2


@triton.jit
def bracketed(
    P: tl.constexpr, SHAPE: tl.constexpr, data: tl.tensor, c: tl.tensor, beta: tl.tensor, m: tl.tensor, s: tl.tensor,
    running: tl.tensor, LAST: tl.constexpr, MODE: tl.constexpr, BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(m, s) where mean chi at m(s) crosses beta/2, by brackets in log s; the least scale where it never does.

    Newton's step is that of log chi, which is straight in log s for a quadratic; its reach doubles until there is a
    bound on either side.
    """
    low_m, high_m = extremes(data, LAST, MODE, BN)
    low = tl.zeros_like(s) + tl.log(tl.full([1], LEAST_SCALE, tl.float32))
    widest = tl.maximum((high_m * 0.5 - low_m * 0.5) / tl.sqrt(beta), LEAST_SCALE)
    high = tl.maximum(tl.log(widest) + 0.6931471805599453, low)
    below, above = low > high, low > high
    reach, last, before = tl.zeros_like(s) + 2.0, high - low, high - low
    spot = tl.minimum(tl.maximum(tl.log(s), low), high)
    k = 0
    while some(running) & (k < OUTER):
        m = tl.minimum(tl.maximum(m, low_m), high_m)
        m, chi, h0, h1, h2 = located(
            P, SHAPE, data, c, m, tl.exp(spot), low_m, high_m, running, LAST, MODE, BN
        )  # fmt: skip
        up = chi > beta * 0.5
        low, high = tl.where(running & up, spot, low), tl.where(running & ~up, spot, high)
        below, above = below | (running & up), above | (running & ~up)
        both = below & above
        fall = (h2 - h1 * h1 / tl.maximum(h0, 1e-6)) / tl.maximum(chi, LEAST_SCALE)
        step = tl.log(tl.maximum(2.0 * chi / beta, LEAST_SCALE)) / tl.maximum(fall, 1e-6)
        step = tl.minimum(tl.maximum(step, -reach), reach)
        fits = (spot + step > low) & (spot + step < high) & (~both | (2.0 * tl.abs(step) <= before))
        outside = tl.where(both, (low + high) * 0.5, tl.minimum(tl.maximum(spot + step, low), high))
        target = tl.where(fits, spot + step, outside)
        size = tl.abs(target - spot)
        running = running & (size > (1.0 + tl.abs(spot)) * (8.0 * EPS))
        before, last = tl.where(running, last, before), tl.where(running, size, last)
        reach = tl.where(both, reach, 2.0 * reach)
        spot = tl.where(running, target, spot)
        k += 1
    return m, tl.exp(spot)


@triton.jit
def settle(
    P: tl.constexpr, SHAPE: tl.constexpr, data: tl.tensor, c: tl.tensor, beta: tl.tensor, m: tl.tensor, s: tl.tensor,
    settled: tl.tensor, TOLERANCE: tl.constexpr, LAST: tl.constexpr, MODE: tl.constexpr, RESCUE: tl.constexpr,
    BN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The minimum from (m, s): joint steps; with RESCUE brackets for what these leave, and joint steps from there."""
    attempt = 0
    while some(~settled) & (attempt <= RESCUE):
        if RESCUE:  # noqa: SIM102 (what is compiled, and what is run)
            if attempt == 1:
                inner_m, inner_s = bracketed(P, SHAPE, data, c, beta, m, s, ~settled, LAST, MODE, BN)
                m, s = tl.where(settled, m, inner_m), tl.where(settled, s, inner_s)
        closer_m, closer_s, close = walked(P, SHAPE, data, c, beta, m, s, settled, TOLERANCE, LAST, MODE, BN)
        taken = ~settled & (close | (attempt == 0))
        m, s = tl.where(taken, closer_m, m), tl.where(taken, closer_s, s)
        settled = settled | close
        attempt += 1
    return m, s


@triton.jit
def middle_of(a: tl.tensor, b: tl.tensor, first: tl.tensor, other: tl.tensor, k: tl.tensor) -> tl.tensor:
    """The median of k values by channel, from their ranks: a is [K, 1, S], b the same values as [1, K, S]."""
    behind = (b < a) | ((b == a) & (other < first))
    rank = tl.sum(tl.where(behind & (other < k), 1, 0), axis=1, keep_dims=True)
    chosen = (rank == k // 2) & (first < k)
    return tl.sum(tl.sum(tl.where(chosen, a, 0.0), axis=1), axis=0)


@triton.jit
def apart(value: tl.tensor) -> tl.tensor:
    """The same numbers by channel, in a layout of their own: that of a tile of ranks would spread to the samples'."""
    return tl.gather(value, tl.arange(0, value.shape[0]), axis=0)


@triton.jit
def begin(
    P: tl.constexpr, SHAPE: tl.constexpr, x: tl.tensor, data: tl.tensor, c: tl.tensor, beta: tl.tensor,
    LAST: tl.constexpr, SPREAD: tl.constexpr, K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A median of K samples, and the median of |x - median| in units of a standard deviation.

    Where that is 0, the mean of |x - median| over the tile; where more than 1 - beta/(the largest 2·chi) of the
    tile are the median, the minimum is at s = 0, which steps approach slowly, so it starts there.
    """
    tile, inside, start, real, n, length, channels, count = data
    i = tl.arange(0, K)
    k = tl.minimum(n, K).to(tl.int32)
    spread = i.to(tl.int64)
    if not SPREAD:
        spread = tl.where(n > K, spread * n // K, spread)
    offset = sample_offset(spread, n, length, channels, LAST, SPREAD)
    first, other = i[:, None, None], i[None, :, None]
    base = start[None, None, :]
    a = tl.load(x + offset[:, None, None] + base, mask=(first < k) & real[None, None, :], other=0.0).to(tl.float32)
    b = tl.load(x + offset[None, :, None] + base, mask=(other < k) & real[None, None, :], other=0.0).to(tl.float32)
    ranked = middle_of(a, b, first, other, k)
    ranked = tl.minimum(tl.maximum(ranked, -GREATEST), GREATEST)
    about = ranked[None, None, :]
    m = apart(ranked)
    s = apart(1.4826 * middle_of(tl.abs(a - about), tl.abs(b - about), first, other, k))
    away = tl.where(inside, tl.abs(tile - m[None, :]), 0.0)
    s = tl.where(s > 0.0, s, 1.2533 * tl.sum(away * (1.0 / count), axis=0))
    same = tl.sum(tl.where(inside & (away == 0.0), 1.0, 0.0), axis=0) / count
    _psi, largest, _slope, _slope_t, _slope_tt = influence(P, tl.zeros_like(c) + FARTHEST, c, SHAPE, True)
    s = tl.where(s < GREATEST, s, 1.0)
    s = tl.where(same > 1.05 - beta / (2.0 * largest), 0.0, s)
    return m, tl.maximum(s, LEAST_SCALE)
