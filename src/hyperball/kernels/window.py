"""Sliding windows over one-channel maps: the box sum of a convolution, and its transpose."""

from __future__ import annotations

from dataclasses import dataclass

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
    if window.is_point:
        return q
    for dim in range(window.dims):
        axis = q.dim() - window.dims + dim
        q = _scattered(q, axis, window, dim) if window.transposed else _gathered(q, axis, window, dim)
    return q


def _gathered(q: Tensor, axis: int, window: Window, dim: int) -> Tensor:
    before, after = window.padding[dim]
    q = pad_axis(q, axis, before, after)
    return sum_taps(q, axis, window.kernel[dim], window.stride[dim], window.dilation[dim])


def _scattered(q: Tensor, axis: int, window: Window, dim: int) -> Tensor:
    """Put stride - 1 zeros between the inputs; then every output gathers from them with stride 1."""
    if window.stride[dim] > 1:
        length = (q.shape[axis] - 1) * window.stride[dim] + 1
        spaced = pad_axis(q.unsqueeze(axis + 1), axis + 1, 0, window.stride[dim] - 1)
        q = spaced.flatten(axis, axis + 1).narrow(axis, 0, length)
    before, after = window.padding[dim]
    reach = window.reach(dim)
    q = pad_axis(q, axis, reach - before, reach - after + window.output_padding[dim])
    return sum_taps(q, axis, window.kernel[dim], 1, window.dilation[dim])


def pad_axis(q: Tensor, axis: int, before: int, after: int) -> Tensor:
    """Zeros before and after along one axis (negative: cut)."""
    if before == after == 0:
        return q
    widths = [0] * (2 * (q.dim() - axis))
    widths[-2:] = [before, after]
    return F.pad(q, widths)


def sum_taps(q: Tensor, axis: int, taps: int, stride: int, dilation: int) -> Tensor:
    """out[i] = Σ_k q[i·stride + k·dilation] along one axis."""
    end = q.shape[axis] - dilation * (taps - 1)
    index: list[slice] = [slice(None)] * q.dim()
    total = None
    for tap in range(taps):
        index[axis] = slice(tap * dilation, tap * dilation + end, stride)
        part = q[tuple(index)]
        total = part if total is None else total + part
    assert total is not None
    return total
