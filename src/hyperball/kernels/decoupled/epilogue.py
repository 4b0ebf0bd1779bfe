"""What a decoupled layer does after the plain convolution: f = factor · n·s(u) · g(c), elementwise.

y is the convolution with the (unit) filter, n the patch norm, c = y/n, u = n·stretch. Everything broadcasts
against y. The backward is written out and keeps y and n alone; every formula comes from the two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels.norms import cast, inverse
from hyperball.rows import AnyValue, Value, flatten, rebuild

BLOCK = 1 << 16  # elements of a piece that one CPU thread works on at a time
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
        y = cast(self.y, self.n.dtype)
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


@dataclass(frozen=True, eq=False)
class Partial:
    """df/dinput = base·full()·post (·factor where `scaled`); `post` has the input's shape: sums can go before it.

    `base` is one and the same for all partials that have one: its product with the incoming gradient is formed once.
    """

    full: Callable[[], Tensor]
    base: Tensor | None = None
    post: Tensor | None = None
    scaled: bool = True


def partials(t: Terms) -> Iterator[Partial]:
    """df/dy, df/dn, df/dfactor, df/dstretch, then df/dparameter of the magnitude and of the angular function."""
    u = t.u
    pairs = radial_table.gains_and_curvatures(t.magnitude, u)
    s, h1 = pairs[0]
    for more_s, more_h1 in pairs[1:]:
        s, h1 = s + more_s, h1 + more_h1
    slopes = radial_table.partials(t.magnitude, u, pairs)
    one_over_stretch = None if t.stretch is None else inverse(t.stretch)
    if angular_table.is_cosine(t.angular):
        y, bend = t.response, h1 - s
        yield Partial(lambda: s, post=t.lift)
        yield Partial(lambda: bend, y, inverse(t.n))
        yield Partial(lambda: s, y, scaled=False)
        yield Partial(lambda: bend, y, one_over_stretch)
        for ds, post in slopes:
            yield Partial(ds, y, post)
        return
    c = t.response * inverse(t.n)
    g = angular_table.g(t.angular, c)
    g1 = angular_table.slope(t.angular, c, g)
    h, tilt = t.n * s, s * g1
    yield Partial(lambda: tilt, post=t.lift)
    yield Partial(lambda: h1 * g - tilt * c)
    yield Partial(lambda: h, g, scaled=False)
    yield Partial(lambda: t.n * (h1 - s), g, one_over_stretch)
    for ds, post in slopes:
        yield Partial(times(t.n, ds), g, post)
    for dg in angular_table.partials(t.angular, c):
        yield Partial(times(h, dg))


def times(factor: Tensor, full: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: full() * factor


def reduce_to(full: Tensor, like: Tensor) -> Tensor:
    """Sum `full` over the dimensions along which `like` was broadcast."""
    extra = full.dim() - like.dim()
    dims = [*range(extra), *(extra + d for d, size in enumerate(like.shape) if size == 1 and full.shape[extra + d] > 1)]
    if dims:
        full = full.sum(dims, keepdim=True)
    return full.reshape(like.shape)


class Epilogue(torch.autograd.Function):
    """f of `evaluate`; keeps y, n and the parameters."""

    generate_vmap_rule = True

    @staticmethod
    def forward(plan: Plan, y: Tensor, n: Tensor, *rest: Any) -> Tensor:
        pieces = [cast(evaluate(block), y.dtype) for block in blocks(_terms(plan, y, n, *rest))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs = [*saved[:4], *saved[5:]]
        needed = [*ctx.needs_input_grad[1:5], *ctx.needs_input_grad[6:]]
        pieces = blocks(_terms(ctx.plan, *saved))
        rows = [block.y.shape[0] for block in pieces] if len(pieces) > 1 else [grad.shape[0]]
        grads = merge([pull_back(b, v, inputs, needed) for b, v in zip(pieces, grad.split(rows), strict=True)])
        return None, *grads[:4], None, *grads[4:]


def merge(pieces: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The gradients of all blocks: those of y and n behind each other, the others added up."""
    if len(pieces) == 1:
        return pieces[0]
    merged = []
    for place, parts in enumerate(zip(*pieces, strict=True)):
        held = [part for part in parts if part is not None]
        merged.append(None if not held else torch.cat(held) if place < 2 else torch.stack(held).sum(0))
    return merged


def pull_back(t: Terms, grad: Tensor, inputs: list[Tensor | None], needed: list[bool]) -> list[Tensor | None]:
    """Σ grad·df/dinput over the dimensions along which each input was broadcast."""
    grad = cast(grad, t.n.dtype)
    scaled = t.scaled(grad)
    weighted: dict[bool, Tensor] = {}
    grads: list[Tensor | None] = []
    for partial, x, need in zip(partials(t), [t.y, t.n, *inputs[2:]], needed, strict=False):
        if not need or x is None:
            grads.append(None)
            continue
        v = scaled if partial.scaled else grad
        if partial.base is not None:
            if partial.scaled not in weighted:
                weighted[partial.scaled] = v * partial.base
            v = weighted[partial.scaled]
        total = reduce_to(v * partial.full(), x)
        grads.append(cast(total if partial.post is None else total * partial.post, x.dtype))
    return grads


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
                part = partial.full() * (tangent if partial.post is None else tangent * partial.post)
                part = part if partial.base is None else part * partial.base
                total = total + (terms.scaled(part) if partial.scaled else part)
        return cast(total, saved[0].dtype)


def _terms(plan: Plan, y: Tensor, n: Tensor, factor: Any, stretch: Any, lift: Any, *parameters: Tensor) -> Terms:
    magnitude, angular, radial_count = plan
    h, g = rebuild(magnitude, parameters[:radial_count]), rebuild(angular, parameters[radial_count:])
    assert isinstance(g, Value)
    return Terms(y, n, factor, stretch, lift, h, g)


def apply(t: Terms) -> Tensor:
    """f, through the hand-written backward, or through autograd where a row is user-defined."""
    magnitude, radial_tensors = flatten(t.magnitude)
    angular, angular_tensors = flatten(t.angular)
    inputs = (t.y, t.n, t.factor, t.stretch, t.lift, *radial_tensors, *angular_tensors)
    if is_composed(t.magnitude, t.angular):
        return cast(evaluate(t), t.y.dtype)
    if torch.compiler.is_compiling():
        needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        if not needed:  # torch.compile cannot trace a Function with a variable number of inputs then, and need not
            return cast(evaluate(t), t.y.dtype)
    kind = Epilogue if torch.compiler.is_compiling() else EpilogueWithTangent
    return kind.apply((magnitude, angular, len(radial_tensors)), *inputs)


def blocks(t: Terms) -> list[Terms]:
    """The same terms in pieces along the batch that stay in a CPU's cache, where no graph is being recorded."""
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or t.y.device.type != "cpu"
    batch = t.y.shape[0] if t.y.dim() > 1 else 0
    if plain or t.y.numel() < 2 * BLOCK or batch < 2 or t.n.dim() != t.y.dim() or t.n.shape[0] != batch:
        return [t]
    threads = torch.get_num_threads()
    size = BLOCK * (2 * threads if threads > 1 else 1)  # fewer, larger pieces where threads wait for each other
    rows = max(1, size * batch // t.y.numel())
    return [replace(t, y=y, n=n) for y, n in zip(t.y.split(rows), t.n.split(rows), strict=True)]


def is_composed(magnitude: AnyValue, angular: Value) -> bool:
    """Whether a user-defined row leaves the derivatives to autograd."""
    return radial_table.composed(magnitude) or angular.row.composed
