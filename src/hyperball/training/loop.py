"""The loop: steps, reports, evaluations, checkpoints, until the recipe is done or someone says stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperball.data import Dataset
from hyperball.on_disk import CHECKPOINTS, DIVERGED, METRICS, RECIPE
from hyperball.training.assembly import assemble
from hyperball.training.measures.lengths import lengths
from hyperball.training.measures.metrics import Metrics
from hyperball.training.measures.radii import summarize
from hyperball.training.outcome import record_of
from hyperball.training.process.engine import Engine
from hyperball.training.process.interrupts import Flag, Interrupted
from hyperball.training.progress import EvaluationReport, Progress, RunInfo, TrainReport
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.sections import STATISTICS
from hyperball.training.statistics import begin_at_first_batch, fresh_statistics
from hyperball.training.storage.checkpoint import save_checkpoint
from hyperball.training.storage.record import MetricsLog, Record
from hyperball.training.storage.state import state_of
from hyperball.training.update.offender import NonFiniteError


class Diverged(NonFiniteError):
    """A run ended with numbers that are not finite; `record` says so, and is not written."""

    def __init__(self, error: NonFiniteError, record: Record) -> None:
        RuntimeError.__init__(self, str(error))
        self.step, self.where, self.record = error.step, error.where, record


class Run:
    """One run of a recipe on one engine; `fit` ends with a record."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, engine: Engine, dataset: Dataset, progress: Progress, command: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.began = time.perf_counter()
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
        self.recipe, self.run_dir, self.engine, self.dataset = recipe, run_dir, engine, dataset
        self.progress, self.command = progress, command
        self.parts = assemble(recipe, engine, dataset, conditions)
        self.per_epoch = len(self.parts.feed)
        self.total = self.parts.total_steps
        self.step = 0
        self.results: dict[str, Any] = {"last": None, "best": None, "first_epoch": None}
        self.notes: list[str] = []
        self.seconds = {"total": 0.0, "training": 0.0, "first_step": 0.0}
        self.images = 0
        self.log: MetricsLog | None = None
        self.board: Any = None

    def fit(self, flag: Flag) -> Record:
        """Train from where the run stands to its end."""
        self.open_logs()
        if self.step >= self.total:
            return self.finish()
        self.progress.started(self.info())
        stepper = self.parts.step
        if self.step == 0 and self.recipe.start.statistics == "first_batch" and starts_afresh(self.recipe):
            begin_at_first_batch(self.parts.network, stepper.look)
        stepper.start_from(self.step)
        try:
            self.advance(flag)
        except NonFiniteError as error:
            self.write({"kind": "failure", "step": error.step, "where": error.where})
            raise Diverged(error, self.diverged(error)) from None
        return self.finish()

    def advance(self, flag: Flag) -> None:
        """Step after step, with what is due between them."""
        stepper, clock = self.parts.step, Clock()
        while self.step < self.total:
            epoch, index = divmod(self.step, self.per_epoch)
            self.parts.rates.set(self.parts.schedule.factor(self.step))
            stepper(epoch, index, self.step)
            self.step += 1
            if clock.first:
                self.engine.synchronize()
                self.seconds["first_step"] = time.perf_counter() - self.began
                clock.restart(self.step)
            self.between(flag, clock)

    def between(self, flag: Flag, clock: Clock) -> None:
        """What is due after a step: report, evaluate, save, stop."""
        log, step = self.recipe.log, self.step
        last = step == self.total
        epoch_ends = step % self.per_epoch == 0
        epoch = step // self.per_epoch
        reports = step % log.every == 0 or epoch_ends or last
        if reports:
            self.report(clock)
        if last or (epoch_ends and (epoch % log.evaluate_every == 0 or epoch == 1)):
            self.evaluate()
            clock.restart(step)
        stopped = flag.number if self.engine.world_size == 1 else (self.engine.agree(flag.number) if reports else 0)
        often = log.checkpoint_steps is not None and step % log.checkpoint_steps == 0
        if last or stopped or often or (epoch_ends and epoch % log.checkpoint_every == 0):
            with clock.stopped():
                self.save()
        if stopped and not last:
            raise Interrupted(step, self.command, stopped)

    def report(self, clock: Clock) -> None:
        """Fetch loss and accuracy since the last report, and write them down."""
        loss, accuracy = self.parts.step.tally()
        images, seconds = clock.lap(self.step, self.recipe.batch_size)
        self.images += images
        self.seconds["training"] += seconds
        rates = self.parts.rates.by_group()
        lr = rates.get("decay", rates.get("no_decay", 0.0))
        report = TrainReport(self.step, self.epoch, loss, accuracy, lr, images / seconds if seconds else 0.0)
        line = {"kind": "train", "step": self.step, "epoch": self.epoch, "loss": loss, "accuracy": accuracy, "lr": lr}
        if "radius" in rates:
            line["radius_lr"] = rates["radius"]
        if self.recipe.log.norms:
            line.update(lengths(self.parts.network.model))
        self.write({**line, "images_per_second": round(report.images_per_second, 1)})
        self.progress.trained(report)

    def evaluate(self) -> None:
        """Measure on the test split, with averaged weights where there are any."""
        self.parts.step.verify(self.step)
        average = self.parts.parts.average
        with nullcontext() if average is None else average.applied():
            metrics = self.parts.evaluator.measure()
            under = {name: self.measure_under(name) for name in self.recipe.log.conditions}
            found = summarize(self.parts.network.model)
        if metrics.nonfinite:
            where = f"the logits of {metrics.nonfinite} of {metrics.samples} test samples"
            raise NonFiniteError(self.step, where, "evaluation")
        self.parts.schedule.observe(metrics.loss)
        self.keep(metrics, under)
        line = {"kind": "evaluation", "step": self.step, "epoch": self.epoch, **metrics.as_dict(), "radii": found}
        also = {"conditions": {name: held.top1 for name, held in under.items()}} if under else {}
        self.write({**line, **also})
        self.progress.evaluated(EvaluationReport(self.step, self.epoch, metrics, found))

    def measure_under(self, name: str) -> Metrics:
        """The metrics under a condition: with other inputs, with statistics computed anew, or both."""
        count = self.recipe.log.conditions[name].get(STATISTICS, 0)
        passes = [partial(self.parts.step.look, index) for index in range(count)]
        fresh = fresh_statistics(self.parts.network, passes, self.engine.mean) if passes else nullcontext()
        with fresh:
            return self.parts.evaluator.measure_under(name)

    def keep(self, metrics: Metrics, under: Mapping[str, Metrics]) -> None:
        """Note the last, the best and the first epoch's result, and the last and best under every condition."""
        self.note_result(self.results, metrics)
        if self.step == self.per_epoch:
            self.results["first_epoch"] = self.results["last"]
        for name, found in under.items():
            self.note_result(self.results.setdefault("conditions", {}).setdefault(name, {}), found)
            odd = f"some logits under the condition {name!r} are not finite"
            if found.nonfinite and odd not in self.notes:
                self.note(odd)

    def forget_other_conditions(self, known: Mapping[str, Any]) -> None:
        """Drop results of conditions that are asked for no more, or otherwise, and say which are new."""
        asked = self.recipe.log.conditions
        same = {name for name, changes in asked.items() if known.get(name) == changes}
        under = {name: held for name, held in self.results.pop("conditions", {}).items() if name in same}
        if under:
            self.results["conditions"] = under
        for name in sorted(asked.keys() - same):
            self.note(f"the condition {name!r} is tested from step {self.step} on: its best epoch is of those alone")

    def note_result(self, results: dict[str, Any], metrics: Metrics) -> None:
        """The last result, and the best by test accuracy."""
        results["last"] = {"step": self.step, "epoch": self.epoch, **metrics.as_dict()}
        best = results.get("best")
        if best is None or metrics.top1 > best["top1"]:
            results["best"] = results["last"]

    @property
    def epoch(self) -> float:
        """Epochs done, with a fraction."""
        return round(self.step / self.per_epoch, 6)

    def finish(self) -> Record:
        self.seconds["total"] += time.perf_counter() - self.began
        self.began = time.perf_counter()
        record = record_of(self)
        if self.engine.is_first:
            record.write(self.run_dir)
        self.progress.finished(record.to_dict())
        return record

    def diverged(self, error: NonFiniteError) -> Record:
        """The record of a run that did not converge: where it ended, and no results."""
        self.seconds["total"] += time.perf_counter() - self.began
        failure = {"step": error.step, "where": error.where, "message": str(error)}
        return replace(record_of(self), status=DIVERGED, results={}, failure=failure)

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parts.network.parameters())

    def info(self) -> RunInfo:
        device = str(self.engine.device)
        return RunInfo(self.recipe, self.run_dir, self.step, self.total, self.per_epoch, device, self.parameters())

    def note(self, text: str) -> None:
        """Something a reader of the numbers should know."""
        self.notes.append(text)
        self.progress.noted(text)

    def open_logs(self) -> None:
        if not self.engine.is_first:
            return
        self.log = MetricsLog(self.run_dir / METRICS, self.step or None)
        if self.recipe.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.run_dir / "tensorboard"), purge_step=self.step)

    def write(self, line: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(line)
        if self.board is not None:
            for key, value in line.items():
                if isinstance(value, float) and key != "epoch":
                    self.board.add_scalar(f"{line['kind']}/{key}", value, line["step"])
            for layer, values in line.get("radii", {}).items():
                self.board.add_scalars(f"radius/{layer}", values, line["step"])
            self.board.flush()

    def save(self) -> None:
        """Write a checkpoint of everything that resuming needs."""
        self.parts.step.settle()
        self.parts.step.verify(self.step)
        interval = self.parts.step.interval()
        if self.engine.is_first:
            save_checkpoint(self.run_dir / CHECKPOINTS, state_of(self, interval))
        if self.engine.world_size > 1:
            self.engine.fabric.barrier()


def starts_afresh(recipe: Recipe) -> bool:
    """Whether the running statistics of a run's start are not its own network's: there are none, or another operator's.

    A homotopy begins with the plain network, to which the statistics of a plain one belong.
    """
    if recipe.start.weights is None:
        return True
    source = Path(recipe.start.weights) / RECIPE
    if not source.exists():
        return False
    started = operator_of(Recipe.from_file(source))
    return started != (PLAIN if recipe.homotopy.steps else operator_of(recipe))


PLAIN = (None, "cosine", "none")


def operator_of(recipe: Recipe) -> tuple[str | None, str, str]:
    return recipe.model.magnitude, recipe.model.angular, recipe.model.weighting


class Clock:
    """Wall time of the steps since the last lap."""

    def __init__(self) -> None:
        self.first = True
        self.step = 0
        self.time = time.perf_counter()

    def restart(self, step: int) -> None:
        self.first, self.step, self.time = False, step, time.perf_counter()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The block takes no time of the steps."""
        began = time.perf_counter()
        yield
        self.time += time.perf_counter() - began

    def lap(self, step: int, batch: int) -> tuple[int, float]:
        """Images and seconds since the last lap or restart."""
        images, seconds = (step - self.step) * batch, time.perf_counter() - self.time
        self.restart(step)
        return images, seconds
