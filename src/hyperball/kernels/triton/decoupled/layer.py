"""From an operator of `hyperball.kernels.decoupled` to the Triton operators: codes, parameters, relative radii."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.kernels import dispatch
from hyperball.kernels.decoupled.relative import Relative, unresolved
from hyperball.kernels.norms import filter_norms
from hyperball.kernels.triton.decoupled import ops
from hyperball.kernels.triton.decoupled.block import DecoupledBlock, decoupled_block, track_block
from hyperball.kernels.triton.decoupled.code import Code, coded
from hyperball.kernels.window import Window
from hyperball.rows import Value


class Block(NamedTuple):
    """What follows a convolution in a block; `batch`: BatchNorm uses the batch's statistics, `track`: keeps them."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    counted: Tensor | None
    eps: float
    momentum: float | None
    batch: bool
    track: bool
    activation: str
    leak: Tensor | None
    residual: Tensor | None
    carry: bool


BEND = {"sigmoid": "k", "power": "b"}
NO_MORE = (None,) * 6  # parameters behind the radius


def number(held: Any) -> float | None:
    return None if held is None or isinstance(held, Tensor) else float(held)


def tensor(held: Any, like: Tensor) -> Tensor | None:
    """A parameter that is a tensor, dense and on the weight's device, where a 0-d one need not have been."""
    if not isinstance(held, Tensor):
        return None
    return held if held.is_contiguous() and held.device == like.device else held.to(like.device).contiguous()


def packed(slopes: Any, like: Tensor) -> Tensor | None:
    """Slopes, numbers or 0-d tensors, as one float32 vector."""
    if slopes is None:
        return None
    wide: dict[str, Any] = {"device": like.device, "dtype": torch.float32}
    return torch.stack([s.to(**wide) if isinstance(s, Tensor) else torch.full((), s, **wide) for s in slopes])


def described(magnitude: Value, angular: Value, relative: Relative | None, like: Tensor) -> tuple[Code, list[Any]]:
    """The code of an operator and its nine parameters (the weighting's two are left open)."""
    h: dict[str, Any] = dict(magnitude.parameters)
    g: dict[str, Any] = dict(angular.parameters)
    bend = g.get(BEND.get(angular.name, ""))
    if relative is not None:
        h["rho"] = relative.ratio
    alpha, beta, rho, shape = (h.get(key) for key in ("alpha", "beta", "rho", "shape"))
    entries = (
        magnitude.name, angular.name, number(alpha), number(beta), number(rho), number(shape), number(bend),
        float(h.get("eps") or 0.0), float(g.get("eps") or 0.0), 0.0 if relative is None else relative.eps,
        "none" if relative is None else "batch" if relative.training else "running",
    )  # fmt: skip
    code = Code(*entries) if torch.compiler.is_compiling() else coded(*entries)
    slots = [tensor(held, like) for held in (alpha, beta, rho, shape)]
    return code, [*slots, tensor(bend, like), None, None, packed(h.get("slopes"), like), packed(g.get("slopes"), like)]


def plain_inputs(magnitude: Any, angular: Value, like: Tensor) -> tuple[Code, list[Any], Relative]:
    """Code, parameters and relative radius of an operator that has no other tensor; its numbers are read once."""
    training, eps = magnitude.training, magnitude.eps
    ratio = tensor(magnitude.ratio, like)
    relative = Relative(ratio, magnitude.running_length, magnitude.batches, training, eps, magnitude._track)  # type: ignore[arg-type]
    return plain_code(magnitude.value, angular, eps, training), [None, None, ratio, *NO_MORE], relative


@lru_cache(maxsize=1024)
def plain_code(
    magnitude: Value, angular: Value, eps: float, training: bool, relative: bool = True, learned: bool = True
) -> Code:
    """The code of values without tensors, but for the radius where it is `learned`; in units where it is `relative`."""
    held: Any = torch.empty(0)
    ratio: Any = held if learned else magnitude.parameters.get("rho")
    radius = Relative(ratio, held, held, training, eps, lambda unit, count: None) if relative else None
    return described(magnitude, angular, radius, held)[0]


def operator_inputs(operator: Any, weight: Tensor) -> tuple[Code, list[Any], Relative | None]:
    """Code, parameters and relative radius of an operator; with a weighting, m = ‖w‖ as factor and stretch."""
    relative: Relative | None
    if operator.plain and not torch.compiler.is_compiling():
        code, parameters, relative = plain_inputs(operator.magnitude, operator.angular, weight)
    else:
        magnitude, relative = unresolved(operator.magnitude)
        code, parameters = described(magnitude, operator.angular, relative, weight)
    if operator.weighting in ("linear", "joint"):
        m = filter_lengths(weight)
        parameters[5] = m
        parameters[6] = m if operator.weighting == "joint" else None
    return code, parameters, relative


def filter_lengths(weight: Tensor) -> Tensor:
    """m = ‖w‖ of every filter, [channels]; by the eager norm where a compiler or a dispatch mode looks at operators."""
    if weight.device.type not in dispatch.DEVICES or not ops.runs_directly(weight):
        return filter_norms(weight)
    from hyperball.kernels.triton.decoupled.weighting import FilterLengths

    made: Tensor = FilterLengths.apply(weight)
    return made


