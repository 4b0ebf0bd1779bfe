"""Launches of the Triton kernels over activations: the epilogue and its backward, alone or with BatchNorm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.triton.call import Launch, ordered
from hyperball.kernels.triton.decoupled import epilogue, gradients, statistics
from hyperball.kernels.triton.decoupled.code import Code
from hyperball.kernels.triton.decoupled.launch import floats, kept, power, steps, tiles_for

PARAMETERS = ("alpha", "beta", "rho", "shape", "bend", "factor", "stretch", "slopes", "turns")
WIDE = 8  # channels of a program that combines what other programs left


@dataclass(frozen=True, eq=False)
class Rule:
    """What every kernel over activations is told beside tensors: the operator, and how many channels and rows."""

    code: Code
    rows: int
    channels: int
    groups: int
    pieces: int
    turns: int
    device: torch.device
    constants: dict[str, Any]


@kept
def rule_for(
    code: Code, given: tuple[bool, ...], rows: int, channels: int, groups: int, pieces: int, turns: int,
    dtype: torch.dtype, device: torch.device,
) -> Rule:  # fmt: skip
    """The rule of an operator of whose parameters those are `given` as tensors; `channels` are those of a group."""
    names = ("alpha", "beta", "rho", "shape", "bend")
    numbers = {
        name.upper(): None if tensor else (1.0 if getattr(code, name) is None else getattr(code, name))
        for name, tensor in zip(names, given[:5], strict=True)
    }
    if code.unit != "none":
        numbers["RHO"] = None
    constants = {
        **numbers,
        "GROUPS": groups,
        "C": channels,
        "ROW": code.radial,
        "ANG": code.angular,
        "PIECES": max(pieces, 1),
        "TURNS": max(turns, 1),
        "ROOT_EPS": code.eps**0.5,
        "EPS": code.angular_eps,
        "FACTOR": given[5],
        "STRETCH": given[6],
        "LIFT": dtype == torch.float16,
        "FAST": device.type == "cuda" and dtype != torch.float32,
    }
    return Rule(code, rows, channels, groups, pieces, turns, device, constants)


def pointers(y: Tensor, n: Tensor, p: Tensor, scalars: Tensor, parameters: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What every kernel over activations reads first: the response y, the norms n and the operator's parameters."""
    factor, stretch, slopes, turns = parameters[5:]
    return (
        y, n, p, p if factor is None else factor, p if stretch is None else stretch, scalars,
        p if slopes is None else slopes, p if turns is None else turns,
    )  # fmt: skip


class Operands(NamedTuple):
    """The response, whose memory others are like, the pointers of `pointers`, and the operator."""

    y: Tensor
    p: Tensor
    pointers: tuple[Tensor, ...]
    rule: Rule


class Block(NamedTuple):
    """What follows the convolution in a fused block: BatchNorm's stats, an activation, a residual and lengths."""

    stats: Tensor
    activation: str = "none"
    leak: Tensor | None = None
    residual: Tensor | None = None
    lengths: bool = False


def forward(o: Operands, block: Block) -> tuple[Tensor, Tensor]:
    """act(BatchNorm(f) + residual), like y, and the lengths of its rows (one number where they are not asked)."""
    out = torch.empty_like(o.y)
    r = floats(o.y.device, o.rule.rows if block.lengths else 1)
    leak = o.p if block.leak is None else block.leak
    residual = o.p if block.residual is None else block.residual
    if o.rule.rows:
        launch = forward_launch(
            o.rule, block.activation, max(steps([block.leak])[0], 0), block.residual is not None, block.lengths
        )
        launch(*o.pointers, block.stats, leak, residual, out, r)
    return out, r


@kept
def forward_launch(rule: Rule, activation: str, leak: int, residual: bool, lengths: bool) -> Launch:
    """The epilogue; without an `activation` ("none" counts as one) it is f alone, without BatchNorm."""
    t = tiles_for("forward", rule.rows, rule.channels, rule.device)
    values = {
        **rule.constants, **t.constants(), "rows": rule.rows, "NORM": bool(activation), "ACT": activation or "none",
        "LEAK": leak, "RESIDUAL": residual, "LENGTHS": lengths,
    }  # fmt: skip
    kernel = epilogue.forward_kernel
    return Launch(kernel, (t.programs, rule.groups), ordered(kernel, 13, values), t.warps, rule.device)


