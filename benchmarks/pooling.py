"""Robust pooling against a joint LBFGS over all rows, as peers solve it, and against the plain mean.

The LBFGS starts at the mean and takes 100 iterations with both tolerances 0. Residuals are max |Σ phi'| in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperball import radial
from hyperball.functional.pooling import robust_pool
from hyperball.rows import Value

SHAPES = ((16, 512, 49), (2, 512, 1024))
LEAST_SPEEDUP = {"huber": 30.0, "pseudo_huber": 30.0, "welsch": 10.0}
CONVEX = ("huber", "pseudo_huber")
OUTLIERS = 0.1


def samples(shape: tuple[int, ...]) -> Tensor:
    """Normal samples, one in ten of them moved away by about 5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    return x + 5.0 * (torch.rand(shape, generator=generator) < OUTLIERS)


def joint_lbfgs(x: Tensor, value: Value) -> Tensor:
    """y = argmin Σ over all rows at once of phi(y − x), by torch.optim.LBFGS."""
    y = x.mean(-1).requires_grad_()
    optimizer = torch.optim.LBFGS([y], lr=1.0, max_iter=100, tolerance_grad=0.0, tolerance_change=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = value.row.phi(y.unsqueeze(-1) - x, **value.parameters).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return y.detach()


def residual(y: Tensor, x: Tensor, value: Value) -> float:
    """max over rows of |Σ phi'(y − x)|, in float64."""
    z = (y.unsqueeze(-1) - x.double()).double()
    return float((radial.gain(value, z.abs()) * z).sum(-1).abs().max())


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def best_of(repeats: int, *calls: Callable[[], Any]) -> list[float]:
    """The best time of each call over alternating runs."""
    times = [[milliseconds(call) for call in calls] for _ in range(repeats + 1)]
    return [min(column) for column in zip(*times[1:], strict=True)]


def against_lbfgs(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """reference / ours, and both residuals; for welsch, whose LBFGS may end in another minimum, the mean cost too."""
    x, value = samples(shape), radial.parse(name, "penalty")
    assert isinstance(value, Value)
    reference_y = joint_lbfgs(x, value)
    reference_ms = min(milliseconds(lambda: joint_lbfgs(x, value)) for _ in range(2))
    ours_ms = best_of(15, lambda: robust_pool(x, penalty=value))[0]
    found = residual(robust_pool(x, penalty=value), x, value), residual(reference_y, x, value)
    sizes = "×".join(map(str, shape))
    return {
        "name": f"{name} {sizes} against joint LBFGS, |g| {found[0]:.1e} against {found[1]:.1e}",
        "ours_ms": ours_ms,
        "reference_ms": reference_ms,
        "ratio": reference_ms / ours_ms,
        "target": LEAST_SPEEDUP[name],
        "residual": found[0],
        "reference_residual": found[1],
    }


def against_mean(name: str, shape: tuple[int, ...], threads: str) -> dict[str, Any]:
    """ours / x.mean(-1)."""
    x, value = samples(shape), radial.parse(name, "penalty")
    ours_ms, reference_ms = best_of(150, lambda: robust_pool(x, penalty=value), lambda: x.mean(-1))
    sizes = "×".join(map(str, shape))
    return {
        "name": f"{name} {sizes} against x.mean(-1){threads}",
        "ours_ms": ours_ms,
        "reference_ms": reference_ms,
        "ratio": ours_ms / reference_ms,
        "target": "<= 15",
    }


def rows() -> list[dict[str, Any]]:
    """One row a comparison: name, ours_ms, reference_ms, ratio (of LBFGS to ours, of ours to the mean), target."""
    threads = torch.get_num_threads()
    table = [against_mean(name, shape, f", {threads} threads") for shape in SHAPES for name in CONVEX]
    torch.set_num_threads(1)  # the ratio then holds on a busy machine too
    try:
        table += [against_mean(name, shape, ", 1 thread") for shape in SHAPES for name in CONVEX]
        return table + [against_lbfgs(name, shape) for shape in SHAPES for name in LEAST_SPEEDUP]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    for row in rows():
        print("{name}: {ours_ms:.3f} ms, {reference_ms:.3f} ms, {ratio:.1f} ({target})".format(**row))
