"""The shortest way of a convolution module to its launches, for eager code: one look at what its plan depends on.

It serves modules whose only tensors are the weight, a bias and, if there is one, the ratio of a relative radius; the
general way (`hyperball.kernels.triton.decoupled.layer`) does the same for all others, and whatever this one declines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels import dispatch
from hyperball.kernels.triton.decoupled import addresses, ops
from hyperball.kernels.triton.decoupled.layer import mark_changed, plain_code

KEPT = 1024  # plans that are kept by their modules' settings
TRIES = (3, 30, 300)  # calls of a plan after which its launches may have gone their direct way
KINDS = (Tensor, torch.nn.Parameter)
HOOKS: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda tracing: True)
LATEST: dict[int, tuple[tuple[Any, ...], Any]] = {}  # by a module's number: what its last plan was for, and the plan


def convolve(conv: Any, x: Tensor, checked: Callable[..., Any]) -> Tensor | None:
    """A convolution module's output without its bias; None where the general way has to look.

    `checked` gives the window of a convolution by dimensions, shape of input and weight, stride, padding, dilation and
    groups, and refuses those that do not fit.
    """
    magnitude = conv._modules["magnitude"]
    weight, ratio = conv._parameters.get("weight"), None
    if magnitude._stored:
        ratio = magnitude._parameters.get("ratio")
        if type(ratio) not in KINDS:
            return None
    if type(weight) not in KINDS or weight.device != x.device or is_watched(x):
        return None
    buffers, training = magnitude._buffers, magnitude.training
    running = buffers.get("running_length")
    plan = latest_plan(conv, x, weight, ratio, running is not None, training, checked)
    if plan is None:
        return None
    batches = None
    if training and running is not None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return None
        batches = buffers["batches"]
        mark_changed(running, batches)
    return run(plan, ops.dense(x), weight, ratio, running, batches)


def latest_plan(
    conv: Any, x: Tensor, weight: Tensor, ratio: Tensor | None, relative: bool, training: bool,
    checked: Callable[..., Any],
) -> Any:  # fmt: skip
    """The plan of a module on such an input: its last one, if all that it depends on is as it was."""
    magnitude, angular = conv._modules["magnitude"], conv._modules["angular"].value
    kind = None if ratio is None else (ratio.shape, ratio.dtype, ratio.device, ratio.stride())
    value = magnitude.value
    key = (
        x.shape, x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, kind, relative, training, value,
        angular, magnitude.eps, conv.stride, conv.padding, conv.dilation, conv.groups, checked, tables(value, angular),
    )  # fmt: skip
    number = id(conv)
    last = LATEST.get(number)
    if last is not None and last[0] == key:
        return last[1]
    if type(conv.stride) is not tuple or type(conv.padding) is not tuple or type(conv.dilation) is not tuple:
        return None
    plan = plan_of_module(*key)
    if len(LATEST) >= KEPT:
        LATEST.clear()
    LATEST[number] = (key, plan)
    return plan


def run(
    plan: Any, x: Tensor, weight: Tensor, ratio: Tensor | None, running: Tensor | None, batches: Tensor | None
) -> Tensor:
    """f by the plan: by addresses where they are ready, and without autograd where nobody asks for it.

    Hooks on saved tensors get the same ones at every call: a checkpoint counts them when it computes them again.
    """
    at, moving = plan.at, (running, batches)
    if at is None:
        plan.calls += 1
        if plan.calls in TRIES:
            plan.at = addresses.forward_of(plan, weight, ratio, running, batches is not None)
    elif at.serves(running) and addresses.is_aligned(x, weight, ratio, running, batches):
        if not torch.is_grad_enabled():
            quick: Tensor = at(x, weight, ratio, running, batches)[0]
            return quick
        if not HOOKS(False):
            made: Tensor = DirectConv.apply(at, moving, x, weight, ratio)
            return made
    given = () if ratio is None else (ratio,)
    slow: Tensor = ops.DecoupledConv.apply(plan, moving, x, weight, *given)
    return slow


class DirectConv(torch.autograd.Function):
    """f alone, by addresses; what they do not serve in the backward goes the way of tensors."""

    @staticmethod
    def forward(ctx: Any, at: Any, moving: tuple[Any, Any], x: Tensor, weight: Tensor, ratio: Tensor | None) -> Tensor:
        f, y, whole = at(x, weight, ratio, *moving)
        ctx.at = at
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, ratio, y, whole)
        out: Tensor = f
        return out

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        if v is None:
            return (None,) * 5
        at, saved = ctx.at, ctx.saved_tensors
        gradients = at.plan.for_given(ctx.needs_input_grad[2 : at.inputs])
        if gradients.at is None:
            gradients.calls += 1
            if gradients.calls == 1 or gradients.calls in TRIES:
                gradients.at = addresses.backward_of(at, gradients, saved[1], saved[2])
        elif not torch.is_grad_enabled() and not ops.is_recorded(v):
            v = ops.dense(v)
            if is_as_kept(at, *saved) and addresses.is_aligned(v, *saved):
                return None, None, *gradients.at(v, *saved)
        x, weight, ratio, y, whole = saved
        given = () if ratio is None else (ratio,)
        found = ops.all_gradients(v, x, weight, given, at.pieces(y, whole), at.plan, gradients)
        return None, None, *found, *(None,) * (3 - len(found))


def is_as_kept(at: Any, x: Tensor, weight: Tensor, ratio: Tensor | None, y: Tensor | None, whole: Tensor) -> bool:
    """Whether saved tensors lie in memory as they did: hooks may have kept them elsewhere."""
    plan = at.plan
    return (
        weight.stride() == plan.strides
        and x.is_contiguous(memory_format=plan.format)
        and (y is None or y.is_contiguous(memory_format=plan.format))
        and whole.device == x.device == plan.device
    )


def is_watched(x: Tensor) -> bool:
    """Whether autocast, a transform, a tracer or a dispatch mode has a say in what runs."""
    return bool(
        torch.is_autocast_enabled(x.device.type)
        or ops.MODES()
        or dispatch.is_exporting()
        or dispatch.is_transformed()
        or dispatch.has_tangents()
    )


def tables(magnitude: Any, angular: Any) -> tuple[Any, ...]:
    """What the choice of a kernel depends on and a program may change: the tables' rows, and where Triton runs."""
    rows = radial_table.TABLE.rows.get(magnitude.row.name), angular_table.TABLE.rows.get(angular.row.name)
    return *rows, dispatch.DEVICES, dispatch.HAS_TRITON


