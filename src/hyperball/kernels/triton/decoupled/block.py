"""torch.library operators of a fused block: decoupled convolution, BatchNorm, activation, and a residual before it.

The block takes the lengths r = ‖x‖ of its input's rows and returns those of its output, so that a chain of blocks
never reads an activation for its norm alone. Lengths are outputs like any other: the gradient that reaches an
activation through the next block's norms comes back as theirs, and x' + x'·dr/r is formed where x' is read anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.triton.decoupled import twin
from hyperball.kernels.triton.decoupled.code import read
from hyperball.kernels.triton.decoupled.ops import (
    by_slices,
    convolution_backward,
    dense,
    fake_gradients,
    fake_response,
    frozen,
    in_strides,
    on_its_device,
    plan_of,
    present,
    respond,
)
from hyperball.kernels.triton.decoupled.slots import Parameters, parameter_gradients, picked

NAMES = 27  # inputs of the operator


@on_its_device
def forward(x: Tensor, plan: Any, joint: bool, *rest: Any) -> tuple[Tensor, ...]:
    """x' and its rows' lengths; then y, n, filters, m, p, (unit, lift) and BatchNorm's stats; inputs as the operator's.

    Running statistics, where given, are used in place of the batch's.
    """
    from hyperball.kernels.triton.decoupled import launch, passes

    weight, parameters = rest[0], rest[1:10]
    lengths, gamma, shift, leak, residual, running, *kept = rest[10:18]
    activation, norm_eps, carry = rest[19:22]
    groups = rest[25]
    made = respond(x, lengths, weight, parameters, running, None, plan, joint)
    y, n, _, _, p, scalars = made
    o = passes.Operands(y, p, passes.pointers(y, n, p, scalars, parameters), plan.rule)
    stats = passes.batch_statistics(o, gamma, shift, norm_eps, None if kept[0] is None else (kept[0], kept[1]))
    held = None if residual is None else dense(residual)
    out, r = passes.forward(o, passes.Block(stats, activation, leak, held, carry and groups == 1))
    if carry and groups > 1:
        r = launch.lengths(out, o.rule.rows, 1)
    return out, r, *made, stats


@torch.library.custom_op("hyperball::decoupled_block", mutates_args=())
def decoupled_block(
    x: Tensor, weight: Tensor, alpha: Tensor | None, beta: Tensor | None, rho: Tensor | None, shape: Tensor | None,
    bend: Tensor | None, factor: Tensor | None, stretch: Tensor | None, slopes: Tensor | None, turns: Tensor | None,
    lengths: Tensor | None, gamma: Tensor | None, shift: Tensor | None, leak: Tensor | None, residual: Tensor | None,
    running: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None, code: str, activation: str,
    norm_eps: float, carry: bool, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x' and its rows' lengths; then y, n, filters, m, p, (unit, lift) and BatchNorm's stats for the backward."""
    x, parameters = dense(x), (alpha, beta, rho, shape, bend, factor, stretch, slopes, turns)
    plan = plan_of(x, weight, parameters, code, frozen(stride, padding, dilation, groups))
    made: Any = forward(
        x, plan, False, weight, *parameters, lengths, gamma, shift, leak, residual, running, running_mean,
        running_var, code, activation, norm_eps, carry, stride, padding, dilation, groups,
    )  # fmt: skip
    return made


