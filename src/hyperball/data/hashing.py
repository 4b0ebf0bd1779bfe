"""Random numbers as a pure function of integers: the same on every device, in any order, inside a CUDA graph.

A word is an int64 in [0, 2³²); `mix` is Wellons' two-multiplication hash, whose multipliers lie below 2³¹, so that no
product leaves the range of an int64.
"""

import math

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def mix(word: Tensor) -> Tensor:
    """A bijection of the words in which every bit of the input moves every bit of the output."""
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & WORD
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & WORD
    return word ^ (word >> 15)


def fold(key: Tensor, value: Tensor | int) -> Tensor:
    """key' = mix(mix(key + golden) ^ value): the word that stands for `value` under `key`."""
    return mix(mix((key + GOLDEN) & WORD) ^ (value & WORD))


def has_integers(values: Tensor) -> bool:
    """Whether a tensor holds whole numbers; truth values are none."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def key_of(*values: int, device: torch.device | str | None = None) -> Tensor:
    """One word from integers of up to 64 bits, on a device without a copy from the host."""
    key = torch.zeros((), dtype=torch.int64, device=device)
    for value in values:
        key = fold(fold(key, value & WORD), (value >> 32) & WORD)
    return key


def uniform(key: Tensor, channel: Tensor | int) -> Tensor:
    """Uniform in [0, 1) with 24 bits, one number a key."""
    return (fold(key, channel) >> 8).to(torch.float32) * 2.0**-24


def normal(key: Tensor, channel: Tensor) -> Tensor:
    """sqrt(-2 log(1 - u)) cos(2 pi v) with u, v uniform: standard normal, at most 5.8 in size."""
    radius = torch.sqrt(-2 * torch.log1p(-uniform(key, 2 * channel)))
    return radius * torch.cos(2 * math.pi * uniform(key, 2 * channel + 1))


def permutation(n: int, key: Tensor) -> Tensor:
    """0..n-1 in the order of their hashes: 62 bits each, ties kept in order."""
    index = torch.arange(n, device=key.device)
    high = fold(fold(key, 0), index) >> 1
    return torch.argsort((high << 31) | (fold(fold(key, 1), index) >> 1), stable=True)
