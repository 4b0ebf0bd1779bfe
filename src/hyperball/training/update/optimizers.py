"""Optimizers whose learning rate can change without a new CUDA graph, and the groups they act on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hyperball.convert.structure import find_classifier
from hyperball.models.classified import Classified
from hyperball.optim.parameters import NORMS, parameter_groups
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import OptimizerConfig

RADII = ("log_radius", "log_c", "logit_shape")  # what projections and robust pooling learn


def groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameters in groups "decay", "no_decay" and "radius", each with its own decay and learning rate."""
    found = parameter_groups(model, config.weight_decay, radius_lr=config.radius_lr)
    kinds = {path: group["name"] for group in found for path in group["param_names"]}
    parameters = {path: parameter for path, parameter in model.named_parameters() if path in kinds}
    with_decay, spared = exceptions(model, config.decay)
    for path, parameter in parameters.items():
        if path.rpartition(".")[2] in RADII:
            kinds[path] = "radius" if config.radius_lr is not None else "no_decay"
        elif id(parameter) in with_decay:
            kinds[path] = "decay"
        elif id(parameter) in spared and kinds[path] == "decay":
            kinds[path] = "no_decay"
        if config.decay == "all" and kinds[path] == "no_decay":
            kinds[path] = "decay"
    rates = {"decay": config.lr, "no_decay": config.lr, "radius": config.radius_lr}
    return [
        {
            "name": name,
            "params": [parameters[path] for path in parameters if kinds[path] == name],
            "param_names": [path for path in parameters if kinds[path] == name],
            "lr": rate,
            "base_lr": rate,
            "weight_decay": config.weight_decay if name == "decay" else 0.0,
        }
        for name, rate in rates.items()
        if name in kinds.values()
    ]


def exceptions(model: nn.Module, decay: str) -> tuple[set[int], set[int]]:
    """By identity: which parameters a `decay` adds to those that `parameter_groups` decays, and which it spares."""
    norms = {id(item) for module in model.modules() if isinstance(module, NORMS) for item in module.parameters()}
    if decay == "weights+norms":
        return norms, set()
    if decay == "classifier+norms":
        kept = {id(item) for item in classifier_of(model).parameters()}
        return norms, {id(item) for item in model.parameters()} - kept
    return set(), set()


def classifier_of(model: nn.Module) -> nn.Module:
    """The layer that gives the logits: what a model of ours says it is, or else what looks like one."""
    if isinstance(model, Classified):
        return model.get_classifier()
    path = find_classifier(model)
    if path is None:
        raise RecipeError(
            f'`optimizer.decay` "classifier+norms" needs a network with a linear classifier, got '
            f"{type(model).__name__}, whose last layer with weights is none"
        )
    return model.get_submodule(path)


def build(model: nn.Module, config: OptimizerConfig, device: torch.device) -> Optimizer:
    """The optimizer; on a GPU fused, with its learning rates and step counts in device memory."""
    on_gpu = device.type == "cuda"
    parts = groups(model, config)
    options: dict[str, Any] = {"fused": True} if on_gpu else {}
    if on_gpu:
        for part in parts:
            part["lr"] = torch.tensor(part["lr"], dtype=torch.float32, device=device)
    if config.name == "sgd":
        return SGD(parts, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, **options)
    kind = Adam if config.name == "adam" else AdamW
    return kind(parts, lr=config.lr, betas=config.betas, eps=config.eps, capturable=on_gpu, **options)


class Rates:
    """Sets the learning rate of every group from the schedule's factor; on a GPU it is written in place."""

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig) -> None:
        self.optimizer = optimizer
        self.constant = ("radius",) if config.radius_schedule == "constant" else ()
        self.factor: float | None = None

    def set(self, factor: float) -> None:
        if factor == self.factor:
            return
        self.factor = factor
        for group in self.optimizer.param_groups:
            rate = group["base_lr"] * (1.0 if group["name"] in self.constant else factor)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def by_group(self) -> dict[str, float]:
        """The present rates, computed on the host."""
        factor = 1.0 if self.factor is None else self.factor
        return {
            group["name"]: group["base_lr"] * (1.0 if group["name"] in self.constant else factor)
            for group in self.optimizer.param_groups
        }


def state_by_name(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The optimizer's state as tensors and as plain values, both keyed by "parameter/entry"."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for path, parameter in zip(group["param_names"], group["params"], strict=True):
            for entry, held in optimizer.state.get(parameter, {}).items():
                target: dict[str, Any] = tensors if isinstance(held, torch.Tensor) else values
                target[f"{path}/{entry}"] = held
    return tensors, values


@torch.no_grad()
def load_state_by_name(optimizer: Optimizer, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    """Put back what `state_by_name` gave; a step count goes where the optimizer wants it.

    Moments take the strides of their parameter, as fused optimizers ask: a file holds every tensor contiguous.
    """
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    parameters = {
        path: parameter
        for group in optimizer.param_groups
        for path, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    optimizer.state.clear()
    for key, held in {**tensors, **values}.items():
        path, _, entry = key.rpartition("/")
        parameter = parameters[path]
        if isinstance(held, torch.Tensor):
            place = parameter.device if entry != "step" or on_device else torch.device("cpu")
            like = torch.empty_like(parameter, dtype=held.dtype) if held.shape == parameter.shape else None
            held = held.to(place, copy=True) if like is None or entry == "step" else like.copy_(held)
        optimizer.state[parameter][entry] = held
