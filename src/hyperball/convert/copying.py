"""Copies of models that hold tensors with a history, which torch's deepcopy refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)


def copy_model(model: Model, memo: Mapping[int, Any] | None = None) -> Model:
    """A deep copy in which tensors that autograd computed are constants.

    Pruning, weight_norm and spectral_norm keep such tensors in place of the weight and make them again, from the
    parameters, before every call; others are left over from a forward pass. `memo` is deepcopy's.
    """
    known = dict(memo or {})
    # Tensors stay referenced by the model, so that their ids are not given away.
    for part in model.modules():
        for held in computed(vars(part)):
            known.setdefault(id(held), held.detach().clone())
    try:
        return copy.deepcopy(model, known)
    except Exception as error:  # whatever an attribute's own copying raises
        raise RuntimeError(f"{culprit(model, known)} cannot be copied ({error})") from error


def computed(item: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors with a history in an attribute: itself, or in lists, tuples and mappings."""
    if isinstance(item, Tensor):
        if not item.is_leaf:
            yield item
    elif depth and isinstance(item, Mapping):
        for held in item.values():
            yield from computed(held, depth - 1)
    elif depth and isinstance(item, tuple | list):
        for held in item:
            yield from computed(held, depth - 1)


def culprit(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """The innermost module that cannot be copied by itself, and the attribute that it fails on."""
    for name, part in reversed(list(model.named_modules())):
        for key, held in vars(part).items():
            if key != "_modules" and fails(held, memo):
                return f"`model`: {key!r} of {name or 'the model'} ({type(part).__name__})"
    return f"`model` ({type(model).__name__})"


def fails(item: Any, memo: Mapping[int, Any]) -> bool:
    try:
        copy.deepcopy(item, dict(memo))
    except Exception:
        return True
    return False
