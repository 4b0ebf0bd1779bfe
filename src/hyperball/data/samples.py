"""Values that data code passes around: a split in memory, a split on disk, a data set, a normalization."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hyperball.data.errors import DataError


@dataclass(frozen=True)
class Normalization:
    """(x - mean) / std per channel, both in units of pixels in [0, 1]."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (128 / 255,)

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"`mean` and `std` must have one entry a channel each, got {self.mean} and {self.std}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"`std` must be > 0, got {self.std}")

    def __call__(self, images: Tensor) -> Tensor:
        """(x - mean) / std for images [..., C, H, W] in [0, 1]; a single channel stands for all."""
        if len(self.mean) == 1:  # numbers, which need no copy to the device
            return (images - self.mean[0]) / self.std[0]
        if images.dim() < 3 or images.shape[-3] != len(self.mean):
            raise ValueError(f"`images` must have {len(self.mean)} channels, got shape {tuple(images.shape)}")
        mean, std = (images.new_tensor(value).view(-1, 1, 1) for value in (self.mean, self.std))
        return (images - mean) / std


PIXELS = Normalization()  # (x - 127.5) / 128 in units of bytes
IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, eq=False)
class Samples:
    """A split in memory: inputs, uint8 [N, C, H, W] or float32 [N, P, 3], and labels, int64 [N]."""

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.inputs.dim() == 0 or self.labels.shape != self.inputs.shape[:1]:
            shapes = f"{tuple(self.inputs.shape)} and {tuple(self.labels.shape)}"
            raise DataError(f"`inputs` and `labels` must have one entry a sample, got shapes {shapes}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def to(self, device: torch.device | str) -> "Samples":
        """The same samples on a device."""
        return Samples(self.inputs.to(device), self.labels.to(device))

    def subset(self, n: int) -> "Samples":
        """The first samples of every class, n in all, as many a class as the classes allow, in their own order."""
        chosen = balanced(self.labels.tolist(), n)
        index = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        return Samples(self.inputs[index], self.labels[index])

    def with_points(self, n: int) -> "Samples":
        """The first n points of every cloud."""
        if self.inputs.dim() != 3 or not 1 <= n <= self.inputs.shape[1]:
            raise DataError(f"`n` must be in 1..P for clouds [N, P, 3], got {n} for {tuple(self.inputs.shape)}")
        return Samples(self.inputs[:, :n].contiguous(), self.labels)


@dataclass(frozen=True)
class Files:
    """A split on disk: image files and their labels, decoded when they are needed."""

    paths: tuple[Path, ...]
    targets: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def labels(self) -> Tensor:
        return torch.tensor(self.targets, dtype=torch.int64)

    def subset(self, n: int) -> "Files":
        """The first files of every class, n in all, as many a class as the classes allow."""
        chosen = balanced(self.targets, n)
        return Files(tuple(self.paths[i] for i in chosen), tuple(self.targets[i] for i in chosen))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: its splits, what its classes are called and how its pixels are normalized."""

    name: str
    kind: Literal["images", "points"]
    classes: tuple[str, ...]
    train: Samples | Files
    test: Samples | Files
    normalization: Normalization = PIXELS

    def subset(self, train: int | None = None, test: int | None = None) -> "Dataset":
        """The same set with at most that many samples a split."""
        return replace(
            self,
            train=self.train if train is None else self.train.subset(train),
            test=self.test if test is None else self.test.subset(test),
        )

    def in_memory(self) -> tuple[Samples, Samples]:
        """Both splits as tensors, or an error where the set is files to be streamed."""
        if isinstance(self.train, Files) or isinstance(self.test, Files):
            raise DataError(f"{self.name} is a set of image files; use `stream`, or `decode` to hold it in memory")
        return self.train, self.test


def balanced(labels: Sequence[int], n: int) -> list[int]:
    """Indices of n samples, filled round by round with one sample of every class, in ascending order."""
    if not 1 <= n <= len(labels):
        raise DataError(f"`n` must be in 1..{len(labels)}, the number of samples, got {n}")
    seen: dict[int, int] = {}
    rounds = []
    for index, label in enumerate(labels):
        rounds.append((seen.get(label, 0), label, index))
        seen[label] = seen.get(label, 0) + 1
    return sorted(index for _, _, index in sorted(rounds)[:n])
