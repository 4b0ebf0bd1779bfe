"""A run's progress: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperball.training.progress import EvaluationReport, Progress, RunInfo, TrainReport

SECONDS = 5.0


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """What suits the place that the output goes to; a bar is taken down at the end, however it comes."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield Lines()
        return
    bar = Bar()
    try:
        yield bar
    finally:
        bar.close()


def describe_run(run: RunInfo) -> str:
    epochs = run.total_steps / run.steps_per_epoch
    begin = f", from step {run.step:,}" if run.step else ""
    return (
        f"{run.run_dir}: {run.recipe.model.name} on {run.recipe.data.name}, {run.parameters:,} parameters, "
        f"{in_epochs(epochs)} of {run.steps_per_epoch:,} steps on {run.device}{begin}"
    )


def in_epochs(number: float) -> str:
    return f"{number:g} epoch" if number == 1 else f"{number:g} epochs"


def measured(report: EvaluationReport) -> str:
    return f"test {100 * report.metrics.top1:.2f} %"


class Lines:
    """Plain lines; between the first and the last at most one every few seconds."""

    def __init__(self, write: Callable[[str], object] | None = None, seconds: float = SECONDS) -> None:
        self.write = write or self.print
        self.seconds = seconds
        self.spoken = -1e9
        self.total = 0
        self.tested = ""

    @staticmethod
    def print(text: str) -> None:
        print(text, flush=True)

    def started(self, run: RunInfo) -> None:
        self.total = run.total_steps
        self.write(describe_run(run))

    def trained(self, report: TrainReport) -> None:
        if time.monotonic() - self.spoken < self.seconds:
            return
        self.spoken = time.monotonic()
        self.write(
            f"step {report.step:,}/{self.total:,}  epoch {report.epoch:.1f}  loss {report.loss:.4f}  "
            f"train {100 * report.accuracy:.2f} %{self.tested}  lr {report.lr:.3g}  {report.images_per_second:,.0f}/s"
        )

    def evaluated(self, report: EvaluationReport) -> None:
        self.tested = f"  {measured(report)}"

    def noted(self, text: str) -> None:
        self.write(f"note: {text}")

    def finished(self, record: dict[str, Any]) -> None:
        pass


class Bar:
    """A bar of rich's."""

    def __init__(self) -> None:
        try:
            from rich import progress as parts
        except ImportError as error:
            raise ImportError(f"progress needs rich ({error}); pip install 'hyperball[train]'") from error
        columns = ("{task.description}", parts.BarColumn(), parts.TaskProgressColumn(), "{task.fields[said]}")
        self.bar = parts.Progress(*columns, parts.TimeElapsedColumn(), parts.TimeRemainingColumn())
        self.task: Any = None
        self.losses = self.tested = ""

    def started(self, run: RunInfo) -> None:
        self.bar.console.print(describe_run(run), markup=False, highlight=False)
        self.task = self.bar.add_task(run.run_dir.name, total=run.total_steps, completed=run.step, said="")
        self.bar.start()

    def say(self, **update: Any) -> None:
        self.bar.update(self.task, said=f"{self.losses}{self.tested}", **update)

    def trained(self, report: TrainReport) -> None:
        self.losses = f"epoch {report.epoch:.1f}  loss {report.loss:.4f}  {report.images_per_second:,.0f}/s"
        self.say(completed=report.step)

    def evaluated(self, report: EvaluationReport) -> None:
        self.tested = f"  {measured(report)}"
        self.say(completed=report.step)

    def noted(self, text: str) -> None:
        self.bar.console.print(f"note: {text}", markup=False, highlight=False)

    def finished(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.bar.stop()
