"""Batches of image files: torchvision v2 in DataLoader workers, random per sample from (seed, epoch, index)."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from hyperball.data.augment import Augment
from hyperball.data.batches import Schedule
from hyperball.data.errors import DataError, one_line, optional
from hyperball.data.samples import Files, Samples

Transform = Callable[[Tensor], Tensor]
EVALUATION_SCALE = 256 / 224  # the shorter side before a crop, relative to the crop


def train_transform(size: int) -> Transform:
    """RandomResizedCrop (8 to 100 % of the area)."""
    v2 = optional("torchvision.transforms.v2")
    crop: Transform = v2.RandomResizedCrop(size, antialias=True)
    return crop


def shorter_side(size: int) -> int:
    """256/224 of the size: what the shorter side of an image becomes before a crop of that size."""
    return round(size * EVALUATION_SCALE)


def center(size: int, shorter: int) -> Transform:
    """The shorter side to `shorter`, then the center of that size."""
    v2 = optional("torchvision.transforms.v2")
    return v2.Compose([v2.Resize(shorter, antialias=True), v2.CenterCrop(size)])


def evaluation_transform(size: int) -> Transform:
    """The shorter side to 256/224 of the size, then the center."""
    return center(size, shorter_side(size))


def read_image(path: Path) -> Tensor:
    """An image file as uint8 [3, H, W]; gray, palette and CMYK images become RGB."""
    image_module = optional("PIL.Image")
    to_image = optional("torchvision.transforms.v2").functional.pil_to_tensor
    try:
        with image_module.open(path) as image:
            return to_image(image.convert("RGB"))
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; unpack the set again") from error
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise DataError(f"{path} is not a whole image ({one_line(error)}); unpack the set again") from error


class Decoded(TorchDataset[tuple[Tensor, Tensor]]):
    """Items by (index, random word): the file's image through the transform, under a generator of its own."""

    def __init__(self, files: Files, transform: Transform) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: tuple[int, int]) -> tuple[Tensor, Tensor]:
        index, key = item
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(key)
        try:
            image = self.transform(read_image(self.files.paths[index]))
        finally:
            torch.default_generator.set_state(state)
        return image, torch.tensor(self.files.targets[index])


def collate(items: list[tuple[Tensor, Tensor]], size: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch, which is empty where a short batch leaves nothing for a rank."""
    if not items:
        return torch.empty(0, 3, size, size, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    images, labels = zip(*items)
    return torch.stack(images), torch.stack(labels)


Plan = list[list[tuple[int, int]]]


class Planned(Sampler[list[tuple[int, int]]]):
    """The batches of the epoch that is read: a loader whose workers stay asks for them anew in every epoch."""

    def __init__(self) -> None:
        self.plan: Plan = []

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.plan)


class Stream:
    """Batches of image files with the protocol of `Batches`: `len`, `epoch(n, start_step)`; see `stream`.

    Workers stay from epoch to epoch; an epoch that is read while another one is has workers of its own.
    """

    def __init__(
        self, items: Decoded, schedule: Schedule, *, size: int, workers: int, device: torch.device, timeout: float,
        augment: Augment | None = None,
    ) -> None:  # fmt: skip
        self.items, self.schedule, self.size = items, schedule, size
        self.augment = augment or Augment()
        self.workers, self.device, self.timeout = workers, device, timeout
        self._idle: tuple[DataLoader[tuple[Tensor, Tensor]], Planned] | None = None

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.schedule)

    def plan(self, epoch: int, start_step: int = 0) -> Plan:
        """The (index, random word) pairs of this rank's part of every batch from a step on."""
        order = self.schedule.order(epoch, torch.device("cpu"))
        pairs = list(zip(order.indices.tolist(), order.keys.tolist()))
        return [pairs[self.schedule.slice(step)] for step in self.schedule.steps(start_step)]

    def epoch(self, n: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch n from a step on: float [0, 1] images and labels, on the device."""
        return self._batches(self.plan(n, start_step))

    def _loader(self) -> tuple[DataLoader[tuple[Tensor, Tensor]], Planned]:
        sampler = Planned()
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            self.items,
            batch_sampler=sampler,
            num_workers=self.workers,
            collate_fn=partial(collate, size=self.size),
            pin_memory=self.device.type == "cuda",
            timeout=self.timeout if self.workers else 0,
            generator=torch.Generator(),  # the loader's own draw must not move the generator of the training
            persistent_workers=self.workers > 0,
        )
        return loader, sampler

    def _batches(self, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
        held, self._idle = self._idle or self._loader(), None
        loader, sampler = held
        sampler.plan = plan
        try:
            for part, (images, labels) in zip(plan, loader):
                keys = torch.tensor([key for _, key in part], dtype=torch.int64).to(self.device, non_blocking=True)
                images = self.augment(images.to(self.device, non_blocking=True), keys)
                yield images, labels.to(self.device, non_blocking=True)
        except DataError as error:  # a worker's comes wrapped in its traceback, whose last line is the message
            error.__traceback__ = None  # its frames would keep the workers alive
            raise DataError(str(error).strip().splitlines()[-1].rpartition("DataError: ")[2]) from None
        self._idle = held


def stream(
    files: Files,
    batch_size: int,
    *,
    size: int = 224,
    augment: bool | Augment = False,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    rank: int = 0,
    world_size: int = 1,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    timeout: float = 300.0,
) -> Stream:
    """Batches of image files, decoded by worker processes: random resized crops with `augment`, else centers.

    True flips too; an `Augment` says what is done after the crop, which is its `flip` and `cutout` and nothing else.
    A sample's crop depends on (seed, epoch, index) alone: not on the workers, the rank, or where an epoch was resumed.
    """
    if not isinstance(files, Files):
        raise ValueError(f"`files` must be the Files of an image-folder set, got {type(files).__name__}; use Batches")
    if size < 1:
        raise ValueError(f"`size` must be >= 1, got {size}")
    if workers is None:
        workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if workers < 0:
        raise ValueError(f"`workers` must be >= 0, got {workers}")
    after = Augment(flip=True) if augment is True else augment or Augment()
    if after.crop or after.window or after.resized or after.rotate or after.jitter or after.points:
        raise ValueError(f"`augment` must have `flip` and `cutout` alone after a random resized crop, got {after}")
    schedule = Schedule(
        len(files), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank, world_size=world_size
    )
    transform = train_transform(size) if augment else evaluation_transform(size)
    items = Decoded(files, transform)
    place = torch.device(device)
    return Stream(items, schedule, size=size, workers=workers, device=place, timeout=timeout, augment=after)


def decode(files: Files, size: int, *, shorter: int | None = None, workers: int = 4) -> Samples:
    """All the files in memory as uint8 [N, 3, size, size]: the shorter side to `shorter` (`size`), then the center."""
    if size < 1:
        raise ValueError(f"`size` must be >= 1, got {size}")
    if shorter is not None and shorter < size:
        raise ValueError(f"`shorter` must be at least `size`, {size}, got {shorter}")
    transform = center(size, size if shorter is None else shorter)
    inputs = torch.empty(len(files), 3, size, size, dtype=torch.uint8)

    def fill(index: int) -> None:
        inputs[index] = transform(read_image(files.paths[index]))

    with ThreadPoolExecutor(max(1, workers)) as pool:
        for _ in pool.map(fill, range(len(files)), chunksize=64):
            pass
    return Samples(inputs, files.labels)
