"""Which convolutions run as implicit GEMMs with the epilogue inside, and with which tiles: chosen by measurement.

Measured on an H200 in bfloat16, in CUDA graphs, against cuDNN's convolution and the pass behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """BM positions by NB blocks of BO channels, contracted by BK at a time."""

    BM: int
    BO: int
    NB: int
    BK: int
    warps: int
    stages: int


class Box(NamedTuple):
    """Images, rows and columns of a tile's positions."""

    BB: int
    BH: int
    BW: int


class Conv(NamedTuple):
    """A convolution from so many channels to so many; backward, `inputs` are those of the output's gradient."""

    inputs: int
    outputs: int
    positions: int
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    groups: int
    backward: bool = False


CAPABILITY = (9, 0)  # of the cards whose tiles these are
TRITON = (3, 6)  # the version they were measured with
DTYPES = (torch.bfloat16, torch.float16)
TAPS = 9  # of the smallest filter that was measured
WIDEST = 512  # channels that are contracted
FILLED = 0.8  # of the processors' time, at least, that programs of equal length leave none idle
NARROW = Tile(128, 64, 1, 64, 4, 3)
TRIPLE = Tile(256, 64, 3, 64, 8, 3)
WIDE = Tile(256, 128, 1, 64, 8, 3)
ODD = Tile(256, 128, 1, 32, 8, 3)


def objection(conv: Conv) -> str:
    """What speaks against the implicit GEMM whatever the maps and the card, or nothing."""
    if len(conv.taps) != 2 or conv.groups != 1 or set(conv.stride) != {1}:
        return "a stride, groups or other than two dimensions"
    if math.prod(conv.taps) < TAPS:
        return f"a filter of fewer than {TAPS} taps"
    return "" if tile_of(conv) else f"{conv.inputs} to {conv.outputs} channels, for which no tile was faster"


def tile_of(conv: Conv) -> Tile | None:
    """The fastest tile for 64, 96, 192 and 384 channels, where it beats cuDNN and the pass; others take the nearest."""
    if math.prod(conv.taps) < TAPS:
        return None
    if (conv.inputs, conv.outputs, conv.backward) == (96, 96, True):
        return ODD
    if conv.inputs % 64 or conv.outputs % 64 or conv.inputs > WIDEST:
        return None
    if conv.outputs == 64:
        return NARROW
    if conv.outputs % 128 == 0 and (conv.backward or conv.outputs % 192):
        return WIDE
    return TRIPLE if conv.outputs % 192 == 0 else None


def chosen(conv: Conv, dtype: torch.dtype, device: torch.device) -> Tile | None:
    """The tile on this device, or None where cuDNN convolves."""
    if device.type != "cuda" or dtype not in DTYPES or objection(conv) or conv.positions >= 2**31:
        return None
    capability, processors, known = card(device.index)
    tile = tile_of(conv)
    if tile is None or not known or capability != CAPABILITY:
        return None
    programs = -(-conv.positions // tile.BM) * -(-conv.outputs // (tile.NB * tile.BO))
    return tile if filled(programs, processors) else None


def described(weight: Sequence[int], stride: Sequence[int], groups: int, dtype: torch.dtype) -> str:
    """What convolves in a layer with such a weight, and why."""
    if dtype not in DTYPES:
        return f"cuDNN's: {str(dtype).removeprefix('torch.')}"
    outputs, inputs, *taps = weight
    conv = Conv(inputs, outputs, 0, tuple(taps), tuple(stride), groups)
    back = conv._replace(inputs=outputs, outputs=inputs, backward=True)
    against = {"forward": objection(conv), "backward": objection(back)}
    passes = [name for name, reason in against.items() if not reason]
    if not passes:
        return f"cuDNN's: {against['forward']}"
    where = f"GPUs of capability {CAPABILITY[0]}.{CAPABILITY[1]} whose processors its tiles fill"
    return f"an implicit GEMM with the epilogue inside, {' and '.join(passes)}, on {where}; cuDNN's elsewhere"


def filled(programs: int, processors: int) -> bool:
    """Whether the last round of programs leaves few processors idle."""
    rounds = -(-programs // processors)
    return programs >= FILLED * rounds * processors


@functools.lru_cache(maxsize=64)
def card(index: int | None) -> tuple[tuple[int, int], int, bool]:
    """Compute capability and processors of a CUDA device, and whether Triton is one that compiles such kernels."""
    import triton

    properties = torch.cuda.get_device_properties(index)
    known = tuple([int(part) for part in triton.__version__.split(".")[:2]]) >= TRITON
    return (properties.major, properties.minor), properties.multi_processor_count, known


def box(positions: int, images: int, rows: int, columns: int) -> Box:
    """Of the boxes of so many positions, a power of two, the one that wastes least of such maps; then the widest."""
    sides = [1 << k for k in range(positions.bit_length())]
    boxes = [Box(positions // (h * w), h, w) for w in sides for h in sides if h * w <= positions]
    return min(boxes, key=lambda b: (padded(images, b.BB) * padded(rows, b.BH) * padded(columns, b.BW), b.BB, -b.BW))


def padded(size: int, block: int) -> int:
    return -(-size // block) * block
