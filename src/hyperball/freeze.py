"""Freeze a model for inference: filters and radii become constants, BatchNorm moves into the layer before it.

A decoupled layer computes factor·n·s(u)·g(c) + bias, BatchNorm in evaluation a·f + b with a = γ/sqrt(σ² + ε) and
b = β − μ·a. So a multiplies the factor (the filter itself with cosine, where f = y·s(u)) and a·bias + b is the
bias. This is exact for every magnitude, angular function and weighting.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperball.convert.copying import copy_model
from hyperball.convert.variants import FrozenPreparedConv2d, PreparedConv2d
from hyperball.kernels.decoupled.operation import full_precision
from hyperball.kernels.norms import wide_dtype
from hyperball.nn.decoupled import Decoupled, NormalizedLinear
from hyperball.nn.frozen import FROZEN, Affine, Frozen
from hyperball.nn.frozen_chain import run_in_blocks
from hyperball.nn.fused import DecoupledConvBNAct

# By forward method, so that a subclass with a forward of its own is not taken for one of these.
TWINS = {**FROZEN, PreparedConv2d.forward: FrozenPreparedConv2d}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
NORMS_BY_RANK = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # of the weight


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer: `folded` names the BatchNorm it took in, `reason` says why there is none."""

    name: str
    kind: str
    frozen: bool
    folded: str | None
    reason: str = ""

    def __str__(self) -> str:
        done = "frozen" if self.frozen else "kept as it is"
        fate = f"{self.folded} folded in" if self.folded else f"nothing folded: {self.reason}"
        return f"{self.name or 'the model'} ({self.kind}): {done}, {fate if self.frozen else self.reason}"


@dataclass(frozen=True)
class FreezeReport:
    """One entry per layer; `untraced` names the modules whose forward could not be traced, and the error."""

    layers: tuple[LayerReport, ...]
    untraced: tuple[str, ...] = ()

    def __str__(self) -> str:
        failed = [f"not traced, so that each part of it was looked at on its own: {text}" for text in self.untraced]
        return "\n".join([*map(str, self.layers), *failed])


def batch_norm_affine(module: Any) -> Affine:
    """a = γ/sqrt(σ² + ε) and b = β − μ·a, so that BatchNorm in evaluation is a·f + b."""
    wide = wide_dtype(module.running_var)
    scale = (module.running_var.to(wide) + module.eps).rsqrt()
    if module.weight is not None:
        scale = scale * module.weight.to(wide)
    shift = -module.running_mean.to(wide) * scale
    return scale, shift if module.bias is None else shift + module.bias.to(wide)


def is_freezable(module: nn.Module) -> bool:
    return isinstance(module, Decoupled | NormalizedLinear)


def is_block(module: nn.Module) -> bool:
    """Whether it is a fused block, which calls its parts as it should."""
    return isinstance(module, DecoupledConvBNAct) and type(module).forward is DecoupledConvBNAct.forward


def holds_freezable(module: nn.Module) -> bool:
    return any(is_freezable(part) for part in module.modules())


@dataclass
class Search:
    """Which BatchNorm follows which layer, why none does, and which parameters forward reads by itself."""

    partners: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    untraced: list[str] = field(default_factory=list)

    def look_into(self, module: nn.Module, prefix: str = "") -> None:
        """Trace a module, or, where that fails, each of its children."""
        if is_freezable(module) or not holds_freezable(module):
            return
        if is_block(module):
            self.pair_block(prefix)
            return
        try:
            graph = trace(module)
        except Exception as error:  # whatever a forward may raise when it is given proxies
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                lines = str(error).splitlines() or [""]
                self.untraced.append(f"{prefix[:-1] or 'the model'} ({type(error).__name__}: {lines[0]})")
            self._look_into_children(module, prefix)
            return
        self._read_off(graph, module, prefix)

    def _look_into_children(self, module: nn.Module, prefix: str) -> None:
        """Children with a forward of their own; an nn.Sequential may be cut open by a parent that was not traced."""
        for name, child in module.named_children():
            if isinstance(child, nn.Sequential) and not is_block(child):
                self._look_into_children(child, f"{prefix}{name}.")
            else:
                self.look_into(child, f"{prefix}{name}.")

    def pair_block(self, prefix: str) -> None:
        """A fused block's convolution feeds its BatchNorm and nothing else."""
        self.partners[f"{prefix}0"], self.reasons[f"{prefix}0"] = f"{prefix}1", ""

    def reads(self, name: str) -> bool:
        return any(path.startswith(f"{name}.") for path in self.read)

    def _read_off(self, graph: fx.Graph, module: nn.Module, prefix: str) -> None:
        calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
        for node in graph.nodes:
            name = str(node.target)
            if node.op == "get_attr":
                self.read.add(prefix + name)
            elif node.op == "call_module" and is_block(module.get_submodule(name)):
                self.pair_block(f"{prefix}{name}.")
            elif node.op == "call_module" and is_freezable(module.get_submodule(name)):
                partner, reason = follower(node, calls, module)
                self.reasons[prefix + name] = reason
                if partner is not None:
                    self.partners[prefix + name] = prefix + partner


