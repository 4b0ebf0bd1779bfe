"""Euclidean projections of rows: y = argmin ||u - x||^2 / 2 over a norm ball, a norm sphere or a simplex.

Every member is one row of `SURFACES`: its forward, which plain autograd differentiates correctly (so that it can
be compiled and exported as it is), and its tangent, the closed form that `_Project` uses so that an eager backward
keeps the input, the radius and at most two numbers a row. Every Jacobian J = dy/dx is symmetric. With Euler's
identity, y = J x + r dy/dr, the radius gradient is <v, dy/dr> = (<v, y> - <J v, x>) / r.

Rows are laid out as [..., n], contiguous, in float32 or float64; a radius is [..., 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hyperball.kernels import dispatch
from hyperball.kernels.projection_solver import mass, solver_for
from hyperball.kernels.reading import can_look, export_records, is_concrete, row_sum

BLOCK = 262_144  # elements a thread: what stays in its cache
LONGEST = 8192  # elements of a row that a Triton program keeps in registers
OPAQUE = ("l1_ball", "l1_sphere", "simplex")  # in a compiled graph on a GPU; a compiler fuses the others itself

Forward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Tangent(NamedTuple):
    """The derivative of a projection at a point: dy = apply(dx) + growth * dr."""

    apply: Callable[[Tensor], Tensor]
    growth: Tensor


@dataclass(frozen=True)
class Surface:
    """A set to project onto: forward(rows, radius) -> (y, cut), tangent(rows, radius, cut) -> Tangent."""

    forward: Forward
    tangent: Callable[[Tensor, Tensor, Tensor], Tangent]


def signs(rows: Tensor) -> Tensor:
    """sgn(x) with sgn(0) = +1."""
    return torch.sign(rows.detach()).add_(0.5).sign_()


def positive(rows: Tensor) -> Tensor:
    """[x > 0] as 0 or 1 in x's dtype: on the CPU far cheaper than a bool mask and `torch.where`."""
    return torch.sign(torch.relu(rows.detach()))


