"""Procedural point clouds: ten parametric solids, y up, each with its own proportions, turn and tilt."""

import math
from collections.abc import Callable

import numpy as np
import torch

from hyperball.data.errors import DataError
from hyperball.data.samples import Dataset, Samples

Array = np.ndarray
Solid = Callable[[np.random.Generator, int, int], Array]  # (generator, clouds, points) -> [clouds, points, 3]


def sphere(rng: np.random.Generator, n: int, points: int) -> Array:
    """x / |x| with x normal."""
    x = rng.standard_normal((n, points, 3))
    return x / np.linalg.norm(x, axis=2, keepdims=True)


def cube(rng: np.random.Generator, n: int, points: int) -> Array:
    """Uniform on the faces of [-1, 1]³."""
    x = rng.uniform(-1, 1, (n, points, 3))
    axis, side = rng.integers(3, size=(n, points, 1)), rng.choice([-1.0, 1.0], (n, points, 1))
    np.put_along_axis(x, axis, side, axis=2)
    return x


def disk(rng: np.random.Generator, n: int, points: int) -> tuple[Array, Array]:
    """x and z, uniform in the unit disk."""
    radius, angle = np.sqrt(rng.random((n, points))), rng.uniform(0, 2 * math.pi, (n, points))
    return radius * np.cos(angle), radius * np.sin(angle)


def cylinder(rng: np.random.Generator, n: int, points: int) -> Array:
    """Side and lids of radius 1 and height 1 to 3, by area."""
    height, (x, z) = rng.uniform(1, 3, (n, 1)), disk(rng, n, points)
    on_side = rng.random((n, points)) < height / (height + 1)
    radius = np.where(on_side, np.hypot(x, z), 1)
    level = np.where(on_side, rng.uniform(-0.5, 0.5, (n, points)), rng.choice([-0.5, 0.5], (n, points)))
    return np.stack([x / radius, height * level, z / radius], axis=2)


def cone(rng: np.random.Generator, n: int, points: int) -> Array:
    """Mantle y = h (1 - r) and base of radius 1, height 1 to 3, by area."""
    height, (x, z) = rng.uniform(1, 3, (n, 1)), disk(rng, n, points)
    slant = np.sqrt(1 + height**2)
    on_mantle = rng.random((n, points)) < slant / (slant + 1)
    return np.stack([x, np.where(on_mantle, height * (1 - np.hypot(x, z)), 0), z], axis=2)


def torus(rng: np.random.Generator, n: int, points: int) -> Array:
    """((1 + r cos v) cos u, r sin v, (1 + r cos v) sin u) with r from 0.2 to 0.5."""
    r = rng.uniform(0.2, 0.5, (n, 1))
    u, v = rng.uniform(0, 2 * math.pi, (2, n, points))
    return np.stack([(1 + r * np.cos(v)) * np.cos(u), r * np.sin(v), (1 + r * np.cos(v)) * np.sin(u)], axis=2)


def pyramid(rng: np.random.Generator, n: int, points: int) -> Array:
    """The cone's formula over the square [-1, 1]²: y = h (1 - max(|x|, |z|)), and the base."""
    height, (x, z) = rng.uniform(1, 3, (n, 1)), rng.uniform(-1, 1, (2, n, points))
    slant = np.sqrt(1 + height**2)
    on_mantle = rng.random((n, points)) < slant / (slant + 1)
    return np.stack([x, np.where(on_mantle, height * (1 - np.maximum(abs(x), abs(z))), 0), z], axis=2)


def capsule(rng: np.random.Generator, n: int, points: int) -> Array:
    """A unit sphere pulled apart by 1 to 3 along y, with the tube between its halves, by area."""
    height, ball = rng.uniform(1, 3, (n, 1)), sphere(rng, n, points)
    on_tube = rng.random((n, points)) < height / (height + 2)
    x, y, z = np.moveaxis(ball, 2, 0)
    radius = np.where(on_tube, np.hypot(x, z), 1)
    level = np.where(on_tube, rng.uniform(-0.5, 0.5, (n, points)) * height, y + np.sign(y) * height / 2)
    return np.stack([x / radius, level, z / radius], axis=2)


