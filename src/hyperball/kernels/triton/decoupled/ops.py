"""The decoupled convolution on Triton: a torch.library operator, and the same as a plain autograd function.

Graphs that are compiled or traced hold the operator, which is functional: it returns what its backward needs. Eager
code runs the autograd function, which costs a tenth of the operator's time on the CPU and lets a running mean follow.
Triton is imported when one of them first runs. Inputs are dense with channels last; `code` is the text of a `Code`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton.decoupled import twin
from hyperball.kernels.triton.decoupled.code import Code, read
from hyperball.kernels.triton.decoupled.slots import (
    Parameters,
    kinds_of,
    parameter_gradients,
    picked,
    sums_dtype,
    wanted,
)

NAMES = 17  # inputs of the operator
MODES: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def memory_format(x: Tensor) -> torch.memory_format:
    dims = x.dim()
    if dims == 4:
        return torch.channels_last
    return torch.channels_last_3d if dims == 5 else torch.contiguous_format


def dense(x: Tensor) -> Tensor:
    """x with its channels last in memory."""
    return x.contiguous(memory_format=memory_format(x))


def in_strides(weight: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The weight in the layout of a plan, which it has unless hooks have kept it elsewhere."""
    if weight.stride() == strides:
        return weight
    return torch.empty_strided(weight.shape, strides, dtype=weight.dtype, device=weight.device).copy_(weight)


def is_whole(weight: Tensor) -> bool:
    """Whether every filter lies in one piece of memory, output channels outermost."""
    return weight.is_contiguous() or (weight.dim() > 2 and weight.is_contiguous(memory_format=memory_format(weight)))


def filter_layout(weight: Tensor) -> Tensor:
    """The weight with every filter in one piece of memory, output channels outermost."""
    return weight if is_whole(weight) else weight.contiguous()


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the device of its first tensor as the current one: Triton launches there."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return function(x, *rest)
        with torch.cuda.device(x.device):
            return function(x, *rest)

    return run


def plain(x: Tensor, filters: Tensor, plan: Any) -> Tensor:
    """torch's convolution or linear map."""
    if x.dim() == 2:
        return torch.nn.functional.linear(x, filters)
    stride, padding, dilation, groups = plan.window
    return dense(torch.convolution(x, filters, None, stride, padding, dilation, False, plan.zeros, groups))


def empty_filters(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=memory_format(weight))


def plan_of(x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None], code: str, window: tuple[Any, ...]) -> Any:
    """The plan of a call; `window` is stride, padding and dilation as tuples, and the groups."""
    from hyperball.kernels.triton.decoupled.plan import plan_for

    if weight.device != x.device:
        raise RuntimeError(f"`weight` must be on the device of the input, {x.device}, got {weight.device}")
    return plan_for(code, x.shape, x.dtype, x.device, weight.shape, weight.stride(), kinds_of(parameters), window)


