"""Row-wise first and second derivatives of a function that gives one value per row."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

FEW_COLUMNS = 3  # below, single backward passes are faster than a vectorized one

Value = Callable[[Tensor], Tensor]  # [N, n] -> [N]


class Point(NamedTuple):
    """A row-wise iterate with its value and gradient."""

    u: Tensor  # [N, n]
    value: Tensor  # [N]
    gradient: Tensor  # [N, n]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a_i, b_i> for each row i."""
    return (a * b).sum(-1)


def largest(a: Tensor) -> Tensor:
    """max_j |a_ij| for each row i, 0 for empty rows."""
    return a.abs().amax(-1) if a.shape[-1] else a.new_zeros(a.shape[:-1])


def select(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a in the rows of `mask`, else b."""
    return torch.where(mask.reshape(mask.shape + (1,) * (a.dim() - mask.dim())), a, b)


def as_variable(u: Tensor, attach: bool) -> Tensor:
    """u itself where its history counts, else a fresh leaf of the same value."""
    return u if attach and u.requires_grad else u.detach().requires_grad_()


def gradient(output: Tensor, variable: Tensor, attach: bool, keep: bool = False) -> Tensor:
    """d sum(output) / d variable, zeros where there is no dependence."""
    if not output.requires_grad:
        return torch.zeros_like(variable)
    (slope,) = torch.autograd.grad(
        output.sum(), variable, create_graph=attach, retain_graph=attach or keep, allow_unused=True
    )
    return torch.zeros_like(variable) if slope is None else slope


def evaluate(value_of: Value, u: Tensor, attach: bool = False) -> Point:
    """(u, f(u), grad f(u)); with `attach` all three keep their graph."""
    with torch.enable_grad():
        variable = as_variable(u, attach)
        value = value_of(variable)
        slope = gradient(value, variable, attach)
    return Point(variable, value, slope) if attach else Point(u.detach(), value.detach(), slope)


def jacobian(output: Tensor, variable: Tensor, attach: bool = False) -> Tensor:
    """J[:, i, j] = d output[:, i] / d variable[:, j], one vectorized backward for all columns of output."""
    rows, columns = output.shape
    if not output.requires_grad or not columns:
        return output.new_zeros(rows, columns, variable.shape[1])
    units = torch.eye(columns, dtype=output.dtype, device=output.device)[:, None, :].expand(-1, rows, -1)
    if columns > FEW_COLUMNS:
        # vmap refuses some operations, such as a custom autograd function that reads its values.
        with suppress(RuntimeError):
            return pull_back(output, variable, units, attach, vectorized=True).transpose(0, 1)
    return torch.stack([pull_back(output, variable, unit, attach) for unit in units], 1)


def pull_back(output: Tensor, variable: Tensor, v: Tensor, attach: bool, vectorized: bool = False) -> Tensor:
    """J^T v, or the stack of them over the first dimension of v."""
    (slope,) = torch.autograd.grad(
        output,
        variable,
        v,
        create_graph=attach,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=vectorized,
    )
    leading = (v.shape[0],) if vectorized else ()
    return variable.new_zeros(*leading, *variable.shape) if slope is None else slope


def hessian(value_of: Value, u: Tensor, attach: bool = False) -> Tensor:
    """[N, n, n] of second derivatives, symmetrized."""
    with torch.enable_grad():
        variable = as_variable(u, attach)
        matrix = jacobian(gradient(value_of(variable), variable, attach=True), variable, attach)
    matrix = (matrix + matrix.mT) / 2
    return matrix if attach else matrix.detach()


def default_tolerance(dtype: torch.dtype) -> float:
    """1e-10 in float64, 1e-5 in float32, relative to the gradient at the start."""
    return 1e-10 if dtype == torch.float64 else 1e-5
