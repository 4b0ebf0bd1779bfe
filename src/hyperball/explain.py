"""`explain`: what a layer or a call computes, which kernel runs it, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional import decoupled as functions
from hyperball.functional.decoupled import needs_norm
from hyperball.kernels import epilogue
from hyperball.nn.decoupled import Decoupled
from hyperball.nn.learned import LearnedValue
from hyperball.rows import AnyValue, Value


@dataclass(frozen=True)
class Explanation:
    """Lines of (topic, text); printing it aligns them."""

    subject: str
    lines: tuple[tuple[str, str], ...]

    def __getitem__(self, topic: str) -> str:
        return dict(self.lines)[topic]

    def __str__(self) -> str:
        width = max(len(topic) for topic, _ in self.lines)
        return "\n".join([self.subject, *(f"  {topic:<{width}}  {text}" for topic, text in self.lines)])


def explain(module_or_call: nn.Module | Callable[..., Tensor], *arguments: Any, **keywords: Any) -> Explanation:
    """What a module computes, or what a call of a function with these arguments would compute, and by which kernel.

    >>> import hyperball as hb
    >>> print(hb.explain(hb.nn.DecoupledConv2d(3, 16, 3, magnitude="tanh", angular="square_cosine"))["kernel"])
    eager, hand-written backward: keeps y and one norm per group and position beside the input
    """
    if isinstance(module_or_call, Decoupled):
        return _of_layer(module_or_call)
    if isinstance(module_or_call, nn.Module):
        return _of_model(module_or_call)
    if callable(module_or_call) and getattr(functions, getattr(module_or_call, "__name__", ""), None) is module_or_call:
        bound = inspect.signature(module_or_call).bind_partial(*arguments, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        if "magnitude" not in given:
            raise ValueError(f"give the `magnitude` of the call to {module_or_call.__name__}, as in the call itself")
        magnitude, angular = radial_table.parse(given["magnitude"]), angular_table.parse(given["angular"])
        functions.check_weighting(given["weighting"], magnitude)
        lines = _operator_lines(magnitude, angular, given["weighting"])
        return Explanation(f"hyperball.functional.{module_or_call.__name__}", tuple(lines))
    raise TypeError(
        f"`module_or_call` must be a hyperball layer, a model or a hyperball function, got {module_or_call!r}"
    )


def _of_layer(layer: Decoupled) -> Explanation:
    magnitude, angular = layer.magnitude.value, layer.angular.value
    assert isinstance(angular, Value)
    lines = _operator_lines(magnitude, angular, layer.weighting)
    if layer.radius is not None:
        lines.insert(1, ("radius", _radius_text(layer)))
    return Explanation(repr(layer), tuple(lines))


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
    for name, module in model.named_modules():
        if isinstance(module, Decoupled):
            lines.append((name, _of_layer(module)["kernel"]))
        elif type(module).__module__.startswith("hyperball.nn") and not isinstance(module, LearnedValue):
            lines.append((name or "module", f"eager: {module!r}"))
    if not lines:
        raise ValueError(f"`module_or_call` has no hyperball layer, got a {type(model).__name__}")
    return Explanation(type(model).__name__, tuple(lines))


def _operator_lines(magnitude: AnyValue, angular: Value, weighting: str) -> list[tuple[str, str]]:
    formula = " + ".join(term.row.formula for term in magnitude.terms)
    return [
        ("operator", f"f = h(n)·g(c) with h = {formula}, g = {angular.row.formula}; weighting {weighting}"),
        ("kernel", kernel_of(magnitude, angular, weighting)),
    ]


def kernel_of(magnitude: AnyValue, angular: Value, weighting: str) -> str:
    """Which kernel runs an operator, and why: a pure function of the operator."""
    composed = [term.name for term in (*magnitude.terms, angular) if term.row.composed]
    if epilogue.is_composed(magnitude, angular):
        return f"eager, autograd's backward: {', '.join(composed)} is user-defined and gives no derivatives of its own"
    if not needs_norm(magnitude, angular, weighting):
        return "torch's own layer: a linear magnitude with cosine needs no patch norm"
    return "eager, hand-written backward: keeps y and one norm per group and position beside the input"
