"""Decoupled convolutions and linear maps: f = h(‖x‖)·g(cos θ) instead of ‖x‖·‖w‖·cos θ.

Liu et al., Decoupled Networks, CVPR 2018. Here a text gives fixed, absolute parameters; modules learn them.
For a transposed convolution the patch of an output position consists of the inputs that contribute to it, and the
filter of an output channel of all its taps: n is the norm of those inputs, m that of the whole filter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional.windows import Numbers, convolution_window, transposed_window
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.decoupled.operation import Operator
from hyperball.kernels.window import Window
from hyperball.rows import AnyValue, Row, Value, fill, map_scalars, nearest, require_positive

WEIGHTINGS = ("none", "linear", "joint", "split")
Magnitude = str | AnyValue | Row
Angular = str | Value | Row


def check_weighting(weighting: str, magnitude: AnyValue) -> None:
    """Refuse an unknown weighting, and `split` where h is not proportional to alpha."""
    if weighting not in WEIGHTINGS:
        raise ValueError(
            f"`weighting` must be one of {WEIGHTINGS}, got {weighting!r}; {nearest(str(weighting), WEIGHTINGS)}"
        )
    if weighting == "split" and (len(magnitude.terms) > 1 or not magnitude.terms[0].row.proportional):
        raise ValueError(f"`weighting='split'` needs a magnitude with one alpha in front; {magnitude.name!r} has none")


def check_eps(eps: float) -> None:
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < float("inf"):
        raise ValueError(f"`eps` must be a finite number >= 0, got {eps!r}")


def needs_norm(magnitude: AnyValue, angular: Value, weighting: str) -> bool:
    """Whether the patch norm enters: not for a linear magnitude with cosine."""
    return not angular_table.is_cosine(angular) or radial_table.needs_norm(magnitude)


def fixed_operator(magnitude: Magnitude, angular: Angular, weighting: str, eps: float, channels: int) -> Operator:
    """Texts and values, checked, as an operator with fixed, absolute parameters."""
    check_eps(eps)
    h = fill(radial_table.parse(magnitude), eps=eps)
    g = fill(angular_table.parse(angular), eps=eps)
    assert isinstance(g, Value)
    check_weighting(weighting, h)
    for value in (h, g):
        _refuse_learning(value)
        require_positive(value)
        _check_shapes(value, channels)
    h, g = _flat(h), _flat(g)
    assert isinstance(g, Value)
    return Operator(lambda n: h, g, weighting, needs_norm(h, g, weighting))


def _refuse_learning(value: AnyValue) -> None:
    for term in value.terms:
        for option, setting in term.options.items():
            if setting is True:
                raise ValueError(
                    f"`{option}=True` of {term.name!r} is for modules; a function takes fixed, absolute values"
                )


def _check_shapes(value: AnyValue, channels: int) -> None:
    def check(item: Any) -> Any:
        if isinstance(item, Tensor) and item.dim() > 0 and tuple(item.shape) not in ((1,), (channels,)):
            raise ValueError(
                f"a parameter of {value.name!r} must be a number or a tensor of 1 or {channels} values "
                f"(output channels), got shape {tuple(item.shape)}"
            )
        return item

    map_scalars(value, check)


def _flat(value: AnyValue) -> AnyValue:
    """Tensors of one value as 0-d tensors."""
    return map_scalars(
        value, lambda item: item.reshape(()) if isinstance(item, Tensor) and item.shape == (1,) else item
    )


def decoupled_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    magnitude: Magnitude,
    angular: Angular = "cosine",
    weighting: str = "none",
    eps: float = 1e-4,
) -> Tensor:
    """f_o = h(‖x‖)·g(cos(x, w_o)) over the last dimension, with F.linear's arguments.

    >>> import torch, hyperball as hb
    >>> hb.functional.decoupled_linear(torch.randn(2, 8), torch.randn(4, 8), magnitude="tanh(rho=2)").shape
    torch.Size([2, 4])
    """
    check_tensors(input=input, weight=weight, bias=bias)
    if weight.dim() != 2:
        raise ValueError(f"`weight` must have 2 dimensions (out, in), got shape {tuple(weight.shape)}")
    check_features(input, weight.shape[1])
    _check_bias(bias, weight.shape[0])
    return kernel.linear(input, weight, bias, fixed_operator(magnitude, angular, weighting, eps, weight.shape[0]))


def check_tensors(**tensors: Any) -> None:
    """Refuse what is not a real floating-point tensor; a bias may be None."""
    for name, tensor in tensors.items():
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"`{name}` must be a real floating-point tensor, got {got}")


def check_features(input: Tensor, features: int) -> None:
    check_tensors(input=input)
    if input.dim() < 1 or input.shape[-1] != features:
        raise ValueError(f"`input` must end in {features} features, got shape {tuple(input.shape)}")


def _check_bias(bias: Tensor | None, channels: int) -> None:
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(f"`bias` must have shape ({channels},), got {tuple(bias.shape)}")


def batched(input: Tensor, dims: int) -> Tensor:
    """Add the batch dimension if the input has none; refuse another rank or what is no real tensor."""
    check_tensors(input=input)
    if input.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"`input` must have {dims + 2} dimensions, or {dims + 1} without a batch, got {tuple(input.shape)}"
        )
    return input if input.dim() == dims + 2 else input.unsqueeze(0)


def run_convolution(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, window: Window, operator: Operator
) -> Tensor:
    """Call the kernel with a batch dimension, and take it off again if the input had none."""
    out = kernel.convolve(batched(input, dims), weight, bias, window, operator)
    return out if input.dim() == dims + 2 else out.squeeze(0)


def _convolution(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Numbers, padding: Numbers | str,
    dilation: Numbers, groups: int, magnitude: Magnitude, angular: Angular, weighting: str, eps: float,
) -> Tensor:  # fmt: skip
    check_tensors(input=input, weight=weight, bias=bias)
    window = convolution_window(dims, batched(input, dims).shape, weight, stride, padding, dilation, groups)
    _check_bias(bias, weight.shape[0])
    operator = fixed_operator(magnitude, angular, weighting, eps, weight.shape[0])
    return run_convolution(dims, input, weight, bias, window, operator)


def _transposed(
    dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, stride: Numbers, padding: Numbers,
    output_padding: Numbers, groups: int, dilation: Numbers, magnitude: Magnitude, angular: Angular, weighting: str,
    eps: float,
) -> Tensor:  # fmt: skip
    check_tensors(input=input, weight=weight, bias=bias)
    shape = batched(input, dims).shape
    window = transposed_window(dims, shape, weight, stride, padding, output_padding, groups, dilation)
    channels = weight.shape[1] * groups
    _check_bias(bias, channels)
    operator = fixed_operator(magnitude, angular, weighting, eps, channels)
    return run_convolution(dims, input, weight, bias, window, operator)


def decoupled_conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers | str = 0,
    dilation: Numbers = 1, groups: int = 1, *, magnitude: Magnitude, angular: Angular = "cosine",
    weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """f = h(‖patch‖)·g(cos(patch, filter)) over a 1-d input, with F.conv1d's arguments."""
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups, magnitude, angular, weighting, eps)


