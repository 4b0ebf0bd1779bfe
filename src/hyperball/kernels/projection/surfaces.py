"""The sets onto which rows are projected: y = argmin ||u - x||^2 / 2 over a norm ball, a norm sphere or a simplex.

Every member is one row of `SURFACES`: its forward, which plain autograd differentiates correctly (so that it can
be compiled and exported as it is), and its tangent, the closed form of its derivative. Every Jacobian J = dy/dx is
symmetric. With Euler's identity, y = J x + r dy/dr, the radius gradient is <v, dy/dr> = (<v, y> - <J v, x>) / r.

Rows are laid out as [..., n], contiguous, in float32 or float64; a radius is [..., 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hyperball.kernels.projection.solver import mass, solver_for
from hyperball.kernels.reading import is_concrete, row_sum

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Tangent(NamedTuple):
    """The derivative of a projection at a point: dy = apply(dx) + growth * dr."""

    apply: Callable[[Tensor], Tensor]
    growth: Tensor


@dataclass(frozen=True)
class Surface:
    """A set to project onto: forward(rows, radius) -> (y, cut), tangent(rows, radius, cut) -> Tangent."""

    forward: Forward
    tangent: Callable[[Tensor, Tensor, Tensor], Tangent]


def signs(rows: Tensor) -> Tensor:
    """sgn(x) with sgn(0) = +1."""
    return torch.sign(rows.detach()).add_(0.5).sign_()


def positive(rows: Tensor) -> Tensor:
    """[x > 0] as 0 or 1 in x's dtype: on the CPU far cheaper than a bool mask and `torch.where`."""
    return torch.sign(torch.relu(rows.detach()))


