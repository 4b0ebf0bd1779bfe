"""Robust location and scale of every channel, jointly: Huber's proposal 2 (Huber, *Robust Statistics*, 1981).

For a convex penalty phi of radius c the location m and the scale s of the samples x_i minimize

    Q(m, s) = sum_i s·phi((x_i - m)/s; c) + n·s·beta/2,

which is convex in both, so that the minimum is unique and equivariant under x -> a·x + b. With t = (x - m)/s and
chi = t·psi - phi it is where mean psi(t) = 0, so m is the robust pool of x at radius c·s, and mean 2·chi(t) = beta;
for huber, 2·chi = min(t, c)². beta(c) = E 2·chi(Z) of a standard normal Z makes s its standard deviation. For
c -> inf, chi = t²/2 and beta = 1: mean and standard deviation.

Penalties that are not convex have no such minimum. They take (m0, s0) from huber at the same c; then m is the
minimum of sum phi((x - m)/s0) reached from m0, and s² = s0²·mean t·psi(t)/E Z·psi(Z) about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from hyperball import radial

SAMPLE = (256, 4096)  # least and most samples of a channel on which the first estimate is made, a 16th in between
MEDIAN_SAMPLE = 64  # of which these give its start
MOST_STEPS = 60  # where steps end when they are small enough
ROUGH_STEPS = 16  # where their number is fixed: on the sample, or on all samples of a small channel
FULL_STEPS = 4  # and then on all samples; chosen by a test on channels with 0, 25 and 45 % outliers
LOCAL_STEPS = 8  # of a penalty that is not convex, on the sample and again on all samples
LEAST = 1e-3  # the least curvature, as a share of the samples, that a derivative divides by
FARTHEST = 1e15  # residuals, in units of s, beyond which they are not told apart
BLOCK = 2**17  # samples handled at once by each thread of a CPU, so that temporaries stay in its cache


class Totals(NamedTuple):
    """Means over a channel's samples: psi, chi, psi'·t^k for k = 0, 1, 2, and t·psi."""

    psi: Tensor
    chi: Tensor
    slope: Tensor
    slope_t: Tensor
    slope_tt: Tensor
    t_psi: Tensor


@dataclass(frozen=True)
class Estimator:
    """A penalty by name (barron with its shape), and the processes among which channels are divided."""

    name: str
    shape: float = 1.0
    group: Any = None

    @property
    def convex(self) -> bool:
        if self.name == "barron":
            return self.shape >= 1.0
        return bool(radial.TABLE[self.name].convex)  # type: ignore[attr-defined]

    @property
    def unit(self) -> Estimator:
        """The convex estimator that gives the scale in which c is measured: itself, or huber."""
        return self if self.convex else Estimator("huber", group=self.group)

    @property
    def alone(self) -> Estimator:
        """The same in this process only."""
        return replace(self, group=None)


def spread(values: Tensor, x: Tensor) -> Tensor:
    """Per-channel values in a shape that broadcasts against x, [N, C, *spatial]."""
    return values.reshape(-1, *(1,) * (x.dim() - 2))


def channel_sum(samples: Tensor) -> Tensor:
    """The sum over all dimensions but the channels'."""
    return samples.sum([d for d in range(samples.dim()) if d != 1])


class AllReduce(Function):
    """The sum over the processes of a group, of values and of gradients."""

    @staticmethod
    def forward(values: Tensor, group: Any) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return AllReduce.apply(grads[0], ctx.group), None


def reduced(values: Tensor, group: Any) -> Tensor:
    """The sum of `values` over the group's processes; without a group, `values`."""
    return values if group is None else AllReduce.apply(values, group)


def sample_count(x: Tensor, group: Any) -> Tensor | float:
    """n, the samples of each channel in all processes."""
    count = x.numel() // max(x.shape[1], 1)
    if group is None:
        return float(count)
    return reduced(torch.full((), float(count), dtype=work_dtype(x), device=x.device), group)


