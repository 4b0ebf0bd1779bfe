"""What a finished record says of the table that it is a cell of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperball.experiments.jobs.ends import reason_of
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.records.broken import leave_out
from hyperball.experiments.scales import Scale
from hyperball.experiments.table import Entry, Experiment
from hyperball.files import FileError
from hyperball.on_disk import METRICS
from hyperball.training.storage.record import Record, read_metrics, thinned

CURVE = 60  # evaluations that a record keeps


def annotate(experiment: Experiment, scale: Scale, jobs: Sequence[Job]) -> None:
    """Say in every finished record which cell of which table it is, by which protocol, and how its accuracy rose."""
    entries = {entry.name: entry for entry in experiment.entries}
    for job in jobs:
        known = job.trains and job.cell.label in entries
        if known and job.is_done and not (record := Record.read(job.folder)).experiment:
            about = about_cell(experiment, scale, entries[job.cell.label], job.cell.seed)
            replace(record, experiment=about, curve=curve_of(job.folder)).write(job.folder)


def about_cell(experiment: Experiment, scale: Scale, entry: Entry, seed: int) -> dict[str, Any]:
    return {
        "table": experiment.name, "title": experiment.title, "source": experiment.source,
        "row": entry.row, "column": entry.column, "kind": entry.kind, "published": entry.published,
        "scale": scale, "protocol": experiment.words(scale), "seed": seed,
    }  # fmt: skip


def curve_of(folder: Path) -> list[list[float]]:
    """A few [epoch, top-1] of a run's evaluations; none where its metrics are broken, which is named."""
    try:
        lines = [line for line in read_metrics(folder / METRICS) if line["kind"] == "evaluation"]
        return thinned([[line["epoch"], line["top1"]] for line in lines], CURVE)
    except (FileError, KeyError) as error:
        leave_out(folder / METRICS, reason_of(error))
        return []
