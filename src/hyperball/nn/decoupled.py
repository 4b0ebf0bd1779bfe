"""Decoupled layers: torch's layers with a magnitude, an angular function and a weighting."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional.decoupled import (
    Angular,
    Magnitude,
    batched,
    check_eps,
    check_features,
    check_weighting,
    needs_norm,
    run_convolution,
)
from hyperball.functional.windows import convolution_window, transposed_window
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.decoupled.operation import Operator
from hyperball.kernels.norms import unit_filters
from hyperball.kernels.window import Window
from hyperball.nn.learned import LearnedValue
from hyperball.nn.tracing import as_one_call
from hyperball.rows import Value

# Those of profilers and counters, which torch adds to and never replaces.
GLOBAL_HOOKS: tuple[Any, ...] = tuple(
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
RATIO = (0, "rho")  # the key of a magnitude's radius


def is_altered(module: nn.Module) -> bool:
    """Whether hooks, its own or those of all modules, or a replaced forward may see or change what goes in and out."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or "forward" in vars(module) or any(GLOBAL_HOOKS))


def is_constant(learned: LearnedValue) -> bool:
    """Whether calling a value gives the numbers that it was made with."""
    return not learned._stored and type(learned) is LearnedValue and not is_altered(learned)


def has_slopes(value: Value) -> bool:
    """Whether a value has numbers that kernels read from memory."""
    return "slopes" in value.parameters


def has_ratio_alone(learned: LearnedValue) -> bool:
    """Whether all that a magnitude of one term holds is the tensor of a relative radius, and nobody watches it."""
    stored, value = learned._stored, learned.value
    if len(stored) != 1 or RATIO not in stored or type(learned) is not LearnedValue or not isinstance(value, Value):
        return False
    return not has_slopes(value) and bool(value.options.get("relative", True)) and not is_altered(learned)


def has_numbers_alone(learned: LearnedValue) -> bool:
    """Whether a value of one term holds no tensor."""
    return is_constant(learned) and isinstance(learned.value, Value) and not has_slopes(learned.value)


@functools.lru_cache(maxsize=1024)
def kept_window(dims: int, shape: torch.Size, weight: torch.Size, *settings: Any) -> Window:
    """The checked window of a convolution of an input of this shape."""
    return convolution_window(dims, shape, torch.empty(weight, device="meta"), *settings)


@functools.lru_cache(maxsize=1)
def direct_way() -> Any:
    """`hyperball.kernels.triton.decoupled.direct`, which imports Triton: asked for on a GPU alone."""
    from hyperball.kernels.triton.decoupled import direct

    return direct


class Decoupled(nn.Module):
    """What all decoupled layers share: the operator and its parameters.

    A magnitude's text may say `learn`, `per="channel" | "layer"`, `relative=True | False` beside its parameters;
    a radius is by default learned, per channel and relative to the mean patch norm.
    """

    weight: Tensor
    bias: Any
    magnitude: LearnedValue
    angular: LearnedValue

    def _set_operator(
        self, magnitude: Magnitude, angular: Angular, weighting: str, eps: float, channels: int, device: Any, dtype: Any
    ) -> None:
        check_eps(eps)
        h, g = radial_table.parse(magnitude), angular_table.parse(angular)
        check_weighting(weighting, h)
        patch_size = self.weight.numel() // max(channels, 1)
        self.weighting = weighting
        self.eps = eps
        settings = (channels, patch_size, eps, device, dtype, type(self).__name__)
        self.magnitude, self.angular = LearnedValue(h, *settings), LearnedValue(g, *settings)
        self._needs_norm = needs_norm(h, g, weighting)

    def reset_parameters(self) -> None:
        """Initialize weight and bias as torch does, and the operator's parameters as the texts say."""
        super().reset_parameters()  # type: ignore[misc]
        for learned in (getattr(self, "magnitude", None), getattr(self, "angular", None)):
            if learned is not None:
                learned.reset_parameters()

    @property
    def operator(self) -> Operator:
        """The operator with its present parameters."""
        magnitude, turned = self.magnitude, self.angular
        angular = turned.value if is_constant(turned) else turned()
        assert isinstance(angular, Value)
        plain = angular is turned.value and not has_slopes(angular) and has_ratio_alone(magnitude)
        return Operator(magnitude, angular, self.weighting, self._needs_norm, plain, is_altered(magnitude))

    @property
    def radius(self) -> Tensor | None:
        """The radius that evaluation uses, one value or one per channel; None where the magnitude has none."""
        return self.magnitude.current("rho")

    def filters(self) -> Tensor:
        """The raw weight with output channels first, [out, in/groups, *kernel]."""
        return self.weight

    def _operator_repr(self) -> str:
        text = f"magnitude={str(self.magnitude.value)!r}, angular={str(self.angular.value)!r}"
        return f"{text}, weighting={self.weighting!r}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()}, {self._operator_repr()})"


