"""Decoupled convolution and linear map: norms, a plain convolution with prepared filters, and the epilogue."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import epilogue, native
from hyperball.kernels.decoupled.filters import Shape, as_they_are
from hyperball.kernels.norms import cast, norm, patch_norm, unit_filters
from hyperball.kernels.window import Window
from hyperball.rows import AnyValue, Value, map_scalars

CONVOLUTIONS: dict[tuple[int, bool], Any] = {
    (1, False): F.conv1d, (2, False): F.conv2d, (3, False): F.conv3d,
    (1, True): F.conv_transpose1d, (2, True): F.conv_transpose2d, (3, True): F.conv_transpose3d,
}  # fmt: skip


COSINE = angular_table.parse("cosine")
POINT = Window((), (), (), ())  # of rows without positions
ROWS = Shape()
BEYOND_HALF = 1e30  # longer than any finite float16 vector


@dataclass(frozen=True, eq=False)
class Operator:
    """Which decoupled operator: `magnitude` is given the patch norms, since a radius may be relative to them.

    `plain` says that a module's magnitude has no tensor but the ratio of a relative radius, and the angular value none;
    `watched` that calling the magnitude runs hooks, so that no kernel may resolve a relative radius by itself.
    """

    magnitude: Callable[[Tensor | None], AnyValue]
    angular: Value
    weighting: str
    needs_norm: bool
    plain: bool = False
    watched: bool = False


@dataclass(frozen=True, eq=False)
class Filters:
    """What the plain convolution runs on, the lengths of those filters, and what the epilogue needs beside them.

    `over` multiplies the convolution's output: 1/m where the filters are not divided by their lengths m.
    """

    weight: Tensor
    length: Tensor
    factor: Tensor | None = None
    stretch: Tensor | None = None
    over: Tensor | None = None


def prepare(weight: Tensor, operator: Operator, magnitude: AnyValue) -> Filters:
    """Filters for the weighting, output channels first; per-channel numbers are 1-d.

    With cosine the factor is folded into the filter: none ŵ, linear w, joint w with u = n·m, split ŵ·h(m)/alpha.
    """
    cosine = angular_table.is_cosine(operator.angular)
    dims = tuple(range(1, weight.dim()))
    if operator.weighting in ("linear", "joint") and cosine:
        m = norm(weight, dims).flatten()
        return Filters(weight, m, stretch=m if operator.weighting == "joint" else None)
    unit, length = unit_filters(weight, dims)
    m = length.flatten()
    if operator.weighting == "none":
        return Filters(unit.to(weight.dtype), torch.ones_like(m))
    factor = split_factor(m, magnitude) if operator.weighting == "split" else m
    if cosine:
        return Filters((unit * factor.reshape(length.shape)).to(weight.dtype), factor)
    return Filters(unit.to(weight.dtype), torch.ones_like(m), factor, m if operator.weighting == "joint" else None)


def split_factor(m: Tensor, magnitude: AnyValue) -> Tensor:
    """h(m)/alpha."""
    whole = epilogue.evaluate if torch.compiler.is_compiling() else epilogue.apply
    return whole(epilogue.Terms(m, m, None, None, None, _cast(radial_table.unit_alpha(magnitude), m), COSINE))


def undivided(
    x: Tensor, weight: Tensor, n: Tensor | None, operator: Operator, magnitude: AnyValue, shape: Shape
) -> Filters | None:
    """`prepare` for the compiled path, with the filters as they are and 1/m left to the epilogue; None elsewhere."""
    if n is None or native.refusal(magnitude, operator.angular):
        return None
    made = as_they_are(x, weight, n, shape)
    if made is None:
        return None
    weight, m, over = made
    cosine, weighting = angular_table.is_cosine(operator.angular), operator.weighting
    by_length = weighting in ("linear", "joint")
    return Filters(
        weight, m,
        split_factor(m, magnitude) if weighting == "split" else m if by_length and not cosine else None,
        m if weighting == "joint" else None,
        None if by_length and cosine else over,
    )  # fmt: skip


def run(
    x: Tensor, bias: Tensor | None, operator: Operator, norms: Callable[[], tuple[Tensor, Tensor]],
    filters_for: Callable[[AnyValue], Filters], plain: Callable[[Tensor, Tensor], Tensor], shape: Shape,
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The decoupled layer around a plain one: plain(x, filters) is torch's convolution or linear map of x.

    norms() gives the lengths, and x as the plain layer shall see it. A weight that is given may stay undivided.

    Norms and the epilogue run outside autocast, in float32 at least; the plain layer runs as torch would run it.
    """
    with full_precision(x):
        n, x = norms() if operator.needs_norm else (None, x)
        magnitude = operator.magnitude(n)
        raw = None if weight is None else undivided(x, weight, n, operator, magnitude, shape)
        filters = filters_for(magnitude) if raw is None else raw
        lift = overflow_guard(n, filters) if x.dtype == torch.float16 else None
    held = filters.weight
    y = plain(x, held if lift is None else (held / lift).to(held.dtype))
    with full_precision(x):
        return _finish(y, n, filters, lift, magnitude, operator, bias, shape.groups)


