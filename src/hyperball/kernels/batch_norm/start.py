"""Where the search for location and scale begins: a sample and its rough median; and the quadratic's answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyperball.kernels.batch_norm.operation import (
    FARTHEST,
    Estimator,
    Totals,
    blocks,
    expectation,
    influence,
    means,
    work_dtype,
)
from hyperball.kernels.reading import row_sum

SAMPLE = (256, 4096)  # least and most samples of a channel on which the first estimate is made, a 16th in between
MEDIAN_LEVELS = 5  # of which 3^5 give its start, by medians of medians of three


class Located(NamedTuple):
    """Location and scale, the totals there, and whether the last step was small enough."""

    m: Tensor
    s: Tensor
    at: Totals
    settled: Tensor


def least_scale(s: Tensor) -> float:
    """The s that stands for 0."""
    return torch.finfo(s.dtype).tiny * 1e4


def extremes(x: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The smallest and largest finite sample of each channel, in all processes."""
    bound = torch.finfo(work_dtype(x)).max / 4.0
    ends = torch.stack([-x.amin(2).amin(0), x.amax(2).amax(0)]).to(work_dtype(x)).clamp(min=-bound, max=bound)
    if group is not None:
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    return -ends[0], ends[1]


def sample(x: Tensor, group: Any) -> Tensor:
    """A 16th of the samples of every channel, [1, C, k], at the same positions, which a golden ratio spreads evenly."""
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    count = flat.shape[0] * flat.shape[2]
    if group is None and count <= SAMPLE[0]:
        return flat.transpose(0, 1).reshape(1, flat.shape[1], count).to(work_dtype(x)).contiguous()
    ranks = 1 if group is None else dist.get_world_size(group)
    size = SAMPLE[0] // ranks + 1 if group is not None else min(max(count // 16, SAMPLE[0]), SAMPLE[1])
    steps = torch.arange(size, dtype=torch.float64, device=x.device)
    position = (steps * 0.6180339887498949 % 1.0 * count).long()
    rows = flat[position // flat.shape[2], :, position % flat.shape[2]].to(work_dtype(x)).t().contiguous()
    if group is None:
        return rows[None]
    shares = [torch.empty_like(rows) for _ in range(ranks)]
    dist.all_gather(shares, rows, group=group)
    return torch.cat(shares, -1)[None]


def rough_median(rows: Tensor) -> Tensor:
    """A median of [C, k]: of medians of three, five times over, which needs no sorting; of a short row the median."""
    count, levels = rows.shape[1], 0
    while levels < MEDIAN_LEVELS and 3 ** (levels + 1) <= count:
        levels += 1
    if levels < 3:
        return rows.median(-1).values
    rows = rows[:, :: count // 3**levels][:, : 3**levels]
    for _ in range(levels):
        third = rows.shape[1] // 3
        a, b, c = rows.split(third, 1)
        rows = torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))
    return rows[:, 0]


def start(rows: Tensor, c: Tensor, e: Estimator, beta: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The median, and the median of |x - median| in units of a standard deviation; where that is 0, the mean of it.

    Where more than 1 - beta/(the largest 2·chi) of the samples are the median and the others lie evenly on both sides
    of it, the minimum is at s = 0, which steps approach slowly, so it starts there; from there they also find the s > 0
    of samples that lie on one side.
    """
    rows = rows[0]
    m = rough_median(rows)
    distance = (rows - m.unsqueeze(-1)).abs_()
    s = 1.4826 * rough_median(distance)
    s = torch.where(s > 0.0, s, 1.2533 * row_sum(distance / rows.shape[1]))
    largest = 2.0 * influence(torch.full_like(c, FARTHEST), c, e)[1]
    share = 1.0 - row_sum(distance.sign_()) / rows.shape[1]
    beta = expectation(c, e)[0] if beta is None else beta
    vanishing = share > 1.0 - beta / largest + 0.05
    s = torch.where(vanishing, 0.0, torch.where(s.isfinite(), s, 1.0))
    return m, s.clamp(min=least_scale(s))


def mean_and_deviation(x: Tensor, e: Estimator) -> Located:
    """m = mean x, s² = mean (x - m)², from residuals in units of the half range, whose squares do not overflow."""
    low, high = extremes(x, e.group)
    m, half = low / 2.0 + high / 2.0, (high / 2.0 - low / 2.0).clamp(min=least_scale(low))
    unit = half.reciprocal()[:, None]

    def mean(power: int) -> Tensor:
        sums = torch.cat([row_sum((b - m[:, None]).mul_(unit).pow_(power)) for b in blocks(x)])
        return means(row_sum(sums.t().contiguous(), keepdim=True).t(), x, e)[0]

    m = m + half * mean(1)
    deviation = mean(2).sqrt()
    s = (half * deviation).clamp(min=least_scale(m))
    one, zero = torch.ones_like(m), torch.zeros_like(m)
    spread_out = (deviation > 0.0).to(m.dtype)
    return Located(m, s, Totals(zero, spread_out / 2.0, one, zero, spread_out, zero), one.bool())
