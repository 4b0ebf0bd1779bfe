"""A step that is repeated, as replays of one CUDA graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing as is_capturing

from hyperball import graphs

WARMUPS = 2  # steps that are run as they are, after which every kernel is loaded and chosen
WORTH = 8  # fewer steps would not pay for the capture
TRIES = 2  # captures that fail in a row, after which no more are tried before `release`

Step = Callable[[Tensor], Tensor]
_LATEST: dict[torch.device, torch.cuda.CUDAGraph] = {}  # whose memory the next graph of that device uses again
_FAILURES: Counter[torch.device] = Counter()  # in a row
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}  # on which graphs are captured: memory is used again on its stream


def repeat(step: Step, start: Tensor, count: int) -> Tensor:
    """step(step(… step(start))), `count` times; the same kernels in the same order as a plain loop.

    On a GPU the first steps are run as they are and the others are replays of one graph, so that a small batch waits
    for the device and not for Python. A step that cannot be captured goes on as it began.
    """
    done, current = 0, start
    if start.is_cuda and count >= WORTH and _FAILURES[start.device] < TRIES and not is_capturing():
        current, done = replayed(step, start, count)
    for _ in range(count - done):
        current = step(current)
    return current


def replayed(step: Step, start: Tensor, count: int) -> tuple[Tensor, int]:
    """The point after as many steps as could be made, and their number: all of them, or those before the capture."""
    held, device = start.clone(), start.device
    here = torch.cuda.current_stream(device)
    side = _STREAMS.get(device) or _STREAMS.setdefault(device, torch.cuda.Stream(device))
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            held.copy_(step(held))
        graph = captured(lambda: held.copy_(step(held)), side, device)
    here.wait_stream(side)
    if graph is None:
        return held, WARMUPS
    for _ in range(count - WARMUPS):
        graph.replay()
    torch.cuda.synchronize(device)  # the next graph writes to the same memory
    return held, count


def captured(work: Callable[[], object], side: torch.cuda.Stream, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """The graph of the work, or None where it cannot be recorded.

    A graph's memory is a pool of its own, which the allocator keeps when the graph is gone: graph after graph would
    take more. So each takes over the pool of the one before, which is kept until then.
    """
    before = _LATEST.pop(device, None)
    try:
        graph = graphs.capture(work, stream=side, pool=None if before is None else before.pool())
    except RuntimeError:
        _FAILURES[device] += 1
        return None
    _LATEST[device], _FAILURES[device] = graph, 0
    return graph


def release() -> None:
    """Let go of the memory that is kept for the next graph, and try again what could not be captured."""
    _FAILURES.clear()
    if _LATEST:
        _LATEST.clear()
        torch.cuda.empty_cache()
