"""Running a model on a batch without leaving a trace, and comparing what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.report import Difference


@contextlib.contextmanager
def modes_kept(model: nn.Module, trained: Collection[nn.Module] = ()) -> Iterator[None]:
    """Evaluation mode without gradients, `trained` parts in training mode; every mode is put back at the end."""
    modes = {part: part.training for part in model.modules()}
    try:
        for part in modes:
            part.training = part in trained
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode and the random generators are put back at the end."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), modes_kept(model):
        yield


def call(model: nn.Module, batch: Any) -> Any:
    """A tuple is positional arguments, a mapping keyword arguments, anything else the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple) else (batch,)))


def outputs(model: nn.Module, batch: Any, numbers: bool = False) -> list[Tensor]:
    """The floating-point tensors among what the model gives in evaluation; with `numbers`, all tensors."""
    with evaluating(model):
        given = [leaf.detach().clone() for leaf in tensors(call(model, batch))]
    return [leaf for leaf in given if numbers or leaf.is_floating_point()]


def tensors(item: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings and objects with attributes."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, Mapping):
        for held in item.values():
            yield from tensors(held)
    elif isinstance(item, tuple | list):
        for held in item:
            yield from tensors(held)
    elif hasattr(item, "__dict__"):
        yield from tensors(vars(item))


def difference(before: list[Tensor], after: list[Tensor]) -> Difference:
    """max |y − y'| and max |y − y'| / max |y|, over finite y there; equal infinities differ by 0, NaN by NaN."""
    if [a.shape for a in before] != [b.shape for b in after]:
        raise ValueError(f"the outputs changed shape: {[tuple(b.shape) for b in after]}")
    absolute, size = torch.zeros((), dtype=torch.double), 1e-30
    for a, b in zip(before, after, strict=True):
        one, other = a.double().cpu(), b.double().cpu()
        gaps = torch.where(one == other, 0.0, (one - other).abs())
        absolute = torch.maximum(absolute, gaps.max()) if gaps.numel() else absolute  # a NaN stays
        size = max(size, float(one[one.isfinite()].abs().amax())) if bool(one.isfinite().any()) else size
    return Difference(float(absolute), float(absolute) / size)
