"""The formulas of the radial table, as pure functions of a length and the parameters.

A magnitude `name` has name_gain, s(n) = h(n)/n, and name_curvature, h'(n), given s (or name_both, the two at once);
a penalty has name_phi. Equation numbers are those of Liu et al., Decoupled Networks, CVPR 2018; barron is the
general loss of Barron, CVPR 2019.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hyperball.rows import Scalar

TINY = 1e-20  # a length below it, where 1 is the unit, counts as zero
SHAPE_LIMIT = 1e15  # stands for an infinite shape: (1 + q/b)^(-b/2) equals exp(-q/2) to rounding


def times(x: Tensor, factor: Scalar) -> Tensor:
    """x·factor, and x itself for the number 1."""
    return x if isinstance(factor, float) and factor == 1.0 else x * factor


def off_zero(n: Tensor) -> Tensor:
    """n, held above a length that counts as zero in any unit: 1e-30, in float64 1e-250."""
    return n.clamp(min=1e-250 if n.dtype == torch.float64 else 1e-30)


def hypotenuse(a: Tensor, b: Scalar) -> Tensor:
    """sqrt(a² + b²) without overflow, for b >= 0; at least 1e-20."""
    # The mean length calls this beside the gains: torch.compile for any shape loses a module's number that both read.
    longest = a.clamp(min=b).clamp(min=1e-20)
    return (longest * ((a / longest).square() + (b / longest).square()).sqrt()).clamp(min=1e-20)


def log_one_plus_square(n: Tensor, reach: Scalar) -> tuple[Tensor, Tensor]:
    """log(1 + r²) and r²/(1 + r²) of r = n/reach >= 0, accurate near 0 and where r² or r itself overflows.

    log(1 + x) is log(w) + (x - (w - 1))/w with w = 1 + x rounded: the same as log1p, and faster on a CPU. Beyond
    r = 1e18, 4·log(sqrt(r/1e18)) is added, whose root is a number for every n and reach.
    """
    x = (n / reach).clamp(max=1e18).square()
    w = 1.0 + x
    root = reach.sqrt() if isinstance(reach, Tensor) else math.sqrt(reach)
    beyond = (off_zero(n).sqrt() * (1e-9 / root)).clamp(min=1.0).log()
    return torch.add(w.log() + (x - (w - 1.0)) / w, beyond, alpha=4.0), x / w


def log1p_gain(n: Tensor) -> Tensor:
    """log(1 + n)/n, which is 1 at 0."""
    n = n.clamp(min=TINY)
    return n.log1p() / n


def sphere_gain(n: Tensor, alpha: Scalar, eps: float) -> Tensor:
    """s = alpha / sqrt(n² + eps) (4)."""
    return alpha / hypotenuse(n, math.sqrt(eps))


def sphere_curvature(n: Tensor, s: Tensor, alpha: Scalar, eps: float) -> Tensor:
    """h' = alpha·eps / (n² + eps)^(3/2)."""
    return s * (math.sqrt(eps) / hypotenuse(n, math.sqrt(eps))).square()


