"""Pictures of finished runs as files: a run that cannot be drawn is named, and the others are drawn."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball.experiments.jobs.ends import reason_of
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.records.broken import leave_out
from hyperball.experiments.table import Draw, Experiment, Finished
from hyperball.files import write_json

PICTURES = "pictures"


def draw(experiment: Experiment, jobs: Sequence[Job], out: Path, over: float = math.inf) -> bool:
    """Write the pictures of an experiment's finished runs as plain data, one file each; whether all were begun.

    None is begun after `over`, a time of `time.monotonic`.
    """
    finished = finished_of(experiment, jobs)
    for make in experiment.draws if finished else ():
        if time.monotonic() >= over:
            return False
        for name, picture in drawn_by(make, finished).items():
            write_picture(experiment, name, picture, out)
    return True


def write_picture(experiment: Experiment, name: str, picture: Mapping[str, Any], out: Path) -> None:
    write_json(out / PICTURES / f"{name}.json", {"experiment": experiment.name, **picture})


def finished_of(experiment: Experiment, jobs: Sequence[Job]) -> list[Finished]:
    """The trained entries among jobs."""
    entries = {entry.name: entry for entry in experiment.entries}
    return [
        Finished(entries[job.cell.label], job.cell.seed, job.folder, job.data_root, job.accelerator)
        for job in jobs
        if job.is_done and not job.diverged
    ]


def drawn_by(make: Draw, finished: Sequence[Finished]) -> Mapping[str, dict[str, Any]]:
    """The pictures of all runs that can be drawn; which ones cannot is looked for where together they cannot."""
    if not finished:
        return {}
    try:
        return make(finished)
    except Exception as error:
        whole = [run for run in finished if is_drawable(make, run)]
        if len(whole) < len(finished):
            return drawn_by(make, whole)
        leave_out(finished[0].folder.parents[1] / PICTURES, f"they cannot be drawn: {reason_of(error)}")
        return {}


def is_drawable(make: Draw, run: Finished) -> bool:
    """Whether a run can be drawn; one that cannot, as its metrics or its weights are broken or gone, is named."""
    try:
        make([run])
    except Exception as error:
        leave_out(run.folder, f"it cannot be drawn: {reason_of(error)}")
        return False
    return True
