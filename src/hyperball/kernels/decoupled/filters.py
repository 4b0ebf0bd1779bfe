"""Filters of the compiled CPU path, left as they are: conv(x, w/m) = conv(x, w)/m, with 1/m read by the epilogue.

Where a length m = ‖w‖ or a patch is near the ends of float32, and wherever torch's own operators are asked for, there
is no such form, and the filters are divided by their lengths.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels import native
from hyperball.kernels.decoupled import native as compiled
from hyperball.kernels.memory import is_channels_last, is_plain, restored
from hyperball.kernels.norms import filter_norms, inverse, norm


class Measured(NamedTuple):
    """A weight for the convolution, the lengths of its filters and their inverses, one number a channel."""

    weight: Tensor
    length: Tensor
    over: Tensor


class Shape(NamedTuple):
    """Where the filters of a weight lie: [out, in/groups, …], or [in, out/groups, …] where transposed."""

    groups: int = 1
    transposed: bool = False

    def lengths(self, weight: Tensor) -> Tensor:
        """m [out], by torch's own operators."""
        if not self.transposed:
            return filter_norms(weight)
        return norm(weight.unflatten(0, (self.groups, -1)), (1, *range(3, weight.dim() + 1))).flatten()

    def beside(self, values: Tensor, weight: Tensor) -> Tensor:
        """One number a channel [out], in a shape that broadcasts against the weight."""
        ends = (1,) * (weight.dim() - 2)
        if not self.transposed:
            return values.reshape(-1, 1, *ends)
        inputs, outputs = weight.shape[0] // self.groups, weight.shape[1]
        return values.reshape(self.groups, 1, outputs).expand(-1, inputs, -1).reshape(-1, outputs, *ends)


def as_they_are(x: Tensor, weight: Tensor, n: Tensor, shape: Shape) -> Measured | None:
    """The filters undivided; None where they must be divided by their lengths."""
    if not is_plain(x, weight, n) or weight.numel() == 0 or not n.is_contiguous() or compiled.library().filters is None:
        return None
    held = weight.detach()
    beside = not shape.transposed and is_channels_last(held) is not None
    m = held.new_empty(held.shape[0]) if beside else shape.lengths(held)
    over = torch.empty_like(m)
    if not _measure(held if beside else None, n.detach(), m, over):
        return None
    if torch.is_grad_enabled() and weight.requires_grad:
        return Measured(*Undivided.apply(weight, m, over, shape))
    return Measured(weight, m, over)


def _measure(weight: Tensor | None, n: Tensor, m: Tensor, over: Tensor) -> bool:
    """Fill `over`, and m where a weight is given; whether the filters may stay as they are."""
    function = compiled.library().filters
    assert function is not None
    job = compiled.Measure(
        w=None if weight is None else weight.data_ptr(),
        n=n.data_ptr(),
        m=m.data_ptr(),
        over=over.data_ptr(),
        count=m.numel(),
        size=0 if weight is None else weight.numel() // m.numel(),
        patches=n.numel(),
        threads=torch.get_num_threads(),
        parallel=native.thread_pool(),
    )
    return function(ctypes.byref(job)) == 0


class Undivided(torch.autograd.Function):
    """(w, m, 1/m) with m and 1/m as measured; the gradient of w is G + ŵ·dm - ŵ·d(1/m)/m², G that of the first."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, m: Tensor, over: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shape, ctx.shapes = shape, (weight.shape, over.shape)
        ctx.save_for_backward(weight, over)
        ctx.set_materialize_grads(False)
        return weight, m, over

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_m: Tensor | None, grad_over: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        weight, over = restored(ctx.saved_tensors, ctx.shapes)
        plain = not torch.is_grad_enabled() and is_plain(weight, over, grad, grad_m, grad_over)
        if not plain:
            over = inverse(ctx.shape.lengths(weight))
        parts = [] if grad_m is None else [grad_m * over]
        parts += [] if grad_over is None else [-grad_over * over * over * over]
        if not parts:
            return grad, None, None, None
        along = ctx.shape.beside(sum(parts[1:], parts[0]), weight)
        if grad is None:
            return weight * along, None, None, None
        return grad.addcmul_(weight, along) if plain else grad + weight * along, None, None, None