def batch_statistics(
    o: Operands, weight: Tensor | None, bias: Tensor | None, eps: float, running: tuple[Tensor, Tensor] | None
) -> Tensor:
    """[5, channels]: mean, variance, 1/sqrt(variance + eps), scale and shift, of this batch or as running."""
    device, channels = o.y.device, o.rule.groups * o.rule.channels
    summed, combined, programs = _statistics(o.rule, eps, weight is not None, running is None)
    stats = floats(device, 5, channels)
    if running is None:
        means, squares = floats(device, 2, -(-programs * channels // 4) * 4).unbind(0)
        summed(*o.pointers, means, squares)
    else:
        means, squares = running
    combined(means, squares, o.p if weight is None else weight, o.p if bias is None else bias, stats)
    return stats


@kept
def _statistics(rule: Rule, eps: float, affine: bool, batch: bool) -> tuple[Launch, Launch, int]:
    t = tiles_for("statistics", rule.rows, rule.channels, rule.device, rule.groups)
    values = {**rule.constants, **t.constants(), "rows": rule.rows, "tiles": t.tiles}
    kernel = statistics.statistics_kernel
    grid = (rule.groups * t.parts, t.programs)
    summed = Launch(kernel, grid, ordered(kernel, 10, values), t.warps, rule.device)
    channels = rule.groups * rule.channels
    rest = (rule.rows, t.per_program, t.programs, channels, eps, affine, batch, WIDE, power(t.programs))
    combined = Launch(statistics.normalize_kernel, (-(-channels // WIDE),), rest, 8, rule.device)
    return summed, combined, t.programs


class Incoming(NamedTuple):
    """The gradient of a block's output, and what the gradient before its activation is formed from."""

    v: Tensor
    source: str = "done"
    held: Tensor | None = None
    lengths: Tensor | None = None
    dlengths: Tensor | None = None
    activation: str = "none"
    leak: Tensor | None = None

    def pointers(self) -> list[Tensor]:
        optional = (self.held, self.lengths, self.dlengths, self.leak)
        return [self.v, *[self.v if held is None else held for held in optional]]

    def kind(self) -> tuple[str, int, str, bool]:
        """ACT, LEAK, SOURCE and LENGTHS of the kernels."""
        return self.activation, max(steps([self.leak])[0], 0), self.source, self.dlengths is not None


KIND = ("ACT", "LEAK", "SOURCE", "LENGTHS")
ALONE = ("none", 0, "done", False)  # the kind of a convolution without a block


def reduce(o: Operands, i: Incoming, stats: Tensor, batch: bool, write: bool) -> tuple[Tensor, Tensor]:
    """[5, channels]: dγ, dβ, dslope and the coefficients of df; and the gradient before the activation, if written."""
    device, channels = o.y.device, o.rule.groups * o.rule.channels
    summed, combined, programs = _reduce(o.rule, i.kind(), batch, write)
    parts, inner = floats(device, programs, 3, channels), floats(device, 5, channels)
    out = torch.empty_like(o.y) if write else o.y
    summed(*i.pointers(), stats, *o.pointers, out, parts)
    combined(parts, stats, inner)
    return inner, out


@kept
def _reduce(rule: Rule, kind: tuple[Any, ...], batch: bool, write: bool) -> tuple[Launch, Launch, int]:
    t = tiles_for("reduce", rule.rows, rule.channels, rule.device, rule.groups)
    values = {
        **rule.constants, **t.constants(), **dict(zip(KIND, kind, strict=True)), "rows": rule.rows, "tiles": t.tiles,
        "WRITE": write,
    }  # fmt: skip
    kernel = statistics.reduce_kernel
    grid = (rule.groups * t.parts, t.programs)
    summed = Launch(kernel, grid, ordered(kernel, 16, values), t.warps, rule.device)
    channels = rule.groups * rule.channels
    rest = (rule.rows, t.programs, channels, batch, kind[0] == "prelu", WIDE, min(power(t.programs), 1024))
    combined = Launch(statistics.coefficients_kernel, (-(-channels // WIDE),), rest, 8, rule.device)
    return summed, combined, t.programs


@kept
def placed(pieces: int, turns: int, needed: tuple[bool, ...]) -> tuple[dict[str, int], int]:
    """In which row of the gradients each needed parameter begins (-1: not needed), and how many rows there are."""
    places, count = {}, 0
    for name, size, need in zip(PARAMETERS, (1,) * 7 + (pieces, turns), needed, strict=True):
        places[name] = count if need else -1
        count += size if need else 0
    return places, count


def backward(o: Operands, i: Incoming, stats: Tensor, inner: Tensor, needed: tuple[bool, ...], made: Any) -> None:
    """Fill dy, t = dn/n by part of the channels, and gradients of `needed` parameters [programs, rows, channels]."""
    if o.rule.rows:
        launch = backward_launch(o.rule, i.kind(), True, needed)[0]
        launch(*i.pointers(), stats, inner, *o.pointers, *made)


@kept
def backward_launch(
    rule: Rule, kind: tuple[Any, ...], norm: bool, needed: tuple[bool, ...]
) -> tuple[Launch, int, int, int]:
    """The launch of dy, t and the parameters' gradients; the parts of t, the programs and the gradients' rows."""
    t = tiles_for("backward" if norm else "alone", rule.rows, rule.channels, rule.device, rule.groups)
    places, count = placed(rule.pieces, rule.turns, needed)
    values = {
        **rule.constants, **t.constants(), **dict(zip(KIND, kind, strict=True)), "rows": rule.rows, "tiles": t.tiles,
        "NORM": norm, "SLOTS": count, "SLOPE_ROWS": power(rule.pieces), "TURN_ROWS": power(rule.turns),
        **{f"AT_{name.upper()}": place for name, place in places.items()},
    }  # fmt: skip
    kernel = gradients.backward_kernel
    grid = (rule.groups * t.parts, t.programs)
    launch = Launch(kernel, grid, ordered(kernel, 18, values), t.warps, rule.device)
    return launch, t.parts, t.programs, count
