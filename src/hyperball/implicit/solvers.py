"""Unconstrained solvers: frozen settings, each with one `minimize`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.derivatives import (
    Point,
    Value,
    default_tolerance,
    dot,
    evaluate,
    hessian,
    largest,
    select,
)
from hyperball.implicit.descent import Minimum, descend

CLOSING_LIMIT = 512


class Solver(ABC):
    """Settings of an unconstrained solver."""

    @abstractmethod
    def minimize(self, value_of: Value, start: Tensor, attach: bool = False, extra: int = 0) -> Minimum:
        """Row-wise argmin of value_of from `start` [N, n].

        `attach` differentiates the iterates, and takes `extra` Newton steps more, since a derivative converges
        behind its iterate.
        """


@dataclass(frozen=True)
class Newton(Solver):
    """d = -(H + tau I)^-1 g, with the smallest tau of a geometric scale that makes it positive definite.

    Quadratic convergence; one n x n factorization and n backward passes a step, so for small u. `steps` fixes the
    number of steps, which then never depends on the data: in compiled, exported and mapped code it is 16 unless given.
    """

    tolerance: float | None = None
    max_steps: int = 100
    steps: int | None = None

    def __post_init__(self) -> None:
        checks.positive("tolerance", self.tolerance)
        checks.count("max_steps", self.max_steps)
        if self.steps is not None:
            checks.count("steps", self.steps)

    def minimize(self, value_of: Value, start: Tensor, attach: bool = False, extra: int = 0) -> Minimum:
        tolerance = self.tolerance or default_tolerance(start.dtype)
        rule = NewtonRule(value_of, attach)
        return descend(value_of, start, rule, tolerance, self.max_steps, attach, [rule] * extra)


@dataclass(frozen=True)
class LBFGS(Solver):
    """d = -B g, with B from the last `history` steps of the same row.

    Superlinear in practice; needs gradients only, so for large u.
    """

    tolerance: float | None = None
    max_steps: int = 2000
    history: int = 20

    def __post_init__(self) -> None:
        checks.positive("tolerance", self.tolerance)
        checks.count("max_steps", self.max_steps)
        checks.count("history", self.history)

    def minimize(self, value_of: Value, start: Tensor, attach: bool = False, extra: int = 0) -> Minimum:
        tolerance = self.tolerance or default_tolerance(start.dtype)
        rule = LBFGSRule(value_of, start, self.history)
        return descend(value_of, start, rule, tolerance, self.max_steps, attach, closing_rules(value_of, start, extra))


@dataclass(frozen=True)
class GradientDescent(Solver):
    """d = -g; `rate` fixes the step length, None takes Barzilai-Borwein's and halves it until f decreases."""

    rate: float | None = None
    tolerance: float | None = None
    max_steps: int = 5000

    def __post_init__(self) -> None:
        checks.positive("rate", self.rate)
        checks.positive("tolerance", self.tolerance)
        checks.count("max_steps", self.max_steps)

    def minimize(self, value_of: Value, start: Tensor, attach: bool = False, extra: int = 0) -> Minimum:
        tolerance = self.tolerance or default_tolerance(start.dtype)
        rule = GradientRule(value_of, start, self.rate)
        return descend(value_of, start, rule, tolerance, self.max_steps, attach, closing_rules(value_of, start, extra))


def closing_rules(value_of: Value, start: Tensor, extra: int) -> list["NewtonRule"]:
    """`extra` Newton steps, after which a derivative does not depend on how the iterates came there."""
    if extra and start.shape[1] > CLOSING_LIMIT:
        raise ValueError(
            f"`adjoint` Unrolled closes with Newton steps, for up to {CLOSING_LIMIT} variables per element, got "
            f"{start.shape[1]}; use Implicit(), or Unrolled(extra=0) for the derivative of the iterates alone"
        )
    return [NewtonRule(value_of, attach=True)] * extra


def positive_shift(matrix: Tensor) -> Tensor:
    """tau >= 0 per matrix such that matrix + tau I has a Cholesky factor."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    size = matrix.abs().amax((-2, -1))
    shift, least = torch.zeros_like(size), torch.finfo(matrix.dtype).eps ** 0.5 * size
    for _ in range(12):
        bad = torch.linalg.cholesky_ex(matrix + shift[:, None, None] * eye).info > 0
        if not bad.any():
            break
        shift = torch.where(bad, torch.maximum(10 * shift, least), shift)
    return shift


def descent_or_gradient(direction: Tensor, slope: Tensor) -> Tensor:
    """The direction where it is finite and goes down, else -g."""
    way = direction.detach()
    good = way.isfinite().all(-1) & (dot(way, slope.detach()) < 0)
    return select(good, direction, -slope)


class NewtonRule:
    """Newton's direction, regularized where the Hessian is not positive definite."""

    searches = True

    def __init__(self, value_of: Value, attach: bool) -> None:
        self.value_of, self.attach = value_of, attach

    def direction(self, point: Point) -> Tensor:
        matrix = hessian(self.value_of, point.u, self.attach)
        # A row at a non-finite point is frozen; an identity there keeps the factorization out of trouble.
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        matrix = select(matrix.detach().isfinite().all(-1).all(-1), matrix, eye.expand_as(matrix))
        matrix = matrix + positive_shift(matrix.detach())[:, None, None] * eye
        solved = torch.linalg.solve_ex(matrix, -point.gradient[..., None]).result[..., 0]
        return descent_or_gradient(solved, point.gradient)

    def length(self, point: Point, direction: Tensor) -> Tensor:
        return torch.ones_like(point.value)

    def update(self, old: Point, new: Point, moved: Tensor) -> None:
        pass


