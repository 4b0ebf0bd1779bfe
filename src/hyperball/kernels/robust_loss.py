"""Barron's general robust loss and its derivatives, elementwise (Barron, CVPR 2019).

With z = x/c, b = max(|alpha - 2|, 1e-6), r = |z|/sqrt(b), T = 1 + r² and L = log T the loss is
(b/alpha)·(T^(alpha/2) - 1). All derivatives are closed forms in L, because autograd through the case
distinctions at alpha = 0 and 2 loses terms, and because sums of squares overflow where the loss does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

FLOOR = 1e-6  # the least b: at alpha = 2 the derivative in alpha diverges like log b
FAR = 1e9  # |z| beyond which z² is not formed
EXPANDED = 0.3  # |omega| below which (omega·e^omega - expm1 omega)/omega² is taken from its series
SMALL = 0.5  # |alpha·L/2| and |(alpha/2 - 1)·L| below which the derivative in alpha is taken from its series


class Parts(NamedTuple):
    """What the loss and all its derivatives share; see the formulas at the top of the file."""

    alpha: Tensor  # made finite
    z: Tensor
    b: Tensor
    r: Tensor
    log: Tensor  # L
    omega: Tensor  # alpha·L/2
    moving: Tensor  # whether b changes with alpha
    infinite: Tensor  # whether the given alpha is


def shape_limit(dtype: torch.dtype) -> float:
    """The alpha that stands for infinity: (1 + q/b)^(b/2) equals exp(q/2) to rounding wherever that is finite."""
    return 1e25 if dtype == torch.float64 else 1e15


def times(factor: Tensor, other: Tensor) -> Tensor:
    """factor·other, and 0 where the factor is 0 and the other infinite."""
    return torch.where(factor == 0.0, 0.0, factor * other)


def parts(x: Tensor, alpha: Tensor, c: Tensor) -> Parts:
    """z, b, r, L = log(1 + r²) and omega = alpha·L/2; where x/c is huge, L is a difference of logarithms."""
    limit = shape_limit(x.dtype)
    shape = alpha.clamp(min=-limit, max=limit)
    distance = (shape - 2.0).abs()
    b = distance.clamp(min=FLOOR)
    z = x / c
    r = z.abs() / b.sqrt()
    far_log = 2.0 * (x.abs().log() - c.log()) - b.log()
    log = torch.where(r > 1e8, far_log, r.square().log1p())
    return Parts(shape, z, b, r, log, times(shape / 2.0, log), distance > FLOOR, alpha.isinf())


def grown(factor: Tensor, exponent: Tensor) -> Tensor:
    """factor·e^exponent, which overflows only where the product does."""
    root = (exponent / 2.0).exp()
    return factor * root * root


def value(p: Parts) -> Tensor:
    """loss = b·(L/2)·expm1(omega)/omega, the quotient 1 at omega = 0."""
    half = torch.where(p.r < 1e-4, p.z.square() * (1.0 - p.r.square() / 2.0), p.b * p.log) / 2.0
    near = p.omega.abs() < 1e-8
    factor = p.b / torch.where(near, 1.0, p.alpha)
    closed = torch.where(p.omega > 40.0, grown(factor, p.omega), factor * p.omega.expm1())
    return torch.where(near, half * (1.0 + p.omega / 2.0), closed)


def square_share(r: Tensor) -> Tensor:
    """sigma = r²/(1 + r²), also where r² overflows."""
    square = r.clamp(max=FAR).square()
    return square / (1.0 + square)


def decay(p: Parts) -> Tensor:
    """tau = T^(alpha/2 - 1)."""
    return times(p.alpha / 2.0 - 1.0, p.log).exp()


def influence(p: Parts) -> Tensor:
    """z·tau, which is c·dloss/dx; where tau could underflow, sign(z)·sqrt(b·sigma)·T^((alpha - 1)/2)."""
    far = p.z.sign() * grown((p.b * square_share(p.r)).sqrt(), times((p.alpha - 1.0) / 2.0, p.log))
    return torch.where((p.z.abs() > 1e30) | ((p.alpha < 1.0) & (p.r > 1.0)), far, p.z * decay(p))


def moment(p: Parts) -> Tensor:
    """z²·tau, which is -c·dloss/dc; where z² could overflow or tau underflow, b·sigma·T^(alpha/2)."""
    far = grown(p.b * square_share(p.r), p.omega)
    return torch.where((p.z.abs() > FAR) | ((p.alpha < 1.0) & (p.r > 1.0)), far, p.z * (p.z * decay(p)))


def series(coefficients: list[float], t: Tensor) -> Tensor:
    """sum_k coefficients[k]·t^k for |t| <= 0.3 (beyond, of t held there)."""
    t = t.clamp(min=-EXPANDED, max=EXPANDED)
    total = torch.zeros_like(t)
    for coefficient in reversed(coefficients):
        total = total * t + coefficient
    return total


def second_quotient(p: Parts) -> Tensor:
    """b·N = b·(L²/4)·(omega·e^omega - expm1 omega)/omega², the quotient 1/2 at omega = 0."""
    omega = p.omega.clamp(min=-1e4)
    near = omega.abs() < EXPANDED
    expanded = p.b * p.log * p.log / 4.0 * series([(k + 1) / math.factorial(k + 2) for k in range(13)], omega)
    alpha = torch.where(near, 1.0, p.alpha)
    factor = p.b / alpha / alpha
    large = grown(factor * (omega - 1.0), omega) + factor
    closed = torch.where(omega > 1.0, large, factor * (omega * omega.exp() - omega.expm1()))
    return torch.where(near, expanded, closed)


def log_excess(p: Parts) -> Tensor:
    """L - sigma = L - 1 + e^(-L)."""
    expanded = p.log * p.log * series([(-1) ** k / math.factorial(k + 2) for k in range(12)], p.log)
    return torch.where(p.log < EXPANDED, expanded, p.log + (-p.log).expm1())


def brackets(p: Parts) -> Iterator[tuple[int, Tensor]]:
    """k and L^(k - 3)·[(a - 1)^(k - 1) - a^(k - 1) + (k - 1)·a^(k - 2)] with a = alpha/2, for k = 3, 4, …

    With u = a·L and v = (a - 1)·L they follow from two recurrences without cancellation.
    """
    u = p.omega.clamp(min=-SMALL, max=SMALL)
    v = (p.omega - p.log).clamp(min=-SMALL, max=SMALL)
    bracket, difference, power = torch.ones_like(u), u + v, v
    yield 3, bracket
    for k in range(4, 18 if u.dtype == torch.float64 else 11):
        bracket = u * bracket + difference
        power = power * v
        difference = u * difference + power
        yield k, bracket


def shape_slope_series(p: Parts) -> Tensor:
    """dloss/dalpha = (b/4)·sum_k R_k·L^k/k!, R_k the brackets, where alpha·L/2 and (alpha/2 - 1)·L are small."""
    total = torch.zeros_like(p.log)
    for k, bracket in brackets(p):
        total = total + bracket / math.factorial(k)
    return p.b / 4.0 * p.log * p.log * p.log * total


def shape_bend_series(p: Parts, sign: Tensor) -> Tensor:
    """d²loss/dalpha² = (1/4)·sum_k R_k·(b'·L^k/k! - b'·sigma·L^(k - 1)/(k - 1)! + b·k/(k + 1)!·L^(k + 1)/2)."""
    first, second, third = (torch.zeros_like(p.log) for _ in range(3))
    for k, bracket in brackets(p):
        first = first + bracket / math.factorial(k)
        second = second + bracket / math.factorial(k - 1)
        third = third + bracket * (k / math.factorial(k + 1))
    inner = sign * (p.log * first - square_share(p.r) * second) + p.b * p.log * p.log * third / 2.0
    return p.log * p.log * inner / 4.0


def shape_slope_near_two(p: Parts, sign: Tensor) -> Tensor:
    """(b'·expm1(v) - |b'|·z²·tau/2)/alpha + b·N with v = (alpha/2 - 1)·L, for 1 < alpha < 3."""
    v = times(p.alpha / 2.0 - 1.0, p.log)
    alpha = p.alpha.clamp(min=1.0, max=3.0)
    return (sign * v.expm1() - sign.abs() * moment(p) / 2.0) / alpha + second_quotient(p)


def shape_slope_elsewhere(p: Parts, loss: Tensor, sign: Tensor) -> Tensor:
    """b'·(loss/b - sigma·e^omega/2) + b·N, for alpha outside (1, 3).

    Where |omega| > 0.3 that is b'·(2·expm1(omega)/alpha² + e^omega·(L - sigma - 2L/alpha)/2).
    """
    near = p.omega.abs() < EXPANDED
    omega = p.omega.clamp(min=-1e4)
    log = p.log.clamp(max=1e30)  # times e^omega = 0 where it is infinite
    alpha = torch.where(near, 1.0, p.alpha)
    expanded = sign * (loss / p.b - square_share(p.r) * omega.exp() / 2.0) + second_quotient(p)
    bend = torch.where(near, 0.0, log_excess(p).clamp(max=1e30) - 2.0 * log / alpha)
    return torch.where(near, expanded, sign * (2.0 * omega.expm1() / alpha / alpha + omega.exp() * bend / 2.0))


def shape_slope(p: Parts, loss: Tensor) -> Tensor:
    """dloss/dalpha = b'·(loss/b - sigma·e^omega/2) + b·N with b' = sign(alpha - 2), in forms without cancellation.

    At alpha = 0 it is -L/2 + q/(4T) + L²/4. Within 1e-6 of 2 b is held and b' is 0. It is 0 at alpha = ±inf.
    """
    sign = torch.where(p.moving, (p.alpha - 2.0).sign(), 0.0)
    middle = (p.alpha - 2.0).abs() < 1.0
    closed = torch.where(middle, shape_slope_near_two(p, sign), shape_slope_elsewhere(p, loss, sign))
    small = p.moving & (p.omega.abs() < SMALL) & ((p.omega - p.log).abs() < SMALL)
    slope = torch.where(small, shape_slope_series(p), closed)
    slope = torch.where(loss.isinf(), loss, slope)
    return torch.where(p.infinite, 0.0, slope)


def shape_bend_near_two(p: Parts, sign: Tensor) -> Tensor:
    """The derivative in alpha of `shape_slope_near_two`; v' = (L - sigma)/2, or L/2 where b is held."""
    alpha = p.alpha.clamp(min=1.0, max=3.0)
    tau = decay(p)
    turn = torch.where(p.moving, log_excess(p), p.log) / 2.0
    pull = sign.abs() * moment(p) / 2.0
    first = (sign * tau - pull) * turn - (sign * (tau - 1.0) - pull) / alpha
    held = p.omega.abs() < EXPANDED
    second = sign * (p.omega * tau - p.omega.expm1()) + p.b * p.omega * p.omega.exp() * turn
    closed = second / alpha / alpha - 2.0 / alpha * second_quotient(p)
    third = [(k + 1) * (k + 2) / math.factorial(k + 3) for k in range(13)]
    expanded = p.b * p.log * p.log * p.log / 8.0 * series(third, p.omega)
    return first / alpha + torch.where(held, expanded, closed)


