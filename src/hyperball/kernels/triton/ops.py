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

from hyperball.kernels.triton import twin
from hyperball.kernels.triton.code import Code, read

Parameters = list[Tensor | None]
PARAMETERS = 9  # alpha, beta, rho, shape, bend, factor, stretch, slopes, turns
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


def filter_layout(weight: Tensor) -> Tensor:
    """The weight with every filter in one piece of memory, output channels outermost."""
    if weight.is_contiguous() or (weight.dim() > 2 and weight.is_contiguous(memory_format=memory_format(weight))):
        return weight
    return weight.contiguous()


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the device of its first tensor as the current one: Triton launches there."""

    @functools.wraps(function)
    def run(x: Tensor, *rest: Any) -> Any:
        if not x.is_cuda or x.get_device() == torch.cuda.current_device():
            return function(x, *rest)
        with torch.cuda.device(x.device):
            return function(x, *rest)

    return run


def plain(
    x: Tensor, filters: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """torch's convolution or linear map."""
    if x.dim() == 2:
        return torch.nn.functional.linear(x, filters)
    zeros = (0,) * len(stride)
    return dense(torch.convolution(x, filters, None, stride, padding, dilation, False, zeros, groups))


def empty_filters(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=memory_format(weight))


def geometry(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Any:
    from hyperball.kernels.triton import launch

    return launch.geometry(x.shape, weight.shape[2:], tuple(stride), tuple(padding), tuple(dilation), groups)


def respond(
    x: Tensor, r: Tensor | None, weight: Tensor, parameters: Parameters, running: Tensor | None,
    batches: Tensor | None, code: Code, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y = conv(x, ŵ), and n, ŵ (over the lift), m, p, (unit, lift): everything that comes before the epilogue.

    With `batches`, the running mean follows the unit.
    """
    from hyperball.kernels.triton import launch

    g = geometry(x, weight, stride, padding, dilation, groups)
    if r is None:
        r = launch.lengths(x, g.rows, groups)
    half = x.dtype == torch.float16
    n, parts = launch.box(r, g, code.unit_eps, code.unit == "batch", half)
    filters = empty_filters(weight, x.dtype)
    m, p, scalars = launch.prepare(
        filter_layout(weight), filters, parameters[:5], running, batches, parts, n.shape[0], code
    )
    return plain(x, filters, stride, padding, dilation, groups), n, filters, m, p, scalars


@on_its_device
def forward(
    x: Tensor, weight: Tensor, parameters: Parameters, running: Tensor | None, batches: Tensor | None, code: str,
    *window: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """f, and y, n, filters, m, p, (unit, lift) for the backward."""
    from hyperball.kernels.triton import passes

    rule = read(code)
    made = respond(dense(x), None, weight, parameters, running, batches, rule, *window)
    y, n, _, _, p, scalars = made
    f, _ = passes.forward(passes.operands(y, n, p, scalars, parameters, rule, window[-1]))
    return f, *made


@torch.library.custom_op("hyperball::decoupled_conv", mutates_args=())
def decoupled_conv(
    x: Tensor, weight: Tensor, alpha: Tensor | None, beta: Tensor | None, rho: Tensor | None, shape: Tensor | None,
    bend: Tensor | None, factor: Tensor | None, stretch: Tensor | None, slopes: Tensor | None, turns: Tensor | None,
    running: Tensor | None, code: str, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """f, and y, n, filters, m, p, (unit, lift) for the backward."""
    parameters = [alpha, beta, rho, shape, bend, factor, stretch, slopes, turns]
    made: Any = forward(x, weight, parameters, running, None, code, stride, padding, dilation, groups)
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
    v: Tensor, x: Tensor, weight: Tensor, parameters: Parameters, y: Tensor, n: Tensor, filters: Tensor, m: Tensor,
    p: Tensor, scalars: Tensor, needed: Sequence[bool], code: str, *window: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dx, dw and the parameters' gradients [rows, channels]; `needed` is for x, weight and the nine parameters."""
    from hyperball.kernels.triton import passes

    o = passes.operands(y, n, p, scalars, parameters, read(code), window[-1])
    made = passes.backward(o, passes.Incoming(dense(v)), None, None, wanted(read(code), needed))
    held = (weight, filters, m, scalars, parameters)
    return convolution_backward(o, dense(x), None, held, made, needed, *window)[:3]


@torch.library.custom_op("hyperball::decoupled_conv_backward", mutates_args=())
def decoupled_conv_backward(
    v: Tensor, x: Tensor, weight: Tensor, parameters: list[Tensor | None], y: Tensor, n: Tensor, filters: Tensor,
    m: Tensor, p: Tensor, scalars: Tensor, needed: list[bool], code: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and the parameters' gradients [rows, channels]; `needed` is for x, weight and the nine parameters."""
    made: Any = backward(
        v, x, weight, parameters, y, n, filters, m, p, scalars, needed, code, stride, padding, dilation, groups
    )
    return made


def wanted(code: Code, needed: Sequence[bool]) -> tuple[bool, ...]:
    """Which parameters' gradients are summed: the needed ones, and a relative radius's where others hang on it."""
    relative = code.unit == "batch" and (needed[0] or needed[4])
    return (*needed[2:4], needed[4] or relative, *needed[5:])


def sums_dtype(parameters: Parameters, needed: Sequence[bool], channels: int) -> torch.dtype:
    """In which dtype the gradients leave: the parameters' own where each is one number a channel, else float32."""
    held = [t for t, need in zip(parameters, needed[2:], strict=True) if need and t is not None]
    kinds = {t.dtype for t in held}
    own = len(kinds) == 1 and all(t.dim() == 1 and t.shape[0] == channels for t in held) and not any(needed[9:])
    return kinds.pop() if own else torch.float32


def convolution_backward(
    o: Any, x: Tensor, r: Tensor | None, held: tuple[Any, ...], made: tuple[Tensor, ...], needed: Sequence[bool],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw, the parameters' gradients, and dr where lengths r were given (else they are in dx)."""
    from hyperball.kernels.triton import launch, passes

    weight, filters, m, scalars, parameters = held
    dy, dn, parts = made
    code, window = o.rule.code, (stride, padding, dilation, groups)
    grad_filters = plain_backward(dy, x, filters, *window, False) if needed[1] else None
    places, _ = passes.placed(o.rule.pieces, o.rule.turns, wanted(code, needed))
    dtype = sums_dtype(parameters, needed, m.shape[0])
    half = x.dtype == torch.float16
    dw, sums, pulls = launch.finish(
        filter_layout(weight), grad_filters, m, parts, parameters[2], scalars, code, half, places["rho"], dtype
    )
    dx, dr = m.new_empty(0), m.new_empty(0)
    if needed[0]:
        g = geometry(x, weight, *window)
        along = launch.box_transposed(dn, o.n, r, pulls if code.unit == "batch" else None, g, code.unit_eps)
        dx = plain_backward(dy, x, filters, *window, True)
        if r is None:
            launch.add_along(dx, x, along, g.rows, groups)
        else:
            dr = along
    return dx, m.new_empty(0) if dw is None else dw, sums, dr


def plain_backward(
    dy: Tensor, x: Tensor, filters: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int, of_input: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the plain convolution's input, or of its filters."""
    if x.dim() == 2:
        return dy @ filters if of_input else dy.t() @ x
    grads = torch.ops.aten.convolution_backward.default(
        dy, x, filters, None, stride, padding, dilation, False, (0,) * len(stride), groups,
        (of_input, not of_input, False),
    )  # fmt: skip
    return dense(grads[0] if of_input else grads[1])


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
    return dx, dw, m.new_empty(max(count, 1), m.shape[0], dtype=sums_dtype(parameters, needed, m.shape[0]))


def parameter_gradients(
    sums: Tensor, parameters: Sequence[Tensor | None], needed: Sequence[bool], code: Code
) -> Parameters:
    """The rows of the gradients, each in its parameter's shape and dtype; `needed` as in `backward`."""
    grads: Parameters = []
    row = 0
    for k, (held, need, taken) in enumerate(zip(parameters, needed[2:], wanted(code, needed), strict=True)):
        size = (held.numel() if held is not None else 0) if k >= 7 else 1
        if not need or held is None:
            grads.append(None)
        elif k >= 7:
            grads.append(sums[row : row + size].sum(1).to(held.dtype))
        else:
            grad = sums[row] if held.dim() else sums[row].sum()
            grads.append(grad if grad.dtype == held.dtype else grad.to(held.dtype))
        row += size if taken else 0
    return grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[12:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:11], *output[1:])


def _backward(ctx: Any, v: Tensor | None, *_: Any, apply: Any = decoupled_conv_backward) -> tuple[Any, ...]:
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
        dx, dw, sums = apply(v, x, weight, parameters, *made, needed, *ctx.settings)
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
    """f alone, for eager code: the operator's inputs, then `batches` where the running mean is to follow."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *given, batches = inputs
        made = forward(given[0], given[1], given[2:11], given[11], batches, *given[12:])
        ctx.settings = given[12:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*given[:11], *made[1:])
        f: Tensor = made[0]
        return f

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        return (*_backward(ctx, v, apply=backward), None)


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether nothing looks at the operators that run: no compiler, no dispatch mode, no tensor of another class."""
    if torch.compiler.is_compiling() or MODES():
        return False
    return all([t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors])


@torch.library.custom_op("hyperball::track", mutates_args=("running", "batches"))
def track(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    """running ← running + w·(unit - running), w = max(1 - 0.999, 1/batches); a non-finite unit changes nothing."""
    from hyperball.kernels.triton import launch

    launch.track((running, batches, unit), None, 0.0, 1.0)


@track.register_fake
def _(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    return None
