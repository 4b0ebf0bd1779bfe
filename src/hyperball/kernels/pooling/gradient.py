"""The implicit gradient of y = argmin_u Σ_i w_i·phi(u − x_i), from x and y alone.

With z = y − x, J_i = w_i·phi''(z_i)/D and D = max(Σ w·phi'', 1e-3·Σ w·s), s the gain:
dy = Σ J·dx + (1/c)Σ z·J·dc − (1/D)Σ w·z·(ds/dshape)·dshape − (1/D)Σ psi·dw.
Where D is not Σ w·phi'' the row is damped: its direction is kept, its ΣJ is below 1. A row of huber without an inlier,
and every row of absolute, moves with its two middle samples, one half each (shared among ties).
A row whose y is NaN passes NaN on only where it holds a sample and its y is used; else it contributes nothing.
Everything is plain torch on x and y, so the second derivative is autograd's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.pooling.solver import gain_and_curvature
from hyperball.kernels.reading import can_look, row_sum
from hyperball.rows import Value

DAMPING = 1e-3
WITH_MIDDLE = ("huber", "absolute")


class Broken(NamedTuple):
    """The rows whose y is NaN, and the rows that hold a sample, [R, 1]."""

    rows: Tensor
    held: Tensor

    def keep(self, moved: Tensor, v: Tensor, weights: Tensor | None = None) -> Tensor:
        """`moved`, [R, …], but in a broken row NaN if it holds a sample and its v, [R, d], is not 0, else 0.

        With weights [R, n], what belongs to a sample of weight 0 stays as it is.
        """
        used = self.held & (v != 0).any(-1, keepdim=True)
        fate, rows = torch.where(used, torch.nan, 0.0).to(moved.dtype), self.rows
        if weights is not None:
            rows, fate = rows & (weights > 0), fate.expand_as(weights)
        further = (...,) + (None,) * (moved.dim() - 2)
        return torch.where(rows[further], fate[further], moved)


def broken_rows(y: Tensor, weights: Tensor | None) -> Broken | None:
    """Of y [R, d] and weights None or [R, n]; None where no row is broken for certain."""
    rows = y.detach().isnan().any(-1, keepdim=True)
    if not may_hold_somewhere(rows):
        return None
    return Broken(rows, torch.ones_like(rows) if weights is None else (weights.detach() > 0).any(-1, keepdim=True))


class Tangent(NamedTuple):
    """The derivative at a solution, per row [R, n] or [R, 1]."""

    share: Tensor  # J
    divisor: Tensor  # D
    z: Tensor
    s: Tensor
    curvature: Tensor
    by_middle: Tensor | None  # rows that move with their middle samples
    damped: Tensor
    broken: Broken | None

    def pull(self, v: Tensor, partial: Tensor, weights: Tensor | None = None) -> Tensor:
        """v·partial of every row, v [R, 1]; see `Broken.keep`."""
        moved = v * partial
        return moved if self.broken is None else self.broken.keep(moved, v, weights)


def clean(rows: Tensor, weights: Tensor | None) -> Tensor:
    """The samples as the solver sees them: 0 where the weight is 0, ±inf bounded."""
    bound = torch.finfo(rows.dtype).max / 8
    kept = rows if weights is None else torch.where(weights > 0, rows, 0.0)
    return kept.clamp(-bound, bound)


def tangent(rows: Tensor, weights: Tensor | None, value: Value, y: Tensor) -> Tangent:
    """The derivative of every row; rows [R, n], weights None or [R, n], parameters numbers or [R, 1], y [R]."""
    rows, y = clean(rows, weights), clean(y, None)
    z, broken = y.unsqueeze(-1) - rows, broken_rows(y.unsqueeze(-1), weights)
    if broken is not None:  # what is finite here stays so in derivatives of any order
        z = torch.where(broken.rows, 0.0, z)
    s, curvature = summable(value, *gain_and_curvature(value, z.abs()))
    h = curvature if weights is None else weights * curvature
    total, gains = row_sum(h).unsqueeze(-1), row_sum(s if weights is None else weights * s).unsqueeze(-1)
    divisor = torch.maximum(total, DAMPING * gains)
    usable = divisor > 0
    share = torch.where(usable, h / torch.where(usable, divisor, 1.0), 0.0)
    by_middle = None
    if value.name in WITH_MIDDLE:
        by_middle = total <= 0
        if may_hold_somewhere(by_middle):
            share = torch.where(by_middle, middle_share(rows, weights, y), share)
    damped = (total < DAMPING * gains) if by_middle is None else (total < DAMPING * gains) & ~by_middle
    if weights is not None:
        share = torch.where(weights > 0, share, 0.0)
    return Tangent(share, divisor, z, s, curvature, by_middle, damped.squeeze(-1), broken)


def summable(value: Value, s: Tensor, curvature: Tensor) -> tuple[Tensor, Tensor]:
    """Both, bounded so that a row's sum is finite: beyond shape 2 barron's grow without limit."""
    shape: Any = value.parameters["shape"] if value.name == "barron" else 2.0
    if not isinstance(shape, Tensor) and shape <= 2.0:
        return s, curvature
    limit = torch.finfo(s.dtype).max / (8 * s.shape[-1])
    return s.clamp(max=limit), curvature.clamp(max=limit)


def may_hold_somewhere(condition: Tensor) -> bool:
    """False only where the condition can be read for free, on a CPU, and holds nowhere."""
    if condition.device.type != "cpu" or not can_look(condition):
        return True
    try:
        return bool(condition.any())
    except RuntimeError:  # inside vmap a value cannot be read
        return True


def middle_share(rows: Tensor, weights: Tensor | None, y: Tensor) -> Tensor:
    """One half on the greatest sample ≤ y and one on the least ≥ y, shared among equal samples."""
    rows, at = rows.detach(), y.detach().unsqueeze(-1)
    absent = torch.zeros_like(rows, dtype=torch.bool) if weights is None else weights <= 0
    low = rows.masked_fill(absent | (rows > at), -torch.inf).amax(-1, keepdim=True)
    high = rows.masked_fill(absent | (rows < at), torch.inf).amin(-1, keepdim=True)
    on_low, on_high = ((rows == end) & ~absent for end in (low, high))
    return sum(on.to(rows.dtype) / on.sum(-1, keepdim=True).clamp(min=1) / 2 for on in (on_low, on_high))  # type: ignore[return-value]


def parameter_partials(value: Value, weights: Tensor | None, t: Tangent) -> Iterator[Tensor]:
    """dy/dθ per row, for every tensor parameter in the order of `rows.flatten`."""
    for key, held in value.parameters.items():
        if isinstance(held, Tensor):
            yield _partial(value, key, held, weights, t)


def _partial(value: Value, key: str, held: Tensor, weights: Tensor | None, t: Tangent) -> Tensor:
    row = value.row
    if not row.composed and key == "rho":
        return row_sum(t.z * t.share) / held.squeeze(-1)
    if not row.composed and key == "alpha":  # it multiplies the whole objective
        return torch.zeros_like(t.z[..., 0])
    if row.partials and key in row.partials:
        slope = row.partials[key](t.z.abs(), t.s, t.curvature, **value.parameters)
    else:
        slope = _gain_slope(value, key, held, t.z.abs())
    moved = t.z * slope if weights is None else t.z * slope * weights
    return -(row_sum(moved) / _positive(t.divisor).squeeze(-1))


def _gain_slope(value: Value, key: str, held: Tensor, n: Tensor) -> Tensor:
    """ds/dθ of a user-defined row, by forward-mode differentiation."""

    def gain(parameter: Tensor) -> Tensor:
        return value.row.gain(n, **{**value.parameters, key: parameter})

    return torch.func.jvp(gain, (held.clone(),), (torch.ones_like(held),))[1]


def weight_partial(t: Tangent) -> Tensor:
    """dy/dw = −psi/D; a row that moves with its middle samples does not move with their weights."""
    slope = -(t.s * t.z) / _positive(t.divisor)
    return slope if t.by_middle is None else torch.where(t.by_middle, 0.0, slope)


def _positive(divisor: Tensor) -> Tensor:
    return torch.where(divisor > 0, divisor, 1.0)
