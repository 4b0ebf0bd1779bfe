"""The table of norms that bound an attack: distance, steepest direction, projection and random points of the ball."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperball.data.hashing import fold, normal, uniform
from hyperball.rows import nearest

TINY = 1e-12  # below this length a gradient is scaled before it is divided by its norm


@dataclass(frozen=True)
class Norm:
    """One norm; functions act on batches [B, …], image by image.

    Args:
        title: The name that pyautoattack knows.
        distance: ‖d‖ of every image, [B].
        direction: The step of unit norm along which a gradient rises fastest; 0 for a gradient of 0, and NaN counts
            as 0.
        project: The nearest point of the ball of radius epsilon.
        inside: Random points of the unit ball, from one word an image: (keys, like).
        corner: Random points at which the unit ball is reached, from one word an image: (keys, like).
        reach: The distance between the farthest images of a shape, at which every image is within reach.
    """

    name: str
    title: str
    distance: Callable[[Tensor], Tensor]
    direction: Callable[[Tensor], Tensor]
    project: Callable[[Tensor, float], Tensor]
    inside: Callable[[Tensor, Tensor], Tensor]
    corner: Callable[[Tensor, Tensor], Tensor]
    reach: Callable[[torch.Size], float]


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, …, 1] beside a batch."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def positions(like: Tensor) -> Tensor:
    """The number of every pixel of one image."""
    return torch.arange(like[0].numel(), device=like.device)


def uniform_noise(keys: Tensor, like: Tensor) -> Tensor:
    """U(−1, 1) in every pixel."""
    return (2 * uniform(keys[:, None], positions(like)) - 1).view(like.shape).to(like.dtype)


def normal_noise(keys: Tensor, like: Tensor) -> Tensor:
    """N(0, 1) in every pixel."""
    return normal(keys[:, None], positions(like)).view(like.shape).to(like.dtype)


def sign_noise(keys: Tensor, like: Tensor) -> Tensor:
    """−1 or 1 in every pixel."""
    bits = fold(keys[:, None], positions(like)) & 1
    return (2 * bits - 1).view(like.shape).to(like.dtype)


def largest(d: Tensor) -> Tensor:
    """max |d| of every image."""
    return d.flatten(1).abs().amax(1)


def euclidean(d: Tensor) -> Tensor:
    """sqrt(Σ d²) of every image, in float32 at least."""
    return wide(d).flatten(1).square().sum(1).sqrt()


def wide(values: Tensor) -> Tensor:
    """Halves as float32, in which their squares are representable."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def signs(slope: Tensor) -> Tensor:
    """sign(g), and 0 for NaN."""
    return torch.nan_to_num(slope.sign(), nan=0.0)


def unit(slope: Tensor) -> Tensor:
    """g/‖g‖; a gradient too short or too long for its squares is divided by its largest entry first."""
    given, slope = slope.dtype, wide(torch.nan_to_num(slope, nan=0.0))
    peak = per_image(largest(slope), slope)
    length = per_image(euclidean(slope), slope)
    scaled = torch.where(((length < TINY) | length.isinf()) & (peak > 0), slope / peak, slope)
    return (scaled * (1 / per_image(euclidean(scaled), slope).clamp(min=TINY))).to(given)


def shorten(d: Tensor, epsilon: float) -> Tensor:
    """d·min(1, epsilon/‖d‖)."""
    return (wide(d) * per_image((epsilon / euclidean(d).clamp(min=TINY)).clamp(max=1.0), d)).to(d.dtype)


def ball_noise(keys: Tensor, like: Tensor) -> Tensor:
    """u^(1/n)·g/‖g‖ with g normal: uniform in the ball of n dimensions."""
    radius = uniform(keys, 2 * like[0].numel()) ** (1 / like[0].numel())
    return per_image(radius.to(like.dtype), like) * unit(normal_noise(keys, like))


LINF = Norm(
    "linf", "Linf", largest, signs, lambda d, epsilon: d.clamp(-epsilon, epsilon), uniform_noise, sign_noise,
    lambda shape: 1.0,
)  # fmt: skip
L2 = Norm(
    "l2", "L2", euclidean, unit, shorten, ball_noise, lambda keys, like: unit(normal_noise(keys, like)),
    lambda shape: math.sqrt(shape.numel()),
)  # fmt: skip
NORMS = {norm.name: norm for norm in (LINF, L2)}


def find_norm(name: str) -> Norm:
    """The norm of a name, or an error that suggests one."""
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; {nearest(str(name), NORMS)}")
    return NORMS[name]
