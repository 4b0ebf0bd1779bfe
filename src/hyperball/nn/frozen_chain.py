"""Frozen modules in turn on a GPU: activation, residual sum and max pooling in one pass behind each convolution.

A module that runs others in turn, an nn.Sequential, a residual unit or a network, keeps its parameters, children and
place and becomes an instance of a subclass of its class. What it does on a GPU is found at the first call and kept
until a module inside is exchanged or gets hooks; a module with hooks is called as itself, with its activation alone. On
a CPU, in compiled and exported graphs and where gradients are asked for, every module is called in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.kernels.decoupled import inference
from hyperball.kernels.norms import norm
from hyperball.nn.decoupled import GLOBAL_HOOKS
from hyperball.nn.frozen import FrozenConv
from hyperball.nn.frozen_blocks import Block, OpenBlock, OpenUnit, Unit, plan_of, run_plan
from hyperball.nn.fused import DecoupledConvBNAct, activation_of
from hyperball.nn.fused_chain import Chained, Residual
from hyperball.nn.fused_classes import NETWORKS, PATTERNS, fused_class, key_of


class FrozenRun:
    """What a module that runs others in turn becomes; `plain_class` is the class that it had, which pickles name."""

    plain_class: Any

    def frozen_parts(self) -> list[Any]:
        """The modules that are run in turn."""
        raise NotImplementedError

    def frozen_plan(self: Any, x: Any) -> list[Any] | None:
        """The steps on a GPU, or None where modules are called in turn."""
        if not inference.on_gpu(x) or any(GLOBAL_HOOKS):
            return None
        parts = self.frozen_parts()
        now: list[int] = []
        for part in parts:
            note(part, now)
        kept = self.__dict__.get("_kept")
        if kept is None or kept[0] != now:
            kept = self.__dict__["_kept"] = now, plan_of(parts), [part for top in parts for part in top.modules()]
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters(kept[2])):
            return None
        steps: list[Any] = kept[1]
        return steps

    def __getstate__(self) -> dict[str, Any]:
        return {name: held for name, held in self.__dict__.items() if name != "_kept"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (instance_of, (self.plain_class,), *made[2:])


def parameters(modules: Iterable[nn.Module]) -> Iterable[Tensor | None]:
    return (held for module in modules for held in module._parameters.values())


def note(module: Any, found: list[int]) -> None:
    """Note which modules there are, and which have hooks or a forward of their own."""
    held = module.__dict__
    altered = (
        held["_forward_hooks"] or held["_forward_pre_hooks"] or held["_backward_hooks"]
        or held["_backward_pre_hooks"] or "forward" in held
    )  # fmt: skip
    found.append(-id(module) if altered else id(module))
    for child in held["_modules"].values():
        if child is not None:
            note(child, found)


class FrozenSequential(FrozenRun, Chained):
    """nn.Sequential."""

    def chained(self) -> list[Any]:
        return list(self)  # type: ignore[call-overload]

    frozen_parts = chained

    def forward(self, input: Any) -> Any:
        steps = self.frozen_plan(input)
        return super().forward(input) if steps is None else run_plan(steps, (input, None))[0]  # type: ignore[misc]


class FrozenChained(FrozenRun):
    """A network with `run_chained`."""

    def frozen_parts(self: Any) -> list[Any]:
        parts: list[Any] = self.chained()
        return parts

    def run_chained(self, x: Tensor) -> Tensor:
        steps = self.frozen_plan(x)
        if steps is None:
            made: Tensor = super().run_chained(x)  # type: ignore[misc]
            return made
        return run_plan(steps, (x, None))[0]


class FrozenUnit(FrozenRun, OpenUnit):
    """A residual unit."""

    def frozen_parts(self) -> list[Any]:
        return [self]

    def forward(self: Any, x: Tensor) -> Tensor:
        steps = self.frozen_plan(x)
        if steps is None or not isinstance(steps[0], Unit):  # a hook on the unit itself is served by its call
            made: Tensor = super().forward(x)  # type: ignore[misc]
            return made
        return steps[0].run((x, None))[0]


class FrozenBlock(FrozenRun, OpenBlock):
    """A `DecoupledConvBNAct`."""

    def frozen_parts(self) -> list[Any]:
        return list(self)  # type: ignore[call-overload]

    def forward(self: Any, input: Any, residual: Any = None) -> Any:
        x, lengths = input if isinstance(input, tuple) else (input, None)
        steps, fits = self.frozen_plan(x), lengths is None or lengths.shape == (x.shape[0], 1, *x.shape[2:])
        if steps is None or len(steps) != 1 or not isinstance(steps[0], Block) or not fits:
            return super().forward(input, residual)  # type: ignore[misc]
        steps[0].carry = self.carry
        given = (x, None if lengths is None else lengths.flatten().to(torch.float32))
        out, r = steps[0].run(given, None if residual is None else activation_of(residual))
        if not self.carry:
            return out
        return out, norm(out, (1,)) if r is None else r.view(out.shape[0], 1, *out.shape[2:])

    def explained(self: Any) -> str:
        text: str = self[0].explained()
        return text


@cache
def frozen_class(kind: Any) -> Any:
    """The subclass for a class of modules that run others in turn, or None."""
    plain = getattr(kind, "plain_class", kind)
    base = fused_class(plain) if key_of(plain) in {**PATTERNS, **NETWORKS} else plain
    mixin: Any = None
    if issubclass(base, Residual) and base.forward is Residual.forward:
        mixin = FrozenUnit
    elif issubclass(base, DecoupledConvBNAct):
        mixin = FrozenBlock if base.forward is DecoupledConvBNAct.forward else None
    elif issubclass(base, nn.Sequential):
        mixin = FrozenSequential if base.forward is nn.Sequential.forward else None
    elif issubclass(base, Chained):
        mixin = FrozenChained
    if mixin is None:
        return None
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "plain_class": plain}
    return type(plain.__name__, (mixin, base), names)


def instance_of(kind: Any) -> Any:
    """An instance whose state is still to be set."""
    made = frozen_class(kind)
    return made.__new__(made)


def run_in_blocks(model: nn.Module) -> None:
    """Let the modules that run frozen convolutions in turn do so in blocks on a GPU, in place."""
    for module in list(model.modules()):
        before: Any = type(module)
        kind = frozen_class(before)
        if kind is not None and not isinstance(module, FrozenRun) and holds_block(module):
            module.__class__ = kind


def holds_block(module: nn.Module) -> bool:
    """Whether a frozen convolution is inside, and nothing lies between the blocks of another library's unit."""
    if not any(isinstance(part, FrozenConv) for part in module.modules()):
        return False
    pattern = PATTERNS.get(key_of(getattr(type(module), "plain_class", type(module))))
    return pattern is None or pattern.is_bare(module)
