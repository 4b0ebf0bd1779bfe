"""Surrogate gradients of declarative layers: a layer that solves an inner problem can hide its gradient from an attack.

Inside ``with surrogate(model):`` every such layer computes what it always computes and differentiates something else
(BPDA, Athalye et al. 2018): y = solution + (s(x) − s(x).detach()), with a stand-in s that has a gradient everywhere.

| layer | "unrolled" | "smooth" |
|---|---|---|
| RobustPool | ten IRLS steps from the mean with its own penalty | the same with a smooth penalty, plus 1/10 mean |
| Projection | its own gradient: it has a closed form | x·‖y‖/‖x‖ with the factor held, as if nothing were cut off |
| Declarative | the solver's steps instead of the implicit function theorem | the same |
| RobustBatchNorm that normalizes by the batch | mean and variance of the batch | the same |
| the median over points | the mean | the mean |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball import radial
from hyperball.functional import pooling_checks as checks
from hyperball.functional.pooling import RADIUS_FREE, mad_radius
from hyperball.implicit import Unrolled
from hyperball.kernels.pooling.geometry import Along, Windows
from hyperball.kernels.pooling.operation import as_rows, compute_dtype, per_row
from hyperball.models.layers import PoolPoints
from hyperball.nn.batch_norm import RobustBatchNorm
from hyperball.nn.declarative import Declarative
from hyperball.nn.pooling import RobustPool
from hyperball.nn.projection import Projection
from hyperball.rows import Value

Kind = Literal["smooth", "unrolled"]
KINDS: tuple[Kind, ...] = ("smooth", "unrolled")
STEPS = 10
MEAN_SHARE = 0.1
ABSOLUTE_RADIUS = 0.1  # of a row's standard deviation: the radius at which a median is smoothed
SMOOTH = {"huber": "pseudo_huber", "truncated_quadratic": "welsch", "absolute": "pseudo_huber"}

Forward = Callable[[Tensor], Tensor]


def declarative_layers(model: Any) -> list[str]:
    """The names of the layers that `surrogate` stands in for."""
    return [name for name, _ in _layers(model)]


def _layers(model: Any) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        return []
    return [(name or "(the model)", part) for name, part in model.named_modules() if _is_declarative(part)]


def _is_declarative(part: nn.Module) -> bool:
    if isinstance(part, RobustBatchNorm):
        return part.running_mean is None
    if isinstance(part, PoolPoints):
        return part.kind == "median"
    return isinstance(part, RobustPool | Projection | Declarative)


@contextmanager
def surrogate(model: Any, kind: Kind = "smooth") -> Iterator[Any]:
    """The same model with the same outputs, whose declarative layers have the gradients of their stand-ins.

    It acts on modules; a call of `hyperball.functional` inside a user's forward keeps its own gradient.
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {KINDS}, got {kind!r}")
    layers = _layers(model)
    if not layers:
        raise ValueError(
            "`model` must have a declarative layer (RobustPool, Projection, Declarative, RobustBatchNorm without "
            "running statistics, or a median over points), and has none: its own gradient is all there is"
        )
    with ExitStack() as stack:
        for _, part in layers:
            stack.enter_context(_swapped(part, kind))
        yield model


@contextmanager
def _swapped(part: nn.Module, kind: Kind) -> Iterator[None]:
    if isinstance(part, Declarative):
        held, part.adjoint = part.adjoint, Unrolled()
        try:
            yield
        finally:
            part.adjoint = held
        return
    stand_in = _stand_in(part, kind)
    if stand_in is None:
        yield
        return
    outer = part.__dict__.get("forward")  # that of a surrogate around this one
    part.forward = partial(_straight_through, part.forward, stand_in)
    try:
        yield
    finally:
        if outer is None:
            del part.forward
        else:
            part.forward = outer


def _straight_through(exact: Forward, stand_in: Forward, x: Tensor) -> Tensor:
    """The exact value with the gradient of the stand-in."""
    with torch.no_grad():
        y = exact(x)
    smooth = stand_in(x)
    return y + (smooth - smooth.detach()).to(y.dtype)


