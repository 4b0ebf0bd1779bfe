"""Bounds of single modules in evaluation mode: Lipschitz constants, and sup |output| given sup |input|."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from hyperball import bounds_layers as of
from hyperball.bounds_layers import NoBound, wide
from hyperball.convert.heads import ProjectedLinear
from hyperball.convert.layers import is_convolution
from hyperball.nn.decoupled import Decoupled, NormalizedLinear
from hyperball.nn.pooling import RobustPool1d, RobustPool2d
from hyperball.nn.projection import Projection

CONVEX = ("quadratic", "pseudo_huber", "huber", "absolute")
# Lipschitz constants of torch's elementwise modules, and whether |output| <= |input|.
ELEMENTWISE: dict[type[nn.Module], tuple[float, bool]] = {
    nn.Identity: (1.0, True), nn.Flatten: (1.0, True), nn.Dropout: (1.0, True), nn.Dropout1d: (1.0, True),
    nn.Dropout2d: (1.0, True), nn.ReLU: (1.0, True), nn.ReLU6: (1.0, True), nn.Tanh: (1.0, True),
    nn.Hardtanh: (1.0, True), nn.GELU: (1.13, True), nn.SiLU: (1.1, True), nn.Hardswish: (1.5, True),
    nn.Softplus: (1.0, False), nn.Sigmoid: (0.25, False), nn.Hardsigmoid: (1.0 / 6.0, False),
}  # fmt: skip


def is_layer(module: nn.Module) -> bool:
    """What is bounded as a whole: our layers, and torch's modules without children."""
    if isinstance(module, Decoupled | Projection | RobustPool1d | RobustPool2d | ProjectedLinear):
        return True
    held = type(module).__module__.startswith(("torch.nn", "hyperball.nn")) and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )
    return held and type(module).__name__ != "LearnedValue"


def bound_of(module: Any) -> tuple[float, float, bool]:
    """Lipschitz constant, sup |output| over all inputs, and whether the constant is the least one."""
    if isinstance(module, Decoupled):
        lipschitz, heights, exact = of.decoupled(module)
        return lipschitz, float(heights.max()), exact
    if isinstance(module, ProjectedLinear):
        return projected(module)
    if isinstance(module, nn.Linear) or is_convolution(module):
        refuse_prepared(module)
        lipschitz, exact = of.linear_map(module)
        return lipschitz, math.inf, exact
    if isinstance(module, _NormBase):
        scale, _ = batch_norm_map(module)
        return float(scale.abs().max()), math.inf, True
    if isinstance(module, Projection):
        if module.surface == "sphere":
            raise NoBound("a projection onto a sphere jumps at 0")
        return 1.0, float(module.radius.max()), True
    if isinstance(module, RobustPool1d | RobustPool2d):
        return robust_pool(module)
    return of_torch(module)


def projected(module: ProjectedLinear) -> tuple[float, float, bool]:
    """The norms of classifier, projection and whitening multiplied; |W|·r + |b| is the largest output."""
    inner, radius, _ = bound_of(module.projection)
    scale, _ = batch_norm_map(module.norm)
    weight = wide(module.weight)
    dual = {1.0: weight.abs().amax(1), 2.0: weight.norm(dim=1), math.inf: weight.abs().sum(1)}[
        float(module.projection.p)
    ]
    output = dual * radius + (0.0 if module.bias is None else wide(module.bias).abs())
    return of.spectral_norm(weight) * inner * float(scale.abs().max()), float(output.max()), False


