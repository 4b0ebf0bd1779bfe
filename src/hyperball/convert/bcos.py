"""State dicts of B-cos networks: with B = 2 their layers are linear + square_cosine, over `linear.weight`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hyperball.convert.storage import load_state
from hyperball.nn.decoupled import Decoupled

INNER = ".linear.weight"


def bcos_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of B-cos layers (`…linear.weight`) with the names of decoupled layers (`…weight`)."""
    renamed = {}
    for name, tensor in state.items():
        plain = name.removesuffix(INNER) + ".weight" if name.endswith(INNER) else name
        if name == INNER[1:]:
            plain = "weight"
        if plain in renamed:
            raise ValueError(f"`state` has two entries for {plain!r}")
        renamed[plain] = tensor
    return renamed


def load_bcos(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state dict of a B-cos network (B = 2, no MaxOut) into a network of linear + square_cosine layers.

    B-cos adds 1e-6 to the squared norm of a patch; here norms are exact. A layer with MaxOut has several filters per
    output and is refused for its shape.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` must be a mapping of names to tensors, got {type(state).__name__}")
    inner = [str(name) for name in state if str(name).endswith(INNER) or name == INNER[1:]]
    if not inner:
        raise ValueError(f"`state` has no entry of a B-cos layer, '…{INNER}', among its {len(state)}")
    parts = dict(model.named_modules(remove_duplicate=False))
    for name in inner:
        path = name.removesuffix(INNER[1:]).removesuffix(".")
        if path in parts and (fault := why_not_bcos(parts[path])):
            raise ValueError(f"`model` must have a linear + square_cosine layer at {path or 'its top'}, got {fault}")
    load_state(model, bcos_state(state))


def why_not_bcos(module: nn.Module) -> str | None:
    """What a layer is instead of f = ŵᵀx·|cos|, or None."""
    if not isinstance(module, Decoupled):
        return type(module).__name__
    magnitude, angular, weighting = str(module.magnitude.value), str(module.angular.value), module.weighting
    if (magnitude, angular, weighting) == ("linear", "square_cosine", "none"):
        return None
    return f"{type(module).__name__} of {magnitude} × {angular}, weighting {weighting}"