def work_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def influence(t: Tensor, c: Tensor, e: Estimator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(psi, chi, psi', t held where psi' is 0) of residuals t; chi = t·psi - phi in a form that cannot overflow.

    A penalty that is not convex has no use for chi; its gain stands there. Indicators are differences of signs,
    which a CPU computes faster than comparisons.
    """
    if e.name == "quadratic":
        return t, t * t / 2.0, torch.ones_like(t), t
    if e.name == "huber":
        psi = torch.maximum(torch.minimum(t, c), -c)
        return psi, psi * psi / 2.0, 1.0 - (t - psi).sign().square(), psi
    t = t.clamp(min=-FARTHEST, max=FARTHEST)
    if e.name == "truncated_quadratic":
        inside = 1.0 - (t.abs() - c).relu().sign()
        return t * inside, inside, inside, t
    if e.name == "pseudo_huber":
        gain = ((t / c).square() + 1.0).rsqrt()
        psi = t * gain
        return psi, psi * psi / (1.0 + gain), gain * gain * gain, t
    return table_influence(t, c, e)


def table_influence(t: Tensor, c: Tensor, e: Estimator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by the radial table; barron's chi is (1 - 1/a)·t·psi + (b/a)·c²·(1 - gain) where t·psi - phi cancels."""
    row: Any = radial.TABLE[e.name]
    parameters = {"rho": c, "shape": e.shape} if e.name == "barron" else {"rho": c}
    n = t.abs()
    gain, slope = row.gain_and_curvature(n, **parameters)
    psi = t * gain
    if not e.convex:
        return psi, gain, slope, t
    a, b = e.shape, max(abs(e.shape - 2.0), 1e-6)
    far = (1.0 - 1.0 / a) * (t * psi) + b / a * c * c * (1.0 - gain)
    return psi, torch.where(n > c, far, t * psi - row.phi(t, **parameters)), slope, t


def block_sums(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Tensor:
    """The sums behind `Totals` over one block of samples, [6, C]."""
    t = (x.to(m.dtype) - spread(m, x)) * spread(1.0 / s, x)
    psi, chi, slope, held = influence(t, spread(c, x), e)
    slope_t = slope * held
    t_psi = t.clamp(min=-FARTHEST, max=FARTHEST) * psi
    return torch.stack([channel_sum(item) for item in (psi, chi, slope, slope_t, slope_t * held, t_psi)])


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    """x in parts along the batch that stay in a CPU's cache; elsewhere, and where kernels are fused, x."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return (x,)
    size = max(1, BLOCK * torch.get_num_threads() * x.shape[0] // max(x.numel(), 1))
    return x.split(size) if size < x.shape[0] else (x,)


def totals(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Totals:
    """The means of psi, chi, psi', … at (m, s) over all samples of all processes."""
    first, *rest = (block_sums(block, m, s, c, e) for block in blocks(x))
    for part in rest:
        first = first + part
    return Totals(*(reduced(first, e.group) / sample_count(x, e.group)).unbind(0))


def truncated_expectation(c: Tensor) -> tuple[Tensor, Tensor]:
    """E Z²·[|Z| <= c] = erf(c/√2) - d with d = c·√(2/π)·exp(-c²/2), and its derivative c·d."""
    c = c.clamp(max=1e4)  # c² may overflow where the tail is 0
    density = c * math.sqrt(2.0 / math.pi) * torch.exp(-c * c / 2.0)
    return torch.erf(c / math.sqrt(2.0)) - density, c * density


def huber_expectation(c: Tensor) -> tuple[Tensor, Tensor]:
    """E min(Z², c²) = E Z²·[|Z| <= c] + c²·erfc(c/√2), and its derivative 2c·erfc(c/√2)."""
    tail = torch.erfc(c / math.sqrt(2.0))
    held = c.clamp(max=1e4)
    return truncated_expectation(c)[0] + held * held * tail, 2.0 * held * tail


def normal_nodes(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes z and weights with sum weights·f(z) = E f(Z) for even f that vanishes like z² at 0: trapezoids in log z."""
    log = torch.linspace(-9.0, 2.4, 128, dtype=torch.float64, device="cpu")
    z = log.exp()
    weights = z * torch.exp(-z * z / 2.0)
    weights = weights / (weights * z * z).sum()
    return z.to(like), weights.to(like)


def expectation(c: Tensor, e: Estimator) -> tuple[Tensor, Tensor]:
    """(beta, dbeta/dc) with beta = E 2·chi(Z), or E Z·psi(Z) where the penalty is not convex, per channel."""
    if e.name == "quadratic":
        return torch.ones_like(c), torch.zeros_like(c)
    if e.name == "huber":
        return huber_expectation(c)
    if e.name == "truncated_quadratic":
        return truncated_expectation(c)
    z, weights = normal_nodes(c)
    column = c.reshape(-1, 1)
    psi, chi, slope, _ = influence(z.expand(column.shape[0], -1), column, e)
    value = 2.0 * chi if e.convex else z * psi
    change = 2.0 * value - (2.0 * z * z * slope if e.convex else z * (psi + z * slope))  # Euler, degree 2
    return (weights * value).sum(-1), (weights * change).sum(-1) / c


def newton_step(m: Tensor, s: Tensor, at: Totals, beta: Tensor, damping: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(m, s) after H·(dm/s, dlog s) = (mean psi, mean chi - beta/2).

    H = mean psi'·(1, t)(1, t)ᵀ; damping moves it towards (1, t·psi) of the quadratics that lie above phi, whose
    step does not increase Q, and beyond 1 shortens the step. s² changes by 1/(1 - 2·dlog s), which is exact for a
    quadratic, and at most tenfold up.
    """
    h0, h1, h2 = at.slope, at.slope_t, at.slope_tt
    if damping is not None:
        share = damping.clamp(max=1.0)
        h0, h1, h2 = (
            torch.lerp(h0, torch.ones_like(h0), share),
            torch.lerp(h1, at.psi, share),
            torch.lerp(h2, at.t_psi, share),
        )
    h0, h2 = h0.clamp(min=1e-6), h2.clamp(min=1e-6)
    determinant = torch.maximum(h0 * h2 - h1 * h1, 1e-4 * h0 * h2)
    excess = at.chi - beta / 2.0
    shift = (h2 * at.psi - h1 * excess) / determinant
    growth = (h0 * excess - h1 * at.psi) / determinant
    length = torch.maximum(torch.maximum(shift.abs() / 2.0, growth / 0.45), -growth / 5e3).clamp(min=1.0)
    if damping is not None:
        length = length * damping.clamp(min=1.0)
    return m + s * (shift / length), s / (1.0 - 2.0 * growth / length).sqrt()


class Located(NamedTuple):
    """Location and scale, and the totals there."""

    m: Tensor
    s: Tensor
    at: Totals


def stepped(m: Tensor, s: Tensor, at: Totals, beta: Tensor, damping: Tensor | None = None) -> Located:
    """A last step, and the moments of psi' after it: exact while psi' does not change, as huber's does not inside c."""
    next_m, next_s = newton_step(m, s, at, beta, damping)
    shift, ratio = (next_m - m) / s, s / next_s
    first = (at.slope_t - shift * at.slope) * ratio
    second = (at.slope_tt - 2.0 * shift * at.slope_t + shift * shift * at.slope) * ratio * ratio
    return Located(next_m, next_s, at._replace(slope_t=first, slope_tt=second))


def descend(x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor, tolerance: float) -> Located:
    """Minimize Q from (m, s) by Newton steps that are damped, per channel, until Q does not increase.

    Where their lengths can be read, the steps end when none exceeds the tolerance; else their number is fixed.
    """
    beta, _ = expectation(c, e)
    info = torch.finfo(m.dtype)
    best, damping = torch.full_like(m, torch.inf), torch.zeros_like(m)
    at, kept, look = None, (m, s), readable(m)
    for _ in range(MOST_STEPS if look else ROUGH_STEPS):
        here = totals(x, m, s, c, e)
        q = s * (here.t_psi - here.chi + beta / 2.0)
        accepted = ~(q > best * (1.0 + 64.0 * info.eps))
        best = torch.where(accepted, q, best)
        kept = (torch.where(accepted, m, kept[0]), torch.where(accepted, s, kept[1]))
        at = here if at is None else Totals(*(torch.where(accepted, a, b) for a, b in zip(here, at)))
        eased = torch.where(damping < 0.02, 0.0, damping / 4.0)
        damping = torch.where(accepted, eased, (4.0 * damping).clamp(min=0.1, max=1e4))
        m, s = newton_step(*kept, at, beta, damping)
        s = s.clamp(min=least_scale(s))
        if look and not bool(moved(m - kept[0], s - kept[1], m, s, tolerance).logical_or(damping > 0.0).any()):
            break
    assert at is not None
    m, s, at = stepped(*kept, at, beta, damping)
    return Located(m, s.clamp(min=least_scale(s)), at)


def refine(x: Tensor, c: Tensor, e: Estimator, m: Tensor, s: Tensor) -> Located:
    """A fixed number of Newton steps on all samples from an estimate that is close."""
    beta, _ = expectation(c, e)
    at = totals(x, m, s, c, e)
    for _ in range(FULL_STEPS - 1):
        m, s = newton_step(m, s, at, beta)
        at = totals(x, m, s, c, e)
    return stepped(m, s, at, beta)


def readable(tensor: Tensor) -> bool:
    """Whether Python may look at values: on a CPU, without waiting, and not inside vmap or while tracing."""
    if torch.compiler.is_compiling() or tensor.device.type != "cpu":
        return False
    try:
        tensor.sum().item()
    except RuntimeError:
        return False
    return True


def moved(dm: Tensor, ds: Tensor, m: Tensor, s: Tensor, tolerance: float) -> Tensor:
    """Whether a channel moved by more than the tolerance, in units of s, and by more than rounding."""
    rounding = 4.0 * torch.finfo(m.dtype).eps * m.abs()
    return (dm.abs() > tolerance * s + rounding) | (ds.abs() > tolerance * s)


def sample(x: Tensor, group: Any) -> Tensor:
    """A 16th of the samples of every channel, [k, C], at the same positions, which a golden ratio spreads evenly."""
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    count = flat.shape[0] * flat.shape[2]
    if group is None and count <= SAMPLE[0]:
        return flat.transpose(1, 2).reshape(count, flat.shape[1]).to(work_dtype(x))
    ranks = 1 if group is None else dist.get_world_size(group)
    size = SAMPLE[0] // ranks + 1 if group is not None else min(max(count // 16, SAMPLE[0]), SAMPLE[1])
    steps = torch.arange(size, dtype=torch.float64, device=x.device)
    position = (steps * 0.6180339887498949 % 1.0 * count).long()
    rows = flat[position // flat.shape[2], :, position % flat.shape[2]].to(work_dtype(x)).contiguous()
    if group is None:
        return rows
    shares = [torch.empty_like(rows) for _ in range(ranks)]
    dist.all_gather(shares, rows, group=group)
    return torch.cat(shares)


def start(rows: Tensor, c: Tensor, e: Estimator) -> tuple[Tensor, Tensor]:
    """The median, and the median of |x - median| in units of a standard deviation; where that is 0, the latter.

    Where more than 1 - beta/(the largest 2·chi) of the samples are the median, the minimum is at s = 0, which steps
    approach slowly, so it starts there.
    """
    few = rows[:MEDIAN_SAMPLE].t()
    m = few.median(-1).values
    s = 1.4826 * (few - m.unsqueeze(-1)).abs().median(-1).values
    s = torch.where(s > 0.0, s, rows.std(0, correction=0))
    largest = 2.0 * influence(torch.full_like(c, FARTHEST), c, e)[1]
    share = (rows == m).to(rows.dtype).mean(0)
    vanishing = share > 1.0 - expectation(c, e)[0] / largest + 0.05
    return m, torch.where(vanishing, 0.0, s).clamp(min=least_scale(s))


def least_scale(s: Tensor) -> float:
    return torch.finfo(s.dtype).tiny * 1e4


@torch.library.custom_op("hyperball::rough_moments", mutates_args=())
def rough_moments(rows: Tensor, c: Tensor, name: str, shape: float, local: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(m0, s0, m) from a sample: one operation to a compiler, which would take minutes over its many small steps."""
    e = Estimator(name, shape)
    found = descend(rows, c, e.unit, *start(rows, c, e.unit), 1e-4)
    m = approach(rows, c, e, found.m, found.s, 1e-4) if local else found.m.clone()
    return found.m, found.s, m


@rough_moments.register_fake
def _(rows: Tensor, c: Tensor, name: str, shape: float, local: bool) -> tuple[Tensor, Tensor, Tensor]:
    channel = rows.new_empty(rows.shape[1])
    return channel, channel.clone(), channel.clone()


def joint_moments(x: Tensor, c: Tensor, e: Estimator, rows: Tensor) -> Located:
    """The minimum (m, s) of Q for a convex penalty: found on a sample, then on all samples.

    After a step of length d the error is of the order d².
    """
    closest = 4e-15 if rows.dtype == torch.float64 else 1e-5
    if torch.compiler.is_compiling():
        m, s, _ = rough_moments(rows, c, e.name, e.shape, False)
        return refine(x, c, e, m, s)
    whole = e.group is None and rows.shape[0] == x.numel() // max(x.shape[1], 1)
    found = descend(rows, c, e.alone, *start(rows, c, e), closest if whole else 1e-2)
    if whole:
        return found
    if e.group is None and readable(x):  # processes take the same number of steps
        return descend(x, c, e, found.m, found.s, closest)
    return refine(x, c, e, found.m, found.s)


def local_step(m: Tensor, s: Tensor, c: Tensor, at: Totals) -> Tensor:
    """m + s·mean psi/mean psi', or the step of weights, mean psi/mean gain, where that is no guide."""
    shift = at.psi / torch.where(at.slope > 0.1 * at.chi, at.slope, at.chi).clamp(min=1e-6)
    return m + s * torch.clamp(shift, min=-c, max=c)


def approach(x: Tensor, c: Tensor, e: Estimator, m: Tensor, unit: Tensor, tolerance: float) -> Tensor:
    """The location that local steps reach from m."""
    look = e.group is None and readable(m)
    for _ in range(MOST_STEPS if look else LOCAL_STEPS):
        before, m = m, local_step(m, unit, c, totals(x, m, unit, c, e))
        if look and not bool(moved(m - before, torch.zeros_like(m), m, unit, tolerance).any()):
            break
    return m


def local_moments(x: Tensor, c: Tensor, e: Estimator, rows: Tensor, m: Tensor, unit: Tensor) -> Located:
    """(m, s) for a penalty that is not convex, from huber's m and in units of huber's s."""
    if torch.compiler.is_compiling():
        _, _, m = rough_moments(rows, c, e.name, e.shape, True)
    else:
        m = approach(rows, c, e.alone, m, unit, 1e-2)
    m = approach(x, c, e, m, unit, 16.0 * torch.finfo(m.dtype).eps)
    at = totals(x, m, unit, c, e)
    expected, _ = expectation(c, e)
    return Located(m, unit * (at.t_psi / expected).clamp(min=0.0).sqrt(), at)
