"""Reproduce a published table: train its entries over seeds, test them under its conditions, compare with the paper."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hyperball.experiments.grid import Cell
from hyperball.experiments.runners import Job
from hyperball.experiments.table import Entry, Experiment
from hyperball.training import evaluate
from hyperball.training.files import FileError, read_tree, write_json
from hyperball.training.record import METRICS, RECIPE, RECORD, Record

CONDITIONS = "conditions.json"
KEPT = (RECIPE, RECORD, METRICS, CONDITIONS)


def jobs_of(
    experiment: Experiment, seeds: Sequence[int], out: Path, data_root: str | None = None, accelerator: str = "auto"
) -> list[Job]:
    """One job an entry and seed, each in a folder of its own, entry by entry of the first seed first."""
    cells = [
        Cell(entry.name, seed, entry.recipe.override({"seed": seed})) for seed in seeds for entry in experiment.entries
    ]
    return [Job(cell, out / cell.name, data_root, accelerator) for cell in cells]


def measure_conditions(experiment: Experiment, jobs: Sequence[Job]) -> None:
    """Measure every finished network under the further conditions of its entry, once."""
    entries = {entry.name: entry for entry in experiment.entries}
    for job in jobs:
        entry = entries[job.cell.label]
        if entry.conditions and job.is_done and not (job.folder / CONDITIONS).exists():
            write_json(
                job.folder / CONDITIONS, {name: measured(job, changes) for name, changes in entry.conditions.items()}
            )


def measured(job: Job, changes: Any) -> dict[str, Any]:
    data = job.cell.recipe.data.override(changes)
    return evaluate(job.folder, data=data, data_root=job.data_root, accelerator=job.accelerator).as_dict()


@dataclass(frozen=True)
class Comparison:
    """One number of a table: the paper's, and ours over seeds (the last iterate) with the best epoch beside it."""

    row: str
    column: str
    published: float | str | None
    values: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        known = isinstance(self.published, int | float)
        return None if self.mean is None or not known else self.mean - float(self.published)  # type: ignore[arg-type]


def compare(experiment: Experiment, jobs: Sequence[Job]) -> list[Comparison]:
    """Every number of the table, those of further conditions behind the others."""
    return [line for entry in experiment.entries for line in compare_entry(experiment, entry, jobs)]


def compare_entry(experiment: Experiment, entry: Entry, jobs: Sequence[Job]) -> list[Comparison]:
    folders = [job.folder for job in jobs if job.cell.label == entry.name and job.is_done]
    records = [Record.read(folder) for folder in folders]
    last, best = (
        tuple(number(experiment.metric, record.results[which]) for record in records) for which in ("last", "best")
    )
    lines = [Comparison(entry.row, entry.column, entry.published, last, best)]
    for condition in entry.conditions:
        values = [number(experiment.metric, found[condition]) for found in map(conditions_in, folders) if found]
        published = entry.published_conditions.get(condition)
        lines.append(Comparison(entry.row, f"{entry.column}, {condition}", published, tuple(values), ()))
    return lines


def conditions_in(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_tree(folder / CONDITIONS)
    except FileError:
        return {}
    return found


def number(metric: str, results: dict[str, Any]) -> float:
    """A metric in percent; "error" is 100 less top-1."""
    return 100 * (1 - results["top1"]) if metric == "error" else 100 * results[metric]


def table(experiment: Experiment, lines: Sequence[Comparison]) -> str:
    """The comparison for a terminal."""
    head = ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds")
    rows = [head, *(told(line) for line in lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    texts = []
    for row in rows:
        left = [row[i].ljust(widths[i]) for i in (0, 1)]
        texts.append("  ".join([*left, *(row[i].rjust(widths[i]) for i in range(2, len(head)))]).rstrip())
    return "\n".join(texts)


def told(line: Comparison) -> tuple[str, ...]:
    ours = "–" if line.mean is None else f"{line.mean:.2f}" + ("" if line.std is None else f" ± {line.std:.2f}")
    best = f"{statistics.fmean(line.best):.2f}" if line.best else "–"
    paper = "–" if line.published is None else str(line.published)
    difference = "–" if line.difference is None else f"{line.difference:+.2f}"
    return (line.row, line.column, ours, best, paper, difference, str(len(line.values)))


def as_data(experiment: Experiment, scale: str, lines: Sequence[Comparison]) -> dict[str, Any]:
    """The comparison as plain data, for the report."""
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "metric": experiment.metric,
        "scale": scale,
        "reduction": experiment.reduction.words if scale == "quick" else None,
        "notes": list(experiment.notes),
        "numbers": [
            {**asdict(line), "mean": line.mean, "std": line.std, "difference": line.difference} for line in lines
        ],
    }


def collect(jobs: Sequence[Job], out: Path) -> int:
    """Copy what finished runs say of themselves, without their weights; how many there were."""
    done = [job for job in jobs if job.is_done]
    for job in done:
        target = out / job.cell.name
        target.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            if (job.folder / name).exists():
                shutil.copyfile(job.folder / name, target / name)
    return len(done)
