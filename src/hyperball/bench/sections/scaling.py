"""Where cost grows: time against the batch and against the channels, plain and decoupled, with the fitted slope.

A slope is d log(time) / d log(size) by least squares: 0 is a constant cost, 1 grows with the bytes, 2 with the
arithmetic of a convolution of as many inputs as outputs. `extra` is decoupled minus plain.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyperball.bench.case import Case, Setting
from hyperball.bench.records import Row
from hyperball.bench.sections import conv
from hyperball.bench.sections.conv import PLAIN, TANH, Shape

GPU_AXES = {"batch": (16, 32, 64, 128, 256, 512, 1024), "channels": (32, 64, 128, 256, 512)}
CPU_AXES = {"batch": (2, 4, 8, 16, 32), "channels": (16, 32, 64, 128)}
LEAST = 0.02  # an extra below this share of the plain time is within the noise


def shape(axis: str, size: int, setting: Setting) -> Shape:
    """64 channels of 32² while the batch grows; a batch of 256 images of 16² while the channels grow."""
    if axis == "batch":
        return Shape("batch", size, 64, 64, 32 if setting.on_gpu else 16)
    return Shape("channels", 256 if setting.on_gpu else 8, size, size, 16)


def cases(setting: Setting) -> list[Case]:
    """One case a point of each axis."""
    axes = GPU_AXES if setting.on_gpu else CPU_AXES
    dtype = setting.dtypes("bf16" if setting.on_gpu else "fp32")[0]
    made = []
    for axis, sizes in axes.items():
        for size in sizes[::2] if setting.quick else sizes:
            point = conv.case(
                shape(axis, size, setting), "forward+backward", dtype, setting, operators=conv.MAIN[:1],
                threads=None if setting.on_gpu else 1, section="scaling",
            )  # fmt: skip
            made.append(replace(point, name=f"{axis} {size}", aims={}, kept={}))
    return made


def slope(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """d log(time) / d log(size) by least squares; None with fewer than two times > 0."""
    points = [(math.log(x), math.log(y)) for x, y in zip(sizes, times, strict=True) if y > 0]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    below = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / below if below else None


def fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The points and the slope of the plain layer, of ours and of their difference, along each axis in each mode."""
    grouped: dict[tuple[str, str], list[tuple[int, Row]]] = defaultdict(list)
    for row in rows:
        found = re.fullmatch(r"(batch|channels) (\d+)", row.case)
        if found and (row.subject, row.reference) == (TANH, PLAIN):
            grouped[found[1], row.mode].append((int(found[2]), row))
    return [
        fit for (axis, mode), points in grouped.items() for fit in axis_fits(axis, mode, sorted(points, key=size_of))
    ]


def size_of(point: tuple[int, Row]) -> int:
    return point[0]


def axis_fits(axis: str, mode: str, points: list[tuple[int, Row]]) -> list[dict[str, Any]]:
    sizes = [size for size, _ in points]
    plain, ours = [row.reference_median_ms for _, row in points], [row.median_ms for _, row in points]
    extra = [a - b if a - b > LEAST * b else 0.0 for a, b in zip(ours, plain, strict=True)]
    made = []
    for subject, times in ((PLAIN, plain), (TANH, ours), ("extra", extra)):
        found = slope(sizes, times)
        made.append(
            {
                "axis": axis, "mode": mode, "subject": subject, "sizes": sizes, "ms": [round(t, 5) for t in times],
                "slope": None if found is None else round(found, 2),
            }
        )  # fmt: skip
    return made


def notes(setting: Setting) -> list[str]:
    return []
