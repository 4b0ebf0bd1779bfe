"""Penalties that keep the filters of decoupled layers apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
    penalties = [_layer_penalty(layer, kind, unit) for layer in weights.values()]
    return torch.stack(penalties).sum()


def _layer_penalty(layer: Decoupled, kind: str, unit: bool) -> Tensor:
    filters = layer.filters().flatten(1)
    filters = filters.to(norm_dtype(filters))
    if unit:
        filters = filters * inverse(norm(filters, (1,)))
    rows = filters.unflatten(0, (getattr(layer, "groups", 1), -1))  # [groups, filters, inputs]
    with full_precision(rows):
        return KINDS[kind](rows)


def orthonormal(rows: Tensor) -> Tensor:
    """Σ ‖WWᵀ − I‖² = Σ ‖WᵀW − I‖² + O − K for O rows of K entries each; the smaller matrix is formed."""
    groups, outputs, inputs = rows.shape
    gram = _smaller_gram(rows)
    excess = groups * max(outputs - inputs, 0)
    return (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).square().sum() + excess


def orthogonal(rows: Tensor) -> Tensor:
    """Σ ‖WWᵀ − diag(WWᵀ)‖²; beyond twice as many rows as entries, Σ ‖WᵀW‖² − Σ ‖w‖⁴ from the smaller matrix.

    Below that the difference could cancel; from there on it is at least what is subtracted, for rows of one length.
    """
    _, outputs, inputs = rows.shape
    if outputs >= 2 * inputs:
        return _smaller_gram(rows).square().sum() - rows.square().sum(-1).square().sum()
    gram = rows @ rows.mT
    return (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).square().sum()


def _smaller_gram(rows: Tensor) -> Tensor:
    """WWᵀ or WᵀW, whichever is smaller; their nonzero eigenvalues are the same."""
    return rows.mT @ rows if rows.shape[-2] > rows.shape[-1] else rows @ rows.mT


KINDS = {"orthonormal": orthonormal, "orthogonal": orthogonal}
