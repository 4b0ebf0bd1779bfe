"""Robust pooling of ragged segments: rows of different lengths that lie one after the other in x, [N, D].

Segment s is x[offsets[s] : offsets[s + 1]], and each of its D columns is a row. The eager path pads segments to the
next power of two, at least 8, and solves those of one length together; a segment's padding depends on its own length
only, so its result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels.pooling import native
from hyperball.kernels.pooling.choice import choose, compute_dtype, is_triton
from hyperball.kernels.pooling.gradient import Tangent, parameter_partials, tangent, weight_partial
from hyperball.kernels.pooling.rows import pool_rows
from hyperball.kernels.pooling.values import (
    is_tracked,
    named_value,
    native_penalty,
    on_rows,
    put_together,
    refuse_tangents,
    taken_apart,
)
from hyperball.kernels.reading import is_concrete, row_sum
from hyperball.rows import Value

SHORTEST = 8


class Bucket(NamedTuple):
    """Segments that are padded to one length L: which they are [S], their samples [S, L] and which of these exist."""

    segments: Tensor
    samples: Tensor
    present: Tensor

    def rows(self, x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(samples, weights) as [S·D, L]."""
        taken = x[self.samples].movedim(1, 2)  # [S, D, L]
        held = self.present.to(x.dtype).unsqueeze(1).expand_as(taken)
        if weights is not None:
            held = held * weights.to(x.dtype)[self.samples].movedim(1, 2)
        return taken.reshape(-1, taken.shape[-1]), held.reshape(-1, taken.shape[-1])

    def place(self, into: Tensor, rows: Tensor) -> Tensor:
        """`into`, [N, D], with what the rows [S·D, L] hold for each sample added."""
        taps = rows.reshape(len(self.segments), into.shape[1], self.samples.shape[1]).movedim(2, 1)
        return into.index_add(0, self.samples[self.present], taps[self.present])

    def value(self, value: Value) -> Value:
        """The value with [S_all, D] parameters as [S·D, 1]."""
        held = {k: v[self.segments].reshape(-1, 1) for k, v in value.parameters.items() if isinstance(v, Tensor)}
        return value.with_parameters(**held)


def buckets(offsets: Tensor) -> Iterator[Bucket]:
    """The segments that hold a sample, by padded length."""
    lengths = offsets.diff()
    padded = torch.exp2(lengths.clamp(min=SHORTEST).to(torch.float64).log2().ceil()).long()
    padded = torch.where(lengths > 0, padded, 0)
    for length in padded.unique().tolist():
        if length:
            segments = (padded == length).nonzero().squeeze(1)
            ramp = torch.arange(length, device=offsets.device)
            present = ramp < lengths[segments].unsqueeze(1)
            yield Bucket(segments, torch.where(present, offsets[segments].unsqueeze(1) + ramp, 0), present)


def solve_segments(x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value) -> tuple[Tensor, Tensor]:
    """(y, steps), [S, D], of x [N, D], weights None or like x; an empty segment is NaN."""
    segments, columns = offsets.numel() - 1, x.shape[1]
    if x.is_meta:
        dtype = compute_dtype(x.dtype)
        return x.new_empty((segments, columns), dtype=dtype), x.new_empty((segments, columns), dtype=torch.int32)
    kernel = choose(value, x.device, x.dtype)[0]
    if kernel == "triton" and is_concrete(x):
        from hyperball.kernels.triton.pooling import launch as pooling_launch

        return pooling_launch.pool_segments(x, weights, offsets, *native_penalty(value))
    x = x.to(compute_dtype(x.dtype))
    if kernel == "native":
        name, c, shape = native_penalty(value)
        x, lengths = x.contiguous(), offsets.diff().unsqueeze(1).expand(segments, columns).contiguous()
        bases = (offsets[:-1].unsqueeze(1) * columns + torch.arange(columns, device=x.device)).contiguous()
        longest = int(lengths.max()) if lengths.numel() else 0
        taps = x.new_empty(0) if longest == 0 else x[:longest, 0]
        if taps.numel():
            held = None if weights is None else weights.to(x.dtype).contiguous()[:longest, 0]
            return native.pool(taps, held, name, c, shape, tap_dims=1, bases=bases, lengths=lengths)
    y = x.new_full((segments, columns), torch.nan)
    steps = torch.zeros(y.shape, dtype=torch.int32, device=x.device)
    for bucket in buckets(offsets):
        found, taken = pool_rows(*bucket.rows(x, weights), bucket.value(value), fixed=x.dtype != torch.float64)
        y[bucket.segments] = found.reshape(len(bucket.segments), columns)
        steps[bucket.segments] = taken.reshape(len(bucket.segments), columns)
    return y, steps


