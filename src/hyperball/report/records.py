"""Runs as their folders tell of them: recipe.json, metrics.jsonl and record.json, read with suspicion."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORD, RECIPE, METRICS = "record.json", "recipe.json", "metrics.jsonl"
FORMAT = 1
UNFINISHED = "unfinished"


class RecordError(ValueError):
    """A file of a run is not what it should be."""


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

    `nonfinite` says that the last evaluation found a loss or logits that are not finite.
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

    def field(self, dotted: str, default: Any = None) -> Any:
        """A field of the recipe by its dotted name."""
        return flat(self.recipe).get(dotted, default)

    @property
    def data(self) -> str:
        return str(self.field("data.name", "unknown data"))


@dataclass(frozen=True)
class LeftOut:
    """A folder or file that is no whole run, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Runs:
    """What a folder holds."""

    runs: tuple[Run, ...]
    left_out: tuple[LeftOut, ...]


def read_runs(folder: str | Path) -> Runs:
    """All runs in a folder and below; what cannot be read is named and left out."""
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder")
    runs, left_out = [], []
    for path in run_folders(root):
        name = path.relative_to(root).as_posix()
        name = root.resolve().name if name == "." else name
        try:
            runs.append(read_run(path, name))
        except RecordError as error:
            left_out.append(LeftOut(name, str(error)))
    return Runs(tuple(runs), tuple(left_out))


def run_folders(root: Path) -> Iterator[Path]:
    """Folders that hold a file of a run, in the order of their names."""
    for place, folders, files in os.walk(root):
        folders.sort(key=natural)
        if {RECORD, RECIPE, METRICS} & {*files, *folders}:
            yield Path(place)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts seed-2 before seed-10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def read_run(folder: Path, name: str) -> Run:
    """One run, finished or not, or a RecordError."""
    record = read_object(folder / RECORD) if (folder / RECORD).exists() else None
    if record is not None and record.get("format") != FORMAT:
        raise RecordError(f"{RECORD}: `format` must be {FORMAT}, got {shown(record.get('format'))}")
    if (folder / RECIPE).exists():
        recipe = read_object(folder / RECIPE)
    elif record is not None:
        recipe = mapping(record, "recipe", RECORD)
    else:
        raise RecordError(f"neither {RECIPE} nor {RECORD} is there")
    for part in ("data", "model"):
        mapping(recipe, part, RECIPE)
    metrics = read_metrics(folder / METRICS)
    curves = (metrics.training, metrics.evaluations)
    if record is None:
        results = {"last": dict(metrics.evaluations[-1].values)} if metrics.evaluations else {}
        failed = bool(metrics.failures)
        return Run(name, folder, recipe, UNFINISHED, results, {}, {}, metrics.failures, *curves, failed)
    found = mapping(record, "results", RECORD)
    results = {key: numbers(mapping(found, key, RECORD)) for key in ("last", "best", "first_epoch") if found.get(key)}
    if "top1" not in results.get("last", {}):
        raise RecordError(f"{RECORD}: `results.last.top1` must be a number")
    notes = record.get("notes")
    return Run(
        name, folder, recipe, str(record.get("status", "unknown")), results,
        numbers(mapping(record, "timing", RECORD)), conditions(record),
        tuple(str(note) for note in notes) if isinstance(notes, list) else (), *curves, has_nonfinite(found["last"]),
    )  # fmt: skip


def has_nonfinite(last: Mapping[str, Any]) -> bool:
    """Whether an evaluation counted logits that are not finite, or has a loss that is none."""
    count = last.get("nonfinite", 0)
    return not is_number(last.get("loss", 0.0)) or (is_number(count) and count > 0)


def conditions(record: Mapping[str, Any]) -> dict[str, str]:
    """Where a run was made, in words."""
    place, versions = mapping(record, "environment", RECORD), {}
    if isinstance(place.get("versions"), dict):
        versions = {name: str(place["versions"][name]) for name in ("torch", "hyperball") if name in place["versions"]}
    engine = record.get("engine") if isinstance(record.get("engine"), dict) else {}
    assert isinstance(engine, dict)
    words = [name for name in ("compiled", "captured") if engine.get(name) is True]
    return {"device": str(place.get("device", "unknown")), "engine": ", ".join(words) or "eager", **versions}


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path.name} is not whole JSON: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise RecordError(f"{path.name} must hold an object, got {shown(tree)}")
    return tree


def mapping(tree: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    value = tree.get(key)
    if not isinstance(value, dict):
        raise RecordError(f"{file}: `{key}` must be an object, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a mapping."""
    return {key: float(value) for key, value in tree.items() if is_number(value)}


@dataclass(frozen=True)
class Metrics:
    """The lines of a metrics.jsonl by kind; `failures` are sentences."""

    training: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    failures: tuple[str, ...]


def read_metrics(path: Path) -> Metrics:
    """The whole lines of a metrics.jsonl; lines that are no such thing are passed over."""
    found: dict[str, list[Any]] = {"train": [], "evaluation": [], "failure": []}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None
    for line in lines:
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(tree, dict) and tree.get("kind") in found and is_number(tree.get("step")):
            found[tree["kind"]].append(tree)
    failures = [
        f"the loss is not finite at step {tree['step']}; first in {tree.get('where')}" for tree in found["failure"]
    ]
    return Metrics(tuple(map(point, found["train"])), tuple(map(point, found["evaluation"])), tuple(failures))


def point(tree: Mapping[str, Any]) -> Point:
    values = numbers(tree)
    step = values.pop("step")
    radii = tree.get("radii")
    means = {
        str(layer): float(part["mean"])
        for layer, part in (radii.items() if isinstance(radii, dict) else ())
        if isinstance(part, dict) and is_number(part.get("mean"))
    }
    return Point(step, values.pop("epoch", step), values, means)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
