"""Triton kernels that end a backward: the filters' and the parameters' gradients, beside the transposed box sums."""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.maps import FLOOR, bounded, channels_last, transposed_sums
from hyperball.kernels.triton.rows import inverse


@triton.jit
def column_sum(parts: tl.tensor, programs: tl.tensor, stride: tl.constexpr, BP: tl.constexpr) -> tl.tensor:
    """Σ over the programs of what each of them left at `parts`."""
    total = tl.zeros([BP], tl.float32)
    for first in range(0, programs, BP):
        at = first + tl.arange(0, BP)
        total += tl.load(parts + at.to(tl.int64) * stride, mask=at < programs, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def finish_filter(
    weight: tl.tensor, grad: tl.tensor, dw: tl.tensor, start: tl.tensor, scale: tl.tensor, share: tl.tensor,
    K: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """dw = (G - ŵ⟨ŵ, G⟩)·scale, scale = 1/m, for the filter that begins at `start`; G is grad·share."""
    along = tl.zeros([BK], tl.float32)
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        unit_filter = tl.load(weight + start + at, mask=at < K, other=0.0).to(tl.float32) * scale
        where = start + channels_last(at, K, TAPS)
        along += unit_filter * (tl.load(grad + where, mask=at < K, other=0.0).to(tl.float32) * share)
    dot = tl.sum(along, axis=0)
    for first in range(0, K, BK):
        at = first + tl.arange(0, BK)
        unit_filter = tl.load(weight + start + at, mask=at < K, other=0.0).to(tl.float32) * scale
        where = start + channels_last(at, K, TAPS)
        g = tl.load(grad + where, mask=at < K, other=0.0).to(tl.float32) * share
        tl.store(dw + start + at, ((g - unit_filter * dot) * scale).to(dw.dtype.element_ty), mask=at < K)


@triton.jit
def finish_channel(
    o: tl.tensor, weight: tl.tensor, grad: tl.tensor, m: tl.tensor, scalars: tl.tensor, dw: tl.tensor,
    parts: tl.tensor, sums: tl.tensor, rho: tl.tensor, pulls: tl.tensor, programs: tl.tensor, OUT: tl.constexpr,
    K: tl.constexpr, SLOTS: tl.constexpr, RHO_SLOT: tl.constexpr, UNIT: tl.constexpr, STEP_RHO: tl.constexpr,
    RATIO: tl.constexpr, LIFT: tl.constexpr, WEIGHT: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr,
    BP: tl.constexpr,
) -> None:  # fmt: skip
    """Output channel o: dw = (G - ŵ⟨ŵ, G⟩)/m, and the column sums of the parameters' gradients.

    A relative radius gives its ratio's gradient, 2·ratio·unit·dρ, and its pull on the unit, (ratio² + 1e-4)·dρ.
    """
    for slot in tl.static_range(SLOTS):
        value = column_sum(parts + slot * OUT + o, programs, SLOTS * OUT, BP)
        if slot == RHO_SLOT and UNIT != "none":
            if STEP_RHO >= 0:
                ratio = tl.load(rho + o * STEP_RHO).to(tl.float32)
                tl.store(pulls + o, (ratio * ratio + FLOOR) * value)
                value = value * (2.0 * ratio * tl.load(scalars))
            else:
                tl.store(pulls + o, value * (RATIO + FLOOR))
        tl.store(sums + slot * OUT + o, value.to(sums.dtype.element_ty))
    if WEIGHT:
        share = 1.0
        if LIFT:
            share = 1.0 / tl.load(scalars + 1)
        finish_filter(weight, grad, dw, o.to(tl.int64) * K, inverse(tl.load(m + o)), share, K, TAPS, BK)


@triton.jit
def finish_kernel(
    weight: tl.tensor, grad: tl.tensor, m: tl.tensor, scalars: tl.tensor, dw: tl.tensor, parts: tl.tensor,
    sums: tl.tensor, rho: tl.tensor, pulls: tl.tensor, programs: tl.tensor, OUT: tl.constexpr, K: tl.constexpr,
    SLOTS: tl.constexpr, RHO_SLOT: tl.constexpr, UNIT: tl.constexpr, STEP_RHO: tl.constexpr, RATIO: tl.constexpr,
    LIFT: tl.constexpr, WEIGHT: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
) -> None:  # fmt: skip
    """`finish_channel` for every output channel."""
    finish_channel(
        tl.program_id(0), weight, grad, m, scalars, dw, parts, sums, rho, pulls, programs, OUT, K, SLOTS, RHO_SLOT,
        UNIT, STEP_RHO, RATIO, LIFT, WEIGHT, TAPS, BK, BP,
    )  # fmt: skip


@triton.jit
def finish_box_kernel(
    weight: tl.tensor, grad: tl.tensor, m: tl.tensor, scalars: tl.tensor, dw: tl.tensor, parts: tl.tensor,
    sums: tl.tensor, rho: tl.tensor, pulls: tl.tensor, t: tl.tensor, n: tl.tensor, along: tl.tensor, even: tl.tensor,
    programs: tl.tensor, positions: tl.tensor, blocks: tl.tensor, D: tl.tensor, H: tl.tensor, W: tl.tensor,
    OD: tl.tensor, OH: tl.tensor, OW: tl.tensor, OUT: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr,
    RHO_SLOT: tl.constexpr, UNIT: tl.constexpr, STEP_RHO: tl.constexpr, RATIO: tl.constexpr, LIFT: tl.constexpr,
    WEIGHT: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, G: tl.constexpr, KD: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, ED: tl.constexpr, EH: tl.constexpr, EW: tl.constexpr, ROOT_EPS: tl.constexpr,
    PULLS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """`finish_channel` for every output channel, and beside it boxᵀ(t) and, with PULLS, boxᵀ(1/sqrt(n² + eps))."""
    program = tl.program_id(0)
    if program < OUT:
        finish_channel(
            program, weight, grad, m, scalars, dw, parts, sums, rho, pulls, programs, OUT, K, SLOTS, RHO_SLOT, UNIT,
            STEP_RHO, RATIO, LIFT, WEIGHT, TAPS, BK, BP,
        )  # fmt: skip
    else:
        total, level, where, inside = transposed_sums(
            t, n, program - OUT, positions, blocks, D, H, W, OD, OH, OW, G, KD, KH, KW, SD, SH, SW, PD, PH, PW, ED, EH,
            EW, ROOT_EPS, PULLS, PARTS, BLOCK,
        )  # fmt: skip
        tl.store(along + where, bounded(total), mask=inside)
        if PULLS:
            tl.store(even + where, bounded(level), mask=inside)
