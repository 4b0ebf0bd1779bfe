"""The compiled CPU path of robust pooling: `pooling.c`, built at first use by the system's C compiler.

Without a compiler, or without a folder to build in, there is no library, `reason` says so, and the eager solver runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels import native

PENALTIES = (  # as numbered in C
    "huber", "pseudo_huber", "barron", "welsch", "truncated_quadratic", "absolute", "quadratic",
)  # fmt: skip
HEADERS = (
    "lanes.h", "pooling_lanes.h", "pooling_newton.h", "pooling_plain.h", "pooling_global.h", "pooling_barron.h",
    "pooling_reading.h", "pooling_mean.h",
)  # fmt: skip
SOURCES = {
    torch.float32: native.source("pooling.c", *HEADERS, functions=("pool",)),
    torch.float64: native.source("pooling.c", *HEADERS, flags=("-O3", "-DDOUBLE"), functions=("pool",)),
}

POINTER = ctypes.POINTER(ctypes.c_int64)


class Job(ctypes.Structure):
    """Mirrors `Job` in pooling.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "c", "shape")),
        *((name, ctypes.c_int64) for name in ("c_step", "shape_step", "rows", "taps", "row_dims", "tap_dims")),
        *((name, POINTER) for name in ("sizes", "x_strides", "w_strides")),
        *((name, ctypes.c_void_p) for name in ("bases", "lengths", "y", "steps", "v", "share", "radius")),
        ("penalty", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


class Library(NamedTuple):
    """The loaded function, or None, and why."""

    pool: Callable[..., int] | None
    reason: str


@functools.cache
def library(dtype: torch.dtype) -> Library:
    """The compiled solver for float32 or float64, built if it is not in the cache yet."""
    loaded, reason = native.load(SOURCES[dtype])
    if loaded is None:
        return Library(None, reason)
    function = loaded.pool
    function.argtypes, function.restype = [ctypes.POINTER(Job)], ctypes.c_int
    return Library(function, reason)


def _collapse(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """(size, strides…) of the fewest dimensions that describe the same memory; dimensions of size 1 go."""
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        elif size != 1:
            merged.append((size, *steps))
    return merged


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def _one_or_each(parameter: float | Tensor, rows: int, like: Tensor) -> tuple[Any, int, int]:
    """A parameter: what keeps its memory alive, its address, and how far it advances a row (0 for one number)."""
    if not isinstance(parameter, Tensor):
        number = (ctypes.c_double if like.dtype == torch.float64 else ctypes.c_float)(parameter)
        return number, ctypes.addressof(number), 0
    parameter = parameter.detach().to(like.device, like.dtype).resolve_neg()
    if not any(parameter.stride()):
        return parameter, parameter.data_ptr(), 0
    parameter = parameter.reshape(rows).contiguous()
    return parameter, parameter.data_ptr(), 1


def _layout(x: Tensor, weights: Tensor | None, split: int, ragged: bool) -> tuple[list[tuple[int, ...]], int]:
    """(size, strides…) of the row dimensions, then of the tap dimensions; and how many are the former."""
    if weights is None and not ragged and x.is_contiguous():
        taps = x.shape[split:].numel()
        return [(x.shape[:split].numel(), taps), (taps, 1)], 1
    strides = (x.stride(),) if weights is None else (x.stride(), weights.stride())
    rows = [] if ragged else _collapse(x.shape[:split], *(step[:split] for step in strides))
    return rows + _collapse(x.shape[split:], *(step[split:] for step in strides)), len(rows)


def _run(
    x: Tensor,
    weights: Tensor | None,
    penalty: str,
    c: float | Tensor,
    shape: float | Tensor,
    tap_dims: int,
    y: Tensor,
    bases: Tensor | None = None,
    lengths: Tensor | None = None,
    **outputs: Tensor,
) -> None:
    """Describe the work and have pooling.c do it; `outputs` are further tensors that it reads or fills."""
    function = library(x.dtype).pool
    assert function is not None
    rows, split = y.numel(), x.dim() - tap_dims
    if rows == 0:
        return
    _c, c_address, c_step = _one_or_each(c, rows, x)
    _shape, shape_address, shape_step = _one_or_each(shape, rows, x)
    if bases is None:  # ragged rows reach beyond the taps, which a copy would not
        x = x.resolve_neg()
        weights = None if weights is None else weights.detach().to(x.device, x.dtype).resolve_neg()
    weights = None if weights is None else weights.expand(x.shape)
    layout, row_dims = _layout(x, weights, split, bases is not None)
    sizes, x_strides, *rest = zip(*layout, strict=True) if layout else ((), ())
    job = Job(
        x=x.data_ptr(),
        w=None if weights is None else weights.data_ptr(),
        c=c_address,
        shape=shape_address,
        c_step=c_step,
        shape_step=shape_step,
        rows=rows,
        taps=x.shape[split:].numel(),
        row_dims=row_dims,
        tap_dims=len(layout) - row_dims,
        sizes=_numbers(sizes),
        x_strides=_numbers(x_strides),
        w_strides=_numbers(rest[0] if rest else ()),
        bases=None if bases is None else bases.data_ptr(),
        lengths=None if lengths is None else lengths.data_ptr(),
        y=y.data_ptr(),
        penalty=PENALTIES.index(penalty),
        threads=torch.get_num_threads(),
        parallel=native.thread_pool(),
        **{name: tensor.data_ptr() for name, tensor in outputs.items()},
    )
    if function(ctypes.byref(job)):
        raise MemoryError("robust pooling ran out of memory")


@functools.lru_cache(maxsize=256)
def _contiguous_job(sizes: torch.Size, split: int, penalty: str, c: float, shape: float, dtype: torch.dtype) -> Job:
    """The job of contiguous rows without weights under one penalty, but for addresses of tensors and threads."""
    numbers = (ctypes.c_double if dtype == torch.float64 else ctypes.c_float) * 2
    parameters, dims = numbers(c, shape), (sizes[:split].numel(), sizes[split:].numel())
    job = Job(
        c=ctypes.addressof(parameters),
        shape=ctypes.addressof(parameters) + ctypes.sizeof(numbers) // 2,
        rows=dims[0],
        taps=dims[1],
        row_dims=1,
        tap_dims=1,
        sizes=_numbers(dims),
        x_strides=_numbers((dims[1], 1)),
        w_strides=_numbers(()),
        penalty=PENALTIES.index(penalty),
        parallel=native.thread_pool(),
    )
    job.parameters = parameters  # their memory lives as long as the job
    return job


def _run_contiguous(x: Tensor, penalty: str, c: float, shape: float, split: int, y: Tensor, steps: Tensor) -> None:
    """`_run` for contiguous rows without weights under one penalty: a copy of a job that is kept, with addresses."""
    function = library(x.dtype).pool
    assert function is not None
    kept = _contiguous_job(x.shape, split, penalty, c, shape, x.dtype)  # which owns what the copy points to
    job = Job.from_buffer_copy(kept)
    job.x, job.y, job.steps, job.threads = x.data_ptr(), y.data_ptr(), steps.data_ptr(), torch.get_num_threads()
    if function(ctypes.byref(job)):
        raise MemoryError("robust pooling ran out of memory")


def pool(
    x: Tensor,
    weights: Tensor | None,
    penalty: str,
    c: float | Tensor,
    shape: float | Tensor,
    *,
    tap_dims: int,
    bases: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, steps) of the rows of x, [*rows, *taps] with `tap_dims` tap dimensions and any strides, by pooling.c.

    Ragged rows: x is the first sample's memory with one tap dimension as long as the longest row, whose stride is the
    step from sample to sample; `bases` says where each row begins and `lengths` how long it is.
    """
    split = x.dim() - tap_dims
    y = x.new_empty(x.shape[:split] if bases is None else bases.shape)
    steps = torch.empty(y.shape, dtype=torch.int32, device=x.device)
    plain = weights is None and bases is None and not isinstance(c, Tensor) and not isinstance(shape, Tensor)
    if plain and x.is_contiguous() and not x.is_neg() and y.numel():
        _run_contiguous(x, penalty, c, shape, split, y, steps)  # type: ignore[arg-type]
        return y, steps
    _run(x, weights, penalty, c, shape, tap_dims, y, bases, lengths, steps=steps)
    return y, steps


def pull(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weights: Tensor | None,
    penalty: str,
    c: float | Tensor,
    shape: float | Tensor,
    *,
    tap_dims: int,
) -> tuple[Tensor, Tensor]:
    """(the gradient of every tap, [*rows, *taps]; that of every row's c, [*rows]) from the gradient of y."""
    share, radius = (torch.empty(t.shape, dtype=x.dtype, device=x.device) for t in (x, y))
    y, v = (t.detach().to(x.device, x.dtype).resolve_neg().contiguous() for t in (y, grad))
    _run(x, weights, penalty, c, shape, tap_dims, y, v=v, share=share, radius=radius)
    return share, radius
