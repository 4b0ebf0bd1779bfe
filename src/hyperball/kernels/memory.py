"""Which tensors C may read by their address, and how their numbers lie there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperball.kernels import dispatch
from hyperball.kernels.reading import can_look

NARROW = 8  # channels of a group below which positions are put beside each other in place of channels


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether all are ordinary float32 tensors of the CPU, and nothing records or transforms what is computed."""
    if torch.compiler.is_compiling() or dispatch.is_exporting():
        return False
    if dispatch.is_transformed() or dispatch.has_tangents() or modes():
        return False
    return all(is_dense(t) for t in tensors if t is not None)


def modes() -> int:
    """How many dispatch modes are active: they must see every operator."""
    count = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return int(count()) if count else 0


def is_dense(t: Tensor) -> bool:
    """Whether t is an ordinary float32 tensor of the CPU whose memory holds its numbers."""
    kind = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided and not t.is_neg()
    return kind and t.device.type == "cpu" and t.dtype == torch.float32 and can_look(t)


def is_channels_last(t: Tensor) -> bool | None:
    """Whether the memory of t [batch, channels, *spatial] is dense with channels last, or as it is seen; else None."""
    if t.is_contiguous():
        return t.dim() == 2 or t.shape[2:].numel() == 1
    return True if t.movedim(1, -1).is_contiguous() else None


def is_narrow(t: Tensor, groups: int) -> bool:
    """Whether too few channels lie beside each other to fill a vector, and enough positions would."""
    return bool(is_channels_last(t)) and t.shape[1] < NARROW * groups and t.shape[2:].numel() >= NARROW


def restored(saved: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Saved tensors as they were saved: hooks may hand them back with another dtype, or on another device."""
    for t, shape in zip(saved, shapes, strict=True):
        if t.shape != shape:
            raise RuntimeError(f"a tensor was saved as {tuple(shape)} and handed back as {tuple(t.shape)}")
    return [t.to("cpu", torch.float32) for t in saved]


def dense(t: Tensor) -> Tensor:
    """t itself where its memory is one that `is_channels_last` knows, else a copy."""
    return t.contiguous() if is_channels_last(t) is None else t
