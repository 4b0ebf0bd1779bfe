"""Projection onto a norm ball or sphere as a module: one radius, fixed or learned, and one call."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from hyperball.functional.dims import check_dims
from hyperball.functional.projection import check_norm, check_surface, project
from hyperball.nn.tracing import as_one_call

DEFAULT_RADIUS = {1.0: 250.0, 2.0: 15.0, math.inf: 3.0}  # where Du's adaptive projections start


class Projection(nn.Module):
    """y = argmin_u ||u - x||^2 / 2 subject to ||u||_p <= r (ball) or = r (sphere), r = exp(log_radius).

    Args:
        p: 1, 2 or ``math.inf``.
        surface: "ball" or "sphere".
        radius: A number > 0, or a tensor of radii that broadcasts as in `hyperball.functional.project`;
            None is 250 for p=1, 15 for p=2 and 3 for p=inf.
        learn: Whether `log_radius` is a parameter; else it is a buffer.
        dim: The dimension or dimensions that form a vector.

    >>> layer = Projection(p=2, radius=1.0, learn=False)
    >>> layer(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """

    log_radius: Tensor

    def __init__(
        self,
        p: float = 2,
        surface: str = "ball",
        radius: float | Tensor | None = None,
        *,
        learn: bool = True,
        dim: int | Sequence[int] = -1,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_norm(p)
        self.p = p
        self.surface = check_surface(surface)
        self.learn = learn
        dims = check_dims(dim)
        self.dim = dim if isinstance(dim, int) else dims
        start = DEFAULT_RADIUS[float(p)] if radius is None else radius
        self._start = start.detach() if isinstance(start, Tensor) else start
        log_radius = _log_radius(start, device, dtype)
        if learn:
            self.log_radius = nn.Parameter(log_radius)
        else:
            self.register_buffer("log_radius", log_radius)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put the radius back to where it began."""
        self.log_radius.copy_(_log_radius(self._start, "cpu", torch.float64))

    @property
    def radius(self) -> Tensor:
        """r = exp(log_radius), in float32 or float64."""
        return self.log_radius.to(torch.promote_types(self.log_radius.dtype, torch.float32)).exp()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, fx.Proxy):
            return as_one_call(self, x)
        return project(x, self.radius, p=self.p, surface=self.surface, dim=self.dim)

    def extra_repr(self) -> str:
        log_radius = self.log_radius
        concrete = log_radius.dim() == 0 and log_radius.device.type != "meta"
        radius = f"{self.radius.item():.4g}" if concrete else f"tensor of shape {tuple(log_radius.shape)}"
        return f"p={self.p}, surface={self.surface!r}, radius={radius}, learn={self.learn}, dim={self.dim}"


def _log_radius(radius: float | Tensor, device: torch.device | str | int | None, dtype: torch.dtype | None) -> Tensor:
    """log(r), taken in float64."""
    dtype = dtype or torch.get_default_dtype()
    if isinstance(radius, Tensor):
        if not radius.is_meta and not bool(((radius > 0) & radius.isfinite()).all()):
            raise ValueError(f"`radius` must be finite and > 0, got {radius.tolist()}")
        return radius.detach().double().log().to(device=radius.device if device is None else device, dtype=dtype)
    if isinstance(radius, bool) or not isinstance(radius, (int, float)):
        raise TypeError(f"`radius` must be a number, a tensor or None, got {type(radius).__name__}")
    if not 0 < radius < math.inf:
        raise ValueError(f"`radius` must be finite and > 0, got {radius}")
    return torch.full((), math.log(radius), device=device, dtype=dtype)
