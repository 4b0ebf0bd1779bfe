"""Bounds of single modules in evaluation mode: Lipschitz constants, and sup |output| given sup |input|."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hyperball import bounds_layers as of
from hyperball.bounds_layers import NoBound, wide
from hyperball.bounds_shapes import Shape, Shapes, flattened, plus, windows_along
from hyperball.convert.heads import ProjectedLinear
from hyperball.convert.layers import is_convolution
from hyperball.nn.decoupled import Decoupled, NormalizedLinear
from hyperball.nn.pooling import RobustPool1d, RobustPool2d
from hyperball.nn.projection import Projection

CONVEX = ("quadratic", "pseudo_huber", "huber", "absolute")
# Lipschitz constants of torch's elementwise modules, and whether |output| <= |input|. GELU's and SiLU's are rounded up.
ELEMENTWISE: dict[type[nn.Module], tuple[float, bool]] = {
    nn.Identity: (1.0, True), nn.Flatten: (1.0, True), nn.Dropout: (1.0, True), nn.Dropout1d: (1.0, True),
    nn.Dropout2d: (1.0, True), nn.ReLU: (1.0, True), nn.ReLU6: (1.0, True), nn.Tanh: (1.0, True),
    nn.Hardtanh: (1.0, False), nn.GELU: (1.13, True), nn.SiLU: (1.1, True), nn.Hardswish: (1.5, True),
    nn.Softplus: (1.0, False), nn.Sigmoid: (0.25, False), nn.Hardsigmoid: (1.0 / 6.0, False),
}  # fmt: skip


ROUNDED = (nn.GELU, nn.SiLU)
LEAST_THRESHOLD = 20.0  # beyond it log(1 + exp(x)) and x, between which Softplus jumps, are alike in float32


def is_layer(module: nn.Module) -> bool:
    """What is bounded as a whole: our layers, and torch's modules without children; a subclass may do anything."""
    home = type(module).__module__
    if isinstance(module, Decoupled | Projection | RobustPool1d | RobustPool2d | ProjectedLinear):
        return home.startswith("hyperball.")
    held = home.startswith(("torch.nn", "hyperball.nn")) and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )
    return held and type(module).__name__ != "LearnedValue"


def refuse_changed(module: nn.Module) -> None:
    """Hooks, or a forward in place of the class's own, may do anything; a weight that is not there says nothing."""
    for tensor in (*module.parameters(), *module.buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer) or tensor.is_meta:
            raise NoBound("its weights have no values yet")
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise NoBound("it has hooks, which may change what goes in and out")


def is_gentle(module: Any) -> bool:
    """Whether an elementwise module neither stretches nor enlarges: then it may work in place without harm."""
    if isinstance(module, nn.Hardtanh):
        return bool(module.min_val <= 0 <= module.max_val)
    if isinstance(module, nn.LeakyReLU):
        return abs(module.negative_slope) <= 1
    constant, shrinks = ELEMENTWISE.get(type(module), (math.inf, False))
    return constant <= 1.0 and shrinks


def may_be_view(module: Any) -> bool:
    """Whether the output may share memory with the input."""
    return not (isinstance(module, Decoupled | nn.Linear | _NormBase) or is_convolution(module))


def bound_of(module: Any) -> tuple[float, float, bool]:
    """Lipschitz constant, sup |output| over all inputs, and whether the constant is the least one."""
    refuse_changed(module)
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
    kernel, step, gap, _ = window_geometry(module, dims)
    return of.covering(kernel, step, gap)


def window_geometry(module: Any, dims: int) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, dilation and padding of a pooling, one number a dimension."""
    given = (module.kernel_size, module.stride or module.kernel_size, getattr(module, "dilation", 1), module.padding)
    kernel, step, gap, padding = (tuple(one) if isinstance(one, tuple | list) else (one,) * dims for one in given)
    return tuple(k * dims if len(k) < dims else k for k in (kernel, step, gap, padding))


def of_torch(module: Any) -> tuple[float, float, bool]:
    """torch's own layers without weights, and its normalization within a sample."""
    kind = type(module)
    if kind in ELEMENTWISE:
        limits = {nn.ReLU6: 6.0, nn.Tanh: 1.0, nn.Sigmoid: 1.0, nn.Hardsigmoid: 1.0}
        output = limits.get(kind, math.inf)
        if kind is nn.Hardtanh:
            output = max(abs(module.min_val), abs(module.max_val))
        if kind is nn.Softplus and not (module.beta > 0 and module.threshold >= LEAST_THRESHOLD):
            raise NoBound("it jumps at its threshold, or its beta is not positive")
        return ELEMENTWISE[kind][0], output, kind not in ROUNDED
    if kind in (nn.LeakyReLU, nn.PReLU, nn.ELU):
        slope = {nn.LeakyReLU: "negative_slope", nn.PReLU: "weight", nn.ELU: "alpha"}[kind]
        return max(1.0, float(wide(getattr(module, slope)).abs().max())), math.inf, True
    if kind in (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d):
        if getattr(module, "divisor_override", None):
            raise NoBound("it has a divisor of its own")
        if getattr(module, "return_indices", False):
            raise NoBound("it gives indices too")
        return math.sqrt(windows(module, int(kind.__name__[-2]))), math.inf, False
    if kind.__name__.startswith(("AdaptiveAvgPool", "AdaptiveMaxPool")):
        if getattr(module, "return_indices", False):
            raise NoBound("it gives indices too")
        dims = int(kind.__name__[-2])
        size = module.output_size if isinstance(module.output_size, tuple | list) else (module.output_size,) * dims
        return math.sqrt(math.prod(one or 1 for one in size)), math.inf, False  # an entry lies in all windows at most
    if kind in (nn.LayerNorm, nn.GroupNorm):
        gain = 1.0 if module.weight is None else float(wide(module.weight).abs().max())
        return gain / math.sqrt(module.eps) if module.eps > 0 else math.inf, math.inf, False
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
        return float((scale_by(scale.abs(), size) + shift.abs()).max()) * of.SLACK
    if isinstance(module, Projection):
        return min(size, float(module.radius.max()))
    if isinstance(module, nn.LayerNorm):
        return layer_norm_size(module)
    if isinstance(module, nn.GroupNorm):
        return math.inf
    limit = bound_of(module)[1]
    if isinstance(module, nn.Softplus):
        return (size + math.log(2.0) / module.beta) * of.SLACK
    if type(module) is nn.Hardtanh:
        return min(limit, max(size, module.min_val, -module.max_val))
    if type(module) in ELEMENTWISE and not ELEMENTWISE[type(module)][1]:
        return limit
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
    rows = scale_by(weight.abs().flatten(1).sum(1), size) * of.SLACK
    return float((rows if module.bias is None else rows + wide(module.bias).abs()).max())


