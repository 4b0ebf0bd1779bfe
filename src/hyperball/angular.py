"""Angular functions: g as a function of c = cos(theta), never of the angle itself.

Equation numbers are those of Liu et al., Decoupled Networks, CVPR 2018, where theta = acos(c).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperball.rows import Row, Scalar, Sum, Table, Value

TINY = 1e-30


@dataclass(frozen=True, eq=False, repr=False)
class Angular(Row):
    """A row of the angular table: g(c), its derivative slope(c, g), given g, and dg/dparameter."""

    g: Callable[..., Tensor] | None = None
    slope: Callable[..., Tensor] | None = None
    partials: Mapping[str, Callable[..., Tensor]] | None = None
    smooth: bool = True

    @property
    def composed(self) -> bool:
        return self.slope is None

    def __reduce__(self) -> tuple[Any, ...]:
        return _row, (self.name,)


TABLE = Table("angular")


def _row(name: str) -> Row:
    """A row by name: how a pickled row finds itself again."""
    return TABLE[name]


def arcsine(c: Tensor) -> Tensor:
    """asin(c), with the rounding of c beyond ±1 taken off."""
    return torch.asin(c.clamp(-1.0, 1.0))


def arcsine_slope(c: Tensor, eps: float) -> Tensor:
    """1/sqrt(1 - c²), held at 1/sqrt(eps) where 1 - c² < eps."""
    return ((1.0 - c) * (1.0 + c)).clamp(min=eps).rsqrt()


def linear_g(c: Tensor, eps: float) -> Tensor:
    """g = (2/π)·asin(c), which is 1 - 2θ/π (11)."""
    return arcsine(c) * (2.0 / math.pi)


def linear_slope(c: Tensor, g: Tensor, eps: float) -> Tensor:
    """g' = (2/π)/sqrt(1 - c²)."""
    return arcsine_slope(c, eps) * (2.0 / math.pi)


def _tanh(k: Scalar) -> Scalar:
    return torch.tanh(k) if isinstance(k, Tensor) else math.tanh(k)


def sigmoid_g(c: Tensor, k: Scalar, eps: float) -> Tensor:
    """g = tanh(u)/tanh(π/4k), u = asin(c)/2k (13, in a form that holds for small k)."""
    return torch.tanh(arcsine(c) / (2.0 * k)) / _tanh(math.pi / (4.0 * k))


def sigmoid_slope(c: Tensor, g: Tensor, k: Scalar, eps: float) -> Tensor:
    """g' = (1 - tanh²(u))/(2k·D·sqrt(1 - c²)), where D = tanh(π/4k) and tanh(u) = D·g."""
    bound = _tanh(math.pi / (4.0 * k))
    return (1.0 - (g * bound).square()) * arcsine_slope(c, eps) * (1.0 / (2.0 * k * bound))


def sigmoid_k_partial(c: Tensor, k: Scalar, eps: float) -> Tensor:
    """dg/dk = (tanh(u)·(1 - D²)·κ/D - u·(1 - tanh²(u)))/(k·D), κ = π/4k, D = tanh(κ)."""
    u, kappa = arcsine(c) / (2.0 * k), math.pi / (4.0 * k)
    bound, t = _tanh(kappa), torch.tanh(u)
    return (t * ((1.0 - bound * bound) * kappa / bound) - u * (1.0 - t.square())) / (k * bound)


def square_cosine_g(c: Tensor) -> Tensor:
    """g = c·|c| (14)."""
    return c * c.abs()


def power_g(c: Tensor, b: Scalar) -> Tensor:
    """g = sign(c)·|c|^b."""
    return c * c.abs().clamp(min=TINY) ** (b - 1.0)


def power_slope(c: Tensor, g: Tensor, b: Scalar) -> Tensor:
    """g' = b·|c|^(b-1)."""
    return b * c.abs().clamp(min=TINY) ** (b - 1.0)


def power_b_partial(c: Tensor, b: Scalar) -> Tensor:
    """dg/db = sign(c)·|c|^b·log|c|, which is 0 at 0."""
    return power_g(c, b) * c.abs().clamp(min=TINY).log()


def _piece(c: Tensor | float, j: int, pieces: int) -> Any:
    """The part of [-1, c] that lies in piece j of [-1, 1]; rounding beyond ±1 belongs to the outer pieces."""
    width = 2.0 / pieces
    low = -math.inf if j == 0 else -1.0 + j * width
    high = math.inf if j == pieces - 1 else -1.0 + (j + 1) * width
    return c.clamp(low, high) if isinstance(c, Tensor) else min(max(c, low), high)


def piecewise_g(c: Tensor, slopes: tuple[Scalar, ...]) -> Tensor:
    """g = ∫_0^c slope: monotone, piecewise linear on equal pieces of [-1, 1], g(0) = 0."""
    total = torch.zeros_like(c)
    for j, slope in enumerate(slopes):
        total = total + slope * piecewise_slope_partial(c, j, slopes)
    return total


