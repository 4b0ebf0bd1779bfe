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
from hyperball.kernels.reading import row_sum

LEAST = 1e-3  # the least curvature, as a share of the samples, that a derivative divides by
SHORT = 32  # samples in a row of memory below which rows are made of the whole batch
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

    def __post_init__(self) -> None:
        """Barron of shape 1, 2 or -inf goes by its simpler name."""
        simpler = {1.0: "pseudo_huber", 2.0: "quadratic", -math.inf: "welsch"}
        if self.name == "barron" and self.shape in simpler:
            object.__setattr__(self, "name", simpler[self.shape])

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


def in_rows(x: Tensor) -> Tensor:
    """x as [N, C, L] whose last dimension is contiguous and long: sums over it do not depend on the other channels."""
    if torch.compiler.is_compiling():
        return x
    flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)
    if flat.shape[2] < SHORT:
        flat = flat.transpose(0, 1).flatten(1).unsqueeze(0)
    return flat.to(work_dtype(x)).contiguous()


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


def influence(t: Tensor, c: Tensor, e: Estimator, chi: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(psi, chi, psi', t held where psi' is 0) of residuals t; chi = t·psi - phi in a form that cannot overflow.

    A penalty that is not convex has no use for chi; its gain stands there, and psi' where chi is not asked for.
    Indicators are differences of signs, which a CPU computes faster than comparisons.
    """
    if e.name == "quadratic":
        return t, t * t / 2.0 if chi else t, torch.ones_like(t), t
    if e.name == "huber":
        psi = torch.maximum(torch.minimum(t, c), -c)
        return psi, psi * psi / 2.0 if chi else psi, 1.0 - (t - psi).sign().square(), psi
    t = t.clamp(min=-FARTHEST, max=FARTHEST)
    if e.name == "truncated_quadratic":
        inside = 1.0 - (t.abs() - c).relu().sign()
        return t * inside, inside, inside, t
    square = (t / c).square()
    if e.name == "welsch":
        gain = (-0.5 * square).exp()
        return t * gain, gain, gain * (1.0 - square), t
    if e.name == "pseudo_huber":
        gain = (square + 1.0).rsqrt()
        psi, slope = t * gain, gain * gain * gain
        return psi, psi * psi / (1.0 + gain) if chi else slope, slope, t
    return barron_influence(t, c, square, e.shape, chi and e.convex)


def barron_influence(
    t: Tensor, c: Tensor, square: Tensor, a: float, chi: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """psi = t·T^(a/2 - 1), T = 1 + q/b, q = (t/c)²; chi = (1 - 1/a)·t·psi + (b/a)·c²·(1 - gain), of two terms >= 0.

    1 - gain is 1 - exp(-y) = tanh(y/2)·(1 + exp(-y)), right also where y is below rounding; without chi, gain is there.
    """
    b = max(abs(a - 2.0), 1e-6)
    share = square / b
    base = share + 1.0
    if a in (0.0, -2.0):
        gain = base.reciprocal() if a == 0.0 else base.reciprocal().square()
        log = gain
    else:
        log = log_of_sum(share, base) if chi or a < -8.0 else base.log()  # k·log magnifies base's rounding
        gain = ((a / 2.0 - 1.0) * log).exp()
    psi, slope = t * gain, gain * (1.0 + (a - 1.0) * share) / base
    if not chi:
        return psi, gain, slope, t
    missing = torch.tanh((0.5 - a / 4.0) * log) * (1.0 + gain)
    return psi, (1.0 - 1.0 / a) * (t * psi) + b / a * c * (c * missing), slope, t


def log_of_sum(w: Tensor, base: Tensor) -> Tensor:
    """log(1 + w), w >= 0, from base = 1 + w as rounded: log(base)·w/(base - 1), faster than log1p."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return w.log1p()
    tiny = 1e-30
    return base.log() * ((w + tiny) / (base - 1.0 + tiny))


def summands(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> tuple[Tensor, ...]:
    """psi, chi, psi'·t^k for k = 0, 1, 2, and t·psi of every sample; the last is left out for a convex penalty."""
    t = (x.to(m.dtype) - spread(m, x)) * spread(1.0 / s, x)
    psi, chi, slope, held = influence(t, spread(c, x), e)
    slope_t = slope * held
    parts = psi, chi, slope, slope_t, slope_t * held
    return parts if e.convex else (*parts, t.clamp(min=-FARTHEST, max=FARTHEST) * psi)


def row_total(rows: Tensor) -> Tensor:
    """`row_sum`, and torch's own where its order is fixed."""
    return rows.sum(-1) if rows.device.type == "cpu" and rows.shape[-1] <= 4096 else row_sum(rows)


def huber_sums(x: Tensor, m: Tensor, s: Tensor, c: Tensor) -> Tensor:
    """`summands` of huber, summed over the last dimension: [5, N, C] from four sums, in place.

    With sigma = sign(t - psi), which is 0 inside c, psi'·t = psi - c·sigma and psi'·t² = psi² - c²·sigma².
    """
    bound = c.unsqueeze(-1)
    t = (x - m.unsqueeze(-1)).mul_(s.reciprocal().unsqueeze(-1))
    psi = torch.minimum(t, bound)
    psi = torch.maximum(psi, -bound, out=psi)
    sigma = t.sub_(psi).sign_()
    balance, total = row_total(sigma), row_total(psi)
    outside, square = row_total(sigma.square_()), row_total(psi.square_())
    inside = torch.addcmul(square, c * outside, c, value=-1.0)
    return torch.stack([total, 0.5 * square, x.shape[-1] - outside, total - c * balance, inside])


def brief_sums(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Tensor:
    """psi, the gain and psi' of a penalty that is not convex, summed over the last dimension: [3, N, C]."""
    t = (x - spread(m, x)).mul_(spread(1.0 / s, x))
    return torch.stack([row_total(item) for item in influence(t, spread(c, x), e)[:3]])


def full_sums(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Tensor:
    """`summands`, summed over the last dimension: [5 or 6, N, C]."""
    if e.name == "huber":
        return huber_sums(x, m, s, c)
    return torch.stack([row_total(item) for item in summands(x, m, s, c, e)])


def blocks(x: Tensor) -> tuple[Tensor, ...]:
    """x in parts along the batch that stay in a CPU's cache; elsewhere, and where kernels are fused, x."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return (x,)
    size = max(1, BLOCK * torch.get_num_threads() * x.shape[0] // max(x.numel(), 1))
    return x.split(size) if size < x.shape[0] else (x,)


def totals(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Totals:
    """The means of psi, chi, psi', … at (m, s) over all samples of all processes."""
    sums = torch.stack([channel_sum(item) for item in summands(x, m, s, c, e)])
    return unpacked(means(sums, x, e))


def packed_totals(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator, sums: Any = full_sums) -> Tensor:
    """`totals` of [N, C, L] as rows of one tensor; sums go in one order, so that channels do not affect each other."""
    if torch.compiler.is_compiling():
        return torch.stack(totals(x, m, s, c, e)[: 3 if sums is brief_sums else 6])
    if x.shape[0] == 1:
        return means(channel_blocks(x, m, s, c, e, sums)[:, 0], x, e)
    joint = torch.cat([sums(b, m, s, c, e) for b in blocks(x)], 1)
    return means(row_total(joint.transpose(1, 2).contiguous()), x, e)


def channel_blocks(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator, sums: Any) -> Tensor:
    """`sums` of [1, C, L] by channels that together stay in a CPU's cache."""
    size = max(1, BLOCK * torch.get_num_threads() // max(x.shape[2], 1))
    if x.device.type != "cpu" or size >= x.shape[1]:
        return sums(x, m, s, c, e)
    columns = zip(x.split(size, 1), m.split(size), s.split(size), c.split(size), strict=True)
    return torch.cat([sums(*column, e) for column in columns], -1)


def totals_in_rows(x: Tensor, m: Tensor, s: Tensor, c: Tensor, e: Estimator) -> Totals:
    """`totals` of [N, C, L] by sums in one order."""
    return unpacked(packed_totals(x, m, s, c, e))


def unpacked(packed: Tensor) -> Totals:
    """Rows by name; what a convex penalty has no use for, t·psi, is 0."""
    rows = packed.unbind(0)
    return Totals(*(rows if len(rows) == 6 else (*rows, torch.zeros_like(rows[0]))))


def means(sums: Tensor, x: Tensor, e: Estimator) -> Tensor:
    """Sums over this process's samples, [k, C], as means over those of all processes."""
    return reduced(sums, e.group) / sample_count(x, e.group)


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
    if c.numel() > 1 and c.stride(0) == 0:  # one value for all channels
        value, change = expectation(c[:1], e)
        return value.expand_as(c), change.expand_as(c)
    z, weights = normal_nodes(c)
    column = c.reshape(-1, 1)
    psi, chi, slope, _ = influence(z.expand(column.shape[0], -1), column, e)
    value = 2.0 * chi if e.convex else z * psi
    change = 2.0 * value - (2.0 * z * z * slope if e.convex else z * (psi + z * slope))  # Euler, degree 2
    return (weights * value).sum(-1), (weights * change).sum(-1) / c
