"""Fused blocks in models of other libraries: known modules get a forward that runs them on a GPU.

Recognized are runs of convolution, BatchNorm and ReLU, PReLU or nothing in nn.Sequential (and in subclasses with its
forward), and, by their classes, the residual blocks and networks of torchvision's and timm's ResNets. A module keeps
its parameters, children and place and becomes an instance of a subclass of its class.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.nn import fused
from hyperball.nn.decoupled import DecoupledConv2d
from hyperball.nn.fused import Parts
from hyperball.nn.fused_chain import Chained, Residual, candidate_at, candidates, opened, run_chain

Key = tuple[str, str]


@dataclass(frozen=True)
class Pattern:
    """The attributes that hold a residual unit's blocks; `absent` must be nothing."""

    blocks: tuple[tuple[str, str, str], ...]
    absent: tuple[str, ...] = ()

    def fits(self, module: Any) -> bool:
        """Whether what lies between the blocks does nothing, and one of the blocks may be fused."""
        between = (getattr(module, name, None) for name in self.absent)
        empty = all(held is None or type(held) is nn.Identity for held in between)
        convolutions = (getattr(module, conv, None) for conv, _, _ in self.blocks)
        return empty and any(isinstance(conv, DecoupledConv2d) for conv in convolutions)


def pattern(count: int, activation: str, absent: tuple[str, ...] = ()) -> Pattern:
    """conv1, bn1, … for `count` blocks; `activation` may hold the block's number as {}."""
    return Pattern(tuple((f"conv{k}", f"bn{k}", activation.format(k)) for k in range(1, count + 1)), absent)


BETWEEN = ("drop_block", "aa", "se", "drop_path")
TORCHVISION, TIMM = "torchvision.models.resnet", "timm.models.resnet"
PATTERNS: dict[Key, Pattern] = {
    (TORCHVISION, "BasicBlock"): pattern(2, "relu"),
    (TORCHVISION, "Bottleneck"): pattern(3, "relu"),
    (TIMM, "BasicBlock"): pattern(2, "act{}", BETWEEN),
    (TIMM, "Bottleneck"): pattern(3, "act{}", BETWEEN),
}
STAGES = ("layer1", "layer2", "layer3", "layer4")


class Swapped:
    """What a module becomes: an instance of a subclass that is made of its class, which copies and pickles name."""

    plain_class: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (instance_of, (self.plain_class,), *made[2:])


class FusedSequential(Swapped, Chained):
    """nn.Sequential, in fused blocks on a GPU."""

    def chained(self) -> list[Any]:
        return list(self)  # type: ignore[call-overload]

    def forward(self, input: Any) -> Any:
        return run_chain(self.chained(), input)


class FusedResidual(Swapped, Residual):
    """A residual block of torchvision or timm."""

    def blocks(self) -> list[Parts]:
        held = PATTERNS[key_of(self.plain_class)].blocks
        return [(getattr(self, conv), getattr(self, norm), getattr(self, act)) for conv, norm, act in held]

    def shortcut(self) -> nn.Module | None:
        held: nn.Module | None = getattr(self, "downsample", None)
        return held

    def in_turn(self, x: Tensor) -> Tensor:
        made: Tensor = self.plain_class.forward(self, x)
        return made


class FusedNetwork(Swapped, Chained):
    """The stem and the stages of a ResNet of torchvision or timm."""

    activation: str

    def chained(self) -> list[Any]:
        return [getattr(self, name) for name in ("conv1", "bn1", self.activation, "maxpool", *STAGES)]


class TorchvisionNetwork(FusedNetwork):
    activation = "relu"

    def _forward_impl(self: Any, x: Tensor) -> Any:
        if not fused.may_fuse(x):
            return self.plain_class._forward_impl(self, x)
        return self.fc(torch.flatten(self.avgpool(self.run_chained(x)), 1))


class TimmNetwork(FusedNetwork):
    activation = "act1"

    def forward_features(self: Any, x: Tensor) -> Any:
        if self.grad_checkpointing or not fused.may_fuse(x):
            return self.plain_class.forward_features(self, x)
        return self.run_chained(x)


NETWORKS: dict[Key, type[FusedNetwork]] = {
    (TORCHVISION, "ResNet"): TorchvisionNetwork,
    (TIMM, "ResNet"): TimmNetwork,
}


def key_of(kind: type) -> Key:
    return kind.__module__, kind.__name__


@cache
def fused_class(kind: Any) -> Any:
    """The subclass of a recognized class that runs fused blocks."""
    mixin: Any = FusedResidual if key_of(kind) in PATTERNS else NETWORKS.get(key_of(kind), FusedSequential)
    return type(f"Fused{kind.__name__}", (mixin, kind), {"__module__": kind.__module__, "plain_class": kind})


def instance_of(kind: Any) -> Any:
    """An instance whose state is still to be set."""
    return fused_class(kind).__new__(fused_class(kind))


def recognized(model: nn.Module) -> list[nn.Module]:
    """The modules that would run fused blocks if their class were swapped."""
    return [module for module in model.modules() if not isinstance(module, Chained | Residual) and is_known(module)]


def is_known(module: nn.Module) -> bool:
    key = key_of(type(module))
    if key in PATTERNS:
        return PATTERNS[key].fits(module)
    if key in NETWORKS:
        return has_blocks([getattr(module, name, None) for name in ("conv1", "bn1")]) or any(
            is_known(part) for name in STAGES for part in module.get_submodule(name).modules()
        )
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and has_blocks(opened(module))  # type: ignore[arg-type]


def has_blocks(flat: list[Any]) -> bool:
    """Whether a block, or a residual unit that holds one, is among modules that are called in turn."""
    units = any(isinstance(part, Residual) or (key_of(type(part)) in PATTERNS and is_known(part)) for part in flat)
    return units or any(candidate_at(flat, place) is not None for place in range(len(flat)))


def swap_all(model: nn.Module) -> list[tuple[nn.Module, type]]:
    """Swap the classes of all recognized modules; the modules with the classes that they had."""
    found = [(module, type(module)) for module in recognized(model)]
    for module, kind in found:
        swapped: Any = kind
        module.__class__ = fused_class(swapped)
    return found


def fuse_blocks(model: nn.Module) -> tuple[str, ...]:
    """Let decoupled convolutions run with the BatchNorm and the activation behind them on a GPU, in place.

    Returns the paths of the convolutions that do. State dicts, parameters and, on the CPU, every number stay the same.
    Recognized are nn.Sequential and the ResNets of torchvision and timm; all else runs as it did.

    >>> import torch, hyperball as hb
    >>> conv = hb.nn.DecoupledConv2d(3, 8, 3)
    >>> hb.convert.fuse_blocks(torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), torch.nn.ReLU()))
    ('0',)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    swapped = swap_all(model)
    inside, reasons = fused_paths(model)
    if not inside:
        for module, kind in swapped:
            module.__class__ = kind
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
        raise ValueError(f"no block to fuse in {type(model).__name__}: {why or 'none is recognized'}")
    return inside


def fused_paths(model: nn.Module) -> tuple[tuple[str, ...], Counter[str]]:
    """The paths of the convolutions in fused blocks, and how often which reason speaks against one."""
    names = {module: name for name, module in model.named_modules()}
    held = {parts[0]: fused.unfit_for_gpu(parts) for parts in candidates(model)}
    inside = tuple(name for conv, name in names.items() if held.get(conv) == "")
    return inside, Counter(reason for reason in held.values() if reason)
