"""One process at a time on a record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hyperball.attacks.journal import RecordError


@contextlib.contextmanager
def alone(record: Path | None) -> Iterator[None]:
    """Hold a record while the block lasts, or refuse where another process does; a killed one holds nothing."""
    if record is None:
        yield
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    path = record.with_name(f".{record.name}.lock")
    descriptor = _locked(path)
    if descriptor is None:
        raise RecordError(f"another evaluation is writing {record}; wait for it, or write elsewhere")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock, None where another one does."""
    import fcntl  # not on every system, and only needed where a record is written

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
