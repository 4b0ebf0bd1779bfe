"""Weight projection: the filters of unweighted decoupled layers brought back to one length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hyperball.kernels.norms import inverse
from hyperball.nn.decoupled import Decoupled
from hyperball.optim.layers import (
    Attachment,
    by_filter,
    check_held,
    decoupled_layers,
    filter_norms,
    listed,
    unweighted_layers,
)


class WeightProjection:
    """w ← scale·w/‖w‖ per filter, every `every` steps; a zero filter stays zero.

    It keeps what unweighted layers compute and undoes the growth of ‖w‖, which slows learning since dL/dw ~ 1/‖w‖.
    A model with weighted layers is refused, or these are passed over with `skip_weighted=True`.
    Parameters are changed in place, and the optimizer's state is left alone.

    >>> import torch, hyperball as hb
    >>> layer = hb.nn.DecoupledLinear(8, 4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> projection = hb.optim.WeightProjection(layer, every=1)
    >>> handle = projection.attach(optimizer)
    >>> layer(torch.randn(2, 8)).sum().backward()
    >>> optimizer.step()
    >>> torch.allclose(layer.weight.norm(dim=1), torch.ones(4))
    True
    """

    def __init__(self, model: nn.Module, every: int = 100, scale: float = 1.0, *, skip_weighted: bool = False) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"`every` must be a whole number of steps >= 1, got {every!r}")
        if not isinstance(scale, int | float) or not 0.0 < scale < math.inf:
            raise ValueError(f"`scale` must be a finite number > 0, got {scale!r}")
        self.model = model
        self.every = every
        self.scale = scale
        self.skip_weighted = skip_weighted
        self.steps = 0
        self.layers()

    def layers(self) -> dict[str, Decoupled]:
        """The layers that are projected, by name; raises where a layer must not be."""
        weighted = {name: layer for name, layer in decoupled_layers(self.model).items() if layer.weighting != "none"}
        if weighted and not self.skip_weighted:
            raise ValueError(
                "`model` must have no weighted decoupled layers, whose output projection would change, "
                f"got {listed(weighted)}; skip_weighted=True leaves these as they are"
            )
        layers = unweighted_layers(self.model)
        chosen = {id(layer) for layer in layers.values()}
        weights = {id(layer.weight): name for name, layer in layers.items()}
        for name, module in self.model.named_modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) in weights and id(module) not in chosen:
                    raise ValueError(
                        f"`model` must not share a projected weight with another layer, whose output would change, "
                        f"got {weights[id(parameter)]} and {name}"
                    )
        return layers

    @torch.no_grad()
    def project(self) -> None:
        """w ← scale·w/‖w‖ at once."""
        for layer in self.layers().values():
            view, _ = by_filter(layer, layer.weight)
            # The unit filter comes first: scale/‖w‖ may overflow where the product does not.
            view.copy_(view * inverse(filter_norms(layer, layer.weight)) * self.scale)

    def step(self) -> None:
        """Count one step, and project if it is the `every`-th."""
        self.steps += 1
        if self.steps % self.every == 0:
            self.project()

    def attach(self, optimizer: Optimizer) -> Attachment:
        """Call `step` after each step of `optimizer`, until `remove()` of what this returns."""
        check_held(self.layers(), optimizer)

        def after(*_: Any) -> None:
            self.step()

        # In a compiled step the count would be a constant of the graph, compiled anew each time.
        return Attachment(optimizer.register_step_post_hook(torch.compiler.disable(after)))

    def state_dict(self) -> dict[str, int]:
        """The number of steps so far."""
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the number of steps of `state_dict`."""
        if "steps" not in state_dict:
            raise ValueError(f"`state_dict` must have the entry 'steps', got {sorted(state_dict)}")
        self.steps = int(state_dict["steps"])
