"""A model's forward followed call by call: how far each value moves, how large it can be, and what has no bound."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from hyperball.bounds_calls import CALLS, Call, Reach
from hyperball.bounds_layers import NoBound, wide
from hyperball.bounds_modules import is_gentle, is_layer, may_be_view, shape_after, size_after
from hyperball.bounds_shapes import Shape, Shapes

DESCRIPTIONS = ("shape", "ndim", "dtype", "device", "requires_grad")
DESCRIBING = {"size", "dim", "numel", "stride", "is_floating_point"}
INPLACE_OPERATORS = ("iadd", "isub", "imul", "itruediv")
FRESH = (
    operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.cat, torch.concat
)  # fmt: skip


class RecordingProxy(fx.Proxy):
    """A proxy that records `x += y` as what it is: torch.fx's own takes it for x + y, which leaves x alone."""


def _inplace(name: str) -> Callable[[Any, Any], Any]:
    target = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


for _name in INPLACE_OPERATORS:
    setattr(RecordingProxy, f"__{_name}__", _inplace(_name))


class LayerTracer(fx.Tracer):
    """Records what is bounded as a whole as single calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return RecordingProxy(node, self)


def follow(model: nn.Module, layers: dict[str, Any], input_bound: float) -> tuple[Reach, list[str]]:
    """The reach of the model's output, and what on the way has none; NoBound where forward cannot be followed."""
    if is_layer(model):
        layer = layers[""]
        size = layer.output if layer.reason else size_after(model, input_bound)
        return Reach(layer.lipschitz, size, Shape(None)), []
    return Walk(model, layers, input_bound).run()


