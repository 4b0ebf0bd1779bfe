"""Statistics from data: the mean patch norms of relative radii, and the running statistics of BatchNorm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperball.convert.running import call, modes_kept
from hyperball.nn.learned import LearnedValue


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` set: relative radii and normalization layers, by name, over so many batches."""

    batches: int
    radii: tuple[str, ...]
    norms: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.radii)} mean patch norms and {len(self.norms)} BatchNorms set from {self.batches} batches"


def calibrate(model: nn.Module, batches: Iterable[Any]) -> Calibration:
    """Set the mean patch norm of every relative radius, and every BatchNorm's statistics, to their means over batches.

    Every layer sees what those before it give with the batch's own statistics, as in training; dropout and the like are
    off, and no parameter changes. A batch is inputs, (inputs, labels), whose labels are left out, or a mapping of
    keyword arguments; it is brought to the model's device. If anything fails, the statistics are as they were.

    >>> import torch, hyperball as hb
    >>> net = torch.nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> print(hb.convert.calibrate(net, [torch.randn(4, 3, 8, 8) for _ in range(3)]))
    1 mean patch norms and 1 BatchNorms set from 3 batches
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(batches, Tensor | str | bytes | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(f"`batches` must be a list or a loader of batches, got {type(batches).__name__}")
    radii = {name: part for name, part in model.named_modules() if isinstance(part, LearnedValue) and part.is_relative}
    norms: dict[str, Any] = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
    }
    if not radii and not norms:
        raise ValueError(f"`model` has no relative radius and no BatchNorm to calibrate, got {type(model).__name__}")
    with measuring(model, [*radii.values(), *norms.values()]):
        for part in (*radii.values(), *norms.values()):
            reset(part)
        count = run(model, batches)
        check_finite({**radii, **norms})
    return Calibration(count, tuple(name.removesuffix(".magnitude") for name in radii), tuple(norms))


def reset(part: Any) -> None:
    if isinstance(part, LearnedValue):
        part.batches.zero_()
    else:
        part.reset_running_stats()
        part.momentum = None  # a plain mean over the batches


def run(model: nn.Module, batches: Iterable[Any]) -> int:
    place = next(iter([*model.parameters(), *model.buffers()])).device
    count = 0
    for batch in batches:
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        if isinstance(inputs, Mapping):
            inputs = {key: item.to(place) if isinstance(item, Tensor) else item for key, item in inputs.items()}
        elif not isinstance(inputs, Tensor | tuple | list):
            raise TypeError(f"`batches` must hold tensors or mappings of arguments, got {type(inputs).__name__}")
        call(model, inputs.to(place) if isinstance(inputs, Tensor) else inputs)
        count += 1
    if count == 0:
        raise ValueError("`batches` must hold at least one batch, got none")
    return count


def check_finite(parts: Mapping[str, nn.Module]) -> None:
    for name, part in parts.items():
        for buffer in part.buffers(recurse=False):
            if not bool(buffer.isfinite().all()):
                raise ValueError(f"`batches` gave statistics that are not finite in {name}")


@contextmanager
def measuring(model: nn.Module, parts: list[Any]) -> Iterator[None]:
    """These parts in training mode and all else in evaluation, without gradients; modes and momenta come back.

    If the block fails, so do the buffers.
    """
    momenta = {part: part.momentum for part in parts if isinstance(part, _NormBase)}
    held = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers(recurse=False)]
    try:
        with modes_kept(model, set(parts)):
            yield
    except BaseException:
        for buffer, before in held:
            buffer.copy_(before)
        raise
    finally:
        for part, momentum in momenta.items():
            part.momentum = momentum
