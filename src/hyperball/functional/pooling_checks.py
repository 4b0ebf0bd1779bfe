"""The arguments of robust pooling: each is refused by name, or brought into the form the kernels take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hyperball import radial
from hyperball.functional.dims import check_floating, reduced_dims
from hyperball.kernels.pooling.choice import compute_dtype
from hyperball.kernels.pooling.geometry import Along, Geometry, Windows
from hyperball.kernels.pooling.gradient import may_hold_somewhere
from hyperball.kernels.reading import can_look, factor_where
from hyperball.rows import AnyValue, Row, Value

Penalty = str | AnyValue | Row
_read: dict[str, Value] = {}  # texts that have been read: a call is often short against that
PUBLIC_NAMES = {"rho": "c"}


def single_penalty(penalty: Penalty) -> Value:
    """The penalty as one value: a sum has no radius of its own."""
    known = _read.get(penalty) if isinstance(penalty, str) else None
    if known is not None and radial.TABLE.rows.get(known.name) is known.row:
        return known
    value = radial.parse(penalty, "penalty")
    if isinstance(penalty, str) and isinstance(value, Value) and not torch.compiler.is_compiling():
        _read[penalty] = value
    if not isinstance(value, Value):
        raise ValueError(f"`penalty` must be a single function, got the sum {value}")
    return value


def may_hold(condition: Tensor) -> bool:
    """False only where the condition can be read and fails somewhere; inside vmap or a graph it cannot."""
    if not can_look(condition):
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True


def sample_weights(shape: torch.Size, x: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Weights and mask as one tensor of the given shape, or None."""
    dtype = compute_dtype(x.dtype)
    found = None
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.is_complex() or weights.dtype == torch.bool:
            raise TypeError(f"`weights` must be a tensor of numbers, got {getattr(weights, 'dtype', weights)!r}")
        if not may_hold((weights >= 0) & (weights < torch.inf)):
            least, most = weights.min().item(), weights.max().item()
            raise ValueError(f"`weights` must be >= 0 everywhere, and finite, got {least:g} to {most:g}")
        found = spread("weights", weights, shape).to(dtype)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"`mask` must be a bool tensor, got {getattr(mask, 'dtype', mask)!r}")
        held = spread("mask", mask, shape).to(dtype)
        found = held if found is None else found * held
    return found


def leading(given: Tensor | None, x: Tensor) -> Tensor | None:
    """A tensor with one entry a sample, (N,), with ones for x's other dimensions."""
    if not isinstance(given, Tensor) or given.dim() != 1 or given.shape[0] != x.shape[0]:
        return given
    return given.reshape(-1, *[1] * (x.dim() - 1))


def summable(weights: Tensor | None, dims: tuple[int, ...]) -> Tensor | None:
    """Weights whose sum over a row is a number: a row of very large ones is made smaller, which moves no minimum."""
    if weights is None:
        return None
    limit, factor = (1e24, 2.0**-60) if weights.dtype == torch.float32 else (1e270, 2.0**-400)
    large = weights.detach().amax(dims, keepdim=True) > limit
    if not may_hold_somewhere(large):
        return weights
    return weights * factor_where(large, factor, weights.dtype)


def broadcasts(tensor: Tensor, shape: Sequence[int]) -> bool:
    if tensor.dim() > len(shape):
        return False
    trailing = shape[len(shape) - tensor.dim() :]
    return all(have == 1 or have == want for have, want in zip(tensor.shape, trailing, strict=True))


