"""How a Triton program finds its rows: the strides of rows and taps on the host, offsets and tiles on the device.

A tensor [*rows, *taps] of any strides is described by four row levels and two tap levels, the fewest that say the same
of all tensors involved; dimensions that lie behind one another in memory are one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ROW_LEVELS, TAP_LEVELS = 4, 2
LONGEST = 8192  # a row of up to so many samples stays in registers


class Level(NamedTuple):
    size: int
    strides: tuple[int, ...]


def collapse(sizes: Sequence[int], strides: Sequence[Sequence[int]]) -> list[Level]:
    """The fewest levels that describe the same memory for every tensor; dimensions of size 1 go."""
    levels: list[Level] = []
    for at, size in enumerate(sizes):
        steps = tuple(stride[at] for stride in strides)
        if size == 1:
            continue
        if levels and all(outer == size * step for outer, step in zip(levels[-1].strides, steps, strict=True)):
            levels[-1] = Level(levels[-1].size * size, steps)
        else:
            levels.append(Level(size, steps))
    return levels


def padded(levels: list[Level], count: int, tensors: int) -> list[Level] | None:
    """So many levels, outer ones of size 1 added; None where there are more."""
    missing = count - len(levels)
    return None if missing < 0 else [Level(1, (0,) * tensors)] * missing + levels


class Layout(NamedTuple):
    """Row levels (outermost first) and tap levels of some tensors, of which the last have rows only."""

    rows: list[Level]
    taps: list[Level]

    def row_sizes(self) -> tuple[int, ...]:
        """Of all row levels but the outermost."""
        return tuple(level.size for level in self.rows[1:])

    def row_strides(self, tensor: int) -> tuple[int, ...]:
        return tuple(level.strides[tensor] for level in self.rows)

    def tap_strides(self, tensor: int) -> tuple[int, ...]:
        return tuple(level.strides[tensor] for level in self.taps)

    @property
    def inner(self) -> int:
        return self.taps[-1].size

    @property
    def flat(self) -> bool:
        return self.taps[0].size == 1

    def row_contiguous(self) -> bool:
        """Whether neighbors in memory are neighboring rows, and not neighboring taps."""
        return self.inner > 1 and self.taps[-1].strides[0] != 1 and self.rows[-1].strides[0] == 1

    def is_wide(self, tensors: int) -> bool:
        """Whether an offset inside a row, or the number of rows, may need 64 bits."""
        rows = 1
        for level in self.rows:
            rows *= level.size
        return rows >= 2**30 or any(
            sum((t.size - 1) * abs(t.strides[k]) for t in self.taps) >= 2**31 for k in range(tensors)
        )


def layout(views: Sequence[Tensor], per_row: Sequence[Tensor], split: int) -> Layout | None:
    """The layout of views [*rows, *taps] of one shape and of tensors [*rows]; None where it takes too many levels."""
    shape = views[0].shape
    strides = [view.stride() for view in views]
    rows = [stride[:split] for stride in strides] + [tensor.stride() for tensor in per_row]
    # A row alone is described as the first of three: a size of 1 and a stride of 0 would be constants, by which Triton
    # lays out a tile and so orders its sums.
    alone = Level(3, (shape[split:].numel(),) * len(views) + (0,) * len(per_row))
    row_levels = padded(collapse(shape[:split], rows) or [alone], ROW_LEVELS, len(rows))
    tap_levels = padded(collapse(shape[split:], [stride[split:] for stride in strides]), TAP_LEVELS, len(strides))
    return None if row_levels is None or tap_levels is None else Layout(row_levels, tap_levels)


class Tile(NamedTuple):
    """BR rows by BN samples a program of so many warps; longer rows are read again in every pass."""

    BR: int
    BN: int
    warps: int
    loop: bool


def power(n: int) -> int:
    return int(triton.next_power_of_2(max(int(n), 1)))


def tile_for(n: int, across: bool, heavy: bool) -> Tile:
    """How many rows of n samples a program takes, however many there are: a row is summed in one order in any batch.

    `across` says that neighboring rows are neighbors in memory, `heavy` that a sample needs many registers.
    """
    if n > LONGEST:
        return Tile(8 if across else 1, 512 if across else 4096, 8, True)
    width = max(power(n), 2)
    height = 8 if across else max(1, 128 // width)
    while height > 1 and height * width > 32768:
        height //= 2
    each = 512 if heavy or across else 1024  # samples a warp
    return Tile(height, width, max(1, min(16, height * width // each)), False)


@triton.jit
def row_numbers(WIDE: tl.constexpr, BR: tl.constexpr) -> tl.tensor:
    """The rows of this program, [BR, 1], in 64 bits where that is asked for."""
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    return first * BR + tl.arange(0, BR)[:, None]


@triton.jit
def row_offset(row: tl.tensor, sizes: tl.tensor, strides: tl.tensor) -> tl.tensor:
    """Where row number `row` begins, in 64 bits, from the sizes of the inner row levels and the strides of all."""
    r1, r2, r3 = sizes
    s0, s1, s2, s3 = strides
    inner = row // r3
    middle = inner // r2
    first = (row % r3).to(tl.int64) * s3 + (inner % r2).to(tl.int64) * s2
    return first + (middle % r1).to(tl.int64) * s1 + (middle // r1).to(tl.int64) * s0


@triton.jit
def tap_offset(
    t: tl.tensor, inner: tl.tensor, strides: tl.tensor, FLAT: tl.constexpr, WIDE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Where sample t of a row lies behind its beginning, from the strides of both tap levels."""
    s0, s1 = strides
    if WIDE:
        t = t.to(tl.int64)
    if FLAT:
        offset = t * s1
    else:
        offset = (t // inner) * s0 + (t % inner) * s1
    return offset


@triton.jit
def somewhere(condition: tl.tensor) -> tl.tensor:
    """Whether it holds for any row of the program."""
    return tl.max(tl.max(condition.to(tl.int32), axis=1), axis=0) > 0
