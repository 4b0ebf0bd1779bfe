"""Euclidean projections of rows onto `SURFACES`, as one differentiable operation.

`_Project` uses a surface's tangent, so that an eager backward keeps the input, the radius and at most two numbers a
row; compiled, exported and transformed code differentiates the surface's forward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels import dispatch
from hyperball.kernels.projection.surfaces import SURFACES as SURFACES
from hyperball.kernels.projection.surfaces import Forward
from hyperball.kernels.projection.surfaces import clip as clip
from hyperball.kernels.projection.surfaces import is_plain as is_plain
from hyperball.kernels.reading import can_look, export_records, is_concrete, row_sum

BLOCK = 262_144  # elements a thread: what stays in its cache
LONGEST = 8192  # elements of a row that a Triton program keeps in registers
OPAQUE = ("l1_ball", "l1_sphere", "simplex")  # in a compiled graph on a GPU; a compiler fuses the others itself


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
    from hyperball.kernels.triton.projection import launch as projection_launch

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
            from hyperball.kernels.triton.projection import launch as projection_launch

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
        from hyperball.kernels.triton.projection import launch as projection_launch

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
