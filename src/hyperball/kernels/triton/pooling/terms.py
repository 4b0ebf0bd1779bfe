"""The penalties of robust pooling as Triton functions: psi, psi' and s of residuals z, and the score of a start.

`PENALTIES` names the rows that have a function here. `over` is 1/c, barron's 1/(c·sqrt(b)); z beyond `far` is held
there, where psi no longer changes but squares would overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl

PENALTIES = ("quadratic", "huber", "pseudo_huber", "barron", "welsch", "absolute")
BOUND = tl.constexpr(3.4028234663852886e38 / 8)
HALF_LOG2E = tl.constexpr(0.7213475204444817)


@triton.jit
def bounded(x: tl.tensor) -> tl.tensor:
    """x with ±inf at a bound whose differences are numbers; NaN stays."""
    return tl.where(x > BOUND, BOUND, tl.where(x < -BOUND, -BOUND, x))


@triton.jit
def log_one_plus_square(r: tl.tensor) -> tl.tensor:
    """log(1 + r²) and r²/(1 + r²), r held at 1e18: log(1 + x) = log(w) + (x - (w - 1))/w with w = 1 + x rounded."""
    r = tl.minimum(r, 1e18)
    x = r * r
    w = 1.0 + x
    over = 1.0 / w
    return tl.log(w) + (x - (w - 1.0)) * over, x * over


@triton.jit
def terms(
    P: tl.constexpr, z: tl.tensor, c: tl.tensor, over: tl.tensor, far: tl.tensor, shape: tl.tensor
) -> tl.tensor:  # fmt: skip
    """psi, psi' and s = psi/z at z; all of s and psi' are 1 at 0."""
    if P == "quadratic":
        psi, h, s = z, tl.zeros_like(z) + 1.0, tl.zeros_like(z) + 1.0
    elif P == "huber":
        psi = tl.minimum(tl.maximum(z, -c), c)
        h = tl.where(tl.abs(z) <= c, 1.0, 0.0)
        s = c / tl.maximum(tl.abs(z), c)
    elif P == "pseudo_huber":
        held = tl.minimum(tl.maximum(z, -far), far)
        t = held * over
        s = tl.rsqrt(1.0 + t * t)
        psi = held * s
        h = s * s * s
    elif P == "welsch":
        held = tl.minimum(tl.maximum(z, -far), far)
        t = held * over
        q = t * t
        s = tl.exp2(q * -HALF_LOG2E)
        psi = held * s
        h = (1.0 - q) * s
    elif P == "absolute":
        s = 1.0 / tl.maximum(tl.abs(z), 1e-20)
        psi = tl.where(z > 0, 1.0, tl.where(z < 0, -1.0, 0.0))
        h = tl.zeros_like(z)
    else:
        tl.static_assert(P == "barron")
        log_t, share = log_one_plus_square(tl.abs(z) * over)
        s = tl.exp(tl.minimum(log_t * (shape * 0.5 - 1.0), 69.0))
        psi = tl.minimum(tl.maximum(z * s, -1e33), 1e33)
        h = s * (1.0 + (shape - 2.0) * share)
    return psi, h, s


@triton.jit
def score(P: tl.constexpr, z: tl.tensor, over: tl.tensor, far: tl.tensor, shape: tl.tensor) -> tl.tensor:
    """1 - phi/c²: welsch's exp(-z²/(2c²)); barron's 1 - b·(L/2)·expm1(ω)/ω, L = log(1 + z²/(b·c²)), ω = shape·L/2."""
    if P == "welsch":
        t = tl.minimum(tl.maximum(z, -far), far) * over
        found = tl.exp2(t * t * -HALF_LOG2E)
    else:
        tl.static_assert(P == "barron")
        log_t, _ = log_one_plus_square(tl.abs(z) * over)
        omega = shape * log_t * 0.5
        held = tl.where(tl.abs(omega) < 1e-2, 1.0, omega)
        series = 1.0 + omega * (0.5 + omega * (0.16666667 + omega * 0.041666667))
        quotient = tl.where(tl.abs(omega) < 1e-2, series, (tl.exp(tl.minimum(held, 69.0)) - 1.0) / held)
        found = 1.0 - tl.maximum(tl.abs(shape - 2.0), 1e-6) * (0.5 * log_t) * quotient
    return found


@triton.jit
def gain_slope(z: tl.tensor, s: tl.tensor, over: tl.tensor, shape: tl.tensor) -> tl.tensor:
    """ds/dshape of barron: s·(log T - r²/T)/2; within 1e-6 of 2, where b is held, the last term is absent."""
    log_t, share = log_one_plus_square(tl.abs(z) * over)
    return s * (log_t - tl.where(tl.abs(shape - 2.0) > 1e-6, share, 0.0)) * 0.5
