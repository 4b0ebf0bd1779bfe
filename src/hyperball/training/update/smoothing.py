"""Cross entropy with smoothed labels in few launches: torch composes it of some twenty, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.kernels import dispatch


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """−(1/n) Σ q log p with q = (1 − s)·onehot + s/K, in float32 at least; labels are classes, all of them counted."""
    common = logits.dim() == 2 and y.dtype == torch.int64 and len(y) == len(logits) > 0
    if smoothing == 0 or not common or is_watched():
        return F.cross_entropy(logits.to(wide_dtype(logits)), y, label_smoothing=smoothing)
    loss: Tensor = SmoothedCrossEntropy.apply(logits, y, smoothing)
    return loss


def wide_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 where x is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_watched() -> bool:
    """Whether a compiler, a transform of torch.func or forward-mode differentiation follows what runs."""
    return torch.compiler.is_compiling() or dispatch.is_transformed() or dispatch.has_tangents()


def is_batched(x: Tensor) -> bool:
    """Whether x stands for many, as the gradients of `torch.autograd.grad(..., is_grads_batched=True)` do."""
    return bool(getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda _: False)(x))


class SmoothedCrossEntropy(torch.autograd.Function):
    """−(1/n) Σ q log p, with gradient (p − q)/n; can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
        log_p = logits.to(wide_dtype(logits)).log_softmax(1)
        n, classes = log_p.shape
        share = smoothing / classes
        weights = torch.full_like(log_p, -share / n).scatter_(1, y[:, None], -(1.0 - smoothing + share) / n)  # −q/n
        ctx.save_for_backward(logits, log_p, weights)
        return (weights * log_p).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, log_p, weights = ctx.saved_tensors
        if torch.is_grad_enabled() or is_watched() or is_batched(grad):
            p = logits.to(log_p.dtype).softmax(1)
            return ((weights + p / len(p)) * grad).to(logits.dtype), None, None
        whole = torch.ops.aten._log_softmax_backward_data(weights, log_p, 1, log_p.dtype)
        # One launch multiplies and rounds to the dtype of the logits.
        return torch.mul(whole, grad, out=torch.empty_like(logits)), None, None
