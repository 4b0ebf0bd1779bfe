"""A model as attacks call it: with float32 images of its own, whatever it computes in and does to its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.attacks.arguments import check_logits


class Adapted(nn.Module):
    """model(x in the model's dtype), on a copy where the model writes into its input."""

    def __init__(self, model: Callable[[Tensor], Tensor], dtype: torch.dtype | None, copies: bool) -> None:
        super().__init__()
        self.model, self.dtype, self.copies = model, dtype, copies

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copies else x
        return self.model(x if self.dtype is None else x.to(self.dtype))


@torch.no_grad()
def adapt(model: Callable[[Tensor], Tensor], images: Tensor, name: str) -> tuple[Callable[[Tensor], Tensor], int]:
    """The model, adapted where it must be, and its classes; `images` are the first two, or the only one."""
    probe, dtype = images.clone(), None
    before = writes(probe)
    try:
        logits = model(probe)
    except RuntimeError:
        dtype = dtype_of(model)
        if dtype in (None, images.dtype):
            raise
        logits = model(images.to(dtype))
    classes = check_logits(logits, len(images), name)
    copies = writes(probe) != before or not torch.equal(probe, images) or dtype is not None
    found = Adapted(model, dtype, copies).eval() if copies else model
    _check_single(found, images, name)
    return found, classes


def writes(x: Tensor) -> int:
    """How often a tensor was written to, which values do not tell of clamp_(0, 1); inference mode does not count."""
    return 0 if x.is_inference() else x._version


def _check_single(model: Callable[[Tensor], Tensor], images: Tensor, name: str) -> None:
    """Attacks come down to the last image that is still right."""
    try:
        model(images[:1].clone())
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{name}` must take a batch of one image, and takes {len(images)} but not one ({error}); "
            "statistics of the batch are no defense"
        ) from error


def dtype_of(model: Any) -> torch.dtype | None:
    """The dtype of a module's first floating-point parameter or buffer."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
    return None
