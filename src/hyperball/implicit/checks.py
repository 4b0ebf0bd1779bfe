"""Refusals at the door, each naming its argument."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

DENSE_LIMIT = 64  # variables up to which n x n matrices are the default


def positive(name: str, value: float | None) -> None:
    """Refuse a tolerance or length that is not a positive finite number; None means the default."""
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be > 0 and finite, got {value}")


def count(name: str, value: int, least: int = 1) -> None:
    """Refuse a count that is not an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"`{name}` must be >= {least}, got {value}")


def function(name: str, value: Any, optional: bool = False) -> None:
    """Refuse what cannot be called."""
    if not callable(value) and not (optional and value is None):
        raise TypeError(f"`{name}` must be a callable (x, u) -> Tensor, got {type(value).__name__}")


def instance(name: str, value: Any, kinds: tuple[type, ...], public: tuple[type, ...] = ()) -> None:
    """Refuse an object of another kind, listing the kinds that would do: `kinds`, or the public ones among them."""
    if not isinstance(value, kinds):
        shown = value.__name__ + " (a class: call it)" if isinstance(value, type) else type(value).__name__
        names = ", ".join(f"hb.implicit.{kind.__name__}(…)" for kind in public or kinds)
        raise TypeError(f"`{name}` must be one of {names}, got {shown}")


def choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a text that is not in the list."""
    if value not in tuple(allowed):
        options = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"`{name}` must be one of {options}, got {value!r}")


def start(init: Any, look: bool = True) -> None:
    """Refuse an `init` that is not a finite real floating-point tensor; `look` says whether values can be read."""
    if not isinstance(init, Tensor):
        raise TypeError(f"`init` must be a Tensor, got {type(init).__name__}")
    if not init.is_floating_point():
        raise TypeError(f"`init` must be a real floating-point tensor, got {init.dtype}")
    if init.is_meta:
        raise ValueError(
            "`init` must have values, got a tensor on the meta device; move the layer with to_empty(device=…)"
        )
    if look and not init.isfinite().all():
        raise ValueError("`init` must be finite, got NaN or inf")


def tensors(inputs: Iterable[Any], init: Tensor) -> None:
    """Refuse inputs that are not real tensors on the device of `init`."""
    for x in inputs:
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            raise TypeError(f"`inputs` must be a Tensor or a tuple, list or dict of Tensors, got a {kind}")
        if x.is_complex():
            raise TypeError(f"`inputs` must be real, got {x.dtype}; pass real and imaginary parts")
        if x.dim() and x.device != init.device:
            raise ValueError(f"`inputs` must be on the device of `init` ({init.device}), got {x.device}")


def derivatives_left(left: int) -> None:
    """Refuse one derivative more than the adjoint has."""
    if not left:
        raise RuntimeError(
            "`argmin` was differentiated more often than its adjoint allows; pass "
            "adjoint=Implicit(order=2) for second derivatives (order=k for k of them)"
        )
