"""`bounds`: how far a network can stretch a difference of inputs, and how large its outputs can be.

Both hold for a model in evaluation mode, with Euclidean norms over all that belongs to one sample. Layers follow each
other along a trace of forward: constants multiply, those of a sum add up, those of a concatenation add up in squares.
"""

from __future__ import annotations

import copy
import math
import operator
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from hyperball.bounds_layers import NoBound
from hyperball.bounds_modules import bound_of, is_layer, size_after


@dataclass(frozen=True)
class LayerBound:
    """One layer: its Lipschitz constant, the largest |output| for any input, and why one of them is infinite."""

    name: str
    kind: str
    lipschitz: float
    output: float
    exact: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Bounds:
    """Upper bounds layer by layer and of the network; `unbounded` names what has none, or why there is no network's."""

    layers: tuple[LayerBound, ...]
    lipschitz: float
    output: float
    unbounded: tuple[str, ...]

    def __getitem__(self, name: str) -> LayerBound:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}; known: {', '.join(layer.name for layer in self.layers)}")

    def as_dict(self) -> dict[str, Any]:
        """Lists, texts, numbers and None alone, ready for JSON; infinity becomes None."""
        plain = asdict(self)
        layers = [{key: finite(item) for key, item in layer.items()} for layer in plain["layers"]]
        return {
            "layers": layers,
            "lipschitz": finite(self.lipschitz),
            "output": finite(self.output),
            "unbounded": list(self.unbounded),
        }

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=5)
        lines = [f"{'layer':<{width}}  {'Lipschitz':>10}  {'|output|':>10}  kind"]
        for layer in self.layers:
            mark = " (exact)" if layer.exact else (f" ({layer.reason})" if layer.reason else "")
            name = layer.name or "(model)"
            lines.append(f"{name:<{width}}  {layer.lipschitz:>10.4g}  {layer.output:>10.4g}  {layer.kind}{mark}")
        lines.append(f"{'network':<{width}}  {self.lipschitz:>10.4g}  {self.output:>10.4g}")
        return "\n".join([*lines, *(f"no bound: {text}" for text in self.unbounded)])


def finite(item: Any) -> Any:
    return None if isinstance(item, float) and not math.isfinite(item) else item


@dataclass(frozen=True)
class Reach:
    """Of a value on the way: how far it moves per unit of the input's move, and how large it can be."""

    lipschitz: float
    size: float


def bounds(model: nn.Module, *, input_bound: float = math.inf) -> Bounds:
    """Upper bounds of Lipschitz constants and of |output|, layer by layer and for the network, in evaluation mode.

    Matrix norms are exact. That of a convolution over overlapping patches is bounded by sqrt(overlap) times that of its
    matrix and, where it is plain, by its Fourier transform. `input_bound` is the largest |entry| of an input; bounded
    operators give finite outputs without it. What has no bound (attention, a product of two activations, projections
    onto spheres, user-defined rows) is named.

    >>> import torch, hyperball as hb
    >>> model = torch.nn.Sequential(hb.nn.DecoupledLinear(8, 4, magnitude="ball(rho=2, relative=False)"))
    >>> round(hb.bounds(model).output, 3)
    1.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(input_bound, int | float) or isinstance(input_bound, bool) or not input_bound >= 0:
        raise ValueError(f"`input_bound` must be a number >= 0, got {input_bound!r}")
    model = getattr(model, "_orig_mod", model)
    copied = copy.deepcopy(model).eval()
    with torch.no_grad():
        layers = {name: layer_bound(name, part) for name, part in copied.named_modules() if is_layer(part)}
        problems = [f"{layer.name or 'the model'}: {layer.reason}" for layer in layers.values() if layer.reason]
        try:
            refuse_hooks(copied)
            reach, more = follow(copied, layers, float(input_bound))
        except NoBound as error:
            reach, more = Reach(math.inf, math.inf), [str(error)]
    unbounded = tuple(dict.fromkeys([*problems, *more]))
    return Bounds(tuple(layers.values()), reach.lipschitz, reach.size, unbounded)


def refuse_hooks(model: nn.Module) -> None:
    """A hook, or a forward that was put in place of the class's own, may do anything."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            raise NoBound(f"{name or 'the model'} has hooks, which may change what goes in and out")


def layer_bound(name: str, module: nn.Module) -> LayerBound:
    kind = type(module).__name__
    try:
        lipschitz, output, exact = bound_of(module)
    except NoBound as error:
        return LayerBound(name, kind, math.inf, math.inf, False, str(error))
    reason = "" if math.isfinite(lipschitz) else "its slope is not bounded"
    return LayerBound(name, kind, lipschitz, output, exact, reason)


