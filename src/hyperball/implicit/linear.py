"""Linear systems K w = v of the derivative, symmetric and batched, K = [[H, A^T], [A, 0]].

K is given by the graph of the optimality condition R(z), of which it is the Jacobian; its first n rows
and columns belong to u, the rest to the multipliers of the active constraints (none: K = H).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.derivatives import dot, jacobian, largest, select
from hyperball.implicit.solution import OnFailure, first_of, report

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class System:
    """K = dR/dz at z, where R and z are [N, n + m]."""

    residual: Tensor
    z: Tensor
    n: int
    converged: Tensor  # [N]; other rows were reported before
    on_failure: OnFailure

    def product(self, w: Tensor) -> Tensor:
        """K w by one backward pass (K is symmetric)."""
        with torch.enable_grad():
            (result,) = torch.autograd.grad(self.residual, self.z, w, retain_graph=True)
        return result

    def matrix(self) -> Tensor:
        """K itself, one backward pass a row."""
        with torch.enable_grad():
            matrix = jacobian(self.residual, self.z).detach()
        return (matrix + matrix.mT) / 2

    def constraint_rows(self) -> Tensor:
        """A, the rows of K that belong to multipliers, as [N, m, n]."""
        with torch.enable_grad():
            return jacobian(self.residual[:, self.n :], self.z).detach()[:, :, : self.n]


class LinearSolver(ABC):
    """Settings of a linear solver."""

    @abstractmethod
    def prepare(self, system: System) -> Apply:
        """A function v -> K^-1 v on [N, n + m]."""


@dataclass(frozen=True)
class Dense(LinearSolver):
    """w = V diag(1/lambda) V^T v from one eigendecomposition, kept for later backward passes.

    A singular K means that the minimizer is not isolated (or constraints are redundant). That is reported
    as `on_failure` says and then the pseudo-inverse is used; `pseudo_inverse=True` uses it without report,
    which is right where the loss does not see the directions in which the minimizer is free.
    """

    pseudo_inverse: bool = False

    def prepare(self, system: System) -> Apply:
        matrix = system.matrix()
        finite = matrix.isfinite().all(-1).all(-1)
        inverse = SymmetricInverse.of(select(finite, matrix, torch.zeros_like(matrix)))
        bad = system.converged & ~finite
        if not self.pseudo_inverse:
            bad = bad | (system.converged & inverse.singular)
        if bad.any():
            report(
                f"the second derivative of the problem is singular or not finite at the minimizer of "
                f"{first_of(bad)}: no isolated minimizer, a kink, or redundant constraints; if only a "
                "direction is free that the loss ignores, use adjoint=Implicit(Dense(pseudo_inverse=True))",
                system.on_failure,
            )
        return inverse.apply


class SymmetricInverse(NamedTuple):
    """V diag(1/lambda) V^T with 1/0 read as 0."""

    vectors: Tensor
    inverse: Tensor
    singular: Tensor

    @staticmethod
    def of(matrix: Tensor) -> "SymmetricInverse":
        """The pseudo-inverse of each symmetric matrix."""
        values, vectors = torch.linalg.eigh(matrix)
        kept = values.abs() > 4 * values.shape[-1] * torch.finfo(values.dtype).eps * largest(values)[:, None]
        inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
        return SymmetricInverse(vectors, inverse, ~kept.all(-1))

    def apply(self, v: Tensor) -> Tensor:
        """K^-1 v."""
        return apply(self.vectors, self.inverse * apply(self.vectors.mT, v))


@dataclass(frozen=True)
class ConjugateGradient(LinearSolver):
    """w by conjugate gradients on the directions that keep the active constraints; only products H p.

    `tolerance` is relative to the right-hand side; None is 1e-12 in float64 and 6e-6 in float32.
    `max_steps` None is ten times the number of variables.
    """

    tolerance: float | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        checks.positive("tolerance", self.tolerance)
        if self.max_steps is not None:
            checks.count("max_steps", self.max_steps)

    def prepare(self, system: System) -> Apply:
        n = system.n
        rows = system.constraint_rows()
        gram = SymmetricInverse.of(rows @ rows.mT)

        def product(w: Tensor) -> Tensor:
            return system.product(torch.cat((w, w.new_zeros(w.shape[0], rows.shape[1])), 1))[:, :n]

        def multipliers(v: Tensor) -> Tensor:  # least squares: A^T y = v
            return gram.apply(apply(rows, v))

        def tangent(v: Tensor) -> Tensor:
            return v - apply(rows.mT, multipliers(v))

        def solve(v: Tensor) -> Tensor:
            along = apply(rows.mT, gram.apply(v[:, n:]))
            right = tangent(v[:, :n] - product(along))
            w = along + self._iterate(lambda p: tangent(product(p)), right, largest(v), system)
            return torch.cat((w, multipliers(v[:, :n] - product(w))), 1)

        return solve

    def _iterate(self, product: Apply, right: Tensor, size: Tensor, system: System) -> Tensor:
        tolerance = self.tolerance or torch.finfo(right.dtype).eps ** 0.75
        goal = tolerance * size
        failed = ~right.isfinite().all(-1)
        r = p = select(failed, torch.zeros_like(right), right)
        w, square = torch.zeros_like(right), dot(r, r)
        active = largest(r) > goal
        for _ in range(self.max_steps or 10 * right.shape[1]):
            active = active & ~failed
            if not active.any():
                break
            image = product(p)
            curvature = dot(p, image)
            failed = failed | (active & ~(curvature > 0))
            length = torch.where(active & ~failed, square / torch.where(curvature > 0, curvature, 1), 0.0)
            w, r = w + length[:, None] * p, r - length[:, None] * image
            last, square = square, dot(r, r)
            p = select(active, r + (square / torch.where(last > 0, last, 1))[:, None] * p, p)
            active = active & (largest(r) > goal)
        if (bad := (active | failed) & system.converged).any():
            report(
                f"conjugate gradients found no derivative for {first_of(bad)}: the second derivative of "
                "`objective` is not positive definite there, or `max_steps` is too small; use "
                "adjoint=Implicit(Dense())",
                system.on_failure,
            )
        return w


def apply(matrix: Tensor, v: Tensor) -> Tensor:
    """M v for each row, summed in one order whatever the batch and the strides."""
    return (matrix.contiguous() * v[:, None, :]).sum(-1)
