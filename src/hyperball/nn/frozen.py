"""Frozen decoupled layers: prepared filters and resolved values as buffers, for inference alone.

`hyperball.freeze` makes them. With an affine map (a, b) per channel, BatchNorm's in evaluation, a layer computes
a·f + b: a multiplies the factor of f = factor·n·s(u)·g(c), or the filter itself with cosine, where f = y·s(u). On a GPU
what the kernels are given is made once, at the first call, and kept until a buffer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional.decoupled import batched, check_features
from hyperball.functional.windows import convolution_window, transposed_window
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import inference
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.decoupled.operation import POINT, Filters, Operator
from hyperball.kernels.dispatch import Choice
from hyperball.kernels.norms import cast, norm_dtype, wide_dtype
from hyperball.kernels.window import Window
from hyperball.nn.decoupled import (
    Decoupled,
    DecoupledConvNd,
    DecoupledConvTransposeNd,
    DecoupledLinear,
    NormalizedLinear,
)
from hyperball.nn.tracing import as_one_call
from hyperball.rows import AnyValue, Value, flatten, rebuild

Affine = tuple[Tensor, Tensor]


class Frozen(nn.Module):
    """A decoupled layer without parameters: prepared filters and resolved values as buffers."""

    filter: Tensor
    bias: Tensor | None
    factor: Tensor | None
    stretch: Tensor | None
    longest: Tensor

    def __init__(self, layer: Any, affine: Affine | None = None, folded: str | None = None) -> None:
        super().__init__()
        self.description, self.folded = repr(layer), folded
        operator = operator_of(layer)
        magnitude, filters = prepared(layer, operator, affine)
        self.needs_norm = operator.needs_norm
        self.register_buffer("filter", like(self._to_layer_layout(filters.weight, layer), layer.weight))
        self.register_buffer("bias", folded_bias(layer.bias, affine, layer.weight))
        self.register_buffer("factor", own(filters.factor))
        self.register_buffer("stretch", own(filters.stretch))
        self.register_buffer("longest", filters.length.amax())
        self._magnitude = self._keep("magnitude", magnitude)
        self._angular = self._keep("angular", operator.angular)

    def _to_layer_layout(self, filters: Tensor, layer: Any) -> Tensor:
        """From output channels first to the layout of the layer's weight."""
        return filters

    def _keep(self, prefix: str, value: AnyValue) -> tuple[AnyValue, tuple[str, ...]]:
        """Tensors as buffers; the value without them, and their names."""
        shell, tensors = flatten(value)
        names = tuple(tensor_names(prefix, value))
        for name, tensor in zip(names, tensors, strict=True):
            self.register_buffer(name, own(tensor))
        return shell, names

    def _value(self, kept: tuple[AnyValue, tuple[str, ...]]) -> AnyValue:
        return rebuild(kept[0], [getattr(self, name) for name in kept[1]])

    def _operator(self) -> Operator:
        magnitude, angular = self._value(self._magnitude), self._value(self._angular)
        assert isinstance(angular, Value)
        return Operator(lambda _: magnitude, angular, "none", self.needs_norm)

    def _filters(self, _: AnyValue) -> Filters:
        return Filters(self.filter, self.longest, self.factor, self.stretch)

    def _shifted(self, f: Tensor) -> Tensor:
        """f + bias for a response [batch, channels, *spatial]."""
        return shifted(f, None if self.bias is None else self.bias.reshape(-1, *(1,) * (f.dim() - 2)))

    def _batched(self, input: Tensor, dims: int) -> Tensor:
        """The input with a batch dimension; a folded BatchNorm would have refused one without."""
        if self.folded is not None and input.dim() != dims + 2:
            raise ValueError(
                f"`input` must have {dims + 2} dimensions for the BatchNorm {self.folded!r} that is folded into this "
                f"layer, got shape {tuple(input.shape)}"
            )
        return batched(input, dims)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Frozen:
        """Move or cast; what multiplies or is added in float32 stays in float32 when the filter becomes narrower."""
        before = dict(self._buffers)
        self.__dict__.pop("_kept", None)
        super()._apply(fn, recurse)
        for name, held in self._buffers.items():
            kept = before[name]
            if name != "filter" and held is not None and kept is not None and held.element_size() < 4:
                self._buffers[name] = kept.to(held.device)
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        self.__dict__.pop("_kept", None)
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict[str, Any]:
        """The state without what is kept for the GPU, which another process or a copy makes again."""
        return {name: held for name, held in self.__dict__.items() if name != "_kept"}

    def choice(self, x: Tensor) -> Choice:
        """The kernel that runs this layer on such an input, and why."""
        if not self.needs_norm:
            return Choice("eager", "a linear magnitude with cosine needs no patch norm")
        operator, transposed = self._operator(), isinstance(self, FrozenConvTranspose)
        outputs, groups = self.filter.shape[1 if transposed else 0], getattr(self, "groups", 1)
        facts = dispatch.facts_of(x, self.filter, outputs * groups if transposed else outputs, groups, transposed)
        return dispatch.choose(operator.magnitude(None), operator.angular, "none", facts)

    def explained(self) -> str:
        """The kernel for an input on the device and in the dtype of the filter, and why."""
        choice = self.choice(self.filter)
        if choice.kernel == "triton":
            return f"frozen, {choice}: norms, convolution, and scale, bias and activation in one pass"
        return f"frozen, {choice}"

    def prepared(self, x: Tensor) -> Any:
        """What Triton's kernels are given for inputs like x, or None where other kernels run."""
        kept = self.__dict__.setdefault("_kept", {})
        found, now = kept.get(x.dtype), stamp(self._buffers.values())
        if found is not None and found[0] == now:
            return found[1]
        made = self._prepare(x.dtype) if self.choice(x).kernel == "triton" else None
        if not is_capturing(x):
            kept[x.dtype] = now, made, [*self._buffers.values()]
        return made

    def _prepare(self, dtype: torch.dtype) -> Any:
        from hyperball.kernels.triton.frozen import launch as frozen_launch

        operator, filters = self._operator(), self.filter
        magnitude = operator.magnitude(None)
        assert isinstance(magnitude, Value)
        filters = filters.unsqueeze(2) if filters.dim() == 3 else filters
        with torch.inference_mode(False), torch.no_grad():
            return frozen_launch.prepare(
                filters, magnitude, operator.angular, self.factor, self.stretch, self.bias, self.longest, dtype
            )

    def extra_repr(self) -> str:
        return self.description + (f", folded={self.folded!r}" if self.folded else "")


