"""Layers, optimizers and a small model for the tests of `hyperball.optim`."""

from collections.abc import Callable

import reference
import torch
from torch import Tensor, nn

import hyperball as hb

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda **k: hb.nn.DecoupledLinear(6, 4, **k),
    "conv1d": lambda **k: hb.nn.DecoupledConv1d(4, 6, 3, padding=1, **k),
    "conv2d": lambda **k: hb.nn.DecoupledConv2d(3, 5, (3, 2), stride=(1, 2), **k),
    "conv2d groups": lambda **k: hb.nn.DecoupledConv2d(4, 12, 1, groups=2, **k),
    "conv3d": lambda **k: hb.nn.DecoupledConv3d(2, 4, 2, groups=2, **k),
    "transposed 1d": lambda **k: hb.nn.DecoupledConvTranspose1d(4, 6, 3, stride=2, **k),
    "transposed 2d groups": lambda **k: hb.nn.DecoupledConvTranspose2d(4, 6, 3, groups=2, **k),
    "transposed 3d": lambda **k: hb.nn.DecoupledConvTranspose3d(2, 3, 2, **k),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


def filters_of(layer: nn.Module, tensor: Tensor | None = None) -> Tensor:
    """One filter a row, of the weight or of a tensor of its shape, by the reference."""
    tensor = (layer.weight if tensor is None else tensor).detach()
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        tensor = reference.transpose_filters(tensor, layer.groups)
    return tensor.flatten(1).double()


def inputs_for(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(3, layer.in_features, dtype=layer.weight.dtype)
    return torch.randn(2, layer.in_channels, *[5] * (layer.weight.dim() - 2), dtype=layer.weight.dtype)


def small_model() -> nn.Sequential:
    return nn.Sequential(
        hb.nn.DecoupledConv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        hb.nn.DecoupledConv2d(6, 8, 3, groups=2, magnitude="ball", angular="sigmoid(k=0.5, learn_k=True)"),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def backward(model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
    model.zero_grad()
    loss = model(torch.randn(4, 3, 5, 5)).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()


DECOUPLED = ("0.weight", "3.weight")


def decoupled_weights(model: nn.Module) -> list[nn.Parameter]:
    return [model[0].weight, model[3].weight]
