"""Running statistics that begin at those of the first batch, in place of mean 0 and variance 1; counts of batches.

What a decoupled layer gives has a variance far below 1, so that with torch's start an evaluation after a few dozen
steps would measure how slowly the running variance forgets, and not the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

RUNNING = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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


class Counts:
    """The counts of batches of BatchNorm layers, raised together: one launch in place of one a layer.

    They are those of layers that `run()` counts one batch for, and that read no count: a momentum of None does.
    """

    def __init__(self, network: nn.Module, run: Callable[[], Any]) -> None:
        layers = [module for module in network.modules() if type(module) in COUNTING and module.momentum is not None]
        before = {layer: getattr(layer, COUNT) for layer in layers if getattr(layer, COUNT) is not None}
        before = {layer: int(count) for layer, count in before.items()}
        if before:
            run()
        self.layers = [layer for layer, count in before.items() if int(getattr(layer, COUNT)) == count + 1]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Layers do not count in this block, at whose end they have counted one batch."""
        counts = [getattr(layer, COUNT) for layer in self.layers]
        for layer in self.layers:
            setattr(layer, COUNT, None)
        try:
            yield
        finally:
            for layer, count in zip(self.layers, counts, strict=True):
                setattr(layer, COUNT, count)
        if counts:
            torch._foreach_add_(counts, 1)
