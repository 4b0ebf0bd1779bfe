"""Gradients of an eager twin in place of a kernel's own, where they are to be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def replayed(function: Callable[..., Any], inputs: Sequence[Any], needed: Sequence[bool], grads: Any) -> list[Any]:
    """The gradients of function(*inputs) by autograd; differentiable again where a graph is asked for.

    Those of the inputs that `needed` speaks of, None for what is no tensor. Each input stands for itself alone, though
    it may be computed from another, or be the same tensor.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        held = [t.view_as(t) if isinstance(t, Tensor) else t for t in inputs]
        outputs = function(*held)
    asked = [need and isinstance(t, Tensor) for t, need in zip(held, needed, strict=False)]
    wanted = [t for t, ask in zip(held, asked, strict=False) if ask]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=again, allow_unused=True))
    return [next(found) if ask else None for ask in asked]
