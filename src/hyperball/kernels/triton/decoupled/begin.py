"""Triton kernels that come before a convolution: unit filters and parameters, alone or beside the norms of patches."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.maps import FLOAT_MAX, FLOOR, channels_last, follow, put_norms
from hyperball.kernels.triton.rows import inverse


@triton.jit
def mean_of_sums(sums: tl.tensor, blocks: tl.tensor, positions: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Σ sums / positions."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < blocks, other=0.0).to(tl.float64)
    return (tl.sum(total, axis=0) / positions).to(tl.float32)


@triton.jit
def overflow_guard(peaks: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A power of two that keeps |y| <= n within float16; 1 as a rule."""
    peak = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.load(peaks + at, mask=at < blocks, other=0.0))
    bound = tl.maximum(tl.max(peak, axis=0), 1.0)
    return tl.exp2(tl.maximum(tl.ceil(tl.log2(bound)) - 15.0, 0.0))


@triton.jit
def put(
    p: tl.tensor, given: tl.tensor, o: tl.tensor, SLOT: tl.constexpr, STEP: tl.constexpr, OUT: tl.constexpr
) -> None:  # fmt: skip
    """Row SLOT of p for channel o, from a parameter of one value (STEP 0) or one a channel (1)."""
    if STEP >= 0:
        tl.store(p + SLOT * OUT + o, tl.load(given + o * STEP).to(tl.float32))


@triton.jit
def filter_length(weight: tl.tensor, start: tl.tensor, K: tl.constexpr, BK: tl.constexpr) -> tl.tensor:
    """‖w‖ of the filter of K entries that begins at `start`; squares are summed in float64."""
    total = tl.zeros([BK], tl.float64)
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        value = tl.load(weight + start + at, mask=at < K, other=0.0).to(tl.float64)
        total += value * value
    return tl.minimum(tl.sqrt(tl.sum(total, axis=0)), FLOAT_MAX).to(tl.float32)


@triton.jit
def put_radius(
    p: tl.tensor, rho: tl.tensor, o: tl.tensor, mean: tl.tensor, STEP: tl.constexpr, RATIO: tl.constexpr,
    OUT: tl.constexpr,
) -> None:  # fmt: skip
    """A radius in units of the mean length: (ratio² + 1e-4)·mean, or (RATIO + 1e-4)·mean where it is a number."""
    if STEP >= 0:
        ratio = tl.load(rho + o * STEP).to(tl.float32)
        tl.store(p + 2 * OUT + o, (ratio * ratio + FLOOR) * mean)
    else:
        tl.store(p + 2 * OUT + o, mean * (RATIO + FLOOR))


