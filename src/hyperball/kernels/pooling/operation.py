"""Robust pooling as one differentiable operation: it chooses a kernel, solves, and keeps x and y for the backward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.pooling import native
from hyperball.kernels.pooling.choice import choose as choose
from hyperball.kernels.pooling.choice import compute_dtype as compute_dtype
from hyperball.kernels.pooling.choice import explain_pooling as explain_pooling
from hyperball.kernels.pooling.choice import is_triton
from hyperball.kernels.pooling.choice import solver_of as solver_of
from hyperball.kernels.pooling.geometry import Along, Geometry
from hyperball.kernels.pooling.gradient import Tangent, parameter_partials, tangent, weight_partial
from hyperball.kernels.pooling.rows import pool_rows
from hyperball.kernels.pooling.values import as_rows as as_rows
from hyperball.kernels.pooling.values import (
    in_slots,
    is_tracked,
    named_value,
    native_penalty,
    on_rows,
    put_together,
    refuse_tangents,
    taken_apart,
)
from hyperball.kernels.pooling.values import per_row as per_row
from hyperball.kernels.reading import can_look, export_records, is_concrete, row_sum
from hyperball.rows import Value


def solve_rows(view: Tensor, weights: Tensor | None, value: Value, tap_dims: int) -> tuple[Tensor, Tensor]:
    """(y, steps) of a view [*rows, *taps]; tensor parameters are [*rows]."""
    kernel = choose(value, view.device, view.dtype)[0]
    if kernel == "native" and can_look(view):
        name, c, shape = native_penalty(value)
        return native.pool(view, weights, name, c, shape, tap_dims=tap_dims)
    if kernel == "triton" and is_concrete(view) and view.shape[view.dim() - tap_dims :].numel():
        from hyperball.kernels.triton.pooling import launch as pooling_launch

        return pooling_launch.pool(view, weights, *native_penalty(value), tap_dims)
    view = view.to(compute_dtype(view.dtype))
    row_shape = view.shape[: view.dim() - tap_dims]
    rows = as_rows(view, tap_dims)
    weights = None if weights is None else as_rows(weights.expand_as(view), tap_dims)
    fixed = view.dtype != torch.float64 or not can_look(view)
    y, steps = pool_rows(rows, weights, per_row(value), fixed=fixed)
    return y.reshape(row_shape), steps.reshape(row_shape)


@torch.library.custom_op("hyperball::robust_pool", mutates_args=())
def robust_pool_op(
    view: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str, tap_dims: int
) -> tuple[Tensor, Tensor]:
    """`solve_rows` as one opaque node of a compiled graph; c and shape are [*rows]. It has no forward-mode rule."""
    y, steps = solve_rows(view, weights, named_value(penalty, c, shape), tap_dims)
    return y.contiguous(), steps.contiguous()


@robust_pool_op.register_fake
def _(
    view: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str, tap_dims: int
) -> tuple[Tensor, Tensor]:
    rows = view.shape[: view.dim() - tap_dims]
    dtype = compute_dtype(view.dtype)
    return view.new_empty(rows, dtype=dtype), view.new_empty(rows, dtype=torch.int32)


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    view, weights, c, shape, ctx.penalty, ctx.tap_dims = inputs
    ctx.save_for_backward(view, weights, c, shape, output[0])


def _op_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    view, weights, c, shape, y = ctx.saved_tensors
    value = named_value(ctx.penalty, c, shape)
    geometry = Along(tuple(range(-ctx.tap_dims, 0)))
    given = weights if ctx.needs_input_grad[1] else None
    x, w, parameters = pull_back(grad, y, view, weights, value, geometry)
    shape_grad = parameters[1] if len(parameters) > 1 else None
    return x, None if given is None else w, parameters[0], shape_grad, None, None


robust_pool_op.register_autograd(_op_backward, setup_context=_op_setup)


def _rows_and_tangent(
    y: Tensor, x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry
) -> tuple[Tensor, Tensor | None, Value, Tangent]:
    view = geometry.view(x.to(y.dtype))
    row_weights = _view_weights(x, weights, geometry, y.dtype)
    rows = as_rows(view, geometry.tap_dims)
    held = None if row_weights is None else as_rows(row_weights.expand_as(view), geometry.tap_dims)
    flat = per_row(value)
    return view, held, flat, tangent(rows, held, flat, y.reshape(-1))


def _view_weights(x: Tensor, weights: Tensor | None, geometry: Geometry, dtype: torch.dtype) -> Tensor | None:
    return geometry.present(x, dtype) if weights is None else geometry.view(weights.to(dtype))


def pull_back(
    grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The gradients of x, of the weights and of the tensor parameters, from that of y."""
    view, held, flat, t = _rows_and_tangent(y, x, weights, value, geometry)
    v = grad.reshape(-1, 1).to(y.dtype)
    grad_x = geometry.scatter(t.pull(v, t.share, held).reshape(view.shape), x.shape).to(x.dtype)
    grad_weights = None
    if weights is not None:
        taps = t.pull(v, weight_partial(t)).reshape(view.shape)
        grad_weights = geometry.scatter(taps, weights.shape).to(weights.dtype)
    parameters = [t.pull(v, partial.unsqueeze(-1)).reshape(y.shape) for partial in parameter_partials(flat, held, t)]
    return grad_x, grad_weights, parameters


