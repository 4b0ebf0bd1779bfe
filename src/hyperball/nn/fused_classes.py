"""Modules of other libraries that run fused blocks on a GPU: subclasses made of nn.Sequential and of known ResNets.

A module keeps its parameters, children and place and becomes an instance of a subclass of its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.nn import fused
from hyperball.nn.decoupled import DecoupledConv2d
from hyperball.nn.fused import Parts
from hyperball.nn.fused_chain import Chained, Residual, run_chain

Key = tuple[str, str]


@dataclass(frozen=True)
class Pattern:
    """The attributes that hold a residual unit's blocks; `absent` must be nothing."""

    blocks: tuple[tuple[str, str, str], ...]
    absent: tuple[str, ...] = ()

    def fits(self, module: Any) -> bool:
        """Whether what lies between the blocks does nothing, and one of the blocks may be fused."""
        convolutions = (getattr(module, conv, None) for conv, _, _ in self.blocks)
        return self.is_bare(module) and any(isinstance(conv, DecoupledConv2d) for conv in convolutions)

    def is_bare(self, module: Any) -> bool:
        """Whether what lies between the blocks does nothing."""
        between = (getattr(module, name, None) for name in self.absent)
        return all(held is None or type(held) is nn.Identity for held in between)


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