def convolve_with(
    x: Tensor, bias: Tensor | None, window: Window, operator: Operator, filters_for: Callable[[AnyValue], Filters],
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The decoupled convolution of x [batch, channels, *spatial] with filters that are made for a magnitude."""
    x, window = with_even_padding(as_convolved(x), window)

    def plain(seen: Tensor, filters: Tensor) -> Tensor:
        return plain_convolution(seen, filters, window)

    shape = Shape(window.groups, window.transposed)
    return run(x, bias, operator, lambda: lengths(x, window), filters_for, plain, shape, weight)


def lengths(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """The norms of the patches of x, and x as the plain layer shall see it."""
    return native.patch_norms(x, window) if native.serves(x) else (patch_norm(x, window), x)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, operator: Operator) -> Tensor:
    """The decoupled convolution of x [batch, channels, *spatial]."""
    if runs_on_triton(x, weight, operator, window.groups, window.transposed):
        from hyperball.kernels.triton.decoupled import layer

        x, window = with_even_padding(as_convolved(x), window)
        out = layer.convolve(x, weight, window, resolved(x, window, operator))
        return add_bias(out, None if bias is None else bias.reshape(-1, *(1,) * window.dims))

    def filters_for(magnitude: AnyValue) -> Filters:
        if not window.transposed:
            return prepare(weight, operator, magnitude)
        filters = prepare(swap_channels(weight, window.groups), operator, magnitude)
        return replace(filters, weight=swap_channels(filters.weight, window.groups))

    return convolve_with(x, bias, window, operator, filters_for, weight)


def resolved(x: Tensor, window: Window, operator: Operator) -> Operator:
    """The operator, its magnitude called on the norms of the patches of x where hooks watch that."""
    if not operator.watched:
        return operator
    with full_precision(x):
        value = operator.magnitude(patch_norm(x, window))
    return replace(operator, magnitude=lambda _: value, plain=False, watched=False)


def linear_with(
    x: Tensor, bias: Tensor | None, operator: Operator, filters_for: Callable[[AnyValue], Filters],
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The decoupled linear map of x [..., features] with filters that are made for a magnitude."""
    rows = as_convolved(x).reshape(-1, x.shape[-1])
    out = run(rows, bias, operator, lambda: lengths(rows, POINT), filters_for, F.linear, ROWS, weight)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, operator: Operator) -> Tensor:
    """The decoupled linear map of x [..., features]."""
    if runs_on_triton(x, weight, operator):
        from hyperball.kernels.triton.decoupled import layer

        rows = as_convolved(x).reshape(-1, x.shape[-1])
        out = layer.linear(rows, weight, resolved(rows, POINT, operator))
        return add_bias(out.reshape(*x.shape[:-1], out.shape[-1]), bias)
    return linear_with(x, bias, operator, lambda magnitude: prepare(weight, operator, magnitude), weight)


def chosen(x: Tensor, weight: Tensor, operator: Operator, groups: int = 1, transposed: bool = False) -> dispatch.Choice:
    """The kernel that runs an operator that needs norms on these tensors, and why."""
    own = getattr(operator.magnitude, "objection", "")
    if own:
        return dispatch.Choice("eager", own)
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    facts = dispatch.facts_of(x, weight, outputs, groups, transposed)
    magnitude = getattr(operator.magnitude, "value", None) or operator.magnitude(None)
    return dispatch.choose_again(magnitude, operator.angular, operator.weighting, facts)


def runs_on_triton(x: Tensor, weight: Tensor, operator: Operator, groups: int = 1, transposed: bool = False) -> bool:
    on_gpu = operator.needs_norm and x.device.type in dispatch.DEVICES
    return on_gpu and chosen(x, weight, operator, groups, transposed).kernel == "triton"


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """A transposed convolution's weight with output channels first, [out, in/groups, …]; or back."""
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)


