"""The derivatives of robust batch normalization in torch's own operators, by the implicit function theorem.

The mathematics of the estimates is in `hyperball.kernels.batch_norm.operation`. Their derivatives follow from the
equations they solve: with t = (x - m)/s, a = psi'(t), H = sum a·(1, t)(1, t)ᵀ and lambda = H⁻¹·(s·g_m, s·g_s),

    g_x = a·(lambda_1 + lambda_2·t)/s.

Kept for that are x and numbers per channel. The formulas are in differentiable operations, of the estimates
too, so second derivatives are right.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from hyperball.kernels.batch_norm.operation import (
    LEAST,
    Estimator,
    Totals,
    blocks,
    channel_sum,
    expectation,
    influence,
    reduced,
    sample_count,
    spread,
    totals,
)
from hyperball.kernels.batch_norm.solver import joint_moments, local_moments
from hyperball.kernels.batch_norm.start import sample

UNIT_EPS = 2.0**-20  # 1 - UNIT_EPS + UNIT_EPS is 1 exactly: a variance that divides by 1


def residuals(x: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """t = (x - m)/s."""
    return (x.to(m.dtype) - spread(m, x)) * spread(1.0 / s, x)


def joint_pull(x: Tensor, m: Tensor, s: Tensor, c: Tensor, shift: Tensor, growth: Tensor, e: Estimator) -> Tensor:
    """psi'·(shift + growth·t), in x's dtype; psi'·t first, because growth·t may overflow."""
    if e.name == "quadratic":
        return (residuals(x, m, s) * spread(growth, x) + spread(shift, x)).to(x.dtype)
    if e.name == "huber" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return huber_pull(x, m, s, c, shift, growth)
    _, _, slope, t = influence(residuals(x, m, s), spread(c, x), e, chi=False)
    return (slope * spread(shift, x) + slope * t * spread(growth, x)).to(x.dtype)


def huber_pull(x: Tensor, m: Tensor, s: Tensor, c: Tensor, shift: Tensor, growth: Tensor) -> Tensor:
    """[|t| <= c]·(shift + growth·t), in place."""
    t = (x.to(m.dtype) - spread(m, x)).mul_(spread(1.0 / s, x))
    psi = torch.minimum(t, spread(c, x))
    psi = torch.maximum(psi, -spread(c, x), out=psi)
    outside = t.sub_(psi).sign_().square_()
    pull = psi.mul_(spread(growth, x)).add_(spread(shift, x))
    return pull.addcmul_(pull, outside, value=-1.0).to(x.dtype)


