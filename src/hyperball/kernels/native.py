"""C sources that the system's compiler builds at first use: where the libraries lie, and why there may be none.

A library lies in a folder of the user's cache, under a name made of the sources, the flags, the compiler, the C library
and the processor, so that a home shared between machines is safe. It is written beside its place and renamed, so that
no process ever loads half a file, and loaded only if nobody else could have written it. Without a compiler, or without
such a folder, there is no library, the reason says so, and the eager twin runs.
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
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-std=gnu11", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
TUNING = (("-march=native",), ("-mcpu=native",), ())
OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH
BUILD_SECONDS = 120


class Source(NamedTuple):
    """A C file, the headers that it includes, and the flags of its own."""

    main: Path
    headers: tuple[Path, ...]
    flags: tuple[str, ...]


class Loaded(NamedTuple):
    """A loaded library, or None, and why."""

    library: ctypes.CDLL | None
    reason: str


def source(name: str, *headers: str, flags: tuple[str, ...] = ("-O3",)) -> Source:
    """The C file of that name beside this module, with its headers."""
    folder = Path(__file__).parent
    return Source(folder / name, tuple(folder / header for header in headers), flags)


def load(code: Source) -> Loaded:
    """The library of a source, built if it is not in the cache yet."""
    if sys.platform == "win32":
        return Loaded(None, "no C path on Windows")
    compiler = find_compiler()
    if compiler is None:
        return Loaded(None, "no C compiler found (cc, gcc, clang or $CC)")
    try:
        return Loaded(ctypes.CDLL(str(_built(compiler, code))), f"{code.main.name} compiled by {Path(compiler).name}")
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return Loaded(None, f"building {code.main.name} failed: {_first_line(error)}")


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
def thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded, whose threads are already there."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def fingerprint(compiler: str, code: Source) -> str:
    """A name for what is built: sources, flags, compiler, C library and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=True)
    texts = tuple(path.read_text() for path in (code.main, *code.headers))
    built_for = (platform.machine(), platform.libc_ver(), features())
    parts = (texts, FLAGS, TUNING, code.flags, compiler, version.stdout, built_for)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def features() -> list[str]:
    """The processor's features as Linux lists them; where it cannot be asked, nothing is tuned to it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "features", "model name"))})


def _built(compiler: str, code: Source) -> Path:
    """The path of the library, built if it is not there."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    path = folder / f"{code.main.stem}-{fingerprint(compiler, code)}.so"
    if not path.exists():
        _build(compiler, code, path)
    _refuse_foreign(path)
    return path


def _build(compiler: str, code: Source, path: Path) -> None:
    """Compile to the given path, with the first tuning that the compiler accepts."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        for tuning in TUNING if features() else ((),):
            command = [compiler, *FLAGS, *tuning, *code.flags, str(code.main), "-o", draft, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=not tuning)
            if done.returncode == 0:
                break
        os.chmod(draft, 0o700)  # a linker goes by the umask, which may let the group write
        os.replace(draft, path)
    finally:
        Path(draft).unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    """What anyone but this user and root could have written is not loaded."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & OPEN_TO_OTHERS:
        raise PermissionError(f"{path} may be written by others; set HYPERBALL_CACHE to a folder that may not")


def _first_line(error: Exception) -> str:
    told = getattr(error, "stderr", None) or str(error)
    lines = (told.decode(errors="replace") if isinstance(told, bytes) else told).strip().splitlines()
    return lines[0] if lines else type(error).__name__