def piecewise_slope(c: Tensor, g: Tensor, slopes: tuple[Scalar, ...]) -> Tensor:
    """g' = the slope of the piece that holds c."""
    one = torch.ones_like(c)
    slope = one * slopes[0]
    for j in range(1, len(slopes)):
        slope = torch.where(c > -1.0 + j * 2.0 / len(slopes), one * slopes[j], slope)
    return slope


def piecewise_slope_partial(c: Tensor, index: int, slopes: tuple[Scalar, ...]) -> Tensor:
    """dg/dslope_j = the part of [0, c] in piece j, negative to the left of 0."""
    pieces = len(slopes)
    return _piece(c, index, pieces) - _piece(0.0, index, pieces)


def _rows() -> Iterator[Angular]:
    yield Angular("linear", "1 − 2θ/π", {"eps": None}, (), {"eps": 0.0}, g=linear_g, slope=linear_slope)
    yield Angular("cosine", "c", {}, g=lambda c: c, slope=lambda c, g: torch.ones_like(c))
    yield Angular(
        "sigmoid", "tanh(asin(c)/2k)/tanh(π/4k)", {"k": 0.3, "eps": None}, ("k",), {"eps": 0.0}, g=sigmoid_g,
        slope=sigmoid_slope, partials={"k": sigmoid_k_partial},
    )  # fmt: skip
    yield Angular("square_cosine", "c·|c|", {}, g=square_cosine_g, slope=lambda c, g: 2.0 * c.abs())
    yield Angular(
        "power",
        "sign(c)·|c|^b",
        {"b": 2.0},
        (),
        {"b": 1.0},
        g=power_g,
        slope=power_slope,
        partials={"b": power_b_partial},
    )
    yield Angular(
        "rectified_cosine", "max(0, c)", {}, g=torch.relu, slope=lambda c, g: (c > 0).to(c.dtype), smooth=False
    )
    yield Angular(
        "piecewise", "G(c), monotone and piecewise linear, learned", {"slopes": (1.0,) * 8}, (), {"slopes": 0.0},
        g=piecewise_g, slope=piecewise_slope, partials={"slopes": piecewise_slope_partial}, smooth=False,
    )  # fmt: skip


for _one in _rows():
    TABLE.add(_one)


def names() -> list[str]:
    """The rows of the table."""
    return list(TABLE.rows)


def parse(given: str | Value | Row) -> Value:
    """A text, a row or a value as a value."""
    if isinstance(given, Row):
        given = given()
    value = TABLE.parse(given) if isinstance(given, str) else given
    if isinstance(value, Sum):
        raise ValueError(f"`angular` takes one function, not a sum, got {given!r}")
    if not isinstance(value, Value) or not isinstance(value.row, Angular):
        raise TypeError(f"`angular` must be a text such as 'cosine' or a value from hyperball.angular, got {given!r}")
    return value


def register(
    name: str,
    g: Callable[..., Tensor],
    *,
    parameters: Mapping[str, float] | None = None,
    formula: str = "user-defined",
    replace: bool = False,
) -> Angular:
    """Add a function g(c, **parameters) written in plain torch; it runs eagerly, with autograd's derivatives."""
    if not callable(g):
        raise TypeError(f"`g` must be a function of the cosine and the parameters, got {g!r}")
    if name in globals():
        raise ValueError(f"`name` must not be that of a function of hyperball.angular, got {name!r}")
    row = Angular(name, formula, dict(parameters or {}), g=g)
    TABLE.add(row, replace=replace)
    return row


def __getattr__(name: str) -> Row:
    if name in TABLE.rows:
        return TABLE.rows[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *TABLE.rows]


def g(value: Value, c: Tensor) -> Tensor:
    """g(c) of a value."""
    return value.row.g(c, **value.parameters)


def slope(value: Value, c: Tensor, g: Tensor) -> Tensor:
    """g'(c) of a value, given g(c)."""
    return value.row.slope(c, g, **value.parameters)


def partials(value: Value, c: Tensor) -> Iterator[Callable[[], Tensor]]:
    """For every tensor parameter, in the order of `rows.flatten`, a function that computes dg/dparameter."""
    for key, held in value.parameters.items():
        if isinstance(held, Tensor):
            yield partial(value.row.partials[key], c, **value.parameters)
        elif isinstance(held, tuple):
            for index, item in enumerate(held):
                if isinstance(item, Tensor):
                    yield partial(value.row.partials[key], c, index, **value.parameters)


def is_cosine(value: Value) -> bool:
    """Whether g(c) = c, in which case neither c nor a division by n is needed."""
    return value.name == "cosine" and not value.row.composed