class LayerTracer(fx.Tracer):
    """Records the layers, fused blocks and whatever has no layer inside as single calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        inside = holds_freezable(m) and not is_freezable(m) and not is_block(m)
        return not inside or super().is_leaf_module(m, module_qualified_name)


def trace(module: nn.Module) -> fx.Graph:
    """The graph of forward with its default arguments."""
    given = inspect.signature(module.forward).parameters.values()
    defaults = {argument.name: argument.default for argument in given if argument.default is not argument.empty}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        return LayerTracer().trace(module, concrete_args=defaults or None)


def follower(node: fx.Node, calls: Counter[str], module: nn.Module) -> tuple[str | None, str]:
    """The BatchNorm that alone uses the output of a layer called once, or the reason why there is none."""
    if calls[str(node.target)] > 1:
        return None, f"it is called {calls[str(node.target)]} times"
    called = [str(user.target) for user in node.users if user.op == "call_module"]
    norms = [name for name in called if isinstance(module.get_submodule(name), _BatchNorm)]
    if not norms:
        return None, "no BatchNorm follows"
    name = norms[0]
    if len(node.users) > 1:
        return None, f"its output goes to {len(node.users)} places, not to {name} alone"
    if calls[name] > 1:
        return None, f"{name} is called {calls[name]} times"
    return name, ""


def is_altered(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward may see or change what goes in and out."""
    return "forward" in vars(module) or any(getattr(module, hooks, None) for hooks in HOOKS)


def why_kept(layer: Any, name: str, search: Search) -> str | None:
    if type(layer).forward not in TWINS:
        return "its class has a forward of its own"
    if is_altered(layer):
        return "it has hooks"
    return "its parameters are read outside of it" if search.reads(name) else None


def why_not_folded(layer: Any, batch_norm: Any, shared: set[int]) -> str | None:
    allowed = (NORMS_BY_RANK[layer.weight.dim()], nn.SyncBatchNorm)
    channels = layer.filters().shape[0] if isinstance(layer, Decoupled) else layer.weight.shape[0]
    if type(batch_norm) not in allowed and not (is_norm_act(batch_norm) and layer.weight.dim() == 4):
        return f"{type(batch_norm).__name__} follows where {allowed[0].__name__} would be folded"
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        return "the BatchNorm keeps no running statistics"
    if batch_norm.num_features != channels:
        return f"the BatchNorm has {batch_norm.num_features} features for {channels} channels"
    if is_altered(batch_norm):
        return "the BatchNorm has hooks"
    return "one of the two goes by several names" if {id(layer), id(batch_norm)} & shared else None


def is_norm_act(module: nn.Module) -> bool:
    """Whether it is timm's BatchNorm2d with an activation of its own behind it."""
    kind = type(module)
    return kind.__name__ == "BatchNormAct2d" and kind.__module__.startswith("timm.")


def after_norm(batch_norm: Any) -> nn.Module:
    """What is left of a BatchNorm that was folded: nothing, or the activation that it holds."""
    left = nn.Sequential(batch_norm.drop, batch_norm.act) if is_norm_act(batch_norm) else nn.Identity()
    return left.eval()


