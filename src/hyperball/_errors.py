"""Errors as an exit code and one line."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

USAGE, FAILED, INTERRUPTED, TERMINATED = 2, 1, 130, 143
FAILURES = {"NonFiniteError", "ProcessLost"}  # of a run, not mistakes of whoever started it
EXTRAS = {
    **dict.fromkeys(("jsonargparse", "lightning_fabric", "rich", "safetensors", "sklearn", "h5py", "yaml"), "train"),
    **dict.fromkeys(("torchvision", "timm"), "vision"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
    "jinja2": "report",
    "ray": "grid",
}
PACKAGE = Path(__file__).resolve().parent


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, with an exit code of its own."""


def report(error: BaseException, label: str = "", debug: bool = False) -> int:
    """Print an error as one line on stderr, a mistake of ours with its traceback, and return the exit code."""
    code = exit_code(error)
    if code is None or debug:
        traceback.print_exception(error)
    if code is not None and (code < INTERRUPTED or is_first_process()):
        print(f"{label}: {one_line(error)}" if label else one_line(error), file=sys.stderr)
    return FAILED if code is None else code


def is_first_process() -> bool:
    """Whether this is the only process of a run, or the first of several."""
    return os.environ.get("RANK", "0") == "0" and os.environ.get("LOCAL_RANK", "0") == "0"


def exit_code(error: BaseException) -> int | None:
    """2 for a mistake of the user's, 130 for Ctrl-C, 143 for SIGTERM, 1 for a run that failed, None for one of ours.

    A ValueError that our own code raises refuses an argument; the same from deep inside torch is no such thing.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("hyperball.")}
    if isinstance(error, KeyboardInterrupt):
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    if "Interrupted" in kinds:
        return 128 + int(error.signal_number)  # type: ignore[attr-defined]
    if kinds & FAILURES:
        return FAILED
    if kinds or isinstance(error, OSError) or isinstance(error.__cause__, ImportError) or extra(error):
        return USAGE
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).resolve().is_relative_to(PACKAGE)
    raised = ours and "raise" in (frames[-1].line or "raise")
    return USAGE if raised and isinstance(error, ValueError | TypeError) else None


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, or its type where it has none."""
    if isinstance(error, OSError) and error.strerror:
        parts = [str(name) for name in (error.filename, error.strerror) if name]
        return ": ".join(parts)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if extra(error):
        return f"{error}; pip install 'hyperball[{extra(error)}]'"
    return " ".join(str(error).split()) or type(error).__name__


def extra(error: BaseException) -> str:
    """The extra that would bring the package that an import did not find, or an empty text."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    return EXTRAS.get(missing.partition(".")[0], "")
