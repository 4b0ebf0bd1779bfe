"""Tables of time and memory: our layers timed beside the published milliseconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyperball.experiments.devices import device_of
from hyperball.experiments.scales import Scale
from hyperball.experiments.text import NOTHING, columns
from hyperball.files import FileError, read_tree, write_json
from hyperball.training.storage.record import environment

ROUNDS, WARMUPS = 15, 3
TABLE = "table.json"
RATIO, PAPERS_RATIO, MEMORY = "ratio", "ratio, paper", "peak_mib"
TIMED_SCALES: tuple[Scale, ...] = ("quick", "paper")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Subject:
    """One number of a table of times: `make` builds what is timed on a device; the time is divided by `samples`.

    `over` is the row and column of the subject that it is told as a multiple of, and `published_ratio` the paper's.
    """

    row: str
    column: str
    published: float | None
    make: Callable[[torch.device], Call]
    samples: int = 1
    over: tuple[str, str] | None = None
    published_ratio: float | None = None


@dataclass(frozen=True)
class Timing:
    """A published table of times; a scale chooses the size of the work, which `work` says in words."""

    name: str
    title: str
    source: str
    unit: str
    subjects: Callable[[Scale], tuple[Subject, ...]]
    work: Callable[[Scale], str]
    notes: tuple[str, ...] = ()


def measure_times(
    table: Timing, scale: Scale, accelerator: str, folder: Path, kept: Path | None = None, over: float = math.inf
) -> str:
    """Time every subject, write table.json into the folder and where it is kept, and give the table for a terminal.

    A kept table of another device, or of other work, stays, which is said. Nothing is begun after `over`, a time of
    `time.monotonic`: then there is no table, and the text is empty.
    """
    device = device_of(accelerator)
    numbers = []
    for subject in table.subjects(scale):
        if time.monotonic() >= over:
            return ""
        numbers.append(timed(subject, device))
    add_ratios(numbers, table.subjects(scale))
    place = environment(device, 1)
    tree = {
        "experiment": table.name, "title": table.title, "source": table.source, "metric": table.unit, "scale": scale,
        "protocol": f"{table.work(scale)}; medians of {ROUNDS} rounds, synchronized, on {place['device']}",
        "notes": list(table.notes), "environment": place, "numbers": numbers,
    }  # fmt: skip
    write_json(folder / TABLE, tree)
    said = [] if kept is None else keep_times(kept / TABLE, tree)
    rows = [head_of(tree), *map(row_of, numbers)]
    return "\n".join([columns(rows, left=2), *(f"note: {note}" for note in (tree["protocol"], *table.notes)), *said])


def head_of(tree: Mapping[str, Any]) -> tuple[str, ...]:
    return ("", "", str(tree["metric"]), "paper", "ratio", "paper's ratio", "peak MiB")


def row_of(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """A number of a table of times as texts: ours, the paper's, how many times its reference both are, memory."""
    digits = {"mean": ".3f", "published": "g", RATIO: ".2f", PAPERS_RATIO: ".2f", MEMORY: ".1f"}
    held = (NOTHING if entry.get(key) is None else format(entry[key], form) for key, form in digits.items())
    return (entry["row"], entry["column"], *held)


def add_ratios(numbers: Sequence[dict[str, Any]], subjects: Sequence[Subject]) -> None:
    """Say of every number how many times that of its reference it is, which compares across devices."""
    means = {(entry["row"], entry["column"]): entry["mean"] for entry in numbers}
    for entry, subject in zip(numbers, subjects, strict=True):
        if subject.over is not None:
            entry[RATIO] = entry["mean"] / means[subject.over]
            entry |= {} if subject.published_ratio is None else {PAPERS_RATIO: subject.published_ratio}


def quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def keep_times(path: Path, tree: dict[str, Any]) -> list[str]:
    """Write a table of times, unless one of other work or of another device is there, which is said."""
    try:
        known = read_tree(path)["protocol"]
    except (FileError, KeyError, TypeError):
        known = tree["protocol"]
    if known != tree["protocol"]:
        return [f"kept {path} as it is: it is of another protocol: {known}"]
    write_json(path, tree)
    return []


def timed(subject: Subject, device: torch.device) -> dict[str, Any]:
    """The median milliseconds of a subject, all rounds of it, and on a GPU its peak memory."""
    call = subject.make(device)
    for _ in range(WARMUPS):
        call()
    peak = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        peak = {MEMORY: round(torch.cuda.max_memory_allocated(device) / 2**20, 1)}
    values = [milliseconds(call, device) / subject.samples for _ in range(ROUNDS)]
    median = statistics.median(values)
    difference = None if subject.published is None else median - subject.published
    return {
        "row": subject.row, "column": subject.column, "published": subject.published, "values": [median],
        "rounds": values, "mean": median, "std": None, "difference": difference, "best": [], **peak,
    }  # fmt: skip


def milliseconds(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began)
