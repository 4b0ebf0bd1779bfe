"""Penalties that keep the filters of decoupled layers apart.

The step of a small network is as long as its launches are many, so that layers share them: those of one shape the two
products, those whose filters have one length what is done to rows, and all of a batch the rest. A batch has its filters
one after another in one buffer, its gradients in another, and its Gram matrices in one table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hyperball.kernels import dispatch
from hyperball.kernels.decoupled.operation import full_precision
from hyperball.kernels.norms import cast, inverse, norm, norm_dtype, wide_dtype
from hyperball.nn.decoupled import Decoupled
from hyperball.optim.layers import decoupled_layers
from hyperball.rows import nearest

CELLS = 2**25  # of a batch of several layers, at most: its weights, and the entries of its table
FEW_FILTERS = 256  # up to here WWᵀ costs less than the launches that the smaller WᵀW of a tall layer takes


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
    """The filters of a layer, [groups, filters, inputs]: a view, where memory has the entries of a filter together."""
    weight = layer.filters()
    inner = sorted(range(1, weight.dim()), key=weight.stride, reverse=True)
    return weight.permute(0, *inner).flatten(1).unflatten(0, (getattr(layer, "groups", 1), -1))


def penalty(kind: str, unit: bool, filters: Sequence[Tensor]) -> Tensor:
    """The sum over layers, of operations that torch differentiates in any way."""
    wide = (cast(rows, norm_dtype(rows)) for rows in filters)
    units = (rows * inverse(norm(rows, (-1,))) if unit else rows for rows in wide)
    return torch.stack([KINDS[kind](rows)[0] for rows in units]).sum()


class Penalty(torch.autograd.Function):
    """The penalty with dP/dw in the same pass: d = dP/dŵ, dP/dw = (d − ŵ⟨ŵ, d⟩)/‖w‖ for unit filters ŵ = w/‖w‖.

    A training step then has two products a shape of layers and few kernels, all of them before its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, kind: str, unit: bool, *filters: Tensor) -> Tensor:
        ctx.kind, ctx.unit, ctx.batches = kind, unit, batches(filters)
        found = [value_and_gradient(kind, unit, [filters[index] for index in batch]) for batch in ctx.batches]
        values, gradients, ctx.factors = zip(*found, strict=True)
        ctx.save_for_backward(*filters, *gradients)
        return values[0] if len(values) == 1 else torch.stack(values).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        count = len(ctx.needs_input_grad) - 2
        filters, flat = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():  # a second derivative is asked for
            slopes = differentiable_gradients(ctx.kind, ctx.unit, filters)
            gradients = [cast(d * outputs[0], rows.dtype) for d, rows in zip(slopes, filters, strict=True)]
        else:
            scaled = [d * (outputs[0] * factor) for d, factor in zip(flat, ctx.factors, strict=True)]
            gradients = separated(scaled, ctx.batches, filters)
        wanted = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(gradient if is_wanted else None for gradient, is_wanted in wanted)