def become(module: nn.Module, other: nn.Module) -> None:
    """Turn a module into another in place, so that whatever refers to it, by any name, sees the other."""
    module.__class__ = type(other)
    module.__dict__ = other.__dict__


class AlwaysEval:
    """Stands in for `train` of a frozen model, which stays in evaluation mode."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, mode: bool = True) -> nn.Module:
        return self.model


def freeze(model: nn.Module) -> nn.Module:
    """A copy of the model for inference, with decoupled layers frozen and BatchNorm folded where that is exact.

    The copy stays in evaluation mode, also after `train()`, and has no gradients. On a GPU its layers run with the
    activation, the residual sum and the max pooling behind them in one pass. `freeze_report` of the result says
    layer by layer what was folded, or why not. A BatchNorm is folded, and replaced by nn.Identity (timm's by the
    activation that it holds), where a trace of forward with its default arguments shows that the layer feeds it alone
    and that both are called once. Of a model that cannot be traced, every child with a forward of its own is looked at
    by itself and taken to be called as a whole; an nn.Sequential is not, since models iterate over those. Layers with
    hooks, with a forward of their own, or whose parameters are read from outside stay as they are. Scales and
    biases stay in float32 when the result is cast to half precision. Cast to bfloat16 after freezing, so that
    BatchNorm's statistics are not rounded before they are folded; cast to float16 before, since a filter that has taken
    in a small scale may be too small for it.

    >>> import torch, hyperball as hb
    >>> model = torch.nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    >>> print(hb.freeze(model).freeze_report)
    0 (DecoupledConv2d): frozen, 1 folded in
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not any(is_freezable(part) or isinstance(part, Frozen) for part in model.modules()):
        seen = Counter(type(part).__name__ for part in model.modules() if not list(part.children()))
        listed = ", ".join(f"{count} {kind}" for kind, count in seen.most_common(8))
        raise ValueError(f"`model` has no decoupled layer to freeze; {type(model).__name__} holds {listed}")
    with torch.inference_mode(False), torch.no_grad():
        frozen = copy_model(model).eval()
        if not isinstance(getattr(frozen, "freeze_report", None), FreezeReport):
            report = freeze_in_place(frozen)
            frozen.requires_grad_(False)
            vars(frozen).update(freeze_report=report, train=AlwaysEval(frozen))
    return frozen


def freeze_in_place(model: nn.Module) -> FreezeReport:
    """Freeze and fold, layer by layer."""
    search = Search()
    # Tracing runs the user's forward, which may leave proxies or counts behind: on a copy that shares the parameters.
    search.look_into(copy_model(model, {id(parameter): parameter for parameter in model.parameters()}))
    names = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
    shared = {part for part, count in names.items() if count > 1}
    layers = [(name, part) for name, part in model.named_modules() if is_freezable(part)]
    entries = tuple(freeze_layer(model, name, layer, search, shared) for name, layer in layers)
    run_in_blocks(model)
    return FreezeReport(entries, tuple(search.untraced))


def freeze_layer(model: nn.Module, name: str, layer: Any, search: Search, shared: set[int]) -> LayerReport:
    kind = type(layer).__name__
    kept = why_kept(layer, name, search)
    if kept is not None:
        return LayerReport(name, kind, False, None, kept)
    partner = search.partners.get(name)
    reason = search.reasons.get(name, "it is not called where forward was traced")
    batch_norm = None if partner is None else model.get_submodule(partner)
    if partner is not None:
        reason = why_not_folded(layer, batch_norm, shared) or ""
        reason = "the BatchNorm's parameters are read outside of it" if search.reads(partner) else reason
        partner, batch_norm = (None, None) if reason else (partner, batch_norm)
    with full_precision(layer.weight):
        affine = None if batch_norm is None else batch_norm_affine(batch_norm)
        become(layer, TWINS[type(layer).forward](layer, affine, partner).eval())
    if batch_norm is not None:
        become(batch_norm, after_norm(batch_norm))
    return LayerReport(name, kind, True, partner, reason)
