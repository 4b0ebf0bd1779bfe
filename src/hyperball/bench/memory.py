"""The peak memory of a step: on a GPU from its allocator's count, on a CPU from the profiler's list of allocations.

On both it is what the step's tensors and its second call need at most, over what was allocated before; what building
and the first call left to the garbage collector does not count. The profiler sees every tensor and every temporary of
torch's operators, also those that never leave an operator; not the scratch that oneDNN and the C kernels take for
themselves.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, kineto_available, profile, record_function

from hyperball.bench.timing import Step

MIB = 2**20
STUDIED = "hyperball: the call whose peak is read"


def with_peak(build: Callable[[], Step], device: str) -> tuple[Step, float | None]:
    """A step after two calls, and the MiB that its tensors and the second call need at most; None where unknown."""
    gc.collect()
    return on_gpu(build) if device == "cuda" else on_cpu(build)


def on_gpu(build: Callable[[], Step]) -> tuple[Step, float]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step = build()
    step()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, (torch.cuda.max_memory_allocated() - before) / MIB


def on_cpu(build: Callable[[], Step]) -> tuple[Step, float | None]:
    if not kineto_available():
        step = build()
        step()
        step()
        return step, None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at its first use: it tells stderr of every start and end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as held:
        step = build()
        step()
        gc.collect()
        with record_function(STUDIED):
            step()
    return step, peak_bytes(events_of(held)) / MIB


def events_of(held: profile) -> list[dict[str, Any]]:
    """The events of a profile, by way of a trace file: its format is public, the objects behind it are not."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        held.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def peak_bytes(events: Iterable[Mapping[str, Any]]) -> int:
    """max over the studied call of Σ bytes allocated − freed since the profile began."""
    events = list(events)
    call = next(event for event in events if event.get("name") == STUDIED and "dur" in event)
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    total = most = 0
    for when, size in sorted(changes, key=lambda change: change[0]):
        if when > call["ts"] + call["dur"]:
            break
        total += size
        most = max(most, total) if when >= call["ts"] else total
    return most
