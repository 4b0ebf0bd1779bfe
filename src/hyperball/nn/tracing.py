"""Calls of our layers in graphs of torch.fx."""

from __future__ import annotations

from typing import Any

from torch import fx, nn


def as_one_call(module: nn.Module, proxy: fx.Proxy, *given: Any, **named: Any) -> Any:
    """The call of a module as torch.fx records one of torch's own layers, which it does not look into."""
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(f"`root` must be a model that holds the layer, as nn.Sequential(layer), got {module!r} itself")
    return tracer.create_proxy("call_module", path, (proxy, *given), named)
