"""Robust pooling: y = argmin_u Σ_i w_i·phi(u − x_i), over dimensions, windows, segments and sets of vectors.

quadratic gives the mean and absolute the median; huber, pseudo_huber and barron(shape ≥ 1) lie between; welsch,
truncated_quadratic and barron(shape < 1) ignore what is far away. The same rules hold for every function here:

* A NaN among its samples makes a row NaN, and no other row; so does having no sample at all (all masked, or an empty
  segment). ±inf, and what lies within a factor of 16 of the dtype's largest number, counts as very far away, except
  for the mean.
* Weights are finite and ≥ 0: others are refused where they can be read, on any device, before anything is traced.
* float16 and bfloat16 are solved in float32; y has x's dtype.
* c and shape may be tensors; gradients flow into them, into x and into the weights, to second order. A tensor c is
  checked to be > 0 and finite on the CPU; elsewhere, and in compiled or transformed code, a row whose c is not > 0 is
  NaN.
* Where Σ w·phi'' is below 1e-3·Σ w·phi'/z the gradient is damped (ΣJ < 1); `return_status` says for which rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball import radial
from hyperball.functional import pooling_checks as checks
from hyperball.functional.dims import check_floating, reduced_dims
from hyperball.functional.pooling_checks import Penalty
from hyperball.kernels.pooling import operation as kernel
from hyperball.kernels.pooling import segments as pooling_segments
from hyperball.kernels.pooling import vectors as pooling_vectors
from hyperball.kernels.pooling.geometry import Along, Geometry, Windows
from hyperball.kernels.pooling.gradient import tangent
from hyperball.kernels.reading import row_sum
from hyperball.rows import Value

HUBER = "huber(c=1)"
RADIUS_FREE = ("quadratic", "absolute")
LEAST_SCALE = 1e-6  # of the greatest deviation: the radius where more than half of the samples are equal


class PoolStatus(NamedTuple):
    """Per row: the steps taken, |Σ w·phi'| at y, and whether its gradient is damped."""

    iterations: Tensor
    gradient: Tensor
    damped: Tensor


def robust_pool(
    x: Tensor,
    dim: int | Sequence[int] = -1,
    *,
    penalty: Penalty = HUBER,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    keepdim: bool = False,
    scale: str | None = None,
    return_weights: bool = False,
    return_status: bool = False,
) -> Any:
    """y = argmin_u Σ_i w_i·phi(u − x_i; c) over the dimensions `dim`.

    Args:
        penalty: a text such as "welsch(c=0.5)" or a value such as ``hb.radial.huber(c=tensor)``; a tensor parameter
            broadcasts to the shape of ``x.mean(dim, keepdim=True)`` or, failing that, of ``x.mean(dim)``.
        weights, mask: w_i ≥ 0, and True where a sample counts; both broadcast to x's shape.
        scale: "mad" measures c in units of the row's median absolute deviation, through which gradients flow.
        return_weights: also return p_i = w_i·phi'(z_i)/z_i, normalized to Σ p = 1, of x's shape; y = Σ p·x.
        return_status: also return a `PoolStatus`, of y's shape.

    >>> robust_pool(torch.tensor([1.0, 2.0, 3.0, 100.0]), penalty="huber(c=1)")
    tensor(2.5000)
    """
    value = checks.single_penalty(penalty)
    dims = reduced_dims(x, dim)
    held = checks.summable(checks.sample_weights(x.shape, x, weights, mask), dims)
    kept = [1 if d - x.dim() in dims else x.shape[d] for d in range(x.dim())]
    rows = [x.shape[d] for d in range(x.dim()) if d - x.dim() not in dims]
    value = checks.aligned(value, x, lambda name, given: checks.kept_or_left(name, given, kept, rows))
    found = _pool(x, held, value, Along(dims), scale, return_weights, return_status)
    return found.pack(kept if keepdim else rows, x.dtype, lambda p: Along(dims).scatter(p, x.shape))


def robust_pool1d(
    x: Tensor,
    kernel_size: int | Sequence[int] | None,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    penalty: Penalty = HUBER,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    ceil_mode: bool = False,
    scale: str | None = None,
    return_weights: bool = False,
    return_status: bool = False,
) -> Any:
    """Robust pooling of windows of x, [N, C, L] or [C, L], with F.avg_pool1d's arguments; padding is no sample.

    `kernel_size` None pools all of L and keeps it as a dimension of size 1. A parameter of shape (C,) is per channel,
    any other broadcasts to y. `weights` and `mask` broadcast to x. Pooling weights are [*y.shape, kernel_size].
    """
    geometry = checks.windows(x, 1, kernel_size, stride, padding, ceil_mode)
    held = checks.summable(checks.sample_weights(x.shape, x, weights, mask), tuple(range(-1, 0)))
    return _pool_windows(x, held, geometry, penalty, scale, return_weights, return_status)


