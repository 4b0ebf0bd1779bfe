"""One line-search descent for every first- and second-order rule, each row on its own.

A row is updated until its own stopping rule holds and then stays put, so its result does not depend on
the rest of the batch. Step lengths and masks are constants of the derivative.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hyperball.implicit.derivatives import Point, Value, dot, evaluate, largest, select

MAX_HALVINGS = 40


class Minimum(NamedTuple):
    """Row-wise result of a solver."""

    u: Tensor  # [N, n]
    converged: Tensor  # [N] bool
    steps: Tensor  # [N] int64
    residual: Tensor  # [N]
    curvature: Tensor | None = None  # [N], the least eigenvalue of the Hessian


class Rule(Protocol):
    """How a solver chooses its direction; it may remember earlier points."""

    searches: bool

    def direction(self, point: Point) -> Tensor:
        """A descent direction for each row."""

    def length(self, point: Point, direction: Tensor) -> Tensor:
        """The step length tried first, without gradient."""

    def update(self, old: Point, new: Point, moved: Tensor) -> None:
        """Remember the step of the rows that moved."""


def is_finite(point: Point) -> Tensor:
    """Rows whose value and gradient are finite."""
    return point.value.isfinite() & point.gradient.isfinite().all(-1)


def accepts(point: Point, trial: Point, decrease: Tensor) -> Tensor:
    """f(u+td) <= f(u) - 1e-4 * decrease, or a gradient smaller by a tenth where f is flat to rounding."""
    noise = 8 * torch.finfo(point.value.dtype).eps * point.value.abs()
    armijo = trial.value <= point.value - 1e-4 * decrease
    smaller = largest(trial.gradient) < 0.9 * largest(point.gradient)
    flat = (trial.value <= point.value + noise) & smaller
    return is_finite(trial) & torch.where(decrease > noise, armijo, flat)


def backtrack(
    value_of: Value, point: Point, direction: Tensor, length: Tensor, moving: Tensor
) -> tuple[Tensor, Tensor, Point]:
    """Halve the length of each moving row until it is accepted: (length, accepted, point there)."""
    slope = dot(point.gradient, direction)
    length = torch.where(moving, length, 0.0)
    pending, accepted = moving, torch.zeros_like(moving)
    trial = point
    for _ in range(MAX_HALVINGS):
        trial = evaluate(value_of, point.u + length[:, None] * direction)
        good = pending & accepts(point, trial, -length * slope)
        accepted, pending = accepted | good, pending & ~good
        if not pending.any():
            break
        length = torch.where(pending, length / 2, length)
    return length, accepted, trial


def detached(point: Point) -> Point:
    """The same numbers without history."""
    return Point(*(t.detach() for t in point))


def cannot_move(point: Point, step: Tensor) -> Tensor:
    """Rows whose step is within two roundings of u."""
    return largest(step) <= 2 * torch.finfo(step.dtype).eps * largest(point.u)


def at_rounding(point: Point, step: Tensor) -> Tensor:
    """Rows where no progress can be measured: the promised decrease, or the step, is rounding."""
    eps = torch.finfo(step.dtype).eps
    flat = -dot(point.gradient, step) <= 16 * eps * point.value.abs()
    return flat | (largest(step) <= 16 * eps * largest(point.u))


def advance(
    value_of: Value,
    point: Point,
    rule: Rule,
    active: Tensor,
    attach: bool,
) -> tuple[Point, Tensor, Tensor]:
    """One step of the active rows: (next point, rows that moved, rows that are done to rounding)."""
    direction = rule.direction(point)
    here, way = detached(point), direction.detach()
    length = rule.length(here, way)
    step = length[:, None] * way
    moving = active & ~cannot_move(here, step)
    if rule.searches:
        length, moved, trial = backtrack(value_of, here, way, length, moving)
    else:
        length, trial = torch.where(moving, length, 0.0), here
        moved = moving
    if attach or not rule.searches:
        # A zero length times an infinite direction would be NaN, and so would its derivative.
        direction = select(moved, direction, torch.zeros_like(direction))
        trial = evaluate(value_of, point.u + length[:, None] * direction, attach)
        moved = moved & is_finite(trial)
    new = Point(*(select(moved, a, b) for a, b in zip(trial, point, strict=True)))
    return new, moved, active & ~moved & at_rounding(here, step)


def descend(
    value_of: Value,
    start: Tensor,
    rule: Rule,
    tolerance: float,
    max_steps: int,
    attach: bool = False,
    closing: Sequence[Rule] = (),
) -> Minimum:
    """Iterate u <- u + t d until |grad f| <= tolerance * |grad f(start)| or f and u stop changing.

    `closing` are rules of full, differentiated steps after that.
    """
    point = evaluate(value_of, start, attach)
    goal = tolerance * largest(point.gradient.detach())
    converged = is_finite(point) & (largest(point.gradient.detach()) <= goal)
    active = is_finite(point) & ~converged
    steps = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(max_steps):
        if not active.any():
            break
        new, moved, rounded = advance(value_of, point, rule, active, attach)
        rule.update(point, new, moved)
        point, steps = new, steps + active
        converged = converged | rounded | (moved & (largest(point.gradient.detach()) <= goal))
        active = active & moved & ~converged
    for last in closing:
        point = full_step(value_of, point, last, converged)
    return Minimum(point.u, converged, steps, largest(point.gradient.detach()))


def full_step(value_of: Value, point: Point, rule: Rule, rows: Tensor) -> Point:
    """One attached step without a line search; at a minimizer only the derivative changes."""
    direction = rule.direction(point)
    length = rule.length(detached(point), direction.detach())
    rows = rows & direction.detach().isfinite().all(-1)
    moved = select(rows, direction, torch.zeros_like(direction)) * length[:, None]
    return evaluate(value_of, point.u + moved, attach=True)
