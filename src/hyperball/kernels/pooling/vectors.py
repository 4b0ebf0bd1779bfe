"""Robust pooling of vectors: y = argmin_u Σ_i w_i·phi(‖u − x_i‖), the center of a set of points.

With d = y − x, n = ‖d‖, r = d/n: g = Σ w·s·d and H = Σ w·(s·I + (phi'' − s)·r·rᵀ). Each step compares the Newton point
with the IRLS point, which always descends, and keeps the better one. The gradient is implicit, with λ = H⁻¹v:
v·dy = Σ w·⟨s·λ + (phi'' − s)·r·⟨r, λ⟩, dx⟩ + (1/c)⟨λ, Σ w·phi''·d⟩·dc − ⟨λ, Σ w·(ds/dshape)·d⟩·dshape − Σ s·⟨λ, d⟩·dw.

Sets are [R, n, d]; a set's parameters are numbers or [R, 1]; weights are None or [R, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.pooling.choice import compute_dtype
from hyperball.kernels.pooling.gradient import Broken, broken_rows
from hyperball.kernels.pooling.rows import CANDIDATES, is_convex, phi
from hyperball.kernels.pooling.solver import gain_and_curvature
from hyperball.kernels.pooling.values import (
    in_slots,
    named_value,
    on_rows,
    put_together,
    refuse_tangents,
    taken_apart,
)
from hyperball.kernels.reading import can_look, export_records, row_sum
from hyperball.rows import Value

FIXED_STEPS = 20  # chosen by tests/pooling/test_segments.py on sets with 0, 25 and 45 % outliers
MAX_STEPS = 200
STARTS = 3
DENSE = 128  # dimensions up to which H is formed
CG_STEPS = 96
DAMPING = 1e-3


class Point(NamedTuple):
    """What is known at y: difference [R, n, d], unit vectors, n, w·s, w·phi'', gradient [R, d], Σ w·s."""

    d: Tensor
    r: Tensor
    n: Tensor
    s: Tensor
    h: Tensor
    g: Tensor
    gains: Tensor


def lengths(d: Tensor) -> Tensor:
    """‖d‖ over the last dimension, without overflow; its gradient is 0 at 0."""
    longest = d.detach().abs().amax(-1, keepdim=True)
    scale = torch.where(longest > 0, longest, 1.0)
    square = (d / scale).square().sum(-1)
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0) * scale.squeeze(-1)


def look_at(y: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> Point:
    """Everything the solver and the gradient need at y [R, d]."""
    d = y.unsqueeze(-2) - x
    n = lengths(d)
    s, h = gain_and_curvature(value, n)
    if weights is not None:
        s, h = s * weights, h * weights
    r = d / torch.where(n > 0, n, 1.0).unsqueeze(-1)
    return Point(d, r, n, s, h, combine(s, d), row_sum(s))


def cost(y: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> Tensor:
    """Σ w·phi(‖y − x‖), in units of c² where phi is homogeneous."""
    found = phi(value, lengths(y.unsqueeze(-2) - x))
    return row_sum(found if weights is None else found * weights)


def along(d: Tensor, v: Tensor) -> Tensor:
    """⟨d_i, v⟩, [R, n]."""
    return (d * v.unsqueeze(-2)).sum(-1)


def combine(a: Tensor, d: Tensor) -> Tensor:
    """Σ_i a_i·d_i, [R, d]."""
    return row_sum((a.unsqueeze(-1) * d).transpose(-1, -2))


def times_hessian(p: Point, v: Tensor) -> Tensor:
    """H·v = Σ s·v + Σ (phi'' − s)·r·⟨r, v⟩."""
    return p.gains.unsqueeze(-1) * v + combine((p.h - p.s) * along(p.r, v), p.r)


def hessian(p: Point) -> tuple[Tensor, Tensor]:
    """H [R, d, d], and the identity."""
    eye = torch.eye(p.g.shape[-1], dtype=p.g.dtype, device=p.g.device)
    device = p.g.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # else the product would be rounded
        bend = (p.r * (p.h - p.s).unsqueeze(-1)).transpose(-1, -2) @ p.r
    return p.gains[:, None, None] * eye + bend, eye


def solve_hessian(p: Point, v: Tensor, *, damped: bool) -> Tensor:
    """H⁻¹·v; with `damped`, H is lifted until its least eigenvalue is 1e-3·Σ s (dense only)."""
    if v.shape[-1] > DENSE:
        return _conjugate_gradients(p, v)
    matrix, eye = hessian(p)
    lift = torch.finfo(v.dtype).eps * p.gains
    if damped:
        lift = (DAMPING * p.gains - torch.linalg.eigvalsh(matrix.detach().nan_to_num())[..., 0]).clamp(min=0.0)
    lift = torch.where(p.gains > 0, lift, 1.0)
    return torch.linalg.solve(matrix + lift[:, None, None] * eye, v.unsqueeze(-1)).squeeze(-1)


def _conjugate_gradients(p: Point, v: Tensor) -> Tensor:
    x, residual = torch.zeros_like(v), v
    direction, square = v, (v * v).sum(-1, keepdim=True)
    for _ in range(CG_STEPS):
        product = times_hessian(p, direction)
        bend = (direction * product).sum(-1, keepdim=True)
        step = torch.where(bend > 0, square / torch.where(bend > 0, bend, 1.0), 0.0)
        x, residual = x + step * direction, residual - step * product
        after = (residual * residual).sum(-1, keepdim=True)
        direction = residual + torch.where(square > 0, after / torch.where(square > 0, square, 1.0), 0.0) * direction
        square = after
    return x


def descend(y: Tensor, x: Tensor, weights: Tensor | None, value: Value, fixed: bool) -> tuple[Tensor, Tensor]:
    """(minimum, steps) reached from y [R, d] by the better of the Newton and the IRLS step."""
    eps = torch.finfo(y.dtype).eps
    done = torch.zeros(y.shape[:-1], dtype=torch.bool, device=y.device)
    taken = torch.zeros_like(done, dtype=torch.int32)
    for _ in range(FIXED_STEPS if fixed else MAX_STEPS):
        p = look_at(y, x, weights, value)
        safe = torch.where(p.gains > 0, p.gains, 1.0).unsqueeze(-1)
        irls, newton = y - p.g / safe, y - solve_hessian(p, p.g, damped=False).nan_to_num()
        better = _is_better(newton, irls, x, weights, value)
        target = torch.where(better.unsqueeze(-1), newton, irls)
        size = row_sum(p.s * p.n)
        moved = (target - y).abs().amax(-1)
        done = done | ~(moved > 2 * eps * y.abs().amax(-1)) | ~(p.g.abs().amax(-1) > eps * size)
        y = torch.where(done.unsqueeze(-1), y, target)
        taken = taken + (~done).to(taken.dtype)
        if can_look(y) and y.device.type == "cpu" and bool(done.all()):
            break
    return y, taken


def _is_better(newton: Tensor, irls: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> Tensor:
    """Whether the Newton point costs no more, and has no larger gradient, than the IRLS point."""
    slack = 1 + 8 * torch.finfo(x.dtype).eps
    cheap = cost(newton, x, weights, value) <= cost(irls, x, weights, value) * slack
    flat = look_at(newton, x, weights, value).g.norm(dim=-1) <= look_at(irls, x, weights, value).g.norm(dim=-1)
    return cheap & flat


def _clean(x: Tensor, weights: Tensor | None) -> Tensor:
    bound = torch.finfo(x.dtype).max / 8
    return (x if weights is None else torch.where((weights > 0).unsqueeze(-1), x, 0.0)).clamp(-bound, bound)


def pool_sets(x: Tensor, weights: Tensor | None, value: Value, *, fixed: bool) -> tuple[Tensor, Tensor]:
    """(y, steps) of sets [R, n, d]; a set with a NaN, or with no sample, is NaN."""
    kept = _clean(x, weights)
    origin = (
        kept.mean(-2) if weights is None else (kept * weights.unsqueeze(-1)).sum(-2) / weights.sum(-1, keepdim=True)
    )
    if value.name == "quadratic":
        return origin, torch.zeros(x.shape[0], dtype=torch.int32, device=x.device)
    y, steps = descend(_middle(kept, weights, origin), kept, weights, value, fixed)
    if not is_convex(value):
        best = cost(y, kept, weights, value)
        for start in _best_samples(kept, weights, value, origin):
            rival, taken = descend(start, kept, weights, value, fixed)
            rival_cost = cost(rival, kept, weights, value)
            wins = rival_cost < best
            y, steps = torch.where(wins.unsqueeze(-1), rival, y), torch.where(wins, taken, steps)
            best = torch.where(wins, rival_cost, best)
    broken = x.isnan() if weights is None else x.isnan() & (weights > 0).unsqueeze(-1)
    empty = torch.zeros_like(steps, dtype=torch.bool) if weights is None else ~(weights > 0).any(-1)
    return torch.where((broken.flatten(1).any(-1) | empty).unsqueeze(-1), torch.nan, y), steps


def _middle(x: Tensor, weights: Tensor | None, origin: Tensor) -> Tensor:
    """The median of every coordinate, a start that outliers cannot move far; absent points stand at the mean."""
    if weights is not None:
        x = torch.where((weights > 0).unsqueeze(-1), x, origin.unsqueeze(-2))
    n = x.shape[-2]
    ordered = x.sort(-2).values
    return (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2


def _best_samples(x: Tensor, weights: Tensor | None, value: Value, origin: Tensor) -> list[Tensor]:
    """The samples (at most 64 are tried) around which the others cost least."""
    count = min(x.shape[-2], CANDIDATES)
    index = torch.linspace(0, x.shape[-2] - 1, count, device=x.device).round().long()
    tried = (
        x[:, index]
        if weights is None
        else torch.where((weights[:, index] > 0).unsqueeze(-1), x[:, index], origin[:, None])
    )
    costs = torch.stack([cost(tried[:, i], x, weights, value) for i in range(count)], -1)
    best = costs.topk(min(STARTS, count), dim=-1, largest=False).indices
    return [
        tried.gather(1, best[:, i, None, None].expand(-1, 1, x.shape[-1])).squeeze(1) for i in range(best.shape[-1])
    ]


def residuals(y: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> tuple[Tensor, Tensor]:
    """(‖Σ w·psi·r‖, whether the gradient is damped), [R]; sets of more than 128 dimensions are never damped."""
    lifted = {key: item.unsqueeze(-1) for key, item in value.parameters.items() if isinstance(item, Tensor)}
    held = None if weights is None else weights.to(y.dtype)
    p = look_at(y, _clean(x.to(y.dtype), held), held, value.with_parameters(**lifted))
    damped = torch.zeros_like(p.gains, dtype=torch.bool)
    if y.shape[-1] <= DENSE:
        damped = torch.linalg.eigvalsh(hessian(p)[0].nan_to_num())[..., 0] < DAMPING * p.gains
    return p.g.norm(dim=-1), damped


@torch.library.custom_op("hyperball::robust_pool_vectors", mutates_args=())
def vectors_op(x: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str) -> tuple[Tensor, Tensor]:
    """`pool_sets` as one opaque node: traced, its steps would take minutes to compile; c and shape are [R]."""
    value = named_value(penalty, c.unsqueeze(-1), shape.unsqueeze(-1))
    y, steps = pool_sets(x, weights, value, fixed=x.dtype != torch.float64)
    return y.contiguous(), steps.contiguous()


@vectors_op.register_fake
def _(x: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], x.shape[2]), x.new_empty(x.shape[0], dtype=torch.int32)


def solve_sets(x: Tensor, weights: Tensor | None, value: Value, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(y, steps): the forward of both functions below."""
    dtype = compute_dtype(x.dtype)
    x, w = x.to(dtype), None if weights is None else weights.to(dtype)
    if torch.compiler.is_compiling() and not export_records():
        held, rows = put_together(value, tensors), x[:, 0, 0]
        c, shape = on_rows(held.parameters["rho"], rows), on_rows(held.parameters.get("shape", 1.0), rows)
        found: tuple[Tensor, Tensor] = vectors_op(x, w, c, shape, held.name)
        return found
    return pool_sets(x, w, _held(value, tensors), fixed=dtype != torch.float64 or not can_look(x))


