"""Records that cannot be read: named on stderr, once each, and left out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hyperball.files import FileError
from hyperball.on_disk import DIVERGED, RECORD, is_number
from hyperball.training.storage.record import Record, all_results

SHARES = ("top1", "top5")


@cache
def leave_out(path: Path, reason: str) -> None:
    print(f"left out {path}: {reason}", file=sys.stderr)


def damage(folder: Path) -> str:
    """Why the record of a run's folder is none that tables and kept records count; "" where it is one."""
    try:
        record = Record.read(folder)
    except FileError as error:
        return str(error).removeprefix(f"{folder / RECORD}: ")
    return "" if record.status == DIVERGED else odd_results(record.results)


def odd_number(metrics: Any) -> str:
    """Why something is no mapping of names to numbers or None; "" where it is."""
    if not isinstance(metrics, Mapping):
        return f"must map names to numbers, got {metrics!r}"
    for name, value in metrics.items():
        if value is not None and not is_number(value):
            return f"`{name}` must be a number, got {value!r}"
    return ""


def odd_metrics(metrics: Any) -> str:
    """Why something is no mapping of a network's metrics, of which accuracies are in [0, 1]; "" where it is."""
    if problem := odd_number(metrics):
        return problem
    for name in SHARES:
        value = metrics.get(name)
        if value is not None and not 0 <= value <= 1:
            return f"`{name}` must be an accuracy in [0, 1], got {value!r}"
    return ""


def odd_results(results: Any) -> str:
    """Why something is not what a finished run's record has as results; "" where it is."""
    if not isinstance(results, Mapping):
        return f"`results` must be a mapping, got {results!r}"
    try:
        named = all_results(results)
    except FileError as error:
        return str(error)
    for which, metrics in named.items():
        problem = odd_metrics(metrics) if metrics is not None else ""
        if problem:
            return f"`results.{which}`: {problem}"
    return ""