def choose(inside: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where inside, y elsewhere, exactly, for finite x and y: a cheap `torch.where` over rows."""
    return torch.lerp(y, x, inside.to(x.dtype))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is concrete and carries no forward-mode tangent."""
    return is_concrete(tensor) and unpack_dual(tensor).tangent is None


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """y = min(max(x, low), high); on a bound the gradient is x's, NaN stays where it is."""
    if torch.is_grad_enabled():  # torch.clamp leaves the gradient on a bound to its version
        raised = torch.where((x < low) | low.isnan(), low, x)
        return torch.where((raised > high) | high.isnan(), high, raised)
    return torch.clamp(x, low, high)


def excess(rows: Tensor, radius: Tensor) -> Tensor:
    """c = max((x - max x) / r, -2): exact near the maximum, so a row of 1e20 keeps the digits of a radius of 1.

    An element below -1 has no part in the answer; the floor keeps c finite.
    """
    return torch.maximum(rows - rows.amax(-1, keepdim=True).detach(), -2 * radius) / radius


def simplex(rows: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """y = r max(c + theta - d, 0), d = (sum_i max(c_i + theta, 0) - 1) / count the last, differentiable, Newton step.

    theta and d are kept apart because theta alone is rounded coarser than the smallest elements of y.
    """
    plain = not torch.is_grad_enabled() and is_plain(rows)
    if not plain:
        rows = rows * (1 + 0 * rows.detach().amax(-1, keepdim=True))  # a row that is not finite has NaN gradients
    shifted = excess(rows, radius)
    with torch.no_grad():
        theta, total, count = solver_for(shifted)(shifted.detach())
    if not plain:
        total, count = mass(shifted, theta)
    step = (total - 1) / count
    return radius * (shifted + theta).sub_(step).relu_(), torch.cat((theta, step), -1)


def simplex_tangent(rows: Tensor, radius: Tensor, cut: Tensor) -> Tangent:
    """J v = v - <1, v>_S / |S| on the support S, 0 elsewhere; dy/dr = 1/|S| on S."""
    chosen = positive(excess(rows, radius) + cut[..., :1] - cut[..., 1:])
    count = row_sum(chosen, keepdim=True)
    return Tangent(lambda v: chosen * (v - row_sum(chosen * v, keepdim=True) / count), chosen / count)


def l1(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = s * simplex(s * x), s = sgn(x); a ball keeps x where ||x||_1 <= r."""
    sign = torch.sign(rows.detach()) if ball else signs(rows)  # outside a ball no zero moves
    size = sign * rows
    magnitude, cut = simplex(size, radius)
    y = sign * magnitude
    return (choose(row_sum(size, keepdim=True) <= radius, rows, y) if ball else y), cut


def l1_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = v - s <s, v>_S / |S| on the support S; dy/dr = s/|S| on S; inside a ball J = 1, dy/dr = 0."""
    sign = signs(rows)
    face = simplex_tangent(sign * rows, radius, cut)
    outer = Tangent(lambda v: sign * face.apply(sign * v), sign * face.growth)
    return _keep_inside(outer, row_sum(rows.abs(), keepdim=True) <= radius) if ball else outer


def _keep_inside(outer: Tangent, inside: Tensor) -> Tangent:
    return Tangent(
        lambda v: choose(inside, v, outer.apply(v)),
        choose(inside, torch.zeros_like(outer.growth), outer.growth),
    )


def no_cut(rows: Tensor) -> Tensor:
    """The cut of a surface that needs none: [..., 0]."""
    return rows.new_empty(*rows.shape[:-1], 0)


def direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(x / ||x||, ||x||), scaled by max |x| before squaring; the zero row points to 1/sqrt(n) everywhere."""
    largest = rows.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    scaled = rows / torch.where(zero, torch.inf, largest) + zero.to(rows.dtype)
    length = row_sum(scaled.square(), keepdim=True).sqrt()
    return scaled / length, largest * length


def l2(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = r x / ||x||; a ball keeps x where ||x|| <= r."""
    unit, norm = direction(rows)
    y = radius * unit
    return (choose(norm <= radius, rows, y) if ball else y), no_cut(rows)


def l2_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = (r / ||x||) (v - u <u, v>), u = x / ||x||, and 0 at x = 0; dy/dr = u; inside a ball J = 1, dy/dr = 0."""
    unit, norm = direction(rows)
    zero = (norm == 0).to(norm.dtype)
    gain = (1 - zero) * (radius / (norm + zero)).clamp(max=1.0 if ball else torch.finfo(norm.dtype).max)
    outer = Tangent(lambda v: gain * (v - unit * row_sum(unit * v, keepdim=True)), unit)
    return _keep_inside(outer, norm <= radius) if ball else outer


def first_largest(rows: Tensor) -> Tensor:
    """The index of the first largest |x_i|, kept as [..., 1]."""
    return rows.detach().abs().argmax(-1, keepdim=True)


def linf(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = clip(x, -r, r); a sphere then has its first largest coordinate at r sgn(x_i), inside or outside."""
    y, none = clip(rows, -radius, radius), no_cut(rows)
    if ball:
        return y, none
    first = first_largest(rows)
    value = rows.gather(-1, first)
    return y.scatter(-1, first, torch.where(value.isnan(), value, radius * signs(value))), none


def linf_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = v off the pinned coordinates, dy/dr = sgn(x) on them: |x_i| > r, and the first largest on a sphere."""
    pinned = positive(rows.abs() - radius)
    if not ball:
        first = first_largest(rows)
        pinned = pinned.scatter(-1, first, 1.0 - rows.gather(-1, first).isnan().to(rows.dtype))
    return Tangent(lambda v: v * (1 - pinned), pinned * signs(rows))


SURFACES = {
    "l1_ball": Surface(partial(l1, ball=True), partial(l1_tangent, ball=True)),
    "l1_sphere": Surface(partial(l1, ball=False), partial(l1_tangent, ball=False)),
    "l2_ball": Surface(partial(l2, ball=True), partial(l2_tangent, ball=True)),
    "l2_sphere": Surface(partial(l2, ball=False), partial(l2_tangent, ball=False)),
    "linf_ball": Surface(partial(linf, ball=True), partial(linf_tangent, ball=True)),
    "linf_sphere": Surface(partial(linf, ball=False), partial(linf_tangent, ball=False)),
    "simplex": Surface(simplex, simplex_tangent),
}
