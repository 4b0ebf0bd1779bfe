"""State dicts of B-cos networks: with B = 2 their layers are linear + square_cosine, over `linear.weight`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hyperball.convert.storage import load_state

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
    load_state(model, bcos_state(state))
