"""Robust pooling of the rows of a matrix, eagerly: brackets, medians, exact sweeps and global starts.

x is [R, n] in float32 or float64; a row's parameters are numbers or [R, 1]; weights are None or broadcast against x.
Convex penalties start at the median. The truncated quadratic is solved exactly by sweeping the sorted row. Other
penalties that are not convex start at several samples, of which the best local minimum is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.kernels.pooling.gradient import may_hold_somewhere
from hyperball.kernels.pooling.solver import gain_and_curvature, solve
from hyperball.kernels.reading import can_look, export_records, factor_where, is_concrete, row_sum
from hyperball.rows import Value

CONVEX_STEPS = 10  # fixed trip counts, chosen by tests/pooling/test_solver.py on rows with 0, 25 and 45 % outliers
LOCAL_STEPS = 12
CANDIDATES = 64  # starts at which a penalty that is not convex is evaluated
KEPT = 4  # of which these are followed to their minimum
NEIGHBORS = 16
BLOCK = 2**23  # elements evaluated at once
LARGE = {torch.float32: (1e22, 1e18, 2.0**-50), torch.float64: (1e270, 1e250, 2.0**-130)}  # c, x, what shrinks them


class Middle(NamedTuple):
    """The two middle samples of each row (the same one where the median is a sample), [R]."""

    low: Tensor
    high: Tensor

    def mean(self) -> Tensor:
        return self.low + (self.high - self.low) / 2


def is_convex(value: Value) -> bool:
    """Whether every local minimum of Σ phi is global: by the row, and for barron from shape 1 on."""
    shape = value.parameters.get("shape") if value.name == "barron" else None
    if shape is None:
        return bool(value.row.convex)
    if isinstance(shape, Tensor):
        return can_look(shape) and bool((shape >= 1).all())
    return float(shape) >= 1.0  # type: ignore[arg-type]


def pool_rows(x: Tensor, weights: Tensor | None, value: Value, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """(y, steps) with y = argmin_u Σ_i w_i·phi(u − x_i) for each row; `fixed` asks for fixed trip counts.

    A sample of weight 0 does not exist; a row with no sample, or with a NaN, is NaN; ±inf counts as a very long way.
    """
    present = None if weights is None else (weights > 0).expand_as(x)
    kept = x if present is None else torch.where(present, x, 0.0)
    bound = torch.finfo(x.dtype).max / 8
    if value.name == "quadratic":  # there is no way too long for the mean
        endless, steps = kept.isinf(), torch.zeros(x.shape[:-1], dtype=torch.int32, device=x.device)
        y = weighted_mean(torch.where(endless, 0.0, kept), weights)
        y = torch.where(endless.any(-1), torch.where(endless, kept, 0.0).sum(-1), y)
    else:
        y, steps = _pool_bounded(kept.clamp(-bound, bound), weights, value, fixed)
        y = torch.where(y > bound / 2, torch.inf, torch.where(y < -bound / 2, -torch.inf, y))
    broken = kept.isnan().any(-1) if present is None else kept.isnan().any(-1) | ~present.any(-1)
    return torch.where(broken, torch.nan, y), steps


def _pool_bounded(x: Tensor, weights: Tensor | None, value: Value, fixed: bool) -> tuple[Tensor, Tensor]:
    """`_pool_clean` in smaller units where a sum of samples or of c could be too large for a number."""
    unit = shrinking(x, value)
    if unit is None:
        return _pool_clean(x, weights, value, fixed)
    smaller = value.with_parameters(rho=value.parameters["rho"] * unit)
    y, steps = _pool_clean(x * unit, weights, smaller, fixed)
    return y / unit.squeeze(-1), steps


def shrinking(x: Tensor, value: Value) -> Tensor | None:
    """The power of two, [R, 1], by which samples and c are made smaller; None where that is 1 for certain."""
    large_c, large_x, factor = LARGE[x.dtype]
    c: Any = value.parameters.get("rho")
    if value.name == "absolute" or value.row.composed or c is None:
        return None
    if not (may_hold_somewhere(c > large_c) if isinstance(c, Tensor) else c > large_c):
        return None
    large = (x.abs().amax(-1, keepdim=True) > large_x) & (c > large_c)
    return factor_where(large, factor, x.dtype)


def _pool_clean(x: Tensor, weights: Tensor | None, value: Value, fixed: bool) -> tuple[Tensor, Tensor]:
    no_steps = torch.zeros(x.shape[:-1], dtype=torch.int32, device=x.device)
    if value.name == "truncated_quadratic":
        return truncated(x, weights, value.parameters["rho"]), no_steps
    middle = middle_samples(x, weights)
    if value.name == "absolute":
        return middle.mean(), no_steps
    low, high = bracket(x, weights)
    if not is_convex(value):
        return global_minimum(x, weights, value, middle, (low, high), fixed)
    settled = None
    if value.name == "huber":  # no inlier between the two middle samples: their mean is the answer
        settled = middle.high - middle.low > 2 * _per_row(value.parameters["rho"])
    steps = CONVEX_STEPS if fixed else None
    found = solve(x, value, start=middle.mean(), lower=low, upper=high, weights=weights, settled=settled, steps=steps)
    return found.y, found.steps


def _per_row(parameter: Any) -> Any:
    return parameter.squeeze(-1) if isinstance(parameter, Tensor) and parameter.dim() else parameter


def weighted_mean(x: Tensor, weights: Tensor | None) -> Tensor:
    """Σ w·x / Σ w, about the row's first sample so that a long way from 0 costs no digits."""
    _, large, factor = LARGE[x.dtype]
    unit = factor_where(x.detach().abs().amax(-1, keepdim=True) > large, factor, x.dtype)
    x = x * unit
    origin = x[..., :1]
    if weights is None:
        y = origin[..., 0] + row_sum(x - origin) / x.shape[-1]
    else:
        weights = weights.expand_as(x)
        y = origin[..., 0] + row_sum(weights * (x - origin)) / row_sum(weights)
    return y / unit[..., 0]


