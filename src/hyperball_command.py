"""The `hyperball` command, outside the package: importing that imports torch, during which Ctrl-C is to end quietly."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> int:
    """Import the command line and run it."""
    heard = signal.getsignal(signal.SIGINT)
    if heard is signal.default_int_handler:  # where Ctrl-C is ignored it stays so
        signal.signal(signal.SIGINT, leave)
    from hyperball.cli import main as command

    signal.signal(signal.SIGINT, heard)
    return command()


def leave(number: int, frame: FrameType | None) -> None:
    """End at once: half an import may turn a `KeyboardInterrupt` into an error of another kind."""
    print("hyperball: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
