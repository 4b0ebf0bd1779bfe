"""`convert_model`: decoupled convolutions, robust pooling and projections put into any model, with a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from hyperball.convert import structure
from hyperball.convert.copying import copy_model
from hyperball.convert.fusing import fused_paths, swap_all
from hyperball.convert.heads import ProjectedLinear, head_paths, is_plain_linear, parse_projection, projected_twin
from hyperball.convert.layers import OperatorChoice, become, twin, why_not_convertible
from hyperball.convert.pooling import HOOK_NAME, PoolByHook, PoolSearch, check_pool, is_robust, like, robust_twin
from hyperball.convert.report import Kept, Replaced, Report
from hyperball.convert.running import difference, outputs
from hyperball.convert.selection import Choice, aliases, check_skip, choose, skipped
from hyperball.functional.decoupled import Angular, Magnitude
from hyperball.nn.decoupled import Decoupled, DecoupledConv2d


@dataclass
class Plan:
    """What a conversion will do; nothing of the model is touched while it is made."""

    swaps: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    hooks: list[tuple[PoolByHook, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    done_before: bool = False

    def swap(self, name: str, old: nn.Module, new: nn.Module, after: str) -> None:
        self.swaps.append((old, new))
        self.replaced.append(Replaced(name, type(old).__name__, after))

    def keep(self, name: str, module: nn.Module, reason: str) -> None:
        self.kept.append(Kept(name, type(module).__name__, reason))


def convert_model(
    model: nn.Module,
    *,
    magnitude: Magnitude | None = None,
    angular: Angular = "cosine",
    weighting: str = "none",
    pool: Any = None,
    projection: str | None = None,
    skip: str | Iterable[str] = (),
    convolutions: Choice = "all",
    keep_shortcuts: bool = True,
    fuse: bool = False,
    batch: Any = None,
    inplace: bool = False,
) -> tuple[nn.Module, Report]:
    """A copy of the model with decoupled convolutions, robust global pooling or a projection before the classifier.

    Args:
        magnitude, angular, weighting: The operator of the convolutions; they stay plain where `magnitude` is None.
        pool: The penalty of a robust pooling in place of global average pooling.
        projection: A text such as "l2_ball(radius=15)": BatchNorm1d(affine=False) and that projection come before the
            linear classifier.
        skip: Path patterns of layers that stay as they are: "layer4", "*.conv1".
        convolutions: "all", "all_but_first", path patterns, or a function of path and module. Under the first two,
            1×1 convolutions on residual shortcuts and the classifier stay plain; `hyperball.convert.structure` says
            how they are told. Patterns and functions alone decide.
        keep_shortcuts: False converts the 1×1 convolutions of shortcuts too.
        fuse: Whether convolutions run with the BatchNorm and activation behind them on a GPU: see `fuse_blocks`.
        batch: Inputs (a tuple of arguments, a mapping of keyword arguments, or the one argument) to compare the outputs
            before and after on; with it, pooling that is a function call is found and replaced by hooks.
        inplace: Whether to convert the model itself. Modules keep their identity then, as parameters always do.

    Weights, dtype, device, mode, requires_grad and hooks are kept, and modules that are shared stay shared. If anything
    fails, the model is as it was. With magnitude="linear", weighting="linear" the function stays the same.

    >>> import torch, hyperball as hb
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    >>> converted, report = hb.convert_model(net, magnitude="tanh")
    >>> len(report.replaced), report.added_parameters
    (2, 12)
    """
    model = check_model(model)
    if magnitude is None and pool is None and projection is None:
        raise ValueError("give a `magnitude`, a `pool` or a `projection`: otherwise there is nothing to convert")
    chosen = OperatorChoice("linear" if magnitude is None else magnitude, angular, weighting)
    operator = None if magnitude is None else chosen
    if projection is not None:
        parse_projection(projection)
    check_pool(pool)
    for argument, given in (("keep_shortcuts", keep_shortcuts), ("fuse", fuse), ("inplace", inplace)):
        if not isinstance(given, bool):
            raise TypeError(f"`{argument}` must be True or False, got {given!r}")
    patterns = check_skip(model, skip)
    target = model if inplace else copy_of(model)
    plan = Plan()
    if operator is not None:
        plan_convolutions(plan, target, operator, patterns, convolutions, keep_shortcuts)
    if pool is not None:
        plan_pooling(plan, target, pool, patterns, batch)
    if projection is not None:
        plan_projection(plan, target, projection, patterns)
    if any(isinstance(new, Decoupled) and new.magnitude.is_relative for _, new in plan.swaps):
        plan.notes.append("radii are relative to mean patch norms, which `calibrate` or training sets from data")
    if not plan.swaps and not plan.hooks and not plan.done_before:
        raise ValueError(f"nothing to convert in {type(model).__name__}: {seen(model, plan)}")
    return target, carry_out(plan, target, operator, batch, fuse)


def copy_of(model: nn.Module) -> nn.Module:
    try:
        return copy_model(model)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; `inplace=True` converts the model without a copy") from error


def check_model(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ValueError(f"`model` must be converted before it is wrapped, got {type(model).__name__}")
    unwrapped = getattr(model, "_orig_mod", model)  # of torch.compile
    assert isinstance(unwrapped, nn.Module)
    return unwrapped


def seen(model: nn.Module, plan: Plan) -> str:
    """What the model is made of, and why its convolutions were left, for an error."""
    kinds = Counter(type(part).__name__ for part in model.modules() if not list(part.children()))
    held = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8)) or "no modules"
    reasons = Counter(entry.reason for entry in plan.kept)
    why = "; ".join(f"{count} kept: {reason}" for reason, count in reasons.items())
    return f"it holds {held}" + (f" ({why})" if why else "")


def plan_convolutions(
    plan: Plan, model: nn.Module, operator: OperatorChoice, skip: tuple[str, ...], choice: Choice, keep_shortcuts: bool
) -> None:
    """A twin for every convolution that is chosen, or the reason why it is kept."""
    found, paths = structure.convolutions(model), aliases(model)
    chosen = choose(found, choice, paths)
    by_rule = isinstance(choice, str) and choice in ("all", "all_but_first")
    classifier = structure.find_classifier(model) if by_rule else None
    for name, conv in found.items():
        reason = chosen[name]
        if isinstance(conv, Decoupled):
            plan.done_before, reason = True, "it is decoupled already"
        reason = reason or skipped(paths[conv], skip) or why_not_convertible(conv)
        if reason is None and by_rule:
            reason = "the classifier" if name == classifier else None
            if keep_shortcuts:
                reason = reason or structure.shortcut_reason(model, name, conv)
        if reason is None:
            made = twin(conv, operator)
            plan.swap(name, conv, made, type(made).__name__)
        else:
            plan.keep(name, conv, reason)


def plan_pooling(plan: Plan, model: nn.Module, penalty: Any, skip: tuple[str, ...], batch: Any) -> None:
    """A robust twin for the global pooling; by hooks where a function pools and a batch shows where."""
    robust = structure.find_global_pools(model, is_robust)
    for name in robust:
        plan.keep(name, model.get_submodule(name), "it is robust already")
    paths, known = structure.find_global_pools(model), aliases(model)
    for name in paths:
        module = model.get_submodule(name)
        if reason := skipped(known[module], skip):
            plan.keep(name, module, reason)
        else:
            made = like(model, robust_twin(module, penalty))
            plan.swap(name, module, made, type(made).__name__)
    if paths:
        return
    if robust:
        plan.done_before = True
        return
    where = None if batch is None else PoolSearch().look(model, batch)
    if where is None:
        raise ValueError(
            f"`pool`: {type(model).__name__} has no module that averages all positions into one"
            + (
                "; if a function pools, give a `batch`, which shows where"
                if batch is None
                else " and none of its modules is given the average of another's output"
            )
        )
    source, target, rectified = where
    hook = PoolByHook(penalty, rectified).train(model.training)
    like(model, hook)
    plan.hooks.append((hook, source, target))
    plan.replaced.append(Replaced(HOOK_NAME, "a pooling function", f"RobustPool2d, by hooks on {source} and {target}"))


def plan_projection(plan: Plan, model: nn.Module, projection: str, skip: tuple[str, ...]) -> None:
    """A projected twin for the linear classifier, or for each of several."""
    paths = head_paths(model, structure.find_classifier(model))
    if not paths:
        raise ValueError(f"`projection` needs a linear classifier at the end, {type(model).__name__} has none")
    for name in paths:
        classifier = model.get_submodule(name)
        if isinstance(classifier, ProjectedLinear):
            plan.done_before = True
            plan.keep(name, classifier, "it is projected already")
        elif reason := skipped(aliases(model)[classifier], skip):
            plan.keep(name, classifier, reason)
        elif is_plain_linear(classifier):
            plan.swap(name, classifier, projected_twin(classifier, projection), f"ProjectedLinear, {projection}")
        else:
            found = f"{type(classifier).__name__} {name!r}"
            raise ValueError(f"`projection` needs a linear classifier at the end, {type(model).__name__} has {found}")


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, without those that lazy modules have yet to make."""
    return sum(one.numel() for one in model.parameters() if not isinstance(one, UninitializedParameter))


