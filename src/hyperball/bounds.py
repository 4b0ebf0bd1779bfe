"""`bounds`: how far a network can stretch a difference of inputs, and how large its outputs can be.

Both hold for a model in evaluation mode, with Euclidean norms over all that belongs to one sample. Layers follow each
other along a trace of forward: constants multiply, those of a sum add up, those of a concatenation add up in squares.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hyperball.bounds_layers import NoBound
from hyperball.bounds_modules import bound_of, is_layer
from hyperball.bounds_trace import follow
from hyperball.convert.running import evaluating


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


def bounds(model: nn.Module, *, input_bound: float = math.inf) -> Bounds:
    """Upper bounds of Lipschitz constants and of |output|, layer by layer and for the network, in evaluation mode.

    Matrix norms are exact. That of a convolution over overlapping patches is bounded by sqrt(overlap) times that of its
    matrix and, where it is plain, by its Fourier transform. `input_bound` is the largest |entry| of an input; bounded
    operators give finite outputs without it. What has no bound (attention, a product of two activations, a sum that may
    repeat one term along the other, projections onto spheres, user-defined rows) is named. Inputs are batches, of any
    size of image, and forward does the same every time.

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
    with evaluating(model):
        layers = {name: layer_bound(name, part) for name, part in model.named_modules() if is_layer(part)}
        problems = [f"{layer.name or 'the model'}: {layer.reason}" for layer in layers.values() if layer.reason]
        try:
            refuse_hooks(model)
            reach, more = follow(model, layers, float(input_bound))
            lipschitz, output = reach.lipschitz, reach.size
        except NoBound as error:
            lipschitz, output, more = math.inf, math.inf, [str(error)]
    unbounded = tuple(dict.fromkeys([*problems, *more]))
    return Bounds(tuple(layers.values()), lipschitz, output, unbounded)


def refuse_hooks(model: nn.Module) -> None:
    """A hook, or a forward that was put in place of the class's own, may do anything."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            raise NoBound(f"{name or 'the model'} has hooks, which may change what goes in and out")


def layer_bound(name: str, module: nn.Module) -> LayerBound:
    kind = type(module).__name__
    try:
        lipschitz, output, exact = bound_of(module)
        lipschitz, output = (math.inf if math.isnan(one) else one for one in (lipschitz, output))
    except NoBound as error:
        return LayerBound(name, kind, math.inf, math.inf, False, str(error))
    reason = "" if math.isfinite(lipschitz) else "its slope is not bounded"
    return LayerBound(name, kind, lipschitz, output, exact, reason)
