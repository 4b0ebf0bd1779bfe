"""Norms of patches and filters: exact, in float32 or float64, with gradient 0 at 0.

Sums of squares of float32 and narrower inputs are formed in float64, where nothing overflows or underflows;
float64 inputs are divided by a power of two near their largest entry first: that of the vector, or of a patch, never of
a whole image, so that what is huge, infinite or not a number stays in the patches that contain it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.memory import modes
from hyperball.kernels.reading import can_look
from hyperball.kernels.window import Window, box_sum, scaled_box_sum
from hyperball.radial_functions import hypotenuse

SAFE = (1e-150, 1e150)  # the largest entries of float64 vectors whose squares have a sum


def norm_dtype(x: Tensor) -> torch.dtype:
    """The dtype of norms: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which squares are summed: float64, except on devices that have none."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), and x itself where nothing is to do: torch 2.11 compiles such an alias without its gradient."""
    return x if x.dtype == dtype else x.to(dtype)


class SumOfSquares(torch.autograd.Function):
    """q = Σ (x/a)² over `dims`, a = `scale` or 1; keeps x alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, dims: tuple[int, ...]) -> Tensor:
        wide = wide_dtype(x)
        if scale is not None:
            return (x / scale).square().sum(dims, keepdim=True, dtype=wide)
        if torch.compiler.is_compiling() or x.dtype == wide:
            return cast(x, wide).square().sum(dims, keepdim=True)
        # Slower than squares and their sum, but without a wider copy of x.
        return torch.linalg.vector_norm(x, 2, dims, keepdim=True, dtype=wide).square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, ctx.dims = inputs
        ctx.save_for_backward(x, scale)
        ctx.save_for_forward(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        if scale is not None:
            return (x / scale) * (2.0 * grad / scale), None, None
        dtype, factor = norm_dtype(x), 2.0 * grad
        tiny, limit = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        # The factor may be 1/n², no float32 beyond n = 1e19: it is a power of two, 1 as a rule, times the rest.
        power = torch.where(factor.abs() < tiny, tiny, torch.ones_like(factor))
        rest = (factor / power).clamp(-limit, limit)
        return (x * power.to(dtype) * rest.to(dtype)).to(x.dtype), None, None


class SumOfSquaresWithTangent(SumOfSquares):
    """The same, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        x, scale = ctx.saved_tensors
        wide = wide_dtype(x)
        if scale is not None:
            return 2.0 * ((x / scale) * (tangent / scale)).sum(ctx.dims, keepdim=True, dtype=wide)
        return 2.0 * (x.to(wide) * tangent.to(wide)).sum(ctx.dims, keepdim=True)


class Root(torch.autograd.Function):
    """n = a·sqrt(q), a = `scale` or 1, with derivative 0 at 0; keeps n alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        root = q.sqrt() if scale is None else q.sqrt() * scale
        return cast(root.clamp(max=torch.finfo(dtype).max), dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        q, scale, _ = inputs
        ctx.wide = q.dtype
        ctx.save_for_backward(output, scale)
        ctx.save_for_forward(output, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        n, scale = ctx.saved_tensors
        return grad.to(ctx.wide) * half_inverse(n.to(ctx.wide), scale), None, None


class RootWithTangent(Root):
    """The same, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        n, scale = ctx.saved_tensors
        return (tangent * half_inverse(n.to(ctx.wide), scale)).to(n.dtype)


def half_inverse(n: Tensor, scale: Tensor | None) -> Tensor:
    """dn/dq = a²/(2n), and 0 at n = 0."""
    zero = n == 0
    n = torch.where(zero, 1.0, n)
    slope = 0.5 / n if scale is None else 0.5 * scale * (scale / n)
    return torch.where(zero, 0.0, slope)


def sum_of_squares(x: Tensor, scale: Tensor | None, dims: tuple[int, ...]) -> Tensor:
    kind = SumOfSquares if torch.compiler.is_compiling() else SumOfSquaresWithTangent
    return kind.apply(x, scale, dims)


