"""What a frozen module does on a GPU: blocks of convolution, activation and max pooling, and residual units of them.

A block is one pass behind its convolution, act(f + residual), pooled where a max pooling follows; the lengths of its
rows leave beside it where the next step reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.kernels.decoupled import operation as kernel
from hyperball.nn.decoupled import is_altered
from hyperball.nn.frozen import FrozenConv, is_capturing, stamp
from hyperball.nn.fused_chain import opened

Given = tuple[Tensor, Tensor | None]  # an activation and its rows' lengths, if known
ACTIVATIONS: dict[Any, str] = {nn.ReLU: "relu", nn.PReLU: "prelu", nn.Identity: "none", type(None): "none"}


class OpenUnit:
    """A residual unit whose blocks and shortcut may be run without calling it."""


class OpenBlock:
    """A `DecoupledConvBNAct` whose parts may be run without calling it."""


@dataclass(eq=False)
class Block:
    """A frozen convolution, and the activation and the max pooling behind it; with `carry` lengths leave beside it."""

    conv: FrozenConv
    activation: Any = None
    pool: Any = None
    carry: bool = False
    shifts: dict[torch.dtype, Any] = field(default_factory=dict)
    kinds: dict[tuple[bool, bool], tuple[Any, ...]] = field(default_factory=dict)

    @property
    def reads_lengths(self) -> bool:
        return self.conv.groups == 1 and self.conv.padding_mode == "zeros" and self.conv.needs_norm

    def run(self, given: Given, residual: Tensor | None = None, shift: Tensor | None = None) -> Given:
        """act(f + residual + shift), pooled, and its rows' lengths where this block carries them."""
        x, plan = kernel.as_convolved(given[0]), None
        held = self.conv.prepared(x) if x.dim() == 4 else None
        if held is not None:
            held = held if shift is None else self.with_shift(held, shift)
            plan = self.plan_for(held, x, residual is not None)
        if plan is None or (residual is not None and (residual.shape != plan.shape or residual.dtype != x.dtype)):
            return self.in_turn(given[0], residual, shift), None
        leak = self.activation.weight if type(self.activation) is nn.PReLU else None
        return launches().run(x, held, plan, given[1] if x is given[0] else None, leak, residual)

    def plan_for(self, held: Any, x: Tensor, residual: bool) -> Any:
        """The launches for inputs like x, or None where the input must be padded by hand."""
        key = (x.shape, self.kinds.get((residual, self.carry)) or self.kind(residual))
        if key not in held.plans:
            padded, window = kernel.with_even_padding(*self.conv._padded(x))
            held.plans[key] = launches().planned(held, x.shape, window, key[1]) if padded is x else None
        return held.plans[key]

    def kind(self, residual: bool) -> tuple[Any, ...]:
        """What follows the convolution: an `After` of the launches."""
        leak = self.activation.weight.numel() > 1 if type(self.activation) is nn.PReLU else False
        pool = self.pool and (pair(self.pool.kernel_size), pair(self.pool.stride), pair(self.pool.padding))
        made = (ACTIVATIONS[type(self.activation)], int(leak), residual, self.carry, pool)
        self.kinds[residual, self.carry] = made
        return made

    def with_shift(self, held: Any, shift: Tensor) -> Any:
        """The prepared layer whose output is raised by `shift`, one number a channel."""
        found = self.shifts.get(held.filters.dtype)
        if found is None or found[1] is not shift or found[2] is not held:
            own = held.pointers[-1] if held.constants["SHIFT"] else 0.0
            pointers, constants = (*held.pointers[:-1], own + shift), {**held.constants, "SHIFT": True}
            found = replace(held, pointers=pointers, constants=constants, plans={}), shift, held
            if not is_capturing(shift):
                self.shifts[held.filters.dtype] = found
        return found[0]

    def in_turn(self, x: Tensor, residual: Tensor | None, shift: Tensor | None) -> Tensor:
        made: Tensor = self.conv(x)
        if residual is not None:
            made = made + residual
        if shift is not None:
            made = made + shift.reshape(-1, 1, 1).to(made.dtype)
        made = made if self.activation is None else self.activation(made)
        return made if self.pool is None else self.pool(made)


