"""The estimates of robust batch normalization as Triton functions: influence, expectations and steps of Newton's.

The formulas are those of `operation` and `solver` in `hyperball.kernels.batch_norm`; `PENALTIES` names the rows that
have a function here, all convex. What belongs to a channel is [S]; samples are [samples, S], or of one channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperball.kernels.triton.pooling.terms import log_one_plus_square
from hyperball.kernels.triton.rows import tanh_of

PENALTIES = ("quadratic", "huber", "pseudo_huber", "barron")
FARTHEST = tl.constexpr(1e15)  # residuals, in units of s, beyond which they are not told apart
LEAST_SCALE = tl.constexpr(1.1754943508222875e-34)  # the s that stands for 0
EPS = tl.constexpr(1.1920928955078125e-07)
LONGEST = tl.constexpr(100.0)  # the longest step, in units of s and as a factor of s
NODES = tl.constexpr(128)  # of the expectations' trapezoids, in log z from -9 to 2.4


@triton.jit
def held(t: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """min(max(t, -bound), bound); NaN stays."""
    low = tl.maximum(t, -bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def influence(P: tl.constexpr, t: tl.tensor, c: tl.tensor, shape: tl.constexpr, CHI: tl.constexpr) -> tl.tensor:
    """psi, chi = t·psi - phi (psi where CHI is not asked for), and psi'·t^k for k = 0, 1, 2, of residuals t."""
    if P == "huber":
        psi = held(t, c)
        inside = tl.abs(t) <= c
        chi = psi * psi * 0.5
        slope = tl.where(inside, 1.0, 0.0)
        slope_t = tl.where(inside, t, 0.0)
        slope_tt = slope_t * slope_t
    else:
        t = held(t, FARTHEST)
        if P == "quadratic":
            psi, slope, slope_t = t, tl.zeros_like(t) + 1.0, t
            chi = t * t * 0.5
        elif P == "pseudo_huber":
            ratio = t * (1.0 / c)
            gain = tl.rsqrt(ratio * ratio + 1.0)
            psi, slope = t * gain, gain * gain * gain
            slope_t = slope * t
            chi = psi
            if CHI:
                chi = psi * psi / (1.0 + gain)
        else:
            tl.static_assert(P == "barron")
            b: tl.constexpr = 2.0 - shape
            log_t, share = log_one_plus_square(tl.abs(t) * (1.0 / (c * b**0.5)))
            gain = tl.exp(log_t * (shape * 0.5 - 1.0))
            psi, slope = t * gain, gain * (1.0 - share * b)
            slope_t = slope * t
            chi = psi
            if CHI:
                missing = tanh_of(log_t * (0.5 - shape * 0.25)) * (1.0 + gain)
                chi = (t * psi) * (1.0 - 1.0 / shape) + c * (c * missing) * (b / shape)
        slope_tt = slope_t * t
    return psi, chi, slope, slope_t, slope_tt


@triton.jit
def erfc(z: tl.tensor) -> tl.tensor:
    """1 - erf(z) for z >= 0 to a relative 1e-7, by the series of Press et al., *Numerical Recipes*, for erfcc."""
    t = 1.0 / (1.0 + 0.5 * z)
    series = -0.82215223 + t * 0.17087277
    series = -1.13520398 + t * (1.48851587 + t * series)
    series = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * series))
    series = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * series))
    return t * tl.exp(series - z * z)


