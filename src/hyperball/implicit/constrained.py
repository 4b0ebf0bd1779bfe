"""Constraints: an augmented Lagrangian, closed by Newton's method on the KKT conditions.

z = (u, lambda, mu) and R(z) = (grad_u L, h, G_i for active i, -mu_i for the others), where constraint i is
active if mu_i + G_i > 0; this choice at every step makes the iteration a primal-dual active-set method,
and |R| the distance from optimality, feasibility and complementarity in one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.derivatives import (
    Value,
    as_variable,
    default_tolerance,
    gradient,
    jacobian,
    largest,
    select,
)
from hyperball.implicit.descent import Minimum
from hyperball.implicit.problem import Problem
from hyperball.implicit.solvers import LBFGS, GradientDescent, Newton, Solver

CLOSING_STEPS = 20
DENSE_LIMIT = 512


class KKT(NamedTuple):
    """Row-wise result of a constrained solve."""

    minimum: Minimum
    z: Tensor  # (u, lambda, mu), [N, n + m]
    active: Tensor  # [N, m_G]


class Closing(NamedTuple):
    """State of the KKT-Newton iteration."""

    z: Tensor
    found: Tensor  # [N]
    steps: Tensor  # [N]
    residual: Tensor  # [N]


@dataclass(frozen=True)
class AugmentedLagrangian:
    """min_u f + <lambda, h> + rho/2 |h|^2 + |max(0, mu + rho G)|^2 / (2 rho), then lambda, mu and rho grow.

    `inner` minimizes it; after each round Newton's method on the KKT conditions tries to finish, and its
    answer is taken only where it is a local minimizer (the KKT matrix has as many negative eigenvalues as
    constraints). Beyond 512 variables and multipliers that dense closing is left out. `tolerance` is
    relative to the KKT residual at the start; None is 1e-11 in float64 and 1e-6 in float32.
    """

    inner: Solver = Newton()  # noqa: RUF009 - a frozen value
    tolerance: float | None = None
    max_steps: int = 40
    penalty: float = 10.0

    def __post_init__(self) -> None:
        checks.instance("inner", self.inner, (Solver,), (Newton, LBFGS, GradientDescent))
        checks.positive("tolerance", self.tolerance)
        checks.count("max_steps", self.max_steps)
        checks.positive("penalty", self.penalty)

    def solve(self, problem: Problem, start: Tensor) -> KKT:
        """Row-wise constrained argmin from `start` [N, n]."""
        n, equalities = problem.variables, problem.equalities(start).shape[1]
        multipliers = equalities + problem.inequalities(start).shape[1]
        z = torch.cat((start, start.new_zeros(start.shape[0], multipliers)), 1)
        first = residual_of(problem, z)
        goal = (self.tolerance or default_tolerance(z.dtype) / 10) * first
        possible = first.isfinite()
        steps = torch.zeros_like(possible, dtype=torch.int64)
        state = Closing(z, torch.zeros_like(possible), steps, first)
        state = close(problem, state, goal, possible)
        penalty = torch.full_like(first, self.penalty)
        violation = torch.full_like(first, torch.inf)
        for _ in range(self.max_steps):
            pending = possible & ~state.found
            if not pending.any():
                break
            u, dual = state.z[:, :n], state.z[:, n:]
            inner = self.inner.minimize(augmented(problem, dual, penalty, pending), u)
            dual, now = raised(problem, inner.u, dual, penalty, equalities)
            usable = pending & inner.u.isfinite().all(-1) & dual.isfinite().all(-1)
            z = select(usable, torch.cat((inner.u, dual), 1), state.z)
            state = Closing(z, state.found, state.steps + pending * inner.steps, residual_of(problem, z))
            state = close(problem, state, goal, pending)
            penalty = torch.where(pending & ~(now <= violation / 4), penalty * 10, penalty).clamp_max(1e12)
            violation = torch.where(pending, now, violation)
        minimum = Minimum(state.z[:, :n], state.found, state.steps, state.residual)
        return KKT(minimum, state.z, active_at(problem, state.z))


def split(problem: Problem, z: Tensor, inequalities: int) -> tuple[Tensor, Tensor, Tensor]:
    """u, lambda, mu."""
    n = problem.variables
    u, equality, inequality = z.split((n, z.shape[1] - n - inequalities, inequalities), 1)
    return u, equality, inequality


def active_at(problem: Problem, z: Tensor) -> Tensor:
    """mu + G > 0."""
    with torch.no_grad():
        g = problem.inequalities(z[:, : problem.variables])
        return z[:, z.shape[1] - g.shape[1] :] + g > 0


def condition(problem: Problem, z: Tensor, active: Tensor, attach: bool = False) -> tuple[Tensor, Tensor]:
    """(z, R(z)) for a given active set; R keeps its graph to the z returned."""
    with torch.enable_grad():
        z = as_variable(z, attach)
        u, equality, inequality = split(problem, z, active.shape[1])
        h, g = problem.equalities(u), problem.inequalities(u)
        pull = (equality * h).sum(-1) + torch.where(active, inequality * g, 0.0).sum(-1)
        slope = gradient(problem.value(u) + pull, u, attach=True)
        return z, torch.cat((slope, h, torch.where(active, g, -inequality)), 1)


def residual_of(problem: Problem, z: Tensor) -> Tensor:
    """|R(z)| with the active set of z."""
    return largest(condition(problem, z, active_at(problem, z))[1].detach())


def augmented(problem: Problem, dual: Tensor, penalty: Tensor, pending: Tensor) -> Value:
    """The augmented Lagrangian of u; rows that are not pending are constant."""

    def value_of(u: Tensor) -> Tensor:
        h, g = problem.equalities(u), problem.inequalities(u)
        equality, inequality = dual[:, : h.shape[1]], dual[:, h.shape[1] :]
        rho = penalty[:, None]
        push = ((inequality + rho * g).clamp_min(0) ** 2 - inequality**2) / (2 * rho)
        value = problem.value(u) + (equality * h + rho / 2 * h**2).sum(-1) + push.sum(-1)
        return torch.where(pending, value, 0.0)

    return value_of


def raised(
    problem: Problem,
    u: Tensor,
    dual: Tensor,
    penalty: Tensor,
    equalities: int,
) -> tuple[Tensor, Tensor]:
    """(lambda + rho h, max(0, mu + rho G)) and the largest violation."""
    with torch.no_grad():
        h, g = problem.equalities(u), problem.inequalities(u)
        equality, inequality = dual[:, :equalities], dual[:, equalities:]
        rho = penalty[:, None]
        violation = largest(torch.cat((h, torch.maximum(g, -inequality / rho)), 1))
        return torch.cat((equality + rho * h, (inequality + rho * g).clamp_min(0)), 1), violation


def regularized(matrix: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """(K - delta on the multipliers' diagonal, delta), which redundant constraints do not make singular."""
    delta = torch.finfo(matrix.dtype).eps ** 0.75 * matrix.detach().abs().amax((1, 2))
    diagonal = torch.arange(matrix.shape[1], device=matrix.device) >= n
    return matrix - torch.diag_embed(delta[:, None] * diagonal), delta


def close(problem: Problem, state: Closing, goal: Tensor, pending: Tensor) -> Closing:
    """Newton on R(z) = 0 for the pending rows; only rows that reach a local minimizer are changed."""
    if state.z.shape[1] > DENSE_LIMIT:
        return state._replace(found=state.found | (pending & (state.residual <= goal)))
    n, z = problem.variables, state.z
    found, running, used = torch.zeros_like(pending), pending, torch.zeros_like(state.steps)
    for _ in range(CLOSING_STEPS):
        variable, residual = condition(problem, z, active_at(problem, z))
        running = running & residual.detach().isfinite().all(-1)
        found = found | (running & (largest(residual.detach()) <= goal))
        running = running & ~found
        if not running.any():
            break
        matrix = jacobian(residual, variable).detach()
        found = found | (running & at_rounding(matrix, z, residual.detach()))
        step = torch.linalg.solve_ex(regularized(matrix, n)[0], -residual.detach()[..., None]).result[..., 0]
        running = running & ~found & step.isfinite().all(-1)
        z = select(running, z + step, z)
        used = used + running
    found = found & is_minimizer(problem, z)
    return Closing(
        select(found, z, state.z),
        state.found | found,
        state.steps + used,
        torch.where(found, residual_of(problem, z), state.residual),
    )


def at_rounding(matrix: Tensor, z: Tensor, residual: Tensor) -> Tensor:
    """|R_i| <= 16 eps sum_j |K_ij z_j| for every i: R is what rounding leaves of its terms."""
    terms = (matrix * z[:, None, :]).abs().sum(-1)
    return (residual.abs() <= 16 * torch.finfo(z.dtype).eps * terms).all(-1)


def is_minimizer(problem: Problem, z: Tensor) -> Tensor:
    """Whether K has exactly one negative eigenvalue per multiplier: H is positive on the tangent space."""
    variable, residual = condition(problem, z, active_at(problem, z))
    matrix, delta = regularized(jacobian(residual, variable).detach(), problem.variables)
    matrix = (matrix + matrix.mT) / 2
    finite = matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(select(finite, matrix, torch.zeros_like(matrix)))
    negative = (values < -delta.nan_to_num()[:, None] / 10).sum(-1)
    return finite & (negative == z.shape[1] - problem.variables)


def attached_steps(problem: Problem, kkt: KKT, count: int) -> Tensor:
    """z after `count` differentiated KKT-Newton steps from the solution; only its derivative changes."""
    z = kkt.z
    for _ in range(count):
        z, residual = condition(problem, z, kkt.active, attach=True)
        matrix, _ = regularized(jacobian(residual, z, attach=True), problem.variables)
        step = torch.linalg.solve_ex(matrix, -residual[..., None]).result[..., 0]
        z = z + select(kkt.minimum.converged, step, torch.zeros_like(step))
    return z
