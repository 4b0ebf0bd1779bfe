"""Pictures of finished runs as plain data: curves, two-dimensional features, first filters."""

from __future__ import annotations

import operator
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.experiments.table import Finished
from hyperball.nn.decoupled import Decoupled
from hyperball.on_disk import METRICS, is_number, slug
from hyperball.training import load_model
from hyperball.training.network import Network
from hyperball.training.recipe.sections import DataConfig
from hyperball.training.sets import Source, load_set
from hyperball.training.storage.record import read_metrics, thinned

POINTS = 80  # of a curve
CURVES = "curves"  # the kind of picture that is drawn from records, without weights
SAMPLES = 2000  # whose features are drawn
DIGITS = 5  # significant ones of a written number
SLOW = 0.01  # a momentum of normalization at which tests in the middle of training lag behind

Line = dict[str, Any]


def convergence(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """Test and training error over epochs, the mean over seeds with its standard deviation, a series for every cell."""
    tested = series_of(finished, "evaluation", "epoch", lambda line: 100 * (1 - line["top1"]))
    trained = series_of(finished, "train", "epoch", training_error)
    drawn = {
        "convergence": {**curves("Convergence", "epoch", "test error, %", tested), "note": lag(finished)},
        "convergence-training": curves("Convergence in training", "epoch", "training error, %", trained),
    }
    return {name: picture for name, picture in drawn.items() if picture["series"]}


def training_error(line: Line) -> float | None:
    """The error of augmented batches, each normalized by its own statistics, since the last report."""
    return None if line.get("accuracy") is None else 100 * (1 - line["accuracy"])


def lag(finished: Sequence[Finished]) -> str:
    """Why test errors lag behind the training's, where running statistics follow slowly."""
    options = (run.entry.recipe.model.options for run in finished)
    slow = [momentum for held in options if 0 < (momentum := held.get("norm_momentum") or 0.0) <= SLOW]
    if not slow:
        return ""
    return (
        f"tests normalize by running statistics, with a momentum of {min(slow):g} about {1 / min(slow):,.0f} steps "
        "old, and lag behind the training while weights move fast"
    )


def under_conditions(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """Test accuracy over epochs under every condition that evaluations tested, a picture each."""
    return under_each(finished, "accuracy", lambda top1: 100 * top1)


def errors_under_conditions(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """The same as test error."""
    return under_each(finished, "error", lambda top1: 100 * (1 - top1))


def under_each(
    finished: Sequence[Finished], word: str, value: Callable[[float], float]
) -> Mapping[str, dict[str, Any]]:
    """A picture for every condition: over epochs, what a value makes of the accuracy under it."""
    names = dict.fromkeys(name for run in finished for name in run.entry.recipe.log.conditions)
    drawn = {
        f"under-{slug(name)}": curves(
            f"Test {word}, {name}", "epoch", f"test {word}, %",
            series_of(finished, "evaluation", "epoch", partial(under_one, name, value)),
        )
        for name in names
    }  # fmt: skip
    return {name: picture for name, picture in drawn.items() if picture["series"]}


def under_one(condition: str, value: Callable[[float], float], line: Line) -> float | None:
    found = line.get("conditions", {}).get(condition)
    return value(found) if is_number(found) else None


def learned_radii(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """The mean learned radius over epochs, a series for every cell that learns one."""
    series = series_of(finished, "evaluation", "epoch", mean_radius)
    return {"radii": curves("Learned radii, mean over layers", "epoch", "radius", series)} if series else {}


def mean_radius(line: Line) -> float | None:
    means = [part["mean"] for part in line.get("radii", {}).values() if "mean" in part]
    return statistics.fmean(means) if means else None


def filter_lengths(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """Mean lengths of filters and of their gradients over steps, a series for every cell."""
    words = {"weight_norm": "mean length of filters", "gradient_norm": "mean length of filters' gradients"}
    drawn = {}
    for key, label in words.items():
        series = series_of(finished, "train", "step", operator.methodcaller("get", key))
        if series:
            drawn[key.replace("_", "-")] = {**curves(label.capitalize(), "step", label, series), "log": True}
    return drawn


def curves(title: str, x_label: str, y_label: str, series: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": CURVES, "title": title, "x_label": x_label, "y_label": y_label, "series": series}


def series_of(
    finished: Sequence[Finished], kind: str, axis: str, value: Callable[[Line], float | None]
) -> list[dict[str, Any]]:
    """One series a cell: at every point that all of its seeds have, the mean and, of several, the deviation."""
    cells: dict[str, list[dict[float, float]]] = defaultdict(list)
    for run in finished:
        lines = [line for line in read_metrics(run.folder / METRICS) if line["kind"] == kind]
        found = dict(point for line in lines if (point := point_of(line[axis], value(line))) is not None)
        if found:
            cells[f"{run.entry.row}, {run.entry.column}"].append(found)
    return [one_series(name, seeds) for name, seeds in cells.items()]


def point_of(x: Any, y: Any) -> tuple[float, float] | None:
    """A point of a curve, None where there is no value; what is not finite is refused."""
    if y is None:
        return None
    if not (is_number(x) and is_number(y)):
        raise ValueError(f"a point of a curve must have finite numbers, got {x!r} and {y!r}")
    return x, y


def one_series(name: str, seeds: Sequence[Mapping[float, float]]) -> dict[str, Any]:
    common = thinned(sorted(set.intersection(*map(set, seeds))), POINTS)
    values = [[seed[x] for seed in seeds] for x in common]
    made: dict[str, Any] = {"name": name, "x": common, "y": [short(statistics.fmean(found)) for found in values]}
    if len(seeds) > 1:
        made["band"] = [short(statistics.stdev(found)) for found in values]
    return made


def short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def first_filters(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """The filters of every cell's first convolution, of the first seed."""
    drawn = {}
    for run in first_seed(finished):
        weight = first_weight(network_of(run))
        if weight is not None:
            title = f"First filters: {run.entry.row}, {run.entry.column}"
            drawn[f"filters-{run.entry.name}"] = {"kind": "filters", "title": title, "filters": rounded(weight)}
    return drawn


def first_weight(model: nn.Module) -> Tensor | None:
    """The weights [n, c, h, w] of the first convolution of images, decoupled or plain."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, Decoupled | nn.Conv2d) and isinstance(weight, Tensor) and weight.dim() == 4:
            return weight.detach().float().cpu()
    return None


def two_features(finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """The two-dimensional features of test images, a picture for every cell of the first seed."""
    drawn = {}
    for run in first_seed(finished):
        points, labels = features(run)
        drawn[f"features-{run.entry.name}"] = {
            "kind": "features2d", "title": f"Features: {run.entry.row}, {run.entry.column}",
            "points": rounded(points), "labels": labels.tolist(),
        }  # fmt: skip
    return drawn


@torch.no_grad()
def features(run: Finished) -> tuple[Tensor, Tensor]:
    """What the classifier of a run's network sees of the first test images, and their labels."""
    network, test = network_of(run), set_of(run.entry.recipe.data, run.data_root).test
    samples = test.subset(min(SAMPLES, len(test)))
    seen: list[Tensor] = []
    model: Any = network.model
    handle = model.get_classifier().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        for part in samples.inputs.split(500):
            network(part.float() / 255)
    finally:
        handle.remove()
    return torch.cat(seen).float(), samples.labels


def network_of(run: Finished) -> Network:
    return load_model(run.folder, data_root=run.data_root, dataset=set_of(run.entry.recipe.data, run.data_root))


@lru_cache(maxsize=1)
def set_of(config: DataConfig, root: str | None) -> Any:
    """The set that many cells share, read once."""
    return load_set(config, Source(root))


def first_seed(finished: Sequence[Finished]) -> Iterable[Finished]:
    """Every cell's run of the smallest seed."""
    chosen: dict[str, Finished] = {}
    for run in finished:
        if run.entry.name not in chosen or run.seed < chosen[run.entry.name].seed:
            chosen[run.entry.name] = run
    return chosen.values()


def rounded(tensor: Tensor) -> Any:
    """Nested lists of numbers of a few digits."""
    if tensor.dim() == 0:
        return short(float(tensor))
    return [rounded(part) for part in tensor]