def bracket(x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """(min, max) of the samples that exist: every minimizer lies between them."""
    if weights is None:
        return x.amin(-1), x.amax(-1)
    missing = ~(weights > 0)
    return x.masked_fill(missing, torch.inf).amin(-1), x.masked_fill(missing, -torch.inf).amax(-1)


def middle_samples(x: Tensor, weights: Tensor | None) -> Middle:
    """The samples at which the cumulative weight reaches, and exceeds, one half."""
    n = x.shape[-1]
    if weights is None and x.device.type == "cpu" and can_look(x):  # selecting is cheaper than sorting
        low = x.kthvalue((n + 1) // 2, dim=-1).values
        return Middle(low, low if n % 2 else x.kthvalue(n // 2 + 1, dim=-1).values)
    if weights is None:
        ordered = x.sort(-1).values
        return Middle(ordered[..., (n - 1) // 2], ordered[..., n // 2])
    ordered, order = x.masked_fill(~(weights > 0), torch.inf).sort(-1)
    cumulative = weights.expand_as(x).gather(-1, order).cumsum(-1)
    half = cumulative[..., -1:] / 2
    slack = 1 + 4 * torch.finfo(x.dtype).eps
    low = (cumulative * slack < half).sum(-1, keepdim=True).clamp(max=n - 1)
    high = (cumulative <= half * slack).sum(-1, keepdim=True).clamp(max=n - 1)
    low_sample, high_sample = ordered.gather(-1, low)[..., 0], ordered.gather(-1, high)[..., 0]
    return Middle(low_sample, torch.where(high_sample.isinf(), low_sample, high_sample))


def _count_up_to(ordered: Tensor, bounds: Tensor) -> Tensor:
    """How many of the sorted samples are ≤ each bound."""
    if export_records():  # searchsorted has no ONNX form
        return (ordered.unsqueeze(-2) <= bounds.unsqueeze(-1)).sum(-1)
    return torch.searchsorted(ordered.contiguous(), bounds.contiguous(), right=True)


def _prefix(values: Tensor) -> Tensor:
    """[0, v_0, v_0 + v_1, …] along the last dimension."""
    return F.pad(values.cumsum(-1), (1, 0))


def truncated(x: Tensor, weights: Tensor | None, c: Any) -> Tensor:
    """argmin_u Σ w·min((u − x)², c²)/2 exactly, in blocks of rows: a sweep holds some 35 times its samples."""
    weights = None if weights is None else weights.expand_as(x)
    swept = [_sweep(x[part], None if weights is None else weights[part], _of(part, c)) for part in _blocks(x)]
    return swept[0] if len(swept) == 1 else torch.cat(swept)


def _sweep(x: Tensor, weights: Tensor | None, c: Any) -> Tensor:
    """The best mean of a window of the sorted row no wider than 2c.

    As u rises, its window changes where a sample enters or leaves it: those are all windows that can be the best.
    Gaps wider than 3c are shortened to 3c first, which changes no window and keeps the prefix sums accurate.
    """
    present = None if weights is None else (weights > 0).expand_as(x)
    ordered, order = (x if present is None else x.masked_fill(~present, torch.inf)).sort(-1)
    unit = (ordered.double().diff(dim=-1) / c).nan_to_num(nan=0.0).clamp(max=3.0)
    t = _prefix(unit)  # sorted, in units of c
    sums = _moments(t, None if weights is None else weights.gather(-1, order).double())
    through = [s[..., 1:] for s in sums]  # up to and with each sample
    begin, end = _count_below(t, t - 2.0), _count_up_to(t, t + 2.0)
    entering = _best_window(through, [s.gather(-1, begin) for s in sums])
    leaving = _best_window([s.gather(-1, end) for s in sums], through)
    has_left = leaving.saved > entering.saved
    at, center = torch.where(has_left, leaving.at, entering.at), torch.where(has_left, leaving.center, entering.center)
    anchor = torch.where(has_left, at + 1, begin.gather(-1, at)).clamp(max=x.shape[-1] - 1)
    y = torch.where(ordered.isinf(), ordered[..., :1], ordered).gather(-1, anchor).double()
    return _mean_of_inliers(x, weights, (y + (center - t.gather(-1, anchor)) * c).to(x.dtype), c)


class Window(NamedTuple):
    """The best of a row's windows: at which sample it is found, what it saves (in c²/2) and its mean, each [R, 1]."""

    at: Tensor
    saved: Tensor
    center: Tensor


def _moments(t: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Prefix sums of w, w·t and w·t² along the last dimension; without weights the first only counts."""
    if w is not None:
        return _prefix(w), _prefix(w * t), _prefix(w * t * t)
    n = t.shape[-1]
    count = torch.arange(n + 1, dtype=t.dtype, device=t.device).expand(*t.shape[:-1], n + 1)
    return count, _prefix(t), _prefix(t * t)


def _best_window(through: Sequence[Tensor], before: Sequence[Tensor]) -> Window:
    """Of the windows between two prefix sums each, the first that saves most."""
    mass, moment, square = (end - begin for end, begin in zip(through, before, strict=True))
    center = moment / mass
    saved = torch.where(mass > 0, mass - (square - moment * center), 0.0)
    at = saved.argmax(-1, keepdim=True)
    return Window(at, saved.gather(-1, at), center.gather(-1, at))


def _count_below(ordered: Tensor, bounds: Tensor) -> Tensor:
    if export_records():
        return (ordered.unsqueeze(-2) < bounds.unsqueeze(-1)).sum(-1)
    return torch.searchsorted(ordered.contiguous(), bounds.contiguous(), right=False)


def _mean_of_inliers(x: Tensor, weights: Tensor | None, y: Tensor, c: Any) -> Tensor:
    """y + Σ w·(x − y)/Σ w over |x − y| ≤ c: takes the rounding of the prefix sums away; y is [R, 1]."""
    z = x - y
    inside = (z.abs() <= c).to(x.dtype)
    inside = inside if weights is None else inside * weights
    mass = row_sum(inside)
    return y[..., 0] + torch.where(mass > 0, row_sum(inside * z) / mass, 0.0)


def radius(value: Value, x: Tensor) -> Any:
    """The length over which the penalty turns: its radius, or a share of the row's range if it has none."""
    if "rho" in value.parameters:
        return value.parameters["rho"]
    return (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / CANDIDATES


def in_three_dimensions(value: Value) -> Value:
    """The value with [R, 1] parameters as [R, 1, 1]."""
    lifted = {k: v.unsqueeze(-1) if isinstance(v, Tensor) and v.dim() else v for k, v in value.parameters.items()}
    return value.with_parameters(**lifted)


def phi(value: Value, z: Tensor) -> Tensor:
    """phi(z), in units of c², which does not overflow, where phi is homogeneous."""
    if value.row.degree != 1 or value.row.composed:
        return value.row.phi(z, **value.parameters)
    c: Any = value.parameters["rho"]
    unit, shape = (z / c).clamp(-1e15, 1e15), value.parameters.get("shape")
    if isinstance(shape, Tensor):
        return _barron_phi(unit.abs(), shape)
    return value.row.phi(unit, **{**value.parameters, "rho": 1.0})


def _barron_phi(n: Tensor, shape: Tensor) -> Tensor:
    """b·L·expm1(ω)/ω with L = log(1 + n²/b)/2, ω = shape·L, b = |shape − 2|; traceable where the shape is a tensor."""
    b = (shape - 2.0).abs().clamp(min=1e-6)
    half_log = torch.log1p((n / b.sqrt()).square()) / 2.0
    omega = shape * half_log
    small = omega.abs() < 1e-6
    return b * half_log * torch.where(small, 1.0 + omega / 2.0, torch.expm1(omega) / torch.where(small, 1.0, omega))


def objective(u: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> Tensor:
    """Σ_i w_i·phi(u − x_i) for every u: [R, M]."""
    cost = phi(in_three_dimensions(value), u.unsqueeze(-1) - x.unsqueeze(-2))
    return row_sum(cost if weights is None else cost * weights.unsqueeze(-2))


def irls_step(u: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> Tensor:
    """u − Σ w·psi/Σ w·s, the weighted mean under the gains at u: [R, M]."""
    z = u.unsqueeze(-1) - x.unsqueeze(-2)
    s, _ = gain_and_curvature(in_three_dimensions(value), z.abs())
    s = s if weights is None else s * weights.unsqueeze(-2)
    gains = row_sum(s)
    return u - torch.where(gains > 0, row_sum(s * z) / gains, 0.0)


def candidates(x: Tensor, weights: Tensor | None, value: Value, middle: Tensor) -> Tensor:
    """Starts, [R, M]: all samples of a short row; of a long one those in its most crowded cells, evenly spaced
    quantiles and, where these cost least, the samples between them."""
    present = None if weights is None else (weights > 0).expand_as(x)
    known = x if present is None else torch.where(present, x, middle.unsqueeze(-1))
    n, c, half = x.shape[-1], radius(value, x), CANDIDATES // 2
    if n <= CANDIDATES:
        return known
    ordered, order = known.sort(-1)
    w = torch.ones_like(x) if weights is None else weights.expand_as(x).gather(-1, order)
    cell = ((ordered - ordered[..., :1]) / (c / 2)).floor()
    opens = F.pad(cell.diff(dim=-1) > 0, (1, 0), value=True)
    crowded = torch.where(opens, crowding(ordered, w, c), -1.0).topk(half, dim=-1).indices
    ramp = torch.linspace(-1, 1, half, device=x.device, dtype=torch.float64)
    center, reach = torch.full_like(crowded[..., :1], n // 2), n / 2
    tried = [crowded]
    while reach > 1:
        index = (center + (ramp * reach).round().long()).clamp(0, n - 1)
        tried.append(index)
        best = objective(ordered.gather(-1, index), x, weights, value).argmin(-1, keepdim=True)
        center, reach = index.gather(-1, best), 3 * reach / half
    return ordered.gather(-1, torch.cat(tried, -1))


def crowding(ordered: Tensor, w: Tensor, c: Any) -> Tensor:
    """Σ_j w_j·exp(−(x_i − x_j)²/(2c²)) at every sample of a sorted row, over its 2·16 nearest neighbors in order.

    Where more than those lie within 3c, what they weigh beyond is added: in a crowd, the count tells.
    """
    near, density = w, w
    for k in range(1, NEIGHBORS + 1):
        bell = torch.exp(-((ordered[..., k:] - ordered[..., :-k]) / c).clamp(max=1e4).square() / 2.0)
        before, after = (0, k), (k, 0)
        density = density + F.pad(bell * w[..., k:], before) + F.pad(bell * w[..., :-k], after)
        near = near + F.pad(w[..., k:], before) + F.pad(w[..., :-k], after)
    cumulative = _prefix(w)
    begin, end = _count_below(ordered, ordered - 3 * c), _count_up_to(ordered, ordered + 3 * c)
    within = cumulative.gather(-1, end) - cumulative.gather(-1, begin)
    return density + (within - near).clamp(min=0.0) / 2.0


def global_minimum(
    x: Tensor, weights: Tensor | None, value: Value, middle: Middle, ends: tuple[Tensor, Tensor], fixed: bool
) -> tuple[Tensor, Tensor]:
    """The best local minimum reached from several starts, in blocks of rows so that memory stays bounded."""
    weights, center = None if weights is None else weights.expand_as(x), middle.mean()
    parts = []
    for part in _blocks(x, CANDIDATES):
        held = value.with_parameters(**{k: _of(part, v) for k, v in value.parameters.items()})
        w = None if weights is None else weights[part]
        parts.append(_global_minimum(x[part], w, held, center[part], ends[0][part], ends[1][part], fixed))
    return parts[0] if len(parts) == 1 else (torch.cat([y for y, _ in parts]), torch.cat([steps for _, steps in parts]))


def _blocks(x: Tensor, each: int = 1) -> list[slice]:
    """Rows of x to handle at once, where `each` numbers belong to a sample; all of them where x is being traced."""
    if not is_concrete(x):
        return [slice(None)]
    rows = max(1, BLOCK // max(1, each * x.shape[-1]))
    return [slice(at, at + rows) for at in range(0, x.shape[0], rows)] if x.shape[0] > rows else [slice(None)]


def _of(part: slice, parameter: Any) -> Any:
    """A parameter of those rows."""
    return parameter[part] if isinstance(parameter, Tensor) and parameter.dim() else parameter


def _global_minimum(
    x: Tensor, weights: Tensor | None, value: Value, middle: Tensor, low: Tensor, high: Tensor, fixed: bool
) -> tuple[Tensor, Tensor]:
    c = radius(value, x)
    starts = irls_step(candidates(x, weights, value, middle), x, weights, value)
    starts = _best_apart(starts, objective(starts, x, weights, value), c / 2)
    lower, upper = local_bracket(starts, x, weights, value, (low, high))
    found = solve(
        x.unsqueeze(-2),
        in_three_dimensions(value),
        start=starts,
        lower=lower,
        upper=upper,
        weights=None if weights is None else weights.unsqueeze(-2),
        steps=LOCAL_STEPS if fixed else None,
    )
    best = objective(found.y, x, weights, value).argmin(-1, keepdim=True)
    return found.y.gather(-1, best)[..., 0], found.steps.gather(-1, best)[..., 0]


def local_bracket(
    u: Tensor, x: Tensor, weights: Tensor | None, value: Value, ends: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(lower, upper): from u downhill to the first of u ± c/2, c, 2c, 4c where Σ phi rises, else to the row's end."""
    c = radius(value, x)
    downhill = -torch.sign(u - irls_step(u, x, weights, value))
    far, crossed = u + downhill * (c / 2), torch.zeros_like(u, dtype=torch.bool)
    for k in range(4):
        crossed = crossed | ((far - irls_step(far, x, weights, value)) * downhill >= 0)
        far = torch.where(crossed, far, u + downhill * (c * 2.0**k))
    far = torch.where(crossed, far, torch.where(downhill < 0, ends[0][:, None], ends[1][:, None]))
    return torch.minimum(u, far), torch.maximum(u, far)


def _best_apart(u: Tensor, cost: Tensor, distance: Any) -> Tensor:
    """The KEPT points of least cost no two of which are nearer than `distance` (repeated if there are fewer)."""
    kept = []
    for _ in range(min(KEPT, u.shape[-1])):
        best = u.gather(-1, cost.argmin(-1, keepdim=True))
        kept.append(best)
        cost = torch.where((u - best).abs() <= distance, torch.inf, cost)
    return torch.cat(kept, -1)
