"""The memory that a training process frees: kept for its next step instead of given back to the system."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
POLICY = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 * 2**20}


def keep_freed_memory() -> bool:
    """Let glibc serve large tensors from what was freed before; whether it does.

    It maps each of them anew by default, and the system clears their pages at first use, which took 40 % of the time of
    a point network's steps on a CPU. Where the environment says how glibc is to allocate, that stays.
    """
    if not sys.platform.startswith("linux") or any(name.startswith(("MALLOC_", "GLIBC_")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and all([mallopt(name, value) == 1 for name, value in POLICY.items()])