def _tangents(
    y: Tensor, x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value
) -> Iterator[tuple[Bucket, Tensor, Value, Tangent]]:
    for bucket in buckets(offsets):
        rows, held = bucket.rows(x.to(y.dtype), weights)
        own = bucket.value(value)
        yield bucket, held, own, tangent(rows, held, own, y[bucket.segments].reshape(-1))


def pull_back(
    grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The gradients of x, of the weights and of the tensor parameters, from that of y."""
    grad_x = torch.zeros_like(x, dtype=y.dtype)
    grad_weights = None if weights is None else torch.zeros_like(weights, dtype=y.dtype)
    parameters = [torch.zeros_like(y) for held in value.parameters.values() if isinstance(held, Tensor)]
    for bucket, row_weights, held, t in _tangents(y, x, weights, offsets, value):
        v = grad[bucket.segments].reshape(-1, 1).to(y.dtype)
        grad_x = bucket.place(grad_x, t.pull(v, t.share, row_weights))
        if grad_weights is not None:
            grad_weights = bucket.place(grad_weights, t.pull(v, weight_partial(t)))
        for i, partial in enumerate(parameter_partials(held, row_weights, t)):
            moved = t.pull(v, partial.unsqueeze(-1)).reshape(len(bucket.segments), x.shape[1])
            parameters[i] = parameters[i].index_add(0, bucket.segments, moved)
    return grad_x.to(x.dtype), None if weights is None else grad_weights.to(weights.dtype), parameters  # type: ignore[union-attr]


def launched(
    grad: Tensor, y: Tensor, x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value, of_weights: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]] | None:
    """`pull_back` by one launch; None where Triton does not run such rows."""
    if not is_concrete(x) or not is_triton(value, x.device, x.dtype):
        return None
    from hyperball.kernels.triton.pooling import launch as pooling_launch

    found = pooling_launch.pull_segments(grad, y, x, weights, offsets, *native_penalty(value), of_weights)
    slots = {"alpha": torch.zeros_like(y), "rho": found.c, "shape": found.shape}
    parameters: list[Any] = [slots[key] for key, held in value.parameters.items() if isinstance(held, Tensor)]
    if found.weights is None or weights is None:
        return found.taps, None, parameters
    return found.taps, found.weights.to(weights.dtype), parameters


def residuals(y: Tensor, x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value) -> tuple[Tensor, Tensor]:
    """(|Σ psi|, whether the gradient is damped), [S, D]."""
    gradient, damped = torch.full_like(y, torch.nan), torch.zeros_like(y, dtype=torch.bool)
    for bucket, held, _, t in _tangents(y, x, weights, offsets, value):
        slope = row_sum(t.s * t.z * held).abs().reshape(len(bucket.segments), x.shape[1])
        gradient[bucket.segments] = torch.where(y[bucket.segments].isnan(), torch.nan, slope)
        damped[bucket.segments] = t.damped.reshape(len(bucket.segments), x.shape[1])
    return gradient, damped


class SegmentPool(torch.autograd.Function):
    """y and steps, [S, D], from x [N, D], weights (like x, or None), offsets, the penalty and its parameters [S, D]."""

    @staticmethod
    def forward(x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value, *tensors: Tensor) -> Any:
        return solve_segments(x, weights, offsets, put_together(value, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weights, offsets, ctx.value, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weights, offsets, output[0], *tensors)
        ctx.save_for_forward(x, weights, offsets, output[0], *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        x, weights, offsets, y, *tensors = ctx.saved_tensors
        value = put_together(ctx.value, tensors)
        if not torch.is_grad_enabled() and not any(is_tracked(t) for t in (grad, x, weights, y, *tensors)):
            grads = launched(grad, y, x, weights, offsets, value, bool(ctx.needs_input_grad[1]))
            if grads is not None:
                return grads[0], grads[1], None, None, *grads[2]
        grad_x, grad_weights, parameters = pull_back(grad, y, x, weights, offsets, value)
        return grad_x, grad_weights, None, None, *parameters

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, _offsets: None, _value: None, *dtensors: Any) -> Any:
        x, weights, offsets, y, *tensors = ctx.saved_tensors
        moved = torch.zeros_like(y)
        value = put_together(ctx.value, tensors)
        for bucket, held, own, t in _tangents(y, x, weights, offsets, value):
            change = torch.zeros_like(t.share[:, 0])
            if dx is not None:
                change = change + row_sum(t.share * bucket.rows(dx.to(y.dtype))[0])
            if dw is not None:
                change = change + row_sum(weight_partial(t) * bucket.rows(x.to(y.dtype), dw)[1])
            for partial, step in zip(parameter_partials(own, held, t), dtensors, strict=True):
                if step is not None:
                    change = change + partial * step[bucket.segments].reshape(-1)
            change = t.pull(torch.ones_like(change).unsqueeze(-1), change.unsqueeze(-1))
            moved = moved.index_add(0, bucket.segments, change.reshape(len(bucket.segments), x.shape[1]))
        return moved, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weights: Any, offsets: Tensor, value: Value, *tensors: Tensor
    ) -> Any:
        if in_dims[2] is not None:
            raise ValueError("`offsets` cannot be a batch under vmap: every element must have the same segments")

        def widen(tensor: Tensor | None, dim: int | None) -> Tensor | None:  # [N, D] and a batch as [N, B·D]
            if tensor is None:
                return None
            if dim is None:
                return tensor.unsqueeze(1).expand(-1, info.batch_size, -1).flatten(1)
            return tensor.movedim(dim, 1).flatten(1)

        wide = [widen(tensor, dim) for tensor, dim in zip(tensors, in_dims[4:], strict=True)]
        y, steps = SegmentPool.apply(widen(x, in_dims[0]), widen(weights, in_dims[1]), offsets, value, *wide)
        unpack = (info.batch_size, -1)
        return (y.unflatten(1, unpack), steps.unflatten(1, unpack)), (1, 1)


@torch.library.custom_op("hyperball::segment_robust_pool", mutates_args=())
def segment_op(
    x: Tensor, weights: Tensor | None, offsets: Tensor, c: Tensor, shape: Tensor, penalty: str
) -> tuple[Tensor, Tensor]:
    """`solve_segments` as one opaque node of a compiled graph: how many segments have which length is data."""
    return solve_segments(x.contiguous(), weights, offsets, named_value(penalty, c, shape))


@segment_op.register_fake
def _(
    x: Tensor, weights: Tensor | None, offsets: Tensor, c: Tensor, shape: Tensor, penalty: str
) -> tuple[Tensor, Tensor]:
    size = (offsets.shape[0] - 1, x.shape[1])
    return x.new_empty(size, dtype=compute_dtype(x.dtype)), x.new_empty(size, dtype=torch.int32)


@torch.library.custom_op("hyperball::segment_robust_pool_backward", mutates_args=())
def segment_backward_op(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    c: Tensor,
    shape: Tensor,
    penalty: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the weights (empty without any), c and shape, all contiguous."""
    held = None if weights is None else weights.contiguous()
    value = named_value(penalty, c, shape)
    given = (grad, y.contiguous(), x.contiguous(), held, offsets, value)
    grad_x, grad_w, parameters = launched(*given, weights is not None) or pull_back(*given)
    grad_w = x.new_empty(0) if grad_w is None else grad_w
    return grad_x, grad_w, parameters[0], parameters[1] if len(parameters) > 1 else y.new_zeros(y.shape)


@segment_backward_op.register_fake
def _(
    grad: Tensor,
    y: Tensor,
    x: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    c: Tensor,
    shape: Tensor,
    penalty: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_w = x.new_empty(0) if weights is None else weights.new_empty(weights.shape)
    return x.new_empty(x.shape), grad_w, y.new_empty(y.shape), y.new_empty(y.shape)


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weights, offsets, c, shape, ctx.penalty = inputs
    ctx.save_for_backward(output[0], x, weights, offsets, c, shape)


def _op_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    grad_x, grad_w, grad_c, grad_shape = segment_backward_op(grad, *saved, ctx.penalty)
    return grad_x, None if saved[2] is None else grad_w, None, grad_c, grad_shape, None


segment_op.register_autograd(_op_backward, setup_context=_op_setup)


def pool_segments(x: Tensor, weights: Tensor | None, offsets: Tensor, value: Value) -> tuple[Tensor, Tensor]:
    """(y, steps), [S, D]; y in float32 or float64; weights None or like x; tensor parameters are [S, D]."""
    if not torch.compiler.is_compiling():
        shell, tensors = taken_apart(value)
        y, steps = SegmentPool.apply(x, weights, offsets, shell, *tensors)
        return y, steps
    refuse_tangents(x, weights, *taken_apart(value)[1])
    if value.row.composed:
        raise NotImplementedError(
            f"segments cannot be pooled in compiled code with {value.name}, which is user-defined"
        )
    rows = x.new_empty((offsets.shape[0] - 1, x.shape[1]), dtype=compute_dtype(x.dtype))
    c, shape = on_rows(value.parameters["rho"], rows), on_rows(value.parameters.get("shape", 1.0), rows)
    held = (x.to(rows.dtype), weights, offsets, c.contiguous(), shape.contiguous(), value.name)
    found: tuple[Tensor, Tensor] = segment_op(*held)
    return found