def batch_norm_map(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of a·x + b in evaluation."""
    if module.running_mean is None or module.running_var is None:
        raise NoBound("it normalizes with the batch's own statistics")
    scale = (wide(module.running_var) + module.eps).rsqrt()
    scale = scale if module.weight is None else scale * wide(module.weight)
    shift = -wide(module.running_mean) * scale
    return scale, shift if module.bias is None else shift + wide(module.bias)


def robust_pool(module: Any) -> tuple[float, float, bool]:
    """A convex penalty's pooling moves by a mean of the moves, so by 1 at most, and sqrt(overlap) over windows."""
    value = module.penalty()
    shape = wide(value.parameters.get("shape", 1.0))
    convex = value.name in CONVEX or (value.name == "barron" and bool((shape >= 1).all()))
    if not convex:
        raise NoBound(f"pooling with {value.name}, which is not convex, jumps")
    if module.scale is not None:
        raise NoBound("its radius depends on the input")
    if module.predict_c is not None or module.predict_shape is not None:
        raise NoBound("its parameters are predicted from the input")
    return math.sqrt(windows(module, module.space)), math.inf, False


def windows(module: Any, dims: int) -> float:
    """In how many windows of a pooling an entry lies at most."""
    if module.kernel_size is None:
        return 1.0
    sizes, steps, gaps = (
        given if isinstance(given, tuple | list) else (given,) * dims
        for given in (module.kernel_size, module.stride or module.kernel_size, getattr(module, "dilation", 1))
    )
    counts = (-(-k // (s // math.gcd(s, d))) for k, s, d in zip(sizes, steps, gaps, strict=True))
    return float(math.prod(counts))


def of_torch(module: Any) -> tuple[float, float, bool]:
    """torch's own layers without weights, and its normalization within a sample."""
    kind = type(module)
    if kind in ELEMENTWISE:
        limits = {nn.ReLU6: 6.0, nn.Tanh: 1.0, nn.Sigmoid: 1.0, nn.Hardsigmoid: 1.0}
        output = limits.get(kind, math.inf)
        if kind is nn.Hardtanh:
            output = max(abs(module.min_val), abs(module.max_val))
        return ELEMENTWISE[kind][0], output, True
    if kind in (nn.LeakyReLU, nn.PReLU, nn.ELU):
        slope = {nn.LeakyReLU: "negative_slope", nn.PReLU: "weight", nn.ELU: "alpha"}[kind]
        return max(1.0, float(wide(getattr(module, slope)).abs().max())), math.inf, True
    if kind in (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d):
        if getattr(module, "divisor_override", None):
            raise NoBound("it has a divisor of its own")
        return math.sqrt(windows(module, int(kind.__name__[-2]))), math.inf, False
    if kind.__name__.startswith(("AdaptiveAvgPool", "AdaptiveMaxPool")):
        dims = int(kind.__name__[-2])
        size = module.output_size if isinstance(module.output_size, tuple | list) else (module.output_size,) * dims
        return math.sqrt(math.prod(one or 1 for one in size)), math.inf, False  # an entry lies in all windows at most
    if kind in (nn.LayerNorm, nn.GroupNorm):
        gain = 1.0 if module.weight is None else float(wide(module.weight).abs().max())
        return gain / math.sqrt(module.eps), math.inf, False
    if kind.__module__ == "hyperball.nn.frozen":
        raise NoBound("it is frozen: bound the model it was made from")
    raise NoBound(f"{kind.__name__} has no known bound")


def refuse_prepared(module: Any) -> None:
    """A subclass of torch's layers may do anything with its weight."""
    known = type(module).__module__.startswith(("torch.nn.modules", "hyperball.nn"))
    if not known:
        raise NoBound(f"{type(module).__name__} has a forward of its own")


def size_after(module: Any, size: float) -> float:
    """The largest |output| where no |input| is above `size`."""
    if isinstance(module, Decoupled):
        return float(of.heights(module, size).max())
    if isinstance(module, ProjectedLinear):
        return projected(module)[1]
    if isinstance(module, NormalizedLinear):
        return size * math.sqrt(module.in_features)
    if isinstance(module, nn.Linear) or is_convolution(module):
        return linear_size(module, size)
    if isinstance(module, _NormBase):
        scale, shift = batch_norm_map(module)
        return float((scale_by(scale.abs(), size) + shift.abs()).max())
    if isinstance(module, Projection):
        return min(size, float(module.radius.max()))
    if isinstance(module, nn.LayerNorm):
        return layer_norm_size(module)
    if isinstance(module, nn.GroupNorm):
        return math.inf
    limit = bound_of(module)[1]
    if type(module) in ELEMENTWISE and not ELEMENTWISE[type(module)][1]:
        return min(limit, size + 1.0)
    stretched = size * bound_of(module)[0] if isinstance(module, nn.LeakyReLU | nn.PReLU | nn.ELU) else size
    return min(limit, stretched)


def scale_by(factor: Tensor, size: float) -> Tensor:
    """factor·size with 0·inf = 0."""
    return torch.where(factor > 0, factor * size, 0.0)


def linear_size(module: Any, size: float) -> float:
    """max_o Σ|w_o|·size + |b_o|."""
    weight = wide(module.weight)
    if getattr(module, "transposed", False):
        weight = weight.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(0, 1)
    rows = scale_by(weight.abs().flatten(1).sum(1), size)
    return float((rows if module.bias is None else rows + wide(module.bias).abs()).max())


def layer_norm_size(module: Any) -> float:
    """|x̂| <= sqrt(entries), so that |output| <= |γ|·sqrt(entries) + |β|."""
    count = math.sqrt(math.prod(module.normalized_shape))
    gain = torch.ones(1, dtype=torch.float64) if module.weight is None else wide(module.weight).abs()
    return float((gain * count + (0.0 if module.bias is None else wide(module.bias).abs())).max())
