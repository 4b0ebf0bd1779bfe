"""Learning-rate schedules: a factor of the base rate at each step."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import ScheduleConfig

SMALLEST_GAIN = 1e-4  # a test loss is better if it is lower by this share


def warmed(step: int, warmup: int) -> float:
    """min(1, (step + 1) / warmup): linear from zero, which no step has."""
    return min(1.0, (step + 1) / warmup) if warmup else 1.0


def step_factor(step: int, milestones: list[int], gamma: float) -> float:
    """gamma to the number of milestones reached."""
    return float(gamma ** bisect_right(milestones, step))


def cosine_factor(step: int, warmup: int, total: int, floor: float) -> float:
    """floor + (1 − floor)·(1 + cos(pi t)) / 2 with t from 0 after the warmup to 1 at the end."""
    t = min(1.0, max(0, step - warmup) / max(1, total - warmup))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * t))


class Schedule:
    """The factor of the base learning rate at every step of a run.

    All but "plateau" are functions of the step alone; that one listens to `observe`, and its state is saved.
    """

    def __init__(self, config: ScheduleConfig, total: int, steps_per_epoch: int) -> None:
        self.config = config
        self.total = total
        unit = steps_per_epoch if config.unit == "epochs" else 1
        self.warmup = round(config.warmup * unit)
        self.milestones = [round(mark * unit) for mark in config.milestones]
        if config.every is not None:
            width = max(1, round(config.every * unit))
            self.milestones = list(range(width, total, width))
        self.best = math.inf
        self.waited = 0
        self.drops = 0
        if self.warmup >= total and self.warmup:
            raise RecipeError(
                f"`schedule.warmup` must be shorter than the run of {total} steps, got {self.warmup} steps"
            )

    def factor(self, step: int) -> float:
        """The factor of step 0, 1, ..."""
        config = self.config
        after = 1.0
        if config.name == "step":
            after = step_factor(step, self.milestones, config.gamma)
        elif config.name == "cosine":
            after = cosine_factor(step, self.warmup, self.total, config.floor)
        elif config.name == "plateau":
            after = max(config.floor, config.gamma**self.drops)
        return warmed(step, self.warmup) * after

    def observe(self, loss: float) -> None:
        """Hear the test loss of an evaluation."""
        if loss < self.best * (1.0 - SMALLEST_GAIN):
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        if self.waited > self.config.patience:
            self.drops, self.waited = self.drops + 1, 0

    def state_dict(self) -> dict[str, Any]:
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "waited": self.waited, "drops": self.drops}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = math.inf if state["best"] is None else float(state["best"])
        self.waited, self.drops = int(state["waited"]), int(state["drops"])
