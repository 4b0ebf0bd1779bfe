"""How long filters and their gradients are while a network trains."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from hyperball.nn.decoupled import Decoupled


@torch.no_grad()
def lengths(model: nn.Module) -> dict[str, float]:
    """Mean and largest ‖w‖ and ‖∂L/∂w‖ over all filters, fetched from the device at once.

    The filters are those of decoupled layers, or of all convolutions where none is decoupled; gradients are those that
    the optimizer last saw. Where one is not finite it is left out.
    """
    weights = filters(model)
    if not weights:
        return {}
    found = {"weight_norm": rows([weight.detach() for weight in weights])}
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if gradients:
        found["gradient_norm"] = rows(gradients)
    values = torch.stack([measure(norms) for norms in found.values() for measure in (torch.mean, torch.max)]).tolist()
    names = [name for key in found for name in (key, f"largest_{key}")]
    return {name: value for name, value in zip(names, values, strict=True) if math.isfinite(value)}


def filters(model: nn.Module) -> list[Tensor]:
    """The weights of decoupled layers, or else of convolutions."""
    modules = list(model.modules())
    chosen = [module for module in modules if isinstance(module, Decoupled)]
    return [module.weight for module in chosen or modules if isinstance(module, Decoupled | nn.Conv1d | nn.Conv2d)]


def rows(tensors: list[Tensor]) -> Tensor:
    """The Euclidean length of every filter, output channel by output channel."""
    return torch.cat([tensor.float().flatten(1).norm(dim=1) for tensor in tensors])
