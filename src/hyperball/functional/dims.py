"""The arguments `x` and `dim` of functions that act along some dimensions of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_floating(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"`x` must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"`x` must be a tensor of a floating point dtype, got {x.dtype}")


def check_dims(dim: int | Sequence[int]) -> tuple[int, ...]:
    """The dimensions as a tuple."""
    given = (dim,) if isinstance(dim, int) else dim
    if not isinstance(given, Sequence) or not all(isinstance(d, int) and not isinstance(d, bool) for d in given):
        raise TypeError(f"`dim` must be an int or a sequence of ints, got {dim!r}")
    if not given:
        raise ValueError("`dim` must name at least one dimension, got ()")
    return tuple(given)


def reduced_dims(x: Tensor, dim: int | Sequence[int]) -> tuple[int, ...]:
    """The dimensions as negative numbers, ascending: a batch dimension in front does not renumber them."""
    check_floating(x)
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, got a scalar")
    given = check_dims(dim)
    for d in given:
        if not -x.dim() <= d < x.dim():
            raise ValueError(f"`dim` must be in [{-x.dim()}, {x.dim()}) for shape {tuple(x.shape)}, got {d}")
        if x.shape[d] == 0:
            raise ValueError(f"`dim` must not name an empty dimension, got {d} for shape {tuple(x.shape)}")
    dims = tuple(sorted(d if d < 0 else d - x.dim() for d in given))
    if len(set(dims)) != len(dims):
        raise ValueError(f"`dim` must not repeat a dimension, got {dim!r}")
    return dims
