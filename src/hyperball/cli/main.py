"""The entry: finds the command, runs it, and turns what it raises into an exit code and one line."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from hyperball._errors import report
from hyperball.cli.commands import COMMANDS
from hyperball.cli.parsing import UsageError, choose
from hyperball.cli.pipes import patience, silence


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
    complete_streams()
    debug = "--debug" in given
    if given[:1] == ["--debug"]:
        given = [*given[1:], "--debug"]
    name = "".join(given[:1])
    with patience() if name in COMMANDS and COMMANDS[name].lasting else contextlib.nullcontext():
        try:
            code = dispatch(name, given)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has what it wanted
            silence(sys.stdout)
            code = 0
        except (Exception, KeyboardInterrupt) as error:
            code = report(error, label(name), debug)
    return code


def complete_streams() -> None:
    """Output goes nowhere where it was closed, and has a question mark for what its encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for the rest of the process)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


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
