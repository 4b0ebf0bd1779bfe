"""The eager solver behind robust estimates of location: y = argmin_u Σ_i w_i·phi(u − x_i), one u a row.

A row is any set of samples that `Reduction` can sum over: the last dimension of a matrix, all positions of a
channel, a shard of them on each rank. Rows never influence one another: a row that has settled is left alone, so its
result does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.reading import can_look, row_sum
from hyperball.rows import Value

NEWTON_SHARE = 1e-4  # below this share of Σ gain, the curvature is no guide and the IRLS step is taken
MAX_STEPS = 200


@dataclass(frozen=True)
class Reduction:
    """How samples form rows.

    total((a, b, …)) sums per-sample tensors of x's shape over each row's samples, all in one call so that a
    distributed reduction can be one message; spread(r) makes a per-row tensor broadcast against x.
    """

    total: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    spread: Callable[[Tensor], Tensor]


class Solution(NamedTuple):
    """The minimizers, the steps each row took, and |Σ w·psi| where the row was last evaluated."""

    y: Tensor
    steps: Tensor
    gradient: Tensor


MATRIX = Reduction(
    total=lambda values: tuple(row_sum(value) for value in values),
    spread=lambda row: row.unsqueeze(-1),
)


def gain_and_curvature(value: Value, n: Tensor) -> tuple[Tensor, Tensor]:
    """(s, psi') of lengths n, with s = psi/n; psi' by autograd where the row gives none."""
    row, parameters = value.row, value.parameters
    if not row.composed:
        pair: tuple[Tensor, Tensor] = row.gain_and_curvature(n, **parameters)
        return pair
    return row.gain(n, **parameters), torch.func.grad(lambda t: (t * row.gain(t, **parameters)).sum())(n)


def row_totals(
    y: Tensor, x: Tensor, value: Value, weights: Tensor | None, reduction: Reduction
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(g, G, H, W) = Σ w·(psi, |psi|, psi', s) at y, with z = y − x and psi = s·z."""
    z = reduction.spread(y) - x
    n = z.abs()
    s, h = gain_and_curvature(value, n)
    psi = s * z
    samples: tuple[Tensor, ...] = (psi, psi.abs(), h, s)
    if weights is not None:
        samples = tuple(sample * weights for sample in samples)
    g, size, curvature, gains = reduction.total(samples)
    return g, size, curvature, gains


def _beyond(y: Tensor, g: Tensor, low: Tensor, high: Tensor, nudged: Tensor) -> Tensor:
    """Where to look when a step is too short to count though g is not small: past the next numbers, then halfway."""
    near = y - g.sign() * (4 * torch.finfo(y.dtype).eps) * y.abs()
    return torch.where(nudged | ~((near > low) & (near < high)), low / 2 + high / 2, near)


def solve(
    x: Tensor,
    value: Value,
    *,
    start: Tensor,
    lower: Tensor,
    upper: Tensor,
    reduction: Reduction = MATRIX,
    weights: Tensor | None = None,
    settled: Tensor | None = None,
    steps: int | None = None,
) -> Solution:
    """y with Σ w·psi(y − x) = 0 per row, by safeguarded Newton inside [lower, upper].

    A row takes the step −g/H (−g/W, the IRLS step, where H ≤ 1e-4·W) if that stays in the bracket and is at most
    half the step before last, else it bisects. It settles at g's rounding error, or with a step of at most 2 ulp in a
    bracket of 4; where such a step comes earlier, c may be below an ulp of y, and it looks further.

    Args:
        value: a penalty whose parameters broadcast against x.
        start, lower, upper: per row; Σ w·psi is ≤ 0 at lower and ≥ 0 at upper, as it is at min x and max x.
        weights: w_i ≥ 0, broadcasting against x.
        settled: rows whose start is already the answer.
        steps: a fixed number of steps; None iterates until every row has settled (at most 200).
    """
    eps = torch.finfo(start.dtype).eps
    y, low, high = start, lower, upper
    last = before = torch.full_like(start, torch.inf)
    done = torch.zeros_like(start, dtype=torch.bool) if settled is None else settled
    taken = torch.zeros_like(start, dtype=torch.int32)
    nudged = torch.zeros_like(done)
    slope = torch.zeros_like(start)
    look = can_look(start) and (steps is None or start.device.type == "cpu")  # leaving early changes no row
    for _ in range(MAX_STEPS if steps is None else steps):
        g, size, curvature, gains = row_totals(y, x, value, weights, reduction)
        slope = torch.where(done, slope, g.abs())
        low, high = torch.where(g < 0, y, low), torch.where(g > 0, y, high)
        target = y - g / torch.where(curvature > NEWTON_SHARE * gains, curvature, gains)
        accepted = (target >= low) & (target <= high) & ((target - y).abs() <= before / 2)
        target = torch.where(accepted, target, low / 2 + high / 2)
        moved, ulp = (target - y).abs(), eps * y.abs()
        flat, short = ~(g.abs() > eps * size), ~(moved > 2 * ulp)  # so does NaN
        small = flat | (short & ~(high - low > 4 * ulp))
        stuck = short & ~small
        target = torch.where(stuck, _beyond(y, g, low, high, nudged), target)
        moved, accepted, nudged = torch.where(stuck, (target - y).abs(), moved), accepted & ~stuck, nudged | stuck
        y = torch.where(done | (small & ~accepted), y, target)
        done = done | small
        before, last = last, moved
        taken = taken + (~done).to(taken.dtype)
        if look and bool(done.all()):
            break
    return Solution(y, taken, slope)
