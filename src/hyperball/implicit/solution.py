"""What a solve gives back, and how a failure is reported."""

import warnings
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

OnFailure = Literal["raise", "warn", "ignore"]
ON_FAILURE: tuple[OnFailure, ...] = ("raise", "warn", "ignore")


class ConvergenceError(RuntimeError):
    """A minimizer, or the linear system of its derivative, was not found."""


class ConvergenceWarning(UserWarning):
    """The same news as ConvergenceError under `on_failure="warn"`."""


@dataclass(frozen=True)
class Solution:
    """The answer of `argmin(..., full=True)`; every field but `value` has the batch shape and no gradient.

    value: the minimizers, shaped as `init`; differentiable.
    converged: whether each element met its stopping rule.
    steps: iterations spent on each element.
    residual: largest entry of the optimality condition, |grad f| or the KKT residual.
    curvature: least eigenvalue of the second derivative of f (beyond 64 variables a Lanczos estimate); negative at a
        maximum or saddle, which does not count as converged. None with constraints, whose KKT points are checked too.
    equality_multipliers, inequality_multipliers: [*batch, m], where there are such constraints.
    """

    value: Tensor
    converged: Tensor
    steps: Tensor
    residual: Tensor
    equality_multipliers: Tensor | None = None
    inequality_multipliers: Tensor | None = None
    curvature: Tensor | None = None


def report(message: str, on_failure: OnFailure) -> None:
    """Raise, warn or say nothing."""
    if on_failure == "raise":
        raise ConvergenceError(message)
    if on_failure == "warn":
        warnings.warn(message, ConvergenceWarning, stacklevel=5)


def first_of(mask: Tensor) -> str:
    """'2 of 16 elements (first: 3, 7)' for a flat mask."""
    where = mask.nonzero().flatten().tolist()
    return f"{len(where)} of {mask.numel()} elements (first: {', '.join(map(str, where[:5]))})"
