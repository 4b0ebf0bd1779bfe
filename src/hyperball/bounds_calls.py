"""Functions and methods in a forward: how far they stretch and how large they get. What is not here has no bound."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from hyperball import bounds_shapes as sizes
from hyperball.bounds_layers import NoBound, covering
from hyperball.bounds_shapes import Shape, Shapes

NO_BOUND = "of activations has no known bound"
PLAIN_INDEX = (int, slice, type(None), type(Ellipsis))


@dataclass(frozen=True)
class Reach:
    """Of a value: how far it moves per unit of the input's move, how large it can be, and its shape.

    `several` marks the tuple that chunk and split give.
    """

    lipschitz: float
    size: float
    shape: Shape
    several: bool = False


class Call:
    """A call's arguments, by place and name, with the reach of those that are tensors."""

    def __init__(self, node: fx.Node, values: dict[fx.Node, Reach | None], shapes: Shapes) -> None:
        self.node, self.values, self.shapes = node, values, shapes
        self.args: tuple[Any, ...] = node.args
        self.kwargs: dict[str, Any] = dict(node.kwargs)

    def tensor(self, place: int = 0) -> Reach:
        """The tensor at a place; NoBound where there is none."""
        given = self.args[place] if len(self.args) > place else None
        held = self.values[given] if isinstance(given, fx.Node) else None
        if held is None or held.several:
            raise NoBound(NO_BOUND)
        return held

    def options(self, *names: str, start: int = 1) -> dict[str, Any]:
        """The arguments behind the tensors under their names; NoBound for others, and for tensors among them."""
        rest = self.args[start:]
        if len(rest) > len(names) or not set(self.kwargs) <= set(names):
            raise NoBound("is given arguments of which no bound is known")
        given = {**dict(zip(names, rest, strict=False)), **self.kwargs}
        for held in given.values():
            if isinstance(held, fx.Node) and self.values[held] is not None:
                raise NoBound(NO_BOUND)
        return given

    def dims(self) -> tuple[Any, ...] | None:
        """The sizes of the first tensor, where all are known."""
        shape = self.shapes.resolve(self.tensor().shape)
        return shape.dims if shape.lead is None else None

    def gentle(self, dims: tuple[Any, ...] | None, limit: float = math.inf, stretch: float = 1.0) -> Reach:
        """What stretches by `stretch` at most and enlarges no entry."""
        given = self.tensor()
        shape = self.shapes.fresh() if dims is None else Shape(None, dims)
        return Reach(given.lipschitz * stretch, min(given.size, limit), shape)

    def same(self, limit: float = math.inf) -> Reach:
        given = self.tensor()
        return replace(given, size=min(given.size, limit))


def whole(*given: Any) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) for one in given)


def elementwise(*names: str, limit: float = math.inf) -> Callable[[Call], Reach]:
    def rule(call: Call) -> Reach:
        call.options(*names)
        return call.same(limit)

    return rule


def hardtanh(call: Call) -> Reach:
    given = call.options("min_val", "max_val", "inplace")
    low, high = given.get("min_val", -1.0), given.get("max_val", 1.0)
    if given.get("inplace") or not all(isinstance(one, int | float) for one in (low, high)):
        raise NoBound("is given arguments of which no bound is known")
    size = min(max(abs(low), abs(high)), max(call.tensor().size, low, -high))
    return replace(call.tensor(), size=size)


def dropout(call: Call) -> Reach:
    if call.options("p", "training", "inplace").get("training", True) is not False:
        raise NoBound("drops entries in evaluation too: give it training=self.training")
    return call.same()


def moved(call: Call) -> Reach:
    """transpose(a, b) and permute: every entry once, elsewhere."""
    dims, rest = call.dims(), list(call.args[1:])
    call.options(*(f"dim{i}" for i in range(len(rest))))
    order = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    if dims is None or not whole(*order) or not order:
        return call.gentle(None)
    if call.node.target in (torch.transpose, "transpose"):
        places = list(range(len(dims)))
        a, b = (one % len(dims) for one in order)
        places[a], places[b] = places[b], places[a]
    else:
        places = [one % len(dims) for one in order]
    return call.gentle(tuple(dims[place] for place in places))


def flatten(call: Call) -> Reach:
    given, dims = call.options("start_dim", "end_dim"), call.dims()
    start, end = given.get("start_dim", 0), given.get("end_dim", -1)
    return call.gentle(sizes.flattened(dims, start, end) if dims and whole(start, end) else None)


