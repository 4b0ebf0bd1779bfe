"""Accuracy as a curve: against the budget of an attack, the severity of a corruption, or the share of outliers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperball._version import versions
from hyperball.attacks import captured
from hyperball.attacks.adapted import adapt
from hyperball.attacks.arguments import (
    check_count,
    check_epsilon,
    check_labels,
    check_logits,
    check_model,
    check_path,
    check_targets,
    device_of,
    parse_epsilon,
)
from hyperball.attacks.battery import percent, stronger
from hyperball.attacks.bench import Bench, Progress, check_attack, default_batch, make_bench
from hyperball.attacks.conditions import PACKAGES, identify
from hyperball.attacks.journal import Journal, RecordError, check_identity, journal_path, read_json
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.methods.table import parse
from hyperball.attacks.methods.task import Attack, Verdict
from hyperball.attacks.norms import find_norm
from hyperball.data import corruptions
from hyperball.data.points import outliers
from hyperball.files import write_json

EPSILONS: dict[str, tuple[str, ...]] = {
    "linf": ("0", "1/255", "2/255", "4/255", "8/255", "16/255", "32/255", "64/255", "128/255"),
    "l2": ("0", "1/8", "1/4", "1/2", "1", "2", "4", "8"),
}
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


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

    @classmethod
    def read(cls, path: str | Path) -> Curve:
        """The curve of a file."""
        tree = read_json(Path(path))
        kinds = {"over": str, "values": list, "accuracies": list, "conditions": dict, "doubts": list}
        sound = isinstance(tree, dict) and all(isinstance(tree.get(key), kind) for key, kind in kinds.items())
        if not sound or not _are_numbers(tree["values"], tree["accuracies"]):
            raise RecordError(f"{path} is no robustness curve; move it away or write elsewhere")
        return cls(**{key: tree[key] for key in kinds})


def _are_numbers(*columns: list[Any]) -> bool:
    """Whether lists of numbers are equally long."""
    return len({len(column) for column in columns}) == 1 and all(
        isinstance(value, int | float) for column in columns for value in column
    )


def robustness_curve(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    over: str = "epsilon",
    values: Iterable[float | str] | None = None,
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
    `path` gets the curve as JSON, and while attacks go on a journal beside it, from which the same call goes on. A
    curve that is there already is read; one of another model, other data or other values is refused.
    """
    check_count("seed", seed, least=0)
    listed, target = _listed(values), check_path(path)
    with seeded(seed, device_of(model, torch.device("cpu"))):
        if over != "epsilon":
            return _over_damage(model, inputs, labels, over, listed, target, resume, batch_size, seed, progress)
        chosen = parse(attack)
        bench = make_bench(
            model, inputs, labels,
            epsilon=0.0, norm=norm, batch_size=batch_size, seed=seed, source=source, progress=progress,
        )  # fmt: skip
        identity = {key: held for key, held in identify(bench, model, source).items() if key != "epsilon"}
        try:
            return _over_epsilon(bench, listed, chosen, identity | {"attack": str(chosen)}, target, resume)
        finally:
            captured.release()


def _listed(values: Any) -> list[float | str] | None:
    """The values of anything that holds at least one."""
    if values is None:
        return None
    try:
        listed = [] if isinstance(values, str) else list(values)
    except TypeError:
        listed = []
    if not listed:
        raise ValueError(f"`values` must have at least one entry, as in [0, 0.5], got {values!r}")
    return listed


def _over_epsilon(
    bench: Bench,
    values: Sequence[float | str] | None,
    attack: Attack,
    identity: dict[str, Any],
    target: Path | None,
    resume: bool,
) -> Curve:
    budgets = _budgets(values, bench)
    finished = _finished(target if resume else None, "epsilon", budgets, identity)
    if finished is not None:
        return finished
    check_attack(bench, attack)
    journal = Journal(None if target is None else journal_path(target), identity, resume)
    bench = replace(bench, journal=journal)
    clean = bench.clean()
    outcomes = [bench.at(budget).run(attack, clean) for budget in budgets]
    conditions = identity | {"chance": 1 / bench.classes, "versions": versions(PACKAGES)}
    accuracies = [outcome.accuracy for outcome in outcomes]
    curve = Curve("epsilon", budgets, accuracies, conditions, rises(budgets, [held.verdict for held in outcomes]))
    if target is not None:
        curve.write(target)
    journal.close()
    return curve


def _budgets(values: Sequence[float | str] | None, bench: Bench) -> list[float]:
    """The budgets as numbers; by default those of the norm's list that pixels in [0, 1] can spend."""
    shape = bench.inputs.shape[1:]
    if values is not None:
        return [check_epsilon(value, bench.norm, shape) for value in values]
    budgets = map(parse_epsilon, EPSILONS[bench.norm.name])
    return [budget for budget in budgets if budget <= bench.norm.reach(shape)]


def _finished(path: Path | None, over: str, values: list[float], identity: dict[str, Any]) -> Curve | None:
    """The curve that is there already; one of another evaluation is refused."""
    if path is None or not path.exists():
        return None
    curve = Curve.read(path)
    known = {**curve.conditions, "over": curve.over, "values": curve.values}
    check_identity(path, known, {"over": over, "values": values, **identity})
    return curve


