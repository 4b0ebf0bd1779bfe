"""The table of problems and solvers that the tests of `hyperball.implicit` loop over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.implicit import LBFGS, BracketedScalar, GradientDescent, Newton

D = torch.float64


@dataclass(frozen=True)
class Case:
    """One batch of problems: f(x, u), a random x and a start."""

    objective: Callable[[Any, Tensor], Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    init: Tensor

    def make(self) -> tuple[Tensor, ...]:
        """The same x at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return self.inputs()


def robust_mean(x: tuple[Tensor], u: Tensor) -> Tensor:
    """sum_i sqrt(1 + (x_i - u)^2): scalar u."""
    return (torch.sqrt(1 + (x[0] - u[..., None]) ** 2) - 1).sum(-1)


def ridge(x: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
    """|A u - b|^2 + 0.1 |u|^2: quadratic."""
    return ((x[0] @ u[..., None])[..., 0] - x[1]).square().sum(-1) + 0.1 * u.square().sum(-1)


def logistic(x: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
    """Logistic regression with a ridge: convex, not quadratic."""
    return F.softplus(-(x[0] @ u[..., None])[..., 0] * x[1]).sum(-1) + 0.1 * u.square().sum(-1)


def quartic(x: tuple[Tensor], u: Tensor) -> Tensor:
    """|u - x|^2 + sum u^4 / 10 + 0.3 <u_rows, next row>: u is a matrix."""
    coupling = 0.3 * (u[..., :-1, :] * u[..., 1:, :]).sum((-2, -1))
    return (u - x[0]).square().sum((-2, -1)) + 0.1 * u.pow(4).sum((-2, -1)) + coupling


def valley(x: tuple[Tensor], u: Tensor) -> Tensor:
    """(x - u_1)^2 + 2 (u_2 - u_1^2)^2: curved, the Hessian is indefinite above the valley."""
    return (x[0] - u[..., 0]).square() + 2 * (u[..., 1] - u[..., 0].square()).square()


CASES = {
    "robust mean": Case(robust_mean, lambda: (3 * torch.randn(5, 7, dtype=D),), torch.zeros(5, dtype=D)),
    "ridge": Case(
        ridge,
        lambda: (torch.randn(4, 9, 3, dtype=D), torch.randn(4, 9, dtype=D)),
        torch.zeros(4, 3, dtype=D),
    ),
    "logistic": Case(
        logistic,
        lambda: (torch.randn(4, 12, 3, dtype=D), torch.randn(4, 12, dtype=D)),
        torch.zeros(4, 3, dtype=D),
    ),
    "quartic": Case(quartic, lambda: (torch.randn(2, 3, 2, 3, dtype=D),), torch.zeros(2, 3, 2, 3, dtype=D)),
    "valley": Case(
        valley,
        lambda: (0.5 + torch.rand(4, dtype=D),),
        torch.tensor([[0.1, 0.9]], dtype=D).repeat(4, 1),
    ),
    "one problem": Case(
        lambda x, u: ((u - x[0]).square() + 0.1 * u.pow(4)).sum(),
        lambda: (torch.randn(3, dtype=D),),
        torch.zeros(3, dtype=D),
    ),
}

SOLVERS = {
    "Newton": Newton(tolerance=1e-13),
    "LBFGS": LBFGS(tolerance=1e-13),
    "GradientDescent": GradientDescent(tolerance=1e-13),
    "GradientDescent(rate)": GradientDescent(rate=0.025, tolerance=1e-11),
    "BracketedScalar": BracketedScalar(-20.0, 20.0, tolerance=1e-14),
}

# Bracketing is for one variable; a fixed rate is too long or too slow for the curved valley.
PAIRS = [
    (case, solver)
    for case in CASES
    for solver in SOLVERS
    if not (solver == "BracketedScalar" and case != "robust mean")
    and not (solver == "GradientDescent(rate)" and case == "valley")
]


def simplex(x: Tensor) -> Tensor:
    """Projection onto {u >= 0, sum u = 1} by sorting."""
    ordered = x.sort(-1, descending=True).values
    index = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    excess = (ordered.cumsum(-1) - 1) / index
    count = (ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, count - 1)).clamp_min(0)
