"""What is known of a decoupled convolution before its numbers: launches, sizes of memory, kept by shapes and dtypes.

A plan holds no tensor. Memory for small float32 maps is taken in one piece and cut, since a piece costs a call alone
what its bytes cost a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton.decoupled import launch, passes
from hyperball.kernels.triton.decoupled.code import read
from hyperball.kernels.triton.decoupled.ops import empty_filters, is_whole, memory_format
from hyperball.kernels.triton.decoupled.slots import PARAMETERS, Kind, picks, sums_dtype, wanted
from hyperball.kernels.triton.implicit import choice as implicit_choice

Shape = tuple[int, ...]
KEPT = 1024  # plans that are kept


def nothing(*tensors: Tensor) -> None:
    """The launch over no rows."""


def even(size: int) -> int:
    """A size in float32 numbers that leaves what comes behind it aligned."""
    return -(-size // 4) * 4


class Plan:
    """The launches of a decoupled convolution forward, and by what is needed those of its backward."""

    def __init__(
        self, code: str, shape: Shape, dtype: torch.dtype, device: torch.device, weight: Shape, strides: Shape,
        kinds: tuple[Kind, ...], window: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self.text, self.code, self.window, self.kinds, self.device = code, read(code), window, kinds, device
        self.given = tuple([k for k, kind in enumerate(kinds) if kind is not None])
        self.half, self.batch = dtype == torch.float16, self.code.unit == "batch"
        self.channels, self.groups = weight[0], window[3]
        g = self.geometry = launch.geometry(shape, weight[2:], *window)
        self.norms = g.positions * g.groups
        like = torch.empty_strided(weight, strides, device="meta")
        self.taps, self.whole = launch.taps_to_move(like), is_whole(like)
        self.filters = empty_filters(like, dtype).stride()
        self.weight_shape, self.strides, self.dtype, self.format = weight, strides, dtype, memory_format(like)
        self.zeros = (0,) * len(window[0])
        self._forward(shape, like.numel() // max(self.channels, 1))
        self.gradients: dict[tuple[tuple[bool, ...], bool], Gradients] = {}
        self.of_given: dict[tuple[bool, ...], Gradients] = {}
        self.calls, self.at = 0, None  # `addresses.Forward`, once it is ready
        self.shape, self.output = shape, (shape[0], self.channels, *g.out[3 - len(window[0]) :])
        self.implicit = implicit_of(self, False)

    def _forward(self, shape: Shape, size: int) -> None:
        g, code, device = self.geometry, self.code, self.device
        self.per_group, self.size = shape[1] // g.groups, size
        self.lengths: Any = launch.lengths_launch(g.rows, g.groups, self.per_group, device) if g.rows else nothing
        boxed, blocks = launch.box_launch(g, code.unit_eps, self.batch, self.half, device)
        self.box: Any = boxed if blocks else nothing
        steps = tuple([-1 if kind is None else int(numel(kind[0]) > 1) for kind in self.kinds[:5]])
        self.step = steps[2]
        self.prepare = [
            launch.prepare_launch(
                self.channels, size, self.taps, steps, code, self.half, track, max(1, blocks), self.norms, device
            )
            for track in (False, True)
        ]
        self.begin: Any = None  # of filters, parameters and norms in one launch, where they do not depend on each other
        if blocks and not self.batch and not self.half:
            self.begin = launch.prepare_box_launch(self.channels, size, self.taps, steps, code, g, device)
        given = tuple([kind is not None for kind in self.kinds])
        pieces, turns = (0 if kind is None else kind[0][0] for kind in self.kinds[7:])
        rows, channels = self.norms // g.groups, self.channels // g.groups
        self.rule = passes.rule_for(code, given, rows, channels, g.groups, pieces, turns, self.dtype, device)
        self.epilogue: Any = passes.forward_launch(self.rule, "", 0, False, False) if rows else nothing
        self.passing = (even(2 * max(1, blocks)), g.rows * g.groups)
        self.kept = (even(self.channels), even(5 * self.channels), 4, self.norms)

    def cut(self, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Float32 memory of these sizes in one piece."""
        whole = torch.empty(sum(sizes), device=self.device, dtype=torch.float32)
        made: Any = whole.split_with_sizes(sizes)
        return made

    def outputs(self, joint: bool) -> tuple[Tensor, ...]:
        """Memory for m, p [5, channels], (unit, lift) and n: in one piece, or each by itself as an operator's must."""
        if joint:
            return self.cut(self.kept)
        device, c = self.device, self.channels
        return (
            launch.floats(device, c), launch.floats(device, 5, c), launch.floats(device, 2),
            launch.floats(device, self.norms),
        )  # fmt: skip

    def empty_filters(self) -> Tensor:
        return torch.empty_strided(self.weight_shape, self.filters, dtype=self.dtype, device=self.device)

    def spread(self, present: Sequence[Any], absent: Any = None) -> list[Any]:
        """Something of the parameters that are given as something of all nine."""
        held = [absent] * PARAMETERS
        for place, item in zip(self.given, present, strict=True):
            held[place] = item
        return held

    def for_given(self, needed: tuple[bool, ...]) -> Gradients:
        """The backward for what is needed of x, the weight and the given parameters."""
        found = self.of_given.get(needed)
        if found is None:
            found = self.of_given[needed] = self.for_needs((*needed[:2], *self.spread(needed[2:], False)))
        return found

    def for_needs(self, needed: tuple[bool, ...], norm: bool = False) -> Gradients:
        """The backward for what is needed of x, the weight and all nine parameters; with `norm`, through BatchNorm."""
        found = self.gradients.get((needed, norm))
        if found is None:
            found = self.gradients[needed, norm] = Gradients(self, needed, norm)
        return found


