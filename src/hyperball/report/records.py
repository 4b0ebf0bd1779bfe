"""Runs as their folders tell of them: recipe.json, metrics.jsonl, record.json and conditions.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hyperball.on_disk import CHANGEABLE, DIVERGED, FORMAT, METRICS, RECIPE, RECORD, is_number
from hyperball.report.files import (
    Place,
    RecordError,
    check_shares,
    clipped,
    flat,
    mapping,
    natural,
    numbers,
    read_object,
    read_text,
    shown,
    texts,
    walk,
)
from hyperball.verdicts import CLASSES, ends_at_chance

__all__ = ["LeftOut", "Point", "RecordError", "Run", "Runs", "flat", "natural", "read_run", "read_runs"]

CONDITIONS = "conditions.json"
RUN_FILES = (RECORD, RECIPE, METRICS)
SHARES = ("top1", "top5")
UNFINISHED = "unfinished"
START = "start.weights"  # a folder, which may be called otherwise elsewhere
OPTIONS = "model.options."  # a field that one recipe lacks is a default of another version; these have none
MOST_LINES = 80
VERSIONS = ("torch", "hyperball")
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Point:
    """One line of metrics.jsonl: numbers by name at a step, and the mean radius of each layer."""

    step: float
    epoch: float
    values: dict[str, float]
    radii: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One run. `results` maps "last", "best" and "first_epoch" to numbers by name, as far as they exist.

    `measured` has the numbers of further test conditions by their names, `best_under` those of the best epoch under
    each that every evaluation tested; `nonfinite` says that the last evaluation
    found a loss or logits that are not finite; `troubles` are files beside the record that could not be read, and why.
    """

    name: str
    folder: Path
    recipe: dict[str, Any]
    status: str
    results: dict[str, dict[str, float]]
    timing: dict[str, float]
    conditions: dict[str, str]
    notes: tuple[str, ...] = ()
    training: tuple[Point, ...] = ()
    evaluations: tuple[Point, ...] = ()
    nonfinite: bool = False
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    best_under: dict[str, dict[str, float]] = field(default_factory=dict)
    scale: str = ""
    troubles: tuple[tuple[str, str], ...] = ()

    def field(self, dotted: str, default: Any = None) -> Any:
        """A field of the recipe by its dotted name."""
        return flat(self.recipe).get(dotted, default)

    @property
    def is_finished(self) -> bool:
        """Whether there is a last iterate to count."""
        return self.status not in (UNFINISHED, DIVERGED)

    @property
    def tested(self) -> int:
        """How many further numbers there are, of conditions and of best epochs under them."""
        return len(self.measured) + len(self.best_under)

    @property
    def diverged(self) -> bool:
        """Whether it came to an end without one: the network did not converge, which is a result too."""
        return self.status == DIVERGED

    @property
    def data(self) -> str:
        return clipped(self.field("data.name", "unknown data"))

    @property
    def seed(self) -> Any:
        return self.recipe.get("seed", 0)


@dataclass(frozen=True)
class LeftOut:
    """A folder or file that is no whole record, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Runs:
    """What a folder holds."""

    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


def read_runs(folder: str | Path) -> Runs:
    """All runs in a folder and below; what cannot be read is named and left out."""
    root = root_of(folder)
    runs, left_out = [], list[LeftOut]()
    for place in walk(root):
        left_out += left_closed(place, root)
        if holds_run(place):
            name = relative(place.folder, root)
            try:
                runs.append(read_run(place.folder, name))
                left_out += left_beside(runs[-1])
            except RecordError as error:
                left_out.append(LeftOut(name, str(error)))
    return Runs(tuple(runs), tuple(left_out))


def root_of(folder: str | Path) -> Path:
    """The folder that a page is about; an empty name is none, and not the working directory."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{os.fspath(folder) or repr('')} is no folder")
    return Path(folder)


def left_closed(place: Place, root: Path) -> list[LeftOut]:
    """What lies in a folder and could not be entered."""
    return [LeftOut(relative(place.folder / name, root), reason) for name, reason in place.closed]


def left_beside(run: Run) -> list[LeftOut]:
    """What was left out of a run's folder while the run was kept."""
    return [LeftOut(f"{run.name}/{file}", reason) for file, reason in run.troubles]


def relative(path: Path, root: Path) -> str:
    """A path below the folder as a text; the folder itself by its own name."""
    name = path.relative_to(root).as_posix()
    return root.resolve().name if name == "." else name


