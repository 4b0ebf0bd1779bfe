"""Output whose reader goes away, as `head` does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Patient:
    """A stream that falls silent when its reader goes away, where another would raise and end the work."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except BrokenPipeError:
            silence(self.stream)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            silence(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """The block goes on when nobody reads its output or its errors any more."""
    with contextlib.redirect_stdout(Patient(sys.stdout)), contextlib.redirect_stderr(Patient(sys.stderr)):
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def silence(stream: Any) -> None:
    """What is written to the stream from here on, and what it still holds, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