class Gradients:
    """The launches of a plan's backward, for what is needed of x, the weight and the nine parameters."""

    def __init__(self, plan: Plan, needed: tuple[bool, ...], norm: bool) -> None:
        code, g, device, channels = plan.code, plan.geometry, plan.device, plan.channels
        self.needed, self.wanted = needed, wanted(code, needed)
        self.calls, self.at = 0, None  # `addresses.Backward`, once it is ready
        rule = plan.rule
        places, count = passes.placed(rule.pieces, rule.turns, self.wanted)
        alone, t_parts, programs, count = passes.backward_launch(rule, passes.ALONE, norm, self.wanted)
        self.epilogue: Any = alone if rule.rows else nothing
        given = launch.finish_arguments(
            programs, count, channels, plan.size, plan.taps, plan.step, code, plan.half, needed[1], places["rho"]
        )
        pulls, eps = channels if plan.batch else 0, code.unit_eps
        self.finish = launch.finish_launch(given, device)
        self.finish_box = launch.finish_box_launch(given, g, eps, plan.batch, t_parts, device)
        self.box: Any = launch.box_transposed_launch(g, eps, pulls, t_parts, device) if g.rows else nothing
        add = launch.add_launch(g.rows, g.groups, plan.per_group, pulls, plan.norms, device) if g.rows else nothing
        self.add: Any = add
        self.mask = (needed[0], needed[1], False)
        self.implicit = implicit_of(plan, True) if needed[0] else None
        self.sizes = (even(t_parts * plan.norms), even(max(1, programs * count * channels)), even(channels))
        along = even(g.rows * g.groups)
        self.with_along = (*self.sizes, along, along if plan.batch else 4)
        self.sums = (max(count, 1), channels), sums_dtype(plan.kinds, needed, channels)
        self.picks = picks(plan.kinds, needed, self.wanted)


def implicit_of(plan: Plan, backward: bool) -> Any:
    """The launch of the convolution with the epilogue inside, or of its input's gradient; None where cuDNN runs."""
    g, weight, window = plan.geometry, plan.weight_shape, plan.window
    channels, positions = (weight[1::-1], g.rows) if backward else (weight[:2], g.positions)
    conv = implicit_choice.Conv(channels[1], channels[0], positions, weight[2:], window[0], window[3], backward)
    tile = implicit_choice.chosen(conv, plan.dtype, plan.device)
    if tile is None:
        return None
    from hyperball.kernels.triton.implicit import kernels as implicit

    if backward:
        return implicit.backward_launch(plan.shape, plan.output, weight, window, tile, plan.device, plan.batch)
    return implicit.forward_launch(plan.shape, plan.output, weight, window, tile, plan.rule)


def numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@functools.lru_cache(maxsize=KEPT)
def plan_for(*entries: Any) -> Plan:
    """The plan of these entries: one object for all who ask."""
    return Plan(*entries)
