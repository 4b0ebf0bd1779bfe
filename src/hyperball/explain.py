"""`explain`: what a layer or a call computes, which kernel runs it, and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional import decoupled as functions
from hyperball.functional import pooling as pools
from hyperball.functional.decoupled import needs_norm
from hyperball.functional.pooling_checks import single_penalty
from hyperball.kernels import dispatch
from hyperball.kernels.batch_norm.choice import choose as batch_norm_kernel
from hyperball.kernels.batch_norm.operation import Estimator
from hyperball.kernels.decoupled import epilogue
from hyperball.kernels.decoupled import native as decoupled_native
from hyperball.kernels.pooling.operation import explain_pooling, solver_of
from hyperball.kernels.pooling.rows import is_convex
from hyperball.kernels.projection.operation import choose_kernel as projection_kernel
from hyperball.kernels.triton.implicit.choice import described
from hyperball.nn.batch_norm import RobustBatchNorm
from hyperball.nn.declarative import Declarative
from hyperball.nn.decoupled import Decoupled, DecoupledConvNd, DecoupledConvTransposeNd
from hyperball.nn.frozen import Frozen
from hyperball.nn.fused import DecoupledConvBNAct, choice_of, unfit_for_gpu
from hyperball.nn.fused_chain import candidates
from hyperball.nn.learned import LearnedValue
from hyperball.nn.pooling import RobustPool
from hyperball.nn.projection import Projection
from hyperball.rows import AnyValue, Value


@dataclass(frozen=True)
class Explanation(Mapping[str, str]):
    """Texts by topic, in the order of `lines`; printing it aligns them."""

    subject: str
    lines: tuple[tuple[str, str], ...]

    def __getitem__(self, topic: str) -> str:
        return dict(self.lines)[topic]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.lines))

    def __len__(self) -> int:
        return len(dict(self.lines))

    def __str__(self) -> str:
        width = max(len(topic) for topic, _ in self.lines)
        return "\n".join([self.subject, *(f"  {topic:<{width}}  {text}" for topic, text in self.lines)])


def explain(module_or_call: nn.Module | Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Explanation:
    """What a module computes, or what a call of a function with these arguments would compute, and by which kernel.

    >>> import hyperball as hb
    >>> layer = hb.nn.DecoupledConv2d(3, 16, 3, magnitude="tanh", angular="square_cosine")
    >>> print(hb.explain(layer)["kernel"].split(": ")[-1])
    keeps y and one norm per group and position beside the input
    """
    if isinstance(module_or_call, Decoupled):
        return _of_layer(module_or_call)
    if isinstance(module_or_call, RobustPool):
        return _of_pool(module_or_call)
    described = _of_declared(module_or_call)
    if described is not None:
        return described
    if isinstance(module_or_call, nn.Module):
        return _of_model(module_or_call)
    if callable(module_or_call) and module_or_call in POOLS:
        return _of_pool_call(module_or_call, arguments, keywords)
    if callable(module_or_call) and getattr(functions, getattr(module_or_call, "__name__", ""), None) is module_or_call:
        bound = inspect.signature(module_or_call).bind_partial(*arguments, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        if "magnitude" not in given:
            raise ValueError(f"give the `magnitude` of the call to {module_or_call.__name__}, as in the call itself")
        magnitude, angular = radial_table.parse(given["magnitude"]), angular_table.parse(given["angular"])
        functions.check_weighting(given["weighting"], magnitude)
        lines = _operator_lines(magnitude, angular, given["weighting"], _facts_of_call(module_or_call, given))
        return Explanation(f"hyperball.functional.{module_or_call.__name__}", tuple(lines))
    raise TypeError(
        f"`module_or_call` must be a hyperball layer, a model or a hyperball function, got {module_or_call!r}"
    )


def _of_layer(layer: Decoupled) -> Explanation:
    magnitude, angular = layer.magnitude.value, layer.angular.value
    assert isinstance(angular, Value)
    facts = _facts_of_layer(layer)
    lines = _operator_lines(magnitude, angular, layer.weighting, facts)
    if lines[-1][1].startswith("triton") and isinstance(layer, DecoupledConvNd):
        weight = layer.weight
        lines.append(("convolution", described(weight.shape, layer.stride, layer.groups, facts.dtype)))
    if layer.radius is not None:
        lines.insert(1, ("radius", _radius_text(layer)))
    return Explanation(repr(layer), tuple(lines))


POOLS = (
    pools.robust_pool,
    pools.robust_pool1d,
    pools.robust_pool2d,
    pools.robust_pool_vectors,
    pools.segment_robust_pool,
)


def _of_pool(layer: RobustPool) -> Explanation:
    """A pooling layer; where its penalty has no tensors, as it treats a float32 tensor on the CPU."""
    value = layer.penalty()
    device = next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), "cpu")
    where = "all positions" if layer.kernel_size is None else "the samples of each window"
    return Explanation(
        repr(layer),
        (
            ("problem", f"y = argmin_u Σ φ(u − x) over {where}, φ(z) = {value.row.formula}"),
            ("solver", solver_of(value)),
            ("kernel", explain_pooling(value, device)),
        ),
    )


def _of_pool_call(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Explanation:
    bound = inspect.signature(function).bind_partial(*arguments, **keywords)
    bound.apply_defaults()
    value, x = single_penalty(bound.arguments["penalty"]), bound.arguments.get("x")
    place = (x.device, x.dtype) if isinstance(x, Tensor) else ()
    kernel = explain_pooling(value, *place)
    if function is pools.robust_pool_vectors:
        kernel = "eager: sets of vectors are solved by Newton and IRLS steps in torch's own operators"
    solver = "Newton or IRLS, the better of the two" if function is pools.robust_pool_vectors else solver_of(value)
    problem = f"y = argmin_u Σ φ(u − x), φ(z) = {value.row.formula}"
    lines = (("problem", problem), ("solver", solver), ("kernel", kernel))
    return Explanation(f"hyperball.functional.{function.__name__}", lines)


def _of_declared(layer: Any) -> Explanation | None:
    """A robust batch norm, a projection or a declarative layer; None for anything else."""
    describe: tuple[tuple[type, Callable[[Any], tuple[str, str, str]]], ...] = (
        (RobustBatchNorm, _batch_norm_lines),
        (Projection, _projection_lines),
        (Declarative, _declarative_lines),
    )
    for kind, lines in describe:
        if isinstance(layer, kind):
            return Explanation(repr(layer), tuple(zip(("problem", "solver", "kernel"), lines(layer), strict=True)))
    return None


def _batch_norm_lines(layer: RobustBatchNorm) -> tuple[str, str, str]:
    value = layer.penalty
    problem = f"(m, s) = argmin Σ s·φ((x − m)/s) + n·s·β/2 of every channel, φ(z) = {value.row.formula}"
    if not is_convex(value):
        problem = f"m = argmin_u Σ φ((x − u)/s0), from huber's location and scale s0, φ(z) = {value.row.formula}"
    solver = "Newton in (m, s), channel by channel; in evaluation the running statistics"
    held = next((tensor for tensor in (*layer.parameters(), *layer.buffers())), None)
    place = (torch.device("cpu"), torch.float32) if held is None else (held.device, held.dtype)
    estimator = Estimator(value.name, float(value.parameters.get("shape", 1.0)))  # type: ignore[arg-type]
    return problem, solver, str(batch_norm_kernel(estimator, *place))


def _projection_lines(layer: Projection) -> tuple[str, str, str]:
    relation = "≤" if layer.surface == "ball" else "="
    norm = "∞" if math.isinf(layer.p) else f"{layer.p:g}"
    threshold = "the threshold by monotone Newton, without a sort"
    return (
        f"y = argmin_u ‖u − x‖²/2 subject to ‖u‖_{norm} {relation} r, r {'learned' if layer.learn else 'fixed'}",
        threshold if layer.p == 1 else "closed form",
        str(projection_kernel(layer.log_radius.device, layer.log_radius.dtype, 1)),
    )


def _declarative_lines(layer: Declarative) -> tuple[str, str, str]:
    held = [
        text
        for text, given in (("h(x, u) = 0", layer.equality), ("G(x, u) ≤ 0", layer.inequality))
        if given is not None
    ]
    constraints = f" subject to {' and '.join(held)}" if held else ""
    name = getattr(layer.objective, "__name__", type(layer.objective).__name__)
    solver = "Newton up to 64 variables per element, LBFGS beyond" if layer.solver is None else _name_of(layer.solver)
    if held and layer.solver is None:
        solver = f"augmented Lagrangian around {solver}"
    adjoint = "Implicit" if layer.adjoint is None else _name_of(layer.adjoint)
    return (
        f"y = argmin_u f(x, u){constraints}, f = {name}",
        f"{solver}; gradients: {adjoint}",
        "eager: the objective is the user's, differentiated by autograd",
    )


def _name_of(setting: Any) -> str:
    return setting if isinstance(setting, str) else type(setting).__name__


def _facts_of_layer(layer: Decoupled) -> dispatch.Facts:
    """What the choice of a kernel depends on, for an input on the device and in the dtype of the weight."""
    weight = layer.weight.detach()
    transposed = isinstance(layer, DecoupledConvTransposeNd)
    return dispatch.facts_of(weight, weight, layer.magnitude.channels, getattr(layer, "groups", 1), transposed)


def _facts_of_call(function: Callable[..., Any], given: dict[str, Any]) -> dispatch.Facts | None:
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    transposed, groups = "transpose" in function.__name__, given.get("groups", 1)
    return dispatch.facts_of(x, weight, weight.shape[1] * groups if transposed else weight.shape[0], groups, transposed)


def _radius_text(layer: Decoupled) -> str:
    radius = layer.radius
    assert radius is not None
    learned = "learned" if layer.magnitude.learns("rho") else "fixed"
    unit = "relative to the mean patch norm" if layer.magnitude.is_relative else "absolute"
    if radius.is_meta:
        return f"{learned}, {unit}, {radius.numel()} value(s)"
    span = f"{radius.min():.4g} to {radius.max():.4g}" if radius.numel() > 1 else f"{radius.item():.4g}"
    if layer.magnitude.is_relative:
        mean = layer.magnitude.running_length
        unit = f"{radius.mean() / mean:.3g} × the mean patch norm of {mean:.4g}"
    return f"{span} ({learned}, {unit}, {radius.numel()} value(s))"


def _of_model(model: nn.Module) -> Explanation:
    """One line a hyperball layer; layers without a kernel of their own say what they are."""
    lines = []
    blocks = _blocks_of(model)
    for name, module in model.named_modules():
        if isinstance(module, Decoupled):
            lines.append((name, blocks.get(module) or _of_layer(module)["kernel"]))
        elif isinstance(module, RobustPool):
            lines.append((name, _of_pool(module)["kernel"]))
        elif (described := _of_declared(module)) is not None:
            lines.append((name, described["kernel"]))
        elif isinstance(module, Frozen | DecoupledConvBNAct):
            lines.append((name or "module", module.explained()))
        elif type(module).__module__.startswith("hyperball.nn") and not isinstance(module, LearnedValue):
            lines.append((name or "module", f"eager: {module!r}"))
    if not lines:
        raise ValueError(f"`module_or_call` has no hyperball layer, got a {type(model).__name__}")
    return Explanation(type(model).__name__, tuple(lines))


def _blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """For every convolution that the model runs, or would run, as a block: with what, by which kernel, or why not."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, str] = {}
    for parts in candidates(model):
        conv, batch_norm, activation = parts
        others = [names[part] for part in (batch_norm, activation) if part is not None and names.get(part)]
        along = " and ".join(others)
        alone, against = _of_layer(conv)["kernel"], unfit_for_gpu(parts)
        if conv.weight.device.type not in dispatch.DEVICES:
            found[conv] = alone if against else f"{alone}; on a GPU in one fused block with {along}"
        elif against:
            found[conv] = f"{alone}; not in one block with {along}: {against}"
        else:
            choice = choice_of(parts, conv.weight.detach())
            found[conv] = f"fused block with {along}: {choice}: scale, BatchNorm and activation in one pass"
    return found


