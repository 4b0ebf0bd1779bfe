"""Parsers whose mistakes are one line with a suggestion."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

from hyperball.cli.commands import COMMANDS


class UsageError(ValueError):
    """The command line itself is wrong."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about a wrong name: the nearest one, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser of argparse's that raises `UsageError` and suggests the option that was meant."""

    def __init__(self, prog: str, description: str) -> None:
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=style)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise UsageError(with_suggestion(message, self._option_string_actions))


def with_suggestion(message: str, options: Iterable[str]) -> str:
    """A parser's message in one line; an option that it does not know is followed by the nearest that it does."""
    message = " ".join(message.split())
    unknown = re.search(r"nrecognized arguments: (-[^\s=]+)", message)
    if unknown is None:
        return message
    return f"unknown option {unknown[1]}{nearest(unknown[1], options)}"


def parser(name: str) -> Parser:
    """The empty parser of a command."""
    return Parser(prog=f"hyperball {name}", description=COMMANDS[name].description)


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """The name if it is known, else a `UsageError` that lists the names."""
    known = list(known)
    if name not in known:
        hint = nearest(name, known) or f"; known: {', '.join(known)}"
        raise UsageError(f"unknown {what} {name!r}{hint}")
    return name
