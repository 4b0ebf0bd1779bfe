"""The minimum of Q(m, s), channel by channel: Newton's method on both, and nested brackets for what that leaves.

Q is convex in (m, s), so a step from z to z + d that ends with <grad Q(z + d), d> <= 0 has decreased Q; only
gradients are compared, whose terms psi and chi are bounded, because values of Q drown in a far outlier's.
A channel that has settled is left alone, so that its bits do not depend on the others.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.batch_norm.brackets import balanced, bracketed, readable
from hyperball.kernels.batch_norm.operation import (
    Estimator,
    Totals,
    brief_sums,
    expectation,
    in_rows,
    packed_totals,
    totals,
    totals_in_rows,
    unpacked,
)
from hyperball.kernels.batch_norm.start import SAMPLE, Located, least_scale, mean_and_deviation, start

LOOK_EVERY = 4  # steps between looks at a GPU's values, each of which waits for it
JOINT_STEPS = 16  # Newton steps before a channel is handed to nested brackets
FULL_STEPS = 4  # compiled, on all samples; what they leave is finished by an operation that reads values
LOCAL_STEPS = 60  # of a penalty that is not convex
SECANT_STEPS = 8  # of which these may be prolonged
BLIND_LOCAL_STEPS = 8
LONGEST = 100.0  # the longest step, in units of s and as a factor of s


def chosen(mask: Tensor, a: Totals, b: Totals) -> Totals:
    """a in the channels of the mask, else b."""
    return Totals(*(torch.where(mask, p, q) for p, q in zip(a, b, strict=True)))


def newton_step(m: Tensor, s: Tensor, at: Totals, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(m, s) after H·(dm/s, dlog s) = (mean psi, mean chi - beta/2), H = mean psi'·(1, t)(1, t)ᵀ.

    s² changes by 1/(1 - 2·dlog s), which is exact for a quadratic.
    """
    h0, h1, h2 = at.slope.clamp(min=1e-6), at.slope_t, at.slope_tt.clamp(min=1e-6)
    determinant = torch.maximum(h0 * h2 - h1 * h1, 32.0 * torch.finfo(s.dtype).eps * h0 * h2)
    excess = at.chi - beta / 2.0
    shift = (h2 * at.psi - h1 * excess) / determinant
    growth = (h0 * excess - h1 * at.psi) / determinant
    most, least = (1.0 - LONGEST**-2) / 2.0, (LONGEST**2 - 1.0) / 2.0
    length = torch.maximum(torch.maximum(shift.abs() / LONGEST, growth / most), -growth / least).clamp(min=1.0)
    return m + s * (shift / length), (s / (1.0 - 2.0 * growth / length).sqrt()).clamp(min=least_scale(s))


def stepped(m: Tensor, s: Tensor, at: Totals, next_m: Tensor, next_s: Tensor) -> Totals:
    """The moments of psi' after a small step: exact while psi' does not change, as huber's does not inside c."""
    shift, ratio = (next_m - m) / s, s / next_s
    first = (at.slope_t - shift * at.slope) * ratio
    second = (at.slope_tt - 2.0 * shift * at.slope_t + shift * shift * at.slope) * ratio * ratio
    return at._replace(slope_t=first, slope_tt=second)


def moved(dm: Tensor, ds: Tensor, m: Tensor, s: Tensor, tolerance: float) -> Tensor:
    """Whether a channel moved by more than the tolerance, in units of s, and by more than rounding."""
    rounding = 4.0 * torch.finfo(m.dtype).eps * m.abs()
    return (dm.abs() > tolerance * s + rounding) | (ds.abs() > tolerance * s)


class Walk(NamedTuple):
    """(m, s) of channels, [2, C], the packed totals there, the (m, s) to look at next, and which have settled."""

    here: Tensor
    next: Tensor
    at: Tensor
    settled: Tensor

    def part(self, channels: Tensor) -> Walk:
        return Walk(*(item.index_select(-1, channels) for item in self))

    def replaced(self, channels: Tensor, part: Walk) -> Walk:
        return Walk(*(item.index_copy(-1, channels, other) for item, other in zip(self, part, strict=True)))


