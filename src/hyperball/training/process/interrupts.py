"""SIGTERM and Ctrl-C as a flag that the loop reads between steps."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


class Interrupted(Exception):
    """A run was asked to stop, and saved itself at `step`; `command` resumes it."""

    def __init__(self, step: int, command: str, signal_number: int) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name}, saved at step {step}; resume with: {command}")
        self.step = step
        self.command = command
        self.signal_number = signal_number


class ProcessLost(RuntimeError):
    """Another process of the run ended, so that this one waits for nobody; `command` resumes the run."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(f"another process of this run has ended ({reason}); resume with: {command}")
        self.command = command


PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


@contextlib.contextmanager
def together(command: str, processes: int) -> Iterator[None]:
    """One line in place of a backend's many where a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        found = [text for text in PEER_GONE if text.lower() in str(error).lower()]
        if processes == 1 or not found:
            raise
        raise ProcessLost(command, found[0].lower()) from None


def resume_command(run_dir: Path, data_root: str | Path | None, accelerator: str, devices: int | str) -> str:
    """What goes on with a run where it was: its folder, and what was said of data and devices."""
    given = {"data-root": data_root, "accelerator": accelerator, "devices": devices}
    defaults = {"data-root": None, "accelerator": "auto", "devices": "auto"}
    options = [f"--{name}={value}" for name, value in given.items() if value != defaults[name]]
    return shlex.join(["hyperball", "resume", str(run_dir), *options])


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
