"""From the exact CNN to another operator, step by step, during fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyperball import angular as angular_table
from hyperball.convert.layers import OperatorChoice, become, is_convolution, plain_forward, twin
from hyperball.convert.model import check_model, convert_model
from hyperball.nn.decoupled import Decoupled


class Blend:
    """A forward hook: (1 − t)·(conv(x, w) + b) + t·f, with f the layer's own output."""

    def __init__(self, t: float) -> None:
        self.t = t

    def __call__(self, layer: Any, arguments: Any, keywords: Any, output: Tensor) -> Tensor:
        return torch.lerp(plain_forward(layer, *arguments, **keywords).to(output.dtype), output, self.t)


class Homotopy:
    """Moves a model's convolutions from conv(x, w) to an operator f: (1 − t)·conv(x, w) + t·f, t = position/steps.

    `model` is changed in place. Its layers of the exact CNN (magnitude and weighting linear, cosine) are moved, or,
    where it has none, the convolutions that `convert_model` would replace. At position 0 the function is that of the
    CNN; at `steps` the layers are the target's, and nothing of the way remains. On the way a layer convolves twice.

    Args:
        target: `convert_model`'s options, such as {"magnitude": "tanh", "weighting": "none"}, or a magnitude.
        steps: How many calls of `step` the way takes.

    >>> import torch, hyperball as hb
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    >>> homotopy = hb.convert.Homotopy(model, "tanh", steps=2)
    >>> homotopy.step(), homotopy.step(), homotopy.done
    (0.5, 1.0, True)
    """

    def __init__(self, model: nn.Module, target: str | Mapping[str, Any], steps: int) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"`steps` must be a whole number >= 1, got {steps!r}")
        options = dict(target) if isinstance(target, Mapping) else {"magnitude": target}
        if options.get("magnitude") is None:
            raise ValueError(f"`target` must have a magnitude, got {target!r}")
        self.model = check_model(model)
        self.steps = steps
        self.position = 0
        self.layers = self._prepare(options)
        self._handles: list[RemovableHandle] = []
        self._blend()

    def _prepare(self, options: dict[str, Any]) -> tuple[Any, ...]:
        """Put the target's layers in place; hooks then blend in what they were."""
        exact = [part for part in self.model.modules() if is_exact(part)]
        if exact:
            operator = OperatorChoice(**options)
            made = [twin(layer, operator) for layer in exact]
            for layer, other in zip(exact, made, strict=True):
                become(layer, other)
            return tuple(exact)
        _, report = convert_model(self.model, **options, inplace=True)
        found = (self.model.get_submodule(entry.name) for entry in report.replaced if entry.name != "robust_pool")
        layers = tuple(layer for layer in found if isinstance(layer, Decoupled))
        if not layers:
            raise ValueError(f"`model` has no plain convolution to move, got {type(self.model).__name__}")
        return layers

    @property
    def t(self) -> float:
        """How far the way has come, in [0, 1]."""
        return self.position / self.steps

    @property
    def done(self) -> bool:
        return self.position == self.steps

    def step(self) -> float:
        """Go one step (none beyond the end) and return t."""
        self.position = min(self.position + 1, self.steps)
        self._blend()
        return self.t

    def _blend(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not self.done:
            blend = Blend(self.t)
            # First among the hooks: a user's own sees the blended output.
            self._handles = [
                layer.register_forward_hook(blend, with_kwargs=True, prepend=True) for layer in self.layers
            ]

    def state_dict(self) -> dict[str, int]:
        """The position and the number of steps; the model's own state is saved with the model."""
        return {"position": self.position, "steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        for key in ("position", "steps"):
            if key not in state_dict:
                raise ValueError(f"`state_dict` must have the entry {key!r}, got {sorted(state_dict)}")
        position, steps = int(state_dict["position"]), int(state_dict["steps"])
        if not 0 <= position <= steps or steps < 1:
            raise ValueError(f"`state_dict` must have 0 <= position <= steps, got {position} of {steps}")
        self.position, self.steps = position, steps
        self._blend()


def is_exact(module: nn.Module) -> bool:
    """Whether it is a decoupled convolution that computes conv(x, w): linear, cosine, linearly weighted, alpha 1."""
    if not isinstance(module, Decoupled) or not is_convolution(module) or module.weighting != "linear":
        return False
    terms = module.magnitude.value.terms
    linear = len(terms) == 1 and terms[0].name == "linear" and bool(terms[0].parameters["alpha"] == 1.0)
    angular: Any = module.angular.value
    return linear and not module.magnitude.learns("alpha") and angular_table.is_cosine(angular)
