"""Which samples of a tensor form a row: all along some dimensions, or those under a window.

A geometry turns x into a view [*rows, *taps] and carries gradients of that view back. Dimensions are counted from the
end, so that further leading dimensions (a batch, vmap) change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Along:
    """Rows along the given dimensions, which are negative and ascending."""

    dims: tuple[int, ...]

    @property
    def tap_dims(self) -> int:
        return len(self.dims)

    @property
    def are_last(self) -> bool:
        return self.dims[0] == -len(self.dims)

    def view(self, x: Tensor) -> Tensor:
        """[*rows, *taps]."""
        return x if self.are_last else x.movedim(self.dims, tuple(range(-len(self.dims), 0)))

    def scatter(self, taps: Tensor, shape: torch.Size) -> Tensor:
        """The adjoint of `view`."""
        return taps if self.are_last else taps.movedim(tuple(range(-len(self.dims), 0)), self.dims)

    def present(self, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """1 where a tap is a sample, 0 where it is padding, broadcasting against the view; None if all are."""
        return None


@dataclass(frozen=True)
class Windows:
    """Windows over the last dimensions, as in nn.AvgPool; what lies outside x is no sample."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    ceil_mode: bool = False

    @property
    def tap_dims(self) -> int:
        return len(self.kernel_size)

    def counts(self, space: tuple[int, ...]) -> list[int]:
        """How many windows there are along each dimension: none begins beyond the input and its left padding."""
        found = []
        for size, kernel, stride, padding in zip(space, self.kernel_size, self.stride, self.padding, strict=True):
            reach = size + 2 * padding - kernel
            count = (reach + stride - 1 if self.ceil_mode else reach) // stride + 1
            if self.ceil_mode and (count - 1) * stride >= size + padding:
                count -= 1
            found.append(count)
        return found

    def margins(self, space: tuple[int, ...]) -> list[int]:
        """The arguments of F.pad: (before, after) of each dimension, the last one first."""
        pairs = []
        for size, count, kernel, stride, padding in zip(
            space, self.counts(space), self.kernel_size, self.stride, self.padding, strict=True
        ):
            pairs.append((padding, max((count - 1) * stride + kernel - size - padding, 0)))
        return [amount for pair in reversed(pairs) for amount in pair]

    def view(self, x: Tensor) -> Tensor:
        """[*lead, *windows, *taps]."""
        margins = self.margins(tuple(x.shape[-self.tap_dims :]))
        x = F.pad(x, margins) if any(margins) else x
        for kernel, stride in zip(self.kernel_size, self.stride, strict=True):
            x = x.unfold(-self.tap_dims, kernel, stride)
        return x

    def scatter(self, taps: Tensor, shape: torch.Size) -> Tensor:
        """The adjoint of `view`: every sample collects from the windows that hold it."""
        space = tuple(shape[-self.tap_dims :])
        if self.tiles(space):
            rows = len(shape) - self.tap_dims
            pairs = [d for i in range(self.tap_dims) for d in (rows + i, rows + self.tap_dims + i)]
            return taps.permute(*range(rows), *pairs).reshape(shape)
        margins = self.margins(space)
        padded = [size + margins[-2 * i - 2] + margins[-2 * i - 1] for i, size in enumerate(space)]
        lead, counts = list(shape[: -self.tap_dims]), self.counts(space)
        for i in reversed(range(self.tap_dims)):
            sizes = [*lead, *counts[:i], *padded[i:], *self.kernel_size[:i]]
            at = len(lead) + i
            taps = torch.ops.aten.unfold_backward(taps, sizes, at, self.kernel_size[i], self.stride[i])
        return F.pad(taps, [-amount for amount in margins]) if any(margins) else taps

    def tiles(self, space: tuple[int, ...]) -> bool:
        """Whether every sample is in exactly one window."""
        whole = all(size % kernel == 0 for size, kernel in zip(space, self.kernel_size, strict=True))
        return whole and self.stride == self.kernel_size and not any(self.padding)

    def present(self, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """1 where a tap is a sample, 0 where it is padding, broadcasting against the view; None if all are."""
        space = x.shape[-self.tap_dims :]
        if not any(self.margins(tuple(space))):
            return None
        return self.view(torch.ones(space, dtype=dtype, device=x.device))


Geometry = Along | Windows
