"""What a run leaves behind: metrics.jsonl while it goes on, and record.json when it is done."""

from __future__ import annotations

import functools
import json
import os
import platform
import reprlib
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from hyperball._version import versions
from hyperball.diagnose import jsonable
from hyperball.files import FileError, first_line, read_tree, write_bytes, write_json
from hyperball.on_disk import DIVERGED, FORMAT, RECIPE, RECORD, is_number
from hyperball.training.recipe import Recipe
from hyperball.verdicts import ends_at_chance

PACKAGES = ("torch", "numpy", "lightning-fabric", "safetensors", "torchvision", "timm", "triton")
CONDITIONS = "conditions"
FORMS: dict[str, type] = {"status": str, "results": object, "notes": list, "format": int, "curve": list}  # else dict
WORDS: dict[type, str] = {str: "a text", list: "a list", int: "a whole number", dict: "an object"}
Item = TypeVar("Item")


@dataclass(frozen=True)
class Record:
    """A finished run: results with their conditions, how it was computed, where, and how fast.

    `results` holds "last" (all metrics of the last iterate), "best" (the epoch of the highest test accuracy, which
    looked at the test set to be chosen) and "first_epoch", and in "conditions" the first two of every further test that
    its evaluations made; `engine` what was compiled and captured, and why;
    `notes` whatever a reader of the numbers should know, such as a resumption. A run that is a cell of a table says in
    `experiment` of which one and by which protocol, and keeps in `curve` a few [epoch, top-1] of its evaluations.
    A run with numbers that are not finite has the status "diverged", no results, and in `failure` the step and where.
    """

    recipe: dict[str, Any]
    status: str
    results: dict[str, Any]
    conditions: dict[str, Any]
    engine: dict[str, Any]
    environment: dict[str, Any]
    timing: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT
    experiment: dict[str, Any] = field(default_factory=dict)
    curve: list[list[float]] = field(default_factory=list)
    failure: dict[str, Any] = field(default_factory=dict)

    @property
    def is_at_chance(self) -> bool:
        """Whether the network ended no better than guessing, which the papers too call not converging."""
        about = self.recipe.get("data") or {}
        return ends_at_chance(about.get("name"), self.results.get("last") or {}, about.get("test_size"))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, run_dir: Path) -> None:
        write_json(run_dir / RECORD, jsonable(self.to_dict()))

    @classmethod
    def read(cls, run_dir: str | Path) -> Record:
        """The record of a run's folder."""
        path = Path(run_dir) / RECORD
        try:
            record = cls(**fields_in(read_tree(path)))
            if record.status != DIVERGED:
                check_results(record.results)
            elif record.results or not isinstance(record.failure, dict):
                raise FileError("a run that did not converge must have `failure` and no `results`")
            return record
        except FileError as error:
            raise FileError(f"{path}: {error}") from None


def fields_in(tree: Any) -> dict[str, Any]:
    """What a file has of a record's fields, which must be all that have no default, and no others."""
    if not isinstance(tree, dict):
        raise FileError(f"a record must be an object, got {reprlib.repr(tree)}")
    known = {held.name: held.default is MISSING and held.default_factory is MISSING for held in fields(Record)}
    lacking = [name for name, is_needed in known.items() if is_needed and name not in tree]
    if lacking:
        raise FileError(f"a record must have {', '.join(f'`{name}`' for name in lacking)}")
    foreign = [name for name in tree if name not in known]
    if foreign:
        raise FileError(f"`{foreign[0]}` is no field of a record")
    for name, value in tree.items():
        form = FORMS.get(name, dict)
        if not isinstance(value, form):
            raise FileError(f"`{name}` must be {WORDS[form]}, got {reprlib.repr(value)}")
    if not is_number(tree["timing"].get("seconds", 0.0)):
        raise FileError(f"`timing.seconds` must be a number, got {reprlib.repr(tree['timing']['seconds'])}")
    return tree


def check_results(results: Any) -> None:
    """Refuse results without the last evaluation's numbers."""
    last = results.get("last") if isinstance(results, dict) else None
    if not isinstance(last, dict) or "top1" not in last:
        raise FileError("`results.last` must hold an evaluation's metrics; remove the file to resume the run")
    for which, metrics in all_results(results).items():
        if not isinstance(metrics, dict | None):
            raise FileError(f"`results.{which}` must hold metrics, got {reprlib.repr(metrics)}")
        for name, value in (metrics or {}).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise FileError(f"`results.{which}.{name}` must be a number, got {reprlib.repr(value)}")


def all_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of results by their names, those under conditions behind the others: "conditions.'50 %'.best"."""
    found = {which: metrics for which, metrics in results.items() if which != CONDITIONS}
    under = results.get(CONDITIONS)
    if under is None:
        return found
    if not isinstance(under, dict) or not all(isinstance(held, dict) for held in under.values()):
        raise FileError(f"`results.{CONDITIONS}` must map names to results, got {reprlib.repr(under)}")
    for name, held in under.items():
        for which, metrics in held.items():
            told = f"{CONDITIONS}.{reprlib.repr(name)}.{reprlib.repr(which)[1:-1]}"
            if not isinstance(metrics, dict):
                raise FileError(f"`results.{told}` must hold metrics, got {reprlib.repr(metrics)}")
            found[told] = metrics
    return found


def has_diverged(run_dir: str | Path) -> bool:
    """Whether a folder holds the record of a run that did not converge."""
    try:
        return Record.read(run_dir).status == DIVERGED
    except FileError:
        return False


def environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Versions, machine and device."""
    return {
        "versions": versions(PACKAGES),
        "commit": commit(),
        "machine": platform.machine(),
        "system": platform.system(),
        "device": device_name(device),
        "devices": world_size,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that this package lies in, "-dirty" with changes; else that of HYPERBALL_COMMIT."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists() or not (folder / "src" / "hyperball").is_dir():
        return os.environ.get("HYPERBALL_COMMIT")
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors took on a GPU, or this process in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog:
    """metrics.jsonl: one object a line, each written at once; a torn last line is no line."""

    def __init__(self, path: Path, step: int | None = None) -> None:
        """Continue a file, without what lies beyond `step`; None begins anew."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if step is None else [line for line in read_metrics(path) if line["step"] <= step]
        write_bytes(path, "".join(encoded(line) for line in kept).encode())

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(encoded(line))


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def encoded(line: dict[str, Any]) -> str:
    return json.dumps(jsonable(line), allow_nan=False) + "\n"


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; none where there is no file."""
    return list(_whole_lines(Path(path)))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            yield _parsed(line, f"{path}: line {number}")


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """One line of metrics: an object with a kind and a step."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where} is damaged ({first_line(error)}); remove it, or move the file away") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("step"), int) or "kind" not in tree:
        raise FileError(f"{where} must be an object with `kind` and `step`; remove it, or move the file away")
    return tree


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    write_json(run_dir / RECIPE, recipe.to_dict())
