"""Batch normalization by a robust location and scale.

The mathematics of the estimates is in `hyperball.kernels.batch_norm.operation`, their derivatives in `gradient`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hyperball import radial
from hyperball.kernels.batch_norm.choice import is_triton
from hyperball.kernels.batch_norm.fused import fused_batch_norm
from hyperball.kernels.batch_norm.gradient import moments, normalized
from hyperball.kernels.batch_norm.operation import Estimator, sample_count, work_dtype
from hyperball.rows import AnyValue, Row, Value, require_positive

__all__ = ["check_eps", "check_penalty", "moments", "robust_batch_norm"]
PENALTIES = ("quadratic", "pseudo_huber", "huber", "welsch", "truncated_quadratic", "barron")


def refuse_tangents(*tensors: Any) -> None:
    """Refuse forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return
    if any(isinstance(item, Tensor) and unpack_dual(item).tangent is not None for item in tensors):
        raise NotImplementedError(
            "`robust_batch_norm` has no forward-mode derivative (jvp, jacfwd) in training; use reverse mode "
            "(vjp, jacrev)"
        )


def robust_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    penalty: str | AnyValue | Row = "huber",
    sync: bool = False,
    process_group: Any = None,
) -> Tensor:
    """y = (x - m)/sqrt(s² + eps)·weight + bias, with m and s the robust location and scale of each channel.

    Arguments are those of torch.nn.functional.batch_norm, then the penalty, whose c counts in units of s: one value
    or one per channel. For a convex penalty (m, s) minimizes sum_i s·phi((x_i - m)/s) + n·s·beta/2, where beta makes
    s the standard deviation of normal samples; c -> inf is batch normalization. See `hyperball.kernels.batch_norm`.

    With `sync`, samples are those of all processes of `process_group` (by default of all there are). Where so many
    of a channel's samples coincide (at huber's c = 1 from 48 %, with the others on both sides, or 66 %, on one) s is 0
    and eps alone divides. NaN stays in its channel.

    >>> import torch
    >>> x = torch.randn(64, 8).index_fill(0, torch.tensor(0), 1e6)
    >>> y = robust_batch_norm(x, None, None, training=True, penalty="huber(c=1.5)")
    >>> bool(y[1:].std() > 0.5)
    True
    """
    value = check_penalty(penalty)
    _check_input(input, running_mean, running_var, weight, bias, eps)
    if not training:
        if running_mean is None or running_var is None:
            raise ValueError("`running_mean` and `running_var` must be tensors when `training` is False, got None")
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    estimator = Estimator(value.name, _shape(value), _group(process_group) if sync else None)
    refuse_tangents(input, weight, bias, value.parameters["rho"])
    count = _check_count(input, estimator.group)
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    followed = False
    if is_triton(estimator, input):
        c, number = _radius_or_number(value, input)
        rate = momentum if isinstance(momentum, float) else None
        y, stats, followed = fused_batch_norm(input, c, number, weight, bias, eps, estimator, running, rate)
        m, s = stats.unbind(0)
    else:
        y, m, s = normalized(input, _radius(value, input), weight, bias, eps, estimator)
    if running is not None and not followed:
        _track(*running, m.detach(), s.detach(), momentum, count)
    return y


def check_penalty(penalty: str | AnyValue | Row) -> Value:
    """The penalty as a value, refused by name where it gives no scale."""
    value = radial.parse(penalty, "penalty")
    if not isinstance(value, Value) or value.name not in PENALTIES:
        raise ValueError(f"`penalty` of a robust batch norm must be one of {', '.join(PENALTIES)}, got {value.name!r}")
    if _shape(value) > 2.0:
        raise ValueError(f"`shape` of barron in a robust batch norm must be <= 2, got {_shape(value)}")
    return value


def _shape(value: Value) -> float:
    shape = value.parameters.get("shape", 1.0)
    if not isinstance(shape, float):
        raise TypeError(f"`shape` of {value.name} in a robust batch norm must be a number, got {type(shape).__name__}")
    return shape


def _radius(value: Value, x: Tensor) -> Tensor:
    """c as one value per channel."""
    c: Any = value.parameters["rho"]
    if isinstance(c, Tensor):
        require_positive(value)
        if c.numel() not in (1, x.shape[1]):
            raise ValueError(f"`c` must have 1 or {x.shape[1]} values for {x.shape[1]} channels, got {c.numel()}")
        return c.to(work_dtype(x)).reshape(-1).expand(x.shape[1])
    return torch.full((1,), float(c), dtype=work_dtype(x), device=x.device).expand(x.shape[1])


def _radius_or_number(value: Value, x: Tensor) -> tuple[Tensor | None, float]:
    """c as a tensor of 1 or C values, or None, and as a number: what a kernel takes without a launch that fills it."""
    c: Any = value.parameters["rho"]
    return (_radius(value, x), 1.0) if isinstance(c, Tensor) else (None, float(c))


def _group(process_group: Any) -> Any:
    """The processes to sum over, or None where there is only one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    return group if dist.get_world_size(group) > 1 else None


def check_eps(eps: float) -> None:
    """Refuse an eps that leaves a constant channel to be divided by 0."""
    if not 0.0 < eps < math.inf:
        raise ValueError(f"`eps` must be > 0 and finite, got {eps!r}; a constant channel is divided by sqrt(eps)")


def _check_input(x: Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any, eps: float) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"`input` must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2:
        raise ValueError(f"`input` must have at least 2 dimensions, [N, C, …], got {tuple(x.shape)}")
    check_eps(eps)
    given = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor is not None and tuple(tensor.shape) != (x.shape[1],):
            raise ValueError(f"`{name}` must have shape ({x.shape[1]},) for this input, got {tuple(tensor.shape)}")


def _check_count(x: Tensor, group: Any) -> Tensor | float:
    local = x.numel() // max(x.shape[1], 1)
    if local < 1 or (group is None and local == 1):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    return sample_count(x, group)


@torch.no_grad()
def _track(
    running_mean: Tensor, running_var: Tensor, m: Tensor, s: Tensor, momentum: float | Tensor, count: Tensor | float
) -> None:
    """running <- running + momentum·(batch - running), with the variance's factor n/(n - 1)."""
    variance = s * s * (count / (count - 1.0))
    for running, batch in ((running_mean, m), (running_var, variance)):
        weight = momentum.to(running.dtype) if isinstance(momentum, Tensor) else momentum
        running.lerp_(batch.to(running.dtype), weight)