def differentiable_gradients(kind: str, unit: bool, filters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """dP/dw as a function of w that torch differentiates."""
    with full_precision(filters[0]):
        held = [rows if rows.requires_grad else rows.detach().requires_grad_() for rows in filters]
        wide = [cast(rows, norm_dtype(rows)) for rows in held]
        return torch.autograd.grad(penalty(kind, unit, wide), wide, create_graph=True)


def separated(flat: Sequence[Tensor], batches: Sequence[Sequence[int]], filters: Sequence[Tensor]) -> list[Tensor]:
    """What the batches hold one after another, as one tensor a layer, of its shape and dtype."""
    found = {}
    for buffer, batch in zip(flat, batches, strict=True):
        parts = cast(buffer, filters[batch[0]].dtype).split([filters[index].numel() for index in batch])
        found.update({index: part.view_as(filters[index]) for index, part in zip(batch, parts, strict=True)})
    return [found[index] for index in range(len(filters))]


Found = tuple[Tensor, Tensor, float]  # a penalty, and its gradient but for a factor


class Shape(NamedTuple):
    """The sizes of one layer's filters."""

    groups: int
    filters: int
    inputs: int

    @property
    def is_tall(self) -> bool:
        """Whether WᵀW is so much smaller than WWᵀ that it is worth launches of its own."""
        return self.filters > max(self.inputs, FEW_FILTERS)


def batches(filters: Sequence[Tensor]) -> list[list[int]]:
    """The layers that are computed together, by index: of one dtype, all tall or none, of at most `CELLS` if several.

    They join by the number of their filters, as the largest matrix makes the table wide; inside a batch, neighbors
    have as many sizes in common as can be.
    """
    shapes = [Shape(*layer.shape) for layer in filters]
    kinds = [(str(layer.dtype), shape.is_tall) for layer, shape in zip(filters, shapes, strict=True)]
    found: list[list[int]] = []
    weights = rows = 0
    for index in sorted(range(len(filters)), key=lambda index: (kinds[index], shapes[index].filters)):
        groups, count, inputs = shapes[index]
        size, width = groups * count * inputs, 0 if shapes[index].is_tall else table_width(count)
        weights, rows = weights + size, rows + groups * count
        if not found or kinds[found[-1][0]] != kinds[index] or max(weights, rows * width) > CELLS:
            found.append([])
            weights, rows = size, groups * count
        found[-1].append(index)
    return [sorted(batch, key=lambda index: (shapes[index].inputs, shapes[index].filters)) for batch in found]


def table_width(filters: int) -> int:
    """2h + 1 for matrices of up to h ≥ `filters` rows, a multiple of 8 so that most begin where 16 bytes do."""
    return 2 * (-(-filters // 8) * 8) + 1


def stacks(flat: Tensor, shapes: Sequence[Shape], dims: int) -> list[Tensor]:
    """Views of a batch, [n, filters, inputs] for `dims` = 2 and [n, inputs] for 1, of neighbors with these sizes."""
    runs = [(sizes, [*run]) for sizes, run in groupby(shapes, key=lambda shape: shape[-dims:])]
    counts = [sum(math.prod(shape[:-dims]) for shape in run) for _, run in runs]
    sizes = [(count, *size) for count, (size, _) in zip(counts, runs, strict=True)]
    parts = flat.split([math.prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def row_factors(factors: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """The factors of each stack's rows, [..., 1]."""
    split = factors.split([rows.shape[:-1].numel() for rows in parts])
    return [factor.view(*rows.shape[:-1], 1) for factor, rows in zip(split, parts, strict=True)]


def value_and_gradient(kind: str, unit: bool, filters: Sequence[Tensor]) -> Found:
    """P and dP/dw of a batch, from a copy of its filters."""
    shapes = [Shape(*rows.shape) for rows in filters]
    flat = torch.cat([rows.reshape(-1) for rows in filters])
    flat = cast(flat, norm_dtype(flat))
    scale = inverse_lengths(flat, shapes) if unit else None
    if scale is not None:
        parts = stacks(flat, shapes, 1)
        for rows, factor in zip(parts, row_factors(scale, parts), strict=True):
            rows.mul_(factor)
    return (by_layer if shapes[0].is_tall else by_table)(kind, flat, shapes, scale)


def inverse_lengths(flat: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """1/‖w‖ of each filter, at most that of the least normal number; float32 needs no scaling where float64 adds."""
    wide = cast(flat, wide_dtype(flat))
    parts = stacks(wide, shapes, 1)
    lengths = wide.new_empty(sum(len(rows) for rows in parts))
    for rows, out in zip(parts, lengths.split([len(rows) for rows in parts]), strict=True):
        if wide.dtype == flat.dtype:
            out.copy_(norm(rows, (-1,)).squeeze(-1))
        else:
            torch.linalg.vector_norm(rows, dim=-1, out=out)
    return torch.reciprocal(lengths.clamp_(min=torch.finfo(flat.dtype).tiny), out=flat.new_empty(lengths.shape))


def by_table(kind: str, flat: Tensor, shapes: Sequence[Shape], scale: Tensor | None) -> Found:
    """P = Σ r² over the rest R = WWᵀ − I, or WWᵀ − diag(WWᵀ), of all layers at once; dP/dw = 4RW.

    For unit filters dP/dw = 4(R − diag(RRᵀ))Ŵ/‖w‖, where R has no diagonal. A power of two that bounds the matrix
    is left to the factor of the gradient, as 1/‖w‖ may be next to overflow and a sum of such terms may cancel.
    """
    parts = stacks(flat, shapes, 2)
    table, matrices = gram_table(parts)
    half = table.shape[1] // 2
    diagonal = table[:, half]
    if kind == "orthonormal":
        diagonal.fill_(-1)
    for matrix, rows in zip(matrices, parts, strict=True):
        matrix.baddbmm_(rows, rows.mT)
    if kind == "orthogonal":
        diagonal.zero_()
    squares, factor = table.square().sum(1), 4.0
    if scale is not None:
        bound = 2.0 ** half.bit_length()
        torch.neg(squares, out=diagonal)
        table.mul_((scale / bound).unsqueeze(1))
        factor *= bound
    gradient = torch.empty_like(flat)
    for out, matrix, rows in zip(stacks(gradient, shapes, 2), matrices, parts, strict=True):
        torch.bmm(matrix, rows, out=out)
    return squares.sum(), gradient, factor


def gram_table(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Zeros with a row for each filter, 2h + 1 wide, and the matrices [n, filters, filters] of the stacks inside it.

    It holds the band of a block diagonal matrix: entry (i, j) is in row i at h + j − i. Matrices of any sizes then
    have their diagonals in one column and their rows in rows, and (i + 1, j) is 2h further on than (i, j) in memory.
    """
    width = table_width(max(rows.shape[1] for rows in parts))
    table = parts[0].new_zeros(sum(rows.shape[0] * rows.shape[1] for rows in parts), width)
    matrices, first = [], 0
    for count, filters, _ in (rows.shape for rows in parts):
        sizes, strides = (count, filters, filters), (filters * width, width - 1, 1)
        matrices.append(table.as_strided(sizes, strides, first * width + width // 2))
        first += count * filters
    return table, matrices


def by_layer(kind: str, flat: Tensor, shapes: Sequence[Shape], scale: Tensor | None) -> Found:
    """P and dP/dw of tall layers, from their smaller matrices."""
    parts, gradient, values = stacks(flat, shapes, 2), torch.empty_like(flat), []
    factors = [None] * len(parts) if scale is None else row_factors(scale, parts)
    for rows, out, factor in zip(parts, stacks(gradient, shapes, 2), factors, strict=True):
        value, slope = KINDS[kind](rows)
        if factor is None:
            out.copy_(slope)
        else:
            along = (rows * slope).sum(-1, keepdim=True)
            torch.mul(slope.addcmul_(rows, along, value=-1), factor, out=out)
        values.append(value)
    return torch.stack(values).sum(), gradient, 1.0


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