def spread(name: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in the given shape."""
    if not broadcasts(tensor, shape):
        raise ValueError(f"`{name}` must broadcast to shape {tuple(shape)}, got {tuple(tensor.shape)}")
    return tensor.expand(tuple(shape))


def kept_or_left(name: str, tensor: Tensor, kept: Sequence[int], left: Sequence[int]) -> Tensor:
    """A parameter in the shape `left` of the rows, given so or with the reduced dimensions `kept` as 1."""
    if broadcasts(tensor, kept):
        return tensor.expand(tuple(kept)).reshape(tuple(left))
    if broadcasts(tensor, left):
        return tensor.expand(tuple(left))
    raise ValueError(f"`{name}` must broadcast to shape {tuple(kept)} or {tuple(left)}, got {tuple(tensor.shape)}")


def aligned(value: Value, x: Tensor, place: Callable[[str, Tensor], Tensor]) -> Value:
    """The value with every tensor parameter placed, in the dtype of the computation; c is checked to be > 0."""
    placed: dict[str, float | Tensor] = {}
    for key, given in value.parameters.items():
        if key == "alpha" and given != 1.0:  # multiplies the objective, so it moves nothing
            placed[key] = 1.0
        elif isinstance(given, Tensor):
            name = PUBLIC_NAMES.get(key, key)
            if key == "rho" and given.device.type == "cpu" and not may_hold((given > 0) & (given < torch.inf)):
                least, most = given.min().item(), given.max().item()
                raise ValueError(f"`{name}` must be > 0 everywhere, and finite, got {least:g} to {most:g}")
            given = given.to(x.device) if given.dim() == 0 else given
            placed[key] = place(name, given.to(compute_dtype(x.dtype)))
    return value.with_parameters(**placed) if placed else value


def known_scale(scale: str | None) -> bool:
    if scale not in (None, "mad"):
        raise ValueError(f"`scale` must be 'mad' or None, got {scale!r}")
    return scale is not None


def _sizes(name: str, given: int | Sequence[int], space: int, least: int) -> tuple[int, ...]:
    if not isinstance(given, (int, Sequence)) or isinstance(given, str):
        raise TypeError(f"`{name}` must be an integer or {space} of them, got {given!r}")
    sizes = (given,) * space if isinstance(given, int) else tuple(given)
    if len(sizes) == 1:
        sizes = sizes * space
    if len(sizes) != space or not all(isinstance(size, int) and size >= least for size in sizes):
        raise ValueError(f"`{name}` must be {space} integer(s) >= {least}, got {given!r}")
    return sizes


Sizes = int | Sequence[int]


def window_sizes(
    space: int, kernel_size: Sizes | None, stride: Sizes | None, padding: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """(kernel, stride, padding) of every dimension, or None where there is no kernel size: all positions."""
    margin = _sizes("padding", padding, space, 0)
    if kernel_size is None:
        if stride is not None or any(margin):
            raise ValueError("`stride` and `padding` need a `kernel_size`, got None, which pools all positions")
        return None
    kernel = _sizes("kernel_size", kernel_size, space, 1)
    if any(2 * p > k for p, k in zip(margin, kernel, strict=True)):
        raise ValueError(f"`padding` must be at most half of the kernel size {kernel}, got {padding!r}")
    return kernel, kernel if stride is None else _sizes("stride", stride, space, 1), margin


def windows(
    x: Tensor, space: int, kernel_size: Sizes | None, stride: Sizes | None, padding: Sizes, ceil_mode: bool
) -> Geometry:
    """The windows of nn.AvgPool's arguments; all positions where there is no kernel size."""
    check_floating(x)
    names = "L" if space == 1 else "H, W"
    if x.dim() not in (space + 1, space + 2):
        raise ValueError(f"`x` must be [N, C, {names}] or [C, {names}], got shape {tuple(x.shape)}")
    sizes = window_sizes(space, kernel_size, stride, padding)
    if sizes is None:
        return Along(reduced_dims(x, tuple(range(-space, 0))))
    found = Windows(*sizes, ceil_mode)
    if any(count < 1 for count in found.counts(tuple(x.shape[-space:]))):
        raise ValueError(f"`kernel_size` {sizes[0]} is larger than the padded input, got shape {tuple(x.shape)}")
    return found


def segment_offsets(x: Tensor, offsets: Tensor) -> None:
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, got a scalar")
    if not isinstance(offsets, Tensor) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise TypeError(f"`offsets` must be a tensor of integers, got {getattr(offsets, 'dtype', offsets)!r}")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"`offsets` must have shape (segments + 1,), got {tuple(offsets.shape)}")
    if not can_look(offsets):
        return
    if not may_hold(offsets.diff() >= 0):
        at = int((offsets.diff() < 0).nonzero()[0])
        pair = offsets[at : at + 2].tolist()
        raise ValueError(f"`offsets` must not decrease, got {pair[0]} before {pair[1]} at position {at + 1}")
    ends = [int(offsets[0]), int(offsets[-1])]
    if ends != [0, x.shape[0]]:
        raise ValueError(f"`offsets` must begin at 0 and end at {x.shape[0]}, got {ends[0]} and {ends[1]}")


def vector_arguments(x: Tensor, value: Value) -> None:
    check_floating(x)
    if x.dim() < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"`x` must be [..., n, d] with n and d > 0, got shape {tuple(x.shape)}")
    if value.name == "absolute":
        raise ValueError("`penalty` must be smooth for vectors, got 'absolute'; use 'pseudo_huber' with a small c")
    if value.row.composed:
        raise ValueError(f"`penalty` must be one of the table's own for vectors, got the user-defined {value.name!r}")
