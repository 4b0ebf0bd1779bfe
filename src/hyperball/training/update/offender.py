"""The first layer of a network that gives something not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """The loss, or what the network gives, became NaN or infinite; `step` and `where` say when and in which layer."""

    def __init__(self, step: int, where: str, what: str = "loss") -> None:
        super().__init__(f"the {what} is not finite at step {step}; first in {where}")
        self.step = step
        self.where = where


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry is finite; one answer from the device."""
    found = [tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()]
    return not found or bool(torch.stack(found).all())


def first_offender(network: nn.Module, inputs: Tensor, run: Callable[[], Any]) -> str:
    """What is first not finite when `run()` calls the network: the inputs, a parameter, or a layer's output."""
    if not bool(torch.isfinite(inputs).all()):
        return "the inputs"
    for name, parameter in network.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the parameter {name}, which an earlier step's gradient spoiled"
    found: list[str] = []

    def listener(name: str, kind: str) -> Callable[..., None]:
        def hear(module: nn.Module, arguments: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not bool(torch.isfinite(output).all()):
                found.append(f"layer {name} ({kind})")

        return hear

    # A part that others contain answers first, so that the innermost layer is named.
    parts = [(name or "(network)", module) for name, module in network.named_modules()]
    handles = [module.register_forward_hook(listener(name, type(module).__name__)) for name, module in parts]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss itself: every layer's output is finite"