def reshape(call: Call) -> Reach:
    """Every entry once; a dtype in place of sizes reads them as something else."""
    rest = call.args[1:]
    call.options(*(f"size{i}" for i in range(len(rest))))
    flat = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
    if not flat or not all(whole(one) or isinstance(one, fx.Node) for one in flat):
        raise NoBound("is given arguments of which no bound is known")
    return call.gentle(tuple(flat) if whole(*flat) and all(one > 0 for one in flat) else None)


def squeeze(call: Call) -> Reach:
    call.options("dim")
    return call.gentle(None)


def unsqueeze(call: Call) -> Reach:
    dims, place = call.dims(), call.options("dim").get("dim")
    if dims is None or not isinstance(place, int):
        return call.gentle(None)
    place = place % (len(dims) + 1)
    return call.gentle((*dims[:place], 1, *dims[place:]))


def reduce(call: Call) -> Reach:
    """mean and amax over entries that no other output sees: ‖change‖ of one is at most that of what it sees."""
    given, dims = call.options("dim", "keepdim"), call.dims()
    over, keep = given.get("dim"), given.get("keepdim", False)
    over = [] if over is None else (list(over) if isinstance(over, tuple | list) else [over])
    known = dims is not None and whole(*over) and isinstance(keep, bool)
    return call.gentle(sizes.reduced(dims, over, keep) if known and dims is not None else None)


def max_pool(call: Call) -> Reach:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = call.options(*names)
    kernel, gap = both(given.get("kernel_size")), both(given.get("dilation", 1))
    step = kernel if given.get("stride") in (None, [], ()) else both(given.get("stride"))
    if given.get("return_indices", False) is not False:
        raise NoBound("gives indices too")
    return call.gentle(None, stretch=math.sqrt(covering(kernel, step, gap)))


def adaptive_average(call: Call) -> Reach:
    """An entry lies in all windows at most."""
    size = both(call.options("output_size").get("output_size"))
    dims = call.shapes.of_rank(call.tensor().shape, 4, {})
    return call.gentle(None if dims is None else (*dims[:2], *size), stretch=math.sqrt(math.prod(size)))


def both(given: Any) -> tuple[int, int]:
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    if len(pair) == 1:
        pair = pair * 2
    if len(pair) != 2 or not whole(*pair):
        raise NoBound("has windows of which no bound is known")
    return pair[0], pair[1]


def pieces(call: Call) -> Reach:
    """chunk and split: every entry once, in one of several tensors."""
    names = ("chunks", "dim") if call.node.target in (torch.chunk, "chunk") else ("split_size", "dim")
    given, dims = call.options(*names), call.dims()
    count, place, shape = given.get(names[0]), given.get("dim", 0), call.shapes.fresh()
    if names[0] == "chunks" and dims is not None and isinstance(count, int) and whole(place):
        size = dims[place % len(dims)]
        if isinstance(size, int) and size % count == 0:
            shape = Shape(None, tuple(size // count if i == place % len(dims) else d for i, d in enumerate(dims)))
    return Reach(call.tensor().lipschitz, call.tensor().size, shape, several=True)


def item(call: Call) -> Reach | None:
    """x[...] that takes every entry once at most, or one of several tensors."""
    held, index = call.values[call.args[0]], call.args[1]
    if held is None or any(call.values[one] is not None for one in call.node.all_input_nodes[1:]):
        raise NoBound(NO_BOUND)
    if held.several:
        if not whole(index):
            raise NoBound(NO_BOUND)
        # Pieces of a size that is not known may differ in it.
        known = call.shapes.resolve(held.shape).lead is None
        return replace(held, several=False, shape=held.shape if known else call.shapes.fresh())
    places = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, PLAIN_INDEX) and not isinstance(one, bool) for one in places):
        raise NoBound(NO_BOUND)
    dims = call.dims()
    return call.gentle(None if dims is None else sizes.indexed(dims, places, call.shapes.symbol))


def operand(call: Call, place: int) -> Reach:
    """A tensor, or a number as one that does not move."""
    if len(call.args) != 2 or call.kwargs:
        raise NoBound("is given arguments of which no bound is known")
    given = call.args[place]
    if isinstance(given, int | float) and math.isfinite(given):
        return Reach(0.0, float(abs(given)), Shape(None))
    return call.tensor(place)


