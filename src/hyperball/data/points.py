"""Outliers in point clouds: a share of the points replaced by uniform samples of the unit ball."""

import math

import torch
from torch import Tensor

from hyperball.data.hashing import WORD, fold, key_of, normal, uniform

CHOICE, DIRECTION, RADIUS = range(3)
CHUNK = 1024  # clouds at a time, which bounds the memory of the hashes


def outliers(points: Tensor, share: float, generator: torch.Generator | int = 0) -> Tensor:
    """Exactly round(share P) points of every cloud [..., P, 3] replaced, once, by uniform samples of the unit ball.

    Which points and by what depends on the seed (or the generator's next word) and the position of the cloud alone, so
    a larger share keeps the outliers of a smaller one.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"`share` must be in [0, 1], got {share}")
    if points.dim() < 2 or points.shape[-1] != 3 or not points.is_floating_point():
        raise ValueError(f"`points` must be float clouds [..., P, 3], got {points.dtype} {tuple(points.shape)}")
    if isinstance(generator, torch.Generator):
        generator = int(torch.randint(WORD + 1, (), generator=generator, device=generator.device))
    flat = points.reshape(-1, *points.shape[-2:])
    index = torch.arange(len(flat), device=points.device)
    keys = fold(key_of(generator, device=points.device), index)
    count = math.floor(share * points.shape[-2] + 0.5)
    parts = [replaced(*part, count) for part in zip(flat.split(CHUNK), keys.split(CHUNK))]
    return torch.cat(parts).view_as(points) if parts else points.clone()


def replaced(clouds: Tensor, keys: Tensor, count: int) -> Tensor:
    """The `count` points of smallest hash in every cloud replaced."""
    index = torch.arange(clouds.shape[1], device=clouds.device)
    hashes = fold(fold(keys, CHOICE)[:, None], index)
    rank = hashes.argsort(dim=1, stable=True).argsort(dim=1)
    return torch.where((rank < count)[..., None], unit_ball(keys, clouds.shape[1]).to(clouds.dtype), clouds)


def unit_ball(keys: Tensor, n: int) -> Tensor:
    """u^(1/3) g / |g| with g normal: n uniform samples of the unit ball for every key."""
    coordinate = torch.arange(3 * n, device=keys.device).view(n, 3)
    direction = normal(fold(keys, DIRECTION)[:, None, None], coordinate)
    direction = direction / direction.norm(dim=2, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    radius = uniform(fold(keys, RADIUS)[:, None], coordinate[:, 0]) ** (1 / 3)
    return radius[..., None] * direction