def look_at_solution(y: Tensor, x: Tensor, weights: Tensor | None, value: Value) -> tuple[Point, Broken | None]:
    """`look_at`, with the points of a set whose center is NaN at that center, so that nothing there is NaN."""
    x, broken = _clean(x.to(y.dtype), weights), broken_rows(y, weights)
    if broken is not None:
        y, x = torch.where(broken.rows, 0.0, y), torch.where(broken.rows.unsqueeze(-1), 0.0, x)
    return look_at(y, x, weights, value), broken


def saved_pull_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The backward of both functions below."""
    x, weights, y, *tensors = ctx.saved_tensors
    w = None if weights is None else weights.to(y.dtype)
    held, v = _held(ctx.value, tensors), grad.to(y.dtype)
    p, broken = look_at_solution(y, x, w, held)
    adjoint = solve_hessian(p, v, damped=True)
    bend = (p.h - p.s) * along(p.r, adjoint)
    grad_x = p.s.unsqueeze(-1) * adjoint.unsqueeze(-2) + bend.unsqueeze(-1) * p.r
    grad_w = None
    if weights is not None:
        s = gain_and_curvature(held, p.n)[0]
        grad_w = -s * along(p.d, adjoint)
    parameters = [(adjoint * slope).sum(-1) for slope in _slopes(held, p, w)]
    if broken is not None:
        grad_x = broken.keep(grad_x, v, w)
        grad_w = None if grad_w is None else broken.keep(grad_w, v)
        parameters = [broken.keep(slope.unsqueeze(-1), v).squeeze(-1) for slope in parameters]
    if weights is not None and grad_w is not None:
        grad_w = grad_w.to(weights.dtype)
    return grad_x.to(x.dtype), grad_w, None, *parameters


class VectorPool(torch.autograd.Function):
    """y [R, d] and steps [R] from x [R, n, d], weights [R, n] or None, the penalty and its tensor parameters [R]."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor | None, value: Value, *tensors: Tensor) -> Any:
        return solve_sets(x, weights, value, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weights, ctx.value, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weights, output[0], *tensors)
        ctx.save_for_forward(x, weights, output[0], *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        return saved_pull_back(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, _value: None, *dtensors: Any) -> Any:
        x, weights, y, *tensors = ctx.saved_tensors
        w = None if weights is None else weights.to(y.dtype)
        held = _held(ctx.value, tensors)
        p, broken = look_at_solution(y, x, w, held)
        moved = torch.zeros_like(y)
        if dx is not None:
            step = dx.to(y.dtype)
            moved = moved + combine(p.s, step) + combine((p.h - p.s) * (p.r * step).sum(-1), p.r)
        if dw is not None:
            moved = moved - combine(gain_and_curvature(held, p.n)[0] * dw.to(y.dtype), p.d)
        for slope, change in zip(_slopes(held, p, w), dtensors, strict=True):
            if change is not None:
                moved = moved + slope * change.unsqueeze(-1)
        found = solve_hessian(p, moved, damped=True)
        return found if broken is None else broken.keep(found, torch.ones_like(found)), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weights: Tensor | None, value: Value, *tensors: Tensor
    ) -> Any:
        def stacked(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            spread = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return spread.flatten(0, 1)

        moved = [stacked(tensor, dim) for tensor, dim in zip(tensors, in_dims[3:], strict=True)]
        y, steps = VectorPool.apply(stacked(x, in_dims[0]), stacked(weights, in_dims[1]), value, *moved)
        unpack = (info.batch_size, -1)
        return (y.unflatten(0, unpack), steps.unflatten(0, unpack)), (0, 0)


def _held(value: Value, tensors: Any) -> Value:
    return put_together(value, [tensor.unsqueeze(-1) for tensor in tensors])


def _slopes(value: Value, p: Point, weights: Tensor | None) -> list[Tensor]:
    """H·dy/dθ, [R, d], for every tensor parameter."""
    found = []
    for key, held in value.parameters.items():
        if not isinstance(held, Tensor):
            continue
        if key == "rho":
            found.append(combine(p.h, p.d) / held)
        elif key == "alpha":
            found.append(torch.zeros_like(p.g))
        else:
            s, h = gain_and_curvature(value, p.n)
            slope = value.row.partials[key](p.n, s, h, **value.parameters)
            found.append(-combine(slope if weights is None else slope * weights, p.d))
    return found


class CompiledVectorPool(torch.autograd.Function):
    """The same in the one form that torch.compile traces with and without gradients (see CompiledRobustPool)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Any, value: Value, p0: Any, p1: Any, p2: Any, p3: Any) -> Any:
        tensors = [p for p in (p0, p1, p2, p3) if p is not None]
        y, steps = solve_sets(x, weights, value, tensors)
        ctx.value = value
        ctx.mark_non_differentiable(steps)
        ctx.save_for_backward(x, weights, y, *tensors)
        return y, steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        return in_slots(*saved_pull_back(ctx, grad), count=7)


def pool_vectors(x: Tensor, weights: Tensor | None, value: Value) -> tuple[Tensor, Tensor]:
    """(y, steps) of sets [R, n, d]; weights None or [R, n]; tensor parameters [R]."""
    shell, tensors = taken_apart(value)
    if torch.compiler.is_compiling():
        refuse_tangents(x, weights, *tensors)
        y, steps = CompiledVectorPool.apply(*in_slots(x, weights, shell, *tensors, count=7))
    else:
        y, steps = VectorPool.apply(x, weights, shell, *tensors)
    return y, steps
