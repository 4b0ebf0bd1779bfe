"""What the tests of training share: a small set, small recipes, and reading a run back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperball import data
from hyperball.training import Recipe, Record, Silent, read_metrics, train
from hyperball.training.storage.checkpoint import load_checkpoint

BATCH = 32
PER_EPOCH = 6
SMALL: dict[str, Any] = {
    "data.train_size": BATCH * PER_EPOCH, "data.test_size": 50, "batch_size": BATCH, "epochs": 2, "log.every": 1,
    "optimizer.lr": 1e-2, "deterministic": True,
}  # fmt: skip
DECOUPLED = {"model.magnitude": "tanh"}


def small(changes: dict[str, Any] | None = None) -> Recipe:
    """Twelve steps on digits in about a second."""
    return Recipe().override({**SMALL, **(changes or {})})


def run(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Record:
    return train(small(changes), folder, accelerator="cpu", **options)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the latest checkpoint."""
    sections = load_checkpoint(folder / "checkpoints")[0].tensors
    return {f"{name}/{key}": tensor for name, held in sections.items() for key, tensor in held.items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def noise(n: int = 64, size: int = 8) -> data.Dataset:
    """Random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (n, 1, size, size), generator=generator, dtype=torch.uint8)
    samples = data.Samples(pixels, torch.arange(n) % 10)
    return data.Dataset("noise", "images", tuple("0123456789"), samples, samples)


class Heard(Silent):
    """Keeps the names and contents of all calls, and may act at a report."""

    def __init__(self, at_report: Callable[[Any], None] | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.at_report = at_report

    def started(self, run: Any) -> None:
        self.calls.append(("started", run))

    def trained(self, report: Any) -> None:
        self.calls.append(("trained", report))
        if self.at_report is not None:
            self.at_report(report)

    def evaluated(self, report: Any) -> None:
        self.calls.append(("evaluated", report))

    def noted(self, text: str) -> None:
        self.calls.append(("noted", text))

    def finished(self, record: Any) -> None:
        self.calls.append(("finished", record))

    def of(self, name: str) -> list[Any]:
        return [content for kind, content in self.calls if kind == name]


def write_images(folder: Path) -> Path:
    """A folder of 48 small images of two classes, half of them to train on."""
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for index in range(48):
        path = folder / ("train", "val")[index % 2] / "ab"[index // 2 % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(torch.randint(256, (40, 48, 3), dtype=torch.uint8).numpy()).save(path)
    return folder
