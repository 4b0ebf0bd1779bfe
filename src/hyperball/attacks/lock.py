"""One process at a time on a record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hyperball.attacks.journal import RecordError
from hyperball.locks import locked


@contextlib.contextmanager
def alone(record: Path | None) -> Iterator[None]:
    """Hold a record while the block lasts, or refuse where another process does; a killed one holds nothing."""
    if record is None:
        yield
        return
    record.parent.mkdir(parents=True, exist_ok=True)
    path = record.with_name(f".{record.name}.lock")
    try:
        descriptor = locked(path)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(record)) from None
    if descriptor is None:
        raise RecordError(f"another evaluation is writing {record}; wait for it, or write elsewhere")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
