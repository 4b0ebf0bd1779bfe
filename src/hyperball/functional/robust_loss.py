"""Barron's general robust loss, differentiable in the residual, the shape and the scale (Barron, CVPR 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyperball.kernels.projection.solver import refuse_nested_forward
from hyperball.kernels.robust_loss import loss_gradients, loss_hessian, loss_value, times

NAMES = ("x", "alpha", "c")


def robust_loss(x: Tensor, alpha: float | Tensor, c: float | Tensor) -> Tensor:
    """loss = (b/alpha)·((1 + (x/c)²/b)^(alpha/2) - 1), b = |alpha - 2|, elementwise, with its limits.

    alpha = 2 is x²/2c², 1 pseudo-Huber, 0 Cauchy, -2 Geman-McClure, -inf Welsch, and +inf exp(x²/2c²) - 1.
    The three arguments broadcast, and each gets its exact gradient; the one in alpha is 0 at alpha = ±inf and
    grows like log(1/|alpha - 2|) near 2, where |alpha - 2| is held at 1e-6. Second derivatives are exact too;
    third ones are refused. For alpha > 2 the loss overflows to inf where its value does: at alpha = +inf
    beyond |x/c| = 13.3 in float32. Half precision is computed in float32.

    >>> import torch
    >>> robust_loss(torch.tensor([0.0, 1.0, 100.0]), alpha=-2.0, c=1.0)
    tensor([0.0000, 0.4000, 1.9992])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"`x` must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    _check_scalar("alpha", alpha)
    _check_scalar("c", c)
    _check_positive(c)
    dtype = x.dtype
    for other in (alpha, c):
        if isinstance(other, Tensor) and (other.dim() > 0 or x.dim() == 0):
            dtype = torch.promote_types(dtype, other.dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [torch.as_tensor(item, dtype=work, device=x.device) for item in (x, alpha, c)]
    _check_shapes(tensors)
    refuse_nested_forward("robust_loss")
    function = CompiledLoss if torch.compiler.is_compiling() else Loss
    loss: Tensor = function.apply(*torch.broadcast_tensors(*tensors))
    return loss.to(dtype)


def _check_scalar(name: str, given: float | Tensor) -> None:
    if isinstance(given, Tensor):
        if not given.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor or a number, got {given.dtype}")
    elif isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"`{name}` must be a number or a tensor, got {given!r}")
    elif math.isnan(given):
        raise ValueError(f"`{name}` must be a number, got {given!r}")


def _check_shapes(tensors: list[Tensor]) -> None:
    try:
        torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"`x`, `alpha` and `c` must broadcast against each other, got shapes {shapes}") from None


def _check_positive(c: float | Tensor) -> None:
    """Refuse c <= 0, inf and NaN; a tensor only where its values can be read without waiting for a device."""
    if not isinstance(c, Tensor):
        if not 0.0 < c < math.inf:
            raise ValueError(f"`c` must be > 0 and finite, got {c!r}")
        return
    if torch.compiler.is_compiling() or c.device.type != "cpu":
        return
    try:
        smallest, largest = (c.detach().min().item(), c.detach().max().item()) if c.numel() else (1.0, 1.0)
    except RuntimeError:  # inside vmap a value cannot be read
        return
    if not 0.0 < smallest <= largest < math.inf:
        raise ValueError(
            f"`c` must be > 0 and finite everywhere, got a tensor with minimum {smallest:g} and maximum {largest:g}"
        )


def _scaled(gradients: tuple[Tensor | None, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * g for gradient in gradients)


class CompiledLoss(Function):
    """The loss without forward-mode and second derivatives, which compiled graphs do not take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, c: Tensor) -> Tensor:
        return loss_value(x, alpha, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, alpha, c = ctx.saved_tensors
        return _scaled(loss_gradients(x, alpha, c, ctx.needs_input_grad), grads[0])


class Loss(Function):
    """loss(x, alpha, c) of broadcast tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, c: Tensor) -> Tensor:
        return loss_value(x, alpha, c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:
            return None, None, None
        needed = _named(ctx.needs_input_grad)
        return _placed(needed, Gradient.apply(grads[0], *ctx.saved_tensors, needed))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        x, alpha, c = ctx.saved_tensors
        needed = _named(tangent is not None for tangent in tangents)
        slopes = Gradient.apply(torch.ones_like(x), x, alpha, c, needed)
        return sum(slope * tangent for slope, tangent in zip(slopes, [t for t in tangents if t is not None]))


class Gradient(Function):
    """The needed ones of g·dloss/dx, g·dloss/dalpha and g·dloss/dc."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, x: Tensor, alpha: Tensor, c: Tensor, needed: str) -> tuple[Tensor, ...]:
        found = _scaled(loss_gradients(x, alpha, c, tuple(name in needed.split() for name in NAMES)), g)
        return tuple(gradient for gradient in found if gradient is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.needed = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        g, x, alpha, c = ctx.saved_tensors
        vx, va, vc = _placed(ctx.needed, grads)
        if vx is None and va is None and vc is None:
            return None, None, None, None, None
        along_g = None
        if ctx.needs_input_grad[0]:
            slopes = Gradient.apply(torch.ones_like(g), x, alpha, c, ctx.needed)
            along_g = _dot(_placed(ctx.needed, slopes), (vx, va, vc))
        zero = torch.zeros_like(x)
        cotangents = [zero if v is None else v for v in (vx, va, vc)]
        return along_g, *HessianProduct.apply(g, x, alpha, c, *cotangents), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        g, x, alpha, c = ctx.saved_tensors
        dg, dx, da, dc = tangents[:4]
        zero = torch.zeros_like(x)
        moved = HessianProduct.apply(g, x, alpha, c, *(zero if d is None else d for d in (dx, da, dc)))
        found = [change for change, name in zip(moved, NAMES, strict=True) if name in ctx.needed.split()]
        if dg is not None:
            slopes = Gradient.apply(dg, x, alpha, c, ctx.needed)
            found = [change + slope for change, slope in zip(found, slopes, strict=True)]
        return tuple(found)


class HessianProduct(Function):
    """g·H·v in the order x, alpha, c; it has no further derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, x: Tensor, alpha: Tensor, c: Tensor, vx: Tensor, va: Tensor, vc: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        h = loss_hessian(x, alpha, c)
        return (
            g * (times(vx, h["xx"]) + times(va, h["xa"]) + times(vc, h["xc"])),
            g * (times(vx, h["xa"]) + times(va, h["aa"]) + times(vc, h["ca"])),
            g * (times(vx, h["xc"]) + times(va, h["ca"]) + times(vc, h["cc"])),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("`robust_loss` has no third derivatives")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError("`robust_loss` has no third derivatives")


def _named(needed: Iterable[bool]) -> str:
    """The names of the needed arguments, as one text: an argument of a Function under vmap has no structure."""
    return " ".join(name for name, need in zip(NAMES, needed, strict=True) if need)


def _placed(needed: str, found: Iterable[Any]) -> tuple[Any, ...]:
    """The found gradients in the order x, alpha, c, with None for those that were not needed."""
    remaining = iter(found)
    return tuple(next(remaining) if name in needed.split() else None for name in NAMES)


def _dot(gradients: tuple[Any, ...], cotangents: tuple[Any, ...]) -> Tensor:
    terms = [g * v for g, v in zip(gradients, cotangents, strict=True) if g is not None and v is not None]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
