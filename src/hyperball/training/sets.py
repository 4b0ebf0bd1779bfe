"""The data of a recipe: the set, cut down, with outliers, as batches for one process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from hyperball import data
from hyperball.data import Augment, Batches, Dataset, Files, Samples
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import STATISTICS, DataConfig

OUTLIER_SEEDS = {"train": 1, "test": 2}
SPLITS = tuple(OUTLIER_SEEDS)


@dataclass(frozen=True)
class Source:
    """Where sets come from: a folder of data, or one that a caller holds, whatever its name."""

    root: str | Path | None = None
    download: bool = False
    dataset: Dataset | None = None


def load_set(
    config: DataConfig,
    source: Source = Source(),  # noqa: B008 (frozen)
    used: Collection[str] = SPLITS,
) -> Dataset:
    """The set that a recipe names, with as many samples and points as it says, and its outliers.

    Clouds of a split that is not `used` keep their points: outliers for many thousands of them take seconds.
    """
    dataset = source.dataset or data.load(config.name, source.root, download=source.download)
    for split in SPLITS:
        size, count = getattr(config, f"{split}_size"), len(getattr(dataset, split))
        if size is not None and size > count:
            raise RecipeError(f"`data.{split}_size` must be at most the {count} samples of {dataset.name}, got {size}")
    dataset = dataset.subset(config.train_size, config.test_size)
    check_kind(config, dataset)
    for split in used:
        samples = getattr(dataset, split)
        if config.points is not None:
            samples = samples.with_points(config.points)
        if config.outliers:
            inputs = data.outliers(samples.inputs, config.outliers, OUTLIER_SEEDS[split])
            samples = Samples(inputs, samples.labels)
        dataset = replace(dataset, **{split: samples})
    return dataset


WINDOW: Final = "window"
PART: Final = "part"
MOST_BYTES = 16 * 2**30  # of image files that are held in memory
FOR_IMAGES = ("crop", "flip", "cutout")
FOR_POINTS = ("points", "outliers", "rotate", "jitter")


def check_kind(config: DataConfig, dataset: Dataset) -> None:
    """Refuse options of images for points, and the other way round."""
    if isinstance(dataset.train, Files):
        for name, allowed in (("crop", (None, WINDOW, PART)), ("pad", (DataConfig().pad,))):
            if getattr(config, name) not in allowed:
                raise RecipeError(
                    f"`data.{name}` is for images in memory, got {getattr(config, name)!r} for the files of "
                    f"{dataset.name}, whose crops are random parts resized to `data.image_size`, or windows"
                )
    elif config.crop == WINDOW:
        raise RecipeError(f'`data.crop` "window" is for image files, got it for {dataset.name}, which is in memory')
    wrong, other = (FOR_POINTS, "points") if dataset.kind == "images" else (FOR_IMAGES, "images")
    for name in wrong:
        if getattr(config, name):
            raise RecipeError(
                f"`data.{name}` is for {other}, got {getattr(config, name)!r} for the {dataset.kind} of {dataset.name}"
            )
    check_sizes(config, dataset)


def check_sizes(config: DataConfig, dataset: Dataset) -> None:
    """Refuse more points than a cloud has, and padding or holes larger than an image."""
    if isinstance(dataset.train, Files):
        limits = {"cutout": config.image_size}
    elif dataset.kind == "images":
        side = min(dataset.train.inputs.shape[-2:])
        limits = {"cutout": side, **({"pad": side} if config.crop in ("mirror", "zero") else {})}
        if config.crop == PART and dataset.train.inputs.shape[-1] != dataset.train.inputs.shape[-2]:
            shape = "×".join(map(str, dataset.train.inputs.shape[-2:]))
            raise RecipeError(f'`data.crop` "part" is for square images, got {dataset.name} with {shape} pixels')
    else:
        limits = {"points": int(dataset.train.inputs.shape[1])}
    for name, limit in limits.items():
        value = getattr(config, name)
        if value is not None and value > limit:
            unit = "points of a cloud" if name == "points" else "pixels of an image's side"
            raise RecipeError(f"`data.{name}` must be at most the {limit} {unit} of {dataset.name}, got {value}")


FOR_TRAINING = ("train_size", "crop", "pad", "flip", "cutout", "rotate", "jitter")


def for_evaluation(config: DataConfig, known: DataConfig) -> DataConfig:
    """A set's test split alone: what concerns training has its default, or is refused where neither has `known`."""
    default = DataConfig()
    for name in FOR_TRAINING:
        value = getattr(config, name)
        if value not in (getattr(default, name), getattr(known, name)):
            raise RecipeError(f"`data.{name}` acts on training alone and changes no evaluation, got {value!r}")
    return config.override({name: getattr(default, name) for name in FOR_TRAINING})


