"""SIGTERM and Ctrl-C as a flag that the loop reads between steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):
    """A run was asked to stop, and saved itself at `step`; `command` resumes it."""

    def __init__(self, step: int, command: str, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name}, saved at step {step}; resume with: {command}")
        self.step = step
        self.command = command
        self.signal_number = signal_number


class Flag:
    """The signal that was caught, or 0."""

    number = 0


@contextlib.contextmanager
def listening() -> Iterator[Flag]:
    """Catch the first SIGTERM or SIGINT of the block; a second one acts as it would have without."""
    flag = Flag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def catch(number: int, frame: FrameType | None) -> None:
        flag.number = number
        for known, handler in before.items():
            signal.signal(known, handler)

    for number in before:
        signal.signal(number, catch)
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
