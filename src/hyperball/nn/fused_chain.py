"""Modules in turn, in fused blocks where a decoupled convolution, BatchNorm and an activation follow each other.

On a GPU a block hands the lengths of its activation to the block behind it, through nn.Sequential and from one residual
unit to the next. Modules keep their places and names: they are only called together. A module with hooks is called as
itself, with its activation alone and all of the gradient; so is everything on the CPU and while a graph is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from hyperball.nn import fused
from hyperball.nn.decoupled import DecoupledConv2d, is_altered
from hyperball.nn.fused import Parts, WithLengths

Given = Tensor | WithLengths


class Chained:
    """A module that runs others in turn; where it is an nn.Sequential, its own children and nothing else."""

    def chained(self) -> list[Any]:
        """The modules that it runs in turn, in order."""
        raise NotImplementedError

    def run_chained(self, x: Tensor) -> Tensor:
        """x through `chained`, fused where it can be."""
        return run_chain(self.chained(), x)


class Residual:
    """act(blocks(x) + shortcut(x)), with the sum before the last block's activation."""

    def blocks(self) -> list[Parts]:
        """Convolution, BatchNorm and activation of every block; the last activation follows the sum."""
        raise NotImplementedError

    def shortcut(self) -> nn.Module | None:
        """What the input goes through before it is added, or None for nothing."""
        raise NotImplementedError

    def in_turn(self, x: Tensor) -> Tensor:
        """The same by calling module after module."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return fused.activation_of(run_residual(self, x)) if fused.may_fuse(x) else self.in_turn(x)


def run_chain(modules: Iterable[Any], x: Tensor) -> Tensor:
    """x through the modules in turn, fused where it can be."""
    if not fused.may_fuse(x):
        for module in modules:
            x = module(x)
        return x
    given: Given = x
    todo = steps(modules)
    for place, step in enumerate(todo):
        carry = place + 1 < len(todo) and reads_lengths(todo[place + 1])
        if isinstance(step, tuple):
            given = fused.run_block(step, given, carry=carry)
        elif is_open_residual(step):
            given = run_residual(step, given, carry)
        else:
            given = step(fused.activation_of(given))
    return fused.activation_of(given)


def run_residual(unit: Any, given: Given, carry: bool = False) -> Given:
    """A residual unit's blocks, and its shortcut, which reads the activation that the first block reads."""
    x, blocks = fused.activation_of(given), unit.blocks()
    if all(fused.unfit(parts) for parts in blocks):
        made: Tensor = unit.in_turn(x)
        return made
    shortcut = unit.shortcut()
    added = x if shortcut is None else shortcut(x)
    for parts, following in pairwise(blocks):
        given = fused.run_block(parts, given, carry=fused.takes_lengths(following))
    return fused.run_block(blocks[-1], given, added, carry)


def steps(modules: Iterable[Any]) -> list[Any]:
    """What is called one after the other: the parts of a block together, or a module."""
    flat, found, place = opened(modules), [], 0
    while place < len(flat):
        step: Any = block_at(flat, place) or flat[place]
        found.append(step)
        place += sum(part is not None for part in step) if isinstance(step, tuple) else 1
    return found


def opened(modules: Iterable[Any]) -> list[Any]:
    """The modules with those of nn.Sequential in its place, and without nn.Identity."""
    flat: list[Any] = []
    for module in modules:
        if type(module) is nn.Identity and not is_altered(module):
            continue
        if opens(module):
            flat += opened(module)
        else:
            flat.append(module)
    return flat


def opens(module: nn.Module) -> bool:
    """Whether a module does nothing but call its children in turn, which may then be called without it."""
    runs = type(module) is nn.Sequential or (isinstance(module, Chained) and isinstance(module, nn.Sequential))
    return runs and not is_altered(module)


def block_at(flat: Sequence[Any], place: int) -> Parts | None:
    """The block that begins there, with its activation where there is one, or None."""
    candidate = candidate_at(flat, place)
    if candidate is None:
        return None
    conv, batch_norm, _ = candidate
    return next((parts for parts in (candidate, (conv, batch_norm, None)) if not fused.unfit(parts)), None)


def candidate_at(flat: Sequence[Any], place: int) -> Parts | None:
    """A convolution and a BatchNorm, and an activation if one follows, by their classes alone."""
    conv, batch_norm, activation = (*flat[place : place + 3], None, None, None)[:3]
    if not isinstance(conv, DecoupledConv2d) or not isinstance(batch_norm, nn.BatchNorm2d):
        return None
    return conv, batch_norm, activation if isinstance(activation, nn.ReLU | nn.PReLU) else None


def is_open_residual(module: Any) -> bool:
    """Whether a residual unit may be run without calling it as a module."""
    own = isinstance(module, Residual) and type(module).forward is Residual.forward
    return own and not is_altered(module)


def reads_lengths(step: Any) -> bool:
    """Whether a step makes use of the lengths of its input."""
    if isinstance(step, tuple):
        return fused.takes_lengths(step)
    return is_open_residual(step) and fused.takes_lengths(step.blocks()[0])


def candidates(model: nn.Module) -> Iterator[Parts]:
    """Every convolution, BatchNorm and activation that the model's forward would run as a block if it can be fused."""
    for module in model.modules():
        if isinstance(module, Residual):
            yield from (parts for parts in module.blocks() if isinstance(parts[0], DecoupledConv2d))
        elif isinstance(module, Chained):
            flat = opened(module.chained())
            found = (candidate_at(flat, place) for place in range(len(flat)))
            yield from (parts for parts in found if parts is not None)
