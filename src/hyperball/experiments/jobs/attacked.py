"""The attacks of a cell in a process: `python -m hyperball.experiments.jobs.attacked PLAN RUN SOURCE DATA DEVICE`.

Every part of the plan is one file below RUN/attacks/, written when it is done; until then, batch by batch, a journal:
what is done is not done again, and what was killed goes on. After every part RUN/robustness.json is written anew:
`hyperball.experiments.records.robustness` describes it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from hyperball import data
from hyperball._errors import report
from hyperball._signals import terminable
from hyperball.attacks import RecordError, evaluate_robustness, robustness_curve
from hyperball.attacks.methods.task import Model
from hyperball.experiments.attacking import fixed, network_and_images
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.records.attack_state import attacks_lacking, is_done, keep_weights, weights_differ
from hyperball.experiments.records.broken import damage
from hyperball.experiments.records.robust_numbers import Attacked, attacked
from hyperball.experiments.records.robustness import FOLDER, assembled, curve_path, part_path, parts_done, write_record
from hyperball.files import read_tree, write_json
from hyperball.training import load_model, read_recipe
from hyperball.training.process.allocator import keep_freed_memory
from hyperball.training.process.engine import settings
from hyperball.training.storage.folder import held
from hyperball.training.storage.record import has_diverged

GPU_BATCH = 1000  # several cells share a GPU, and an interruption costs at most one batch of one stage
PRECISION = "tf32"  # of attacks on a GPU; a record says so


@dataclass(frozen=True)
class AttackJob(Job):
    """The attacks on the network that another cell trained; `cell` is that one's with a label of its own."""

    trains: ClassVar[bool] = False
    trained: Job | None = None
    source: Job | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    attacks: Attacks | None = None
    parts: tuple[Part, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return self.folder / FOLDER / "log.txt"

    @property
    def needs(self) -> tuple[str, ...]:
        jobs = (self.trained, self.source)
        return (*(job.cell.name for job in jobs if job is not None), *self.after)

    def command(self) -> list[str]:
        assert self.source is not None
        path = self.folder / FOLDER / f"plan-{self.parts[0].name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**self.plan, "parts": [part.to_dict() for part in self.parts]})
        places = [str(path), str(self.folder), str(self.source.folder)]
        return ["hyperball.experiments.jobs.attacked", *places, self.data_root or "", self.accelerator]

    def missing(self) -> str:
        """Why attacks are to be run, or nothing if all of them are done or the network did not converge."""
        if has_diverged(self.folder):
            return ""
        try:
            missing = [part.name for part in self.parts if attacks_lacking(self.folder, part)]
        except RecordError as error:
            return str(error)
        if missing:
            return f"attacks are to be run: {', '.join(missing)}"
        return weights_differ(self.folder, self.source.folder) if self.source is not None else ""

    def lack_in(self, folder: Path) -> str:
        """Which attacks the record of a folder, which has no files of single parts, does not have."""
        if has_diverged(folder):
            return ""
        found = None if self.attacks is None else attacked(folder, self.attacks)
        held = () if found is None else parts_done(folder)
        missing = [part.name for part in self.parts if part.to_dict() not in held or not covers(found, part)]
        return damage(folder) or (f"attacks are to be run: {', '.join(missing)}" if missing else "")


def covers(found: Attacked | None, part: Part) -> bool:
    """Whether a record has a line of every attack of a part."""
    lines = {} if found is None else found.sweeps if part.is_sweep else found.attacks
    return set(part.attacks) <= set(lines)


@dataclass(frozen=True)
class Target:
    """A network, the source of transfer attacks, and the test images."""

    run_dir: Path
    network: nn.Module
    source: Model
    test: data.Samples
    seed: int

    def run(self, part: Part) -> float:
        """Run what is missing of a part; the seconds that took."""
        began = time.perf_counter()
        test = self.test if part.images is None else self.test.subset(min(part.images, len(self.test)))
        options: dict[str, Any] = {
            "batch_size": GPU_BATCH if test.inputs.is_cuda else None, "seed": self.seed, "source": self.source,
        }  # fmt: skip
        if part.is_sweep:
            for text in attacks_lacking(self.run_dir, part):
                robustness_curve(
                    self.network, test.inputs, test.labels, "epsilon", part.epsilons,
                    attack=text, path=curve_path(self.run_dir, part, text), **options,
                )  # fmt: skip
        else:
            evaluate_robustness(
                self.network, test.inputs, test.labels,
                epsilon=part.epsilons[0], attacks=list(part.attacks.values()),
                checks=part.checks > 0, check_images=max(part.checks, 1),
                path=part_path(self.run_dir, part), **options,
            )  # fmt: skip
        return time.perf_counter() - began


def attack_cell(plan: dict[str, Any], run_dir: Path, source_dir: Path, data_root: str | None, accelerator: str) -> None:
    """Run the parts of a plan that are not done, and write the record after each."""
    if has_diverged(run_dir):
        print("the network did not converge: there is nothing to attack", flush=True)
        return
    if has_diverged(source_dir):
        raise RecordError(f"the source of transfer attacks, {source_dir}, did not converge")
    recipe = read_recipe(run_dir)
    parts = [Part.from_dict(tree) for tree in plan["parts"]]
    with held(run_dir / FOLDER, "attacking"), settings(recipe.override({"precision": PRECISION})):
        keep_weights(run_dir, source_dir)
        network, inputs, labels = network_and_images(run_dir, None, data_root, accelerator)
        source = fixed(load_model(source_dir, data_root=data_root).to(inputs.device))
        target = Target(run_dir, network, source, data.Samples(inputs, labels), recipe.seed)
        for part in parts:
            if attacks_lacking(run_dir, part):
                spent = target.run(part)
                print(f"{part.name}: {spent:.1f} s", flush=True)
            write_record(run_dir, assembled(run_dir, plan, is_done))


def main(arguments: list[str]) -> int:
    """0 when all is done, else an exit code and one line."""
    plan, run_dir, source_dir, data_root, accelerator = arguments
    keep_freed_memory()
    try:
        with terminable():
            attack_cell(read_tree(Path(plan)), Path(run_dir), Path(source_dir), data_root or None, accelerator)
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
