"""Sizes along a trace of forward, as numbers or symbols: a sum that broadcasts stretches, so that sizes must be known.

A symbol is any hashable value: that of an input's own size, or a sum, product or quotient made of one. Equal symbols
are equal sizes, whatever the input; of unequal ones nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Size = Any  # a whole number, or a symbol


@dataclass(frozen=True)
class Shape:
    """`dims`, behind unknown sizes that `lead` stands for (None: there are none)."""

    lead: int | None
    dims: tuple[Size, ...] = ()


class Shapes:
    """Shapes of one trace; what a layer asks of its input is remembered of the unknown sizes."""

    def __init__(self) -> None:
        self.known: dict[int, Shape] = {}
        self.count = 0

    def fresh(self) -> Shape:
        """A shape of which nothing is known."""
        self.count += 1
        return Shape(self.count)

    def symbol(self) -> Size:
        self.count += 1
        return ("size", self.count)

    def resolve(self, shape: Shape) -> Shape:
        while shape.lead is not None and shape.lead in self.known:
            held = self.known[shape.lead]
            shape = Shape(held.lead, held.dims + shape.dims)
        return shape

    def of_rank(self, shape: Shape, rank: int, given: Mapping[int, int]) -> tuple[Size, ...] | None:
        """The sizes of a tensor that has `rank` of them, some of them `given`; None where it has another number."""
        shape = self.resolve(shape)
        missing = rank - len(shape.dims)
        if shape.lead is None or missing < 0:
            return shape.dims if shape.lead is None and missing == 0 else None
        self.known[shape.lead] = Shape(None, tuple(given.get(i, ("input", shape.lead, i)) for i in range(missing)))
        return self.resolve(shape).dims

    def with_last(self, shape: Shape, before: int, after: int) -> Shape:
        """The shape with its last size, which is `before`, replaced."""
        shape = self.resolve(shape)
        if shape.dims:
            return Shape(shape.lead, (*shape.dims[:-1], after))
        if shape.lead is None:
            return self.fresh()
        front = self.fresh()
        self.known[shape.lead] = Shape(front.lead, (before,))
        return Shape(front.lead, (after,))

    def broadcast(self, one: Shape, two: Shape) -> tuple[Shape, float | None, float | None]:
        """The shape of a sum, and how often an entry of each term is repeated in it; None where that is unknown."""
        one, two = self.resolve(one), self.resolve(two)
        if one == two:
            return one, 1.0, 1.0
        if is_single(one) or is_single(two):
            return self.beside_single(one, two)
        if one.lead != two.lead and not (covers(one, two) or covers(two, one)):
            return self.fresh(), None, None
        lead = one.lead if one.lead is not None else two.lead
        length = max(len(one.dims), len(two.dims))
        if one.lead is not None and one.lead == two.lead and len(one.dims) != len(two.dims):
            return self.fresh(), None, None
        pairs = [pair(*both) for both in zip(filled(one, length), filled(two, length), strict=True)]
        many_one = product([repeats for _, repeats, _ in pairs])
        many_two = product([repeats for _, _, repeats in pairs])
        if one.lead != two.lead:  # what has fewer sizes is repeated along the unknown ones
            many_one, many_two = (None, many_two) if one.lead is None else (many_one, None)
        return Shape(lead, tuple(size for size, _, _ in pairs)), many_one, many_two

    def beside_single(self, one: Shape, two: Shape) -> tuple[Shape, float | None, float | None]:
        """A single entry beside another tensor: it is repeated as often as that has entries, the other never."""
        single, other = (one, two) if is_single(one) else (two, one)
        shape = other if len(single.dims) <= len(other.dims) else self.fresh()
        known = other.lead is None and all(isinstance(size, int) for size in other.dims)
        repeats = float(math.prod(other.dims)) if known else None
        return (shape, repeats, 1.0) if single is one else (shape, 1.0, repeats)


def is_single(shape: Shape) -> bool:
    return shape.lead is None and all(size == 1 for size in shape.dims)


def covers(open_one: Shape, closed: Shape) -> bool:
    """Whether all sizes of a tensor lie beside known ones of another with unknown leading sizes."""
    return open_one.lead is not None and closed.lead is None and len(closed.dims) <= len(open_one.dims)


def filled(shape: Shape, length: int) -> tuple[Size, ...]:
    return (1,) * (length - len(shape.dims)) + shape.dims


def pair(one: Size, two: Size) -> tuple[Size, float | None, float | None]:
    """Of two sizes beside each other: the result's, and how often each is repeated."""
    if one == two:
        return one, 1.0, 1.0
    if one == 1:
        return two, float(two) if isinstance(two, int) else None, 1.0
    if two == 1:
        return one, 1.0, float(one) if isinstance(one, int) else None
    return ("either", one, two), None, None


def product(repeats: Sequence[float | None]) -> float | None:
    return None if None in repeats else math.prod(one for one in repeats if one is not None)


def plus(size: Size, number: int) -> Size:
    if isinstance(size, int):
        return size + number
    base, offset = (size[1], size[2]) if size[0] == "plus" else (size, 0)
    return base if offset + number == 0 else ("plus", base, offset + number)


def per_step(size: Size, step: int) -> Size:
    """⌊size/step⌋."""
    if isinstance(size, int):
        return size // step
    return size if step == 1 else ("per", size, step)


def times(sizes: Sequence[Size]) -> Size:
    whole = math.prod(size for size in sizes if isinstance(size, int))
    rest = tuple(size for size in sizes if not isinstance(size, int))
    if not rest:
        return whole
    return rest[0] if whole == 1 and len(rest) == 1 else ("times", whole, rest)


def windows_along(size: Size, kernel: int, step: int, padding: int, gap: int) -> Size:
    """⌊(size + padding − gap·(kernel − 1) − 1)/step⌋ + 1, with the padding of both sides."""
    return plus(per_step(plus(size, padding - gap * (kernel - 1) - 1), step), 1)


def flattened(dims: Sequence[Size], start: int, end: int) -> tuple[Size, ...]:
    start, end = start % len(dims), end % len(dims)
    return (*dims[:start], times(dims[start : end + 1]), *dims[end + 1 :])


def reduced(dims: Sequence[Size], over: Sequence[int], keep: bool) -> tuple[Size, ...]:
    places = {place % len(dims) for place in over} if over else set(range(len(dims)))
    return tuple(1 if i in places else size for i, size in enumerate(dims) if keep or i not in places)


def indexed(dims: Sequence[Size], index: Sequence[Any], symbol: Any) -> tuple[Size, ...] | None:
    """The sizes after numbers, slices, None and one Ellipsis; a slice that is not whole has an unknown size."""
    taken = sum(1 for one in index if one is not None and one is not Ellipsis)
    if taken > len(dims) or sum(1 for one in index if one is Ellipsis) > 1:
        return None
    rest, made = list(dims), []
    for one in index:
        if one is None:
            made.append(1)
        elif one is Ellipsis:
            count = len(dims) - taken
            made += rest[:count]
            del rest[:count]
        else:
            size = rest.pop(0)
            if isinstance(one, slice):
                made.append(size if one == slice(None) else symbol())
    return tuple(made + rest)