def terms(call: Call) -> tuple[Reach, Reach, Shape]:
    """Both operands, each stretched by the square root of how often it is repeated, and the result's shape."""
    one, two = operand(call, 0), operand(call, 1)
    shape, *repeats = call.shapes.broadcast(one.shape, two.shape)
    stretched = []
    for term, many in zip((one, two), repeats, strict=True):
        if many is None and term.lipschitz > 0:
            raise NoBound("may repeat one operand along the other, of sizes that are not known")
        stretched.append(replace(term, lipschitz=term.lipschitz * math.sqrt(many or 1.0) if term.lipschitz else 0.0))
    return stretched[0], stretched[1], shape


def add(call: Call) -> Reach:
    one, two, shape = terms(call)
    return Reach(one.lipschitz + two.lipschitz, one.size + two.size, shape)


def multiply(call: Call) -> Reach:
    """By what does not move."""
    one, two, shape = terms(call)
    moving, fixed = (one, two) if two.lipschitz == 0.0 else (two, one)
    if fixed.lipschitz > 0.0 or not math.isfinite(fixed.size):
        raise NoBound(NO_BOUND)
    return Reach(product(moving.lipschitz, fixed.size), product(moving.size, fixed.size), shape)


def divide(call: Call) -> Reach:
    number = call.args[1] if len(call.args) == 2 and not call.kwargs else None
    if not isinstance(number, int | float) or not math.isfinite(number) or number == 0:
        raise NoBound(NO_BOUND)
    given = call.tensor()
    return replace(given, lipschitz=given.lipschitz / abs(number), size=given.size / abs(number))


def product(one: float, two: float) -> float:
    """The product, with 0·inf = 0: what does not move stays."""
    return 0.0 if one == 0.0 or two == 0.0 else one * two


def concatenate(call: Call) -> Reach:
    """hypot of the constants, the largest size."""
    given = {**dict(zip(("tensors", "dim"), call.args, strict=False)), **call.kwargs}
    listed = given.get("tensors")
    if not set(given) <= {"tensors", "dim"} or not isinstance(listed, tuple | list):
        raise NoBound("is given arguments of which no bound is known")
    held = [call.values[one] if isinstance(one, fx.Node) else None for one in listed]
    parts = [one for one in held if one is not None and not one.several]
    if len(parts) < len(held) or not parts:
        raise NoBound("is given more than tensors")
    lipschitz = math.hypot(*(one.lipschitz for one in parts))
    return Reach(lipschitz, max(one.size for one in parts), joined(call.shapes, parts, given.get("dim", 0)))


def joined(shapes: Shapes, parts: list[Reach], place: Any) -> Shape:
    """The sizes of a concatenation: along `place` they add up, elsewhere they are those of any part."""
    resolved = [shapes.resolve(one.shape) for one in parts]
    ranks = {len(one.dims) for one in resolved}
    if any(one.lead is not None for one in resolved) or len(ranks) > 1 or not whole(place):
        return shapes.fresh()
    (rank,) = ranks
    along = [one.dims[place % rank] for one in resolved]
    total = sum(along) if whole(*along) else shapes.symbol()
    return Shape(None, tuple(total if i == place % rank else size for i, size in enumerate(resolved[0].dims)))


Rule = Callable[[Call], Reach | None]
CALLS: dict[Any, Rule] = {
    **dict.fromkeys((torch.relu, F.relu, "relu", "relu_"), elementwise("inplace")),
    **dict.fromkeys((torch.tanh, F.tanh, "tanh"), elementwise(limit=1.0)),
    **dict.fromkeys(("contiguous", "detach", "clone", "float"), elementwise()),
    **dict.fromkeys((torch.transpose, torch.permute, "transpose", "permute"), moved),
    **dict.fromkeys((torch.flatten, "flatten"), flatten),
    **dict.fromkeys((torch.reshape, "reshape", "view"), reshape),
    **dict.fromkeys((torch.squeeze, "squeeze"), squeeze),
    **dict.fromkeys((torch.unsqueeze, "unsqueeze"), unsqueeze),
    **dict.fromkeys((torch.mean, torch.amax, "mean", "amax"), reduce),
    **dict.fromkeys((torch.chunk, "chunk", torch.split, "split"), pieces),
    **dict.fromkeys((operator.add, operator.sub, operator.iadd, operator.isub, torch.add, torch.sub), add),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul), multiply),
    **dict.fromkeys((operator.truediv, operator.itruediv), divide),
    **dict.fromkeys((torch.cat, torch.concat), concatenate),
    F.relu6: elementwise("inplace", limit=6.0),
    F.hardtanh: hardtanh,
    F.dropout: dropout,
    F.max_pool2d: max_pool,
    F.adaptive_avg_pool2d: adaptive_average,
    operator.getitem: item,
}  # fmt: skip
