"""Which kernel pools rows, how and why: pure functions of the penalty, the device and the dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperball.kernels import dispatch
from hyperball.kernels.pooling import native
from hyperball.kernels.pooling.rows import is_convex
from hyperball.kernels.reading import can_look, export_records
from hyperball.rows import Value

TRITON = ("quadratic", "huber", "pseudo_huber", "barron", "welsch", "absolute")  # those of triton/pooling_terms.py
GREATEST_SHAPE = 4.0  # of barron in C: beyond, psi grows too fast for sums of it


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose(value: Value, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """("triton" | "native" | "eager", why) for rows of this device and dtype; the number of rows plays no part."""
    if export_records():
        return "eager", "an exported graph holds torch's own operators, with fixed trip counts"
    if device.type in dispatch.DEVICES:
        against = _against_triton(value, dtype)
        return ("eager", against) if against else ("triton", "a program reads its rows once and solves them")
    if value.row.composed or value.name not in native.PENALTIES:
        return "eager", f"{value.name} is user-defined, and pooling.c has no row for it"
    if device.type != "cpu":
        return "eager", f"the tensor is on {device.type}, and pooling.c runs on the CPU"
    if value.name == "barron" and not _native_shape(value.parameters["shape"]):
        return "eager", "barron is solved in C only for shapes up to 4"
    library = native.library(compute_dtype(dtype))
    return ("eager" if library.pool is None else "native"), library.reason


def is_triton(value: Value, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `choose` gives "triton": nothing is looked up on the disk, so that a compiler can trace it."""
    there = device.type in dispatch.DEVICES and not export_records()
    return there and not _against_triton(value, dtype)


def _against_triton(value: Value, dtype: torch.dtype) -> str:
    rules = [
        (dispatch.HAS_ROCM, "ROCm"),
        (not dispatch.HAS_TRITON, "triton is not installed"),
        (value.row.composed, f"{value.name} is user-defined"),
        (value.name == "truncated_quadratic", "truncated_quadratic is solved exactly by sorting, which torch does"),
        (value.name not in TRITON, f"no Triton row for {value.name}"),
        (dtype not in dispatch.DTYPES, str(dtype).removeprefix("torch.")),
    ]
    return next((reason for holds, reason in rules if holds), "")


def _native_shape(shape: Any) -> bool:
    if isinstance(shape, Tensor):
        return can_look(shape) and bool((shape <= GREATEST_SHAPE).all())
    return bool(shape <= GREATEST_SHAPE)


def solver_of(value: Value) -> str:
    """How rows are solved under this penalty."""
    closed = {
        "quadratic": "the mean, in closed form",
        "absolute": "the median, by selection",
        "truncated_quadratic": "exact: the sorted row is swept with prefix sums",
    }
    if value.name in closed:
        return closed[value.name]
    return (
        f"Newton inside a bracket, row by row, from {'a median' if is_convex(value) else 'the best of several starts'}"
    )


def explain_pooling(value: Value, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """Which kernel would pool a tensor of this device and dtype under this penalty, and why."""
    kernel, reason = choose(value, torch.device(device), dtype)
    return f"{kernel}, {str(compute_dtype(dtype)).removeprefix('torch.')}: {reason}"