def plain_convolution(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """torch's convolution over the window, whose padding is the same before and after."""
    convolution = CONVOLUTIONS[window.dims, window.transposed]
    if window.transposed:
        padding = tuple(before for before, _ in window.padding)
        return convolution(
            x, weight, None, window.stride, padding, window.output_padding, window.groups, window.dilation
        )
    padding = tuple(before for before, _ in window.padding)
    return convolution(x, weight, None, window.stride, padding, window.dilation, window.groups)


def _finish(
    y: Tensor, n: Tensor | None, filters: Filters, lift: Tensor | None, magnitude: AnyValue, operator: Operator,
    bias: Tensor | None, groups: int,
) -> Tensor:  # fmt: skip
    """Epilogue and bias on a convolution's output, seen with its channels last where its memory is laid out so."""
    spatial = y.dim() - 2
    if bias is not None:
        bias = bias.reshape(-1, *(1,) * spatial)
    if n is None:
        return add_bias(_constant_gain(y, magnitude, spatial), bias)
    given = (y, n, filters.factor, filters.stretch)
    out = None
    if lift is None:
        out = native.finish(*given, magnitude, operator.angular, groups, eager_epilogue, filters.over)
    if out is None:
        y = native.divided(y, filters.over)
        out = eager_epilogue(y, *given[1:], magnitude, operator.angular, groups, lift)
    return add_bias(out, bias)


def eager_epilogue(
    y: Tensor, n: Tensor, factor: Tensor | None, stretch: Tensor | None, magnitude: AnyValue, angular: Value,
    groups: int, lift: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The epilogue in torch's operators on y [batch, channels, …] and n [batch, groups, …]."""
    spatial = y.dim() - 2
    channels_last = spatial > 0 and y.stride(1) == 1 and y.shape[1] > 1
    channel_dims = 1 if groups == 1 else 2

    def seen(t: Tensor) -> Tensor:
        return t.movedim(tuple(range(1, channel_dims + 1)), tuple(range(-channel_dims, 0))) if channels_last else t

    def per_channel(p: Any) -> Any:
        if not isinstance(p, Tensor):
            return p
        p = p.to(n.dtype)
        if p.dim() == 0:
            return p
        p = p if groups == 1 else p.unflatten(0, (groups, -1))
        return p if channels_last else p.reshape(*p.shape, *(1,) * spatial)

    held = map_scalars(magnitude, per_channel), map_scalars(angular, per_channel)
    assert isinstance(held[1], Value)
    grouped = y if groups == 1 else y.unflatten(1, (groups, -1))
    norms = n if groups == 1 else n.unsqueeze(2)
    out = epilogue.apply(
        epilogue.Terms(seen(grouped), seen(norms), per_channel(factor), per_channel(stretch), lift, held[0], held[1])
    )
    if channels_last:
        out = out.movedim(tuple(range(-channel_dims, 0)), tuple(range(1, channel_dims + 1)))
    return out if groups == 1 else out.flatten(1, 2)


def _cast(value: AnyValue, like: Tensor) -> AnyValue:
    return map_scalars(value, lambda item: item.to(like.dtype) if isinstance(item, Tensor) else item)


def _constant_gain(y: Tensor, magnitude: AnyValue, spatial: int = 0) -> Tensor:
    """y·alpha: a linear magnitude with cosine needs no norm."""
    total: Any = sum((term.parameters["alpha"] for term in magnitude.terms), start=0.0)
    if isinstance(total, Tensor):
        shaped = total.reshape(-1, *(1,) * spatial) if total.dim() else total
        return (y * shaped).to(y.dtype)
    return y if total == 1.0 else y * total


def add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias.to(out.dtype)


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def as_convolved(x: Tensor) -> Tensor:
    """x in the dtype in which autocast will convolve it: the norm is of what the convolution sees."""
    if not autocasts(x) or x.dtype == torch.float64:
        return x
    return cast(x, torch.get_autocast_dtype(x.device.type))


def with_even_padding(x: Tensor, window: Window) -> tuple[Tensor, Window]:
    """x padded by hand where the window's padding differs before and after, and the window without that padding."""
    if window.transposed or all(before == after for before, after in window.padding):
        return x, window
    x = F.pad(x, [width for pair in reversed(window.padding) for width in pair])
    return x, replace(window, padding=((0, 0),) * window.dims)


def overflow_guard(n: Tensor | None, filters: Filters) -> Tensor | None:
    """A power of two that keeps |y| <= n·m within float16; 1 as a rule. Patches that hold inf or nan have no say."""
    if n is None or n.numel() == 0:
        return None
    finite = torch.where(n.detach() < BEYOND_HALF, n.detach(), 0.0)
    bound = finite.amax() * filters.length.detach().amax().clamp(min=1.0)
    return torch.exp2(bound.clamp(min=1.0).log2().ceil().sub(15.0).clamp(min=0.0))


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Autocast switched off, so that norms and the epilogue stay in float32."""
    if autocasts(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
