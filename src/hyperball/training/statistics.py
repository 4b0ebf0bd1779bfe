"""Running statistics that begin at those of the first batch, in place of mean 0 and variance 1.

What a decoupled layer gives has a variance far below 1, so that with torch's start an evaluation after a few dozen
steps would measure how slowly the running variance forgets, and not the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

RUNNING = ("running_mean", "running_var")


@torch.no_grad()
def begin_at_first_batch(network: nn.Module, forward: Callable[[], Any]) -> bool:
    """Set the running statistics of normalization layers by one `forward()`; all other state stays. Whether any had."""
    layers = [module for module in network.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    kept = {id(buffer): buffer.clone() for buffer in network.buffers()}
    moments = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 1.0
        if layers:
            forward()
    finally:
        for layer, momentum in zip(layers, moments, strict=True):
            layer.momentum = momentum
    fresh = {id(getattr(layer, name)) for layer in layers for name in RUNNING}
    for buffer in network.buffers():
        if id(buffer) not in fresh:
            buffer.copy_(kept[id(buffer)])
    return bool(layers)