def descend(
    x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor, tolerance: float, beta: Tensor | None = None
) -> Located:
    """Newton steps from (m, s), shortened by the secant along the step where they end uphill.

    They end when none exceeds the tolerance, or, where lengths cannot be read, after a fixed number.
    """
    beta = expectation(c, e)[0] if beta is None else beta
    packed = packed_totals(x, m, s, c, e)
    lost = ~packed[:2].isfinite().all(0)
    here, target = torch.stack([m, s]), torch.stack([torch.zeros_like(beta), beta / 2.0])
    ahead = torch.stack(newton_step(m, s, unpacked(packed), beta))
    settled = lost | rests(ahead, here, packed, c, tolerance)
    end = walked(x, c, e, target, Walk(here, ahead, packed, settled), tolerance, JOINT_STEPS)
    at = unpacked(end.at)
    (m, s), (next_m, next_s) = end.here.unbind(0), end.next.unbind(0)
    at = chosen(end.settled & ~lost, stepped(m, s, at, next_m, next_s), at)
    m, s = torch.where(end.settled, end.next, end.here)
    return Located(torch.where(lost, torch.nan, m), s.clone(), at, end.settled)


def rests(ahead: Tensor, here: Tensor, packed: Tensor, c: Tensor, tolerance: float) -> Tensor:
    """Whether the step from here, [2, C], is below the tolerance in units of s, or rounding, and no tie causes that."""
    limit = torch.add(tolerance * here[1], here.abs(), alpha=4.0 * torch.finfo(here.dtype).eps)
    return ((ahead - here).abs() <= limit).all(0) & balanced(unpacked(packed), c)


def walked(x: Tensor, c: Tensor, e: Estimator, target: Tensor, walk: Walk, tolerance: float, steps: int) -> Walk:
    """Up to so many steps; once half the channels have settled, the others go on without them."""
    cpu = x.device.type == "cpu"
    for taken in range(steps):
        if readable(x) and (cpu or taken % LOOK_EVERY == 0):
            left = (~walk.settled).nonzero()[:, 0]
            if left.numel() == 0:
                break
            if 2 * left.numel() <= x.shape[1]:
                rest = x.index_select(1, left), c[left], e, target[:, left], walk.part(left)
                return walk.replaced(left, walked(*rest, tolerance, steps - taken))
        walk = advanced(x, c, e, target, walk, tolerance)
    return walk


def advanced(x: Tensor, c: Tensor, e: Estimator, target: Tensor, walk: Walk, tolerance: float) -> Walk:
    """One step of the channels that have not settled: taken where it ends downhill, else shortened.

    With r = (mean psi, mean chi) - target, the slope of Q along a step d is -<r, d>.
    """
    here, ahead, packed, settled = walk
    step, there = ahead - here, packed_totals(x, ahead[0], ahead[1], c, e)
    before = ((packed[:2] - target) * step).sum(0).abs()
    after = -((there[:2] - target) * step).sum(0)
    accepted = ~settled & (after <= 0.5 * before)
    here, packed = torch.where(accepted, ahead, here), torch.where(accepted, there, packed)
    full = torch.stack(newton_step(here[0], here[1], unpacked(packed), 2.0 * target[1]))
    share = (before / (before + after.relu()).clamp(min=least_scale(here))).clamp(min=0.02, max=0.7)
    ahead = torch.where(settled, ahead, torch.where(accepted, full, torch.addcmul(here, share, step)))
    settled = settled | (accepted & rests(ahead, here, packed, c, tolerance))
    return Walk(here, ahead, packed, settled)


def settle(
    x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor, tolerance: float, beta: Tensor | None = None
) -> Located:
    """The minimum of Q over [N, C, L]: joint steps, then brackets for the channels that these leave."""
    found = descend(x, c, e, m, s, tolerance, beta)
    if readable(m):
        hard = (~found.settled).nonzero()[:, 0]
        if hard.numel() == 0:
            return found
        part = nested(x.index_select(1, hard), c[hard], e, found.m[hard], found.s[hard], tolerance)
        return merged(found, hard, part)
    if x.shape[0] > 1 or x.shape[2] > SAMPLE[1]:  # brackets for every channel are for samples only
        return found
    return select(found.settled, found, nested(x, c, e, found.m, found.s, tolerance))


def nested(x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor, tolerance: float) -> Located:
    """`bracketed`, then joint steps from there where these settle."""
    inside = bracketed(x, c, e, m, s)
    closer = descend(x, c, e, inside.m, inside.s, tolerance)
    return select(closer.settled, closer, inside)


