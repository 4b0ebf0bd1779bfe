"""The attacks of a table as jobs behind those that train, and what they found."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs.attacked import AttackJob
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.plan import SOURCE, SOURCE_SEEDS, Part
from hyperball.experiments.table import Entry, Experiment

FULL_SEED = 0  # the seed whose networks get the attacks that take longest


def with_attacks(experiment: Experiment, jobs: Sequence[Job], seeds: Sequence[int]) -> list[Job]:
    """Jobs in the order of their worth: seed by seed the sources, the networks and their attacks, the longest last."""
    entries = {entry.name: entry for entry in experiment.entries if entry.attacks is not None}
    ranks = {entry.name: 0 if entry.attacks is None else entry.attacks.rank for entry in experiment.entries}
    ordered, longest = dict[str, Job](), list[Job]()
    for rank, seed in itertools.product(sorted({*ranks.values()}), seeds):
        own = [job for job in jobs if job.cell.seed == seed and ranks[job.cell.label] == rank]
        attacked = [job for job in own if job.cell.label in entries]
        sources = [source_job(entries[job.cell.label], job) for job in attacked]
        behind = [attack_jobs(entries[job.cell.label], job, seed == FULL_SEED) for job in attacked]
        for job in (*sources, *own, *(first for first, *_ in behind)):
            ordered.setdefault(job.cell.name, job)
        longest += [job for _, *last in behind for job in last]
    return [*ordered.values(), *longest]


def source_job(entry: Entry, job: Job) -> Job:
    """The training of the network on which transfer attacks on a job's network are made."""
    assert entry.attacks is not None
    recipe = entry.attacks.source.override({"seed": job.cell.seed + SOURCE_SEEDS})
    cell = Cell(SOURCE, job.cell.seed, recipe)
    return Job(cell, job.folder.parent.parent / cell.name, job.data_root, job.accelerator)


def attack_jobs(entry: Entry, job: Job, is_first: bool) -> list[AttackJob]:
    """The attacks on a job's network, and for the first seed those that take longest."""
    assert entry.attacks is not None
    source = source_job(entry, job)
    planned = entry.attacks.parts_of(is_first)
    plan = {
        "cell": {
            "row": entry.row, "column": entry.column, "kind": entry.kind, "seed": job.cell.seed,
            "source_seed": source.cell.recipe.seed,
        },
        "published": dict(entry.attacks.published),
        "planned": [part.to_dict() for part in planned],
    }  # fmt: skip

    def made(name: str, parts: tuple[Part, ...], after: tuple[str, ...]) -> AttackJob:
        cell = Cell(f"{job.cell.label} {name}", job.cell.seed, job.cell.recipe)
        place = job.folder, job.data_root, job.accelerator
        return AttackJob(cell, *place, job, source, plan, entry.attacks, parts, after)

    first = made("attacks", entry.attacks.parts, ())
    if not (is_first and entry.attacks.last):
        return [first]
    return [first, made("longest attacks", entry.attacks.last, (first.cell.name,))]
