"""What may be read of a tensor's values, and sums over rows whose bits do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = {"cpu": 4096}  # the widest sum whose order torch does not adapt to the batch; elsewhere 32


def is_concrete(tensor: Tensor) -> bool:
    """Whether a tensor owns data: it is not being traced, faked, or wrapped by a transform of torch.func."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # what torch.func wraps has no memory of its own
        return False
    return True


def can_look(tensor: Tensor) -> bool:
    """Whether a value may steer Python: concrete data, not on the meta device, no CUDA graph being captured."""
    if tensor.device.type == "meta" or not is_concrete(tensor):
        return False
    return tensor.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def row_sum(rows: Tensor, *, keepdim: bool = False) -> Tensor:
    """Σ_i x_i over the last dimension, in chunks of fixed width: a row's bits do not depend on its batch."""
    if torch.compiler.is_compiling():  # a graph for any length cannot have a number of chunks
        return rows.sum(-1, keepdim=keepdim)
    width = CHUNK.get(rows.device.type, 32)
    while rows.shape[-1] > width:
        whole = rows.shape[-1] // width * width
        chunks = rows[..., :whole].unflatten(-1, (-1, width)).sum(-1)
        rest = [rows[..., whole:].sum(-1, keepdim=True)] if whole < rows.shape[-1] else []
        rows = torch.cat((chunks, *rest), -1)
    return rows.sum(-1, keepdim=keepdim)


def factor_where(condition: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """The factor where the condition holds, else 1; of two numbers torch.where makes float32, in which 2**-400 is 0."""
    return torch.ones_like(condition, dtype=dtype).masked_fill(condition, factor)


def export_records() -> bool:
    """Whether torch.export is at work; traced by torch.compile, torch 2.11 would say so of itself."""
    return bool(getattr(torch.compiler, "is_exporting", lambda: False)())


# What torch.compiler.assume_constant_result sets, without its import of the compiler: torch answers as outside of it.
export_records._dynamo_marked_constant = True  # type: ignore[attr-defined]
