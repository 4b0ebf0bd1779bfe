"""Parameter groups: what weight decay is for, and what it would spoil."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from hyperball.nn.decoupled import Decoupled, NormalizedLinear
from hyperball.nn.learned import LearnedValue

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, weight_decay: float, *, radius_lr: float | None = None) -> list[dict[str, Any]]:
    """The trainable parameters of `model`, each once, in groups for any torch optimizer: with and without decay.

    Weight decay is kept from decoupled weights (their direction alone counts, or their length has a meaning) and
    from those of `NormalizedLinear`, from radii and all else that operators learn, from biases, from normalization
    layers and from anything of at most one dimension. With `radius_lr`, what operators learn is a group of its own
    with that learning rate. A group says its `name` ("decay", "no_decay", "radius") and its `param_names`.

    >>> import torch, hyperball as hb
    >>> model = torch.nn.Sequential(hb.nn.DecoupledLinear(8, 4), torch.nn.Linear(4, 2))
    >>> groups = hb.optim.parameter_groups(model, weight_decay=0.05)
    >>> [(group["name"], group["param_names"]) for group in groups]
    [('decay', ['1.weight']), ('no_decay', ['0.weight', '0.magnitude.ratio', '1.bias'])]
    >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    _check_number("weight_decay", weight_decay)
    options: dict[str, dict[str, Any]] = {"decay": {"weight_decay": weight_decay}, "no_decay": {"weight_decay": 0.0}}
    if radius_lr is not None:
        _check_number("radius_lr", radius_lr)
        options["radius"] = {"weight_decay": 0.0, "lr": radius_lr}
    kinds = _kinds(model)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in options}
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = kinds.get(id(parameter)) or _kind_alone(path, parameter)
            members[kind if kind in members else "no_decay"].append((path, parameter))
    return [{"name": name, **_group(members[name]), **options[name]} for name in options if members[name]]


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a number >= 0, got {value!r}")


def _kinds(model: nn.Module) -> dict[int, str]:
    """The group of each parameter, by identity, whose module decides it; a radius stays one inside a layer."""
    kinds: dict[int, str] = {}
    for kind, modules in (("no_decay", (Decoupled, NormalizedLinear, *NORMS)), ("radius", (LearnedValue,))):
        kinds.update((id(parameter), kind) for parameter in _parameters_of(model, modules))
    return kinds


def _parameters_of(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, kinds):
            yield from module.parameters()


def _kind_alone(path: str, parameter: nn.Parameter) -> str:
    return "no_decay" if parameter.dim() <= 1 or path.rpartition(".")[2] == "bias" else "decay"


def _group(members: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    return {"params": [parameter for _, parameter in members], "param_names": [path for path, _ in members]}
