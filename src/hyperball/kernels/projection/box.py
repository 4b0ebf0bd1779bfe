"""Projections onto a box, y = min(max(x, low), high): one pass forward, and on a GPU one launch backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.projection.operation import _is_plain_pull, choose_kernel, clip, is_plain

Bound = float | Tensor
Pulled = tuple[Tensor | None, Tensor | None, Tensor | None]


def project_box(x: Tensor, low: Bound, high: Bound) -> Tensor:
    """y = min(max(x, low), high); on a bound the gradient is x's, NaN stays where it is.

    Plain operations, whose derivatives of any order and mode torch knows, where they are traced, transformed or carry
    tangents.
    """
    if all(is_plain(held) for held in tensors_of(x, low, high)):
        y: Tensor = _Box.apply(x, low, high)
        return y
    return clip(x, as_tensor(low, x), as_tensor(high, x))


def tensors_of(*given: Bound) -> list[Tensor]:
    return [held for held in given if isinstance(held, Tensor)]


def as_tensor(bound: Bound, x: Tensor) -> Tensor:
    """The bound as a tensor of x's dtype and device."""
    return bound if isinstance(bound, Tensor) else torch.full((), bound, dtype=x.dtype, device=x.device)


def clamped(x: Tensor, low: Bound, high: Bound) -> Tensor:
    """`torch.clamp`, which takes two numbers or two tensors."""
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return torch.clamp(x, as_tensor(low, x), as_tensor(high, x))
    return torch.clamp(x, low, high)


def pull(v: Tensor, x: Tensor, low: Bound, high: Bound, needed: tuple[bool, ...]) -> Pulled:
    """The gradients of x and of the bounds, of x's shape: v goes to x where low <= x <= high, else to the bound.

    torch.clamp's own leaves the gradient on a bound to its version.
    """
    lower, upper = as_tensor(low, x), as_tensor(high, x)
    below = (x < lower) | lower.isnan()
    above = (torch.where(below, lower, x) > upper) | upper.isnan()
    return (
        v.masked_fill(below | above, 0.0) if needed[0] else None,
        v.masked_fill(~below | above, 0.0) if needed[1] else None,
        v.masked_fill(~above, 0.0) if needed[2] else None,
    )


class _Box(torch.autograd.Function):
    """`project_box`; keeps x and the bounds."""

    @staticmethod
    def forward(x: Tensor, low: Bound, high: Bound) -> Tensor:
        return clamped(x, low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *bounds = inputs
        ctx.numbers = [None if isinstance(held, Tensor) else held for held in bounds]
        ctx.save_for_backward(x, *(held if isinstance(held, Tensor) else None for held in bounds))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Pulled:
        (v,), (x, *saved) = grads, ctx.saved_tensors
        low, high = (number if held is None else held for held, number in zip(saved, ctx.numbers, strict=True))
        kernel = choose_kernel(x.device, x.dtype, min(x.numel(), 1)).kernel
        if kernel == "triton" and _is_plain_pull(v, *tensors_of(x, low, high)):
            from hyperball.kernels.triton.projection import box

            found: Pulled = box.pull(v, x, low, high, *ctx.needs_input_grad[1:])
        else:
            found = pull(v, x, low, high, ctx.needs_input_grad)
        return found[0], summed(found[1], low), summed(found[2], high)


def summed(share: Tensor | None, bound: Bound) -> Tensor | None:
    """The gradient of a bound from those of the elements that it bounds."""
    if share is None or not isinstance(bound, Tensor):
        return None
    return share.sum_to_size(bound.shape).to(bound.dtype)