def _stand_in(part: nn.Module, kind: Kind) -> Forward | None:
    if isinstance(part, RobustPool):
        return partial(pool_steps, part, smooth=kind == "smooth")
    if isinstance(part, RobustBatchNorm):
        return lambda x: F.batch_norm(x, None, None, part.weight, part.bias, True, 0.0, part.eps)
    if isinstance(part, PoolPoints):
        return lambda x: x.mean(-1)
    assert isinstance(part, Projection)
    return partial(scaled, part) if kind == "smooth" else None


def scaled(part: Projection, x: Tensor) -> Tensor:
    """x·‖y‖/‖x‖, the factor held constant."""
    dims = (part.dim,) if isinstance(part.dim, int) else tuple(part.dim)
    with torch.no_grad():
        y = type(part).forward(part, x)
        lengths = [torch.linalg.vector_norm(v.float(), dim=dims, keepdim=True) for v in (y, x)]
        factor = lengths[0] / lengths[1].clamp(min=torch.finfo(torch.float32).tiny)
    return x * factor.clamp(max=1e6).to(x.dtype)


def pool_steps(part: RobustPool, x: Tensor, smooth: bool, steps: int = STEPS) -> Tensor:
    """u ← Σ s(|u − x|)·x / Σ s(|u − x|), `steps` times from the mean: IRLS, of the output's shape."""
    geometry = checks.windows(x, part.space, part.kernel_size, part.stride, part.padding, part.ceil_mode)
    work = x.to(compute_dtype(x.dtype))
    view = geometry.view(work)
    rows = as_rows(view, geometry.tap_dims)
    present = geometry.present(work, work.dtype)
    held = None if present is None else as_rows(present.expand_as(view), geometry.tap_dims)
    with torch.no_grad():
        value = per_row(_row_penalty(part, x, view, present, geometry))
        value = softened(value, rows) if smooth else value
    mean = weighted_mean(rows, held)
    u = mean
    for _ in range(steps):
        gains = radial.gain(value, (u - rows).abs())
        u = weighted_mean(rows, gains if held is None else gains * held, u)
    u = (1 - MEAN_SHARE) * u + MEAN_SHARE * mean if smooth else u
    counts = geometry.counts(tuple(x.shape[-part.space :])) if isinstance(geometry, Windows) else [1] * part.space
    return u.reshape(*x.shape[: -part.space], *counts)


def weighted_mean(rows: Tensor, weights: Tensor | None, otherwise: Tensor | None = None) -> Tensor:
    """Σ w·x / Σ w of every row, [R, 1]; `otherwise` where no sample has a weight."""
    if weights is None:
        return rows.mean(-1, keepdim=True)
    total = weights.sum(-1, keepdim=True)
    found = (weights * rows).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return found if otherwise is None else torch.where(total > 0, found, otherwise)


def softened(value: Value, rows: Tensor) -> Value:
    """The penalty, or the smooth one of the same radius that stands for it."""
    if value.name not in SMOOTH:
        return value
    radius = value.parameters["rho"]
    if value.name == "absolute":
        radius = ABSOLUTE_RADIUS * rows.std(-1, keepdim=True, correction=0) + torch.finfo(rows.dtype).tiny
    made = radial.parse(SMOOTH[value.name], "penalty")
    assert isinstance(made, Value)
    return made.with_parameters(rho=radius)


def _row_penalty(part: RobustPool, x: Tensor, view: Tensor, present: Tensor | None, geometry: Any) -> Value:
    """The layer's penalty with one parameter a row."""
    row_shape = view.shape[: view.dim() - geometry.tap_dims]
    kept = [*row_shape] if isinstance(geometry, Windows) else [*row_shape, *[1] * part.space]

    def place(name: str, given: Tensor) -> Tensor:
        per_channel = given.reshape(-1, *[1] * part.space) if given.dim() == 1 else given
        return checks.spread(name, per_channel, kept).reshape(row_shape)

    value = checks.aligned(part.penalty(x), x, place)
    if part.scale is None or value.name in RADIUS_FREE:
        return value
    last = Along(tuple(range(-geometry.tap_dims, 0)))
    weights = None if present is None else present.expand_as(view)
    return value.with_parameters(rho=mad_radius(view, weights, last, value.parameters["rho"]))