def held_source(recipe: Recipe, source: Source) -> Source:
    """A source that reads the set of a recipe once, where conditions need it again."""
    if not recipe.log.conditions or source.dataset is not None:
        return source
    return Source(dataset=data.load(recipe.data.name, source.root, download=source.download))


def condition_inputs(recipe: Recipe, dataset: Dataset, source: Source) -> dict[str, Tensor]:
    """The inputs of the test split under `log.conditions` that change them: as many, of one shape, with its labels."""
    own, made = dataset.test, dict[str, Tensor]()
    for name, whole in recipe.log.conditions.items():
        changes = {key: value for key, value in whole.items() if key != STATISTICS}
        if not changes:
            continue
        if not isinstance(own, Samples):
            raise RecipeError(
                f"`log.conditions` is for sets in memory, got the files of {dataset.name} and {name!r}, of which "
                f"`{STATISTICS}` alone would do"
            )
        try:
            config = for_evaluation(recipe.data.override(changes), recipe.data)
            test = load_set(config, source, used=("test",)).test
        except RecipeError as error:
            raise RecipeError(f"`log.conditions.{name}`: {error}") from None
        assert isinstance(test, Samples)
        alike = test.inputs.shape == own.inputs.shape and torch.equal(test.labels, own.labels)
        if config.name != recipe.data.name or not alike:
            raise RecipeError(
                f"`log.conditions.{name}` must keep the samples of the test split and their shape, got {changes!r}"
            )
        made[name] = test.inputs
    return made


def augmentation(config: DataConfig, side: int) -> Augment:
    """What is done to samples in training; `side` is that of the images that the network sees."""
    crop = None if config.crop == WINDOW or config.crop == PART else config.crop
    return Augment(
        crop=crop, pad=config.pad, flip=config.flip, cutout=config.cutout, rotate=config.rotate, jitter=config.jitter,
        window=side if config.crop == WINDOW else 0, resized=side if config.crop == PART else 0,
    )  # fmt: skip


class Feed(Protocol):
    """The batches of one process: `set` chooses one, `take` gives it from memory whose addresses never change."""

    batch_size: int

    def __len__(self) -> int: ...

    def set(self, epoch: int, step: int) -> None: ...

    def take(self) -> tuple[Tensor, Tensor]: ...


def block_bytes(device: torch.device) -> int:
    """How much memory batches made at once may take: many steps' where launches are dear, a cache's on a CPU."""
    return (2 if device.type == "cpu" else 32) * 2**20