class DecoupledLinear(Decoupled, nn.Linear):
    """f_o = h(‖x‖)·g(cos(x, w_o)), with nn.Linear's arguments (bias=False by default).

    >>> import torch, hyperball as hb
    >>> hb.nn.DecoupledLinear(8, 4, magnitude="ball")(torch.randn(2, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None, dtype: Any = None, *,
        magnitude: Magnitude = "tanh", angular: Angular = "cosine", weighting: str = "none", eps: float = 1e-4,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_operator(magnitude, angular, weighting, eps, out_features, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        check_features(input, self.in_features)
        return kernel.linear(input, self.weight, self.bias, self.operator)


class DecoupledConvNd(Decoupled):
    """Decoupled convolutions of any dimension, over nn.ConvNd, whose arguments come first (bias=False by default)."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any
    _reversed_padding_repeated_twice: list[int]

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = False, padding_mode: str = "zeros", device: Any = None,
        dtype: Any = None, *, magnitude: Magnitude = "tanh", angular: Angular = "cosine", weighting: str = "none",
        eps: float = 1e-4,
    ) -> None:  # fmt: skip
        arguments: Any = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(*arguments, device=device, dtype=dtype)
        self._set_operator(magnitude, angular, weighting, eps, out_channels, device, dtype)

    def padded(self, input: Tensor) -> tuple[Tensor, Window]:
        """The input, batched and padded by a padding mode other than zeros, and the window over it."""
        weight = self.weight
        dims = weight.dim() - 2
        x, padding = batched(input, dims), self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0,) * dims
        settings = (self.stride, padding, self.dilation, self.groups)
        watched = torch.compiler.is_compiling() or dispatch.is_exporting()
        if type(x) is Tensor and not watched and type(self.stride) is type(self.dilation) is tuple:
            return x, kept_window(dims, x.shape, weight.shape, *settings)
        return x, convolution_window(dims, x.shape, weight, *settings)

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and type(input) is Tensor and input.device.type in dispatch.DEVICES:
            made = self._direct(input)
            if made is not None:
                return made
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        x, window = self.padded(input)
        out = kernel.convolve(x, self.weight, self.bias, window, self.operator)
        return out if input.dim() == x.dim() else out.squeeze(0)

    def _direct(self, input: Tensor) -> Tensor | None:
        """The output by the module's plan alone, where the module is of the common kind and nobody watches."""
        if not (dispatch.HAS_TRITON and self._needs_norm and self.weighting == "none" and self.padding_mode == "zeros"):
            return None
        parts: Any = self._modules
        magnitude = parts["magnitude"]
        if not (has_ratio_alone(magnitude) or has_numbers_alone(magnitude)) or not has_numbers_alone(parts["angular"]):
            return None
        made, bias = direct_way().convolve(self, input, kept_window), self.bias
        if made is None or bias is None:
            return made
        return kernel.add_bias(made, bias.reshape(-1, *(1,) * (made.dim() - 2)))


class DecoupledConv1d(DecoupledConvNd, nn.Conv1d):
    """A decoupled convolution with nn.Conv1d's arguments, then magnitude, angular function and weighting."""


class DecoupledConv2d(DecoupledConvNd, nn.Conv2d):
    """A decoupled convolution with nn.Conv2d's arguments, then magnitude, angular function and weighting.

    >>> import torch, hyperball as hb
    >>> layer = hb.nn.DecoupledConv2d(3, 16, 3, padding=1, magnitude="tanh", angular="square_cosine")
    >>> layer(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 16, 8, 8])
    """


class DecoupledConv3d(DecoupledConvNd, nn.Conv3d):
    """A decoupled convolution with nn.Conv3d's arguments, then magnitude, angular function and weighting."""


class DecoupledConvTransposeNd(Decoupled):
    """Decoupled transposed convolutions of any dimension, over nn.ConvTransposeNd, whose arguments come first.

    n is the norm of the inputs that contribute to an output position, m that of the whole filter, all taps.
    """

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = False, dilation: Any = 1, padding_mode: str = "zeros",
        device: Any = None, dtype: Any = None, *, magnitude: Magnitude = "tanh", angular: Angular = "cosine",
        weighting: str = "none", eps: float = 1e-4,
    ) -> None:  # fmt: skip
        geometry: Any = (in_channels, out_channels, kernel_size, stride, padding, output_padding, groups)
        super().__init__(*geometry, bias, dilation, padding_mode, device=device, dtype=dtype)
        self._set_operator(magnitude, angular, weighting, eps, out_channels, device, dtype)

    def filters(self) -> Tensor:
        return kernel.swap_channels(self.weight, self.groups)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input, output_size)
        dims = self.weight.dim() - 2
        settle: Any = self._output_padding
        extra = settle(input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation)
        shape = batched(input, dims).shape
        window = transposed_window(
            dims, shape, self.weight, self.stride, self.padding, extra, self.groups, self.dilation
        )
        return run_convolution(dims, input, self.weight, self.bias, window, self.operator)


class DecoupledConvTranspose1d(DecoupledConvTransposeNd, nn.ConvTranspose1d):
    """A decoupled transposed convolution with nn.ConvTranspose1d's arguments."""


class DecoupledConvTranspose2d(DecoupledConvTransposeNd, nn.ConvTranspose2d):
    """A decoupled transposed convolution with nn.ConvTranspose2d's arguments."""


class DecoupledConvTranspose3d(DecoupledConvTransposeNd, nn.ConvTranspose3d):
    """A decoupled transposed convolution with nn.ConvTranspose3d's arguments."""


class NormalizedLinear(nn.Linear):
    """The weight-normalized softmax layer: logits ŵᵀx, without bias or scale."""

    def __init__(self, in_features: int, out_features: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_one_call(self, input)
        check_features(input, self.in_features)
        unit, _ = unit_filters(self.weight, (1,))
        return F.linear(input, unit.to(self.weight.dtype))