def solve_view(
    x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """(y, steps): the forward of both functions below."""
    dtype = compute_dtype(x.dtype)
    held = put_together(value, tensors)
    view = geometry.view(x if _launches(held, x) else x.to(dtype))
    row_weights = _view_weights(x, weights, geometry, dtype)
    if not _as_one_node(held, view):
        return solve_rows(view, row_weights, held, geometry.tap_dims)
    rows = view.flatten(-geometry.tap_dims)[..., 0]
    c, shape = on_rows(held.parameters["rho"], rows), on_rows(held.parameters.get("shape", 1.0), rows)
    row_weights = None if row_weights is None else row_weights.expand_as(view)
    found: tuple[Tensor, Tensor] = robust_pool_op(view, row_weights, c, shape, held.name, geometry.tap_dims)
    return found


def saved_pull_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The backward of both functions below: by a kernel where it knows how and no second derivative is asked for."""
    x, weights, y, *tensors = ctx.saved_tensors
    value = put_together(ctx.value, tensors)
    if _launches(value, x) and _is_plain_pull(grad, x, weights, y, *tensors):
        return _launched(grad, y, x, weights, value, ctx)
    if _can_pull(ctx, value, grad, x, weights, y, *tensors):
        return _native_pull_back(grad, y, x, weights, value, ctx.geometry)
    grads = pull_back(grad, y, x, weights, value, ctx.geometry)
    return grads[0], grads[1], None, None, *grads[2]


def _can_pull(ctx: Any, value: Value, grad: Tensor, x: Tensor, weights: Tensor | None, *others: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or ctx.needs_input_grad[1]:
        return False
    shape = value.parameters.get("shape")
    if isinstance(shape, Tensor) or any(is_tracked(tensor) for tensor in (grad, x, weights, *others)):
        return False
    return choose(value, x.device, x.dtype)[0] == "native"


def _launches(value: Value, x: Tensor) -> bool:
    """Whether Triton solves such rows: of a tensor that is there, or as a node of a compiled graph."""
    there = torch.compiler.is_compiling() or is_concrete(x)
    return there and is_triton(value, x.device, x.dtype) and x.numel() > 0


def _is_plain_pull(*tensors: Tensor | None) -> bool:
    """Whether nothing but a compiler traces a backward, and nothing differentiates it."""
    if torch.compiler.is_compiling():
        return True
    return not torch.is_grad_enabled() and not any(is_tracked(tensor) for tensor in tensors)


def _launched(grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, value: Value, ctx: Any) -> tuple[Any, ...]:
    """The gradients of x, the weights and the tensor parameters, by one launch."""
    geometry, of_weights = ctx.geometry, bool(ctx.needs_input_grad[1])
    view, row_weights = geometry.view(x), _view_weights(x, weights, geometry, y.dtype)
    if torch.compiler.is_compiling():
        c, shape = (on_rows(value.parameters.get(key, 1.0), y) for key in ("rho", "shape"))
        held = None if row_weights is None else row_weights.expand_as(view)
        found = robust_pull_op(grad, y, view, held, c, shape, value.name, geometry.tap_dims, of_weights)
    else:
        from hyperball.kernels.triton.pooling import launch as pooling_launch

        found = pooling_launch.pull(grad, y, view, row_weights, *native_penalty(value), geometry.tap_dims, of_weights)
    taps, taps_of_weights, of_c, of_shape = found
    grad_weights = None
    if weights is not None and of_weights and taps_of_weights is not None:
        grad_weights = geometry.scatter(taps_of_weights, weights.shape).to(weights.dtype)
    slots = {"rho": of_c, "shape": of_shape}
    parameters = [
        torch.zeros_like(y) if key == "alpha" else slots[key]
        for key, held in value.parameters.items() if isinstance(held, Tensor)
    ]  # fmt: skip
    return geometry.scatter(taps, x.shape), grad_weights, None, None, *parameters


@torch.library.custom_op("hyperball::robust_pool_backward", mutates_args=())
def robust_pull_op(
    grad: Tensor, y: Tensor, view: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str,
    tap_dims: int, of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the taps, of their weights (empty if not asked for) and of every row's c and shape."""
    from hyperball.kernels.triton.pooling import launch as pooling_launch

    found = pooling_launch.pull(grad, y, view, weights, penalty, c, shape, tap_dims, of_weights)
    assert found.c is not None
    assert found.shape is not None
    dw = y.new_empty(0) if found.weights is None else found.weights
    return found.taps, dw, found.c.contiguous(), found.shape.contiguous()


@robust_pull_op.register_fake
def _(
    grad: Tensor, y: Tensor, view: Tensor, weights: Tensor | None, c: Tensor, shape: Tensor, penalty: str,
    tap_dims: int, of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dw = torch.empty_like(view, dtype=y.dtype) if of_weights else y.new_empty(0)
    return torch.empty_like(view), dw, y.new_empty(y.shape), y.new_empty(y.shape)


def _native_pull_back(
    grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry
) -> tuple[Any, ...]:
    view = geometry.view(x.to(y.dtype))
    row_weights = _view_weights(x, weights, geometry, y.dtype)
    name, c, shape = native_penalty(value)
    share, radius = native.pull(grad, y, view, row_weights, name, c, shape, tap_dims=geometry.tap_dims)
    grad_x = geometry.scatter(share, x.shape).to(x.dtype)
    return grad_x, None, None, None, *([radius] if isinstance(c, Tensor) else [])


class RobustPool(torch.autograd.Function):
    """y and steps from x, weights (of x's shape, or None), penalty, geometry and tensor parameters [*rows]."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry, *tensors: Tensor) -> Any:
        return solve_view(x, weights, value, geometry, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weights, ctx.value, ctx.geometry, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weights, output[0], *tensors)
        ctx.save_for_forward(x, weights, output[0], *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        return saved_pull_back(ctx, grad)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, _value: None, _geometry: None, *dtensors: Any) -> Any:
        x, weights, y, *tensors = ctx.saved_tensors
        value = put_together(ctx.value, tensors)
        _, held, flat, t = _rows_and_tangent(y, x, weights, value, ctx.geometry)
        moved = torch.zeros_like(y).reshape(-1)
        if dx is not None:
            moved = moved + row_sum(t.share * as_rows(ctx.geometry.view(dx.to(y.dtype)), ctx.geometry.tap_dims))
        if dw is not None:
            moved = moved + row_sum(
                weight_partial(t) * as_rows(ctx.geometry.view(dw.to(y.dtype)), ctx.geometry.tap_dims)
            )
        for partial, change in zip(parameter_partials(flat, held, t), dtensors, strict=True):
            if change is not None:
                moved = moved + partial * change.reshape(-1)
        moved = moved.unsqueeze(-1)
        return t.pull(torch.ones_like(moved), moved).reshape(y.shape), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weights: Any, value: Value, geometry: Geometry, *tensors: Tensor
    ) -> Any:
        def in_front(tensor: Tensor | None, dim: int | None) -> Tensor | None:
            if tensor is None:
                return None
            if dim is None:
                return tensor.unsqueeze(0).expand(info.batch_size, *tensor.shape)
            return tensor.movedim(dim, 0)

        moved = [in_front(tensor, dim) for tensor, dim in zip(tensors, in_dims[4:], strict=True)]
        held = (in_front(x, in_dims[0]), in_front(weights, in_dims[1]), value, geometry, *moved)
        return RobustPool.apply(*held), (0, 0)


class CompiledRobustPool(torch.autograd.Function):
    """The same in the one form that torch.compile traces with and without gradients: it counts the arguments of
    forward to see whether the context is among them, so their number is fixed and what is not needed is None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Any, value: Value, geometry: Geometry, p0: Any, p1: Any, p2: Any, p3: Any
    ) -> Any:
        tensors = [p for p in (p0, p1, p2, p3) if p is not None]
        y, steps = solve_view(x, weights, value, geometry, tensors)
        ctx.value, ctx.geometry = value, geometry
        ctx.mark_non_differentiable(steps)
        ctx.save_for_backward(x, weights, y, *tensors)
        return y, steps

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        return in_slots(*saved_pull_back(ctx, grad), count=8)


# torch asks for the signature at every call; an attribute answers faster than an inspection.
RobustPool.forward.__signature__ = inspect.signature(RobustPool.forward)  # type: ignore[attr-defined]


def _as_one_node(value: Value, view: Tensor) -> bool:
    """Whether a compiled graph calls the solver as one operator: for the rows that Triton or pooling.c has."""
    if not torch.compiler.is_compiling() or export_records():
        return False
    if is_triton(value, view.device, view.dtype):
        return True
    return view.device.type == "cpu" and value.name in native.PENALTIES and not value.row.composed


def pool(x: Tensor, weights: Tensor | None, value: Value, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """(y, steps): y in float32 or float64; weights None or of x's shape; tensor parameters of y's shape."""
    shell, tensors = taken_apart(value)
    if not torch.compiler.is_compiling() and not any(is_tracked(t) for t in (x, weights, *tensors)):
        return solve_view(x, weights, shell, geometry, tensors)
    if torch.compiler.is_compiling():
        refuse_tangents(x, weights, *tensors)
        y, steps = CompiledRobustPool.apply(*in_slots(x, weights, shell, geometry, *tensors, count=8))
    else:
        y, steps = RobustPool.apply(x, weights, shell, geometry, *tensors)
    return y, steps
