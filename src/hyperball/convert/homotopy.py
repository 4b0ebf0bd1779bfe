"""From the exact CNN to another operator, step by step, during fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyperball import angular as angular_table
from hyperball.convert.layers import OperatorChoice, become, is_convolution, plain_forward, twin
from hyperball.convert.model import Plan, check_model, convert_model, plan_convolutions, seen
from hyperball.convert.selection import check_skip
from hyperball.nn.decoupled import Decoupled
from hyperball.rows import nearest

OPERATOR = ("magnitude", "angular", "weighting")
OPTIONS = (*OPERATOR, "pool", "projection", "skip", "convolutions", "keep_shortcuts", "fuse", "batch")


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
        options = checked_target(target)
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
            foreign = sorted(options.keys() - set(OPERATOR))
            if foreign:
                raise ValueError(f"`target` has {foreign[0]!r}, which a model that is converted already does not take")
            operator = OperatorChoice(**options)
            made = [twin(layer, operator) for layer in exact]
            for layer, other in zip(exact, made, strict=True):
                become(layer, other)
            return tuple(exact)
        before = {part for part in self.model.modules() if isinstance(part, Decoupled)}
        refuse_nothing(self.model, options)
        convert_model(self.model, **options, inplace=True)
        return tuple(part for part in self.model.modules() if isinstance(part, Decoupled) and part not in before)

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
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"`state_dict` must be a mapping, got {type(state_dict).__name__}")
        for key in ("position", "steps"):
            if key not in state_dict:
                raise ValueError(f"`state_dict` must have the entry {key!r}, got {sorted(state_dict)}")
        position, steps = state_dict["position"], state_dict["steps"]
        if any(isinstance(count, bool) or not isinstance(count, int) for count in (position, steps)):
            raise ValueError(f"`state_dict` must have whole numbers, got position {position!r} and steps {steps!r}")
        if not 0 <= position <= steps or steps < 1:
            raise ValueError(f"`state_dict` must have 0 <= position <= steps, got {position} of {steps}")
        self.position, self.steps = position, steps
        self._blend()


def checked_target(target: Any) -> dict[str, Any]:
    """`convert_model`'s options that a target names, with a magnitude among them."""
    options = dict(target) if isinstance(target, Mapping) else {"magnitude": target}
    for key in options:
        if key not in OPTIONS:
            raise ValueError(f"`target` has the unknown option {key!r}; {nearest(str(key), OPTIONS)}")
    if options.get("magnitude") is None:
        raise ValueError(f"`target` must have a magnitude, got {target!r}")
    return options


def refuse_nothing(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise, before anything is changed, where no convolution would move."""
    plan, skip = Plan(), check_skip(model, options.get("skip", ()))
    operator = OperatorChoice(**{key: options[key] for key in OPERATOR if key in options})
    choice, keep_shortcuts = options.get("convolutions", "all"), options.get("keep_shortcuts", True)
    plan_convolutions(plan, model, operator, skip, choice, keep_shortcuts)
    if not plan.swaps:
        raise ValueError(f"nothing to convert in {type(model).__name__}: {seen(model, plan)}")


def is_exact(module: nn.Module) -> bool:
    """Whether it is a decoupled convolution that computes conv(x, w): linear, cosine, linearly weighted, alpha 1."""
    if not isinstance(module, Decoupled) or not is_convolution(module) or module.weighting != "linear":
        return False
    terms = module.magnitude.value.terms
    linear = len(terms) == 1 and terms[0].name == "linear" and bool(terms[0].parameters["alpha"] == 1.0)
    angular: Any = module.angular.value
    return linear and not module.magnitude.learns("alpha") and angular_table.is_cosine(angular)