class ResidentFeed:
    """A set in device memory: `set` makes a block of batches where it has none, and copies one to static memory.

    A batch takes dozens of kernels whatever its size, mostly of hashes, and a step of small kernels is as slow as they
    are many: a block takes as many for all of its steps, and a step is left with two copies. Since a batch is a
    function of (seed, epoch, step), a block may begin at any of them.
    """

    def __init__(
        self,
        batches: Batches,
        batch_size: int,
        memory_format: torch.memory_format = torch.contiguous_format,
        most_bytes: int | None = None,
    ) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.memory_format = memory_format
        room = block_bytes(batches.samples.device) if most_bytes is None else most_bytes
        self.most = max(1, room // (4 * batch_size * batches.samples.inputs[0].numel()))  # steps a block
        self.epoch, self.steps = -1, range(0)
        self.block: tuple[Tensor, Tensor] | None = None
        self.held: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def set(self, epoch: int, step: int) -> None:
        if self.block is None or epoch != self.epoch or step not in self.steps:
            self.block = None  # its memory may serve the next one
            self.block = self.make(epoch, step)
        first = (step - self.steps.start) * self.batch_size
        parts = [values[first : first + self.batch_size] for values in self.block]
        if self.held is None:
            self.held = laid_out(parts[0], self.memory_format), torch.empty_like(parts[1])
        for static, part in zip(self.held, parts, strict=True):
            static.copy_(part)

    def make(self, epoch: int, step: int) -> tuple[Tensor, Tensor]:
        """The batches of as many steps as a block holds, from this one on."""
        count = min(self.most, len(self) - step)
        draw = self.batches.draw(epoch, step, count)
        self.epoch, self.steps = epoch, range(step, step + count)
        return self.batches.take(draw)

    def take(self) -> tuple[Tensor, Tensor]:
        assert self.held is not None
        return self.held


def laid_out(like: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Memory for a tensor, of images in the format, with the strides that `contiguous` gives."""
    return torch.empty_like(like.contiguous(memory_format=memory_format) if like.dim() == 4 else like)


class StreamFeed:
    """A set that comes through loaders: `set` copies the next batch into static memory."""

    def __init__(self, stream: Any, batch_size: int, device: torch.device) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.device = device
        self.current: tuple[int, int] | None = None
        self.iterator: Any = None
        self.inputs: Tensor | None = None
        self.labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.stream)

    def set(self, epoch: int, step: int) -> None:
        if self.current == (epoch, step):
            return
        if self.current != (epoch, step - 1):
            self.iterator = iter(self.stream.epoch(epoch, start_step=step))
        inputs, labels = next(self.iterator)
        self.current = (epoch, step)
        if self.inputs is None or self.labels is None:
            self.inputs, self.labels = (torch.empty_like(item, device=self.device) for item in (inputs, labels))
        self.inputs.copy_(inputs, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)

    def take(self) -> tuple[Tensor, Tensor]:
        assert self.inputs is not None
        assert self.labels is not None
        return self.inputs, self.labels


def train_feed(recipe: Recipe, dataset: Dataset, device: torch.device, rank: int, world_size: int) -> Feed:
    """The training batches of one process: its slice of every global batch."""
    share = recipe.batch_size // world_size
    if recipe.batch_size % world_size:
        raise RecipeError(f"`batch_size` must be a multiple of the {world_size} devices, got {recipe.batch_size}")
    if len(dataset.train) < recipe.batch_size:
        raise RecipeError(
            f"`batch_size` must be at most the {len(dataset.train)} samples of {dataset.name}, got {recipe.batch_size}"
        )
    options: dict[str, Any] = {
        "shuffle": True, "seed": recipe.seed, "drop_last": True, "rank": rank, "world_size": world_size,
    }  # fmt: skip
    train = dataset.train
    side = recipe.data.image_size if isinstance(train, Files) else int(train.inputs.shape[-1])
    augment = augmentation(recipe.data, side)
    if isinstance(train, Files) and recipe.data.crop in (WINDOW, PART):
        train = held_in_memory(train, recipe.data, dataset.name)
    if isinstance(train, Files):
        options.update(size=side, workers=recipe.data.workers, device=device)
        stream = data.stream(train, recipe.batch_size, augment=augment, **options)
        return StreamFeed(stream, share, device)
    batches = Batches(train.to(device), recipe.batch_size, augment=augment, **options)
    channels_last = device.type == "cuda" and recipe.engine.channels_last
    return ResidentFeed(batches, share, torch.channels_last if channels_last else torch.contiguous_format)


def held_in_memory(files: Files, config: DataConfig, name: str) -> Samples:
    """The central squares of image files, out of which windows or parts are cut."""
    side = data.shorter_side(config.image_size)
    size = 3 * side**2 * len(files)
    if size > MOST_BYTES:
        raise RecipeError(
            f'`data.crop` "{config.crop}" would hold {size / 2**30:.0f} GiB of {name} in memory, more than '
            f"{MOST_BYTES / 2**30:.0f}; null streams random parts"
        )
    return data.decode(files, side, workers=config.workers)