@triton.jit
def prepare_channel(
    o: tl.tensor, weight: tl.tensor, filters: tl.tensor, m: tl.tensor, p: tl.tensor, scalars: tl.tensor,
    alpha: tl.tensor, beta: tl.tensor, rho: tl.tensor, shape: tl.tensor, bend: tl.tensor, parts: tl.tensor,
    running: tl.tensor, batches: tl.tensor, blocks: tl.tensor, positions: tl.tensor, OUT: tl.constexpr,
    K: tl.constexpr, STEP_ALPHA: tl.constexpr, STEP_BETA: tl.constexpr, STEP_RHO: tl.constexpr,
    STEP_SHAPE: tl.constexpr, STEP_BEND: tl.constexpr, UNIT: tl.constexpr, RATIO: tl.constexpr, LIFT: tl.constexpr,
    TRACK: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Output channel o: its filter over its length m (over the lift in float16), and its parameters, a column of p.

    `scalars` are the unit of a relative radius and the lift; with TRACK the running mean follows the unit.
    """
    start = o.to(tl.int64) * K
    length = filter_length(weight, start, K, BK)
    tl.store(m + o, length)
    factor = inverse(length)
    if LIFT:
        guard = overflow_guard(parts + blocks, blocks, BLOCK)
        tl.store(scalars + 1, guard, mask=o == 0)
        factor = factor / guard
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        value = tl.load(weight + start + at, mask=at < K, other=0.0).to(tl.float32)
        where = start + channels_last(at, K, TAPS)
        tl.store(filters + where, (value * factor).to(filters.dtype.element_ty), mask=at < K)
    put(p, alpha, o, 0, STEP_ALPHA, OUT)
    put(p, beta, o, 1, STEP_BETA, OUT)
    put(p, shape, o, 3, STEP_SHAPE, OUT)
    put(p, bend, o, 4, STEP_BEND, OUT)
    if UNIT == "none":
        put(p, rho, o, 2, STEP_RHO, OUT)
    else:
        if UNIT == "batch":
            mean = mean_of_sums(parts, blocks, positions, BLOCK)
        else:
            mean = tl.load(running).to(tl.float32)
        tl.store(scalars, mean, mask=o == 0)
        put_radius(p, rho, o, mean, STEP_RHO, RATIO, OUT)
        if TRACK:
            follow(running, batches, mean, o == 0)


@triton.jit
def prepare_kernel(
    weight: tl.tensor, filters: tl.tensor, m: tl.tensor, p: tl.tensor, scalars: tl.tensor, alpha: tl.tensor,
    beta: tl.tensor, rho: tl.tensor, shape: tl.tensor, bend: tl.tensor, parts: tl.tensor, running: tl.tensor,
    batches: tl.tensor, blocks: tl.tensor, positions: tl.tensor, OUT: tl.constexpr, K: tl.constexpr,
    STEP_ALPHA: tl.constexpr, STEP_BETA: tl.constexpr, STEP_RHO: tl.constexpr, STEP_SHAPE: tl.constexpr,
    STEP_BEND: tl.constexpr, UNIT: tl.constexpr, RATIO: tl.constexpr, LIFT: tl.constexpr, TRACK: tl.constexpr,
    TAPS: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`prepare_channel` for every output channel."""
    prepare_channel(
        tl.program_id(0), weight, filters, m, p, scalars, alpha, beta, rho, shape, bend, parts, running, batches,
        blocks, positions, OUT, K, STEP_ALPHA, STEP_BETA, STEP_RHO, STEP_SHAPE, STEP_BEND, UNIT, RATIO, LIFT, TRACK,
        TAPS, BK, BLOCK,
    )  # fmt: skip


@triton.jit
def prepare_box_kernel(
    weight: tl.tensor, filters: tl.tensor, m: tl.tensor, p: tl.tensor, scalars: tl.tensor, alpha: tl.tensor,
    beta: tl.tensor, rho: tl.tensor, shape: tl.tensor, bend: tl.tensor, running: tl.tensor, r: tl.tensor, n: tl.tensor,
    blocks: tl.tensor, D: tl.tensor, H: tl.tensor, W: tl.tensor, OD: tl.tensor, OH: tl.tensor, OW: tl.tensor,
    OUT: tl.constexpr, K: tl.constexpr, STEP_ALPHA: tl.constexpr, STEP_BETA: tl.constexpr, STEP_RHO: tl.constexpr,
    STEP_SHAPE: tl.constexpr, STEP_BEND: tl.constexpr, UNIT: tl.constexpr, RATIO: tl.constexpr, TAPS: tl.constexpr,
    BK: tl.constexpr, G: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ED: tl.constexpr,
    EH: tl.constexpr, EW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`prepare_channel` for every output channel, and beside it the norms: for units that do not depend on them."""
    program = tl.program_id(0)
    if program < OUT:
        prepare_channel(
            program, weight, filters, m, p, scalars, alpha, beta, rho, shape, bend, m, running, m, blocks, blocks, OUT,
            K, STEP_ALPHA, STEP_BETA, STEP_RHO, STEP_SHAPE, STEP_BEND, UNIT, RATIO, False, False, TAPS, BK, BLOCK,
        )  # fmt: skip
    else:
        put_norms(
            r, n, program - OUT, blocks, D, H, W, OD, OH, OW, G, KD, KH, KW, SD, SH, SW, PD, PH, PW, ED, EH, EW, BLOCK
        )
