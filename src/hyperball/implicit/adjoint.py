"""How the minimizer gets its derivative: the implicit function theorem, or differentiated iterates.

Implicit function theorem: R(z; x) = 0 gives dz/dx = -K^-1 dR/dx with K = dR/dz. The code writes it as
chord steps z_{k+1} = z_k - K^-1 (R(z_k; x) - R(z_0; x_0)) with K fixed at the solution: their value is the
solution's, and k steps have the right derivatives up to order k. Whatever R's graph reaches (inputs,
parameters in closures, tensors computed elsewhere) gets its gradient from autograd.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.constrained import KKT, condition
from hyperball.implicit.linear import Apply, ConjugateGradient, Dense, LinearSolver, System
from hyperball.implicit.problem import Problem
from hyperball.implicit.solution import OnFailure


@dataclass(frozen=True)
class Implicit:
    """One linear solve per backward: K w = v, then -w pulled back through R.

    `linear` None is Dense up to 64 variables and multipliers, ConjugateGradient beyond. `order` is how
    often the result can be differentiated; one derivative more is refused with an error.
    """

    linear: LinearSolver | None = None
    order: int = 1

    def __post_init__(self) -> None:
        if self.linear is not None:
            checks.instance("linear", self.linear, (LinearSolver,), (Dense, ConjugateGradient))
        checks.count("order", self.order)


@dataclass(frozen=True)
class Unrolled:
    """Backpropagation through the solver's steps, and through `extra` Newton steps past convergence.

    A derivative converges behind its iterate, and from a warm start there are hardly any iterates: each closing step
    squares the derivative's error. They are for up to 512 variables. `extra=0` is the derivative of the iterates alone.
    With constraints only the closing steps, on the KKT conditions, are differentiated. Memory grows with the steps.
    """

    extra: int = 2

    def __post_init__(self) -> None:
        checks.count("extra", self.extra, least=0)


class Inverse:
    """K^-1 of a system, prepared at the first backward."""

    def __init__(self, system: System, linear: LinearSolver) -> None:
        self.system, self.linear = system, linear
        self.prepared: Apply | None = None

    def __call__(self, v: Tensor) -> Tensor:
        if self.prepared is None:
            self.prepared = self.linear.prepare(self.system)
        return self.prepared(v)


class Solve(torch.autograd.Function):
    """v -> K^-1 v, its own transpose."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, inverse: Inverse) -> Tensor:
        ctx.inverse = inverse
        return inverse(v)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None]:
        return Solve.apply(v, ctx.inverse), None


class Limit(torch.autograd.Function):
    """Zero, with a graph to R that allows `left` further derivatives and refuses the next."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, left: int) -> Tensor:
        ctx.save_for_backward(residual)
        ctx.left = left
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, None]:
        checks.derivatives_left(ctx.left)
        (residual,) = ctx.saved_tensors
        return (Limit.apply(residual, ctx.left - 1) if torch.is_grad_enabled() else None), None


class Correction(torch.autograd.Function):
    """-K^-1 (R - R.detach()): zero, with the derivative -K^-1."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, inverse: Inverse, order: int) -> Tensor:
        ctx.save_for_backward(residual)
        ctx.inverse, ctx.order = inverse, order
        return torch.zeros_like(residual)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        w = -Solve.apply(v, ctx.inverse)
        if torch.is_grad_enabled():
            w = w + Limit.apply(*ctx.saved_tensors, ctx.order - 1)
        return w, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return Limit.apply(tangent, 0) - ctx.inverse(tangent.detach())


def attach(problem: Problem, kkt: KKT, adjoint: Implicit, on_failure: OnFailure) -> Tensor:
    """The minimizer [N, n] with the derivative of the implicit function theorem."""
    linear = adjoint.linear or (Dense() if kkt.z.shape[1] <= checks.DENSE_LIMIT else ConjugateGradient())
    variable, residual = condition(problem, kkt.z, kkt.active)
    system = System(residual, variable, problem.variables, kkt.minimum.converged, on_failure)
    inverse = Inverse(system, linear)
    z = kkt.z.detach() + Correction.apply(residual, inverse, adjoint.order)
    for _ in range(adjoint.order - 1):
        _, residual = condition(problem, z, kkt.active, attach=True)
        z = z + Correction.apply(residual, inverse, adjoint.order)
    return z[:, : problem.variables]