def holds_run(place: Place) -> bool:
    return any(name in place.files or os.path.isdir(place.folder / name) for name in RUN_FILES)


def read_run(folder: Path, name: str) -> Run:
    """One run, finished or not, or a RecordError."""
    record = read_object(folder / RECORD) if present(folder / RECORD) else None
    if record is not None and record.get("format") != FORMAT:
        raise RecordError(f"{RECORD}: `format` must be {FORMAT}, got {shown(record.get('format'))}")
    if present(folder / RECIPE):
        recipe = read_object(folder / RECIPE)
        if record is not None:
            check_own(mapping(record, "recipe", RECORD), recipe)
    elif record is not None:
        recipe = mapping(record, "recipe", RECORD)
    else:
        raise RecordError(f"neither {RECIPE} nor {RECORD} is there")
    for part in ("data", "model"):
        mapping(recipe, part, RECIPE)
    metrics, torn = readable(METRICS, lambda: read_metrics(folder / METRICS), Metrics())
    curves = (metrics.training, metrics.evaluations)
    if record is None:
        results = {"last": dict(metrics.evaluations[-1].values)} if metrics.evaluations else {}
        failed = bool(metrics.failures)
        return Run(name, folder, recipe, UNFINISHED, results, {}, {}, metrics.failures, *curves, failed, troubles=torn)
    if record.get("status") == DIVERGED:
        told = f"did not converge: {clipped(mapping(record, 'failure', RECORD).get('message', ''))}"
        return Run(
            name, folder, recipe, DIVERGED, {}, {}, conditions(record), (told,), *curves, scale=scale_of(record),
            troubles=torn,
        )  # fmt: skip
    found = mapping(record, "results", RECORD)
    results = {key: numbers(mapping(found, key, RECORD)) for key in ("last", "best", "first_epoch") if found.get(key)}
    if "top1" not in results.get("last", {}):
        raise RecordError(f"{RECORD}: `results.last.top1` must be a number")
    for key, held in results.items():
        check_shares({f"results.{key}.{name}": held[name] for name in SHARES if name in held}, RECORD)
    if told := at_chance(recipe, results["last"]):
        timing = numbers(mapping(record, "timing", RECORD))
        notes = (told, *texts(record.get("notes")))
        return Run(
            name, folder, recipe, DIVERGED, {}, timing, conditions(record), notes, *curves, scale=scale_of(record),
            troubles=torn,
        )  # fmt: skip
    nothing: dict[str, dict[str, float]] = {}
    measured, broken = readable(CONDITIONS, lambda: measured_conditions(folder / CONDITIONS), nothing)
    return Run(
        name, folder, recipe, clipped(record.get("status", "unknown")), results,
        numbers(mapping(record, "timing", RECORD)), conditions(record), texts(record.get("notes")), *curves,
        has_nonfinite(found["last"]), measured, best_epochs(found), scale_of(record), torn + broken,
    )  # fmt: skip


