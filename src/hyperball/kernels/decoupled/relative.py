"""A radius in units of the mean patch length, before it is resolved: what a fused kernel resolves by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperball.rows import AnyValue


@dataclass(frozen=True, eq=False)
class Relative:
    """rho = (ratio² + 1e-4)·unit for a tensor, (ratio + 1e-4)·unit for a number.

    The unit is the batch's mean of sqrt(n² + eps) in training, which `track` lets the running mean follow, and the
    running mean in evaluation.
    """

    ratio: Tensor | float
    running: Tensor
    batches: Tensor
    training: bool
    eps: float
    track: Callable[[Tensor, int], None]

    @property
    def distributed(self) -> bool:
        """Whether the running mean is one over several ranks."""
        return torch.distributed.is_available() and torch.distributed.is_initialized()


def unresolved(magnitude: Callable[[Tensor | None], AnyValue]) -> tuple[Any, Relative | None]:
    """A magnitude's value, and its relative radius where it has one: it then offers `unresolved()`."""
    offer: Any = getattr(magnitude, "unresolved", None)
    if offer is None:
        return magnitude(None), None
    value, relative = offer()
    return value, relative
