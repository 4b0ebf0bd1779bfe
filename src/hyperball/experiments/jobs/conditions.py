"""Further tests of a trained network, such as outliers in the test set, in a process of their own.

That is `python -m hyperball.experiments.jobs.conditions PLAN RUN DATA_ROOT ACCELERATOR`.

RUN/conditions.json is written anew after each of them: what is done is not done again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hyperball import data
from hyperball._errors import report
from hyperball._signals import terminable
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.records.conditions import CONDITIONS, conditions_in
from hyperball.experiments.table import Experiment
from hyperball.files import read_tree, write_json
from hyperball.training import evaluate, read_recipe
from hyperball.training.process.allocator import keep_freed_memory
from hyperball.training.sets import for_evaluation
from hyperball.training.storage.record import has_diverged

PLAN = "conditions-plan.json"

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class ConditionsJob(Job):
    """The tests of the network that another cell trained; `cell` is that one's with a label of its own."""

    trains: ClassVar[bool] = False
    trained: str = ""
    conditions: Mapping[str, Changes] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.trained,)

    def command(self) -> list[str]:
        write_json(self.folder / PLAN, {name: dict(changes) for name, changes in self.conditions.items()})
        places = [str(self.folder / PLAN), str(self.folder)]
        return ["hyperball.experiments.jobs.conditions", *places, self.data_root or "", self.accelerator]

    def missing(self) -> str:
        """Which tests are to be made, or nothing if all are, or the network did not converge."""
        if self.diverged:
            return ""
        lacking = [name for name in self.conditions if name not in conditions_in(self.folder)]
        return f"conditions are to be measured: {', '.join(lacking)}" if lacking else ""


def with_conditions(experiment: Experiment, jobs: Sequence[Job]) -> list[Job]:
    """Jobs, and behind each that trains a network which has further tests the job of those."""
    entries = {entry.name: entry.conditions for entry in experiment.entries if entry.conditions}
    return [one for job in jobs for one in (job, *tests_of(job, entries.get(job.cell.label, {})))]


def tests_of(job: Job, conditions: Mapping[str, Changes]) -> Iterator[ConditionsJob]:
    if job.trains and conditions:
        cell = Cell(f"{job.cell.label} tests", job.cell.seed, job.cell.recipe)
        yield ConditionsJob(cell, job.folder, job.data_root, job.accelerator, job.cell.name, conditions)


def measure_cell(conditions: Mapping[str, Changes], run_dir: Path, data_root: str | None, accelerator: str) -> None:
    """Measure what is not measured of a network, and write down each as it is found."""
    if has_diverged(run_dir):
        print("the network did not converge: there is nothing to test", flush=True)
        return
    own = read_recipe(run_dir).data
    whole = data.load(own.name, data_root)
    for name, changes in conditions.items():
        held = conditions_in(run_dir)
        if name in held:
            continue
        changed = for_evaluation(own.override(changes), own)
        found = evaluate(run_dir, data=changed, dataset=whole, accelerator=accelerator)
        write_json(run_dir / CONDITIONS, {**held, name: found.as_dict()})


def main(arguments: list[str]) -> int:
    """0 when all is done, else an exit code and one line."""
    plan, run_dir, data_root, accelerator = arguments
    keep_freed_memory()
    try:
        with terminable():
            measure_cell(read_tree(Path(plan)), Path(run_dir), data_root or None, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
