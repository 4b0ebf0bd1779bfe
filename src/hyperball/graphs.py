"""CUDA graphs of work that is repeated; where a capture fails, torch goes on as if there had been none.

After a failure torch's `capture_end` raises before it has told anybody that the capture is over. Up to torch 2.11 the
generator then refuses every random number, also to graphs that were captured before; in all versions the allocator
keeps what other streams have used, refuses the pool to another capture, and `torch.cuda.graph` stays on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_STREAMS: dict[int, torch.cuda.Stream] = {}  # on which graphs are captured, by device
_FAILED: list[torch.cuda.CUDAGraph] = []  # the allocator of pinned memory asks them for as long as the process runs


def capture(
    work: Callable[[], object], *, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """The graph of what `work` launches, or its error; after an error `pool` must not be given again."""
    held = torch.cuda.graph_pool_handle() if pool is None else pool
    place = torch.cuda.current_device()
    side = stream or _STREAMS.get(place) or _STREAMS.setdefault(place, torch.cuda.Stream())
    with torch.cuda.stream(side):
        graph, place = torch.cuda.CUDAGraph(), torch.cuda.current_device()
        torch.cuda.synchronize()
        try:
            graph.capture_begin(pool=held, capture_error_mode="thread_local")
            work()
            graph.capture_end()
        except BaseException:
            with suppress(RuntimeError):  # an error here is the device's, which shows again at its next use
                give_back(graph, held, place)
            raise
        finally:
            torch.cuda.synchronize()  # the generator's numbers of a graph are set to 0 here, by replays elsewhere
    return graph


def give_back(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:
    """End a failed capture on the current stream for the allocator and the generator."""
    try:
        graph.capture_end()
    except RuntimeError:
        _FAILED.append(graph)
        with suppress(RuntimeError):  # the first call is refused where `capture_end` came as far itself
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
    graph.reset()
    torch.cuda.synchronize()
    capture_nothing()


def capture_nothing() -> None:
    """One small launch: a capture that succeeds is what ends the generator's, whose state stays what it is."""
    number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    number.zero_()
    graph.capture_end()