@decoupled_block.register_fake
def _(
    x: Tensor, weight: Tensor, alpha: Any, beta: Any, rho: Any, shape: Any, bend: Any, factor: Any, stretch: Any,
    slopes: Any, turns: Any, lengths: Any, gamma: Any, shift: Any, leak: Any, residual: Any, running: Any,
    running_mean: Any, running_var: Any, code: str, activation: str, norm_eps: float, carry: bool, strides: Any,
    padding: Any, dilation: Any, groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = fake_response(x, weight, strides, padding, dilation, groups)
    y, n, m = made[0], made[1], made[3]
    r = m.new_empty(n.numel() // groups if carry else 1)
    return torch.empty_like(y), r, *made, m.new_empty(5, m.shape[0])


@on_its_device
def backward(
    v: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None],
    lengths: Tensor | None, leak: Tensor | None, held: Tensor | None, source: str, r: Tensor, y: Tensor, n: Tensor,
    filters: Tensor, m: Tensor, p: Tensor, scalars: Tensor, stats: Tensor, batch: bool, write: bool, activation: str,
    plan: Any, gradients: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, dw, the parameters' gradients, dlengths, BatchNorm's [dγ, dβ, dslope], and the residual's gradient."""
    from hyperball.kernels.triton.decoupled import launch, passes

    x, y = dense(x), dense(y)  # hooks may have kept them in another layout
    weight, filters = in_strides(weight, plan.strides), in_strides(filters, plan.filters)
    dr = None if dr is None else dr.contiguous()
    o = passes.Operands(y, p, passes.pointers(y, n, p, scalars, parameters), plan.rule)
    i = passes.Incoming(v, source, None if held is None else dense(held), r, dr, activation, leak)
    inner, before = passes.reduce(o, i, stats, batch, write)
    if write:
        i = passes.Incoming(before)
    if lengths is None:
        t, parts, pulls, *along = plan.cut(gradients.with_along)
    else:
        along = [launch.floats(plan.device, plan.geometry.rows * plan.groups)]
        t, parts, pulls = plan.cut(gradients.sizes)
    dy = torch.empty_like(y)
    passes.backward(o, i, stats, inner, gradients.wanted, (dy, t, parts))
    kept = (weight, parameters[2], filters, n, m, scalars)
    grads = convolution_backward(x, lengths, kept, (dy, t, parts, pulls, *along), plan, gradients)
    dlengths = along[0] if lengths is not None and gradients.needed[0] else None
    return *grads, dlengths, inner, before if write else None


@torch.library.custom_op("hyperball::decoupled_block_backward", mutates_args=())
def decoupled_block_backward(
    v: Tensor, dr: Tensor | None, x: Tensor, weight: Tensor, parameters: list[Tensor | None], lengths: Tensor | None,
    leak: Tensor | None, held: Tensor | None, source: str, r: Tensor, y: Tensor, n: Tensor, filters: Tensor,
    m: Tensor, p: Tensor, scalars: Tensor, stats: Tensor, needed: list[bool], batch: bool, write: bool,
    code: str, activation: str, stride: list[int], padding: list[int], dilation: list[int], groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw, the parameters' gradients, dlengths, BatchNorm's [dγ, dβ, dslope], and the residual's gradient."""
    v, x = dense(v), dense(x)
    plan = plan_of(x, weight, parameters, code, frozen(stride, padding, dilation, groups))
    made = backward(
        v, dr, x, weight, parameters, lengths, leak, held, source, r, y, n, filters, m, p, scalars, stats, batch,
        write, activation, plan, plan.for_needs(tuple(needed), True),
    )  # fmt: skip
    return present(m, *made)


@decoupled_block_backward.register_fake
def _(
    v: Tensor, dr: Any, x: Tensor, weight: Tensor, parameters: Any, lengths: Any, leak: Any, held: Any, source: str,
    r: Tensor, y: Tensor, n: Tensor, filters: Tensor, m: Tensor, p: Tensor, scalars: Tensor, stats: Tensor,
    needed: list[bool], batch: bool, write: bool, code: str, activation: str, stride: Any, padding: Any,
    dilation: Any, groups: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = fake_gradients(x, weight, parameters, m, needed, read(code))
    dlengths = m.new_empty(lengths.shape if lengths is not None and needed[0] else (0,))
    before = torch.empty_like(y) if write else m.new_empty(0)
    return *grads, dlengths, m.new_empty(5, m.shape[0]), before


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    residual, activation = inputs[15], inputs[20]
    ctx.settings = (inputs[19], activation, *inputs[21:])
    ctx.batch = inputs[17] is None
    ctx.source = "rebuild" if residual is None else ("residual" if activation == "prelu" else "output")
    held = {"rebuild": None, "residual": residual, "output": output[0]}[ctx.source]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:16], *inputs[17:19], held, *output[1:])


def _setup_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _setup(ctx, inputs, output)
    ctx.mark_non_differentiable(*output[2:], *(() if inputs[22] else (output[1],)))


def _backward(ctx: Any, v: Tensor | None, dr: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The gradients of the operator's inputs; a second derivative is the eager twin's."""
    if v is None and dr is None:
        return (None,) * NAMES
    saved, plan = ctx.saved_tensors, getattr(ctx, "plan", None)
    inputs, kept, held, made = saved[:16], saved[16:18], saved[18], saved[19:]
    v = torch.zeros_like(made[1]) if v is None else v
    x, weight, parameters = inputs[0], inputs[1], list(inputs[2:11])
    lengths, gamma, shift, leak, residual = inputs[11:]
    code, activation, _, _, *window = ctx.settings
    needs = ctx.needs_input_grad if plan is None else ctx.needs_input_grad[2:]
    if torch.is_grad_enabled():
        unit = made[6][0] if read(code).unit == "running" else None
        found = twin.block_gradients(v, dr, (*inputs, unit, *kept), list(needs[:16]), *ctx.settings)
        return (*found, *(None,) * (NAMES - 16))
    needed = (needs[0] or needs[11], *needs[1:11])
    given = (x, weight, parameters, lengths, leak, held, ctx.source, *made)
    write = residual is not None
    if plan is None:
        grads = decoupled_block_backward(v, dr, *given, [*needed], ctx.batch, write, code, activation, *window)
        small = parameter_gradients(grads[2], parameters, needed, read(code))
    else:
        gradients = plan.for_needs(needed, True)
        grads = backward(dense(v), dr, *given, ctx.batch, write, activation, plan, gradients)
        small = picked(grads[2], gradients.picks)
    dx, dw, _, dlengths, inner, before = grads
    return (
        dx if needs[0] else None, dw if needs[1] else None, *small, dlengths if needs[11] else None,
        *after(inner, gamma, shift, leak, needs[12:15]), before if needs[15] else None, *(None,) * (NAMES - 16),
    )  # fmt: skip


def after(inner: Tensor, gamma: Any, shift: Any, leak: Any, needs: Any) -> Parameters:
    """The gradients of BatchNorm's weight and bias and of PReLU's slope."""
    grads: Parameters = []
    for row, (held, need) in enumerate(zip((gamma, shift, leak), needs, strict=True)):
        if not need:
            grads.append(None)
        else:
            whole = inner[row] if held.numel() == inner.shape[1] else inner[row].sum(0, keepdim=True)
            grads.append(whole.to(held.dtype))
    return grads


decoupled_block.register_autograd(_backward, setup_context=_setup_operator)


decoupled_block.register_vmap(by_slices(decoupled_block))
decoupled_block_backward.register_vmap(by_slices(decoupled_block_backward))


class DecoupledBlock(torch.autograd.Function):
    """x' and its rows' lengths, for eager code: the operator's inputs, and what lets running means follow."""

    @staticmethod
    def forward(ctx: Any, plan: Any, follow: Any, *given: Any) -> tuple[Tensor, Tensor]:
        x, *rest = given
        made = forward(x, plan, True, *rest)
        ctx.plan = plan
        _setup(ctx, given, made)
        if not given[22]:
            ctx.mark_non_differentiable(made[1])
        follow(made[7], made[8], plan.norms)
        return made[0], made[1]

    @staticmethod
    def backward(ctx: Any, v: Tensor | None, dr: Tensor | None) -> tuple[Any, ...]:
        return None, None, *_backward(ctx, v, dr)


@torch.library.custom_op(
    "hyperball::track_block", mutates_args=("running", "batches", "running_mean", "running_var", "counted")
)
def track_block(
    running: Tensor | None, batches: Tensor | None, unit: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, counted: Tensor | None, stats: Tensor | None, momentum: float, unbiased: float,
) -> None:  # fmt: skip
    """Running means of a block after a batch: of its radius's unit, and BatchNorm's (momentum < 0: plain means)."""
    from hyperball.kernels.triton.decoupled import launch

    length = None if running is None else (running, batches, unit)
    norm = None if running_mean is None else (running_mean, running_var, counted, stats)
    if length or norm:
        launch.track(length, norm, momentum, unbiased)  # type: ignore[arg-type]


@track_block.register_fake
def _(
    running: Any, batches: Any, unit: Any, running_mean: Any, running_var: Any, counted: Any, stats: Any,
    momentum: float, unbiased: float,
) -> None:  # fmt: skip
    return None