def shape_bend_elsewhere(p: Parts, sign: Tensor) -> Tensor:
    """The derivative in alpha of `shape_slope_elsewhere`; L' = -sigma/(alpha - 2), omega' = (L - sigma)/2 + L'."""
    near = p.omega.abs() < EXPANDED
    omega, log, sigma = p.omega.clamp(min=-1e4), p.log.clamp(max=1e30), square_share(p.r)
    excess = log_excess(p).clamp(max=1e30)
    log_slope = -sigma / torch.where((p.alpha - 2.0).abs() < 1.0, 1.0, p.alpha - 2.0)
    slope = excess / 2.0 + log_slope
    e1, e2, e3 = (
        series([math.factorial(k + j) / math.factorial(k) / math.factorial(k + j + 1) for k in range(13)], omega)
        for j in range(3)
    )
    rise = log_slope * e1 + log * e2 * slope - omega.exp() * ((1.0 - sigma) * log_slope + sigma * slope)
    expanded = sign * (rise / 2.0 + log * log / 4.0 * e2) + p.b * log * (log_slope * e2 / 2.0 + log * e3 * slope / 4.0)
    alpha = torch.where(near, 1.0, p.alpha)
    part = excess - 2.0 * log / alpha
    part_slope = log_slope * (sigma - 2.0 / alpha) + 2.0 * log / alpha / alpha
    tail = omega.exp() * (2.0 * slope / alpha / alpha + (slope * part + part_slope) / 2.0)
    return torch.where(near, expanded, sign * (tail - 4.0 * omega.expm1() / alpha / alpha / alpha))


