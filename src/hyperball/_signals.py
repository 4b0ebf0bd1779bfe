"""SIGTERM as an exception, and blocks that no signal ends."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from hyperball._errors import Terminated


@contextlib.contextmanager
def terminable() -> Iterator[Callable[[], bool]]:
    """SIGTERM ends the block as Ctrl-C does, with all that it leaves in order; yields what says whether it came.

    In another thread than the main one, which may not hear signals, it changes nothing.
    """
    came = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Ctrl-C and SIGTERM do nothing while the block lasts, so that a second one orphans no process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