class FrozenLinear(Frozen):
    """A frozen DecoupledLinear or NormalizedLinear."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        check_features(input, self.filter.shape[1])
        if self.folded is not None:
            self._batched(input, 0)
        if inference.on_gpu(input):
            rows = kernel.as_convolved(input).reshape(-1, input.shape[-1])
            held = self.prepared(rows)
            if held is not None:
                out, _ = run_prepared(held, rows, lambda: POINT)
                return out.reshape(*input.shape[:-1], out.shape[-1])
        return shifted(kernel.linear_with(input, None, self._operator(), self._filters), self.bias)


class FrozenConv(Frozen):
    """A frozen DecoupledConv1d, 2d or 3d."""

    def __init__(self, layer: DecoupledConvNd, affine: Affine | None = None, folded: str | None = None) -> None:
        super().__init__(layer, affine, folded)
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.groups, self.padding_mode = layer.groups, layer.padding_mode
        self.pad_widths = list(layer._reversed_padding_repeated_twice)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        x = self._batched(input, self.filter.dim() - 2)
        return self._convolve(*self._padded(x), input.dim())

    def _padded(self, x: Tensor) -> tuple[Tensor, Window]:
        """x with every padding but zeros, and the window over it."""
        dims, padding = self.filter.dim() - 2, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self.pad_widths, mode=self.padding_mode), (0,) * dims
        return x, convolution_window(dims, x.shape, self.filter, self.stride, padding, self.dilation, self.groups)

    def _convolve(self, x: Tensor, window: Window, dims: int) -> Tensor:
        if inference.on_gpu(x):
            given, even = kernel.with_even_padding(kernel.as_convolved(x), window)
            held = self.prepared(given)
            if held is not None:
                out, _ = run_prepared(held, given, lambda: even)
                return out if dims == x.dim() else out.squeeze(0)
        operator = self._operator()
        if self.factor is None and self.stretch is None and inference.applies(x, operator, self.groups):
            out = inference.convolve(x, self.filter, self.bias, window, operator)
        else:
            out = self._shifted(kernel.convolve_with(x, None, window, operator, self._filters))
        return out if dims == x.dim() else out.squeeze(0)


class FrozenConvTranspose(Frozen):
    """A frozen DecoupledConvTranspose1d, 2d or 3d."""

    def __init__(self, layer: Any, affine: Affine | None = None, folded: str | None = None) -> None:
        super().__init__(layer, affine, folded)
        self.stride, self.padding, self.dilation = layer.stride, layer.padding, layer.dilation
        self.groups, self.kernel_size, self.output_padding = layer.groups, layer.kernel_size, layer.output_padding

    def _to_layer_layout(self, filters: Tensor, layer: Any) -> Tensor:
        return kernel.swap_channels(filters, layer.groups)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input, output_size)
        dims = self.filter.dim() - 2
        settle: Any = nn.ConvTranspose2d._output_padding
        extra = settle(self, input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        x = self._batched(input, dims)
        window = transposed_window(
            dims, x.shape, self.filter, self.stride, self.padding, extra, self.groups, self.dilation
        )
        out = self._shifted(kernel.convolve_with(x, None, window, self._operator(), self._filters))
        return out if input.dim() == x.dim() else out.squeeze(0)


def run_prepared(
    held: Any, x: Tensor, window_for: Callable[[], Window], lengths: Tensor | None = None, after: Any = (),
    leak: Tensor | None = None, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """A prepared layer on x, evenly padded, and what follows it; `window_for` is asked once for every shape of x."""
    from hyperball.kernels.triton.frozen import launch as frozen_launch

    along = x.dim() == 3
    x = x.unsqueeze(2) if along else x
    plan = held.plans.get((x.shape, after))
    if plan is None:
        window = window_for()
        window = flattened(window) if along else window
        plan = held.plans[x.shape, after] = frozen_launch.planned(held, x.shape, window, after)
    out, r = frozen_launch.run(x, held, plan, lengths, leak, residual)
    return out.squeeze(2) if along else out, r


def flattened(window: Window) -> Window:
    """The window of a 1-d convolution that runs as a 2-d one of height 1."""
    fill = replace(window, kernel=(1, *window.kernel), stride=(1, *window.stride), dilation=(1, *window.dilation))
    return replace(fill, padding=((0, 0), *window.padding))


def is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, whose tensors have no values before it is replayed."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def stamp(tensors: Iterable[Tensor | None]) -> list[tuple[int, int]]:
    """What changes where a tensor is replaced or, outside of inference mode, written to."""
    return [(id(t), 0 if t.is_inference() else t._version) for t in tensors if t is not None]


# By forward method, so that a subclass with a forward of its own is not taken for one of these.
FROZEN: dict[Any, type[Frozen]] = {
    DecoupledLinear.forward: FrozenLinear,
    NormalizedLinear.forward: FrozenLinear,
    DecoupledConvNd.forward: FrozenConv,
    DecoupledConvTransposeNd.forward: FrozenConvTranspose,
}


def operator_of(layer: Any) -> Operator:
    """The operator of a layer; a NormalizedLinear is linear with cosine."""
    if isinstance(layer, Decoupled):
        return layer.operator
    linear = radial_table.TABLE["linear"]()
    return Operator(lambda _: linear, angular_table.parse("cosine"), "none", False)


def prepared(layer: Any, operator: Operator, affine: Affine | None) -> tuple[AnyValue, Filters]:
    """The magnitude and the filters, output channels first, with every constant gain per channel absorbed."""
    weight = layer.filters() if isinstance(layer, Decoupled) else layer.weight
    magnitude = operator.magnitude(None)
    # A plain layer's filter is rounded once, with its gain.
    filters = kernel.prepare(weight if operator.needs_norm else cast(weight, norm_dtype(weight)), operator, magnitude)
    gain = None if affine is None else affine[0]
    # A half-precision filter stays of unit length: tiny gains would round it to zero.
    into_filter = angular_table.is_cosine(operator.angular) and weight.element_size() >= 4
    if not operator.needs_norm:
        constant = radial_table.gain(magnitude, torch.ones_like(filters.length, dtype=wide_dtype(weight)))
        gain, into_filter = constant if gain is None else constant * gain, True
        magnitude = radial_table.TABLE["linear"]()
    return magnitude, filters if gain is None else absorb(filters, gain, into_filter)


def absorb(filters: Filters, gain: Tensor, into_filter: bool) -> Filters:
    """The filters whose response is `gain` times as large, channel by channel."""
    dtype = filters.length.dtype
    if not into_filter:
        return replace(filters, factor=(gain if filters.factor is None else filters.factor * gain).to(dtype))
    columns = gain.reshape(-1, *(1,) * (filters.weight.dim() - 1))
    weight = (filters.weight.to(gain.dtype) * columns).to(filters.weight.dtype)
    return replace(filters, weight=weight, length=(filters.length * gain.abs()).to(dtype))


def folded_bias(bias: Tensor | None, affine: Affine | None, weight: Tensor) -> Tensor | None:
    """a·bias + b."""
    if affine is None:
        return own(bias)
    scale, shift = affine
    return (shift if bias is None else bias.to(scale.dtype) * scale + shift).to(norm_dtype(weight))


def shifted(f: Tensor, bias: Tensor | None) -> Tensor:
    """f + bias in the wider dtype of the two: a bias in half precision would be off by as much in every position."""
    return f if bias is None else cast(f + bias, f.dtype)


def own(tensor: Tensor | None) -> Tensor | None:
    """A copy that shares its memory with nothing, so that every format can store it."""
    return None if tensor is None else tensor.detach().clone()


def like(tensor: Tensor, weight: Tensor) -> Tensor:
    """A copy with the memory layout of the weight."""
    return torch.empty_like(weight, requires_grad=False).copy_(tensor)


def tensor_names(prefix: str, value: AnyValue) -> Iterator[str]:
    """A name for every tensor of a value, in the order of `flatten`."""
    for index, term in enumerate(value.terms):
        which = f"_{index}" if len(value.terms) > 1 else ""
        for key, held in term.parameters.items():
            if isinstance(held, Tensor):
                yield f"{prefix}_{key}{which}"
            elif isinstance(held, tuple):
                yield from (f"{prefix}_{key}{which}_{j}" for j, item in enumerate(held) if isinstance(item, Tensor))
