"""What a run tells while it goes on: a protocol of plain calls, made by the first process alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hyperball.training.measures.metrics import Metrics
from hyperball.training.recipe import Recipe


@dataclass(frozen=True)
class RunInfo:
    """A run about to begin: `step` is where it begins, which is above 0 when it resumes."""

    recipe: Recipe
    run_dir: Path
    step: int
    total_steps: int
    steps_per_epoch: int
    device: str
    parameters: int


@dataclass(frozen=True)
class TrainReport:
    """The mean loss and accuracy since the last report, at the end of step `step` (counted from 1)."""

    step: int
    epoch: float
    loss: float
    accuracy: float
    lr: float
    images_per_second: float


@dataclass(frozen=True)
class EvaluationReport:
    """An evaluation after `step` steps; `radii` maps a layer to least, mean and largest radius."""

    step: int
    epoch: float
    metrics: Metrics
    radii: dict[str, dict[str, float]]


class Progress(Protocol):
    """Hears of a run's progress; drawing it is the caller's business."""

    def started(self, run: RunInfo) -> None: ...

    def trained(self, report: TrainReport) -> None: ...

    def evaluated(self, report: EvaluationReport) -> None: ...

    def noted(self, text: str) -> None: ...

    def finished(self, record: dict[str, Any]) -> None: ...


class Silent:
    """Hears everything and says nothing."""

    def started(self, run: RunInfo) -> None: ...

    def trained(self, report: TrainReport) -> None: ...

    def evaluated(self, report: EvaluationReport) -> None: ...

    def noted(self, text: str) -> None: ...

    def finished(self, record: dict[str, Any]) -> None: ...
