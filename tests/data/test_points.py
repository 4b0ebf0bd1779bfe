"""Procedural clouds and outliers: shapes that are what they are called, shares that are exact."""

import numpy as np
import pytest
import torch

from hyperball.data import DataError, clouds, load, outliers
from hyperball.data.readers.clouds import SOLIDS


def test_clouds_are_balanced_centered_and_in_the_unit_sphere() -> None:
    dataset = load("clouds")
    for split, size in ((dataset.train, 2000), (dataset.test, 500)):
        assert split.inputs.shape == (size, 256, 3)
        assert split.inputs.dtype == torch.float32
        assert torch.bincount(split.labels).tolist() == [size // 10] * 10
        torch.testing.assert_close(split.inputs.norm(dim=2).amax(1), torch.ones(size))
        assert split.inputs.mean(1).abs().max() < 1e-6
    assert len(dataset.classes) == 10


def test_clouds_are_the_same_for_the_same_seed_and_different_for_another() -> None:
    first, same, other = clouds(20, 10, 32), clouds(20, 10, 32), clouds(20, 10, 32, seed=1)
    assert torch.equal(first.train.inputs, same.train.inputs)
    assert not torch.equal(first.train.inputs, other.train.inputs)
    assert not torch.equal(first.train.inputs[:10], first.test.inputs)
    assert len(torch.unique(first.train.inputs[:, 0, 0])) == 20


def on_surface(name: str, cloud: np.ndarray) -> np.ndarray:
    """The residual of a solid's implicit equation, for solids that have a short one."""
    x, y, z = np.moveaxis(cloud, 2, 0)
    radius = np.hypot(x, z)
    if name == "sphere":
        return np.sqrt(x**2 + y**2 + z**2) - 1
    if name == "cube":
        return abs(cloud).max(axis=2) - 1
    if name == "octahedron":
        return abs(cloud).sum(axis=2) - 1
    if name == "dome":
        return np.minimum(abs(np.hypot(radius, y) - 1), abs(y))
    if name in ("cone", "pyramid"):
        spread = radius if name == "cone" else np.maximum(abs(x), abs(z))
        height = np.where(y > 1e-9, y / np.maximum(1 - spread, 1e-9), np.nan)
        return np.where(y > 1e-9, height - np.nanmedian(height, axis=1, keepdims=True), 0)
    if name in ("cylinder", "capsule"):
        return np.maximum(radius - 1, 0)
    if name == "torus":
        tube = np.hypot(radius - 1, y)
        return tube - tube.mean(axis=1, keepdims=True)
    return np.maximum(abs(radius - 1) - 0.15, 0)


@pytest.mark.parametrize("name", SOLIDS)
def test_points_lie_on_the_solid_they_are_named_after(name: str) -> None:
    cloud = SOLIDS[name](np.random.default_rng(0), 8, 500)
    assert cloud.shape == (8, 500, 3)
    assert np.isfinite(cloud).all()
    assert abs(on_surface(name, cloud)).max() < 1e-6


@pytest.mark.parametrize("name", ["sphere", "cube", "octahedron"])
def test_solids_with_a_center_are_sampled_evenly_on_both_sides(name: str) -> None:
    cloud = SOLIDS[name](np.random.default_rng(1), 1, 40_000)[0]
    assert abs(cloud.mean(axis=0)).max() < 0.02
    assert abs((cloud > 0).mean(axis=0) - 0.5).max() < 0.01


@pytest.mark.parametrize("option", [{"train": 9}, {"test": 0}, {"points": 0}, {"seed": -1}])
def test_impossible_clouds_are_refused(option: dict[str, int]) -> None:
    with pytest.raises(DataError, match=f"`{next(iter(option))}`"):
        clouds(**option)


@pytest.mark.parametrize("share, count", [(0.0, 0), (0.1, 10), (0.5, 50), (0.9, 90), (0.555, 56), (1.0, 100)])
def test_share_of_outliers_is_exact_in_every_cloud(share: float, count: int) -> None:
    points = 5 + torch.rand(30, 100, 3)
    found = outliers(points, share, 0)
    changed = (found != points).any(2)
    assert changed.sum(1).tolist() == [count] * 30
    assert (found[changed].norm(dim=1) <= 1).all()
    assert torch.equal(found[~changed], points[~changed])


def test_outliers_are_uniform_in_the_unit_ball() -> None:
    found = outliers(torch.full((100, 500, 3), 9.0), 1.0, 3).reshape(-1, 3).double()
    cubes = found.norm(dim=1) ** 3
    counts = torch.histc(cubes, 20, 0, 1)
    assert ((counts - 2500) ** 2 / 2500).sum() < 50  # 99.98 % of 19 degrees of freedom
    assert found.mean(0).abs().max() < 0.01
    torch.testing.assert_close(found.T @ found / len(found), 0.2 * torch.eye(3).double(), atol=5e-3, rtol=0)


def test_outliers_of_a_cloud_depend_on_the_seed_and_its_place_alone() -> None:
    points = torch.rand(2000, 16, 3)
    whole = outliers(points, 0.5, 7)
    assert torch.equal(outliers(points[:50], 0.5, 7), whole[:50])
    assert torch.equal(outliers(points, 0.5, 7), whole)
    assert not torch.equal(outliers(points, 0.5, 8), whole)
    places = (whole != points).any(2)
    assert len(torch.unique(places, dim=0)) > 1800  # of the 12,870 ways to choose 8 of 16


def test_larger_share_keeps_the_outliers_of_a_smaller_one() -> None:
    points = 5 + torch.rand(20, 64, 3)
    few, many = outliers(points, 0.25, 1), outliers(points, 0.75, 1)
    changed = (few != points).any(2)
    assert torch.equal(few[changed], many[changed])


def test_generator_may_stand_for_the_seed() -> None:
    points = torch.rand(4, 16, 3)
    first, second = (outliers(points, 0.5, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    generator = torch.Generator().manual_seed(1)
    assert not torch.equal(outliers(points, 0.5, generator), outliers(points, 0.5, generator))


def test_single_cloud_and_doubles_keep_their_form() -> None:
    points = torch.rand(16, 3, dtype=torch.float64)
    found = outliers(points, 0.5)
    assert found.shape == (16, 3)
    assert found.dtype == torch.float64


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="`share` must be in"):
        outliers(torch.rand(2, 4, 3), share)


@pytest.mark.parametrize("points", [torch.rand(4, 2), torch.zeros(2, 4, 3, dtype=torch.uint8), torch.rand(3)])
def test_outliers_of_what_are_not_clouds_are_refused(points: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="`points` must be float clouds"):
        outliers(points, 0.5)


def test_first_points_of_a_cloud() -> None:
    samples = clouds(20, 10, 32).train
    assert torch.equal(samples.with_points(5).inputs, samples.inputs[:, :5])
    with pytest.raises(DataError, match="`n` must be in"):
        samples.with_points(33)
