"""Calls of our layers in graphs of torch.fx."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def as_one_call(module: nn.Module, proxy: fx.Proxy, *given: Any, **named: Any) -> Any:
    """The call of a module as torch.fx records one of torch's own layers, which it does not look into.

    A module whose own forward calls that of our layer is refused: recorded whole, it would be called twice.
    """
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(f"`root` must be a model that holds the layer, as nn.Sequential(layer), got {module!r} itself")
    if not module.forward.__module__.startswith("hyperball."):
        raise TypeError(
            f"`root` must have no {type(module).__name__} that torch.fx looks into: its own forward calls that of our "
            "layer, which takes no proxy; trace with a Tracer whose is_leaf_module is True for it"
        )
    return tracer.create_proxy("call_module", path, (proxy, *given), named)
