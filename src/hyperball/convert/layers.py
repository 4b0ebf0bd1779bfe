"""The decoupled twin of a convolution: the same geometry and the same parameters, with an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.convert.variants import KNOWN, PreparedConv2d
from hyperball.functional.decoupled import Angular, Magnitude, check_weighting
from hyperball.nn.decoupled import (
    Decoupled,
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
)

TWINS: dict[type[nn.Module], type[Decoupled]] = {
    nn.Conv1d: DecoupledConv1d,
    nn.Conv2d: DecoupledConv2d,
    nn.Conv3d: DecoupledConv3d,
    nn.ConvTranspose1d: DecoupledConvTranspose1d,
    nn.ConvTranspose2d: DecoupledConvTranspose2d,
    nn.ConvTranspose3d: DecoupledConvTranspose3d,
}
# What decides the function of a convolution: a class with one of these of its own computes something else.
CALLED = (
    "forward", "_conv_forward", "_output_padding", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__",
    "__getattribute__",
)  # fmt: skip
ENTRIES = ("_parameters", "_buffers", "_modules")
OPERATOR_NAMES = ("magnitude", "angular", "weighting", "eps")
GEOMETRY = ("stride", "padding", "dilation", "groups", "padding_mode")


@dataclass(frozen=True, eq=False)
class OperatorChoice:
    """The operator that a conversion puts in: checked when made."""

    magnitude: Magnitude
    angular: Angular = "cosine"
    weighting: str = "none"

    def __post_init__(self) -> None:
        angular_table.parse(self.angular)
        check_weighting(self.weighting, radial_table.parse(self.magnitude))

    def __str__(self) -> str:
        h, g = radial_table.parse(self.magnitude), angular_table.parse(self.angular)
        return f"{h} × {g}" + ("" if self.weighting == "none" else f", {self.weighting}")


def is_convolution(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd)


def base_class(module: nn.Module) -> type[nn.Module]:
    """Which of torch's convolutions it is."""
    return next(kind for kind in TWINS if isinstance(module, kind))


def is_prepared(module: nn.Module) -> bool:
    """Whether it is one of timm's convolutions that `PreparedConv2d` can stand for."""
    kind = type(module)
    return kind.__name__ in KNOWN and kind.__module__.startswith("timm.")


def why_not_convertible(module: Any) -> str | None:
    """The reason why a convolution must be left alone, or None."""
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
        return "it is lazy and has no weight yet: run the model once first"
    if parametrize.is_parametrized(module):
        return "its weight is parametrized"
    if not isinstance(module._parameters.get("weight"), Tensor):
        return "its weight is not a parameter (weight_norm, spectral_norm or pruning hold it elsewhere)"
    if "bias" not in module._parameters:
        return "its bias is not a parameter (pruning holds it elsewhere)"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}, not a floating-point tensor"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "its forward is wrapped"
    for name in (name for kind in ENTRIES for name in vars(module)[kind]):
        if name in OPERATOR_NAMES or hasattr(TWINS[base_class(module)], name):
            return f"it holds {name!r}, which means something else in a decoupled layer"
    if is_prepared(module):
        return None
    kind, base = type(module), base_class(module)
    for method in CALLED:
        if getattr(kind, method, None) is not getattr(base, method, None):
            return f"its class {kind.__name__} has a {method.strip('_')} of its own"
    for read in ("weight", "bias", *GEOMETRY):
        if hasattr(kind, read) and not hasattr(base, read):
            return f"its class {kind.__name__} has a {read} of its own"
    return None


def twin(module: Any, operator: OperatorChoice) -> Decoupled:
    """A decoupled layer with the very parameters of a convolution; nothing is drawn at random or copied."""
    base = base_class(module)
    kind: Any = PreparedConv2d if is_prepared(module) or isinstance(module, PreparedConv2d) else TWINS[base]
    geometry: dict[str, Any] = {key: getattr(module, key) for key in GEOMETRY}
    if hasattr(module, "output_padding") and "Transpose" in base.__name__:
        geometry["output_padding"] = module.output_padding
    chosen: dict[str, Any] = {
        "magnitude": operator.magnitude, "angular": operator.angular, "weighting": operator.weighting
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        sizes = (module.in_channels, module.out_channels, module.kernel_size)
        layer = kind(*sizes, bias=False, device="meta", **geometry, **chosen)
    layer.register_parameter("weight", module.weight)
    layer.register_parameter("bias", module.bias)
    if isinstance(layer, PreparedConv2d):
        layer.prepare_like(module)
    factory = (module.out_channels, module.weight.device, module.weight.dtype)
    layer._set_operator(chosen["magnitude"], chosen["angular"], chosen["weighting"], layer.eps, *factory)
    return layer.train(module.training)


def plain_forward(layer: Any, *arguments: Any, **keywords: Any) -> Tensor:
    """What a decoupled layer's plain twin gives: conv(x, w) + b."""
    if isinstance(layer, PreparedConv2d):
        return layer.plain(*arguments, **keywords)
    base: Any = base_class(layer)
    out: Tensor = base.forward(layer, *arguments, **keywords)
    return out


def become(module: nn.Module, other: nn.Module) -> None:
    """Turn a module into another in place: whatever refers to it, by any name, sees the other.

    Hooks stay registered (with their handles), and attributes, parameters, buffers and submodules that the other does
    not have are kept.
    """
    held, taken = module.__dict__, other.__dict__
    for kind in ENTRIES:
        taken[kind] = {**taken[kind], **{key: one for key, one in held[kind].items() if not hasattr(other, key)}}
    volatile = held["_non_persistent_buffers_set"] & taken["_buffers"].keys()
    taken["_non_persistent_buffers_set"] = taken["_non_persistent_buffers_set"] | volatile
    for key, value in held.items():
        if "hook" in key or key not in taken:
            taken[key] = value
    module.__class__ = type(other)
    module.__dict__ = taken
