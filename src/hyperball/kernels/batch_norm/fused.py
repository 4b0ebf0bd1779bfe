"""Robust batch normalization on Triton: torch.library operators, and the same as a plain autograd function.

Graphs that are compiled or traced hold the operators, which are functional. Eager code runs the autograd function,
which lets running statistics follow in the pass that writes y. Kept for the backward are x and (m, s) of every
channel: its first pass sums what the implicit derivative needs along with the gradients of weight and bias. A second
derivative is that of the eager twin. Triton is imported when one of them first runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.batch_norm.gradient import normalized
from hyperball.kernels.batch_norm.operation import Estimator
from hyperball.kernels.replay import replayed
from hyperball.kernels.triton.decoupled.ops import on_its_device, runs_directly

INPUTS = 8  # of the operator: x, c, weight, bias, and the estimator's name and shape, c as a number, eps


def is_last(x: Tensor) -> bool:
    """Whether a dense x has its channels last in memory; one channel of several positions counts as contiguous."""
    return x.dim() == 2 or x.shape[2:].numel() == 1 or not x.is_contiguous()


def dense(x: Tensor) -> Tensor:
    """x in one piece of memory: as it is where its channels lie last, or with its dimensions in order."""
    return x if x.movedim(1, -1).is_contiguous() else x.contiguous()


def dense_like(v: Tensor, x: Tensor) -> Tensor:
    """v in the layout of x, which is dense."""
    return v.movedim(1, -1).contiguous().movedim(-1, 1) if is_last(x) else v.contiguous()


def setup_of(
    x: Tensor, c: Tensor | None, weight: Tensor | None, bias: Tensor | None, momentum: float | None, name: str,
    shape: float, c_value: float, eps: float,
) -> Any:  # fmt: skip
    """What the launches depend on; where channels lie last, every position is an image."""
    from hyperball.kernels.triton.batch_norm.launch import Setup

    images, channels, last = x.shape[0], x.shape[1], is_last(x)
    length = x.numel() // (images * channels)
    if last:
        images, length = images * length, 1
    stride = 0 if c is None or c.numel() == 1 else c.stride(0)
    return Setup(
        images, channels, length, last, name, shape, eps, c_value if c is None else None, stride, weight is not None,
        bias is not None, momentum, x.device,
    )  # fmt: skip


@on_its_device
def forward(
    x: Tensor, c: Tensor | None, weight: Tensor | None, bias: Tensor | None, running: Any, momentum: float | None,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and (m, s), [2, C]; running statistics, where given, follow."""
    from hyperball.kernels.triton.batch_norm import launch as batch_norm_launch

    x = dense(x)
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    setup = setup_of(x, c, weight, bias, momentum, *numbers)
    return batch_norm_launch.forward(x, c, weight, bias, running, setup)


@on_its_device
def backward(
    v: Tensor, x: Tensor, c: Tensor | None, weight: Tensor | None, stats: Tensor, *numbers: Any
) -> tuple[Tensor, Tensor]:
    """dx, and the gradients of weight, bias and c of every channel, [3, C]."""
    from hyperball.kernels.triton.batch_norm import launch as batch_norm_launch

    x = dense(x)
    weight = None if weight is None else weight.contiguous()
    setup = setup_of(x, c, weight, None, None, *numbers)
    dx, rows = batch_norm_launch.backward(dense_like(v, x), x, c, weight, stats, setup)
    return dx, rows[:3]