def shape_bend(p: Parts, loss: Tensor) -> Tensor:
    """d²loss/dalpha², in the same cases as dloss/dalpha; it diverges like 1/|alpha - 2| at 2."""
    sign = torch.where(p.moving, (p.alpha - 2.0).sign(), 0.0)
    middle = (p.alpha - 2.0).abs() < 1.0
    closed = torch.where(middle, shape_bend_near_two(p, sign), shape_bend_elsewhere(p, sign))
    small = p.moving & (p.omega.abs() < SMALL) & ((p.omega - p.log).abs() < SMALL)
    bend = torch.where(small, shape_bend_series(p, sign), closed)
    return torch.where(p.infinite, 0.0, torch.where(loss.isinf(), loss, bend))


def loss_value(x: Tensor, alpha: Tensor, c: Tensor) -> Tensor:
    """The loss of broadcast tensors of one dtype, float32 or float64."""
    return value(parts(x, alpha, c))


def loss_gradients(
    x: Tensor, alpha: Tensor, c: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The needed ones of dloss/dx = z·tau/c, dloss/dalpha and dloss/dc = -z²·tau/c."""
    p = parts(x, alpha, c)
    return (
        influence(p) / c if needed[0] else None,
        shape_slope(p, value(p)) if needed[1] else None,
        -moment(p) / c if needed[2] else None,
    )


def loss_hessian(x: Tensor, alpha: Tensor, c: Tensor) -> dict[str, Tensor]:
    """d²loss by "xx", "xc", "cc", "xa", "ca" and "aa"."""
    p = parts(x, alpha, c)
    bend = (p.alpha - 2.0) * square_share(p.r)
    turn = torch.where(p.moving, log_excess(p), p.log) / 2.0
    turn = torch.where(p.infinite, 0.0, turn)
    first, second = influence(p) / c, moment(p) / c
    return {
        "xx": decay(p) / c / c * (1.0 + bend),
        "xc": -first / c * (2.0 + bend),
        "cc": second / c * (3.0 + bend),
        "xa": first * turn,
        "ca": -second * turn,
        "aa": shape_bend(p, value(p)),
    }
