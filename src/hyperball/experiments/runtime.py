"""Tables of time and memory: our layers timed beside the published milliseconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hyperball import models
from hyperball.experiments.declarative import SOURCE
from hyperball.experiments.devices import device_of
from hyperball.experiments.projections import SETS, projection_text
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import published
from hyperball.experiments.text import NOTHING, columns
from hyperball.nn.pooling import RobustPool1d
from hyperball.training.files import FileError, read_tree, write_json
from hyperball.training.record import environment

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


POOLED: dict[str, tuple[int, int, int]] = {"quick": (4, 128, 512)}
WHOLE = (24, 1024, 2048)


def pool_call(pool: torch.nn.Module, shape: tuple[int, int, int], backward: bool, device: torch.device) -> Call:
    """The pooling of random samples over the last dimension; or its gradient alone, of a graph that is kept."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = drawn.to(device).requires_grad_()
    pool.to(device)
    if not backward:
        return lambda: pool(x)
    y = pool(x)
    wanted = [x, *pool.parameters()]
    return lambda: torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)


def pooling_subjects(scale: Scale) -> tuple[Subject, ...]:
    facts = published()["ddn_pooling_runtime"]["cells"]
    shape = POOLED.get(scale, WHOLE)
    made = []
    for penalty, directions in {**facts, "truncated_quadratic": {}, "quadratic": {}}.items():
        for direction in ("forward", "backward"):
            numbers = directions.get(direction, (None, None))
            for how, number in zip(("fixed", "adaptive"), numbers, strict=True):
                if how == "adaptive" and penalty == "quadratic":
                    continue
                text = f"{penalty}(learn_c=True)" if how == "adaptive" else penalty
                subject = Subject(penalty, f"{direction}, {how}", number, pool_maker(text, shape, direction))
                if how == "adaptive":
                    subject = replace(
                        subject, over=(penalty, f"{direction}, fixed"), published_ratio=quotient(number, numbers[0])
                    )
                made.append(subject)
    return tuple(made)


def pool_maker(text: str, shape: tuple[int, int, int], direction: str) -> Callable[[torch.device], Call]:
    return lambda device: pool_call(RobustPool1d(penalty=text), shape, direction == "backward", device)


def pooling() -> Timing:
    """Forward and backward of one robust pooling."""
    return Timing(
        "pooling-runtime", "Time of robust pooling", f"{SOURCE}, slides", "milliseconds", pooling_subjects,
        lambda scale: f"{POOLED.get(scale, WHOLE)} samples, pooled over the last dimension",
        ("published times were taken without synchronizing an RTX 2080 Ti: ratios alone compare", "ratio: to fixed c"),
    )  # fmt: skip


def network_call(projection: str | None, size: int, batch: int, device: torch.device) -> Call:
    """A ResNet-18 in evaluation, forward."""
    options = {} if projection is None else {"projection": projection}
    network = models.create("resnet18", 10, **options).to(device).eval()
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)

    def forward() -> Any:
        with torch.no_grad():
            return network(x)

    return forward


def projection_subjects(scale: Scale) -> tuple[Subject, ...]:
    facts = published()["ddn_projection_runtime"]["cells"]
    size, batch = (64, 8) if scale == "quick" else (224, 128)

    plain = facts["none"][0]

    def made(row: str, column: str, number: float | None, text: str | None) -> Subject:
        over, ratio = (None, None) if text is None else (("none", "no projection"), quotient(number, plain))
        return Subject(row, column, number, lambda device: network_call(text, size, batch, device), batch, over, ratio)

    subjects = [made("none", "no projection", plain, None)]
    for row, projection in SETS.items():
        for how, number in zip(("fixed", "adaptive"), facts.get(row, (None, None)), strict=True):
            subjects.append(made(row, how, number, projection_text(projection, how)))
    return tuple(subjects)


def projections() -> Timing:
    """A whole ResNet-18 with each projection before its classifier, an image."""
    return Timing(
        "projections-runtime", "Time of a ResNet-18 with projections", f"{SOURCE}, slides", "milliseconds an image",
        projection_subjects,
        lambda scale: "forward of 8 images of 64×64 pixels" if scale == "quick" else "forward of 128 images of 224×224",
        (
            "the paper's device and batch are not those used here: ratios alone compare",
            "ratio: to the network without a projection",
        ),
    )  # fmt: skip
