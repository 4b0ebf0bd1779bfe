"""Batches as their definition in integers gives them, a sample at a time: a truth without the library's code."""

import math

import numpy as np

from hyperball.data import Augment

GOLDEN = 0x9E3779B9


def mix_reference(word: int) -> int:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        word = ((word ^ (word >> shift)) * factor) % 2**32
    return word ^ (word >> 15)


def fold_reference(key: int, value: int) -> int:
    return mix_reference(mix_reference((key + GOLDEN) % 2**32) ^ value)


def key_reference(*values: int) -> int:
    key = 0
    for value in values:
        key = fold_reference(fold_reference(key, value % 2**32), value >> 32)
    return key


def order_reference(n: int, seed: int, epoch: int) -> list[int]:
    """0..n-1 by 62 bits of hash(seed, epoch, 0, index)."""
    key = key_reference(seed, epoch, 0)
    halves = [fold_reference(key, half) for half in (0, 1)]
    return sorted(range(n), key=lambda index: [fold_reference(half, index) >> 1 for half in halves])


def word_reference(seed: int, epoch: int, index: int) -> int:
    """The random word of a sample: hash(seed, epoch, 1, index)."""
    return fold_reference(key_reference(seed, epoch, 1), index)


def integer_reference(key: int, channel: int, n: int) -> int:
    return fold_reference(key, channel) * n // 2**32


def uniform_reference(key: int, channel: int) -> float:
    return (fold_reference(key, channel) >> 8) / 2**24


def image_reference(image: np.ndarray, key: int, augment: Augment) -> np.ndarray:
    """One image: take a window or pad with NumPy and cut out, flip, scale, blank a square."""
    _, height, width = image.shape
    if augment.window:
        y, x = (integer_reference(key, i, size - augment.window + 1) for i, size in enumerate((height, width)))
        height = width = augment.window
        image = image[:, y : y + height, x : x + width]
    if augment.crop:
        pad = augment.pad
        mode = {"mirror": "symmetric", "zero": "constant"}[augment.crop]
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode=mode)
        y, x = (integer_reference(key, channel, 2 * pad + 1) for channel in (0, 1))
        image = padded[:, y : y + height, x : x + width]
    if augment.flip and fold_reference(key, 2) % 2:
        image = image[:, :, ::-1]
    image = image.astype(np.float32) / np.float32(255)
    if augment.cutout:
        side = augment.cutout
        y = integer_reference(key, 3, height) - side // 2
        x = integer_reference(key, 4, width) - side // 2
        image = image.copy()
        image[:, max(y, 0) : max(y + side, 0), max(x, 0) : max(x + side, 0)] = augment.fill
    return image


def cloud_reference(cloud: np.ndarray, key: int, augment: Augment) -> np.ndarray:
    """One cloud in float64: turn it about the y axis, add noise by the formula of Box and Muller."""
    cloud = cloud.astype(np.float64)
    if augment.rotate:
        angle = 2 * math.pi * uniform_reference(key, 5)
        cosine, sine = math.cos(angle), math.sin(angle)
        cloud = cloud @ np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    if augment.jitter:
        noise = fold_reference(key, 6)
        numbers = [[uniform_reference(noise, 2 * i + half) for half in (0, 1)] for i in range(cloud.size)]
        normal = [math.sqrt(-2 * math.log1p(-u)) * math.cos(2 * math.pi * v) for u, v in numbers]
        cloud = cloud + augment.jitter * np.clip(normal, -5, 5).reshape(cloud.shape)
    return cloud