def choose(inside: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where inside, y elsewhere, exactly, for finite x and y: a cheap `torch.where` over rows."""
    return torch.lerp(y, x, inside.to(x.dtype))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is concrete and carries no forward-mode tangent."""
    return is_concrete(tensor) and unpack_dual(tensor).tangent is None


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """y = min(max(x, low), high); on a bound the gradient is x's, NaN stays where it is."""
    if torch.is_grad_enabled():  # torch.clamp leaves the gradient on a bound to its version
        raised = torch.where((x < low) | low.isnan(), low, x)
        return torch.where((raised > high) | high.isnan(), high, raised)
    return torch.clamp(x, low, high)


def excess(rows: Tensor, radius: Tensor) -> Tensor:
    """c = max((x - max x) / r, -2): exact near the maximum, so a row of 1e20 keeps the digits of a radius of 1.

    An element below -1 has no part in the answer; the floor keeps c finite.
    """
    return torch.maximum(rows - rows.amax(-1, keepdim=True).detach(), -2 * radius) / radius


def simplex(rows: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """y = r max(c + theta - d, 0), d = (sum_i max(c_i + theta, 0) - 1) / count the last, differentiable, Newton step.

    theta and d are kept apart because theta alone is rounded coarser than the smallest elements of y.
    """
    plain = not torch.is_grad_enabled() and is_plain(rows)
    if not plain:
        rows = rows * (1 + 0 * rows.detach().amax(-1, keepdim=True))  # a row that is not finite has NaN gradients
    shifted = excess(rows, radius)
    with torch.no_grad():
        theta, total, count = solver_for(shifted)(shifted.detach())
    if not plain:
        total, count = mass(shifted, theta)
    step = (total - 1) / count
    return radius * (shifted + theta).sub_(step).relu_(), torch.cat((theta, step), -1)


def simplex_tangent(rows: Tensor, radius: Tensor, cut: Tensor) -> Tangent:
    """J v = v - <1, v>_S / |S| on the support S, 0 elsewhere; dy/dr = 1/|S| on S."""
    chosen = positive(excess(rows, radius) + cut[..., :1] - cut[..., 1:])
    count = row_sum(chosen, keepdim=True)
    return Tangent(lambda v: chosen * (v - row_sum(chosen * v, keepdim=True) / count), chosen / count)


def l1(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = s * simplex(s * x), s = sgn(x); a ball keeps x where ||x||_1 <= r."""
    sign = torch.sign(rows.detach()) if ball else signs(rows)  # outside a ball no zero moves
    size = sign * rows
    magnitude, cut = simplex(size, radius)
    y = sign * magnitude
    return (choose(row_sum(size, keepdim=True) <= radius, rows, y) if ball else y), cut


def l1_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = v - s <s, v>_S / |S| on the support S; dy/dr = s/|S| on S; inside a ball J = 1, dy/dr = 0."""
    sign = signs(rows)
    face = simplex_tangent(sign * rows, radius, cut)
    outer = Tangent(lambda v: sign * face.apply(sign * v), sign * face.growth)
    return _keep_inside(outer, row_sum(rows.abs(), keepdim=True) <= radius) if ball else outer


def _keep_inside(outer: Tangent, inside: Tensor) -> Tangent:
    return Tangent(
        lambda v: choose(inside, v, outer.apply(v)),
        choose(inside, torch.zeros_like(outer.growth), outer.growth),
    )


def no_cut(rows: Tensor) -> Tensor:
    """The cut of a surface that needs none: [..., 0]."""
    return rows.new_empty(*rows.shape[:-1], 0)


def direction(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(x / ||x||, ||x||), scaled by max |x| before squaring; the zero row points to 1/sqrt(n) everywhere."""
    largest = rows.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    scaled = rows / torch.where(zero, torch.inf, largest) + zero.to(rows.dtype)
    length = row_sum(scaled.square(), keepdim=True).sqrt()
    return scaled / length, largest * length


def l2(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = r x / ||x||; a ball keeps x where ||x|| <= r."""
    unit, norm = direction(rows)
    y = radius * unit
    return (choose(norm <= radius, rows, y) if ball else y), no_cut(rows)


def l2_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = (r / ||x||) (v - u <u, v>), u = x / ||x||, and 0 at x = 0; dy/dr = u; inside a ball J = 1, dy/dr = 0."""
    unit, norm = direction(rows)
    zero = (norm == 0).to(norm.dtype)
    gain = (1 - zero) * (radius / (norm + zero)).clamp(max=1.0 if ball else torch.finfo(norm.dtype).max)
    outer = Tangent(lambda v: gain * (v - unit * row_sum(unit * v, keepdim=True)), unit)
    return _keep_inside(outer, norm <= radius) if ball else outer


def first_largest(rows: Tensor) -> Tensor:
    """The index of the first largest |x_i|, kept as [..., 1]."""
    return rows.detach().abs().argmax(-1, keepdim=True)


def linf(rows: Tensor, radius: Tensor, *, ball: bool) -> tuple[Tensor, Tensor]:
    """y = clip(x, -r, r); a sphere then has its first largest coordinate at r sgn(x_i), inside or outside."""
    y, none = clip(rows, -radius, radius), no_cut(rows)
    if ball:
        return y, none
    first = first_largest(rows)
    value = rows.gather(-1, first)
    return y.scatter(-1, first, torch.where(value.isnan(), value, radius * signs(value))), none


def linf_tangent(rows: Tensor, radius: Tensor, cut: Tensor, *, ball: bool) -> Tangent:
    """J v = v off the pinned coordinates, dy/dr = sgn(x) on them: |x_i| > r, and the first largest on a sphere."""
    pinned = positive(rows.abs() - radius)
    if not ball:
        first = first_largest(rows)
        pinned = pinned.scatter(-1, first, 1.0 - rows.gather(-1, first).isnan().to(rows.dtype))
    return Tangent(lambda v: v * (1 - pinned), pinned * signs(rows))


SURFACES = {
    "l1_ball": Surface(partial(l1, ball=True), partial(l1_tangent, ball=True)),
    "l1_sphere": Surface(partial(l1, ball=False), partial(l1_tangent, ball=False)),
    "l2_ball": Surface(partial(l2, ball=True), partial(l2_tangent, ball=True)),
    "l2_sphere": Surface(partial(l2, ball=False), partial(l2_tangent, ball=False)),
    "linf_ball": Surface(partial(linf, ball=True), partial(linf_tangent, ball=True)),
    "linf_sphere": Surface(partial(linf, ball=False), partial(linf_tangent, ball=False)),
    "simplex": Surface(simplex, simplex_tangent),
}


def _to_rows(tensor: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    last = tuple(range(-len(dims), 0))
    moved = tensor.to(dtype).movedim(dims, last)
    return moved.reshape(*moved.shape[: -len(dims)], math.prod(moved.shape[-len(dims) :])).contiguous()


def _from_rows(rows: Tensor, dims: tuple[int, ...], sizes: list[int], dtype: torch.dtype) -> Tensor:
    if dims == (-1,):
        return rows.to(dtype)
    last = tuple(range(-len(dims), 0))
    return rows.reshape(*rows.shape[:-1], *sizes).movedim(last, dims).to(dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _evaluate(
    x: Tensor, radius: Tensor, kind: str, dims: tuple[int, ...], *, in_blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, cut); y is NaN where a radius that could not be looked at is not > 0."""
    dtype, forward = _compute_dtype(x), SURFACES[kind].forward
    looked = _refuse_bad_radius(radius)
    rows, radii = _to_rows(x, dims, dtype), _to_rows(radius, dims, dtype)
    y, cut = _in_blocks(forward, rows, radii) if in_blocks else forward(rows, radii)
    y = _from_rows(y, dims, [x.shape[d] for d in dims], x.dtype)
    return (y if looked else torch.where(radius > 0, y, torch.nan)), cut


def _in_blocks(forward: Forward, rows: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """forward(rows, radius), a few rows at a time: passes over a block stay in the cache."""
    height = max(1, BLOCK * torch.get_num_threads() // rows.shape[-1])
    if rows[..., 0].numel() <= height:
        return forward(rows, radius)
    y, cuts = torch.empty_like(rows), []
    radius = radius.expand_as(rows[..., :1])
    parts = (tensor.flatten(0, -2).split(height) for tensor in (y, rows, radius))
    for target, block, radii in zip(*parts, strict=True):
        result, cut = forward(block, radii)
        target.copy_(result)
        cuts.append(cut)
    return y, torch.cat(cuts).unflatten(0, rows.shape[:-1])


def _sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    wide = [d for d, size in enumerate(shape) if size == 1 and tensor.shape[d] != 1]
    return tensor.sum(wide, keepdim=True) if wide else tensor


def _in_layout_of(x: Tensor, y: Tensor, dims: tuple[int, ...]) -> Tensor:
    """y with x's strides and memory of its own: a view made here could not be overwritten in place."""
    return y if dims == (-1,) and y.stride() == x.stride() else torch.empty_like(x).copy_(y)


def _refuse_bad_radius(radius: Tensor) -> bool:
    """Raise where a radius on the CPU is not finite and > 0; tell whether it could be looked at (no device waits)."""
    if radius.device.type != "cpu" or not can_look(radius):
        return False
    bad = ~((radius > 0) & radius.isfinite())
    if bool(bad.any()):
        raise ValueError(f"`radius` must be finite and > 0, got {radius[bad][0].item()}")
    return True


def kernel_for(x: Tensor, dims: tuple[int, ...]) -> dispatch.Choice:
    """Which kernel projects x along dims, and why."""
    return choose_kernel(x.device, x.dtype, math.prod([x.shape[d] for d in dims]))


def choose_kernel(device: torch.device, dtype: torch.dtype, length: int) -> dispatch.Choice:
    """Which kernel projects vectors of this length, device and dtype, and why."""
    if device.type not in dispatch.DEVICES:  # before a length is looked at, which a graph for any length has not
        return dispatch.Choice("eager", "torch's own operators and a hand-written backward, exact in x and r")
    rules = [
        (dispatch.HAS_ROCM, "ROCm"),
        (not dispatch.HAS_TRITON, "triton is not installed"),
        (export_records(), "exported graphs hold torch's own operators"),
        (dtype not in dispatch.DTYPES, str(dtype).removeprefix("torch.")),
        (length > LONGEST, f"vectors of more than {LONGEST} elements"),
        (length == 0, "an empty input"),
    ]
    against = next((reason for holds, reason in rules if holds), "")
    if against:
        return dispatch.Choice("eager", against)
    return dispatch.Choice("triton", "a program keeps its vectors in registers; one launch forward, one backward")


def _is_plain_pull(*tensors: Tensor) -> bool:
    """Whether nothing traces, transforms or differentiates a backward."""
    return not torch.is_grad_enabled() and all(is_plain(tensor) for tensor in tensors)


def _launched(v: Tensor, x: Tensor, radius: Tensor, cut: Tensor, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the radius, by one launch."""
    from hyperball.kernels.triton import projection_launch

    grad_x, along = projection_launch.pull(v, x, radius, cut, ctx.kind, ctx.dims)
    grad_radius = None
    if ctx.needs_input_grad[1]:
        along = along[(...,) + (None,) * len(ctx.dims)].movedim(tuple(range(-len(ctx.dims), 0)), ctx.dims)
        grad_radius = _sum_to(along, radius.shape).to(radius.dtype)
    return grad_x if ctx.needs_input_grad[0] else None, grad_radius


class _Project(torch.autograd.Function):
    """y and, for L1 and the simplex, the cut of each row; keeps x, the radius and the cut."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, radius: Tensor, kind: str, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if kernel_for(x, dims).kernel == "triton" and is_concrete(x):
            from hyperball.kernels.triton import projection_launch

            return projection_launch.project(x, radius, kind, dims)
        y, cut = _evaluate(x, radius, kind, dims, in_blocks=x.device.type == "cpu")
        return _in_layout_of(x, y, dims), cut

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, radius, ctx.kind, ctx.dims = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, radius, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, radius, cut = ctx.saved_tensors
        dims, dtype = ctx.dims, _compute_dtype(x)
        if kernel_for(x, dims).kernel == "triton" and _is_plain_pull(grads[0], x, radius):
            return *_launched(grads[0], x, radius, cut, ctx), None, None
        tangent = SURFACES[ctx.kind].tangent(_to_rows(x, dims, dtype), _to_rows(radius, dims, dtype), cut)
        v = _to_rows(grads[0], dims, dtype)
        grad_x = grad_radius = None
        if ctx.needs_input_grad[0]:
            grad_x = _from_rows(tangent.apply(v), dims, [x.shape[d] for d in dims], x.dtype)
        if ctx.needs_input_grad[1]:
            along = _from_rows(row_sum(v * tangent.growth, keepdim=True), dims, [1] * len(dims), dtype)
            grad_radius = _sum_to(along, radius.shape).to(radius.dtype)
        return grad_x, grad_radius, None, None


@torch.library.custom_op("hyperball::project_rows", mutates_args=())
def project_op(x: Tensor, radius: Tensor, kind: str, dims: list[int]) -> tuple[Tensor, Tensor]:
    """`_Project` as one node of a compiled graph: a compiler would unroll the rounds of the threshold."""
    y, cut = _Project.forward(x, radius, kind, tuple(dims))
    return y, cut.contiguous()


@project_op.register_fake
def _(x: Tensor, radius: Tensor, kind: str, dims: list[int]) -> tuple[Tensor, Tensor]:
    rows = [x.shape[d] for d in range(x.dim()) if d - x.dim() not in dims]
    return torch.empty_like(x), x.new_empty((*rows, 2), dtype=_compute_dtype(x))


@torch.library.custom_op("hyperball::project_rows_backward", mutates_args=())
def project_backward_op(
    v: Tensor, x: Tensor, radius: Tensor, cut: Tensor, kind: str, dims: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and that of each row's radius in the shape of x with size 1 along dims."""
    held, dtype = tuple(dims), _compute_dtype(x)
    if kernel_for(x, held).kernel == "triton":
        from hyperball.kernels.triton import projection_launch

        grad_x, along = projection_launch.pull(v, x, radius, cut, kind, held)
        along = along[(...,) + (None,) * len(held)].movedim(tuple(range(-len(held), 0)), held)
        return grad_x, along.contiguous()
    tangent = SURFACES[kind].tangent(_to_rows(x, held, dtype), _to_rows(radius, held, dtype), cut)
    rows = _to_rows(v, held, dtype)
    grad_x = _from_rows(tangent.apply(rows), held, [x.shape[d] for d in held], x.dtype)
    along = _from_rows(row_sum(rows * tangent.growth, keepdim=True), held, [1] * len(held), dtype)
    return torch.empty_like(x).copy_(grad_x), along.contiguous()


@project_backward_op.register_fake
def _(v: Tensor, x: Tensor, radius: Tensor, cut: Tensor, kind: str, dims: list[int]) -> tuple[Tensor, Tensor]:
    kept = [1 if d - x.dim() in dims else x.shape[d] for d in range(x.dim())]
    return torch.empty_like(x), x.new_empty(kept, dtype=_compute_dtype(x))


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, radius, ctx.kind, ctx.dims = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, radius, output[1])


def _op_backward(ctx: Any, v: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, radius, cut = ctx.saved_tensors
    grad_x, along = project_backward_op(v, x, radius, cut, ctx.kind, ctx.dims)
    return grad_x, _sum_to(along, radius.shape).to(radius.dtype), None, None


project_op.register_autograd(_op_backward, setup_context=_op_setup)


def project(x: Tensor, radius: Tensor, kind: str, dims: tuple[int, ...]) -> Tensor:
    """Project x along dims (negative, ascending) onto SURFACES[kind]; radius has x's rank and size 1 along dims.

    The lean `_Project` in eager mode; plain operations, whose derivatives of any order and mode torch knows, where
    they are traced (compile, export), transformed (torch.func) or carry tangents (forward mode).
    """
    if is_plain(x) and is_plain(radius):
        return _Project.apply(x, radius, kind, dims)[0]
    if torch.compiler.is_compiling() and kind in OPAQUE and kernel_for(x, dims).kernel == "triton":
        return project_op(x, radius, kind, list(dims))[0]
    return _evaluate(x, radius, kind, dims)[0]
