"""The eager twins of the Triton operators: the truth they are tested against, and their second derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels.norms import mean_length, norm
from hyperball.kernels.replay import replayed
from hyperball.kernels.triton.decoupled.code import Code, read
from hyperball.kernels.window import Window
from hyperball.rows import AnyValue, Value

FLOOR = 1e-4


def values(code: Code, parameters: Sequence[Tensor | None], unit: Tensor | None) -> tuple[Value, Value]:
    """The radial and the angular value that a code and its parameters stand for."""
    alpha, beta, rho, shape, bend, _, _, slopes, turns = parameters
    if code.unit != "none":
        assert unit is not None
        ratio: Any = code.rho if rho is None else rho.to(unit.dtype).square()
        rho = (ratio + FLOOR) * unit
    held = {"alpha": alpha, "beta": beta, "rho": rho, "shape": shape}
    numbers = {"alpha": code.alpha, "beta": code.beta, "rho": code.rho, "shape": code.shape, "eps": code.eps}
    row: Any = radial_table.TABLE[code.radial]
    h: dict[str, Any] = {key: numbers.get(key) if held.get(key) is None else held[key] for key in row.parameters}
    if slopes is not None:
        h["slopes"] = tuple(slopes.unbind(0))
    turned: Any = angular_table.TABLE[code.angular]
    bent = code.bend if bend is None else bend
    g: dict[str, Any] = {key: code.angular_eps if key == "eps" else bent for key in turned.parameters}
    if turns is not None:
        g["slopes"] = tuple(turns.unbind(0))
    return Value(row, h), Value(turned, g)


def decoupled_conv(
    x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None], running: Tensor | None, code: str,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """f, by the eager kernels."""
    from hyperball.kernels.decoupled import operation as eager

    rows = read(code)
    angular = values(rows, parameters, torch.ones((), device=x.device))[1]

    def magnitude(norms: Tensor | None) -> AnyValue:
        unit = None
        if rows.unit == "batch":
            assert norms is not None
            unit = mean_length(norms, rows.unit_eps)
        return values(rows, parameters, running if unit is None else unit)[0]

    def filters_for(value: AnyValue) -> eager.Filters:
        plain = eager.Operator(lambda _: value, angular_table.parse("cosine"), "none", True)
        made = eager.prepare(weight, plain, value)
        return eager.Filters(made.weight, made.length, parameters[5], parameters[6])

    operator = eager.Operator(magnitude, angular, "none", True)
    if x.dim() == 2:
        return eager.linear_with(x, None, operator, filters_for)
    window = Window(tuple(weight.shape[2:]), tuple(stride), tuple((w, w) for w in padding), tuple(dilation), groups)
    return eager.convolve_with(x, None, window, operator, filters_for)


def gradients(
    v: Tensor, x: Tensor, weight: Tensor, parameters: Sequence[Tensor | None], running: Tensor | None,
    needed: Sequence[bool], *settings: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of the eager twin, differentiable themselves."""

    def function(x: Tensor, weight: Tensor, *parameters: Tensor | None) -> Tensor:
        return decoupled_conv(x, weight, parameters, running, *settings)

    return tuple(replayed(function, [x, weight, *parameters], needed, v))


def decoupled_block(
    inputs: Sequence[Tensor | None], code: str, activation: str, norm_eps: float, carry: bool, *window: Any
) -> tuple[Tensor, Tensor]:
    """act(BatchNorm(f) + residual) and its rows' lengths; `inputs` are the operator's tensors, in its order."""
    x, weight, parameters = inputs[0], inputs[1], inputs[2:11]
    _, gamma, shift, leak, residual, running, mean, var = inputs[11:]
    assert x is not None
    assert weight is not None
    f = decoupled_conv(x, weight, parameters, running, code, *window)
    z = torch.nn.functional.batch_norm(f, mean, var, gamma, shift, mean is None, 0.0, norm_eps)
    z = z if residual is None else z + residual
    if activation == "relu":
        z = torch.relu(z)
    elif activation == "prelu":
        assert leak is not None
        z = torch.nn.functional.prelu(z, leak.to(z.dtype))
    return z, norm(z, (1,)).flatten() if carry else z.new_zeros(1)


def block_gradients(
    v: Tensor, dr: Tensor | None, inputs: Sequence[Tensor | None], needed: Sequence[bool], *settings: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of the eager block, differentiable themselves; those of given lengths come with x, theirs are 0."""

    def function(*held: Tensor | None) -> tuple[Tensor, ...]:
        return decoupled_block(held, *settings)[: len(starts)]

    starts = (v,) if dr is None else (v, dr)
    return tuple(replayed(function, inputs, needed, starts))
