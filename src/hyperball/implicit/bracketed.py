"""A scalar minimizer inside a bracket: Newton on f' where it stays inside, bisection elsewhere."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.derivatives import Point, Value, default_tolerance, evaluate, hessian, select
from hyperball.implicit.descent import Minimum
from hyperball.implicit.solvers import Solver


@dataclass(frozen=True, eq=False)
class BracketedScalar(Solver):
    """f'(u) = 0 in [lo, hi] for one variable per element, where f'(lo) <= 0 <= f'(hi).

    `lo` and `hi` are numbers, or tensors with one entry per element. An element without that sign change
    has no interior minimizer there and counts as not converged. Of several minimizers one is found.
    """

    lo: float | Tensor
    hi: float | Tensor
    tolerance: float | None = None
    max_steps: int = 200

    def __post_init__(self) -> None:
        checks.positive("tolerance", self.tolerance)
        checks.count("max_steps", self.max_steps)
        lo, hi = torch.as_tensor(self.lo), torch.as_tensor(self.hi)
        if not (lo.isfinite().all() and hi.isfinite().all()):
            raise ValueError(f"`lo` and `hi` must be finite, got {self.lo} and {self.hi}")
        if not (lo < hi).all():
            raise ValueError(f"`lo` must be < `hi`, got {self.lo} and {self.hi}")

    def minimize(self, value_of: Value, start: Tensor, attach: bool = False, extra: int = 0) -> Minimum:
        if start.shape[1] != 1:
            raise ValueError(f"`solver` BracketedScalar needs one variable per element, got {start.shape[1]}")
        tolerance = self.tolerance or default_tolerance(start.dtype)
        lo, hi = (spread(name, end, start) for name, end in (("lo", self.lo), ("hi", self.hi)))
        search = Search(lo, hi, hi - lo, hi - lo)
        at_lo, at_hi = (evaluate(value_of, end).gradient[:, 0] for end in (lo[:, None], hi[:, None]))
        goal = tolerance * torch.maximum(at_lo.abs(), at_hi.abs()).nan_to_num(posinf=0.0)
        point = evaluate(value_of, start.clamp(lo[:, None], hi[:, None]), attach)
        bracketed = (at_lo <= 0) & (at_hi >= 0)
        found = bracketed & (point.gradient.detach()[:, 0].abs() <= goal)
        steps = torch.zeros_like(found, dtype=torch.int64)
        for _ in range(self.max_steps):
            active = bracketed & ~found
            if not active.any():
                break
            point, search, settled = search.advance(value_of, point, active, attach)
            steps = steps + active
            found = found | (active & (settled | (point.gradient.detach()[:, 0].abs() <= goal)))
        for _ in range(extra):
            step = newton_step(value_of, point, attach=True)
            point = evaluate(value_of, point.u + select(found, step, torch.zeros_like(step)), attach=True)
        return Minimum(point.u, found, steps, point.gradient.detach()[:, 0].abs())


class Search(NamedTuple):
    """The bracket of each row and the lengths of its last two steps."""

    lo: Tensor
    hi: Tensor
    last: Tensor
    before: Tensor

    def advance(
        self,
        value_of: Value,
        point: Point,
        active: Tensor,
        attach: bool,
    ) -> tuple[Point, "Search", Tensor]:
        """Newton if it stays inside and at most halves the step before last, else the midpoint."""
        u, slope = point.u.detach()[:, 0], point.gradient.detach()[:, 0]
        lo = torch.where(active & (slope <= 0), u, self.lo)
        hi = torch.where(active & (slope >= 0), u, self.hi)
        step = newton_step(value_of, point, attach)
        length = step.detach()[:, 0]
        inside = (u + length >= lo) & (u + length <= hi) & (2 * length.abs() <= self.before) & (length != 0)
        target = select(inside, point.u + step, (lo + (hi - lo) / 2)[:, None])
        target = select(active, target, point.u)
        moved = (target.detach()[:, 0] - u).abs()
        ulp = torch.finfo(u.dtype).eps * u.abs()
        settled = (moved <= 2 * ulp) | (hi - lo <= 2 * ulp)
        last = torch.where(active, moved, self.last)
        before = torch.where(active, self.last, self.before)
        return evaluate(value_of, target, attach), Search(lo, hi, last, before), settled


def newton_step(value_of: Value, point: Point, attach: bool) -> Tensor:
    """-f'/f'' where f'' > 0, else 0."""
    curvature = hessian(value_of, point.u, attach)[:, 0]
    convex = curvature.detach() > 0
    step = -point.gradient / torch.where(convex, curvature, torch.ones_like(curvature))
    return torch.where(convex & step.detach().isfinite(), step, torch.zeros_like(step))


def spread(name: str, end: float | Tensor, start: Tensor) -> Tensor:
    """One bracket end per row."""
    end = torch.as_tensor(end, dtype=start.dtype, device=start.device)
    if end.numel() not in (1, start.shape[0]):
        raise ValueError(
            f"`{name}` must be a number or have one entry per element ({start.shape[0]}), got {end.numel()}"
        )
    return end.reshape(-1).expand(start.shape[0])