def check_own(own: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse a record of another recipe than that beside it, but for what does not determine numbers."""
    held, known = flat(own), flat(recipe)
    for name in {**known, **held}:
        both = name in held and name in known
        if name.startswith(CHANGEABLE) or not (both or name.startswith(OPTIONS)):
            continue
        here, there = held.get(name), known.get(name)
        same_start = name == START and here is not None and there is not None
        if here != there and not same_start:
            raise RecordError(
                f"{RECORD} is of another recipe than {RECIPE} beside it: `{clipped(name)}` is {shown(here)} there and "
                f"{shown(there)} here"
            )


def at_chance(recipe: Mapping[str, Any], last: Mapping[str, float]) -> str:
    """That a network ended no better than guessing, in words; nothing where it is better, or the set is none known."""
    tree = flat(recipe)
    data = tree.get("data.name")
    if not ends_at_chance(data, last, tree.get("data.test_size")):
        return ""
    return f"did not converge: {100 * last['top1']:.2f} % at the end is chance among {CLASSES[str(data)]:,} classes"


def scale_of(record: Mapping[str, Any]) -> str:
    """At which scale of its table a run was made, where it says so."""
    about = record.get("experiment")
    return clipped(about.get("scale", "")) if isinstance(about, dict) else ""


def present(path: Path) -> bool:
    """Whether something of that name is there, a dangling link among it."""
    return os.path.lexists(path)


def readable(file: str, read: Callable[[], Kept], nothing: Kept) -> tuple[Kept, tuple[tuple[str, str], ...]]:
    """What a file beside a record holds; where it is broken nothing, and why: the record's numbers stand without it."""
    try:
        return read(), ()
    except RecordError as error:
        return nothing, ((file, str(error)),)


def measured_conditions(path: Path) -> dict[str, dict[str, float]]:
    """The numbers of further test conditions by their names."""
    if not present(path):
        return {}
    found = {clipped(key): numbers(value) for key, value in read_object(path).items() if isinstance(value, dict)}
    for key, held in found.items():
        check_shares({f"{key}.{name}": held[name] for name in SHARES if name in held}, CONDITIONS)
    return found


def best_epochs(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The best epoch's numbers under every condition that a run's evaluations tested."""
    found = {}
    for key, held in mapping({"conditions": {}, **drop_nothing(results)}, "conditions", RECORD).items():
        about = f"results.conditions.{clipped(key)}"
        for which, metrics in mapping({about: held}, about, RECORD).items():
            check_metrics(metrics, f"{about}.{clipped(which)}")
        if "best" in held:
            found[clipped(key)] = numbers(held["best"])
    return found


def drop_nothing(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if value is not None}


def check_metrics(metrics: Any, about: str) -> None:
    """Refuse what does not map names to numbers or nothing, and accuracies that are none."""
    held = drop_nothing(metrics) if isinstance(metrics, dict) else {"": None}
    if not all(map(is_number, held.values())):
        raise RecordError(f"{RECORD}: `{about}` must hold numbers, got {shown(metrics)}")
    check_shares({f"{about}.{name}": held[name] for name in SHARES if name in held}, RECORD)


def has_nonfinite(last: Mapping[str, Any]) -> bool:
    """Whether an evaluation counted logits that are not finite, or has a loss that is none."""
    count = last.get("nonfinite", 0)
    return not is_number(last.get("loss", 0.0)) or (is_number(count) and count > 0)


def conditions(record: Mapping[str, Any]) -> dict[str, str]:
    """Where a run was made, in words."""
    place, versions = mapping(record, "environment", RECORD), {}
    if isinstance(place.get("versions"), dict):
        versions = {name: clipped(place["versions"][name]) for name in VERSIONS if name in place["versions"]}
    commit = {"commit": clipped(place["commit"])[:12]} if isinstance(place.get("commit"), str) else {}
    engine = record.get("engine") if isinstance(record.get("engine"), dict) else {}
    assert isinstance(engine, dict)
    words = [name for name in ("compiled", "captured") if engine.get(name) is True]
    device = clipped(place.get("device", "unknown"))
    return {"device": device, "engine": ", ".join(words) or "eager", **versions, **commit}


@dataclass(frozen=True)
class Metrics:
    """The lines of a metrics.jsonl by kind; `failures` are sentences."""

    training: tuple[Point, ...] = ()
    evaluations: tuple[Point, ...] = ()
    failures: tuple[str, ...] = ()


def read_metrics(path: Path) -> Metrics:
    """The whole lines of a metrics.jsonl; lines that are no such thing are passed over."""
    found: dict[str, list[Any]] = {"train": [], "evaluation": [], "failure": []}
    for line in read_text(path).splitlines() if present(path) else []:
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(tree, dict) and is_number(tree.get("step")):
            kind = tree.get("kind")
            if isinstance(kind, str) and kind in found:
                found[kind].append(tree)
    failures = [
        f"the loss is not finite at step {tree['step']}; first in {clipped(tree.get('where'))}"
        for tree in found["failure"]
    ]
    training, evaluations = (tuple(map(point, evenly(found[kind]))) for kind in ("train", "evaluation"))
    return Metrics(training, evaluations, tuple(failures))


def evenly(lines: list[Any]) -> list[Any]:
    """Not more lines than a curve shows, evenly from the first to the last, so that seeds keep the same steps."""
    stride = -(-len(lines) // MOST_LINES) or 1
    return [line for index, line in enumerate(lines) if index % stride == 0 or index == len(lines) - 1]


def point(tree: Mapping[str, Any]) -> Point:
    values = numbers(tree)
    step = values.pop("step")
    radii = tree.get("radii")
    means = {
        clipped(layer): float(part["mean"])
        for layer, part in (radii.items() if isinstance(radii, dict) else ())
        if isinstance(part, dict) and is_number(part.get("mean"))
    }
    return Point(step, values.pop("epoch", step), values, means)
