"""Euclidean projections onto norm balls, norm spheres, the simplex and a box, differentiable in x and in the radius."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hyperball.functional.dims import check_floating, reduced_dims
from hyperball.kernels.projection import box
from hyperball.kernels.projection import operation as kernel
from hyperball.kernels.reading import can_look

NORMS = {1.0: "l1", 2.0: "l2", math.inf: "linf"}
SURFACES = ("ball", "sphere")


def project(
    x: Tensor,
    radius: float | Tensor,
    *,
    p: float = 2,
    surface: str = "ball",
    dim: int | Sequence[int] = -1,
) -> Tensor:
    """y = argmin_u ||u - x||^2 / 2 subject to ||u||_p <= r (ball) or ||u||_p = r (sphere).

    Args:
        radius: A number > 0, or a tensor that broadcasts to x's shape with size 1 along `dim`, the shape of
            ``x.amax(dim, keepdim=True)``; a tensor that does not is read as one that broadcasts to the shape of
            ``x.amax(dim)``. Gradients flow into it. Values are checked on the CPU; on other devices, and in compiled,
            exported or transformed (torch.func) code, a radius that is not > 0 gives NaN.
        p: 1, 2 or ``math.inf``.
        surface: "ball" or "sphere".
        dim: The dimension or dimensions that form a vector.

    Where the nearest point or the derivative is not unique there is one answer:

    * sgn(0) = +1, so on a sphere the zero vector goes to r/n everywhere (L1), r/sqrt(n) everywhere (L2, where the
      gradient of x is 0) or r on the first coordinate (Linf).
    * ||x|| = r counts as inside a ball: y = x and the gradient passes through.
    * Inside an Linf sphere the first of the largest coordinates moves.
    * NaN or inf in a vector makes that vector NaN for L1 and L2; for Linf inf goes to r and NaN stays where it is.

    float16 and bfloat16 are computed in float32; y has x's dtype and, outside compiled code, its memory layout.

    >>> x = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> project(x, 1.0)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    kind = f"{check_norm(p)}_{check_surface(surface)}"
    dims = reduced_dims(x, dim)
    return kernel.project(x, _radius_tensor(radius, x, dims), kind, dims)


def project_simplex(x: Tensor, radius: float | Tensor = 1.0, *, dim: int | Sequence[int] = -1) -> Tensor:
    """y = argmin_u ||u - x||^2 / 2 subject to u >= 0, sum u = r.

    `radius` and `dim` are those of `project`; -inf gets 0, and NaN or inf makes its vector NaN.

    >>> project_simplex(torch.tensor([1.5, 1.0, -2.0]))
    tensor([0.7500, 0.2500, 0.0000])
    """
    dims = reduced_dims(x, dim)
    return kernel.project(x, _radius_tensor(radius, x, dims), "simplex", dims)


def project_box(x: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """y = min(max(x, low), high), the nearest point of a box; low and high broadcast to x's shape.

    Bounds may be infinite and get gradients where they are active; on a bound the gradient is x's.
    NaN stays where it is. low <= high is checked on the CPU.

    >>> project_box(torch.tensor([-3.0, 0.5, 2.0]), 0.0, 1.0)
    tensor([0.0000, 0.5000, 1.0000])
    """
    check_floating(x)
    lower, upper = _bound("low", low, x), _bound("high", high, x)
    if _crossed(lower, upper, x):
        raise ValueError(f"`low` must be <= `high`, got low={low} and high={high}")
    return box.project_box(x, lower, upper)


def check_norm(p: float) -> str:
    """The name of the norm in a kernel's table."""
    if not isinstance(p, (int, float)) or isinstance(p, bool) or float(p) not in NORMS:
        raise ValueError(f"`p` must be 1, 2 or math.inf, got {p!r}")
    return NORMS[float(p)]


def check_surface(surface: str) -> str:
    """The surface, or an error that names the nearest."""
    if surface in SURFACES:
        return surface
    near = difflib.get_close_matches(str(surface), SURFACES, n=1, cutoff=0.0)
    raise ValueError(f'`surface` must be "ball" or "sphere", got {surface!r}; did you mean "{near[0]}"?')


def _radius_tensor(radius: float | Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The radius with x's rank and size 1 along dims."""
    if isinstance(radius, Tensor):
        if not radius.is_floating_point():
            raise TypeError(f"`radius` must be a number or a tensor of a floating point dtype, got {radius.dtype}")
        if radius.device != x.device and radius.dim() == 0:
            radius = radius.to(x.device)
        return _aligned_radius(radius, x, dims)
    if isinstance(radius, bool) or not isinstance(radius, (int, float)):
        raise TypeError(f"`radius` must be a number or a tensor, got {type(radius).__name__}")
    if not 0 < radius < math.inf:
        raise ValueError(f"`radius` must be finite and > 0, got {radius}")
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.full((1,) * x.dim(), float(radius), dtype=dtype, device=x.device)


def _aligned_radius(radius: Tensor, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    kept = [1 if d - x.dim() in dims else x.shape[d] for d in range(x.dim())]
    left = [x.shape[d] for d in range(x.dim()) if d - x.dim() not in dims]
    if _broadcasts(radius, kept):
        return radius.reshape((1,) * (x.dim() - radius.dim()) + tuple(radius.shape))
    if _broadcasts(radius, left):
        sizes = iter((1,) * (len(left) - radius.dim()) + tuple(radius.shape))
        return radius.reshape([1 if d - x.dim() in dims else next(sizes) for d in range(x.dim())])
    raise ValueError(f"`radius` must broadcast to shape {tuple(kept)} or {tuple(left)}, got {tuple(radius.shape)}")


def _broadcasts(tensor: Tensor, shape: list[int]) -> bool:
    if tensor.dim() > len(shape):
        return False
    trailing = shape[len(shape) - tensor.dim() :]
    return all(have == 1 or have == want for have, want in zip(tensor.shape, trailing, strict=True))


def _crossed(low: float | Tensor, high: float | Tensor, x: Tensor) -> bool:
    """Whether a low bound is known to lie above a high one; no device is waited for."""
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return low > high
    if x.device.type != "cpu" or not all(can_look(held) for held in (low, high) if isinstance(held, Tensor)):
        return False
    return bool((box.as_tensor(low, x) > high).any())


def _bound(name: str, bound: float | Tensor, x: Tensor) -> float | Tensor:
    if isinstance(bound, Tensor):
        if not _broadcasts(bound, list(x.shape)):
            raise ValueError(f"`{name}` must broadcast to shape {tuple(x.shape)}, got {tuple(bound.shape)}")
        return bound.to(x.dtype)
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        raise TypeError(f"`{name}` must be a number or a tensor, got {type(bound).__name__}")
    if math.isnan(bound):
        raise ValueError(f"`{name}` must not be NaN")
    return float(bound)
