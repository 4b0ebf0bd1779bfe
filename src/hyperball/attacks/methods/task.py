"""What an attack is given, what it is, and how its result is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.attacks.norms import Norm
from hyperball.data.hashing import fold

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """A batch to attack: images [B, C, H, W] in [0, 1], their labels, the budget, and one random word an image.

    The words depend on the seed and the image's place in the whole set, so that an image's random numbers do not depend
    on its batch. `source` is the model of a transfer attack, `seed` is for packages that draw from torch's generator.
    """

    model: Model
    x: Tensor
    y: Tensor
    epsilon: float
    norm: Norm
    keys: Tensor
    classes: int
    seed: int = 0
    source: Model | None = None

    def replace(self, **changes: Any) -> Task:
        return replace(self, **changes)

    def draw(self, value: int) -> Tensor:
        """The words of a numbered use of random numbers."""
        return fold(self.keys, value)


Stage = tuple[str, Callable[[Task], Tensor]]


@dataclass(frozen=True)
class Attack(ABC):
    """An attack as a value; `stages` are tried in turn, each on the images that withstood those before.

    A stage maps a task to perturbed images in the ball, without waiting for the device at every step.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    white_box: ClassVar[bool] = True

    @abstractmethod
    def stages(self, task: Task) -> list[Stage]:
        """Names and functions; `task` tells classes and norm, its images play no part."""

    def differentiated(self, task: Task) -> tuple[str, Model] | None:
        """The model whose gradient the attack follows, with the name of its argument; None for a black box."""
        return ("model", task.model) if self.white_box else None

    def __str__(self) -> str:
        """The text that `parse` reads: what differs from the defaults."""
        chosen = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(chosen)})" if chosen else self.name

    def conditions(self, epsilon: float) -> dict[str, Any]:
        """Every number that a reader needs to repeat the attack at this budget."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """−log p_y of every image, in float32 at least."""
    return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max_{k≠y} z_k − z_y of every image: above 0 where it is misclassified (Carlini and Wagner 2017)."""
    own = F.one_hot(y, logits.shape[1]).bool()
    logits = logits if logits.is_floating_point() else logits.float()
    return logits.masked_fill(own, -torch.inf).amax(1) - logits.gather(1, y[:, None])[:, 0]


LOSSES = {"ce": cross_entropy, "margin": margin}


@dataclass(frozen=True)
class Verdict:
    """Of every image: whether it is classified rightly, its cross entropy, and how far it was moved."""

    correct: Tensor
    loss: Tensor
    distance: Tensor

    def cpu(self) -> Verdict:
        """One copy to the host, which waits for the device."""
        held = torch.stack([self.correct.float(), self.loss.float(), self.distance.float()]).cpu()
        return Verdict(held[0] > 0, held[1], held[2])


@torch.no_grad()
def judge(model: Model, x: Tensor, y: Tensor, center: Tensor, norm: Norm) -> Verdict:
    """The verdict on images x moved from `center`; logits that are not finite count as wrong."""
    logits = model(x).detach()
    sound = logits.isfinite().all(1)
    correct = (logits.argmax(1) == y) & sound
    return Verdict(correct, torch.where(sound, cross_entropy(logits, y), torch.inf), norm.distance(x - center))
