"""Further tests of trained networks, such as outliers in the test set: conditions.json beside a record."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from hyperball import data
from hyperball.data import Dataset
from hyperball.experiments.broken import leave_out, odd_number
from hyperball.experiments.failures import out_of_memory, write_down
from hyperball.experiments.orphans import follow
from hyperball.experiments.runners import End, Job, reason_of
from hyperball.experiments.table import Experiment
from hyperball.training import evaluate
from hyperball.training.files import FileError, read_tree, write_json
from hyperball.training.sections import DataConfig
from hyperball.training.sets import Source, for_evaluation, load_set

CONDITIONS = "conditions.json"
SETS = 8  # of one network's conditions that a process holds for the next one's
DIED = "a process that measured was killed"

Changes = Mapping[str, Any]
Waiting = tuple[Job, dict[str, Changes]]


def measure_conditions(
    experiment: Experiment, jobs: Sequence[Job], count: int = 1, over: float = math.inf
) -> dict[str, str]:
    """Measure every finished network under the further conditions of its entry, once, in up to `count` processes.

    None is begun after `over`, a time of `time.monotonic`. Those without memory beside others are measured again, by
    half as many processes. What went wrong, which ends the tests of one network alone, is returned by the names of
    cells, and stands in their logs.
    """
    waiting = unmeasured(experiment, jobs)
    count = min(count, len(waiting))
    if count < 2:
        reasons = {job.cell.name: attempted(job, wanted, over) for job, wanted in waiting}
    else:
        reasons = in_processes(waiting, count, over)
        full = [job for job, _ in waiting if out_of_memory([reasons[job.cell.name]])]
        if full and time.monotonic() < over:
            reasons |= in_processes(unmeasured(experiment, full), count // 2, over)
        for job, wanted in waiting:  # a killed process takes the others' work along
            if reasons[job.cell.name] == DIED and time.monotonic() < over:
                reasons |= in_processes([(job, wanted)], 1, over)
    return {name: reason for name, reason in reasons.items() if reason}


def untested(experiment: Experiment, jobs: Sequence[Job], reasons: Mapping[str, str]) -> list[End]:
    """The cells without some of their tests: for a reason, or as the work was interrupted."""
    return [
        End(job, ": ".join(filter(None, (told(wanted), reasons.get(job.cell.name)))), job.cell.name not in reasons)
        for job, wanted in unmeasured(experiment, jobs)
    ]


def told(wanted: Mapping[str, Changes]) -> str:
    return f"conditions are to be measured: {', '.join(wanted)}"


def unmeasured(experiment: Experiment, jobs: Sequence[Job]) -> list[Waiting]:
    """The finished networks that have not been tested under all conditions, and those that lack."""
    entries = {entry.name: entry for entry in experiment.entries if entry.conditions}
    found = []
    for job in jobs:
        if job.cell.label in entries and job.is_done and not job.diverged:
            held = conditions_in(job.folder)
            conditions = entries[job.cell.label].conditions
            wanted = {name: changes for name, changes in conditions.items() if name not in held}
            found += [(job, wanted)] if wanted else []
    return found


def in_processes(waiting: Sequence[Waiting], count: int, over: float) -> dict[str, str]:
    """What went wrong with each network, which several processes measure."""
    futures: dict[str, Future[str]] = {}
    reasons = {job.cell.name: DIED for job, _ in waiting}
    with workers(min(count, len(waiting))) as pool:
        with suppress(BrokenProcessPool):
            for job, wanted in waiting:
                futures[job.cell.name] = pool.submit(attempted, job, wanted, over)
        for name, future in futures.items():
            with suppress(BrokenProcessPool):
                reasons[name] = future.result()
    return reasons


@contextmanager
def workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with us, and at once where the block does not end well."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=begin, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


def begin(parent: int) -> None:
    """A process that ends with its parent, which alone answers Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    follow(parent)


def attempted(job: Job, conditions: Mapping[str, Changes], over: float = math.inf) -> str:
    """Measure one network under conditions until the time is over, and write down each as it is found; what failed."""
    try:
        for name, changes in conditions.items():
            if time.monotonic() >= over:
                break
            found = measured(job, changes)
            write_json(job.folder / CONDITIONS, {**conditions_in(job.folder), name: found})
    except Exception as error:
        write_down(job.log, error)
        return reason_of(error)
    return ""


def measured(job: Job, changes: Changes) -> dict[str, Any]:
    """The metrics of a network on its test set with changes, which all networks of a process share."""
    own, root = job.cell.recipe.data, job.data_root
    changed = for_evaluation(own.override(changes), own)
    shared = changed_set(changed, root)
    rest = changed.override({"outliers": 0.0})  # those of the shared set are drawn
    return evaluate(job.folder, data=rest, data_root=root, dataset=shared, accelerator=job.accelerator).as_dict()


@lru_cache(maxsize=SETS)
def changed_set(config: DataConfig, root: str | None) -> Dataset:
    """A set whose test split is as a condition says: outliers of thousands of clouds take seconds."""
    return load_set(config, Source(dataset=whole_set(config.name, root)), used=("test",))


@lru_cache(maxsize=1)
def whole_set(name: str, root: str | None) -> Dataset:
    """A set that many evaluations share, read once."""
    return data.load(name, root)


def conditions_in(folder: Path) -> dict[str, Any]:
    """What was measured under conditions, by their names; what is broken is named and left out."""
    path = folder / CONDITIONS
    if not path.exists():
        return {}
    try:
        tree = read_tree(path)
    except FileError as error:
        leave_out(path, str(error))
        return {}
    if not isinstance(tree, dict):
        leave_out(path, f"must be a mapping, got {tree!r}")
        return {}
    for name, metrics in tree.items():
        if problem := odd_number(metrics):
            leave_out(path, f"{name}: {problem}")
    return {name: metrics for name, metrics in tree.items() if not odd_number(metrics)}
