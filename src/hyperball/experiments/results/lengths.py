"""How long filters and their gradients are at the start and at the end of kept runs, as a table of Markdown's cells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from hyperball.experiments.jobs.job import Job
from hyperball.experiments.records.broken import leave_out
from hyperball.experiments.table import Experiment
from hyperball.experiments.text import NOTHING
from hyperball.files import FileError
from hyperball.on_disk import METRICS, is_number
from hyperball.training.storage.record import read_metrics

WORDS = {"weight_norm": "filters", "gradient_norm": "gradients"}
HEAD = ("", *(f"{word}, {when}" for word in WORDS.values() for when in ("first", "last")), "seeds")
Ends = tuple[float, float]


def length_rows(experiment: Experiment, jobs: Sequence[Job]) -> list[tuple[str, ...]]:
    """One row a cell whose runs logged lengths: means over layers and seeds, at the first and the last logged step."""
    rows = []
    for entry in experiment.entries:
        seeds = [found for job in jobs if job.cell.label == entry.name and (found := ends_of(job.folder / METRICS))]
        if seeds:
            means = [told([seed[name][at] for seed in seeds if name in seed]) for name in WORDS for at in (0, 1)]
            rows.append((entry.row, *means, str(len(seeds))))
    return rows


def ends_of(path: Path) -> dict[str, Ends]:
    """The first and the last value of each length that a run logged; nothing where it logged none."""
    try:
        lines = read_metrics(path) if path.is_file() else []
    except (FileError, ValueError) as error:
        leave_out(path, str(error))
        return {}
    held = {name: [line[name] for line in lines if is_number(line.get(name))] for name in WORDS}
    return {name: (values[0], values[-1]) for name, values in held.items() if values}


def told(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3g}" if values else NOTHING
