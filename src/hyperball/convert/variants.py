"""Decoupled forms of convolutions that prepare their weight or pad their input before they convolve.

timm's Conv2dSame pads as TensorFlow does; StdConv2d and ScaledStdConv2d standardize every filter first. Their decoupled
forms keep the raw weight, and the operator sees the prepared one.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.functional.decoupled import batched
from hyperball.functional.windows import convolution_window
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.window import Window
from hyperball.nn.decoupled import DecoupledConv2d
from hyperball.nn.frozen import FrozenConv

STANDARDIZED = ("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame")
KNOWN = ("Conv2dSame", *STANDARDIZED)


def same_widths(size: int, kernel_size: int, stride: int, dilation: int) -> tuple[int, int]:
    """Padding before and after, max((⌈size/stride⌉ − 1)·stride + (kernel − 1)·dilation + 1 − size, 0) in all."""
    total = max((-(-size // stride) - 1) * stride + (kernel_size - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


class PreparedConv2d(DecoupledConv2d):
    """A decoupled convolution over a standardized weight, w' = gain·scale·(w − mean)/sqrt(var + ε), or "SAME" padding.

    `filters()` is the weight that the operator sees; `weight` is the raw one.
    """

    same_pad: bool
    standardized: bool
    scale: float
    standard_eps: float
    gain: nn.Parameter | None

    def prepare_like(self, layer: Any) -> None:
        """Take over how a layer of timm, or another of this class, prepares its weight and its input."""
        if isinstance(layer, PreparedConv2d):
            self.same_pad, self.standardized, self.gain = layer.same_pad, layer.standardized, layer.gain
            self.scale, self.standard_eps = layer.scale, layer.standard_eps
            return
        name = type(layer).__name__
        self.same_pad = bool(getattr(layer, "same_pad", name == "Conv2dSame"))
        self.standardized = name in STANDARDIZED
        self.scale = float(getattr(layer, "scale", 1.0))
        self.standard_eps = float(getattr(layer, "eps", 0.0))
        self.gain = getattr(layer, "gain", None)

    def filters(self) -> Tensor:
        if not self.standardized:
            return self.weight
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = None if self.gain is None else (self.gain * self.scale).view(-1)
        standard = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=self.standard_eps)
        return standard.reshape(self.weight.shape)

    def padded(self, input: Tensor) -> tuple[Tensor, Window]:
        if not self.same_pad:
            return super().padded(input)
        x = pad_same(batched(input, 2), self)
        return x, convolution_window(2, x.shape, self.weight, self.stride, (0, 0), self.dilation, self.groups)

    def forward(self, input: Tensor) -> Tensor:
        x, window = self.padded(input)
        out = kernel.convolve(x, self.filters(), self.bias, window, self.operator)
        return out if input.dim() == x.dim() else out.squeeze(0)

    def plain(self, input: Tensor) -> Tensor:
        """The convolution that this layer was before: conv(x, w')."""
        x = pad_same(input, self) if self.same_pad else input
        padding: Any = 0 if self.same_pad else self.padding
        return F.conv2d(x, self.filters(), self.bias, self.stride, padding, self.dilation, self.groups)


class FrozenPreparedConv2d(FrozenConv):
    """A frozen PreparedConv2d: the standardized filter is a constant."""

    def __init__(self, layer: Any, affine: Any = None, folded: str | None = None) -> None:
        super().__init__(layer, affine, folded)
        self.same_pad, self.kernel_size = layer.same_pad, layer.kernel_size

    def forward(self, input: Tensor) -> Tensor:
        if not self.same_pad:
            return super().forward(input)
        x = pad_same(self._batched(input, 2), self)
        window = convolution_window(2, x.shape, self.filter, self.stride, (0, 0), self.dilation, self.groups)
        return self._convolve(x, window, input.dim())


def pad_same(x: Tensor, layer: Any) -> Tensor:
    """x with zeros around it, so that the output has ⌈size/stride⌉ positions."""
    size = tuple(x.shape[2:])
    pairs = [same_widths(size[i], layer.kernel_size[i], layer.stride[i], layer.dilation[i]) for i in (0, 1)]
    return F.pad(x, [*pairs[1], *pairs[0]])
