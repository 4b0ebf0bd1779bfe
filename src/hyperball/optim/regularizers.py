"""Penalties that keep the filters of decoupled layers apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import full_precision
from hyperball.kernels.norms import inverse, norm, norm_dtype
from hyperball.nn.decoupled import Decoupled
from hyperball.optim.layers import decoupled_layers
from hyperball.rows import nearest


def orthogonality(model: nn.Module, kind: str = "orthonormal", *, unit: bool = False) -> Tensor:
    """Σ ‖WWᵀ − I‖²_F ("orthonormal") or Σ ‖WWᵀ − diag(WWᵀ)‖²_F ("orthogonal"), over decoupled layers and groups.

    The rows of W are the filters of one group, divided by their norms first if `unit`; a weight that layers share
    counts once. The authors of Decoupled Networks add 0.5e-5 of the first kind, on unit filters, to the loss.

    >>> import torch, hyperball as hb
    >>> layer = hb.nn.DecoupledLinear(8, 4)
    >>> torch.nn.init.orthogonal_(layer.weight).shape
    torch.Size([4, 8])
    >>> bool(hb.optim.orthogonality(layer) < 1e-10)
    True
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` must be one of {tuple(KINDS)}, got {kind!r}; {nearest(str(kind), KINDS)}")
    weights = {layer.weight: layer for layer in decoupled_layers(model).values()}
    filters = [rows_of(layer) for layer in weights.values()]
    by_hand = not (torch.compiler.is_compiling() or dispatch.is_transformed() or dispatch.has_tangents())
    with full_precision(filters[0]):
        return Penalty.apply(kind, unit, *filters) if by_hand else penalty(kind, unit, filters)


def rows_of(layer: Decoupled) -> Tensor:
    """The filters of a layer, [groups, filters, inputs]."""
    rows = layer.filters().flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))
    return rows.to(norm_dtype(rows))


def penalty(kind: str, unit: bool, filters: Sequence[Tensor]) -> Tensor:
    """The sum over layers, of operations that torch differentiates in any way."""
    units = (rows * inverse(norm(rows, (-1,))) if unit else rows for rows in filters)
    return torch.stack([KINDS[kind](rows)[0] for rows in units]).sum()


class Penalty(torch.autograd.Function):
    """The penalty with dP/dw in the same pass: d = dP/dŵ, dP/dw = (d − ŵ⟨ŵ, d⟩)/‖w‖ for unit filters ŵ = w/‖w‖.

    A training step then has two products a layer and few kernels, all of them before its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, kind: str, unit: bool, *filters: Tensor) -> Tensor:
        values, gradients = [], []
        for rows in filters:
            scale = lengths(rows).clamp(min=torch.finfo(rows.dtype).tiny).reciprocal() if unit else None
            units = rows if scale is None else rows * scale
            value, gradient = KINDS[kind](units)
            if scale is not None:
                gradient = gradient.addcmul(units, (units * gradient).sum(-1, keepdim=True), value=-1) * scale
            values.append(value)
            gradients.append(gradient)
        ctx.kind, ctx.unit = kind, unit
        ctx.save_for_backward(*filters, *gradients)
        return torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        count = len(ctx.saved_tensors) // 2
        filters, gradients = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():  # a second derivative is asked for
            gradients = differentiable_gradients(ctx.kind, ctx.unit, filters)
        wanted = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient * outputs[0] if is_wanted else None for gradient, is_wanted in wanted)


def differentiable_gradients(kind: str, unit: bool, filters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """dP/dw as a function of w that torch differentiates."""
    with full_precision(filters[0]):
        held = [rows if rows.requires_grad else rows.detach().requires_grad_() for rows in filters]
        return torch.autograd.grad(penalty(kind, unit, held), held, create_graph=True)


def lengths(rows: Tensor) -> Tensor:
    """‖w‖, [groups, filters, 1]; float32 needs no scaling where float64 adds."""
    if rows.dtype != torch.float32:
        return norm(rows, (-1,))
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64).float()


def orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Σ ‖WWᵀ − I‖² = Σ ‖WᵀW − I‖² + O − K for O rows of K entries each, from the smaller matrix; 4(WWᵀ − I)W."""
    groups, outputs, inputs = rows.shape
    gram = _smaller_gram(rows)
    rest = gram.diagonal_scatter(gram.diagonal(dim1=-2, dim2=-1) - 1, dim1=-2, dim2=-1)
    return rest.square().sum() + groups * max(outputs - inputs, 0), 4 * _applied(rest, rows)


def orthogonal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Σ ‖WWᵀ − diag(WWᵀ)‖²; beyond twice as many rows as entries, Σ ‖WᵀW‖² − Σ ‖w‖⁴ from the smaller matrix.

    Below that the difference could cancel; from there on it is at least what is subtracted, for rows of one length.
    Its gradient is 4(WWᵀ − diag(WWᵀ))W.
    """
    _, outputs, inputs = rows.shape
    if outputs >= 2 * inputs:
        gram, squares = _smaller_gram(rows), rows.square().sum(-1, keepdim=True)
        return gram.square().sum() - squares.square().sum(), 4 * (rows @ gram - squares * rows)
    gram = rows @ rows.mT
    rest = gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))
    return rest.square().sum(), 4 * (rest @ rows)


def _smaller_gram(rows: Tensor) -> Tensor:
    """WWᵀ or WᵀW, whichever is smaller; their nonzero eigenvalues are the same."""
    return rows.mT @ rows if rows.shape[-2] > rows.shape[-1] else rows @ rows.mT


def _applied(matrix: Tensor, rows: Tensor) -> Tensor:
    """A function of the smaller Gram matrix times W, from its own side."""
    return rows @ matrix if rows.shape[-2] > rows.shape[-1] else matrix @ rows


KINDS = {"orthonormal": orthonormal, "orthogonal": orthogonal}