def rises(budgets: Sequence[float], verdicts: Sequence[Verdict]) -> list[str]:
    """Doubts about budgets at which markedly more images are right than at the next smaller one."""
    ordered = sorted(zip(budgets, verdicts, strict=True), key=lambda pair: pair[0])
    shares = [float(verdict.correct.double().mean()) for _, verdict in ordered]
    return [
        f"accuracy rises from {percent(shares[i])} at epsilon {a:.4g} to {percent(shares[i + 1])} at {b:.4g}: "
        "a larger budget holds every point of a smaller one"
        for i, ((a, less), (b, more)) in enumerate(itertools.pairwise(ordered))
        if stronger(less, more)
    ]


Change = Callable[[Tensor, float], Tensor]


def _over_damage(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    over: str,
    values: Sequence[float | str] | None,
    target: Path | None,
    resume: bool,
    batch_size: int | None,
    seed: int,
    progress: Progress | None,
) -> Curve:
    if over != "outliers" and over not in corruptions.TABLE:
        known = ("epsilon", "outliers", *corruptions.names())
        raise ValueError(f"`over` must be one of {', '.join(known)}, got {over!r}")
    if over == "outliers":
        marks = _shares(values)
        bench = _cloud_bench(model, inputs, labels, batch_size, seed)
        change = _outliers(bench)
    else:
        marks = _levels(values)
        bench = make_bench(model, inputs, labels, epsilon=0.0, batch_size=batch_size, seed=seed)
        change = _corruption(bench, over)
    attacked = ("epsilon", "norm", "source_sha256")
    identity = {key: held for key, held in identify(bench, model, None).items() if key not in attacked}
    finished = _finished(target if resume else None, over, marks, identity)
    if finished is not None:
        return finished
    accuracies = []
    for number, value in enumerate(marks):
        accuracies.append(_accuracy(bench, change, value))
        if progress is not None:
            progress(over, number + 1, len(marks))
    curve = Curve(over, marks, accuracies, identity | {"versions": versions(PACKAGES)})
    if target is not None:
        curve.write(target)
    return curve


def _cloud_bench(model: Any, inputs: Tensor, labels: Tensor, batch_size: int | None, seed: int) -> Bench:
    """The bench of checked clouds [N, P, 3] and int64 labels [N]."""
    called = check_model(model)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    given = isinstance(inputs, Tensor)
    if not (given and inputs.is_floating_point() and inputs.dim() == 3 and len(inputs) and inputs.shape[2] == 3):
        got = f"{inputs.dtype} {tuple(inputs.shape)}" if given else type(inputs).__name__
        raise ValueError(f"`inputs` must be at least one cloud of floats [N, P, 3], got {got}")
    inputs, targets = inputs.detach(), check_targets(labels, len(inputs))
    device = device_of(model, inputs.device)
    called, classes = adapt(called, inputs[:2].to(device), "model")
    check_labels(targets, classes)
    batch = batch_size or default_batch(device, max(1, inputs[0].numel()))
    return Bench(
        model=called, inputs=inputs, labels=targets, epsilon=0.0, norm=find_norm("linf"), classes=classes,
        device=device, batch_size=batch, seed=seed,
    )  # fmt: skip


def _shares(values: Sequence[float | str] | None) -> list[float]:
    """Shares in [0, 1]."""
    marks = [parse_epsilon(value, "values") for value in (SHARES if values is None else values)]
    if max(marks) > 1:
        raise ValueError(f"`values` must be shares in [0, 1], got {max(marks):g}")
    return marks


def _levels(values: Sequence[float | str] | None) -> list[float]:
    """Severities in 0..5."""
    levels = (0, *corruptions.SEVERITIES)
    marks = []
    for value in levels if values is None else values:
        level = -1.0 if isinstance(value, bool) else parse_epsilon(value, "values")
        if level not in levels:
            raise ValueError(f"`values` must be severities in 0..5, got {value!r}")
        marks.append(level)
    return marks


def _outliers(bench: Bench) -> Change:
    """(numbers, share) → the clouds of these numbers with that share of outliers."""
    held: dict[float, Tensor] = {}

    def clouds(part: Tensor, share: float) -> Tensor:
        if share not in held:
            held.clear()
            held[share] = outliers(bench.inputs, share, bench.seed)
        return held[share][part]

    return clouds


def _corruption(bench: Bench, name: str) -> Change:
    """(numbers, severity) → the images of these numbers, corrupted; severity 0 is clean."""

    def corrupted(part: Tensor, level: float) -> Tensor:
        chosen = bench.inputs[part]
        return corruptions.corrupt(chosen, name, int(level), seed=bench.seed, index=part) if level else chosen

    return corrupted


@torch.no_grad()
def _accuracy(bench: Bench, change: Change, value: float) -> float:
    """The share of samples whose largest logit is that of their label; logits that are not finite count as wrong."""
    right = torch.zeros((), dtype=torch.int64, device=bench.device)
    for part in torch.arange(len(bench.labels), device=bench.inputs.device).split(bench.batch_size):
        logits = bench.model(change(part, value).to(bench.device))
        check_logits(logits, len(part))
        truth = bench.labels[part.to(bench.labels.device)].to(bench.device)
        right += ((logits.argmax(1) == truth) & logits.isfinite().all(1)).sum()
    return float(right) / len(bench.labels)
