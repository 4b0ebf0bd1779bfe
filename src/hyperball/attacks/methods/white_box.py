"""Attacks that follow the model's gradient: FGSM, BIM and PGD, and PGD through surrogates of declarative layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hyperball.attacks.arguments import check_count, parse_step
from hyperball.attacks.gradient import PIXELS, ascend
from hyperball.attacks.methods.task import LOSSES, Attack, Stage, Task
from hyperball.attacks.surrogate import KINDS, surrogate
from hyperball.rows import nearest

START, TARGET = 0, 1 << 16  # uses of a task's random words; a restart adds its number
TARGETS = ("none", "runner_up", "least_likely", "random")
BIM_SHARE = 0.25  # 2/255 of 8/255
MADRY = 2.5  # a PGD of n steps of 2.5 epsilon/n can reach the border from anywhere in the ball


def climb(
    task: Task, *, step: float, steps: int, start: Tensor | None = None, loss: str = "ce", eot: int = 1
) -> Tensor:
    """Ascent on the loss, summed over images so that each has the gradient it would have alone."""
    measure = LOSSES[loss]
    return ascend(
        task.model, task.x, lambda logits: measure(logits, task.y).sum(), task.epsilon,
        step=step, iterations=steps, norm=task.norm, start=start, eot=eot, replay=True,
    )  # fmt: skip


@dataclass(frozen=True)
class FGSM(Attack):
    """x + epsilon·direction(∂loss/∂x), the sign or in L2 the unit gradient (Goodfellow et al. 2015)."""

    name: ClassVar[str] = "fgsm"
    about: ClassVar[str] = "one step of the whole budget along the gradient"

    def stages(self, task: Task) -> list[Stage]:
        return [("step", lambda task: climb(task, step=task.epsilon, steps=1))]


@dataclass(frozen=True)
class BIM(Attack):
    """`steps` steps from the image itself (Kurakin et al. 2017); `step` None is epsilon/4."""

    name: ClassVar[str] = "bim"
    about: ClassVar[str] = "steps along the gradient, from the image itself"
    steps: int = 10
    step: float | str | None = None

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        self.length(1.0)

    def length(self, epsilon: float) -> float:
        return BIM_SHARE * epsilon if self.step is None else parse_step(self.step)

    def stages(self, task: Task) -> list[Stage]:
        return [("steps", lambda task: climb(task, step=self.length(task.epsilon), steps=self.steps))]

    def conditions(self, epsilon: float) -> dict[str, Any]:
        return super().conditions(epsilon) | {"step": self.length(epsilon), "restarts": 1}


@dataclass(frozen=True)
class PGD(Attack):
    """`steps` steps from a random point of the ball, `restarts` times (Madry et al. 2018).

    Args:
        step: The length of one step; None is 2.5 epsilon/steps.
        target: "none" leaves the label; "runner_up", "least_likely" and "random" approach one class that is not it.
        loss: "ce", or "margin", whose gradient does not vanish where a model is very sure.
        eot: The calls over which a randomized model's gradient is averaged.
    """

    name: ClassVar[str] = "pgd"
    about: ClassVar[str] = "steps along the gradient from random starts"
    steps: int = 20
    step: float | str | None = None
    restarts: int = 1
    target: Literal["none", "runner_up", "least_likely", "random"] = "none"
    loss: Literal["ce", "margin"] = "ce"
    eot: int = 1

    def __post_init__(self) -> None:
        for name in ("steps", "restarts", "eot"):
            check_count(name, getattr(self, name))
        self.length(1.0)
        _check_name("target", self.target, TARGETS)
        _check_name("loss", self.loss, tuple(LOSSES))

    def length(self, epsilon: float) -> float:
        return MADRY * epsilon / self.steps if self.step is None else parse_step(self.step)

    def stages(self, task: Task) -> list[Stage]:
        return [(f"restart {number + 1}", partial(self.restart, number)) for number in range(self.restarts)]

    def restart(self, number: int, task: Task) -> Tensor:
        """One run from the start of that number."""
        noise = task.epsilon * task.norm.inside(task.draw(START + number), task.x)
        start = torch.clamp(task.x + noise, *PIXELS)
        step = self.length(task.epsilon)
        if self.target != "none":
            task, step = task.replace(y=targets(task, self.target, number)), -step
        return climb(task, step=step, steps=self.steps, start=start, loss=self.loss, eot=self.eot)

    def conditions(self, epsilon: float) -> dict[str, Any]:
        return super().conditions(epsilon) | {"step": self.length(epsilon)}


@torch.no_grad()
def targets(task: Task, kind: str, number: int = 0) -> Tensor:
    """The wrong class to approach; later restarts take the next in that order."""
    if kind == "random":
        shift = 1 + task.draw(TARGET + number) % (task.classes - 1)
        return (task.y + shift) % task.classes
    logits = task.model(task.x).detach().scatter(1, task.y[:, None], -torch.inf)
    place = number % (task.classes - 1)
    order = logits.argsort(1, descending=True)  # the label comes last
    return order[:, place if kind == "runner_up" else task.classes - 2 - place]


@dataclass(frozen=True)
class Surrogate(Attack):
    """PGD that differentiates declarative layers through a surrogate; whether it succeeds, the model itself says."""

    name: ClassVar[str] = "surrogate"
    about: ClassVar[str] = "pgd through unrolled or smoothed declarative layers"
    kind: Literal["smooth", "unrolled"] = "smooth"
    steps: int = 20
    step: float | str | None = None
    restarts: int = 1

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, KINDS)
        self.inner()

    def inner(self) -> PGD:
        return PGD(steps=self.steps, step=self.step, restarts=self.restarts)

    def stages(self, task: Task) -> list[Stage]:
        with surrogate(task.model, self.kind):  # refuses a model without declarative layers
            return [(name, partial(self.through, run)) for name, run in self.inner().stages(task)]

    def through(self, run: Any, task: Task) -> Tensor:
        with surrogate(task.model, self.kind):
            result: Tensor = run(task)
        return result

    def conditions(self, epsilon: float) -> dict[str, Any]:
        return super().conditions(epsilon) | {"step": self.inner().length(epsilon)}


def _check_name(argument: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"`{argument}` must be one of {known}, got {given!r}; {nearest(str(given), known)}")