def local_pull(x: Tensor, m: Tensor, s: Tensor, c: Tensor, moved: Tensor, scaled: Tensor, e: Estimator) -> Tensor:
    """psi'·moved + (psi + t·psi')·scaled, in x's dtype."""
    psi, _, slope, t = influence(residuals(x, m, s), spread(c, x), e, chi=False)
    return (slope * spread(moved, x) + (psi + t * slope) * spread(scaled, x)).to(x.dtype)


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def inverse_times(at: Totals, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """H⁻¹·(first, second), H = mean psi'·(1, t)(1, t)ᵀ, with what is nearly singular in it held at 1e-3."""
    h0, h2 = at.slope.clamp(min=LEAST), at.slope_tt.clamp(min=LEAST)
    determinant = torch.maximum(h0 * h2 - at.slope_t * at.slope_t, LEAST * h0 * h2)
    return (
        (h2 * first - at.slope_t * second) / determinant,
        (h0 * second - at.slope_t * first) / determinant,
    )


def channel_batch(info: Any, dim: int | None, tensor: Tensor, channel: int) -> Tensor:
    """A tensor under vmap with the mapped dimension folded into the channels'."""
    lanes = tensor.unsqueeze(channel) if dim is None else tensor.movedim(dim, channel)
    sizes = list(lanes.shape)
    sizes[channel] = info.batch_size
    return lanes.expand(sizes).flatten(channel, channel + 1)


def mapped(function: Any, info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Any, tuple[int, ...]]:
    """`function` under vmap: channels are independent of each other, so a batch of inputs is more channels."""
    *channels, rows, e = rest
    folded = [channel_batch(info, dim, item, 0) for dim, item in zip(in_dims[1:-2], channels, strict=True)]
    x, rows = channel_batch(info, in_dims[0], x, 1), channel_batch(info, in_dims[-2], rows, 1)
    m, s, held = function.apply(x, *folded, rows, e)
    split = (info.batch_size, -1)
    return (m.unflatten(0, split), s.unflatten(0, split), held.unflatten(1, split)), (0, 0, 1)


class JointMoments(Function):
    """(m, s) of every channel for a convex penalty, and the totals there."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return mapped(JointMoments, info, in_dims, *arguments)

    @staticmethod
    def forward(x: Tensor, c: Tensor, rows: Tensor, e: Estimator) -> tuple[Tensor, Tensor, Tensor]:
        found = joint_moments(x, c, e, rows)
        return found.m, found.s, torch.stack(list(found.at))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, c, _, ctx.e = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, c, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, c, m, s, held = ctx.saved_tensors
        at = totals(x, m, s, c, ctx.e) if torch.is_grad_enabled() else Totals(*held.unbind(0))
        g = torch.stack([grads[0] * s, grads[1] * s])
        shift, growth = inverse_times(at, *reduced(g, ctx.e.group).unbind(0))
        g_x = g_c = None
        if ctx.needs_input_grad[0]:
            scale = s * sample_count(x, ctx.e.group)
            g_x = joined([joint_pull(part, m, s, c, shift / scale, growth / scale, ctx.e) for part in blocks(x)])
        if ctx.needs_input_grad[1] and ctx.e.name != "quadratic":
            beta, change = expectation(c, ctx.e)
            own_shift, own_growth = inverse_times(at, *g.unbind(0))  # ranks add up their shares of g_c
            g_c = own_growth * (beta - at.slope_tt - change * c / 2.0) - own_shift * at.slope_t
            g_c = g_c / c
        return g_x, g_c, None, None


class LocalMoments(Function):
    """(m, s) of every channel for a penalty that is not convex, from huber's m0 and in units of huber's s0.

    s = s0·sqrt(mean t·psi/gamma) with gamma = E Z·psi(Z), so that with e = psi + t·psi' and V = mean t·psi
    dlog s = dlog s0 + mean e·dt/2V and mean psi'·dt = 0, where dt = (dx - dm)/s0 - t·dlog s0.
    """

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, tuple[int, ...]]:
        return mapped(LocalMoments, info, in_dims, *arguments)

    @staticmethod
    def forward(
        x: Tensor, c: Tensor, m0: Tensor, s0: Tensor, rows: Tensor, e: Estimator
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = local_moments(x, c, e, rows, m0, s0)
        return found.m, found.s, torch.stack(list(found.at))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, c, _, s0, _, ctx.e = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, c, s0, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, c, s0, m, s, held = ctx.saved_tensors
        at = totals(x, m, s0, c, ctx.e) if torch.is_grad_enabled() else Totals(*held.unbind(0))
        g = torch.stack([grads[0] * s0, grads[1] * s])
        g_x, g_c, g_unit = None, None, None
        moved, scaled, _ = _local_adjoint(at, *reduced(g, ctx.e.group).unbind(0))
        if ctx.needs_input_grad[0]:
            scale = s0 * sample_count(x, ctx.e.group)
            g_x = joined([local_pull(part, m, s0, c, moved / scale, scaled / scale, ctx.e) for part in blocks(x)])
        moved, scaled, unit = _local_adjoint(at, *g.unbind(0))
        if ctx.needs_input_grad[1]:
            gamma, change = expectation(c, ctx.e)
            by_scale = scaled * (at.t_psi - at.slope_tt) - g[1] * change * c / (2.0 * gamma)
            g_c = (by_scale - moved * at.slope_t) / c
        if ctx.needs_input_grad[3]:
            g_unit = unit / s0
        return g_x, g_c, None, g_unit, None, None


def _local_adjoint(at: Totals, g_shift: Tensor, g_growth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lambda_m, lambda_s, the gradient in log s0) from those in m/s0 and log s."""
    scaled = g_growth / (2.0 * at.t_psi.clamp(min=LEAST * LEAST))
    moved = (g_shift - scaled * (at.psi + at.slope_t)) / at.slope.clamp(min=LEAST)
    return moved, scaled, g_growth - scaled * (at.t_psi + at.slope_tt) - moved * at.slope_t


class Normalize(Function):
    """y = (x - m)·weight/d + bias per channel, in x's dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, m: Tensor, d: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        variance = torch.full_like(m, 1.0 - UNIT_EPS)
        return F.batch_norm(x, m, variance, weight / d, bias, False, 0.0, UNIT_EPS)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, m, d, weight = ctx.saved_tensors
        gain = weight / d
        if torch.is_grad_enabled() or x.device.type not in ("cpu", "cuda"):
            wide = grads[0].to(m.dtype)
            g_x = (wide * spread(gain, x)).to(x.dtype)
            product, total = channel_sum(wide * (x.to(m.dtype) - spread(m, x))), channel_sum(wide)
        else:
            variance = torch.full_like(m, 1.0 - UNIT_EPS)
            saved = (m, torch.ones_like(m))  # CUDA asks for them, and takes 1/sqrt(variance + eps) from here
            g_x, product, total = torch.ops.aten.native_batch_norm_backward(
                grads[0], x, gain, m, variance, *saved, False, UNIT_EPS, [True, True, True]
            )
        product = product / d  # before it meets another 1/d: d² may overflow
        return g_x, -gain * total, -gain * product, product, total


def moments(x: Tensor, c: Tensor, estimator: Estimator) -> tuple[Tensor, Tensor]:
    """(m, s) of every channel of x, [N, C, *spatial], differentiable in x and c."""
    with torch.no_grad():
        rows = sample(x, estimator.group)
    m, s, _ = JointMoments.apply(x, c, rows, estimator.unit)
    if not estimator.convex:
        m, s, _ = LocalMoments.apply(x, c, m.detach(), s, rows, estimator)
    return m, s


def normalized(
    x: Tensor, c: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, estimator: Estimator
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - m)/sqrt(s² + eps)·weight + bias, and m and s."""
    m, s = moments(x, c, estimator)
    ones = torch.ones_like(m) if weight is None else weight.to(m.dtype)
    zeros = torch.zeros_like(m) if bias is None else bias.to(m.dtype)
    divisor = torch.hypot(s, torch.full_like(s, math.sqrt(eps)))
    return Normalize.apply(x, m, divisor, ones, zeros), m, s
