"""C sources that the system's compiler builds at first use: where the libraries lie, and why there may be none.

A library lies in a folder of the user's cache, under a name made of the sources, the flags, the compiler, the C library
and the processor, so that a home shared between machines is safe, and of its own bytes, so that a damaged one is told
before it is loaded, and built again. It is written beside its place, tried and renamed, so that no process ever loads
half a file, and loaded only if nobody else could have written it. The compiler is asked for its version each time:
without one, or without such a folder, there is no library, the reason says so, and the eager twin runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
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
    """A C file, the headers that it includes, the flags of its own, and the functions that it must have."""

    main: Path
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    functions: tuple[str, ...] = ()


class Loaded(NamedTuple):
    """A loaded library, or None, and why."""

    library: ctypes.CDLL | None
    reason: str


def source(name: str, *headers: str, flags: tuple[str, ...] = ("-O3",), functions: tuple[str, ...] = ()) -> Source:
    """The C file of that name in the folder c, with its headers."""
    folder = Path(__file__).parent / "c"
    return Source(folder / name, tuple(folder / header for header in headers), flags, functions)


def load(code: Source) -> Loaded:
    """The library of a source, built if it is not in the cache yet."""
    if sys.platform == "win32":
        return Loaded(None, "no C path on Windows")
    try:
        compiler = find_compiler()
        if compiler is None:
            return Loaded(None, "no C compiler found (cc, gcc, clang or $CC)")
        return Loaded(_library(compiler, code), f"{code.main.name} compiled by {Path(compiler[0]).name}")
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return Loaded(None, f"building {code.main.name} failed: {_first_line(error)}")


def cache_folder() -> Path:
    """The user's cache folder of this library: HYPERBALL_CACHE, or hyperball under XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("HYPERBALL_CACHE")
    if given:
        return Path(given).resolve()
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyperball").resolve()


def find_compiler() -> tuple[str, ...] | None:
    """The command that starts the C compiler: $CC, which may hold arguments, or the first of cc, gcc and clang."""
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        found = shutil.which(command[0]) if command else None
        if found:
            return found, *command[1:]
    return None


@functools.cache
def thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded, whose threads are already there."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def fingerprint(compiler: tuple[str, ...], code: Source) -> str:
    """A name for what is built: sources, flags, compiler, C library and processor."""
    command = [*compiler, "--version"]
    version = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=True)
    texts = tuple(path.read_text() for path in (code.main, *code.headers))
    built_for = (platform.machine(), platform.libc_ver(), features())
    parts = (texts, FLAGS, TUNING, code.flags, compiler, version.stdout, built_for)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def digest(path: Path) -> str:
    """A name for the bytes of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def features() -> list[str]:
    """The processor's features as Linux lists them; where it cannot be asked, nothing is tuned to it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "features", "model name"))})


def _library(compiler: tuple[str, ...], code: Source) -> ctypes.CDLL:
    """The library in the cache, or a fresh one where none there is whole."""
    folder = cache_folder()
    _make(folder)
    _refuse_foreign(folder)
    _refuse_open_above(folder)
    stem = f"{code.main.stem}-{fingerprint(compiler, code)}"
    for path in sorted(folder.glob(f"{stem}*.so")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            continue
        _refuse_foreign(path)
        if path.name == f"{stem}-{digest(path)}.so":  # one that lacks bytes would end the process
            with contextlib.suppress(OSError):
                return _opened(path, code)
        path.unlink(missing_ok=True)
    return _built(compiler, code, folder, stem)


def _make(folder: Path) -> None:
    """Make a folder and those above it that are not there, all for this user alone: parents would go by the umask."""
    for missing in (*reversed(folder.parents), folder):
        missing.mkdir(mode=0o700, exist_ok=True)


def _opened(path: Path, code: Source) -> ctypes.CDLL:
    """The library at a path, with all its functions."""
    library = ctypes.CDLL(str(path))
    missing = [name for name in code.functions if not hasattr(library, name)]
    if missing:
        raise OSError(f"{path.name} has no {', '.join(missing)}")
    return library


def _built(compiler: tuple[str, ...], code: Source, folder: Path, stem: str) -> ctypes.CDLL:
    """Compile with the first tuning that the compiler accepts, try the library, and put it into the cache."""
    handle, name = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    draft = Path(name)
    try:
        for tuning in TUNING if features() else ((),):
            command = [*compiler, *FLAGS, *tuning, *code.flags, str(code.main), "-o", name, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=not tuning)
            if done.returncode == 0:
                break
        draft.chmod(0o700)  # a linker goes by the umask, which may let the group write
        library = _opened(draft, code)
        with draft.open("rb") as written:
            os.fsync(written.fileno())  # else the name may outlive a crash and the bytes not
        draft.replace(folder / f"{stem}-{digest(draft)}.so")
        return library
    finally:
        draft.unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    """What anyone but this user and root could have written is not loaded."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & OPEN_TO_OTHERS:
        raise PermissionError(f"{path} may be written by others; set HYPERBALL_CACHE to a folder that may not")


def _refuse_open_above(folder: Path) -> None:
    """Where all may rename the folder away, all may put another in its place."""
    for above in folder.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"{above} may be written by all; set HYPERBALL_CACHE to a folder elsewhere")


def _first_line(error: Exception) -> str:
    told = getattr(error, "stderr", None) or str(error)
    lines = (told.decode(errors="replace") if isinstance(told, bytes) else told).strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