def robust_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int] | None,
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    penalty: Penalty = HUBER,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    ceil_mode: bool = False,
    scale: str | None = None,
    return_weights: bool = False,
    return_status: bool = False,
) -> Any:
    """Robust pooling of windows of x, [N, C, H, W] or [C, H, W], with F.avg_pool2d's arguments; padding is no sample.

    `kernel_size` None pools all positions and keeps two dimensions of size 1. A parameter of shape (C,) is per channel,
    any other broadcasts to y. `weights` and `mask` broadcast to x. Pooling weights are [*y.shape, *kernel_size].
    """
    geometry = checks.windows(x, 2, kernel_size, stride, padding, ceil_mode)
    held = checks.summable(checks.sample_weights(x.shape, x, weights, mask), tuple(range(-2, 0)))
    return _pool_windows(x, held, geometry, penalty, scale, return_weights, return_status)


def segment_robust_pool(
    x: Tensor,
    offsets: Tensor,
    *,
    penalty: Penalty = HUBER,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    return_status: bool = False,
) -> Any:
    """Robust pooling of ragged segments: y[s] pools x[offsets[s] : offsets[s + 1]], for x [N, …] and offsets [S + 1].

    `offsets` are integers that begin at 0, never decrease and end at N. An empty segment is NaN. Tensor parameters
    broadcast to y's shape, [S, …]. `weights` and `mask` broadcast to x or, of shape (N,), are one a sample.
    The status's `gradient` and `damped` cost a second pass.

    >>> segment_robust_pool(torch.tensor([1.0, 2.0, 9.0, 5.0]), torch.tensor([0, 3, 4]), penalty="absolute")
    tensor([2., 5.])
    """
    value = checks.single_penalty(penalty)
    check_floating(x)
    checks.segment_offsets(x, offsets)
    out = [offsets.shape[0] - 1, *x.shape[1:]]
    columns = x.shape[1:].numel()
    value = checks.aligned(value, x, lambda name, given: checks.spread(name, given, out).reshape(out[0], columns))
    flat, offsets = x.reshape(x.shape[0], columns), offsets.to(x.device, torch.int64)
    weights, mask = (checks.leading(given, x) for given in (weights, mask))
    held = checks.summable(checks.sample_weights(x.shape, x, weights, mask), (0,))
    held = None if held is None else held.reshape(x.shape[0], columns)
    y, steps = pooling_segments.pool_segments(flat, held, offsets, value)
    found = Pooled(y, None, None)
    if return_status:
        gradient, damped = pooling_segments.residuals(y.detach(), flat.detach(), held, offsets, value)
        found = Pooled(y, None, PoolStatus(steps, gradient, damped))
    return found.pack(out, x.dtype)


def robust_pool_vectors(
    x: Tensor,
    *,
    penalty: Penalty = HUBER,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    return_status: bool = False,
) -> Any:
    """The robust center of a set of vectors: y = argmin_u Σ_i w_i·phi(‖u − x_i‖₂; c), for x [..., n, d], y [..., d].

    Weights and mask broadcast to [..., n], tensor parameters to [...]. Unlike pooling each coordinate, the result turns
    and shifts with the points. "absolute", the geometric median, is not smooth where y is a sample: take
    "pseudo_huber" with a small c instead.
    """
    value = checks.single_penalty(penalty)
    checks.vector_arguments(x, value)
    lead = list(x.shape[:-2])
    held = checks.summable(checks.sample_weights(x.shape[:-1], x, weights, mask), (-1,))
    value = checks.aligned(value, x, lambda name, given: checks.spread(name, given, lead).reshape(-1))
    sets = x.reshape(-1, *x.shape[-2:])
    held = None if held is None else held.reshape(-1, x.shape[-2])
    y, steps = pooling_vectors.pool_vectors(sets, held, value)
    result = own(y.reshape(*lead, x.shape[-1]).to(x.dtype))
    if not return_status:
        return result
    gradient, damped = pooling_vectors.residuals(y.detach(), sets.detach(), held, value)
    return result, PoolStatus(*(item.reshape(lead) for item in (steps, gradient, damped)))


def own(y: Tensor) -> Tensor:
    """y in memory of its own where the backward keeps y, so that the caller may change it in place."""
    return y.clone() if y.requires_grad else y


class Pooled(NamedTuple):
    """A result before it is packed: y [*rows], the pooling weights as a view [*rows, *taps], the status."""

    y: Tensor
    weights: Tensor | None
    status: PoolStatus | None

    def pack(self, shape: Sequence[int], dtype: torch.dtype, place: Any = lambda view: view) -> Any:
        """y alone, or a tuple of what was asked for, in y's final shape."""
        items: list[Any] = [own(self.y.reshape(tuple(shape)).to(dtype))]
        if self.weights is not None:
            items.append(place(self.weights).to(dtype))
        if self.status is not None:
            items.append(PoolStatus(*(item.reshape(tuple(shape)) for item in self.status)))
        return items[0] if len(items) == 1 else tuple(items)