@torch.library.custom_op("hyperball::robust_batch_norm", mutates_args=())
def robust_batch_norm_op(
    x: Tensor, c: Tensor | None, weight: Tensor | None, bias: Tensor | None, name: str, shape: float, c_value: float,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and (m, s) of every channel, [2, C]."""
    made: Any = forward(x, c, weight, bias, None, None, name, shape, c_value, eps)
    return made


@robust_batch_norm_op.register_fake
def _(
    x: Tensor, c: Any, weight: Any, bias: Any, name: str, shape: float, c_value: float, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dense(x)), x.new_empty((2, x.shape[1]), dtype=torch.float32)


@torch.library.custom_op("hyperball::robust_batch_norm_backward", mutates_args=())
def robust_batch_norm_backward_op(
    v: Tensor, x: Tensor, c: Tensor | None, weight: Tensor | None, stats: Tensor, name: str, shape: float,
    c_value: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx, and the gradients of weight, bias and c of every channel, [3, C]."""
    dx, rows = backward(v, x, c, weight, stats, name, shape, c_value, eps)
    return dx, rows.clone()


@robust_batch_norm_backward_op.register_fake
def _(
    v: Tensor, x: Tensor, c: Any, weight: Any, stats: Tensor, name: str, shape: float, c_value: float, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(dense(x)), stats.new_empty((3, x.shape[1]))


def twin_gradients(v: Tensor, inputs: tuple[Any, ...], needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of the eager twin, differentiable themselves."""
    name, shape, c_value, eps = inputs[4:]

    def function(x: Tensor, c: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        radius = torch.full((1,), c_value, device=x.device) if c is None else c
        return normalized(x, radius.expand(x.shape[1]), weight, bias, eps, Estimator(name, shape))[0]

    return tuple(replayed(function, inputs[:4], needed, v))


def _pulled(ctx: Any, v: Tensor | None, apply: Any) -> tuple[Any, ...]:
    """The gradients of x, c, weight and bias."""
    if v is None:
        return (None,) * 4
    x, c, weight, bias, stats = ctx.saved_tensors
    needed = tuple(ctx.needs_input_grad[:4])
    if torch.is_grad_enabled():
        return twin_gradients(v, (x, c, weight, bias, *ctx.numbers), needed)
    dx, rows = apply(v, x, c, weight, stats, *ctx.numbers)
    grads = [dx if needed[0] else None]
    for held, need, row in ((c, needed[1], 2), (weight, needed[2], 0), (bias, needed[3], 1)):
        if held is None or not need:
            grads.append(None)
        else:
            grad = rows[row] if held.numel() == rows.shape[1] else rows[row].sum(0, keepdim=True)
            grads.append(grad.to(held.dtype))
    return tuple(grads)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = inputs[4:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], output[1])


def _backward(ctx: Any, v: Tensor | None, _: Any) -> tuple[Any, ...]:
    return *_pulled(ctx, v, robust_batch_norm_backward_op), *(None,) * (INPUTS - 4)


robust_batch_norm_op.register_autograd(_backward, setup_context=_setup)


class RobustBatchNorm(torch.autograd.Function):
    """y and (m, s), for eager code: the operator's inputs, then the running statistics and their momentum, or None."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *given, running, momentum = inputs
        y, stats = forward(*given[:4], running, momentum, *given[4:])
        _setup(ctx, tuple(given), (y, stats))
        return y, stats

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *_pulled(ctx, grads[0], backward), *(None,) * (INPUTS - 2)


def fused_batch_norm(
    x: Tensor, c: Tensor | None, c_value: float, weight: Tensor | None, bias: Tensor | None, eps: float,
    e: Estimator, running: tuple[Tensor, Tensor] | None, momentum: float | None,
) -> tuple[Tensor, Tensor, bool]:  # fmt: skip
    """y, (m, s), and whether the running statistics have followed; c is a tensor of 1 or C values, or a number.

    Nothing of a quadratic depends on c, which gets no gradient then.
    """
    if e.name == "quadratic":
        c, c_value = None, 1.0
    given = (x, c, weight, bias, e.name, e.shape, c_value, eps)
    if not runs_directly(x, c, weight, bias):
        y, stats = robust_batch_norm_op(*given)
        return y, stats, False
    follows = running is not None and momentum is not None and all(t.is_contiguous() for t in running)
    held = (running, momentum) if follows else (None, None)
    y, stats = RobustBatchNorm.apply(*given, *held)
    return y, stats, follows
