"""Launches of the projection kernels on tensors of any strides, and their operators for compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperball.kernels.triton.pooling.launch import Rows, described, on_device, placed, put_back
from hyperball.kernels.triton.projection import kernels as projection
from hyperball.kernels.triton.row_access import Tile, tile_for

WITH_CUT = ("l1_ball", "l1_sphere", "simplex")


def taps_last(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """[*rows, *taps]."""
    return tensor.movedim(dims, tuple(range(-len(dims), 0)))


def radius_of_rows(radius: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The radius, of x's rank and size 1 along dims, as a view [*rows]."""
    rows = taps_last(radius, dims)
    for _ in dims:
        rows = rows.squeeze(-1)
    return rows.expand(taps_last(x, dims).shape[: x.dim() - len(dims)])


def tile_of(rows: Rows) -> Tile:
    return tile_for(rows.n, rows.layout.row_contiguous(), False)


def project(x: Tensor, radius: Tensor, kind: str, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """y, in x's layout, and the cut of each row, [*rows, 2] ([*rows, 0] where the set needs none)."""
    y = torch.empty_like(x)
    views = [taps_last(x, dims), taps_last(y, dims)]
    rows = described(views, [radius_of_rows(radius, x, dims)], len(dims))
    width = 2 if kind in WITH_CUT else 0
    cut = torch.empty(*rows.shape, width, dtype=torch.float32, device=x.device)
    count, where = rows.shape.numel(), rows.layout
    if count:
        tile = tile_of(rows)
        with on_device(x):
            projection.forward_kernel[-(-count // tile.BR),](
                rows.views[0], rows.per_row[0], rows.views[1], cut if width else rows.views[1], count, rows.n,
                where.inner, *where.row_sizes(), *where.row_strides(0), *where.tap_strides(0), *where.row_strides(1),
                *where.tap_strides(1), *where.row_strides(2), KIND=kind, FLAT=where.flat, WIDE=where.is_wide(2),
                BR=tile.BR, BN=tile.BN, num_warps=tile.warps, enable_fp_fusion=False,
            )  # fmt: skip
    if rows.views[1].data_ptr() != y.data_ptr():  # too many strides: the kernel wrote a copy
        taps_last(y, dims).copy_(put_back(rows.views[1], rows.order))
    return y, put_back(cut, rows.order)


def pull(v: Tensor, x: Tensor, radius: Tensor, cut: Tensor, kind: str, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The gradient of x, in its layout, and that of each row's radius, [*rows]."""
    dx = torch.empty_like(x)
    views = [taps_last(tensor, dims) for tensor in (x, v, dx)]
    rows = described(views, [radius_of_rows(radius, x, dims)], len(dims))
    dr = torch.empty(rows.shape, dtype=torch.float32, device=x.device)
    held = placed(cut, rows.order).contiguous()
    where = rows.layout
    if dr.numel():
        tile = tile_of(rows)
        with on_device(x):
            projection.backward_kernel[-(-dr.numel() // tile.BR),](
                rows.views[1], rows.views[0], rows.per_row[0], held if held.numel() else dr, rows.views[2], dr,
                dr.numel(), rows.n, where.inner, *where.row_sizes(), *where.row_strides(1), *where.tap_strides(1),
                *where.row_strides(0), *where.tap_strides(0), *where.row_strides(2), *where.tap_strides(2),
                *where.row_strides(3), KIND=kind, FLAT=where.flat, WIDE=where.is_wide(3), BR=tile.BR, BN=tile.BN,
                num_warps=tile.warps, enable_fp_fusion=False,
            )  # fmt: skip
    if rows.views[2].data_ptr() != dx.data_ptr():
        taps_last(dx, dims).copy_(put_back(rows.views[2], rows.order))
    return dx, put_back(dr, rows.order)
