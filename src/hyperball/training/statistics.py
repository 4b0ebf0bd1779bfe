"""Running statistics that begin at those of the first batch, or are computed anew for a test; counts of batches.

What a decoupled layer gives has a variance far below 1, so that with torch's start, mean 0 and variance 1, an
evaluation after a few dozen steps would measure how slowly the running variance forgets, and not the network. A small
momentum makes every test in the middle of training measure that too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperball.nn.learned import LearnedValue

RUNNING = ("running_mean", "running_var")
COUNT = "num_batches_tracked"
COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@torch.no_grad()
def begin_at_first_batch(network: nn.Module, forward: Callable[[], Any]) -> bool:
    """Set the running statistics of normalization layers by one `forward()`; all other state stays. Whether any had."""
    if not normalizations(network):
        return False
    for buffer, value in running_means(network, [forward]).statistics:
        buffer.copy_(value)
    return True


@contextmanager
def fresh_statistics(
    network: nn.Module, passes: Sequence[Callable[[], Any]], over_processes: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """While the block lasts, running means are those of passes in training mode and of all processes."""
    means = running_means(network, passes)
    found = [*means.statistics, *means.lengths]
    kept = [(buffer, buffer.clone()) for buffer, _ in found]
    try:
        for buffer, value in found:
            buffer.copy_(over_processes(value))
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


class Means(NamedTuple):
    """Buffers with their values anew: of normalization layers, and the lengths that relative radii follow."""

    statistics: list[tuple[Tensor, Tensor]]
    lengths: list[tuple[Tensor, Tensor]]


@torch.no_grad()
def running_means(network: nn.Module, passes: Sequence[Callable[[], Any]]) -> Means:
    """Every running mean that tests read, with what it is of these passes in training mode alone; all state stays.

    That of a normalization layer is the mean over passes of what it is of one; a relative radius begins its own anew.
    """
    layers, radii = normalizations(network), relative_radii(network)
    statistics = [getattr(layer, name) for layer in layers for name in RUNNING]
    means = [torch.zeros_like(buffer) for buffer in statistics]
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    moments = [layer.momentum for layer in layers]
    try:
        for layer in layers:
            layer.momentum = 1.0  # its statistics are those of the latest batch
        for radius in radii:
            radius.batches.zero_()
        for forward in passes:
            forward()
            for mean, buffer in zip(means, statistics, strict=True):
                mean.add_(buffer, alpha=1 / len(passes))
        lengths = [(radius.running_length, radius.running_length.clone()) for radius in radii]
    finally:
        for layer, momentum in zip(layers, moments, strict=True):
            layer.momentum = momentum
        for buffer, value in kept:
            buffer.copy_(value)
    return Means(list(zip(statistics, means, strict=True)), lengths)


def normalizations(network: nn.Module) -> list[_NormBase]:
    """The layers that normalize by running statistics in tests."""
    found = [module for module in network.modules() if isinstance(module, _NormBase)]
    return [layer for layer in found if layer.track_running_stats and layer.running_mean is not None]


def relative_radii(network: nn.Module) -> list[LearnedValue]:
    """What resolves a relative radius by a running length in tests."""
    return [module for module in network.modules() if isinstance(module, LearnedValue) and module.is_relative]


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
