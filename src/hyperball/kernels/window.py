"""Sliding windows over one-channel maps: the box sum of a convolution, and its transpose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution, one entry per spatial dimension; padding is (before, after)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def dims(self) -> int:
        return len(self.kernel)

    @property
    def is_point(self) -> bool:
        """Whether every window is one input position, and every position has its window."""
        unpadded = all(pad == (0, 0) for pad in self.padding)
        return set(self.kernel) | set(self.stride) == {1} and unpadded and not any(self.output_padding)

    def reach(self, dim: int) -> int:
        """How far the last tap lies from the first."""
        return self.dilation[dim] * (self.kernel[dim] - 1)


def box_sum(q: Tensor, window: Window) -> Tensor:
    """Sum of q over every window, one spatial dimension after the other; q is [batch, groups, *spatial].

    For a transposed convolution: the sum, for every output position, over the inputs that contribute to it.
    """
    if not window.is_point:
        for dim in range(window.dims):
            q = reduce(torch.add, taps(q, window, dim))
    return q


def scaled_box_sum(q: Tensor, scale: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """q' and s with s²·q' = Σ a²·q over every window, where s, its largest scale a, is that window's own."""
    if not window.is_point:
        for dim in range(window.dims):
            scales = taps(scale, window, dim)
            scale = reduce(torch.maximum, scales).clamp(min=torch.finfo(scale.dtype).tiny)  # 0 in padding alone
            parts = zip(taps(q, window, dim), scales, strict=True)
            q = reduce(torch.add, [part * (held / scale).square() for part, held in parts])
    return q, scale


def taps(q: Tensor, window: Window, dim: int) -> list[Tensor]:
    """For every tap along a spatial dimension, what it reads at each output position, zeros included."""
    axis = q.dim() - window.dims + dim
    arrange = _spaced if window.transposed else _padded
    q, stride = arrange(q, axis, window, dim), 1 if window.transposed else window.stride[dim]
    end, dilation = q.shape[axis] - window.reach(dim), window.dilation[dim]
    index: list[slice] = [slice(None)] * q.dim()
    parts = []
    for tap in range(window.kernel[dim]):
        index[axis] = slice(tap * dilation, tap * dilation + end, stride)
        parts.append(q[tuple(index)])
    return parts


def _padded(q: Tensor, axis: int, window: Window, dim: int) -> Tensor:
    return pad_axis(q, axis, *window.padding[dim])


def _spaced(q: Tensor, axis: int, window: Window, dim: int) -> Tensor:
    """Put stride - 1 zeros between the inputs; then every output gathers from them with stride 1."""
    if window.stride[dim] > 1:
        length = (q.shape[axis] - 1) * window.stride[dim] + 1
        spaced = pad_axis(q.unsqueeze(axis + 1), axis + 1, 0, window.stride[dim] - 1)
        q = spaced.flatten(axis, axis + 1).narrow(axis, 0, length)
    before, after = window.padding[dim]
    reach = window.reach(dim)
    return pad_axis(q, axis, reach - before, reach - after + window.output_padding[dim])


def pad_axis(q: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Zeros before and after along one axis (negative: cut)."""
    if before == after == 0:
        return q
    widths = [0] * (2 * (q.dim() - axis))
    widths[-2:] = [before, after]
    return F.pad(q, widths)
