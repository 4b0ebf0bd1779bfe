"""Accuracy as a curve: against the budget of an attack, the severity of a corruption, or the share of outliers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperball.attacks.arguments import (
    check_count,
    check_epsilon,
    check_images,
    check_labels,
    check_logits,
    check_model,
    device_of,
    parse_epsilon,
)
from hyperball.attacks.bench import Progress, default_batch, make_bench
from hyperball.attacks.conditions import identify, versions
from hyperball.attacks.journal import Journal, journal_path, write_json
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.methods.table import parse
from hyperball.attacks.methods.task import Attack, Model
from hyperball.data import corruptions
from hyperball.data.points import outliers

EPSILONS = ("0", "1/255", "2/255", "4/255", "8/255", "16/255", "32/255", "64/255", "128/255")
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SLACK = 0.01  # by how much accuracy may rise with the budget before that is a doubt


@dataclass(frozen=True)
class Curve:
    """Accuracies at values of `over`, with the conditions they share and what is doubtful about them."""

    over: str
    values: list[float]
    accuracies: list[float]
    conditions: dict[str, Any]
    doubts: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kind": "robustness curve", "format": 1}

    def write(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_json(Path(path), self.to_dict())


def robustness_curve(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    over: str = "epsilon",
    values: Sequence[float | str] | None = None,
    *,
    attack: str | Attack = "pgd",
    norm: str = "linf",
    batch_size: int | None = None,
    seed: int = 0,
    source: Any = None,
    path: str | Path | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Curve:
    """Accuracy over "epsilon" (of `attack`), over the severity of a corruption by name, or over "outliers" in clouds.

    Every value is a run of its own on all samples. `values` are budgets or texts such as "8/255"; severities 0 (clean)
    to 5; or shares of points in [0, 1] that become outliers. The doubts name budgets at which accuracy rises.
    `path` gets the curve as JSON, and while attacks go on a journal beside it, from which the same call goes on.
    """
    target = None if path is None else Path(path)
    if over == "epsilon":
        with seeded(seed, device_of(model, torch.device("cpu"))):
            curve = _over_epsilon(
                model, inputs, labels, values, parse(attack), target, resume,
                norm=norm, batch_size=batch_size, seed=seed, source=source, progress=progress,
            )  # fmt: skip
    else:
        curve = _over_damage(model, inputs, labels, over, values, batch_size, seed, progress)
    if target is not None:
        curve.write(target)
        journal_path(target).unlink(missing_ok=True)
    return curve


def _over_damage(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    over: str,
    values: Sequence[float | str] | None,
    batch_size: int | None,
    seed: int,
    progress: Progress | None,
) -> Curve:
    if over != "outliers" and over not in corruptions.TABLE:
        known = ("epsilon", "outliers", *corruptions.names())
        raise ValueError(f"`over` must be one of {', '.join(known)}, got {over!r}")
    called = check_model(model)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    batch_size = batch_size or default_batch(device_of(model, inputs.device), inputs[0].numel())
    change, marks = _changes(over, inputs, labels, values, seed)
    accuracies = []
    for number, value in enumerate(marks):
        accuracies.append(_accuracy(called, lambda part, v=value: change(part, v), labels, batch_size, inputs.device))  # type: ignore[misc]
        if progress is not None:
            progress(over, number + 1, len(marks))
    return Curve(over, marks, accuracies, {"images": len(labels), "seed": seed, "versions": versions()})


def _over_epsilon(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    values: Sequence[float | str] | None,
    attack: Attack,
    target: Path | None,
    resume: bool,
    **options: Any,
) -> Curve:
    budgets = [parse_epsilon(value) for value in (EPSILONS if values is None else values)]
    _check_values(budgets)
    bench = make_bench(model, inputs, labels, epsilon=max(budgets), **options)
    for budget in budgets:
        check_epsilon(budget, bench.norm, bench.inputs.shape[1:])
    identity = {key: held for key, held in identify(bench, model, options["source"]).items() if key != "epsilon"}
    journal = Journal(None if target is None else journal_path(target), identity | {"curve": str(attack)}, resume)
    bench = replace(bench, journal=journal)
    clean = bench.clean()
    accuracies = [bench.at(budget).run(attack, clean).accuracy for budget in budgets]
    conditions = identity | {"attack": str(attack), "chance": 1 / bench.classes, "versions": versions()}
    rises = [
        f"accuracy rises from {100 * low:.1f} % at epsilon {a:.4g} to {100 * high:.1f} % at {b:.4g}: "
        "a larger budget holds every point of a smaller one"
        for (a, low), (b, high) in _neighbors(budgets, accuracies)
        if high > low + SLACK
    ]
    return Curve("epsilon", budgets, accuracies, conditions, rises)


def _neighbors(values: list[float], accuracies: list[float]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    pairs = sorted(zip(values, accuracies))
    return list(itertools.pairwise(pairs))


Change = Callable[[Tensor, float], Tensor]


def _changes(
    over: str, inputs: Tensor, labels: Tensor, values: Sequence[float | str] | None, seed: int
) -> tuple[Change, list[float]]:
    """The samples of given numbers at a value, and the values."""
    if over == "outliers":
        marks = [parse_epsilon(value, "values") for value in (SHARES if values is None else values)]
        _check_values(marks)
        if max(marks) > 1:
            raise ValueError(f"`values` must be shares in [0, 1], got {max(marks):g}")
        held: dict[float, Tensor] = {}

        def clouds(part: Tensor, share: float) -> Tensor:
            if share not in held:
                held.clear()
                held[share] = outliers(inputs, share, seed)
            return held[share][part]

        return clouds, marks
    images, _ = check_images(inputs, labels)
    levels = [0, *corruptions.SEVERITIES] if values is None else [int(value) for value in values]
    _check_values([float(level) for level in levels])
    for level in levels:
        if level not in (0, *corruptions.SEVERITIES):
            raise ValueError(f"`values` must be severities in 0..5, got {level}")

    def corrupted(part: Tensor, level: float) -> Tensor:
        chosen = images[part]
        return corruptions.corrupt(chosen, over, int(level), seed=seed, index=part) if level else chosen

    return corrupted, [float(level) for level in levels]


def _check_values(values: Sequence[float]) -> None:
    if not values:
        raise ValueError("`values` must have at least one entry")


@torch.no_grad()
def _accuracy(
    model: Model, take: Callable[[Tensor], Tensor], labels: Tensor, batch_size: int, home: torch.device
) -> float:
    """The share of samples whose largest logit is that of their label."""
    device = device_of(model, home)
    right = torch.zeros((), dtype=torch.int64, device=device)
    for part in torch.arange(len(labels), device=home).split(batch_size):
        logits = model(take(part).to(device))
        classes = check_logits(logits, len(part))
        truth = labels.to(home)[part].to(device)
        if int(part[0]) == 0:
            check_labels(labels, classes)
        right += (logits.argmax(1) == truth).sum()
    return float(right) / len(labels)
