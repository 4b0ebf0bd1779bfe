"""Batches of a split that lives on a device: order and augmentation are a function of seed, epoch and step alone."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball.data.augment import Augment
from hyperball.data.errors import DataError
from hyperball.data.hashing import fold, key_of, permutation
from hyperball.data.samples import Samples

ORDER, AUGMENTATION = 0, 1


class Draw(NamedTuple):
    """What a batch is made of: indices into the split and one random word a sample, both int64."""

    indices: Tensor
    keys: Tensor


class Schedule:
    """Which samples make up the global batch of a step, and which of them a rank sees."""

    def __init__(
        self, size: int, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool, rank: int, world_size: int
    ) -> None:
        check_schedule(size, batch_size, seed, drop_last, rank, world_size)
        self.size, self.batch_size, self.shuffle, self.seed = size, batch_size, shuffle, seed
        self.drop_last, self.rank, self.world_size = drop_last, rank, world_size

    def __len__(self) -> int:
        return self.size // self.batch_size if self.drop_last else -(-self.size // self.batch_size)

    def order(self, epoch: int, device: torch.device) -> Draw:
        """Every sample of an epoch in its order, with its random word, a function of (seed, epoch, index)."""
        if epoch < 0:
            raise ValueError(f"`epoch` must be >= 0, got {epoch}")
        if self.shuffle:
            index = permutation(self.size, key_of(self.seed, epoch, ORDER, device=device))
        else:
            index = torch.arange(self.size, device=device)
        return Draw(index, fold(key_of(self.seed, epoch, AUGMENTATION, device=device), index))

    def slice(self, step: int) -> slice:
        """Where in the epoch's order this rank's part of the global batch lies."""
        first = step * self.batch_size
        count = min(self.batch_size, self.size - first)
        low, high = (first + count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return slice(low, high)

    def steps(self, start_step: int) -> range:
        if not 0 <= start_step <= len(self):
            raise ValueError(f"`start_step` must be in 0..{len(self)}, the steps of an epoch, got {start_step}")
        return range(start_step, len(self))


def check_schedule(size: int, batch_size: int, seed: int, drop_last: bool, rank: int, world_size: int) -> None:
    if size < 1:
        raise DataError("`samples` must not be empty")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be in 0..world_size - 1, got rank {rank} of {world_size}")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(f"`batch_size` is that of all ranks and must be a multiple of {world_size}, got {batch_size}")
    if drop_last and batch_size > size:
        raise ValueError(f"`batch_size` must be at most the {size} samples when the last is dropped, got {batch_size}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be in 0..2**63 - 1, got {seed}")


class Batches:
    """Batches (inputs, labels) of samples on their device; `batch_size` counts the samples of all ranks together.

    Images come as float [0, 1], clouds as float. The same (seed, epoch, step) gives the same batch after any history,
    and the parts that the ranks see make up the batch that one process would see.

    >>> batches = Batches(load("digits").train, 128, augment=Augment("zero", pad=1), shuffle=True, seed=0)
    >>> images, labels = next(batches.epoch(3, start_step=5))
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        augment: Augment | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not isinstance(samples, Samples):
            raise DataError(
                f"`samples` must be Samples in memory, got {type(samples).__name__}; use `stream` or `decode`"
            )
        self.samples, self.augment = samples, augment or Augment()
        self.schedule = Schedule(
            len(samples),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._order: tuple[int, Draw] | None = None

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.schedule)

    def draw(self, epoch: int, step: int, steps: int = 1) -> Draw:
        """The indices and random words of this rank's part of a batch, or of all batches of `steps` in a row.

        They are device tensors, and nothing is read by the host.
        """
        if not 0 <= step < len(self):
            raise ValueError(f"`step` must be in 0..{len(self) - 1}, the steps of an epoch, got {step}")
        if not 1 <= steps <= len(self) - step:
            raise ValueError(f"`steps` must be in 1..{len(self) - step}, what is left of the epoch, got {steps}")
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.schedule.order(epoch, self.samples.device))
        order = self._order[1]
        parts = [self.schedule.slice(step + ahead) for ahead in range(steps)]
        if self.schedule.world_size == 1 or steps == 1:  # nothing lies between them
            part = slice(parts[0].start, parts[-1].stop)
            return Draw(order.indices[part], order.keys[part])
        return Draw(*(torch.cat([values[part] for part in parts]) for values in order))

    def take(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """The batch of a draw: device operations of static shape, so a CUDA graph may hold them."""
        inputs = self.samples.inputs.index_select(0, draw.indices)
        return self.augment(inputs, draw.keys), self.samples.labels.index_select(0, draw.indices)

    def epoch(self, n: int, start_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch n from a step on."""
        return (self.take(self.draw(n, step)) for step in self.schedule.steps(start_step))
