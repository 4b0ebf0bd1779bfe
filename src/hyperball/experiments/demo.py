"""The demo: plain and decoupled CNNs on digits, and three ways to pool point clouds, clean and with outliers.

Everything is computed on the CPU with one thread, so that the numbers are the same every time and everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperball import data
from hyperball.data import Dataset, Samples
from hyperball.experiments.catalog import RECIPES
from hyperball.training import Record, load_model, train

SEEDS = 3
EPOCHS = 10
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
OUTLIER_SEED = 7
PIXEL_SCALE = 255.0


@dataclass(frozen=True)
class Cell:
    """One network: its name, a sentence, and what it changes in the recipe of its set."""

    name: str
    about: str
    data: str
    changes: dict[str, Any] = field(default_factory=dict)


CELLS = (
    Cell("plain", "nn.Conv2d, BatchNorm, ReLU", "digits"),
    Cell("tanh + cosine", "bounded, with learned radii", "digits", {"model.magnitude": "tanh"}),
    Cell(
        "square cosine, no ReLU", "linear magnitude; the angle is the nonlinearity", "digits",
        {"model.magnitude": "linear", "model.angular": "square_cosine", "model.activation": "none"},
    ),
    Cell("plain, no ReLU", "the control: a linear network but for max pooling", "digits", {"model.activation": "none"}),
    Cell("max pooling", "PointNet's own", "clouds", {"model.pool": "max"}),
    Cell("mean pooling", "every point counts alike", "clouds", {"model.pool": "mean"}),
    Cell(
        "huber pooling", "robust: beyond a learned radius, a point pulls with bounded force", "clouds",
        {"model.pool": "huber(learn_c=True)"},
    ),
    Cell(
        "welsch pooling", "robust: a point far beyond the radius does not pull at all", "clouds",
        {"model.pool": "welsch(learn_c=True)"},
    ),
)  # fmt: skip

# In training all clouds and digits are clean; this share is what the table's column is about.
TABLE_SHARES = {"digits": 0.1, "clouds": 0.3}


@dataclass(frozen=True)
class Outcome:
    """What the seeds of one cell gave: accuracies in [0, 1], those under outliers by their share, and seconds."""

    cell: Cell
    last: tuple[float, ...]
    first_epoch: tuple[float, ...]
    outliers: dict[float, tuple[float, ...]]
    seconds: tuple[float, ...]


def sets() -> dict[str, Dataset]:
    """The two sets; fewer and smaller clouds than `hyperball.data` makes by default."""
    return {"digits": data.load("digits"), "clouds": data.clouds(train=1000, test=400, points=128)}


def folder_name(cell: Cell) -> str:
    return "".join(c if c.isalnum() else "-" for c in cell.name)


def run(
    folder: Path, *, seeds: int = SEEDS, epochs: int = EPOCHS, say: Callable[[str], object] = print
) -> list[Outcome]:
    """Train every cell into folder/SET/CELL/seed-N, or go on with what is there, and measure it."""
    for name, value in (("seeds", seeds), ("epochs", epochs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be a whole number >= 1, got {value!r}")
    outcomes = []
    with one_thread():
        known = sets()
        for number, cell in enumerate(CELLS, 1):
            outcomes.append(run_cell(cell, known[cell.data], folder, seeds, epochs))
            last = 100 * sum(outcomes[-1].last) / seeds
            say(f"{number}/{len(CELLS)}  {cell.data}: {cell.name}, {last:.1f} % in {sum(outcomes[-1].seconds):.0f} s")
    return outcomes


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums keep one order, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_cell(cell: Cell, dataset: Dataset, folder: Path, seeds: int, epochs: int) -> Outcome:
    records, accuracies = [], []
    for seed in range(seeds):
        place = folder / cell.data / folder_name(cell) / f"seed-{seed}"
        records.append(train_one(cell, dataset, place, seed, epochs))
        accuracies.append([accuracy(place, dataset, share) for share in SHARES])
    return Outcome(
        cell,
        tuple(record.results["last"]["top1"] for record in records),
        tuple(record.results["first_epoch"]["top1"] for record in records),
        dict(zip(SHARES, zip(*accuracies, strict=True), strict=True)),
        tuple(record.timing["seconds"] for record in records),
    )


def train_one(cell: Cell, dataset: Dataset, place: Path, seed: int, epochs: int) -> Record:
    changes = {"epochs": epochs, "seed": seed, "deterministic": True, "schedule.name": "cosine"}
    # Losses at the ends of epochs, and one checkpoint at the end: nobody resumes a run of seconds.
    log = {"log.every": 10**6, "log.checkpoint_every": epochs}
    recipe = RECIPES[cell.data].recipe.override({**changes, **log, **cell.changes})
    return train(recipe, place, resume=True, dataset=dataset, accelerator="cpu")


@torch.no_grad()
def accuracy(place: Path, dataset: Dataset, share: float) -> float:
    """The test accuracy of a run when a share of the points or pixels are outliers."""
    network = load_model(place, dataset=dataset)
    assert isinstance(dataset.test, Samples)
    inputs, labels = dataset.test.inputs, dataset.test.labels
    if dataset.kind == "points":
        inputs = data.outliers(inputs, share, OUTLIER_SEED)
    else:
        inputs = pixel_outliers(inputs.float() / PIXEL_SCALE, share)
    return float((network(inputs).argmax(1) == labels).double().mean())


def pixel_outliers(images: Tensor, share: float) -> Tensor:
    """That share of the pixels replaced by uniform samples of [0, 1]; a larger share keeps a smaller one's."""
    generator = torch.Generator().manual_seed(OUTLIER_SEED)
    chosen = torch.rand(images.shape, generator=generator) < share
    return torch.where(chosen, torch.rand(images.shape, generator=generator), images)