def select(mask: Tensor, a: Located, b: Located) -> Located:
    """a in the channels of the mask, else b."""
    m, s, settled = (torch.where(mask, p, q) for p, q in ((a.m, b.m), (a.s, b.s), (a.settled, b.settled)))
    return Located(m, s, chosen(mask, a.at, b.at), settled)


def merged(found: Located, channels: Tensor, part: Located) -> Located:
    """`found` with some channels replaced."""
    at = Totals(*(a.index_copy(0, channels, b) for a, b in zip(found.at, part.at, strict=True)))
    m, s = found.m.index_copy(0, channels, part.m), found.s.index_copy(0, channels, part.s)
    return Located(m, s, at, found.settled.index_copy(0, channels, part.settled))


@torch.library.custom_op("hyperball::rough_moments", mutates_args=())
def rough_moments(rows: Tensor, c: Tensor, name: str, shape: float, local: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(m0, s0, m) from a sample: one operation to a compiler, which would take minutes over its many small steps."""
    e = Estimator(name, shape)
    found = settle(rows, c, e.unit, *start(rows, c, e.unit), 1e-4)
    m = approach(rows, c, e, found.m, found.s, 1e-4) if local else found.m.clone()
    return found.m, found.s, m


@rough_moments.register_fake
def _(rows: Tensor, c: Tensor, name: str, shape: float, local: bool) -> tuple[Tensor, Tensor, Tensor]:
    channel = rows.new_empty(rows.shape[1])
    return channel, channel.clone(), channel.clone()


@torch.library.custom_op("hyperball::settled_moments", mutates_args=())
def settled_moments(
    x: Tensor, c: Tensor, m: Tensor, s: Tensor, at: Tensor, settled: Tensor, name: str, shape: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, s, totals) after a compiled graph's fixed steps: as they are where they settled, else solved in full."""
    if not readable(m) or bool(settled.all()):
        return m.clone(), s.clone(), at.clone()
    found, hard = Located(m, s, Totals(*at.unbind(0)), settled), (~settled).nonzero()[:, 0]
    rows, e = in_rows(x.index_select(1, hard)), Estimator(name, shape)
    m, s, totals_there, _ = merged(found, hard, settle(rows, c[hard], e, m[hard], s[hard], closest(m, e)))
    return m, s, torch.stack(totals_there)


@settled_moments.register_fake
def _(
    x: Tensor, c: Tensor, m: Tensor, s: Tensor, at: Tensor, settled: Tensor, name: str, shape: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(m), torch.empty_like(s), torch.empty_like(at)


def closest(m: Tensor, e: Estimator) -> float:
    """The length of a last step: after one of length d the error is of the order d², or d/n where a kink is crossed.

    That of psi''s moments, which the derivative in c needs, is of the order d, except huber's.
    """
    if m.dtype == torch.float64:
        return 4e-15
    return 3e-5 if e.name == "huber" else 1e-5


def refine(x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor) -> Located:
    """A fixed number of Newton steps on all samples from an estimate that is close."""
    beta, _ = expectation(c, e)
    at = totals(x, m, s, c, e)
    for _ in range(FULL_STEPS - 1):
        m, s = newton_step(m, s, at, beta)
        at = totals(x, m, s, c, e)
    next_m, next_s = newton_step(m, s, at, beta)
    settled = ~moved(next_m - m, next_s - s, m, s, closest(m, e) if m.dtype == torch.float32 else 1e-7)
    return Located(next_m, next_s, stepped(m, s, at, next_m, next_s), settled)


def compiled_moments(x: Tensor, c: Tensor, e: Estimator, rows: Tensor) -> Located:
    """`joint_moments` while tracing: the sample and what does not settle are operations, the rest is fused."""
    m, s, _ = rough_moments(rows, c, e.name, e.shape, False)
    found = refine(x, c, e, m, s)
    if e.group is not None:
        return found
    m, s, at = settled_moments(x, c, found.m, found.s, torch.stack(list(found.at)), found.settled, e.name, e.shape)
    return Located(m, s, Totals(*at.unbind(0)), found.settled)


def joint_moments(x: Tensor, c: Tensor, e: Estimator, rows: Tensor) -> Located:
    """The minimum (m, s) of Q for a convex penalty: found on a sample, then on all samples.

    Processes of a group see the same sums, so they take the same steps.
    """
    if torch.compiler.is_compiling():
        return compiled_moments(x, c, e, rows)
    if e.name == "quadratic":
        return mean_and_deviation(in_rows(x), e)
    beta, _ = expectation(c, e)
    whole = e.group is None and rows.shape[2] == x.numel() // max(x.shape[1], 1)
    found = settle(rows, c, e.alone, *start(rows, c, e, beta), closest(c, e) if whole else 1e-2, beta)
    if not whole:
        found = settle(in_rows(x), c, e, found.m, found.s, closest(c, e), beta)
    if readable(x) and not bool(found.settled.all()):
        warnings.warn(
            f"robust batch norm found no location and scale for channels {(~found.settled).nonzero()[:, 0].tolist()}",
            stacklevel=2,
        )
    return found


def local_step(s: Tensor, c: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """s·mean psi/mean psi', or the step of weights, mean psi/mean gain, where that is no guide; and which of them."""
    psi, gain, slope = packed[0], packed[1], packed[2]
    newton = slope > 0.1 * gain
    shift = psi / torch.where(newton, slope, gain).clamp(min=1e-6)
    return s * torch.clamp(shift, min=-c, max=c), newton


class Approach(NamedTuple):
    """A location, the move that led there, the step that gave it, and whether it has settled."""

    m: Tensor
    moved: Tensor
    step: Tensor
    still: Tensor


def approach(x: Tensor, c: Tensor, e: Estimator, m: Tensor, unit: Tensor, tolerance: float) -> Tensor:
    """The location that local steps reach from m."""
    zero = torch.zeros_like(m)
    begin = Approach(m, zero, zero, torch.zeros_like(m, dtype=torch.bool))
    return approached(x, c, e, unit, begin, tolerance, 0).m


def approached(
    x: Tensor, c: Tensor, e: Estimator, unit: Tensor, now: Approach, tolerance: float, taken: int
) -> Approach:
    """The steps after the first `taken`; once half the channels have settled, the others go on without them."""
    look, cpu = readable(x), x.device.type == "cpu"
    for step in range(taken, LOCAL_STEPS if look else BLIND_LOCAL_STEPS):
        if look and step > taken and (cpu or step % LOOK_EVERY == 0):
            left = (~now.still).nonzero()[:, 0]
            if left.numel() == 0:
                break
            if 2 * left.numel() <= x.shape[1]:
                rest = Approach(*(item[left] for item in now))
                rest = approached(x.index_select(1, left), c[left], e, unit[left], rest, tolerance, step)
                pairs = zip(now, rest, strict=True)
                return Approach(*(item.index_copy(0, left, other) for item, other in pairs))
        now = nearer(x, c, e, unit, now, tolerance, step)
    return now


def nearer(x: Tensor, c: Tensor, e: Estimator, unit: Tensor, now: Approach, tolerance: float, taken: int) -> Approach:
    """One local step; truncated_quadratic's, which gain a constant share each, are first prolonged by their secant."""
    step, newton = local_step(unit, c, packed_totals(x, now.m, unit, c, e, brief_sums))
    move = step
    if e.name == "truncated_quadratic":
        newton = torch.zeros_like(newton)  # psi jumps: a small step says nothing of the next
        if 0 < taken < SECANT_STEPS:
            ratio = now.moved / torch.where(now.step == step, 1.0, now.step - step)
            move = step * torch.where((ratio > 1.0) & (ratio < 8.0), ratio, 1.0)
    m = torch.where(now.still, now.m, now.m + move)
    close = torch.where(newton, max(tolerance, closest(m, e)), tolerance)
    rounding = 4.0 * torch.finfo(m.dtype).eps * m.abs()
    still = now.still | ~(step.abs() > close * unit + rounding)
    return Approach(m, move, step, still)


def local_moments(x: Tensor, c: Tensor, e: Estimator, rows: Tensor, m: Tensor, unit: Tensor) -> Located:
    """(m, s) for a penalty that is not convex, from huber's m and in units of huber's s."""
    if torch.compiler.is_compiling():
        _, _, m = rough_moments(rows, c, e.name, e.shape, True)
    elif e.group is not None or rows.shape[2] < x.numel() // x.shape[1]:
        m = approach(rows, c, e.alone, m, unit, 1e-2)
    x = in_rows(x)
    m = approach(x, c, e, m, unit, 16.0 * torch.finfo(m.dtype).eps)
    at = totals_in_rows(x, m, unit, c, e)
    expected, _ = expectation(c, e)
    return Located(m, unit * (at.t_psi / expected).clamp(min=0.0).sqrt(), at, torch.ones_like(m, dtype=torch.bool))