def traced(model: nn.Module) -> tuple[nn.Module, fx.Graph]:
    """A copy of the model, in evaluation, and its graph: tracing may add tensors to the model it is given."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copied = copy.deepcopy(model).eval()
            return copied, LayerTracer().trace(copied)
    except Exception as error:  # whatever a forward may raise when it is given proxies
        first = (str(error).splitlines() or [""])[0]
        raise NoBound(
            f"forward of {type(model).__name__} cannot be traced ({first}): layers alone are bounded"
        ) from None


class Walk:
    """One pass over a graph. A value is a Reach, or None for what is no tensor (a size, a dtype) or another input."""

    def __init__(self, model: nn.Module, layers: dict[str, Any], input_bound: float) -> None:
        self.known = dict(tensors_of(model))
        self.model, self.graph = traced(model)
        self.layers, self.input_bound = layers, input_bound
        self.shapes = Shapes()
        self.values: dict[fx.Node, Reach | None] = {}
        self.memory: dict[fx.Node, int] = {}  # nodes with the same number may be views of the same memory
        self.stale: set[fx.Node] = set()

    def run(self) -> tuple[Reach, list[str]]:
        problems: list[str] = []
        for node in self.graph.nodes:
            try:
                self.refuse_stale(node)
                if node.op == "output":
                    return self.output(node.args[0]), problems
                self.values[node] = self.value_of(node)
            except NoBound as error:
                problems.append(str(error))
                if node.op == "output":
                    break
                self.values[node] = Reach(math.inf, math.inf, self.shapes.fresh())
            self.note_memory(node)
        return Reach(math.inf, math.inf, self.shapes.fresh()), problems or ["forward returns nothing"]

    def output(self, returned: Any) -> Reach:
        """That of everything returned, taken together, as often as it is returned."""
        held = [value for node in nodes_in(returned) if (value := self.values[node]) is not None]
        size = max((one.size for one in held), default=0.0)
        return Reach(math.hypot(*(one.lipschitz for one in held)), size, self.shapes.fresh())

    def value_of(self, node: fx.Node) -> Reach | None:
        if node.op == "placeholder":
            return Reach(1.0, self.input_bound, self.shapes.fresh()) if not self.values else None
        if node.op == "get_attr":
            return self.constant(str(node.target))
        if node.op == "call_module":
            return self.module(node)
        if node.target in DESCRIBING or (node.target is getattr and node.args[1] in DESCRIPTIONS):
            return None
        if all(self.values[given] is None for given in node.all_input_nodes):
            # Made of sizes and the like alone: a number, or a tensor that does not move but may be of any size.
            plain = getattr(node.target, "__module__", "") == "_operator" or node.target is getattr
            return None if plain else Reach(0.0, math.inf, self.shapes.fresh())
        return self.call(node)

    def constant(self, name: str) -> Reach | None:
        """A parameter or buffer stays, with its largest |entry|; a tensor that forward made may differ next time."""
        held: Any = operator.attrgetter(name)(self.model)
        if not isinstance(held, Tensor):
            return None
        size = math.inf
        if name in self.known and not held.is_meta:
            size = float(wide(held).abs().max().nan_to_num(math.inf)) if held.numel() else 0.0
        return Reach(0.0, size, Shape(None, tuple(int(one) for one in held.shape)))

    def module(self, node: fx.Node) -> Reach:
        name = str(node.target)
        given = self.values.get(node.args[0]) if len(node.args) == 1 and isinstance(node.args[0], fx.Node) else None
        if node.kwargs or given is None or given.several:
            raise NoBound(f"{name} is called with other arguments than one tensor")
        layer, part = self.layers[name], self.model.get_submodule(name)
        shape = shape_after(part, given.shape, self.shapes)
        if layer.reason:
            return Reach(math.inf, layer.output, shape)
        stretched = 0.0 if given.lipschitz == 0.0 else given.lipschitz * layer.lipschitz
        return Reach(stretched, size_after(part, given.size), shape)

    def call(self, node: fx.Node) -> Reach | None:
        rule = CALLS.get(node.target)
        said = f"{node.name}: {getattr(node.target, '__name__', node.target)}"
        if rule is None:
            raise NoBound(f"{said} of activations has no known bound")
        try:
            return rule(Call(node, self.values, self.shapes))
        except NoBound as error:
            raise NoBound(f"{said} {error}") from None

    def note_memory(self, node: fx.Node) -> None:
        """Which memory a value may share, and which values change when this one is written in place."""
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        writes = self.writes(node)
        if writes:
            alone = node.op == "call_module" or node.target in CALLS
            written = [first] if alone and first is not None else node.all_input_nodes
            places = {self.memory[given] for given in written}
            self.stale.update(other for other, place in self.memory.items() if place in places)
        shared = first is not None and (writes or self.shares(node))
        self.memory[node] = self.memory[first] if shared and first is not None else len(self.memory)

    def shares(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return may_be_view(self.model.get_submodule(str(node.target)))
        return node.target not in FRESH

    def writes(self, node: fx.Node) -> bool:
        """Whether it may change an argument so that it moves further or is larger: ReLU does neither."""
        if node.op == "call_module":
            part = self.model.get_submodule(str(node.target))
            return bool(getattr(part, "inplace", False)) and not is_gentle(part)
        if node.op not in ("call_function", "call_method"):
            return False
        name = str(getattr(node.target, "__name__", node.target))
        if name in INPLACE_OPERATORS:
            return True
        asked = any(given is True for given in (*node.args, *node.kwargs.values())) or "out" in node.kwargs
        foreign = not str(getattr(node.target, "__module__", None) or "torch").startswith(
            ("torch", "_operator", "buil")
        )
        return node.target not in CALLS and (asked or foreign or name.endswith("_") or name == "setitem")

    def refuse_stale(self, node: fx.Node) -> None:
        for given in node.all_input_nodes:
            if given in self.stale:
                raise NoBound(f"{node.name}: {given.name} was changed in place before")


def nodes_in(held: Any) -> Iterator[fx.Node]:
    """The nodes in nested tuples, lists and mappings, each as often as it is there."""
    if isinstance(held, fx.Node):
        yield held
    elif isinstance(held, dict):
        for one in held.values():
            yield from nodes_in(one)
    elif isinstance(held, tuple | list):
        for one in held:
            yield from nodes_in(one)
    elif isinstance(held, slice):
        yield from nodes_in((held.start, held.stop, held.step))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
