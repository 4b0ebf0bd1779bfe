"""The layers that are compared: torch's, ours, what one would write first, and PyPI's `bcos`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.bench.timing import Step
from hyperball.nn import DecoupledConv2d

BCOS_MISSING = "bcos is not installed (pip install bcos): no comparison with it"


class NaiveTanhConv2d(nn.Conv2d):
    """What one would write first: unit filters, the norm by a ones-convolution, a radius per channel, autograd."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.ratio = nn.Parameter(torch.ones(self.out_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        unit = self.weight / self.weight.flatten(1).norm(dim=1)[:, None, None, None]
        n = torch.sqrt(F.conv2d(x * x, torch.ones_like(self.weight[:1]), None, self.stride, self.padding) + 1e-4)
        cosine = F.conv2d(x, unit, None, self.stride, self.padding) / n
        return torch.tanh(n / (self.ratio**2 * n.mean())) * cosine


def bcos_layer() -> Callable[..., nn.Module] | None:
    """The convolution of PyPI's `bcos`, or None where it cannot be imported."""
    try:
        from bcos.modules import BcosConv2d
    except ImportError:
        return None
    return lambda *geometry: BcosConv2d(*geometry, b=2, max_out=1)


def decoupled(magnitude: str, angular: str, weighting: str = "none") -> Callable[..., nn.Module]:
    """Makes our convolution from torch's positional arguments."""
    operator: dict[str, Any] = {"magnitude": magnitude, "angular": angular, "weighting": weighting, "bias": False}
    return lambda *geometry: DecoupledConv2d(*geometry, **operator)


def plain(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)


def naive(*geometry: int) -> nn.Module:
    return NaiveTanhConv2d(*geometry, bias=False)


def forward_step(layer: nn.Module, x: Tensor) -> Step:
    """The forward without a graph of autograd's."""

    def step() -> None:
        with torch.no_grad():
            layer(x)

    return step


def backward_step(layer: nn.Module, x: Tensor) -> Step:
    """Forward, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    wanted = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    with torch.no_grad():
        grad = torch.randn_like(layer(x))

    def step() -> None:
        torch.autograd.grad(layer(x), wanted, grad)

    return step


def kept_maps(layer: nn.Module, x: Tensor) -> float:
    """What the forward keeps for the backward beside input and parameters, in activation maps."""
    x = x.detach().requires_grad_()
    outside = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in layer.parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    return sum(kept.values()) / out.untyped_storage().nbytes()
