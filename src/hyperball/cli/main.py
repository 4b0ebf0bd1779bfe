"""The entry: finds the command, runs it, and turns what it raises into an exit code and one line."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hyperball.cli.commands import COMMANDS
from hyperball.cli.parsing import UsageError, choose

USAGE, FAILED, INTERRUPTED = 2, 1, 130
EXTRAS = {
    **dict.fromkeys(("jsonargparse", "lightning_fabric", "rich", "safetensors", "sklearn", "h5py", "yaml"), "train"),
    **dict.fromkeys(("torchvision", "timm"), "vision"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "export"),
    "jinja2": "report",
    "ray": "grid",
}
PACKAGE = Path(__file__).resolve().parents[1]


def overview() -> str:
    """The help of `hyperball` alone."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hyperball COMMAND [OPTIONS]",
            "",
            "Neural layers with a radius: train, measure and compare them.",
            "",
            "commands:",
            *lines,
            "",
            "first steps:",
            "  hyperball demo                        # a minute or two, no download",
            "  hyperball train --help                # every field of a recipe, with its default",
            "  hyperball train --print_config > recipe.yaml",
            "",
            "`hyperball COMMAND --help` has the options and an example; --debug shows tracebacks; --version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 well, 1 failed, 2 a mistake of the user's, 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    if given[:1] == ["--debug"]:
        given = [*given[1:], "--debug"]
    name = "".join(given[:1])
    try:
        return dispatch(name, given)
    except BrokenPipeError:
        return closed_pipe()
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code(error)
        if code is None or debug:
            traceback.print_exc()
        if code is not None:
            print(f"{label(name)}: {one_line(error)}", file=sys.stderr)
        return FAILED if code is None else code


def dispatch(name: str, given: list[str]) -> int:
    if name in ("", "-h", "--help", "help"):
        print(overview())
        return 0
    if name in ("--version", "-V"):
        from importlib.metadata import version

        print(f"hyperball {version('hyperball')}")
        return 0
    if name.startswith("-"):
        raise UsageError(f"give a command before {name}; `hyperball --help` lists them")
    command = COMMANDS[choose("command", name, COMMANDS)]
    module, _, function = command.target.partition(":")
    return int(getattr(importlib.import_module(f"hyperball.cli.{module}"), function)(given[1:]))


def label(name: str) -> str:
    return f"hyperball {name}" if name in COMMANDS else "hyperball"


def exit_code(error: BaseException) -> int | None:
    """2 for a mistake of the user's, 130 for Ctrl-C, 1 for a run that failed, None for a mistake of ours.

    A ValueError that our own code raises refuses an argument; the same from deep inside torch is no such thing.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("hyperball.")}
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if "Interrupted" in kinds:
        return 128 + int(error.signal_number)  # type: ignore[attr-defined]
    if "NonFiniteError" in kinds:
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


def closed_pipe() -> int:
    """The reader of our output went away, as `head` does: say nothing."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
