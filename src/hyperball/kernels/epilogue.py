"""What a decoupled layer does after the plain convolution: f = factor · n·s(u) · g(c), elementwise.

y is the convolution with the (unit) filter, n the patch norm, c = y/n, u = n·stretch. Everything broadcasts
against y. The backward is written out and keeps y and n alone; every formula comes from the two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels.norms import inverse
from hyperball.rows import AnyValue, Value, flatten, rebuild

Plan = tuple[AnyValue, AnyValue, int]  # magnitude and angular function without their tensors; the first one's count


@dataclass(frozen=True, eq=False)
class Terms:
    """The tensors of one evaluation. `lift` is a constant by which y was divided to stay in range."""

    y: Tensor
    n: Tensor
    factor: Tensor | None
    stretch: Tensor | None
    lift: Tensor | None
    magnitude: AnyValue
    angular: Value

    @property
    def u(self) -> Tensor:
        return self.n if self.stretch is None else self.n * self.stretch

    @property
    def response(self) -> Tensor:
        """y in the dtype of n, at its true size."""
        y = self.y.to(self.n.dtype)
        return y if self.lift is None else y * self.lift

    def scaled(self, part: Tensor) -> Tensor:
        return part if self.factor is None else part * self.factor


def evaluate(t: Terms) -> Tensor:
    """f = factor·y·s(u) for cosine, factor·n·s(u)·g(y/n) otherwise."""
    s = radial_table.gain(t.magnitude, t.u)
    if angular_table.is_cosine(t.angular):
        return t.scaled(t.response * s)
    c = t.response * inverse(t.n)
    return t.scaled(angular_table.g(t.angular, c) * (t.n * s))


def partials(t: Terms) -> Iterator[Callable[[], Tensor]]:
    """df/dy, df/dn, df/dfactor, df/dstretch, then df/dparameter of magnitude and angular function; each when called."""
    u = t.u
    pairs = radial_table.gains_and_curvatures(t.magnitude, u)
    s, h1 = pairs[0]
    for more_s, more_h1 in pairs[1:]:
        s, h1 = s + more_s, h1 + more_h1
    inverse_n = inverse(t.n)
    if angular_table.is_cosine(t.angular):
        y = t.response
        yield lambda: _lifted(t, t.scaled(s))
        yield lambda: t.scaled(y * (inverse_n * (h1 - s)))
        yield lambda: y * s
        yield lambda: t.scaled(y * ((h1 - s) * inverse(required(t.stretch))))
        for ds in radial_table.partials(t.magnitude, u, pairs):
            yield chain(ds, lambda part: t.scaled(y * part))
        return
    c = t.response * inverse_n
    g, g1 = angular_table.g(t.angular, c), angular_table.slope(t.angular, c)
    yield lambda: _lifted(t, t.scaled(s * g1))
    yield lambda: t.scaled(h1 * g - s * g1 * c)
    yield lambda: t.n * s * g
    yield lambda: t.scaled(g * (t.n * (h1 - s) * inverse(required(t.stretch))))
    for ds in radial_table.partials(t.magnitude, u, pairs):
        yield chain(ds, lambda part: t.scaled(g * (t.n * part)))
    for dg in angular_table.partials(t.angular, c):
        yield chain(dg, lambda part: t.scaled(part * (t.n * s)))


def chain(inner: Callable[[], Tensor], outer: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: outer(inner())


def required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _lifted(t: Terms, part: Tensor) -> Tensor:
    return part if t.lift is None else part * t.lift


def reduce_to(full: Tensor, like: Tensor) -> Tensor:
    """Sum `full` over the dimensions along which `like` was broadcast, in its dtype."""
    extra = full.dim() - like.dim()
    dims = [*range(extra), *(extra + d for d, size in enumerate(like.shape) if size == 1 and full.shape[extra + d] > 1)]
    if dims:
        full = full.sum(dims, keepdim=True)
    return full.reshape(like.shape).to(like.dtype)


class Epilogue(torch.autograd.Function):
    """f of `evaluate`; keeps y, n and the parameters."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: Plan, y: Tensor, n: Tensor, *rest: Any) -> Tensor:
        return evaluate(_terms(plan, y, n, *rest)).to(y.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        terms = _terms(ctx.plan, *saved)
        grad = grad.to(terms.n.dtype)
        inputs = [*saved[:4], *saved[5:]]
        needed = [*ctx.needs_input_grad[1:5], *ctx.needs_input_grad[6:]]
        grads = [
            reduce_to(grad * partial(), x) if need and x is not None else None
            for partial, x, need in zip(partials(terms), inputs, needed, strict=False)
        ]
        return None, *grads[:4], None, *grads[4:]


class EpilogueWithTangent(Epilogue):
    """The same, with forward-mode derivatives."""

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Tensor:
        saved = ctx.saved_tensors
        terms = _terms(ctx.plan, *saved)
        moved = [*tangents[:4], *tangents[5:]]
        total = torch.zeros_like(saved[0], dtype=terms.n.dtype)
        for partial, tangent in zip(partials(terms), moved, strict=False):
            if tangent is not None:
                total = total + partial() * tangent
        return total.to(saved[0].dtype)


def _terms(plan: Plan, y: Tensor, n: Tensor, factor: Any, stretch: Any, lift: Any, *parameters: Tensor) -> Terms:
    magnitude, angular, radial_count = plan
    h, g = rebuild(magnitude, parameters[:radial_count]), rebuild(angular, parameters[radial_count:])
    assert isinstance(g, Value)
    return Terms(y, n, factor, stretch, lift, h, g)


def apply(t: Terms) -> Tensor:
    """f, through the hand-written backward, or through autograd where a row is user-defined."""
    if is_composed(t.magnitude, t.angular):
        return evaluate(t).to(t.y.dtype)
    magnitude, radial_tensors = flatten(t.magnitude)
    angular, angular_tensors = flatten(t.angular)
    kind = Epilogue if torch.compiler.is_compiling() else EpilogueWithTangent
    plan = (magnitude, angular, len(radial_tensors))
    return kind.apply(plan, t.y, t.n, t.factor, t.stretch, t.lift, *radial_tensors, *angular_tensors)


def is_composed(magnitude: AnyValue, angular: Value) -> bool:
    """Whether a user-defined row leaves the derivatives to autograd."""
    return radial_table.composed(magnitude) or angular.row.composed
