"""Times of several steps in turn, A B A B …, so that drift of the machine falls on all of them alike.

A step is a function without arguments. On a GPU it is timed by events, inside a CUDA graph or launched by Python, many
in a row so that the launches run ahead of the card as in a training loop; on a CPU by the clock, and with one thread by
its processor time. Every number is a median with the 20th and the 80th percentile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from hyperball import graphs

Step = Callable[[], object]
Times = dict[str, list[float]]
WARMUP = 3
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Spread:
    """A median with the 20th and the 80th percentile."""

    median: float
    p20: float
    p80: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """The value at place q·(n − 1) of sorted numbers, between two of them by linear interpolation."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(times: Sequence[float]) -> Spread:
    """Median, 20th and 80th percentile."""
    if not times:
        raise ValueError("`times` must hold at least one number, got none")
    ordered = sorted(times)
    return Spread(*(percentile(ordered, q) for q in (0.5, 0.2, 0.8)))


def ratios(ours: Sequence[float], reference: Sequence[float]) -> Spread:
    """ours / reference, round by round, so that what slows a whole round down cancels."""
    return spread([a / b for a, b in zip(ours, reference, strict=True)])


def clock_ms(step: Step) -> float:
    """Milliseconds of one call by the clock."""
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def cpu_ms(step: Step) -> float:
    """Milliseconds of processor time of one call, which other programs on the machine do not lengthen by waiting."""
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def event_ms(step: Step) -> float:
    """Milliseconds of one call on the GPU, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def in_turn(steps: Mapping[str, Step], rounds: int, seconds: float, timer: Callable[[Step], float]) -> Times:
    """Times of each step over alternating rounds: `rounds` of them, fewer (but three) once `seconds` have passed."""
    times: Times = {name: [] for name in steps}
    names, began = list(steps), time.perf_counter()
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            times[name].append(timer(steps[name]))
        if turn + 1 >= LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
    return times


def sets_over_cache(bytes_each: int, cache: int, most: int = 16) -> int:
    """How many sets of tensors of `bytes_each` exceed twice the cache together, from 1 to `most`."""
    return max(1, min(most, -(-2 * cache // max(bytes_each, 1))))


def cache_bytes(device: str) -> int:
    """The size of the GPU's second-level cache; nothing for a CPU, whose caches hold what programs reuse."""
    if device != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 50 * 2**20))


def enough(milliseconds: float, together: float = 1.0) -> int:
    """How many steps to time together so that they take `together` milliseconds, from 1 to 32."""
    return max(1, min(32, math.ceil(together / max(milliseconds, 1e-3))))


def repeated(steps: Sequence[Step], count: int) -> Step:
    """One call that takes `count` steps, going around the given ones."""
    turn = cycle(steps)

    def call() -> None:
        for step in islice(turn, count):
            step()

    return call


def captured(step: Step) -> Step:
    """The replay of a CUDA graph that holds the step."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return graphs.capture(step).replay
