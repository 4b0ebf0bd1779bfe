"""What a grid found: mean ± standard deviation over seeds, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hyperball.diagnose import jsonable
from hyperball.experiments.jobs.ends import End
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.text import NOTHING, columns, spread
from hyperball.on_disk import DIVERGED
from hyperball.training.storage.record import Record

METRICS = (("last", "top1"), ("first_epoch", "top1"), ("best", "top1"), ("last", "loss"))


def summarize(jobs: Sequence[Job], ends: Sequence[End]) -> dict[str, Any]:
    """The grid in plain data: one entry a label, and every cell that is not done with its reason."""
    missing = unfinished(jobs, ends)
    labels: dict[str, list[tuple[int, Record]]] = {}
    for job in jobs:
        group = labels.setdefault(job.cell.label or "base", [])
        if job.cell.name not in missing:
            group.append((job.cell.seed, Record.read(job.folder)))
    return {
        "cells": len(jobs),
        "done": len(jobs) - len(missing),
        "missing": [{"cell": name, "reason": reason} for name, reason in missing.items()],
        "results": [
            {
                "label": label,
                "seeds": [seed for seed, _ in found],
                "diverged": [seed for seed, record in found if record.status == DIVERGED],
                **results([record for _, record in found]),
            }
            for label, found in labels.items()
        ],
    }


def unfinished(jobs: Sequence[Job], ends: Sequence[End]) -> dict[str, str]:
    """The cells whose folders hold no run, or one of another recipe, and why: how they ended, else what is there.

    A cell that failed here and that another process finished is done.
    """
    failed = {end.job.cell.name: end.reason for end in ends}
    missing = {job.cell.name: job.missing() for job in jobs}
    return {name: failed.get(name) or reason for name, reason in missing.items() if reason}


def results(records: Sequence[Record]) -> dict[str, Any]:
    """Mean, standard deviation (None for one value) and single values of every metric, and the mean seconds.

    A value that is not finite is None, counted in `nonfinite`, and leaves the metric without a mean.
    """
    found: dict[str, Any] = {}
    for which, name in METRICS:
        values = jsonable([record.results[which].get(name) for record in records if record.results.get(which)])
        nonfinite = values.count(None)
        found[f"{which}.{name}"] = {
            "mean": statistics.fmean(values) if values and not nonfinite else None,
            "std": statistics.stdev(values) if len(values) > 1 and not nonfinite else None,
            "values": values,
            "nonfinite": nonfinite,
        }
    seconds = [record.timing["seconds"] for record in records if "seconds" in record.timing]
    return {**found, "seconds": statistics.fmean(seconds) if seconds else None}


def table(summary: dict[str, Any]) -> str:
    """The summary for a terminal."""
    head = ("", "seeds", "accuracy, %", "1st epoch, %", "best epoch, %", "loss", "seconds")
    rows: list[tuple[str, ...]] = [head]
    for entry in summary["results"]:
        lost = len(entry["diverged"])
        rows.append((
            entry["label"], str(len(entry["seeds"])), told(entry["last.top1"], lost, 100),
            told(entry["first_epoch.top1"], lost, 100), told(entry["best.top1"], lost, 100),
            told(entry["last.loss"], lost, 1, 4), NOTHING if entry["seconds"] is None else f"{entry['seconds']:.1f}",
        ))  # fmt: skip
    return columns(rows)


def told(found: dict[str, Any], diverged: int, scale: float, digits: int = 2) -> str:
    """A metric over seeds; words where one has no finite value."""
    if found["nonfinite"]:
        return "not finite"
    return spread([scale * value for value in found["values"]], diverged, digits)
