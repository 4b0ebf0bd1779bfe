"""The compiled CPU path of robust pooling: `pooling.c`, built at first use by the system's C compiler.

The library lies in a folder of the user's cache, under a name made of the source, the compiler, the C library and the
processor, so that a home shared between machines is safe. It is written beside its place and renamed, so that no
process ever loads half a file, and loaded only if nobody else could have written it. Without a compiler, or without
such a folder, there is no library, `reason` says so, and the eager solver runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("pooling.c", "pooling_lanes.h", "pooling_newton.h", "pooling_global.h")
)
PENALTIES = ("huber", "pseudo_huber", "barron", "welsch", "truncated_quadratic", "absolute")  # as numbered in C
DTYPES = {torch.float32: (), torch.float64: ("-DDOUBLE",)}
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
TUNING = (("-march=native",), ("-mcpu=native",), ())
OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BUILD_SECONDS = 120

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


def cache_folder() -> Path:
    """The user's cache folder of this library: HYPERBALL_CACHE, or hyperball under XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("HYPERBALL_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyperball"


def find_compiler() -> str | None:
    """The C compiler: $CC, or the first of cc, gcc and clang on the path."""
    return next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None
    )


@functools.cache
def library(dtype: torch.dtype) -> Library:
    """The compiled solver for float32 or float64, built if it is not in the cache yet."""
    if sys.platform == "win32":
        return Library(None, "no C path on Windows")
    compiler = find_compiler()
    if compiler is None:
        return Library(None, "no C compiler found (cc, gcc, clang or $CC)")
    try:
        function = ctypes.CDLL(str(_built(compiler, DTYPES[dtype]))).pool
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return Library(None, f"building pooling.c failed: {_first_line(error)}")
    function.argtypes, function.restype = [ctypes.POINTER(Job)], ctypes.c_int
    return Library(function, f"pooling.c compiled by {Path(compiler).name}")


def _first_line(error: Exception) -> str:
    told = getattr(error, "stderr", None) or str(error)
    lines = (told.decode(errors="replace") if isinstance(told, bytes) else told).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _refuse_foreign(path: Path) -> None:
    """What anyone but this user and root could have written is not loaded."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & OPEN_TO_OTHERS:
        raise PermissionError(f"{path} may be written by others; set HYPERBALL_CACHE to a folder that may not")


def _built(compiler: str, definitions: Sequence[str]) -> Path:
    """The path of the library, built if it is not there."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    path = folder / f"pooling-{_fingerprint(compiler, definitions)}.so"
    if not path.exists():
        _build(compiler, definitions, path)
    _refuse_foreign(path)
    return path


def _build(compiler: str, definitions: Sequence[str], path: Path) -> None:
    """Compile to the given path, with the first tuning that the compiler accepts."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        for tuning in TUNING if _features() else ((),):
            command = [compiler, *FLAGS, *tuning, *definitions, str(SOURCES[0]), "-o", draft, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=not tuning)
            if done.returncode == 0:
                break
        os.chmod(draft, 0o700)  # a linker goes by the umask, which may let the group write
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _fingerprint(compiler: str, definitions: Sequence[str]) -> str:
    """A name for what is built: source, flags, compiler, C library and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True)
    sources = tuple(source.read_text() for source in SOURCES)
    built_for = (platform.machine(), platform.libc_ver(), _features())
    parts = (sources, FLAGS, TUNING, tuple(definitions), compiler, version.stdout, built_for)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _features() -> list[str]:
    """The processor's features as Linux lists them; where it cannot be asked, nothing is tuned to it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "features", "model name"))})


def _collapse(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """(size, strides…) of the fewest dimensions that describe the same memory; dimensions of size 1 go."""
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        elif size != 1:
            merged.append((size, *steps))
    return merged


@functools.cache
def thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded, whose threads are already there."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def _one_or_each(parameter: float | Tensor, rows: int, like: Tensor) -> tuple[Any, int, int]:
    """A parameter: what keeps its memory alive, its address, and how far it advances a row (0 for one number)."""
    if not isinstance(parameter, Tensor):
        number = (ctypes.c_double if like.dtype == torch.float64 else ctypes.c_float)(parameter)
        return number, ctypes.addressof(number), 0
    parameter = parameter.detach().to(like.dtype)
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
        parallel=thread_pool(),
        **{name: tensor.data_ptr() for name, tensor in outputs.items()},
    )
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
    y = x.new_empty(x.shape[: x.dim() - tap_dims] if bases is None else bases.shape)
    steps = torch.empty(y.shape, dtype=torch.int32)
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
    share, radius = torch.empty(x.shape, dtype=x.dtype), torch.empty(y.shape, dtype=x.dtype)
    v = grad.to(x.dtype).contiguous()
    _run(x, weights, penalty, c, shape, tap_dims, y.contiguous(), v=v, share=share, radius=radius)
    return share, radius