def _operator_lines(
    magnitude: AnyValue, angular: Value, weighting: str, facts: dispatch.Facts | None = None
) -> list[tuple[str, str]]:
    formula = " + ".join(term.row.formula for term in magnitude.terms)
    return [
        ("operator", f"f = h(n)·g(c) with h = {formula}, g = {angular.row.formula}; weighting {weighting}"),
        ("kernel", kernel_of(magnitude, angular, weighting, facts)),
    ]


def kernel_of(magnitude: AnyValue, angular: Value, weighting: str, facts: dispatch.Facts | None = None) -> str:
    """Which kernel runs an operator, and why: a pure function of the operator and of facts about its tensors."""
    composed = [term.name for term in (*magnitude.terms, angular) if term.row.composed]
    if epilogue.is_composed(magnitude, angular):
        return f"eager, autograd's backward: {', '.join(composed)} is user-defined and gives no derivatives of its own"
    if not needs_norm(magnitude, angular, weighting):
        return "torch's own layer: a linear magnitude with cosine needs no patch norm"
    kept = "keeps y and one norm per group and position beside the input"
    if facts is None or facts.device not in ("cuda", "cpu"):
        return f"eager, hand-written backward: {kept}"
    if facts.device == "cpu":
        choice = decoupled_native.choose(magnitude, angular, facts.dtype)
    else:
        choice = dispatch.choose(magnitude, angular, weighting, facts)
    if choice.kernel != "eager":
        return f"{choice}, hand-written backward: {kept}"
    return f"eager ({choice.reason}), hand-written backward: {kept}"