def root(q: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind = Root if torch.compiler.is_compiling() else RootWithTangent
    return kind.apply(q, scale, dtype)


def power_of_two(x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """A power of two near max|x| over `dims`, at least the smallest normal; None where squares are safe without."""
    if x.dtype != wide_dtype(x):
        return None
    largest = x.detach().abs().amax(dims, keepdim=True)
    if squares_fit(largest):
        return None
    largest = largest.clamp(torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).max)
    return torch.exp2(largest.log2().floor())


def squares_fit(largest: Tensor) -> bool:
    """Whether a look at the largest entries, where that is free, shows that squares neither overflow nor vanish."""
    if largest.device.type != "cpu" or modes() or not can_look(largest):
        return False
    low, high = SAFE
    return bool((((largest > low) & (largest < high)) | (largest == 0)).all())


def norm(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """‖x‖ over `dims`, kept with size 1."""
    scale = power_of_two(x, dims)
    return root(sum_of_squares(x, scale, dims), scale, norm_dtype(x))


def filter_norms(weight: Tensor) -> Tensor:
    """m = ‖w‖ of every filter, [channels]."""
    return norm(weight, tuple(range(1, weight.dim()))).flatten()


def patch_norm(x: Tensor, window: Window) -> Tensor:
    """n[b, g, p] = ‖patch‖ over the channels of group g and the window at p; x is [batch, channels, *spatial]."""
    grouped = x.unflatten(1, (window.groups, -1)) if window.groups > 1 else x.unsqueeze(1)
    scale = power_of_two(grouped, (2,))
    squares = sum_of_squares(grouped, scale, (2,)).squeeze(2)
    if scale is None:
        return root(box_sum(squares, window), None, norm_dtype(x))
    return root(*scaled_box_sum(squares, scale.squeeze(2), window), norm_dtype(x))


def inverse(n: Tensor) -> Tensor:
    """1/n, and 0 where n is 0; below the smallest normal number, that number's inverse."""
    tiny = torch.finfo(n.dtype).tiny
    return torch.where(n > 0, 1.0 / n.clamp(min=tiny), 0.0)


class UnitFilters(torch.autograd.Function):
    """ŵ = w/m and m = ‖w‖ over `dims`; dw = (dŵ - ŵ⟨ŵ, dŵ⟩)/m + ŵ·dm. A zero filter stays zero, with gradient 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        m = norm(weight, dims)
        return cast(weight, m.dtype) * inverse(m), m

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        weight, ctx.dims = inputs
        ctx.dtype = weight.dtype
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, grad_unit: Tensor, grad_m: Tensor) -> tuple[Tensor, None]:
        unit, m = ctx.saved_tensors
        along = (unit * grad_unit).sum(ctx.dims, keepdim=True)
        return ((grad_unit - unit * along) * inverse(m) + unit * grad_m).to(ctx.dtype), None


class UnitFiltersWithTangent(UnitFilters):
    """The same, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, Tensor]:
        unit, m = ctx.saved_tensors
        along = (unit * tangent).sum(ctx.dims, keepdim=True)
        return (tangent - unit * along) * inverse(m), along


def unit_filters(weight: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """ŵ and m = ‖w‖, both in the dtype of norms."""
    kind = UnitFilters if torch.compiler.is_compiling() else UnitFiltersWithTangent
    return kind.apply(weight, dims)


class MeanLength(torch.autograd.Function):
    """mean(sqrt(n² + eps)), the unit of a relative radius; keeps n alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n: Tensor, eps: float) -> Tensor:
        lengths, wide = hypotenuse(n, eps**0.5), wide_dtype(n)
        if n.dtype == wide:  # no wider sum: lengths are divided before they are added
            return (lengths / n.numel()).sum()
        return cast(lengths.sum(dtype=wide) / n.numel(), n.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        n, ctx.eps = inputs
        ctx.save_for_backward(n)
        ctx.save_for_forward(n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (n,) = ctx.saved_tensors
        return grad * (n / hypotenuse(n, ctx.eps**0.5)) / n.numel(), None


class MeanLengthWithTangent(MeanLength):
    """The same, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (n,) = ctx.saved_tensors
        return (tangent * (n / hypotenuse(n, ctx.eps**0.5))).mean()


def mean_length(n: Tensor, eps: float) -> Tensor:
    kind = MeanLength if torch.compiler.is_compiling() else MeanLengthWithTangent
    return kind.apply(n, eps)
