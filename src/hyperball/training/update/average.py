"""The exponential moving average of a model's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def averaging_weight(step: int, decay: float) -> float:
    """1 − min(decay, (1 + step) / (10 + step)): the first steps are forgotten quickly."""
    return 1.0 - min(decay, (1 + step) / (10 + step))


class Average:
    """shadow ← shadow + w·(parameter − shadow), with w in device memory so that a CUDA graph may hold the update.

    Buffers (running statistics) are the model's own.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self.shadows = {name: item.detach().clone() for name, item in self.parameters.items()}
        self.weight = torch.zeros((), device=next(iter(self.shadows.values())).device)

    def before(self, step: int) -> None:
        """Write the weight of a step; outside of a graph."""
        self.weight.fill_(averaging_weight(step, self.decay))

    @torch.no_grad()
    def update(self) -> None:
        """Move the shadows; inside of a graph, or not."""
        shadows = list(self.shadows.values())
        current: Any = [item.detach() for item in self.parameters.values()]
        moves: Any = torch._foreach_sub(current, shadows)
        torch._foreach_mul_(moves, self.weight)
        torch._foreach_add_(shadows, moves)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights, in place, until the block ends."""
        kept = {name: item.detach().clone() for name, item in self.parameters.items()}
        self._write(self.shadows)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.shadows)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, shadow in self.shadows.items():
            shadow.copy_(state[name])
