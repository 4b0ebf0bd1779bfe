"""A step that is repeated, as replays of one CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

WARMUPS = 2  # steps that are run as they are, after which every kernel is loaded and chosen
WORTH = 8  # fewer steps would not pay for the capture

Step = Callable[[Tensor], Tensor]
_LATEST: dict[torch.device, torch.cuda.CUDAGraph] = {}  # whose memory the next graph of that device uses again
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}  # on which graphs are captured: memory is used again on its stream


def repeat(step: Step, start: Tensor, count: int) -> Tensor:
    """step(step(… step(start))), `count` times; the same kernels in the same order as a plain loop.

    On a GPU the first steps are run as they are and the others are replays of one graph, so that a small batch waits
    for the device and not for Python. A step that cannot be captured goes on as it began.
    """
    done, current = 0, start
    if start.is_cuda and count >= WORTH and not torch.cuda.is_current_stream_capturing():
        current, done = replayed(step, start, count)
    for _ in range(count - done):
        current = step(current)
    return current


def replayed(step: Step, start: Tensor, count: int) -> tuple[Tensor, int]:
    """The point after as many steps as could be made, and their number: all of them, or those before the capture."""
    held, graph = start.clone(), torch.cuda.CUDAGraph()
    here = torch.cuda.current_stream(start.device)
    side = _STREAMS.get(start.device) or _STREAMS.setdefault(start.device, torch.cuda.Stream(start.device))
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            held.copy_(step(held))
        captured = capture(graph, lambda: held.copy_(step(held)), start.device)
    here.wait_stream(side)
    if not captured:
        return held, WARMUPS
    for _ in range(count - WARMUPS):
        graph.replay()
    torch.cuda.synchronize(start.device)  # the next graph writes to the same memory
    return held, count


def capture(graph: torch.cuda.CUDAGraph, work: Callable[[], object], device: torch.device) -> bool:
    """Whether the work could be recorded; `torch.cuda.graph` would empty the allocator's cache every time.

    A graph's memory is a pool of its own, which the allocator keeps when the graph is gone: graph after graph would
    take more. So each takes over the pool of the one before, which is kept until then.
    """
    torch.cuda.synchronize()
    before = _LATEST.get(device)
    graph.capture_begin(pool=None if before is None else before.pool(), capture_error_mode="thread_local")
    try:
        work()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        torch.cuda.synchronize()
        return False
    graph.capture_end()
    _LATEST[device] = graph
    return True


def release() -> None:
    """Let go of the memory that is kept for the next graph."""
    if _LATEST:
        _LATEST.clear()
        torch.cuda.empty_cache()