@triton.jit
def expectation(P: tl.constexpr, c: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """beta = E 2·chi(Z) of a standard normal Z, and c·dbeta/dc = 2·beta - E 2·Z²·psi'(Z), by channel.

    For huber, beta = erf(c/√2) - c·√(2/π)·exp(-c²/2) + c²·erfc(c/√2) and c·dbeta/dc = 2·c²·erfc(c/√2).
    """
    if P == "quadratic":
        beta, change = tl.zeros_like(c) + 1.0, tl.zeros_like(c)
    elif P == "huber":
        near = tl.minimum(c, 13.0)  # beyond, nothing is missing
        tail = near * near * erfc(near * 0.7071067811865476)
        density = near * 0.7978845608028654 * tl.exp(-0.5 * near * near)
        beta = tl.erf(near * 0.7071067811865476) - density + tail
        change = 2.0 * tail
    else:
        z = tl.exp(-9.0 + tl.arange(0, NODES).to(tl.float32) * (11.4 / (NODES - 1)))[:, None]
        weight = z * tl.exp(-0.5 * z * z)
        weight = weight / tl.sum(weight * z * z, axis=0)[None, :]
        _psi, chi, _slope, _slope_t, slope_tt = influence(P, z, c[None, :], shape, True)
        beta = tl.sum(weight * 2.0 * chi, axis=0)
        change = 2.0 * beta - tl.sum(weight * 2.0 * slope_tt, axis=0)
    return beta, change


@triton.jit
def newton(
    m: tl.tensor, s: tl.tensor, psi: tl.tensor, chi: tl.tensor, h0: tl.tensor, h1: tl.tensor, h2: tl.tensor,
    beta: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """(m, s) after H·(dm/s, dlog s) = (mean psi, mean chi - beta/2), H = mean psi'·(1, t)(1, t)ᵀ, not too far away."""
    h0, h2 = tl.maximum(h0, 1e-6), tl.maximum(h2, 1e-6)
    determinant = tl.maximum(h0 * h2 - h1 * h1, h0 * h2 * (32.0 * EPS))
    excess = chi - beta * 0.5
    shift = (h2 * psi - h1 * excess) / determinant
    growth = (h0 * excess - h1 * psi) / determinant
    most, least = (1.0 - 1.0 / (LONGEST * LONGEST)) / 2.0, (LONGEST * LONGEST - 1.0) / 2.0
    length = tl.maximum(tl.maximum(tl.abs(shift) / LONGEST, growth / most), tl.maximum(-growth / least, 1.0))
    return m + s * (shift / length), tl.maximum(s / tl.sqrt(1.0 - 2.0 * growth / length), LEAST_SCALE)


@triton.jit
def balanced(psi: tl.tensor, chi: tl.tensor, h0: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Whether mean psi would be 0 within c·s: beside tied samples a step below rounding is no sign of it."""
    return tl.abs(psi) <= c * h0 + 1e-6 * tl.sqrt(tl.maximum(chi, 0.0))


@triton.jit
def rests(
    m: tl.tensor, s: tl.tensor, next_m: tl.tensor, next_s: tl.tensor, psi: tl.tensor, chi: tl.tensor, h0: tl.tensor,
    c: tl.tensor, TOLERANCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether the step is below the tolerance in units of s, or rounding, and no tie causes that."""
    near = tl.abs(next_m - m) <= s * TOLERANCE + tl.abs(m) * (4.0 * EPS)
    return near & (tl.abs(next_s - s) <= s * (TOLERANCE + 4.0 * EPS)) & balanced(psi, chi, h0, c)


@triton.jit
def begun(
    m: tl.tensor, s: tl.tensor, psi: tl.tensor, chi: tl.tensor, h0: tl.tensor, h1: tl.tensor, h2: tl.tensor,
    c: tl.tensor, beta: tl.tensor, TOLERANCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The (m, s) to look at after the first totals, NaN where these are not finite, and whether that is the end."""
    lost = ~((tl.abs(psi) < float("inf")) & (tl.abs(chi) < float("inf")))
    next_m, next_s = newton(m, s, psi, chi, h0, h1, h2, beta)
    settled = lost | rests(m, s, next_m, next_s, psi, chi, h0, c, TOLERANCE)
    return tl.where(lost, float("nan"), next_m), tl.where(lost, s, next_s), settled


@triton.jit
def advanced(
    m: tl.tensor, s: tl.tensor, psi: tl.tensor, chi: tl.tensor, h0: tl.tensor, h1: tl.tensor, h2: tl.tensor,
    next_m: tl.tensor, next_s: tl.tensor, settled: tl.tensor, there_psi: tl.tensor, there_chi: tl.tensor,
    there_h0: tl.tensor, there_h1: tl.tensor, there_h2: tl.tensor, c: tl.tensor, beta: tl.tensor,
    TOLERANCE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A walk (m, s, totals, next m and s, settled) after the totals at next: taken where it ends downhill.

    With r = (mean psi, mean chi) - (0, beta/2), the slope of Q along a step d is -<r, d>.
    """
    dm, ds = next_m - m, next_s - s
    before = tl.abs(psi * dm + (chi - beta * 0.5) * ds)
    after = -(there_psi * dm + (there_chi - beta * 0.5) * ds)
    accepted = ~settled & (after <= 0.5 * before)
    m, s = tl.where(accepted, next_m, m), tl.where(accepted, next_s, s)
    psi, chi = tl.where(accepted, there_psi, psi), tl.where(accepted, there_chi, chi)
    h0, h1 = tl.where(accepted, there_h0, h0), tl.where(accepted, there_h1, h1)
    h2 = tl.where(accepted, there_h2, h2)
    full_m, full_s = newton(m, s, psi, chi, h0, h1, h2, beta)
    share = before / tl.maximum(before + tl.maximum(after, 0.0), LEAST_SCALE)
    share = tl.minimum(tl.maximum(share, 0.02), 0.7)
    next_m = tl.where(settled, next_m, tl.where(accepted, full_m, m + share * dm))
    next_s = tl.where(settled, next_s, tl.where(accepted, full_s, s + share * ds))
    settled = settled | (accepted & rests(m, s, next_m, next_s, psi, chi, h0, c, TOLERANCE))
    return m, s, psi, chi, h0, h1, h2, next_m, next_s, settled
