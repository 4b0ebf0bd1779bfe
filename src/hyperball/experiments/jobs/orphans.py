"""Processes that end with the one that started them, even where that one is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def _prctl() -> Any:
    """Linux's prctl; None on another system."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None


PRCTL = _prctl()


def follow(parent: int) -> None:
    """SIGTERM for this process when its parent ends, or at once where it has ended; nothing but on Linux."""
    if PRCTL is None:
        return
    PRCTL(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