def dome(rng: np.random.Generator, n: int, points: int) -> Array:
    """Upper half of the unit sphere and its base, by area."""
    ball, (x, z) = sphere(rng, n, points), disk(rng, n, points)
    ball[..., 1] = abs(ball[..., 1])
    base = np.stack([x, np.zeros_like(x), z], axis=2)
    return np.where(rng.random((n, points, 1)) < 2 / 3, ball, base)


def octahedron(rng: np.random.Generator, n: int, points: int) -> Array:
    """Uniform on |x| + |y| + |z| = 1."""
    return rng.dirichlet((1, 1, 1), (n, points)) * rng.choice([-1.0, 1.0], (n, points, 3))


def helix(rng: np.random.Generator, n: int, points: int) -> Array:
    """A tube of radius 0.15 about (cos t, h t, sin t) with 1.5 to 3 turns and height 2."""
    turns = rng.uniform(1.5, 3, (n, 1))
    level = rng.uniform(-1, 1, (n, points))
    angle = math.pi * turns * level
    center = np.stack([np.cos(angle), level, np.sin(angle)], axis=2)
    return center + 0.15 * sphere(rng, n, points)


SOLIDS: dict[str, Solid] = {
    "sphere": sphere,
    "cube": cube,
    "cylinder": cylinder,
    "cone": cone,
    "torus": torus,
    "pyramid": pyramid,
    "capsule": capsule,
    "dome": dome,
    "octahedron": octahedron,
    "helix": helix,
}


def clouds(train: int = 2000, test: int = 500, points: int = 256, seed: int = 0) -> Dataset:
    """Balanced splits of the ten solids, inside the unit sphere, the same for the same arguments."""
    for name, value, least in (("train", train, 10), ("test", test, 10), ("points", points, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"`{name}` must be at least {least}, got {value}")
    first, second = (split(size, points, np.random.default_rng((seed, i))) for i, size in enumerate((train, test)))
    return Dataset("clouds", "points", tuple(SOLIDS), first, second)


def split(size: int, points: int, rng: np.random.Generator) -> Samples:
    """Clouds of every solid in turn: sample i is of class i modulo the number of solids."""
    inputs = np.empty((size, points, 3), np.float32)
    for label, solid in enumerate(SOLIDS.values()):
        count = len(range(label, size, len(SOLIDS)))
        inputs[label :: len(SOLIDS)] = posed(solid(rng, count, points), rng)
    return Samples(torch.from_numpy(inputs), torch.arange(size) % len(SOLIDS))


def posed(cloud: Array, rng: np.random.Generator) -> Array:
    """Stretched by 0.7 to 1.3 an axis, tilted by up to 30 degrees, turned, roughened, brought to the unit sphere."""
    n = len(cloud)
    cloud = cloud * rng.uniform(0.7, 1.3, (n, 1, 3))
    first, second = rng.uniform(0, 2 * math.pi, (2, n))
    tilt = rng.uniform(-math.pi / 6, math.pi / 6, n)
    cloud = cloud @ turn(first, 1) @ turn(tilt, 0) @ turn(second, 1)
    return unit_sphere(cloud + 0.01 * rng.standard_normal(cloud.shape))


def turn(angle: Array, axis: int) -> Array:
    """Rotation matrices [N, 3, 3] about a coordinate axis."""
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrix = np.zeros((len(angle), 3, 3))
    matrix[:, axis, axis] = 1
    matrix[:, i, i] = matrix[:, j, j] = np.cos(angle)
    matrix[:, i, j], matrix[:, j, i] = -np.sin(angle), np.sin(angle)
    return matrix


def unit_sphere(cloud: Array) -> Array:
    """(x - mean) / max |x - mean|."""
    cloud = cloud - cloud.mean(axis=1, keepdims=True)
    size = np.linalg.norm(cloud, axis=2).max(axis=1)
    return cloud / np.maximum(size, np.finfo(np.float32).tiny)[:, None, None]