class GradientRule:
    """The negative gradient with Barzilai-Borwein's step length <s,s>/<s,y>, or a fixed one."""

    def __init__(self, value_of: Value, start: Tensor, rate: float | None) -> None:
        self.searches = rate is None
        self.step = probed_length(value_of, start) if rate is None else start.new_full(start.shape[:1], rate)

    def direction(self, point: Point) -> Tensor:
        return -point.gradient

    def length(self, point: Point, direction: Tensor) -> Tensor:
        return self.step

    def update(self, old: Point, new: Point, moved: Tensor) -> None:
        if not self.searches:
            return
        s, y = (new.u - old.u).detach(), (new.gradient - old.gradient).detach()
        curvature = dot(s, y)
        good = moved & (curvature > 0)
        ratio = dot(s, s) / torch.where(good, curvature, 1.0)
        # Without positive curvature the length doubles: the function still falls at this rate.
        longer = 2 * s.abs().amax(-1) / largest(old.gradient.detach()).clamp_min(torch.finfo(s.dtype).tiny)
        self.step = torch.where(moved, torch.where(good, ratio, longer), self.step)


def probed_length(value_of: Value, start: Tensor) -> Tensor:
    """<s,s>/<s,y> for a tiny s along -g: a first step length that does not depend on the scale of f."""
    point = evaluate(value_of, start)
    size = largest(start).clamp_min(1) / largest(point.gradient).clamp_min(torch.finfo(start.dtype).tiny)
    s = -(torch.finfo(start.dtype).eps ** 0.5 * size)[:, None] * point.gradient
    curvature = dot(s, evaluate(value_of, start + s).gradient - point.gradient)
    length = dot(s, s) / torch.where(curvature > 0, curvature, 1.0)
    return torch.where((curvature > 0) & length.isfinite(), torch.minimum(length, 100 * size), size)


class LBFGSRule:
    """The two-loop recursion, every row with its own memory, which is a constant of the derivative."""

    searches = True

    def __init__(self, value_of: Value, start: Tensor, history: int) -> None:
        rows, n = start.shape
        self.first = probed_length(value_of, start)
        self.s = start.new_zeros(history, rows, n)
        self.y = start.new_zeros(history, rows, n)
        self.valid = torch.zeros(history, rows, dtype=torch.bool, device=start.device)

    def direction(self, point: Point) -> Tensor:
        curvature = torch.where(self.valid, dot(self.s, self.y), 1.0)
        memory = list(zip(self.s, self.y, 1 / curvature, strict=True))
        q, weights = point.gradient, []
        for s, y, rho in reversed(memory):
            weights.append(rho * dot(s, q))
            q = q - weights[-1][:, None] * y
        q = q * self.scale(curvature)[:, None]
        for (s, y, rho), weight in zip(memory, reversed(weights), strict=True):
            q = q + (weight - rho * dot(y, q))[:, None] * s
        return descent_or_gradient(-q, point.gradient)

    def scale(self, curvature: Tensor) -> Tensor:
        """gamma = <s,y>/<y,y> of the latest pair, 1 before there is one."""
        square = torch.where(self.valid[-1], dot(self.y[-1], self.y[-1]), 1.0)
        return curvature[-1] / square

    def length(self, point: Point, direction: Tensor) -> Tensor:
        return torch.where(self.valid[-1], 1.0, self.first)

    def update(self, old: Point, new: Point, moved: Tensor) -> None:
        s, y = (new.u - old.u).detach(), (new.gradient - old.gradient).detach()
        size = (dot(s, s) * dot(y, y)).sqrt()
        keep = moved & (dot(s, y) > torch.finfo(s.dtype).eps ** 0.5 * size)
        self.s = torch.where(keep[None, :, None], torch.cat((self.s[1:], s[None])), self.s)
        self.y = torch.where(keep[None, :, None], torch.cat((self.y[1:], y[None])), self.y)
        self.valid = torch.where(keep, torch.cat((self.valid[1:], keep[None])), self.valid)