@cache
def launches() -> Any:
    """The module that imports Triton."""
    from hyperball.kernels.triton.frozen import launch as frozen_launch

    return frozen_launch


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


@dataclass(eq=False)
class Shortcut:
    """A plain convolution and its BatchNorm in evaluation as a convolution alone and a shift per channel."""

    conv: Any
    bn: Any
    kept: dict[torch.dtype, Any] = field(default_factory=dict)

    def folds(self, x: Tensor) -> bool:
        bn = self.bn
        return not bn.training and bn.running_mean is not None and x.dtype in (torch.float32, torch.bfloat16)

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The convolution with filters that BatchNorm scales, and the shift that is left to add."""
        weight, shift = self.folded(x.dtype)
        conv = self.conv
        zeros = (0,) * len(conv.stride)
        made = torch.convolution(x, weight, None, conv.stride, conv.padding, conv.dilation, False, zeros, conv.groups)
        return made, shift

    def folded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        conv, bn = self.conv, self.bn
        sources = [conv.weight, conv.bias, bn.weight, bn.bias, bn.running_mean, bn.running_var]
        now = stamp(sources)
        found = self.kept.get(dtype)
        if found is None or found[0] != now:
            with torch.inference_mode(False), torch.no_grad():
                found = (now, *fold(conv, bn, dtype), sources)
            if not is_capturing(conv.weight):
                self.kept[dtype] = found
        return found[1], found[2]


def fold(conv: Any, bn: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w·γ/sqrt(σ² + ε), and (b − μ)·γ/sqrt(σ² + ε) + β."""
    scale = (bn.running_var.float() + bn.eps).rsqrt()
    scale = scale if bn.weight is None else scale * bn.weight.float()
    mean = bn.running_mean.float() if conv.bias is None else bn.running_mean.float() - conv.bias.float()
    shift = -mean * scale if bn.bias is None else bn.bias.float() - mean * scale
    weight = (conv.weight.float() * scale.reshape(-1, 1, 1, 1)).to(dtype)
    return weight.contiguous(memory_format=torch.channels_last), shift


@dataclass(eq=False)
class Unit:
    """act(blocks(x) + shortcut(x)); a block that is no `Block` is the modules of one."""

    blocks: list[Any]
    shortcut: Any

    @property
    def reads_lengths(self) -> bool:
        return isinstance(self.blocks[0], Block) and self.blocks[0].reads_lengths

    def run(self, given: Given) -> Given:
        added, shift = self.added(given)
        for block in self.blocks[:-1]:
            given = block.run(given) if isinstance(block, Block) else (called(block, given[0], None), None)
        last = self.blocks[-1]
        if isinstance(last, Block):
            return last.run(given, added, shift)
        if shift is not None:
            added = added + shift.reshape(-1, 1, 1).to(added.dtype)
        return called(last, given[0], added), None

    def added(self, given: Given) -> tuple[Tensor, Tensor | None]:
        """What the shortcut adds, and a shift that is still to be added."""
        x, shortcut = given[0], self.shortcut
        if shortcut is None:
            return x, None
        if isinstance(shortcut, Block):
            return shortcut.run(given)[0], None
        if isinstance(shortcut, Shortcut):
            seen = kernel.as_convolved(x)
            return shortcut.run(seen) if shortcut.folds(seen) else (shortcut.bn(shortcut.conv(x)), None)
        return shortcut(x), None


def called(parts: Any, x: Tensor, added: Tensor | None) -> Tensor:
    """The modules of a block in turn, with the residual before the activation."""
    conv, bn, activation = parts
    made: Tensor = bn(conv(x))
    made = made if added is None else made + added
    return made if activation is None else activation(made)


