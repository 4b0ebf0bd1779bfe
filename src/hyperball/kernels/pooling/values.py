"""Penalties and tensors in the forms in which the kernels of robust pooling pass them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hyperball.radial import TABLE
from hyperball.rows import Value, flatten, rebuild


def native_penalty(value: Value) -> tuple[str, Any, Any]:
    """(name, c, shape); barron of shape 1 is pseudo_huber."""
    c, shape = value.parameters["rho"], value.parameters.get("shape", 1.0)
    plain = value.name == "barron" and not isinstance(shape, Tensor) and shape == 1.0
    return "pseudo_huber" if plain else value.name, c, shape


def taken_apart(value: Value) -> tuple[Value, tuple[Tensor, ...]]:
    """The value without its tensors, and those; a value of numbers is itself."""
    if not any(isinstance(held, Tensor) for held in value.parameters.values()):
        return value, ()
    shell, tensors = flatten(value)
    assert isinstance(shell, Value)
    return shell, tensors


def put_together(shell: Value, tensors: Sequence[Tensor]) -> Value:
    """The value that `taken_apart` took apart, with these tensors."""
    value = rebuild(shell, tensors) if tensors else shell
    assert isinstance(value, Value)
    return value


def as_rows(view: Tensor, tap_dims: int) -> Tensor:
    """[*rows, *taps] as [R, n]."""
    rows = view.flatten(-tap_dims)
    return rows.reshape(-1, rows.shape[-1])


def per_row(value: Value) -> Value:
    """The value with [*rows] parameters as [R, 1]."""
    lifted = {key: item.reshape(-1, 1) for key, item in value.parameters.items() if isinstance(item, Tensor)}
    return value.with_parameters(**lifted)


def named_value(penalty: str, c: Tensor, shape: Tensor) -> Value:
    row = TABLE[penalty]
    return Value(row, {"rho": c, "shape": shape} if "shape" in row.parameters else {"rho": c})


def on_rows(parameter: Any, rows: Tensor) -> Tensor:
    """A number or a tensor in the shape and dtype of the rows."""
    return parameter.expand(rows.shape) if isinstance(parameter, Tensor) else torch.full_like(rows, parameter)


def in_slots(*items: Any, count: int) -> tuple[Any, ...]:
    """The items, and None in the places that remain."""
    if len(items) > count:
        raise NotImplementedError(f"a penalty may have {count - 4} tensor parameters in compiled code")
    return (*items, *(None,) * (count - len(items)))


def refuse_tangents(*tensors: Tensor | None) -> None:
    """A compiled graph holds no forward-mode rule; without this check its tangents would silently be zero."""
    if any(unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None):
        raise NotImplementedError("robust pooling has no forward-mode derivative in compiled code; call it uncompiled")


def is_tracked(tensor: Tensor | None) -> bool:
    """Whether a transform or autograd may ask for a derivative: else a call need not pay for the bookkeeping."""
    if tensor is None:
        return False
    if type(tensor) not in (Tensor, torch.nn.Parameter) or (tensor.requires_grad and torch.is_grad_enabled()):
        return True
    try:
        tensor.data_ptr()  # what torch.func wraps has none
    except RuntimeError:
        return True
    return unpack_dual(tensor).tangent is not None
