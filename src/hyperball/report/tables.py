"""Tables of texts, and runs gathered over their seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hyperball.report.records import UNFINISHED, Run, flat

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """A text, whether it is the best of its column, and a remark below it."""

    text: str
    best: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Table:
    """Columns and rows; all columns but the first `texts` hold numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: int = 1
    caption: str = ""


@dataclass(frozen=True)
class Group:
    """Runs whose recipes differ in the seed alone."""

    label: str
    runs: tuple[Run, ...]

    @property
    def is_plain(self) -> bool:
        return self.runs[0].field("model.magnitude") is None

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose numbers are averaged: the finished ones, or all where none is."""
        return tuple(run for run in self.runs if run.status != UNFINISHED) or self.runs


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs of one recipe apart from the seed, labelled by what the recipes differ in."""
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        rest = {key: value for key, value in flat(run.recipe).items() if key != "seed"}
        gathered.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(run)
    trees = [flat(members[0].recipe) for members in gathered.values()]
    keys = differing(trees)
    return [Group(label(tree, keys), tuple(members)) for tree, members in zip(trees, gathered.values(), strict=True)]


def differing(trees: Sequence[dict[str, Any]]) -> list[str]:
    """Dotted names, apart from the seed, that do not have one value in all trees."""
    names = {name: None for tree in trees for name in tree if name != "seed"}
    return [name for name in names if len({json.dumps(tree.get(name), default=str) for tree in trees}) > 1]


def operator(tree: dict[str, Any]) -> str:
    magnitude = tree.get("model.magnitude")
    return "plain" if magnitude is None else f"{magnitude} + {tree.get('model.angular', 'cosine')}"


def label(tree: dict[str, Any], keys: Sequence[str]) -> str:
    """The operator if it differs, and every other field that does."""
    parts = [operator(tree)] if not keys or {"model.magnitude", "model.angular"} & set(keys) else []
    for key in keys:
        if key not in ("model.magnitude", "model.angular"):
            value = tree.get(key)
            parts += [] if value is None else [f"{key.rpartition('.')[2]} {value}"]
    return ", ".join(parts) or "default"


def percent(values: Sequence[float], digits: int = 2) -> str:
    return spread([100 * value for value in values], digits)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """mean ± standard deviation, or the one value there is."""
    if not values:
        return MISSING
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def result(runs: Sequence[Run], which: str, name: str) -> list[float]:
    return [run.results[which][name] for run in runs if name in run.results.get(which, {})]


COLUMNS = ("", "seeds", "accuracy, %", "best epoch, %", "1st epoch, %", "loss", "calibration error, %", "time")


def group_table(groups: Sequence[Group]) -> Table:
    """One row a group; the highest mean accuracy of the last iterate is marked."""
    means = [statistics.fmean(found) if (found := result(g.counted, "last", "top1")) else -1.0 for g in groups]
    rows = []
    for entry, mean in zip(groups, means, strict=True):
        runs = entry.counted
        seconds = [run.timing["seconds"] for run in runs if "seconds" in run.timing]
        rows.append((
            Cell(entry.label, remark=warning(entry)),
            Cell(str(len(runs))),
            Cell(percent(result(runs, "last", "top1")), len(groups) > 1 and mean == max(means)),
            Cell(percent(result(runs, "best", "top1"))), Cell(percent(result(runs, "first_epoch", "top1"))),
            Cell(spread(result(runs, "last", "loss"), 4)), Cell(percent(result(runs, "last", "ece"))),
            Cell(duration(statistics.fmean(seconds) if seconds else None)),
        ))  # fmt: skip
    return Table(COLUMNS, tuple(rows))


def warning(entry: Group) -> str:
    """How many runs of a group are unfinished or not finite, or nothing."""
    counts = {
        "unfinished": sum(run.status == UNFINISHED for run in entry.runs),
        "not finite": sum(run.nonfinite for run in entry.runs),
    }
    return ", ".join(f"{count} of {len(entry.runs)} {word}" for word, count in counts.items() if count)


def run_table(runs: Sequence[Run]) -> Table:
    """One row a run, with its conditions."""
    columns = ("run", "model", "operator", "device", "engine", "seed", "epochs", "accuracy, %", "time", "samples/s")
    rows = []
    for run in runs:
        last = run.results.get("last", {})
        epoch = last.get("epoch", run.evaluations[-1].epoch if run.evaluations else None)
        name = f"{run.name} (not finite)" if run.nonfinite else run.name
        rows.append(tuple(map(Cell, (
            name, str(run.field("model.name", MISSING)), operator(flat(run.recipe)),
            run.conditions.get("device", MISSING), run.conditions.get("engine", run.status),
            str(run.recipe.get("seed", MISSING)), MISSING if epoch is None else f"{epoch:g}",
            percent([last["top1"]] if "top1" in last else []), duration(run.timing.get("seconds")),
            f"{run.timing['images_per_second']:,.0f}" if "images_per_second" in run.timing else MISSING,
        ))))  # fmt: skip
    return Table(columns, tuple(rows), texts=5)