@functools.lru_cache(maxsize=KEPT)
def plan_of_module(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, weight: torch.Size, strides: tuple[int, ...],
    weight_dtype: torch.dtype, ratio: tuple[Any, ...] | None, relative: bool, training: bool, magnitude: Any,
    angular: Any, eps: float, stride: tuple[int, ...], padding: Any, dilation: tuple[int, ...], groups: int,
    checked: Callable[..., Any], _tables: tuple[Any, ...],
) -> Any:  # fmt: skip
    """The plan of a module on such an input, checked; None where the general way has to look.

    `ratio` is the shape, dtype, device and strides of a relative radius's tensor.
    """
    dims = len(weight) - 2
    if dims < 2 or len(shape) != len(weight) or 0 in shape:
        return None
    if ratio is not None and (ratio[2] != device or ratio[3] not in ((), (1,))):
        return None
    facts = dispatch.Facts(
        device.type, dtype, weight_dtype, weight[0], groups, triton=dispatch.HAS_TRITON, rocm=dispatch.HAS_ROCM
    )
    if dispatch.choose(magnitude, angular, "none", facts).kernel != "triton":
        return None
    window = checked(dims, shape, weight, stride, padding, dilation, groups)
    if any(before != after for before, after in window.padding):
        return None
    from hyperball.kernels.triton.decoupled.plan import plan_for

    code = plain_code(magnitude, angular, eps, training, relative, ratio is not None).written
    pads = tuple([before for before, _ in window.padding])
    kinds = (None, None, None if ratio is None else ratio[:2], *(None,) * 6)
    return plan_for(code, shape, dtype, device, weight, strides, kinds, (window.stride, pads, window.dilation, groups))
