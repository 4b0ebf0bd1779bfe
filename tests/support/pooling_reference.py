"""Robust pooling in float64, in the forms the papers print: a truth that shares no code with the library.

Penalties are those of the table in *A General and Adaptive Robust Loss Function* (Barron) and of robust statistics;
convex problems are solved by bisection, others by a dense grid whose best points are refined by bisection.
"""

import numpy as np
import torch
from torch import Tensor

CONVEX = ("quadratic", "pseudo_huber", "huber", "barron(shape=1.5)", "barron(shape=1)")
NONCONVEX = ("welsch", "truncated_quadratic", "barron(shape=0.5)", "barron(shape=0)", "barron(shape=-2)")
ALL = (*CONVEX, *NONCONVEX, "absolute")
TWIN_MINIMA = (-2.18764281, -1.68238199, -0.41669139, 0.46605635, 1.40013254)  # of welsch: 2.47263 and 2.47212


def rows(count: int, n: int, outliers: float = 0.0, *, seed: int = 0, distance: float = 20.0) -> Tensor:
    """Normal samples, a share of which is moved far to one side."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, n, generator=generator, dtype=torch.float64)
    moved = int(outliers * n)
    x[:, :moved] += distance * (1 + torch.rand(count, moved, generator=generator, dtype=torch.float64))
    return x


def phi(penalty: str, z: np.ndarray, c: float, shape: float = 1.0) -> np.ndarray:
    """The penalty itself."""
    q = (z / c) ** 2
    if penalty == "quadratic":
        return z**2 / 2
    if penalty == "pseudo_huber":
        return c**2 * (np.sqrt(1 + q) - 1)
    if penalty == "huber":
        return np.where(np.abs(z) <= c, z**2 / 2, c * (np.abs(z) - c / 2))
    if penalty == "welsch":
        return c**2 * (1 - np.exp(-q / 2))
    if penalty == "truncated_quadratic":
        return np.minimum(z**2, c**2) / 2
    if penalty == "absolute":
        return np.abs(z)
    if penalty == "barron":
        b = abs(shape - 2)
        if shape == 2:
            return z**2 / 2
        if shape == -np.inf:
            return phi("welsch", z, c)
        if shape == 0:
            return c**2 * np.log1p(q / 2)
        return c**2 * b / shape * ((q / b + 1) ** (shape / 2) - 1)
    raise ValueError(penalty)


def total(
    penalty: str, u: np.ndarray, x: np.ndarray, c: float, shape: float = 1.0, w: np.ndarray | None = None
) -> np.ndarray:
    """Σ w·phi(u − x) for every u."""
    weights = np.ones_like(x) if w is None else w
    return (phi(penalty, u[:, None] - x[None, :], c, shape) * weights).sum(-1)


def slope(penalty: str, u: float, x: np.ndarray, c: float, shape: float = 1.0, w: np.ndarray | None = None) -> float:
    """Σ w·phi'(u − x), by the derivative of each formula."""
    z = u - x
    q = (z / c) ** 2
    psi = {
        "quadratic": lambda: z,
        "pseudo_huber": lambda: z / np.sqrt(1 + q),
        "huber": lambda: np.clip(z, -c, c),
        "welsch": lambda: z * np.exp(-q / 2),
        "barron": lambda: z * (1 + q / max(abs(shape - 2), 1e-300)) ** (shape / 2 - 1) if shape != 2 else z,
    }[penalty]()
    return float((psi if w is None else psi * w).sum())


def minimize_convex(
    penalty: str, x: np.ndarray, c: float = 1.0, shape: float = 1.0, w: np.ndarray | None = None
) -> float:
    """The root of the slope between the least and the greatest sample, by bisection."""
    low, high = x.min(), x.max()
    for _ in range(200):
        middle = (low + high) / 2
        if slope(penalty, middle, x, c, shape, w) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def least_total(penalty: str, x: np.ndarray, c: float = 1.0, shape: float = 1.0, w: np.ndarray | None = None) -> float:
    """The least value of Σ w·phi on a dense grid over the range and around every sample."""
    grid = np.concatenate([np.linspace(x.min(), x.max(), 4001), *(s + c * np.linspace(-2, 2, 41) for s in x)])
    found = total(penalty, grid, x, c, shape, w)
    best = grid[np.argsort(found)[:8]]
    step = max(np.ptp(x) / 4000, c / 10)
    for _ in range(40):
        around = np.concatenate([best, best - step, best + step])
        values = total(penalty, around, x, c, shape, w)
        best = around[np.argsort(values)[:8]]
        step /= 1.6
    return float(values.min())


def truncated_by_brute_force(x: np.ndarray, c: float) -> float:
    """The least Σ min((u − x)², c²)/2, over the means of all runs of the sorted samples."""
    s = np.sort(x)
    means = [s[i:j].mean() for i in range(len(s)) for j in range(i + 1, len(s) + 1)]
    return float(total("truncated_quadratic", np.array(means), x, c).min())


def name_and_shape(text: str) -> tuple[str, float]:
    """ "barron(shape=0.5)" as ("barron", 0.5)."""
    if "shape=" in text:
        return text.split("(")[0], float(text.split("shape=")[1].rstrip(")"))
    return text.split("(")[0], 1.0
