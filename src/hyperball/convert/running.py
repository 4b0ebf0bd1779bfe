"""Running a model on a batch without leaving a trace, and comparing what comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.report import Difference


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module's mode and the random generators are put back at the end."""
    modes = {part: part.training for part in model.modules()}
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        for part in modes:
            part.training = False
        try:
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode


def call(model: nn.Module, batch: Any) -> Any:
    """A tuple is positional arguments, a mapping keyword arguments, anything else the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*(batch if isinstance(batch, tuple) else (batch,)))


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point tensors among what the model gives in evaluation."""
    with evaluating(model):
        return [leaf.detach().clone() for leaf in tensors(call(model, batch)) if leaf.is_floating_point()]


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
    """max |y − y'| and max |y − y'| / max |y|."""
    if [a.shape for a in before] != [b.shape for b in after]:
        raise ValueError(f"the outputs changed shape: {[tuple(b.shape) for b in after]}")
    gaps = [float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True) if a.numel()]
    sizes = [float(a.double().abs().max()) for a in before if a.numel()]
    absolute = max(gaps, default=0.0)
    return Difference(absolute, absolute / max(max(sizes, default=0.0), 1e-30))
