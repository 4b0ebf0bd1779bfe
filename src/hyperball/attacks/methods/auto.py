"""APGD and AutoAttack through pyautoattack (Croce and Hein 2020), extra `attack`, imported when they are used.

pyautoattack seeds torch's generators; here that happens inside a fork, so that a caller's random numbers go on as if
nothing had been drawn. AutoAttack's members are stages of their own: a member sees the images that withstood those
before, in batches that can be resumed, which is what its own driver does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hyperball.attacks.arguments import check_count
from hyperball.attacks.gradient import within
from hyperball.attacks.methods.task import Attack, Stage, Task

TARGETED_CLASSES = 4  # the targeted DLR loss looks at the four largest logits
DLR_CLASSES = 3
TARGETS = 9
SEEDS = 2**63


class MissingExtra(ImportError):
    """A package that the extra `attack` brings is not installed."""


def pyautoattack() -> Any:
    """The package, or an error that names the extra."""
    try:
        import pyautoattack
    except ImportError as error:
        raise MissingExtra(f"this attack needs pyautoattack ({error}); pip install 'hyperball[attack]'") from error
    return pyautoattack


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The generators of the CPU and this device at a seed, cuDNN's algorithms fixed, and all as it was afterwards."""
    cudnn = torch.backends.cudnn
    held = cudnn.deterministic, cudnn.benchmark
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed % SEEDS)  # torch.manual_seed would seed every GPU
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed % SEEDS)
        cudnn.deterministic, cudnn.benchmark = True, False
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = held


@contextmanager
def kept() -> Iterator[None]:
    """Every generator as it was afterwards: pyautoattack seeds the current GPU wherever the model is."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        yield


@contextmanager
def silent() -> Iterator[None]:
    """Without pyautoattack's log: `hyperball.attacks.masking` says what it warns of."""
    logger = logging.getLogger("auto-attack")
    held, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = held


def members(task: Task) -> Any:
    """pyautoattack's attacks for a task, as its standard version sets them."""
    with silent():
        made = pyautoattack().AutoAttack(
            partial(answer, task), norm=task.norm.title, eps=task.epsilon, seed=task.seed % SEEDS, device=task.x.device
        )
    made.apgd_targeted.n_target_classes = made.fab.n_target_classes = min(TARGETS, task.classes - 1)
    return made


def answer(task: Task, x: Tensor) -> Tensor:
    """The model's logits in float32, in which pyautoattack computes."""
    return task.model(x.to(task.x.dtype)).float()


def run_member(task: Task, name: str, **settings: Any) -> Tensor:
    """One of pyautoattack's attacks; images it cannot break come back as they were."""
    made = members(task)
    attack = {"apgd": made.apgd, "apgd-t": made.apgd_targeted, "fab": made.fab, "square": made.square}[name]
    for key, value in settings.items():
        setattr(attack, key, value)
    if "n_iter" in settings and name == "apgd":
        set_checkpoints(attack, settings["n_iter"])
    with kept(), seeded(task.seed, task.x.device), silent(), torch.no_grad():
        found: Tensor = attack.perturb(task.x.float().contiguous(), task.y)
    if task.x.dtype == torch.float32:
        return found.detach()
    return within(found.detach().to(task.x.dtype), task.x, task.epsilon, norm=task.norm)


def set_checkpoints(attack: Any, steps: int) -> None:
    """The marks at which APGD looks back, as its constructor computes them from the number of steps."""
    attack.n_iter_2 = max(int(0.22 * steps), 1)
    attack.n_iter_min = max(int(0.06 * steps), 1)
    attack.size_decr = max(int(0.03 * steps), 1)


def square_l2(task: Task, queries: int, share: float) -> Tensor:
    """pyautoattack's Square in L2."""
    return run_member(task, "square", n_queries=queries, p_init=share, rescale_schedule=True)


@dataclass(frozen=True)
class APGD(Attack):
    """Auto-PGD: steps that halve themselves where the loss stalls, on the cross entropy or the DLR loss."""

    name: ClassVar[str] = "apgd"
    about: ClassVar[str] = "Auto-PGD (pyautoattack)"
    loss: Literal["ce", "dlr"] = "ce"
    steps: int = 100
    restarts: int = 1

    def __post_init__(self) -> None:
        if self.loss not in ("ce", "dlr"):
            raise ValueError(f'`loss` must be "ce" or "dlr", got {self.loss!r}')
        for name in ("steps", "restarts"):
            check_count(name, getattr(self, name))

    def stages(self, task: Task) -> list[Stage]:
        pyautoattack()
        if self.loss == "dlr" and task.classes < DLR_CLASSES:
            raise ValueError(f"`loss` dlr needs at least {DLR_CLASSES} classes, got {task.classes}; take ce")
        return [(self.loss, self.run)]

    def run(self, task: Task) -> Tensor:
        return run_member(task, "apgd", loss=self.loss, n_iter=self.steps, n_restarts=self.restarts)


@dataclass(frozen=True)
class APGDDLR(APGD):
    """`APGD` on the DLR loss."""

    name: ClassVar[str] = "apgd-dlr"
    loss: Literal["ce", "dlr"] = "dlr"


@dataclass(frozen=True)
class AutoAttack(Attack):
    """APGD-CE, targeted APGD-DLR, targeted FAB and Square with 5,000 queries: AutoAttack's standard version.

    With fewer than four classes, for which the targeted DLR loss does not exist, FAB is untargeted and APGD-T left out.
    """

    name: ClassVar[str] = "auto"
    about: ClassVar[str] = "AutoAttack, standard version (pyautoattack)"
    queries: int = 5000

    def __post_init__(self) -> None:
        check_count("queries", self.queries)

    def stages(self, task: Task) -> list[Stage]:
        pyautoattack()
        square = ("square", partial(run_member, name="square", n_queries=self.queries))
        first = ("apgd-ce", partial(run_member, name="apgd", loss="ce"))
        if task.classes < TARGETED_CLASSES:
            return [first, ("fab", partial(run_member, name="fab", targeted=False)), square]
        targeted = ("apgd-t", partial(run_member, name="apgd-t"))
        return [first, targeted, ("fab-t", partial(run_member, name="fab", targeted=True, n_restarts=1)), square]

    def conditions(self, epsilon: float) -> dict[str, Any]:
        return super().conditions(epsilon) | {"version": "standard", "steps": 100, "restarts": 1}