def frozen(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> tuple[Any, ...]:
    """The window of an operator as a plan's."""
    return tuple(stride), tuple(padding), tuple(dilation), groups


def prepare(
    x: Tensor, r: Tensor | None, weight: Tensor, parameters: Sequence[Tensor | None], running: Tensor | None,
    batches: Tensor | None, plan: Any, joint: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """n, ŵ (over the lift), m, p, (unit, lift): everything that comes before the convolution.

    With `batches`, the running mean follows the unit. With `joint`, small outputs are pieces of one memory.
    """
    for held in (running, batches):
        if held is not None and held.device != x.device:
            raise RuntimeError(f"running means must be on the device of the input, {x.device}, got {held.device}")
    m, p, scalars, n = plan.outputs(joint)
    parts, own = plan.cut(plan.passing)
    if r is None:
        r = own
        plan.lengths(x, r)
    filters = plan.empty_filters()
    given = [m if held is None else held for held in (*parameters[:5], running, batches)]
    made = (weight if plan.whole else filter_layout(weight), filters, m, p, scalars, *given[:5])
    if plan.begin is not None:
        plan.begin(*made, given[5], r, n)
    else:
        plan.box(r, n, parts)
        plan.prepare[batches is not None](*made, parts, *given[5:])
    return n, filters, m, p, scalars


def respond(
    x: Tensor, r: Tensor | None, weight: Tensor, parameters: Sequence[Tensor | None], running: Tensor | None,
    batches: Tensor | None, plan: Any, joint: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y = conv(x, ŵ), and what `prepare` gives: everything that comes before the epilogue."""
    made = prepare(x, r, weight, parameters, running, batches, plan, joint)
    return plain(x, made[1], plan), *made


@on_its_device
def forward(
    x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None], running: Tensor | None, batches: Tensor | None,
    plan: Any, joint: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """f, and y, n, filters, m, p, (unit, lift) for the backward."""
    from hyperball.kernels.triton.decoupled.passes import pointers

    made = prepare(x, None, weight, parameters, running, batches, plan, joint)
    n, filters, _, p, scalars = made
    if plan.implicit is None:
        y = plain(x, filters, plan)
        f = torch.empty_like(y)
        plan.epilogue(*pointers(y, n, p, scalars, parameters), p, p, p, f, p)
    else:
        f = torch.empty(plan.output, dtype=x.dtype, device=x.device, memory_format=plan.format)
        y = torch.empty_like(f)
        plan.implicit(x, filters, f, *pointers(y, n, p, scalars, parameters))
    return f, y, *made


@torch.library.custom_op("hyperball::decoupled_conv", mutates_args=())
def decoupled_conv(
    x: Tensor, weight: Tensor, alpha: Tensor | None, beta: Tensor | None, rho: Tensor | None, shape: Tensor | None,
    bend: Tensor | None, factor: Tensor | None, stretch: Tensor | None, slopes: Tensor | None, turns: Tensor | None,
    running: Tensor | None, code: str, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """f, and y, n, filters, m, p, (unit, lift) for the backward."""
    parameters = [alpha, beta, rho, shape, bend, factor, stretch, slopes, turns]
    x = dense(x)
    plan = plan_of(x, weight, parameters, code, frozen(stride, padding, dilation, groups))
    made: Any = forward(x, weight, parameters, running, None, plan, False)
    return made


def fake_response(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[Any, ...]:
    if x.dim() == 2:
        y = x.new_empty(x.shape[0], weight.shape[0])
    else:
        out = [
            (size + 2 * pad - gap * (taps - 1) - 1) // step + 1
            for size, taps, step, pad, gap in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        ]
        shape = (x.shape[0], weight.shape[0], *out)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))
    positions = y.numel() // weight.shape[0]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    n = torch.empty(positions * groups, **wide)
    channels = weight.shape[0]
    m, p = torch.empty(channels, **wide), torch.empty(5, channels, **wide)
    return y, n, empty_filters(weight, x.dtype), m, p, torch.empty(2, **wide)


@decoupled_conv.register_fake
def _(
    x: Tensor, weight: Tensor, alpha: Any, beta: Any, rho: Any, shape: Any, bend: Any, factor: Any, stretch: Any,
    slopes: Any, turns: Any, running: Any, code: str, strides: Any, padding: Any, dilation: Any, groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = fake_response(x, weight, strides, padding, dilation, groups)
    return torch.empty_like(made[0]), *made


@on_its_device
def backward(
    v: Tensor, x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None], y: Tensor, n: Tensor, filters: Tensor,
    m: Tensor, p: Tensor, scalars: Tensor, plan: Any, gradients: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """dx, dw and the parameters' gradients [rows, channels], for a dense v and x."""
    from hyperball.kernels.triton.decoupled.passes import pointers

    t, parts, pulls, *along = plan.cut(gradients.with_along)
    dy = torch.empty_like(y)
    gradients.epilogue(v, v, v, v, v, p, p, *pointers(y, n, p, scalars, parameters), dy, t, parts)
    held = (weight, parameters[2], filters, n, m, scalars)
    return convolution_backward(x, None, held, (dy, t, parts, pulls, *along), plan, gradients)


@torch.library.custom_op("hyperball::decoupled_conv_backward", mutates_args=())
def decoupled_conv_backward(
    v: Tensor, x: Tensor, weight: Tensor, parameters: list[Tensor | None], y: Tensor, n: Tensor, filters: Tensor,
    m: Tensor, p: Tensor, scalars: Tensor, needed: list[bool], code: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and the parameters' gradients [rows, channels]; `needed` is for x, weight and the nine parameters."""
    v, x, y = dense(v), dense(x), dense(y)
    plan = plan_of(x, weight, parameters, code, frozen(stride, padding, dilation, groups))
    made = backward(v, x, weight, parameters, y, n, filters, m, p, scalars, plan, plan.for_needs(tuple(needed)))
    return present(m, *made)


def present(like: Tensor, *made: Tensor | None) -> Any:
    """Tensors, empty ones in place of None, which an operator cannot return."""
    return tuple([like.new_empty(0) if t is None else t for t in made])


def convolution_backward(
    x: Tensor, r: Tensor | None, held: tuple[Any, ...], made: tuple[Tensor, ...], plan: Any, gradients: Any
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """dx, dw and the parameters' gradients; where lengths r were given, what they take from dx is in the last `made`.

    Filters' gradient first where it is captured: dx is then still cached when x·T is added. Two calls cost the host
    more than one, which counts where every launch is its own.
    """
    weight, rho, filters, n, m, scalars = held
    dy, t, parts, pulls, *along = made
    of_input, of_filters, _ = gradients.mask
    weight = weight if plan.whole else filter_layout(weight)
    implicit = None if r is not None else gradients.implicit
    later = of_input and (implicit is not None or (of_filters and is_recorded(x)))
    dx, dfilters = plain_backward(dy, x, filters, plan, (of_input and not later, of_filters, False))
    dw = torch.empty_like(weight) if of_filters else None
    shape, dtype = gradients.sums
    sums = torch.empty(shape, dtype=dtype, device=x.device)
    ended = (
        weight, weight if dfilters is None else dfilters, m, scalars, weight if dw is None else dw, parts, sums,
        m if rho is None else rho, pulls,
    )  # fmt: skip
    if of_input and r is None:
        gradients.finish_box(*ended, t, n, *along)
    else:
        gradients.finish(*ended)
    if implicit is not None:
        dx = torch.empty_like(x)
        implicit(dy, filters, dx, x, *along, pulls)
        return dx, dw, sums
    if of_input and r is not None:
        gradients.box(t, n, r, pulls, along[0])
    if later:
        dx, _ = plain_backward(dy, x, filters, plan, (True, False, False))
    if of_input and r is None:
        gradients.add(dx, x, *along, pulls)
    return dx, dw, sums


def is_recorded(x: Tensor) -> bool:
    """Whether launches are recorded, so that only the GPU's time counts."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def plain_backward(
    dy: Tensor, x: Tensor, filters: Tensor, plan: Any, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the plain convolution's input and filters, those of the mask."""
    if x.dim() == 2:
        return dy @ filters if mask[0] else None, dy.t() @ x if mask[1] else None
    if not (mask[0] or mask[1]):
        return None, None
    stride, padding, dilation, groups = plan.window
    dx, dfilters, _ = torch.ops.aten.convolution_backward.default(
        dy, x, filters, None, stride, padding, dilation, False, plan.zeros, groups, mask
    )
    return dense(dx) if mask[0] else None, dense(dfilters) if mask[1] else None


@decoupled_conv_backward.register_fake
def _(
    v: Tensor, x: Tensor, weight: Tensor, parameters: Any, y: Tensor, n: Tensor, filters: Tensor, m: Tensor,
    p: Tensor, scalars: Tensor, needed: list[bool], code: str, stride: Any, padding: Any, dilation: Any, groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return fake_gradients(x, weight, parameters, m, needed, read(code))


def fake_gradients(
    x: Tensor, weight: Tensor, parameters: Parameters, m: Tensor, needed: list[bool], code: Code
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [1] * 7 + [0 if held is None else held.numel() for held in parameters[7:]]
    count = sum(size for size, want in zip(sizes, wanted(code, needed), strict=True) if want)
    dx = torch.empty_like(x, memory_format=memory_format(x)) if needed[0] else m.new_empty(0)
    dw = torch.empty_like(filter_layout(weight)) if needed[1] else m.new_empty(0)
    return dx, dw, m.new_empty(max(count, 1), m.shape[0], dtype=sums_dtype(kinds_of(parameters), needed, m.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[12:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:11], *output[1:])


def _backward(ctx: Any, v: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of the operator's inputs; a second derivative is the eager twin's."""
    if v is None:
        return (None,) * NAMES
    x, weight, *rest = ctx.saved_tensors
    parameters, made = rest[:9], rest[9:]
    needed = list(ctx.needs_input_grad[:11])
    code = ctx.settings[0]
    if torch.is_grad_enabled():
        running = made[5][0] if read(code).unit == "running" else None
        grads = twin.gradients(v, x, weight, parameters, running, needed, *ctx.settings)
    else:
        dx, dw, sums = decoupled_conv_backward(v, x, weight, parameters, *made, needed, *ctx.settings)
        small = parameter_gradients(sums, parameters, needed, read(code))
        grads = (dx if needed[0] else None, dw if needed[1] else None, *small)
    return (*grads, *(None,) * (NAMES - 11))


decoupled_conv.register_autograd(_backward, setup_context=_setup)


def by_slices(operator: Any) -> Callable[..., Any]:
    """The vmap rule of an operator: one call a slice, since a batch's statistics are those of its slice."""

    def sliced(held: Any, dim: Any, index: int) -> Any:
        if isinstance(held, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [sliced(item, place, index) for item, place in zip(held, dim, strict=True)]
        return held if dim is None else held.select(dim, index)

    def rule(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
        made = [
            operator(*[sliced(held, dim, index) for held, dim in zip(inputs, dims, strict=True)])
            for index in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(outputs) for outputs in zip(*made, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


decoupled_conv.register_vmap(by_slices(decoupled_conv))
decoupled_conv_backward.register_vmap(by_slices(decoupled_conv_backward))


class DecoupledConv(torch.autograd.Function):
    """f alone, for eager code; `moving` are the running mean and, where it is to follow, the number of batches."""

    @staticmethod
    def forward(ctx: Any, plan: Any, moving: tuple[Any, Any], x: Tensor, weight: Tensor, *given: Tensor) -> Tensor:
        f, *made = forward(x, weight, plan.spread(given), *moving, plan, True)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *made, *given)
        out: Tensor = f
        return out

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        plan, needed = ctx.plan, ctx.needs_input_grad
        if v is None:
            return (None,) * len(needed)
        x, weight, *made = ctx.saved_tensors
        return None, None, *all_gradients(v, x, weight, made[6:], made[:6], plan, plan.for_given(needed[2:]))


def all_gradients(
    v: Tensor, x: Tensor, weight: Tensor, given: Sequence[Tensor], made: Sequence[Tensor], plan: Any, gradients: Any
) -> tuple[Tensor | None, ...]:
    """Those of x, the weight and the given parameters; `made` as by `respond`. A second derivative is the twin's.

    Saved tensors may come back in another layout, where hooks have kept them elsewhere.
    """
    parameters = plan.spread(given)
    if torch.is_grad_enabled():
        unit = made[5][0] if plan.code.unit == "running" else None
        dx, dw, *small = twin.gradients(v, x, weight, parameters, unit, gradients.needed, plan.text, *plan.window)
    else:
        weight = in_strides(weight, plan.strides)
        y, *rest = made
        dx, dw, sums = backward(dense(v), dense(x), weight, parameters, dense(y), *rest, plan, gradients)
        small = picked(sums, gradients.picks)
    return dx, dw, *[small[place] for place in plan.given]


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether nothing looks at the operators that run: no compiler, no dispatch mode, no tensor of another class."""
    if torch.compiler.is_compiling() or MODES():
        return False
    return all([t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors])


@torch.library.custom_op("hyperball::track", mutates_args=("running", "batches"))
def track(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    """running ← running + w·(unit - running), w = max(1 - 0.999, 1/batches); a non-finite unit changes nothing."""
    from hyperball.kernels.triton.decoupled import launch

    launch.track((running, batches, unit), None, 0.0, 1.0)


@track.register_fake
def _(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    return None