def layer_norm_size(module: Any) -> float:
    """|x̂| <= sqrt(entries), so that |output| <= |γ|·sqrt(entries) + |β|."""
    count = math.sqrt(math.prod(module.normalized_shape))
    gain = torch.ones(1, dtype=torch.float64) if module.weight is None else wide(module.weight).abs()
    return float((gain * count + (0.0 if module.bias is None else wide(module.bias).abs())).max())


POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = {nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveMaxPool1d: 1, nn.AdaptiveMaxPool2d: 2}


def shape_after(module: Any, shape: Shape, shapes: Shapes) -> Shape:
    """The shape of a module's output for batches of inputs of a shape; an unknown one where it is not followed."""
    kind = type(module)
    if is_convolution(module):
        return convolved(module, shape, shapes)
    if isinstance(module, nn.Linear):
        return shapes.with_last(shape, module.in_features, module.out_features)
    if isinstance(module, nn.BatchNorm2d):
        shapes.of_rank(shape, 4, {1: module.num_features})
        return shape
    if kind is nn.Flatten:
        dims = shapes.resolve(shape)
        known = dims.lead is None and dims.dims
        return Shape(None, flattened(dims.dims, module.start_dim, module.end_dim)) if known else shapes.fresh()
    if kind in POOLS:
        return pooled(module, int(kind.__name__[-2]), shape, shapes)
    if kind in ADAPTIVE:
        size = module.output_size if isinstance(module.output_size, tuple | list) else (module.output_size,)
        held = shapes.of_rank(shape, ADAPTIVE[kind] + 2, {})
        size = tuple(size) * ADAPTIVE[kind] if len(size) == 1 else tuple(size)
        return shapes.fresh() if held is None or None in size else Shape(None, (*held[:2], *size))
    same = kind in ELEMENTWISE or isinstance(module, _NormBase | Projection)
    return shape if same or kind in (nn.LeakyReLU, nn.PReLU, nn.ELU, nn.LayerNorm, nn.GroupNorm) else shapes.fresh()


def convolved(layer: Any, shape: Shape, shapes: Shapes) -> Shape:
    """Batch, output channels, and what is left of every size."""
    count = len(layer.kernel_size)
    dims = shapes.of_rank(shape, count + 2, {1: layer.in_channels})
    if dims is None:
        return shapes.fresh()
    made = []
    for i, size in enumerate(dims[2:]):
        k, step, gap = layer.kernel_size[i], layer.stride[i], layer.dilation[i]
        if isinstance(layer.padding, str):
            padding = gap * (k - 1) if layer.padding == "same" else 0
        else:
            padding = 2 * layer.padding[i]
        if not getattr(layer, "transposed", False):
            made.append(windows_along(size, k, step, padding, gap))
        elif step == 1:
            made.append(plus(size, gap * (k - 1) - padding + layer.output_padding[i]))
        else:
            made.append(shapes.symbol())
    return Shape(None, (dims[0], layer.out_channels, *made))


def pooled(module: Any, count: int, shape: Shape, shapes: Shapes) -> Shape:
    """As of a convolution; rounded up, ⌈n/s⌉ = ⌊(n + s − 1)/s⌋ where no window begins beyond the input."""
    dims = shapes.of_rank(shape, count + 2, {})
    if dims is None:
        return shapes.fresh()
    made = []
    for size, k, s, gap, pad in zip(dims[2:], *window_geometry(module, count), strict=True):
        clean = not module.ceil_mode or s + pad <= gap * (k - 1) + 1
        more = s - 1 if module.ceil_mode else 0
        made.append(windows_along(size, k, s, 2 * pad + more, gap) if clean else shapes.symbol())
    return Shape(None, (*dims[:2], *made))
