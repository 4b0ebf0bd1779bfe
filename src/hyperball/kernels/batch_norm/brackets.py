"""Nested brackets for the minimum of Q(m, s), where Newton's steps on both have not settled.

For fixed s mean psi falls in m, and at its zero m(s) mean chi falls in s: two brackets, which hold whatever the data.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.batch_norm.operation import Estimator, Totals, expectation, totals_in_rows
from hyperball.kernels.batch_norm.start import Located, extremes, least_scale

INNER_STEPS, OUTER_STEPS = 60, 80  # bounds of the loops, which end when brackets are narrow
BLIND_STEPS = 10, 24  # their lengths where values cannot be read because a CUDA graph is captured


def readable(tensor: Tensor) -> bool:
    """Whether Python may look at values: not while tracing or while a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def balanced(at: Totals, c: Tensor) -> Tensor:
    """Whether mean psi would be 0 within c·s: beside tied samples a step below rounding is no sign of it."""
    return at.psi.abs() <= c * at.slope + 1e-6 * at.chi.sqrt()


def locate(
    x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor, low: Tensor, high: Tensor, pending: Tensor
) -> tuple[Tensor, Totals]:
    """m with mean psi((x - m)/s) = 0, and the totals there: Newton inside the bracket, bisection elsewhere."""
    last = before = high - low
    eps = torch.finfo(m.dtype).eps
    running, at = pending, totals_in_rows(x, m, s, c, e)
    look = readable(m)
    for _ in range(INNER_STEPS if look else BLIND_STEPS[0]):
        low = torch.where(at.psi >= 0.0, m, low)
        high = torch.where(at.psi <= 0.0, m, high)
        step, rounding = s * at.psi / at.slope.clamp(min=1e-6), 4.0 * eps * (m.abs() + s)
        newton = (m + step >= low) & (m + step <= high) & (2.0 * step.abs() <= before) & (step.abs() > rounding)
        target = torch.where(newton, m + step, low / 2.0 + high / 2.0)
        size = (target - m).abs()
        running = running & ~((step.abs() <= rounding) & balanced(at, c)) & (high - low > 2.0 * rounding)
        if look and not bool(running.any()):
            break
        m = torch.where(running, target, m)
        last, before = torch.where(running, size, last), torch.where(running, last, before)
        at = totals_in_rows(x, m, s, c, e)
    return m, at


class Bracket(NamedTuple):
    """Bounds of log s, which of them have been seen, and how far a step may go."""

    low: Tensor
    high: Tensor
    below: Tensor
    above: Tensor
    reach: Tensor
    last: Tensor
    before: Tensor

    @staticmethod
    def around(s: Tensor, low_m: Tensor, high_m: Tensor, beta: Tensor) -> Bracket:
        """From the least scale to (max - min)/sqrt(beta), which t² >= 2·chi makes an upper bound."""
        low = torch.full_like(s, math.log(least_scale(s)))
        largest = ((high_m / 2.0 - low_m / 2.0) / beta.sqrt()).clamp(min=least_scale(s)).log() + math.log(2.0)
        high = torch.maximum(largest, low)
        none = torch.zeros_like(s, dtype=torch.bool)
        return Bracket(low, high, none, none, torch.full_like(s, 2.0), high - low, high - low)

    def next(self, spot: Tensor, at: Totals, beta: Tensor, running: Tensor) -> tuple[Bracket, Tensor, Tensor]:
        """The bracket after mean chi at `spot`, where to look next, and which channels still move.

        Newton's step is that of log chi, which is straight in log s for a quadratic; its reach doubles until there
        is a bound on either side.
        """
        up = at.chi > beta / 2.0
        low, high = torch.where(running & up, spot, self.low), torch.where(running & ~up, spot, self.high)
        below, above = self.below | (running & up), self.above | (running & ~up)
        tiny, both = least_scale(spot), below & above
        fall = (at.slope_tt - at.slope_t.square() / at.slope.clamp(min=1e-6)) / at.chi.clamp(min=tiny)
        step = (2.0 * at.chi / beta).clamp(min=tiny).log() / fall.clamp(min=1e-6)
        step = step.clamp(min=-self.reach, max=self.reach)
        newton = (spot + step > low) & (spot + step < high) & (~both | (2.0 * step.abs() <= self.before))
        outside = torch.where(both, (low + high) / 2.0, (spot + step).clamp(min=low, max=high))
        target = torch.where(newton, spot + step, outside)
        size = (target - spot).abs()
        running = running & (size > 8.0 * torch.finfo(spot.dtype).eps * (1.0 + spot.abs()))
        last, before = torch.where(running, size, self.last), torch.where(running, self.last, self.before)
        reach = torch.where(both, self.reach, 2.0 * self.reach)
        return Bracket(low, high, below, above, reach, last, before), target, running


def bracketed(x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor) -> Located:
    """(m, s) where mean chi at m(s) crosses beta/2, by brackets in log s; the least scale where it never does."""
    beta, _ = expectation(c, e)
    low_m, high_m = extremes(x, e.group)
    bracket = Bracket.around(s, low_m, high_m, beta)
    spot, running = s.log().clamp(min=bracket.low, max=bracket.high), torch.ones_like(s, dtype=torch.bool)
    look = readable(m)
    for _ in range(OUTER_STEPS if look else BLIND_STEPS[1]):
        m, at = locate(x, c, e, m.clamp(min=low_m, max=high_m), spot.exp(), low_m, high_m, running)
        bracket, target, running = bracket.next(spot, at, beta, running)
        if look and not bool(running.any()):
            break
        spot = torch.where(running, target, spot)
    return Located(m, spot.exp(), at, ~running)