def plan_of(modules: Iterable[Any]) -> list[Any]:
    """What is run one after the other: blocks, residual units and modules."""
    flat, found, place = parts_of(opened(modules)), [], 0
    while place < len(flat):
        step, count = step_at(flat, place)
        found.append(step)
        place += count
    hand_on(found)
    return found


def parts_of(flat: list[Any]) -> list[Any]:
    """The modules with the parts of a `DecoupledConvBNAct` in its place, where what follows needs no pair of it."""
    found: list[Any] = []
    for module, following in zip(flat, [*flat[1:], None], strict=True):
        opens = not is_altered(module) and isinstance(module, OpenBlock)
        if opens and (not module.carry or isinstance(following, OpenBlock)):
            found += opened(list(module))
        else:
            found.append(module)
    return found


def step_at(flat: list[Any], place: int) -> tuple[Any, int]:
    """The step that begins there, and how many modules it takes."""
    module = flat[place]
    if not is_altered(module) and isinstance(module, OpenUnit):
        return unit_of(module), 1
    if not fits(module):
        return module, 1
    count, activation, pool = 1, None, None
    following = [*flat[place + 1 : place + 3], None, None]
    if isinstance(following[0], nn.ReLU | nn.PReLU) and fits_behind(following[0]):
        activation, count = following.pop(0), 2
    if is_plain_pool(following[0]):
        pool, count = following[0], count + 1
    return Block(module, activation, pool), count


def fits(module: Any) -> bool:
    """Whether a module is a frozen 2-d convolution that may run in a block."""
    return type(module) is FrozenConv and module.needs_norm and module.filter.dim() == 4 and not is_altered(module)


def fits_behind(activation: Any) -> bool:
    return type(activation) in ACTIVATIONS and not (activation is not None and is_altered(activation))


def is_plain_pool(module: Any) -> bool:
    """Whether it is a max pooling without dilation, indices and partial windows."""
    if type(module) is not nn.MaxPool2d or is_altered(module):
        return False
    plain = pair(module.dilation) == (1, 1) and not module.ceil_mode and not module.return_indices
    return plain and all(2 * p <= k for p, k in zip(pair(module.padding), pair(module.kernel_size), strict=True))


def unit_of(module: Any) -> Unit:
    """The blocks and the shortcut of a residual unit."""
    blocks: list[Any] = []
    for conv, bn, activation in module.blocks():
        whole = fits(conv) and (bn is None or type(bn) is nn.Identity) and fits_behind(activation)
        whole = whole and not (bn is not None and is_altered(bn))
        blocks.append(Block(conv, activation) if whole else (conv, bn, activation))
    hand_on(blocks)
    return Unit(blocks, shortcut_of(module.shortcut()))


def shortcut_of(module: Any) -> Any:
    """A block, a plain convolution with its BatchNorm, or the module itself."""
    if module is None:
        return None
    flat = opened([module])
    if len(flat) == 1 and fits(flat[0]):
        return Block(flat[0])
    if [type(part) for part in flat] == [nn.Conv2d, nn.BatchNorm2d] and not any(map(is_altered, flat)):
        conv: Any = flat[0]
        if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
            return Shortcut(*flat)
    return module


def hand_on(steps: list[Any]) -> None:
    """Let blocks carry lengths where the next step reads them."""
    for step, following in pairwise(steps):
        last = step.blocks[-1] if isinstance(step, Unit) else step
        if isinstance(last, Block):
            last.carry = reads_lengths(following)


def reads_lengths(step: Any) -> bool:
    return isinstance(step, Block | Unit) and step.reads_lengths


def run_plan(steps: list[Any], given: Given) -> Given:
    """x and its rows' lengths, if known, through the steps."""
    for step in steps:
        given = step.run(given) if isinstance(step, Block | Unit) else (step(given[0]), None)
    return given