class LayerTracer(fx.Tracer):
    """Records what is bounded as a whole as single calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_layer(m)


# Functions and methods that neither stretch a difference nor enlarge an entry, whatever their other arguments.
GENTLE = {
    torch.relu, F.relu, F.relu6, F.hardtanh, torch.flatten, F.dropout, F.adaptive_avg_pool2d, F.max_pool2d, torch.mean,
    torch.squeeze, torch.unsqueeze, torch.permute, torch.transpose, torch.reshape, torch.tanh, torch.amax, torch.chunk,
}  # fmt: skip
GENTLE_METHODS = {
    "relu", "relu_", "flatten", "view", "reshape", "permute", "transpose", "contiguous", "mean", "squeeze",
    "unsqueeze", "tanh", "detach", "clone", "float", "amax", "chunk", "split",
}  # fmt: skip
SUMS = {operator.add, operator.iadd, torch.add, operator.sub, torch.sub}
CONCATENATIONS = {torch.cat, torch.concat}
SHAPES = {"size", "dim", "numel"}
DESCRIPTIONS = ("shape", "ndim", "dtype", "device")
PLAIN_INDEX = (int, slice, type(None), type(Ellipsis))


def follow(model: nn.Module, layers: dict[str, LayerBound], input_bound: float) -> tuple[Reach, list[str]]:
    """The reach of the model's output along a trace of forward, and what on the way has none."""
    if is_layer(model):
        layer = layers[""]
        return Reach(layer.lipschitz, layer.output if layer.reason else size_after(model, input_bound)), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = LayerTracer().trace(model)
    except Exception as error:  # whatever a forward may raise when it is given proxies
        first = (str(error).splitlines() or [""])[0]
        raise NoBound(
            f"forward of {type(model).__name__} cannot be traced ({first}): layers alone are bounded"
        ) from None
    values: dict[fx.Node, Reach | None] = {}
    problems: list[str] = []
    for node in graph.nodes:
        if node.op == "output":
            return output_reach(node, values), problems
        try:
            values[node] = reach_of(node, model, layers, values, input_bound)
        except NoBound as error:
            values[node] = Reach(math.inf, math.inf)
            problems.append(str(error))
    raise NoBound("forward returns nothing")


def output_reach(node: fx.Node, values: dict[fx.Node, Reach | None]) -> Reach:
    """That of everything returned, taken together."""
    held = [values[given] or Reach(0.0, 0.0) for given in node.all_input_nodes]
    return Reach(math.hypot(*(one.lipschitz for one in held)), max((one.size for one in held), default=0.0))


def reach_of(
    node: fx.Node, model: nn.Module, layers: dict[str, LayerBound], values: dict[fx.Node, Reach | None], bound: float
) -> Reach | None:
    """The reach of one node; None for what is no tensor that depends on the input."""
    if node.op == "placeholder":
        return Reach(1.0, bound) if not values else None
    if node.op == "get_attr":
        return None
    moving = [values[given] for given in node.all_input_nodes]
    held = [one for one in moving if one is not None]
    if not held:
        return None
    if node.op == "call_module":
        name, (given, *_) = str(node.target), held
        layer, part = layers[name], model.get_submodule(name)
        if layer.reason:
            return Reach(math.inf, layer.output)
        return Reach(times(given.lipschitz, layer.lipschitz), size_after(part, given.size))
    return reach_of_call(node, held, len(held) == len(moving))


def times(one: float, two: float) -> float:
    """The product, with 0·inf = 0: what does not move stays."""
    return 0.0 if one == 0.0 or two == 0.0 else one * two


def reach_of_call(node: fx.Node, held: list[Reach], all_move: bool) -> Reach | None:
    """Functions and methods: sums add, concatenations add in squares, scaling by a number scales."""
    target = node.target
    if target in SHAPES or (target is getattr and node.args[1] in DESCRIPTIONS):
        return None
    if target is operator.getitem and plain_index(node.args[1]):
        return held[0]
    if (target in GENTLE or target in GENTLE_METHODS) and len(held) == 1:
        if target in (F.max_pool2d, F.adaptive_avg_pool2d) and not pools_apart(node):
            raise NoBound(f"{node.name}: windows of a pooling function may overlap")
        return held[0]
    numbers = [given for given in node.args if isinstance(given, int | float)]
    if target in SUMS and not node.kwargs and not all_move and len(held) == 1:
        return Reach(held[0].lipschitz, math.inf)  # a constant is added
    if target in SUMS and not node.kwargs and all_move:
        same = len(held) == 1 and not numbers  # x + x
        total = Reach(sum(one.lipschitz for one in held), sum(one.size for one in held) + sum(map(abs, numbers)))
        return Reach(2 * total.lipschitz, 2 * total.size) if same else total
    if target in CONCATENATIONS:
        count = len(node.args[0])  # type: ignore[arg-type]
        repeats = max(count - len(held), 0) + 1
        return Reach(math.hypot(*(one.lipschitz for one in held)) * math.sqrt(repeats), max(one.size for one in held))
    if target in (operator.mul, operator.truediv) and len(held) == 1 and len(numbers) == 1:
        if target is operator.mul:
            return Reach(times(held[0].lipschitz, abs(numbers[0])), times(held[0].size, abs(numbers[0])))
        if node.args[1] is numbers[0] and numbers[0] != 0:
            return Reach(held[0].lipschitz / abs(numbers[0]), held[0].size / abs(numbers[0]))
    raise NoBound(f"{node.name}: {getattr(target, '__name__', target)} of activations has no known bound")


def plain_index(index: Any) -> bool:
    """Whether an index takes every entry once at most."""
    return all(isinstance(one, PLAIN_INDEX) for one in (index if isinstance(index, tuple) else (index,)))


def pools_apart(node: fx.Node) -> bool:
    """Whether the windows of a pooling function do not overlap."""
    size = node.args[1] if len(node.args) > 1 else node.kwargs.get("output_size", node.kwargs.get("kernel_size"))
    if node.target is F.adaptive_avg_pool2d:
        return bool(size in (1, (1, 1), [1, 1]))
    step = node.args[2] if len(node.args) > 2 else node.kwargs.get("stride")
    return bool(step is None or step == size)
