"""Common corruptions of images, on the device that holds them: noise, impulses, blur, contrast, brightness, occlusion.

Five severities each, in the spirit of Hendrycks and Dietterich 2019 with code and strengths of our own. What is random
depends on the seed and the image's place in the set alone, so it is the same on every device, up to rounding, and in
any batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.data.hashing import fold, has_integers, key_of, normal, uniform
from hyperball.rows import nearest

SEVERITIES = (1, 2, 3, 4, 5)
SIDE = 32  # the image size for which blur is given in pixels
GRAY = 0.5


@dataclass(frozen=True)
class Corruption:
    """One corruption: (images, words, strength) → images, and its strength at each severity."""

    name: str
    about: str
    apply: Callable[[Tensor, Tensor, float], Tensor]
    strengths: tuple[float, float, float, float, float]


def _pixels(x: Tensor) -> Tensor:
    return torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])


def _spread(words: Tensor) -> Tensor:
    return words[:, None, None, None]


def noise(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """x + strength·N(0, 1)."""
    return x + strength * normal(_spread(words), _pixels(x)).to(x.dtype)


def impulse(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """A share of the pixels, all channels together, becomes black or white."""
    place = torch.arange(x[0, 0].numel(), device=x.device).view(1, *x.shape[2:])
    hit = uniform(_spread(fold(words, 0)), place) < strength
    white = (fold(_spread(fold(words, 1)), place) & 1).to(x.dtype)
    return torch.where(hit, white, x)


def blur(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """Convolution with a Gaussian of standard deviation strength·side/32, edges repeated."""
    sigma = strength * min(x.shape[2:]) / SIDE
    radius = max(1, math.ceil(3 * sigma))
    taps = torch.arange(-radius, radius + 1, device=x.device, dtype=torch.float32)
    window = torch.exp(-0.5 * (taps / sigma) ** 2)
    window = (window / window.sum()).to(x.dtype)
    rows = x.flatten(0, 1)[:, None]
    rows = F.conv2d(F.pad(rows, (0, 0, radius, radius), mode="replicate"), window.view(1, 1, -1, 1))
    rows = F.conv2d(F.pad(rows, (radius, radius, 0, 0), mode="replicate"), window.view(1, 1, 1, -1))
    return rows.view(x.shape)


def contrast(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """mean + strength·(x − mean), the mean of each channel of an image."""
    mean = x.mean((2, 3), keepdim=True)
    return mean + strength * (x - mean)


def brightness(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """x + strength."""
    return x + strength


def occlusion(x: Tensor, words: Tensor, strength: float) -> Tensor:
    """A gray square of side strength·image side, anywhere inside."""
    side = max(1, round(strength * min(x.shape[2:])))
    spans = []
    for axis, size in enumerate(x.shape[2:]):
        first = (fold(words, axis) * (size - side + 1)) >> 32
        offset = torch.arange(size, device=x.device) - first[:, None]
        spans.append((offset >= 0) & (offset < side))
    covered = spans[0][:, None, :, None] & spans[1][:, None, None, :]
    return torch.where(covered, torch.full_like(x, GRAY), x)


TABLE = {
    row.name: row
    for row in (
        Corruption("noise", "Gaussian noise", noise, (0.04, 0.06, 0.09, 0.13, 0.18)),
        Corruption("impulse", "black and white pixels", impulse, (0.01, 0.02, 0.05, 0.09, 0.15)),
        Corruption("blur", "Gaussian blur", blur, (0.5, 0.75, 1.0, 1.5, 2.0)),
        Corruption("contrast", "less contrast", contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
        Corruption("brightness", "more brightness", brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
        Corruption("occlusion", "a gray square", occlusion, (0.2, 0.3, 0.4, 0.5, 0.6)),
    )
}


def names() -> tuple[str, ...]:
    """The corruptions that `corrupt` knows."""
    return tuple(TABLE)


def corrupt(images: Tensor, name: str, severity: int, *, seed: int = 0, index: Tensor | None = None) -> Tensor:
    """Images [B, C, H, W], bytes or floats in [0, 1], corrupted, as floats in [0, 1].

    Args:
        name: One of `names()`.
        severity: 1 (mild) to 5.
        index: The images' places in their set, which with the seed choose the random numbers; None counts from 0.

    >>> corrupt(torch.zeros(1, 3, 8, 8), "brightness", 2).unique()
    tensor([0.1000])
    """
    if name not in TABLE:
        raise ValueError(f"unknown corruption {name!r}; {nearest(str(name), TABLE)}")
    if isinstance(severity, bool) or not isinstance(severity, Integral) or severity not in SEVERITIES:
        raise ValueError(f"`severity` must be one of {SEVERITIES}, got {severity!r}")
    x = _checked(images)
    place = torch.arange(len(x), device=x.device) if index is None else index
    if not isinstance(place, Tensor) or place.shape != x.shape[:1] or not has_integers(place):
        got = f"{place.dtype} {tuple(place.shape)}" if isinstance(place, Tensor) else repr(place)
        raise ValueError(f"`index` must be a tensor of {len(x)} integers, one an image, got {got}")
    if not len(x):
        return x.clone()
    row = TABLE[name]
    words = fold(key_of(seed, list(TABLE).index(name), int(severity), device=x.device), place.to(x.device))
    return torch.clamp(row.apply(x, words, row.strengths[severity - 1]), 0.0, 1.0)


def _checked(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or images.dim() != 4:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"`images` must be [B, C, H, W], got {got}")
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise TypeError(f"`images` must be uint8 or floating point, got {images.dtype}")
    if images.device.type == "cpu" and images.numel() and not bool(((images >= 0) & (images <= 1)).all()):
        low, high = torch.aminmax(images)
        raise ValueError(f"`images` must be in [0, 1], got values from {float(low):g} to {float(high):g}")
    return images