def ball_gain(n: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """s = alpha / max(n, rho) (5)."""
    return alpha / off_zero(n).clamp(min=rho)


def ball_curvature(n: Tensor, s: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """h' = alpha/rho inside the ball, 0 outside."""
    return s * (n <= rho)


def tanh_gain(n: Tensor, alpha: Scalar, rho: Scalar) -> Tensor:
    """s = alpha·tanh(n/rho)/n, which is alpha/rho at 0 (6)."""
    n = off_zero(n)
    return times(torch.tanh(n * (1.0 / rho)) / n, alpha)


def tanh_both(n: Tensor, alpha: Scalar, rho: Scalar) -> tuple[Tensor, Tensor]:
    """s, and h' = (alpha/rho)·(1 - tanh²(n/rho)), which is (alpha/rho)·4e/(1 + e)², e = exp(-2n/rho)."""
    n = off_zero(n)
    z = n * (1.0 / rho)
    e = torch.exp(-2.0 * z)
    return times(torch.tanh(z) / n, alpha), 4.0 * e / (1.0 + e).square() * (alpha / rho)


def linear_gain(n: Tensor, alpha: Scalar) -> Tensor:
    """s = alpha (7)."""
    return torch.ones_like(n) * alpha


def linear_curvature(n: Tensor, s: Tensor, alpha: Scalar) -> Tensor:
    """h' = alpha."""
    return s


def seg_gain(n: Tensor, alpha: Scalar, beta: Scalar, rho: Scalar) -> Tensor:
    """s = beta + (alpha - beta)·rho/max(n, rho) (8)."""
    return beta + (alpha - beta) * (rho / n.clamp(min=rho))


def seg_curvature(n: Tensor, s: Tensor, alpha: Scalar, beta: Scalar, rho: Scalar) -> Tensor:
    """h' = alpha inside the radius, beta outside."""
    one = torch.ones_like(s)
    return torch.where(n <= rho, one * alpha, one * beta)


def log_gain(n: Tensor, alpha: Scalar) -> Tensor:
    """s = alpha·log(1+n)/n, which is alpha at 0 (9)."""
    return alpha * log1p_gain(n)


def log_curvature(n: Tensor, s: Tensor, alpha: Scalar) -> Tensor:
    """h' = alpha / (1 + n)."""
    return alpha / (1.0 + n)


def mix_gain(n: Tensor, alpha: Scalar, beta: Scalar) -> Tensor:
    """s = alpha + beta·log(1+n)/n (10)."""
    return alpha + beta * log1p_gain(n)


def mix_curvature(n: Tensor, s: Tensor, alpha: Scalar, beta: Scalar) -> Tensor:
    """h' = alpha + beta/(1 + n)."""
    return alpha + beta / (1.0 + n)


def barron_reach(rho: Scalar, shape: Scalar) -> tuple[Scalar, Scalar]:
    """rho·sqrt(b) with b = max(|shape - 2|, 1e-6), so that T = 1 + (n/reach)²; and the shape, made finite."""
    if isinstance(shape, Tensor):
        shape = shape.clamp(min=-SHAPE_LIMIT, max=SHAPE_LIMIT)
        return rho * (shape - 2.0).abs().clamp(min=1e-6).sqrt(), shape
    shape = min(max(shape, -SHAPE_LIMIT), SHAPE_LIMIT)
    return rho * math.sqrt(max(abs(shape - 2.0), 1e-6)), shape


def barron_gain(n: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """s = alpha·(1 + n²/(b·rho²))^(shape/2 - 1)."""
    reach, shape = barron_reach(rho, shape)
    return times(torch.exp(log_one_plus_square(n, reach)[0] * (shape / 2.0 - 1.0)), alpha)


def barron_both(n: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> tuple[Tensor, Tensor]:
    """s, and h' = s·(1 + (shape - 2)·r²/(1 + r²)), r = n/(rho·sqrt(b))."""
    reach, shape = barron_reach(rho, shape)
    log_t, share = log_one_plus_square(n, reach)
    s = times(torch.exp(log_t * (shape / 2.0 - 1.0)), alpha)
    return s, s * (1.0 + (shape - 2.0) * share)


def barron_shape_partial(n: Tensor, s: Tensor, h1: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """ds/dshape = s·(log(1 + r²) - r²/(1 + r²))/2; within 1e-6 of 2, where b is held, the last term is absent."""
    reach, shape = barron_reach(rho, shape)
    log_t, share = log_one_plus_square(n, reach)
    moving = (torch.as_tensor(shape, device=n.device) - 2.0).abs() > 1e-6
    return s * (log_t - share * moving) / 2.0


def barron_phi(z: Tensor, rho: Scalar, shape: Scalar, alpha: Scalar = 1.0) -> Tensor:
    """phi = c²·(b/shape)·((1 + q/b)^(shape/2) - 1), q = z²/c², in a form that is smooth at shape 0 and 2."""
    reach, shape = barron_reach(rho, shape)
    shape = torch.as_tensor(shape, dtype=z.dtype, device=z.device)
    b = (shape - 2.0).abs().clamp(min=1e-6)
    half_log = log_one_plus_square(z.abs(), reach)[0] / 2.0
    omega = shape * half_log
    small = omega.abs() < 1e-6
    quotient = torch.where(small, 1.0 + omega / 2.0, torch.expm1(omega) / torch.where(small, 1.0, omega))
    return alpha * rho * rho * b * half_log * quotient


def ramp(t: Tensor, j: int, pieces: int) -> Tensor:
    """How much of [0, t] lies in piece j of [0, 2], cut into equal pieces; the last piece has no end."""
    width = 2.0 / pieces
    above = (t - j * width).clamp(min=0.0)
    return above if j == pieces - 1 else above.clamp(max=width)


def piecewise_gain(n: Tensor, rho: Scalar, slopes: tuple[Scalar, ...]) -> Tensor:
    """s = H(t)/t, t = n/rho, H piecewise linear from H(0) = 0 with the given slopes on [0, 2] and beyond."""
    t = (n / rho).clamp(min=TINY)
    height = slopes[0] * ramp(t, 0, len(slopes))
    for j, slope in enumerate(slopes[1:], start=1):
        height = height + slope * ramp(t, j, len(slopes))
    return height / t


def piecewise_curvature(n: Tensor, s: Tensor, rho: Scalar, slopes: tuple[Scalar, ...]) -> Tensor:
    """h' = the slope of the piece that holds n/rho."""
    width = 2.0 / len(slopes)
    t = n / rho
    slope = torch.ones_like(s) * slopes[0]
    for j in range(1, len(slopes)):
        slope = torch.where(t > j * width, torch.ones_like(s) * slopes[j], slope)
    return slope


def piecewise_slope_partial(
    n: Tensor, s: Tensor, h1: Tensor, index: int, rho: Scalar, slopes: tuple[Scalar, ...]
) -> Tensor:
    """ds/dslope_j = (the part of [0, t] in piece j)/t."""
    t = (n / rho).clamp(min=TINY)
    return ramp(t, index, len(slopes)) / t


def quadratic_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = z²/2; the radius is accepted and ignored."""
    return z.square() / 2.0


def pseudo_huber_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = 1/sqrt(1 + n²/c²)."""
    return 1.0 / hypotenuse(n / rho, 1.0)


def pseudo_huber_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = c²(sqrt(1 + z²/c²) - 1), computed as z²/(1 + sqrt(…))."""
    return z * (z / (1.0 + hypotenuse(z.abs() / rho, 1.0)))


def huber_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = c/max(n, c)."""
    return rho / n.clamp(min=rho)


def huber_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = z²/2 inside c, c(|z| - c/2) outside."""
    inside = z.abs().clamp(max=rho)
    return inside * (z.abs() - inside / 2.0)


def inside_indicator(n: Tensor, s: Tensor, rho: Scalar) -> Tensor:
    """psi' = [n <= c]."""
    return (n <= rho).to(s.dtype)


def welsch_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = exp(-n²/(2c²))."""
    return torch.exp(-(n / rho).clamp(max=1e4).square() / 2.0)


def welsch_curvature(n: Tensor, s: Tensor, rho: Scalar) -> Tensor:
    """psi' = (1 - n²/c²)·exp(-n²/(2c²))."""
    return (1.0 - (n / rho).clamp(max=1e4).square()) * s


def welsch_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = c²(1 - exp(-z²/(2c²)))."""
    return -rho * rho * torch.expm1(-(z.abs() / rho).clamp(max=1e4).square() / 2.0)


def truncated_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = [n <= c]."""
    return (n <= rho).to(n.dtype)


def truncated_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = min(z², c²)/2."""
    return z.abs().clamp(max=rho).square() / 2.0


def absolute_gain(n: Tensor, rho: Scalar) -> Tensor:
    """s = 1/n."""
    return 1.0 / n.clamp(min=TINY)


def absolute_phi(z: Tensor, rho: Scalar) -> Tensor:
    """phi = |z|, whose minimizer is a median; the radius is accepted and ignored."""
    return z.abs()