def follow(relative: Relative | None, unit: Tensor, count: int) -> None:
    """Let a relative radius follow this batch's mean length."""
    if relative is None or not relative.training or count == 0:
        return
    if relative.distributed:
        relative.track(unit, count)
    else:
        ops.track(relative.running, relative.batches, unit)


def dense_input(x: Tensor) -> Tensor:
    """x with its channels last, but inside torch.func, which cannot ask for it: there the operator does."""
    return x if torch.compiler.is_compiling() and dispatch.transforms() else ops.dense(x)


def mark_changed(*tensors: Tensor | None) -> None:
    """Tell autograd of tensors that a kernel writes in place."""
    torch.autograd.graph.increment_version([t for t in tensors if t is not None and not t.is_inference()])


def call(x: Tensor, weight: Tensor, operator: Any, window: tuple[Any, ...]) -> Tensor:
    code, parameters, relative = operator_inputs(operator, weight)
    x = dense_input(x)
    moving = relative if relative is not None and relative.training else None
    if ops.runs_directly(x, weight, *parameters) and not (moving and moving.distributed):
        batches = None if moving is None else moving.batches
        running = None if relative is None else relative.running
        if moving is not None:
            mark_changed(running, batches)
        plan = ops.plan_of(x, weight, parameters, code.written, window)
        given = [held for held in parameters if held is not None]
        made: Tensor = ops.DecoupledConv.apply(plan, (running, batches), x, weight, *given)
        return made
    running = relative.running if relative is not None and moving is None else None
    lists = [[*each] for each in window[:3]]
    outputs = ops.decoupled_conv(x, weight, *parameters, running, code.text(), *lists, window[3])
    follow(relative, outputs[6].detach()[0], outputs[2].numel())
    return outputs[0]


def convolve(x: Tensor, weight: Tensor, window: Window, operator: Any) -> Tensor:
    """The decoupled convolution of x [batch, channels, *spatial]; a 1-d one runs as a 2-d one of height 1."""
    padding = tuple([before for before, _ in window.padding])
    sizes = (window.stride, padding, window.dilation)
    if len(window.kernel) > 1:
        return call(x, weight, operator, (*sizes, window.groups))
    stride, pad, dilation = ((fill, *given) for fill, given in zip((1, 0, 1), sizes, strict=True))
    return call(x.unsqueeze(2), weight.unsqueeze(2), operator, (stride, pad, dilation, window.groups)).squeeze(2)


def linear(rows: Tensor, weight: Tensor, operator: Any) -> Tensor:
    """The decoupled linear map of rows [rows, features]."""
    return call(rows, weight, operator, ((), (), (), 1))


def block(
    x: Tensor, lengths: Tensor | None, weight: Tensor, window: Window, operator: Any, after: Block
) -> tuple[Tensor, Tensor]:
    """act(BatchNorm(f) + residual) and, where `after.carry`, the lengths of its rows, [batch, 1, *spatial]."""
    code, parameters, relative = operator_inputs(operator, weight)
    running = None if relative is None or relative.training else relative.running
    padding = [before for before, _ in window.padding]
    kept = (None, None) if after.batch else (after.running_mean, after.running_var)
    carried = None if lengths is None else lengths.flatten().to(torch.float32)
    text = code.text() if torch.compiler.is_compiling() else code.written
    inputs = (
        dense_input(x), weight, *parameters, carried, after.weight, after.bias, after.leak, after.residual, running,
        *kept, text, after.activation, after.eps, after.carry, [*window.stride], padding, [*window.dilation],
        window.groups,
    )  # fmt: skip

    def move(scalars: Tensor, stats: Tensor, count: int, direct: bool = True) -> None:
        _follow_block(relative, after, scalars, stats, count, count // window.groups, direct)

    if ops.runs_directly(*inputs[:19]):
        plan = ops.plan_of(inputs[0], weight, parameters, text, ops.frozen(*inputs[-4:]))
        out, r = DecoupledBlock.apply(plan, move, *inputs)
    else:
        made = decoupled_block(*inputs)
        out, r = made[0], made[1]
        move(made[7].detach(), made[8].detach(), made[3].numel(), False)
    return out, r.view(out.shape[0], 1, *out.shape[2:]) if after.carry else r


def _follow_block(
    relative: Relative | None, after: Block, scalars: Tensor, stats: Tensor, count: int, rows: int, direct: bool
) -> None:
    """Let the running means of a block follow a batch: by one launch where nobody traces, else by an operator."""
    moving = relative is not None and relative.training
    if moving and relative is not None and relative.distributed:
        relative.track(scalars[0], count)
        moving = False
    length = (relative.running, relative.batches) if moving and relative else (None, None)
    norm = (after.running_mean, after.running_var, after.counted) if after.track else (None, None, None)
    if not moving and not after.track:
        return
    share = (-1.0 if after.momentum is None else after.momentum, rows / max(rows - 1, 1))
    if not direct:
        track_block(*length, scalars[0] if moving else None, *norm, stats if after.track else None, *share)
        return
    from hyperball.kernels.triton.decoupled import launch

    mark_changed(*length, *norm)
    pair: Any = (*length, scalars) if moving else None
    triple: Any = (*norm, stats) if after.track else None
    launch.track(pair, triple, *share)
