"""Times of one robust pooling, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hyperball.experiments.runtime import Call, Subject, Timing, quotient
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import published
from hyperball.experiments.tables.declarative.pooling import SOURCE
from hyperball.nn.pooling import RobustPool1d

POOLED: dict[str, tuple[int, int, int]] = {"quick": (4, 128, 512)}
WHOLE = (24, 1024, 2048)


def pool_call(pool: torch.nn.Module, shape: tuple[int, int, int], backward: bool, device: torch.device) -> Call:
    """The pooling of random samples over the last dimension; or its gradient alone, of a graph that is kept."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = drawn.to(device).requires_grad_()
    pool.to(device)
    if not backward:
        return lambda: pool(x)
    y = pool(x)
    wanted = [x, *pool.parameters()]
    return lambda: torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)


def pooling_subjects(scale: Scale) -> tuple[Subject, ...]:
    facts = published()["ddn_pooling_runtime"]["cells"]
    shape = POOLED.get(scale, WHOLE)
    made = []
    for penalty, directions in {**facts, "truncated_quadratic": {}, "quadratic": {}}.items():
        for direction in ("forward", "backward"):
            numbers = directions.get(direction, (None, None))
            for how, number in zip(("fixed", "adaptive"), numbers, strict=True):
                if how == "adaptive" and penalty == "quadratic":
                    continue
                text = f"{penalty}(learn_c=True)" if how == "adaptive" else penalty
                subject = Subject(penalty, f"{direction}, {how}", number, pool_maker(text, shape, direction))
                if how == "adaptive":
                    subject = replace(
                        subject, over=(penalty, f"{direction}, fixed"), published_ratio=quotient(number, numbers[0])
                    )
                made.append(subject)
    return tuple(made)


def pool_maker(text: str, shape: tuple[int, int, int], direction: str) -> Callable[[torch.device], Call]:
    return lambda device: pool_call(RobustPool1d(penalty=text), shape, direction == "backward", device)


def table() -> Timing:
    """Forward and backward of one robust pooling."""
    return Timing(
        "pooling-runtime", "Time of robust pooling", f"{SOURCE}, slides", "milliseconds", pooling_subjects,
        lambda scale: f"{POOLED.get(scale, WHOLE)} samples, pooled over the last dimension",
        ("published times were taken without synchronizing an RTX 2080 Ti: ratios alone compare", "ratio: to fixed c"),
    )  # fmt: skip
