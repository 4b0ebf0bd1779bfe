"""The real data sets under HYPERBALL_DATA, each skipped where it is not there."""

import os

import pytest
import torch

from hyperball.data import Dataset, Files, MissingFiles, load, prepare
from hyperball.verdicts import COMMONEST

ROOT = os.environ.get("HYPERBALL_DATA")
pytestmark = pytest.mark.skipif(not ROOT, reason="set HYPERBALL_DATA to a folder of data sets")

COUNTS = {
    "cifar10": (50_000, 10_000, 10),
    "cifar100": (50_000, 10_000, 100),
    "mnist": (60_000, 10_000, 10),
    "fashion-mnist": (60_000, 10_000, 10),
    "modelnet40": (9_840, 2_468, 40),
    "imagewoof": (9_025, 3_929, 10),
    "tiny-imagenet": (100_000, 10_000, 200),
}


def load_or_skip(name: str) -> Dataset:
    try:
        return load(name, ROOT)
    except MissingFiles as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_published_ones(name: str) -> None:
    dataset = load_or_skip(name)
    train, test, classes = COUNTS[name]
    assert len(dataset.test) == test
    assert len(dataset.classes) == classes
    assert len(dataset.train) in ((train, 9_843) if name == "modelnet40" else (train,))
    summary = prepare(name, ROOT)
    assert min(summary.train.per_class) > 0
    assert min(summary.test.per_class) > 0


@pytest.mark.parametrize(
    "name, mean", [("cifar10", 0.4734), ("cifar100", 0.4782), ("mnist", 0.1307), ("fashion-mnist", 0.2860)]
)
def test_mean_pixel_is_the_published_one(name: str, mean: float) -> None:
    split = load_or_skip(name).train
    assert not isinstance(split, Files)
    found = sum(part.sum(dtype=torch.float64) for part in split.inputs.split(10_000)) / split.inputs.numel() / 255
    assert abs(float(found) - mean) < 1e-4


@pytest.mark.parametrize("name", COMMONEST)
def test_the_commonest_class_of_an_uneven_set_is_counted(name: str) -> None:
    labels = torch.as_tensor(load_or_skip(name).test.labels)
    assert float(labels.bincount().max() / len(labels)) == pytest.approx(COMMONEST[name])
