"""L1 projection without sorting, against the usual sort and prefix sums, both on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperball.functional.projection import project

SHAPE = (2048, 1024)
RADII = (1.0, 10.0, 250.0)  # supports of about 3, 40 and 470 of 1,024 elements
TARGET = 5.0


def sorted_l1_ball(x: Tensor, radius: float) -> Tensor:
    """y = sgn(x) max(|x| - tau, 0), tau = max(0, max_k (sum of the k largest |x| - r) / k), by sorting."""
    size = x.abs()
    ordered = size.sort(dim=-1, descending=True).values
    thresholds = (ordered.cumsum(-1) - radius) / torch.arange(1, x.shape[-1] + 1)
    tau = thresholds.amax(-1, keepdim=True).clamp_min(0)
    return x.sign() * (size - tau).relu()


def milliseconds(call: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def compare(radius: float, repeats: int = 7) -> dict[str, Any]:
    """The best of some alternating runs of both, after checking that they agree."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(project(x, radius, p=1), sorted_l1_ball(x, radius), rtol=0, atol=1e-5)
    ours = reference = float("inf")
    for _ in range(repeats):
        ours = min(ours, milliseconds(lambda: project(x, radius, p=1)))
        reference = min(reference, milliseconds(lambda: sorted_l1_ball(x, radius)))
    return {
        "name": f"L1 ball {SHAPE[0]}x{SHAPE[1]}, radius {radius:g}",
        "ours_ms": ours,
        "reference_ms": reference,
        "ratio": reference / ours,
        "target": TARGET,
    }


def rows() -> list[dict[str, Any]]:
    """One row a radius: name, ours_ms, reference_ms, ratio (reference / ours), target (the least ratio)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ratio then holds on a busy machine too
    try:
        return [compare(radius) for radius in RADII]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for row in rows():
        print("{name}: {ours_ms:.1f} ms, sorted {reference_ms:.1f} ms, {ratio:.1f}x (>= {target}x)".format(**row))
