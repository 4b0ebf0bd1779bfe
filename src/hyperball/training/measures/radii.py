"""The learned radii of a network, layer by layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.nn.decoupled import Decoupled
from hyperball.nn.projection import Projection


def radii(network: nn.Module) -> dict[str, Tensor]:
    """The radius of every decoupled layer, projection and robust pooling that has one, as evaluation would use it."""
    found: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        radius: Any = None
        if isinstance(module, Decoupled | Projection):
            radius = module.radius
        elif isinstance(getattr(module, "log_c", None), Tensor):
            radius = module.log_c.exp()
        if radius is not None:
            found[name] = radius.detach().float().reshape(-1)
    return found


def summarize(network: nn.Module) -> dict[str, dict[str, float]]:
    """Least, mean and largest radius of every layer, fetched from the device at once."""
    found = radii(network)
    if not found:
        return {}
    table = torch.stack([torch.stack([r.min(), r.mean(), r.max()]) for r in found.values()]).tolist()
    return {
        name: {key: value for key, value in zip(("min", "mean", "max"), row, strict=True) if math.isfinite(value)}
        for name, row in zip(found, table, strict=True)
    }