def decoupled_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers | str = 0,
    dilation: Numbers = 1, groups: int = 1, *, magnitude: Magnitude, angular: Angular = "cosine",
    weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """f = h(‖patch‖)·g(cos(patch, filter)) over a 2-d input, with F.conv2d's arguments.

    >>> import torch, hyperball as hb
    >>> x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    >>> hb.functional.decoupled_conv2d(x, w, padding=1, magnitude="ball(rho=3)", angular="square_cosine").shape
    torch.Size([2, 4, 8, 8])
    """
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups, magnitude, angular, weighting, eps)


def decoupled_conv3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers | str = 0,
    dilation: Numbers = 1, groups: int = 1, *, magnitude: Magnitude, angular: Angular = "cosine",
    weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """f = h(‖patch‖)·g(cos(patch, filter)) over a 3-d input, with F.conv3d's arguments."""
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups, magnitude, angular, weighting, eps)


def decoupled_conv_transpose1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers = 0,
    output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1, *, magnitude: Magnitude,
    angular: Angular = "cosine", weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """The decoupled transposed convolution over a 1-d input, with F.conv_transpose1d's arguments."""
    return _transposed(
        1, input, weight, bias, stride, padding, output_padding, groups, dilation, magnitude, angular, weighting, eps
    )


def decoupled_conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers = 0,
    output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1, *, magnitude: Magnitude,
    angular: Angular = "cosine", weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """The decoupled transposed convolution over a 2-d input, with F.conv_transpose2d's arguments."""
    return _transposed(
        2, input, weight, bias, stride, padding, output_padding, groups, dilation, magnitude, angular, weighting, eps
    )


def decoupled_conv_transpose3d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Numbers = 1, padding: Numbers = 0,
    output_padding: Numbers = 0, groups: int = 1, dilation: Numbers = 1, *, magnitude: Magnitude,
    angular: Angular = "cosine", weighting: str = "none", eps: float = 1e-4,
) -> Tensor:  # fmt: skip
    """The decoupled transposed convolution over a 3-d input, with F.conv_transpose3d's arguments."""
    return _transposed(
        3, input, weight, bias, stride, padding, output_padding, groups, dilation, magnitude, angular, weighting, eps
    )
