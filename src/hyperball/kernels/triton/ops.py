"""torch.library operators around the Triton kernels: a decoupled convolution, and one with BatchNorm and activation.

Both are functional: they return what their backward needs, and running means are updated by `track`. Triton is
imported when an operator first runs. Inputs are dense with channels last; `code` is the text of a `Code`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton import twin
from hyperball.kernels.triton.code import Code, read

Parameters = list[Tensor | None]
PARAMETERS = 9  # alpha, beta, rho, shape, bend, factor, stretch, slopes, turns


def memory_format(x: Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return formats.get(x.dim(), torch.contiguous_format)


def dense(x: Tensor) -> Tensor:
    """x with its channels last in memory."""
    return x.contiguous(memory_format=memory_format(x))


def filter_layout(weight: Tensor) -> Tensor:
    """The weight with every filter in one piece of memory, output channels outermost."""
    last = weight.dim() > 2 and weight.is_contiguous(memory_format=memory_format(weight))
    return weight if weight.is_contiguous() or last else weight.contiguous()


def plain(
    x: Tensor, filters: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """torch's convolution or linear map."""
    if x.dim() == 2:
        return torch.nn.functional.linear(x, filters)
    y = torch.ops.aten.convolution(x, filters, None, stride, padding, dilation, False, [0] * len(stride), groups)
    return dense(y)


