"""Locks on files that one process holds, and that a killed one lets go."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def locked(path: Path) -> int | None:
    """A descriptor that holds the lock, None where another one does."""
    import fcntl  # not on every system, and only needed where something is written

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # whoever held it removed the file in between
