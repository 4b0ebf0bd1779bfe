"""The magnitude, angular and penalty functions in numpy, at their default parameters, for pictures.

Formulas are those of `hyperball.radial` and `hyperball.angular`, against which a test holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Function = Callable[[Array], Array]

RHO, BETA, SHAPE, K, POWER = 1.0, 0.5, 1.0, 0.3, 3.0


def ball(n: Array) -> Array:
    """h(n) = min(n, ρ)/ρ."""
    return np.minimum(n, RHO) / RHO


def seg(n: Array) -> Array:
    """h(n) = n, beyond ρ: β·n + (1−β)·ρ."""
    return np.where(n <= RHO, n, BETA * n + (1 - BETA) * RHO)


def barron(n: Array) -> Array:
    """h(n) = n·(1 + n²/(bρ²))^(a/2−1), b = |a−2|."""
    return n * (1 + n**2 / (abs(SHAPE - 2) * RHO**2)) ** (SHAPE / 2 - 1)


MAGNITUDES: dict[str, tuple[str, Function]] = {
    "sphere": ("α", np.ones_like),
    "ball": ("α·min(n, ρ)/ρ", ball),
    "tanh": ("α·tanh(n/ρ)", lambda n: np.tanh(n / RHO)),
    "linear": ("α·n", lambda n: n),
    "seg": ("α·n, beyond ρ: β·n + (α−β)·ρ", seg),
    "log": ("α·log(1+n)", np.log1p),
    "mix": ("α·n + β·log(1+n)", lambda n: n + np.log1p(n)),
    "barron": ("α·n·(1 + n²/ρ²)^(−1/2), shape 1", barron),
}


def sigmoid(c: Array) -> Array:
    """g = tanh(asin(c)/(2k)) / tanh(π/(4k))."""
    return np.tanh(np.arcsin(c) / (2 * K)) / np.tanh(np.pi / (4 * K))


ANGULARS: dict[str, tuple[str, Function]] = {
    "linear": ("1 − 2θ/π", lambda c: 2 / np.pi * np.arcsin(c)),
    "cosine": ("cos θ", lambda c: c),
    "sigmoid": ("sigmoid, k = 0.3", sigmoid),
    "square_cosine": ("sign(cos θ)·cos² θ", lambda c: c * np.abs(c)),
    "power": ("sign(cos θ)·|cos θ|³, b = 3", lambda c: np.sign(c) * np.abs(c) ** POWER),
    "rectified_cosine": ("max(0, cos θ)", lambda c: np.maximum(c, 0.0)),
}

PENALTIES: dict[str, tuple[str, Function, Function]] = {
    "quadratic": ("z²/2", lambda z: z**2 / 2, lambda z: z),
    "pseudo_huber": (
        "c²(√(1+z²/c²) − 1)",
        lambda z: np.sqrt(1 + z**2) - 1,
        lambda z: z / np.sqrt(1 + z**2),
    ),
    "huber": (
        "z²/2, beyond c: c(|z| − c/2)",
        lambda z: np.where(np.abs(z) <= 1, z**2 / 2, np.abs(z) - 0.5),
        lambda z: np.clip(z, -1, 1),
    ),
    "welsch": ("c²(1 − exp(−z²/2c²))", lambda z: 1 - np.exp(-(z**2) / 2), lambda z: z * np.exp(-(z**2) / 2)),
    "truncated_quadratic": (
        "min(z², c²)/2",
        lambda z: np.minimum(z**2, 1) / 2,
        lambda z: np.where(np.abs(z) <= 1, z, 0.0),
    ),
}