def _pool_windows(
    x: Tensor, held: Tensor | None, geometry: Geometry, penalty: Penalty, scale: str | None, weights: bool, status: bool
) -> Any:
    value, space = checks.single_penalty(penalty), geometry.tap_dims
    lead = list(x.shape[:-space])
    counts = geometry.counts(tuple(x.shape[-space:])) if isinstance(geometry, Windows) else [1] * space
    out = [*lead, *counts]
    rows = out if isinstance(geometry, Windows) else lead

    def place(name: str, given: Tensor) -> Tensor:
        per_channel = given.reshape(-1, *[1] * space) if given.dim() == 1 else given
        return checks.spread(name, per_channel, out).reshape(rows)

    found = _pool(x, held, checks.aligned(value, x, place), geometry, scale, weights, status)
    found = found._replace(y=_in_layout_of(x, found.y.reshape(out)))
    return found.pack(out, x.dtype, lambda p: p.reshape(*out, *p.shape[len(rows) :]))


def _in_layout_of(x: Tensor, y: Tensor) -> Tensor:
    """y with its channels last in memory if x has them so, as torch's own pools give it."""
    if x.dim() != 4 or x.shape[1] == 1 or (x.stride(1), x.stride(3)) != (1, x.shape[1]):
        return y
    return y.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _pool(
    x: Tensor,
    weights: Tensor | None,
    value: Value,
    geometry: Geometry,
    scale: str | None,
    ask_weights: bool,
    ask_status: bool,
) -> Pooled:
    """Every row of x, and what is asked for beside it."""
    if checks.known_scale(scale) and value.name not in RADIUS_FREE:
        x, weights, geometry = _unfolded(x, weights, geometry)
        value = value.with_parameters(rho=mad_radius(x, weights, geometry, value.parameters["rho"]))
    y, steps = kernel.pool(x, weights, value, geometry)
    pooling = _pooling_weights(x, weights, value, geometry, y) if ask_weights else None
    status = _status(x, weights, value, geometry, y, steps) if ask_status else None
    return Pooled(y, pooling, status)


def _unfolded(x: Tensor, weights: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor | None, Geometry]:
    """The same rows as the last dimensions of a view, where every row may have a center of its own."""
    view = geometry.view(x)
    held = geometry.present(x, x.dtype) if weights is None else geometry.view(weights)
    last = Along(tuple(range(-geometry.tap_dims, 0)))
    return view, None if held is None else held.expand_as(view), last


def mad_radius(x: Tensor, weights: Tensor | None, geometry: Geometry, kappa: Any) -> Tensor:
    """c = kappa·median|x − median x| per row; where that is 0, 1e-6 of the greatest deviation."""
    absolute = radial.parse("absolute", "penalty")
    assert isinstance(absolute, Value)
    middle = kernel.pool(x, weights, absolute, geometry)[0]
    taps = tuple(range(-geometry.tap_dims, 0))
    center = middle[(...,) + (None,) * len(taps)]
    deviation = torch.where(center.isnan(), 0.0, geometry.view(x.to(middle.dtype)) - center).abs()
    held = None if weights is None else geometry.view(weights)
    mad = kernel.pool(deviation, held, absolute, Along(taps))[0]
    present = deviation.detach() if held is None else torch.where(held > 0, deviation.detach(), 0.0)
    mad = torch.where(mad.isnan(), 0.0, mad)  # of a row without a sample
    least = (LEAST_SCALE * present.amax(taps)).clamp(min=torch.finfo(mad.dtype).tiny)
    return torch.maximum(kappa * mad, least)


def _rows(
    x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry, y: Tensor
) -> tuple[Tensor, Tensor | None, Value]:
    """(rows, weights, value) as the kernels see them: [R, n], None or [R, n], parameters [R, 1]."""
    view = geometry.view(x.to(y.dtype))
    held = geometry.present(x, y.dtype) if weights is None else geometry.view(weights.to(y.dtype))
    flat = None if held is None else kernel.as_rows(held.expand_as(view), geometry.tap_dims)
    return kernel.as_rows(view, geometry.tap_dims), flat, kernel.per_row(value)


def _pooling_weights(x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry, y: Tensor) -> Tensor:
    """p = w·s(|y − x|)/Σ w·s as a view [*rows, *taps]."""
    rows, held, flat = _rows(x, weights, value, geometry, y)
    center = y.reshape(-1, 1)
    broken = center.isnan()  # NaN stays in its row, in derivatives too
    s = radial.gain(flat, torch.where(broken, 0.0, center - rows).abs())
    s = s if held is None else torch.where(held > 0, s * held, 0.0)
    return torch.where(broken, torch.nan, s / row_sum(s).unsqueeze(-1)).reshape(geometry.view(x).shape)


def _status(
    x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry, y: Tensor, steps: Tensor
) -> PoolStatus:
    with torch.no_grad():
        rows, held, flat = _rows(x, weights, value, geometry, y)
        t = tangent(rows, held, flat, y.reshape(-1))
        psi = t.s * t.z if held is None else t.s * t.z * held
        slope = torch.where(y.isnan(), torch.nan, row_sum(psi).abs().reshape(y.shape))
        return PoolStatus(steps, slope, t.damped.reshape(y.shape))
