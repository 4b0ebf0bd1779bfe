"""Weighted gradients: the gradient or the update of an unweighted filter times the filter's length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hyperball.nn.decoupled import Decoupled
from hyperball.optim.layers import Attachment, by_filter, check_held, filter_norms, held, unweighted_layers
from hyperball.rows import nearest

WHERE = ("grad", "update")


class WeightedGradients:
    """dw ← ‖w‖·dw per filter of the unweighted decoupled layers, which undoes the 1/‖w‖ of their gradients.

    `where="grad"` scales the gradient before a step. Adam divides a gradient by its own size, so there this is
    almost a no-op, and `where="update"` is the form that acts: w ← w + ‖w‖·(w' − w), w' being where the optimizer's
    step led, its weight decay included; it keeps a copy of these weights during a step.
    With a `WeightProjection` on the same optimizer, attach this one first.
    """

    def __init__(self, model: nn.Module, where: str = "grad") -> None:
        if where not in WHERE:
            raise ValueError(f"`where` must be one of {WHERE}, got {where!r}; {nearest(str(where), WHERE)}")
        self.where = where
        self._layers = unweighted_layers(model)
        self._before: dict[Tensor, tuple[Decoupled, Tensor]] = {}

    def layers(self) -> dict[str, Decoupled]:
        """The layers that are acted on, by name."""
        return dict(self._layers)

    def _by_weight(self, optimizer: Optimizer | None) -> dict[Tensor, Decoupled]:
        """The trainable weights, each once, and of these the optimizer's own."""
        weights = {layer.weight: layer for layer in self._layers.values() if layer.weight.requires_grad}
        if optimizer is None:
            return dict(weights)
        own = held(optimizer)
        return {weight: layer for weight, layer in weights.items() if id(weight) in own}

    @torch.no_grad()
    def scale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """grad ← ‖w‖·grad at once, for those weights that have a gradient (and that `optimizer` updates)."""
        for weight, layer in self._by_weight(optimizer).items():
            if weight.grad is not None:
                by_filter(layer, weight.grad)[0].mul_(filter_norms(layer, weight))

    def attach(self, optimizer: Optimizer) -> Attachment:
        """Act on each step of `optimizer`, until `remove()` of what this returns."""
        check_held(self._layers, optimizer)
        if self.where == "grad":
            return Attachment(optimizer.register_step_pre_hook(torch.compiler.disable(self._scale_before)))
        return Attachment(
            optimizer.register_step_pre_hook(torch.compiler.disable(self._remember)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._scale_update)),
        )

    def _scale_before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Scale the gradients, or have the step's closure, which computes them, do so."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.scale_gradients(optimizer)
            return None
        return (*args[:1], self._scaled(closure, optimizer), *args[2:]), _without(kwargs, "closure")

    def _scaled(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        def scaled() -> Any:
            loss = closure()
            self.scale_gradients(optimizer)
            return loss

        return scaled

    @torch.no_grad()
    def _remember(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._before = {weight: (layer, weight.clone()) for weight, layer in self._by_weight(optimizer).items()}

    @torch.no_grad()
    def _scale_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """w ← (1 − ‖w_old‖)·w_old + ‖w_old‖·w, in float32 for narrower weights."""
        for weight, (layer, old) in self._before.items():
            length = filter_norms(layer, old)
            start, end = by_filter(layer, old)[0], by_filter(layer, weight)[0]
            end.copy_(torch.lerp(start.to(length.dtype), end.to(length.dtype), length))
        self._before = {}


def _without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}