def fused_note(model: nn.Module) -> str:
    """How many convolutions run in fused blocks on a GPU, and why others do not."""
    inside, reasons = fused_paths(model)
    total = sum(type(part) is DecoupledConv2d for part in model.modules())
    text = f"{len(inside)} of {total} decoupled convolutions run in fused blocks on a GPU"
    return "; ".join([text, *(f"{count} not: {reason}" for reason, count in reasons.items())])


def carry_out(plan: Plan, model: nn.Module, operator: OperatorChoice | None, batch: Any, fuse: bool) -> Report:
    """Swap every planned module; if that or the run on the batch fails, put everything back."""
    before = None if batch is None else outputs(model, batch)
    parameters = count_parameters(model)
    undo = [(old, type(old), dict(old.__dict__)) for old, _ in plan.swaps]
    hooked: list[Callable[[], None]] = []
    kind_before, regrouped = type(model).__name__, list[tuple[nn.Module, type]]()
    try:
        for old, new in plan.swaps:
            become(old, new)
        for hook, source, target in plan.hooks:
            hooked.append(hook.install(model, source, target))
        if fuse:
            regrouped += swap_all(model)
            plan.notes.append(fused_note(model))
        gap = None if before is None else difference(before, outputs(model, batch))
    except BaseException:
        for remove in hooked:
            remove()
        for container, was in regrouped:
            container.__class__ = was
        for old, kind, held in undo:
            old.__class__ = kind
            old.__dict__ = held
        raise
    after = count_parameters(model)
    return Report(
        kind_before, None if operator is None else str(operator), tuple(plan.replaced), tuple(plan.kept),
        parameters, after - parameters, gap, tuple(plan.notes),
    )  # fmt: skip