def empty_filters(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(weight.shape, dtype=dtype, device=weight.device, memory_format=memory_format(weight))


def respond(
    x: Tensor, r: Tensor | None, weight: Tensor, parameters: Parameters, running: Tensor | None, code: Code,
    stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y = conv(x, ŵ), and n, ŵ (over the lift), m, p, (unit, lift): everything that comes before the epilogue."""
    from hyperball.kernels.triton import launch

    g = launch.geometry(x, weight, stride, padding, dilation)
    if r is None:
        r = launch.lengths(x, g.rows, groups)
    half = x.dtype == torch.float16
    n, sums, peaks = launch.box(r, g, groups, code.unit_eps, code.unit == "batch", half)
    filters = empty_filters(weight, x.dtype)
    m, p, scalars = launch.prepare(
        filter_layout(weight), filters, parameters[:5], running, sums, peaks, n.numel(), code
    )
    return plain(x, filters, stride, padding, dilation, groups), n, filters, m, p, scalars


def operands(y: Tensor, n: Tensor, p: Tensor, scalars: Tensor, parameters: Parameters, code: Code, groups: int) -> Any:
    from hyperball.kernels.triton import launch

    factor, stretch, slopes, turns = parameters[5:]
    given = tuple(held is not None for held in parameters[:5])
    return launch.Operands(y, n, p, scalars[1:], factor, stretch, slopes, turns, code, given, groups)


@torch.library.custom_op("hyperball::decoupled_conv", mutates_args=())
def decoupled_conv(
    x: Tensor, weight: Tensor, alpha: Tensor | None, beta: Tensor | None, rho: Tensor | None, shape: Tensor | None,
    bend: Tensor | None, factor: Tensor | None, stretch: Tensor | None, slopes: Tensor | None, turns: Tensor | None,
    running: Tensor | None, code: str, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """f, and y, n, filters, m, p, (unit, lift) for the backward."""
    from hyperball.kernels.triton import launch

    parameters = [alpha, beta, rho, shape, bend, factor, stretch, slopes, turns]
    made = respond(dense(x), None, weight, parameters, running, read(code), stride, padding, dilation, groups)
    y, n, _, _, p, scalars = made
    f, _ = launch.forward(operands(y, n, p, scalars, parameters, read(code), groups))
    return f, *made  # type: ignore[return-value]


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


@torch.library.custom_op("hyperball::decoupled_conv_backward", mutates_args=())
def decoupled_conv_backward(
    v: Tensor, x: Tensor, weight: Tensor, parameters: list[Tensor | None], y: Tensor, n: Tensor, filters: Tensor,
    m: Tensor, p: Tensor, scalars: Tensor, needed: list[bool], code: str, stride: list[int], padding: list[int],
    dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and the parameters' gradients [rows, channels]; `needed` is for x, weight and the nine parameters."""
    from hyperball.kernels.triton import launch

    o = operands(y, n, p, scalars, parameters, read(code), groups)
    x = dense(x)
    dy, dn, parts, places = epilogue_backward(o, launch.Incoming(dense(v)), None, None, needed)
    return convolution_backward(
        o, x, None, weight, filters, m, scalars, parameters, dy, dn, parts, places, needed, stride, padding, dilation
    )[:3]


def epilogue_backward(
    o: Any, i: Any, stats: Tensor | None, inner: Tensor | None, needed: list[bool]
) -> tuple[Any, ...]:
    from hyperball.kernels.triton import launch

    relative = o.code.unit == "batch" and (needed[0] or needed[4])
    places, count = launch.placed(o, [need or (k == 2 and relative) for k, need in enumerate(needed[2:])])
    return (*launch.backward(o, i, stats, inner, places, count), places)


def convolution_backward(
    o: Any, x: Tensor, r: Tensor | None, weight: Tensor, filters: Tensor, m: Tensor, scalars: Tensor,
    parameters: Parameters, dy: Tensor, dn: Tensor, parts: Tensor, places: dict[str, int], needed: list[bool],
    stride: list[int], padding: list[int], dilation: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw, the parameters' gradients, and dr where lengths r were given (else they are in dx)."""
    from hyperball.kernels.triton import launch

    g = launch.geometry(x, weight, stride, padding, dilation)
    code, groups = o.code, o.groups
    grad_filters = None
    if needed[1]:
        grad_filters = plain_backward(dy, x, filters, stride, padding, dilation, groups, False)
    half = x.dtype == torch.float16
    dw, sums, pulls = launch.finish(
        filter_layout(weight), grad_filters, m, o.lift, parts, parameters[2], scalars, code, half, places["rho"]
    )
    dx, dr = dn.new_empty(0), dn.new_empty(0)
    if needed[0]:
        along = launch.box_transposed(dn, o.n, r, pulls if code.unit == "batch" else None, g, groups, code.unit_eps)
        dx = plain_backward(dy, x, filters, stride, padding, dilation, groups, True)
        if r is None:
            launch.add_along(dx, x, along, g.rows, groups)
        else:
            dr = along
    return dx, dn.new_empty(0) if dw is None else dw, sums, dr


def plain_backward(
    dy: Tensor, x: Tensor, filters: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int,
    of_input: bool,
) -> Tensor:  # fmt: skip
    """The gradient of the plain convolution's input, or of its filters."""
    if x.dim() == 2:
        return dy @ filters if of_input else dy.t() @ x
    grads = torch.ops.aten.convolution_backward(
        dy, x, filters, None, stride, padding, dilation, False, [0] * len(stride), groups,
        [of_input, not of_input, False],
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
    relative = code.unit == "batch" and (needed[0] or needed[4])
    wants = [need or (k == 2 and relative) for k, need in enumerate(needed[2:])]
    sizes = [1] * 7 + [0 if held is None else held.numel() for held in parameters[7:]]
    count = sum(size for size, want in zip(sizes, wants, strict=True) if want)
    dx = torch.empty_like(x, memory_format=memory_format(x)) if needed[0] else m.new_empty(0)
    dw = torch.empty_like(filter_layout(weight)) if needed[1] else m.new_empty(0)
    return dx, dw, m.new_empty(max(count, 1), m.shape[0])


def parameter_gradients(
    sums: Tensor, parameters: Sequence[Tensor | None], needed: Sequence[bool], relative: bool
) -> Parameters:
    """The rows of the gradients, each in its parameter's shape and dtype."""
    grads: Parameters = []
    row = 0
    for k, (held, need) in enumerate(zip(parameters, needed, strict=True)):
        size = (held.numel() if held is not None else 0) if k >= 7 else 1
        taken = need or (k == 2 and relative)
        if not need or held is None:
            grads.append(None)
        elif k >= 7:
            grads.append(sums[row : row + size].sum(1).to(held.dtype))
        else:
            grad = sums[row] if held.dim() else sums[row].sum()
            grads.append(grad.to(held.dtype))
        row += size if taken else 0
    return grads


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *rest = inputs
    parameters, running = rest[:9], rest[9]
    ctx.settings = rest[10:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, weight, *parameters, running, *output[1:])


def _backward(ctx: Any, v: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weight, *rest = ctx.saved_tensors
    parameters, running, made = rest[:9], rest[9], rest[10:]
    needed = list(ctx.needs_input_grad[:11])
    code, stride, padding, dilation, groups = ctx.settings
    if v is None:
        return (None,) * 17
    if torch.is_grad_enabled():
        grads = twin.gradients(v, x, weight, parameters, running, needed, *ctx.settings)
    else:
        dx, dw, sums = decoupled_conv_backward(
            v, x, weight, parameters, *made, needed, code, stride, padding, dilation, groups
        )
        relative = read(code).unit == "batch" and (needed[0] or needed[4])
        small = parameter_gradients(sums, parameters, needed[2:], relative)
        grads = (dx if needed[0] else None, dw if needed[1] else None, *small)
    return (*grads, *(None,) * 6)


decoupled_conv.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("hyperball::track", mutates_args=("running", "batches"))
def track(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    """running ← running + w·(unit - running), w = max(1 - 0.999, 1/batches); a non-finite unit changes nothing."""
    from hyperball.kernels.triton import launch

    launch.track((running, batches, unit), None, 0.0, 1.0)


@track.register_fake
def _(running: Tensor, batches: Tensor, unit: Tensor) -> None:
    return None
