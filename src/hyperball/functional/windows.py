"""From torch's convolution arguments to a checked `Window`."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from torch import Tensor

from hyperball.kernels.window import Window

Numbers = int | Sequence[int]


def per_dimension(name: str, given: Numbers, dims: int, least: int) -> tuple[int, ...]:
    """An int, or one int per spatial dimension, as a tuple."""
    try:
        numbers = tuple(index(n) for n in given) if isinstance(given, Sequence) else (index(given),)
    except TypeError:
        numbers = ()
    if len(numbers) == 1:
        numbers = numbers * dims
    if len(numbers) != dims or isinstance(given, bool) or any(n < least for n in numbers):
        raise ValueError(f"`{name}` must be an int or {dims} ints, each >= {least}, got {given!r}")
    return numbers


def padding_pairs(
    padding: Numbers | str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """(before, after) per dimension; 'same' puts the odd one after, as torch does."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        if any(step != 1 for step in stride):
            raise ValueError(f"`padding='same'` needs stride 1, got stride {stride}")
        totals = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(padding, str):
        raise ValueError(f"`padding` must be 'same', 'valid' or ints, got {padding!r}")
    return tuple((width, width) for width in per_dimension("padding", padding, len(kernel), 0))


def check_weight(weight: Tensor, dims: int) -> None:
    if weight.dim() != dims + 2 or 0 in weight.shape[2:]:
        raise ValueError(f"`weight` must have {dims + 2} dimensions, the last {dims} >= 1, got {tuple(weight.shape)}")


def _check_groups(groups: int, in_channels: int, out_channels: int) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"`groups` must be an int >= 1, got {groups!r}")
    if in_channels % groups or out_channels % groups:
        raise ValueError(
            f"`groups` must divide the channels, got groups={groups} for {in_channels} input "
            f"and {out_channels} output channels"
        )


def convolution_window(
    dims: int,
    shape: Sequence[int],
    weight: Tensor,
    stride: Numbers,
    padding: Numbers | str,
    dilation: Numbers,
    groups: int,
) -> Window:
    """The window of a convolution of an input of this (batched) shape."""
    check_weight(weight, dims)
    _check_groups(groups, shape[1], weight.shape[0])
    if weight.shape[1] * groups != shape[1]:
        raise ValueError(
            f"`input` must have {weight.shape[1] * groups} channels "
            f"({weight.shape[1]} × {groups} groups), got {shape[1]}"
        )
    kernel = tuple(weight.shape[2:])
    strides = per_dimension("stride", stride, dims, 1)
    dilations = per_dimension("dilation", dilation, dims, 1)
    window = Window(kernel, strides, padding_pairs(padding, kernel, strides, dilations), dilations, groups)
    for dim in range(dims):
        length = shape[2 + dim] + sum(window.padding[dim])
        if length < window.reach(dim) + 1:
            raise ValueError(
                f"`input` is {length} long with padding along dimension {dim}; the kernel needs {window.reach(dim) + 1}"
            )
    return window


def transposed_window(
    dims: int, shape: Sequence[int], weight: Tensor, stride: Numbers, padding: Numbers, output_padding: Numbers,
    groups: int, dilation: Numbers,
) -> Window:  # fmt: skip
    """The window of a transposed convolution of an input of this (batched) shape."""
    check_weight(weight, dims)
    _check_groups(groups, weight.shape[0], weight.shape[1] * groups)
    if weight.shape[0] != shape[1]:
        raise ValueError(f"`input` must have {weight.shape[0]} channels as `weight` does, got {shape[1]}")
    strides = per_dimension("stride", stride, dims, 1)
    dilations = per_dimension("dilation", dilation, dims, 1)
    extra = per_dimension("output_padding", output_padding, dims, 0)
    if any(more >= max(step, gap) for more, step, gap in zip(extra, strides, dilations, strict=True)):
        raise ValueError(f"`output_padding` must be smaller than stride or dilation, got {output_padding!r}")
    pairs = tuple((width, width) for width in per_dimension("padding", padding, dims, 0))
    return Window(tuple(weight.shape[2:]), strides, pairs, dilations, groups, True, extra)
