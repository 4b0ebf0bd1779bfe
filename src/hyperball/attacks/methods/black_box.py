"""Attacks that see no gradient of the model: random noise, Square, and images made on another model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from hyperball.attacks.arguments import check_count
from hyperball.attacks.gradient import PIXELS
from hyperball.attacks.methods.auto import pyautoattack, square_l2
from hyperball.attacks.methods.task import Attack, Model, Stage, Task, margin
from hyperball.data.hashing import fold

NOISE, SQUARE = 1 << 20, 1 << 21  # uses of a task's random words
WAIT = 50  # queries between two looks at which images are broken
STRIPES, ROW, COLUMN, SIGNS = range(4)
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # of 10,000 queries, at which a square's area is halved


@dataclass(frozen=True)
class Noise(Attack):
    """The worst of k random points at which the budget is spent: corners of the box, or the sphere in L2."""

    name: ClassVar[str] = "noise"
    about: ClassVar[str] = "the worst of k random perturbations"
    white_box: ClassVar[bool] = False
    k: int = 1

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def stages(self, task: Task) -> list[Stage]:
        return [("draws", self.worst)]

    @torch.no_grad()
    def worst(self, task: Task) -> Tensor:
        """The point of the largest margin."""
        best, score = task.x, torch.full_like(task.x[:, 0, 0, 0], -torch.inf)
        for number in range(self.k):
            noise = task.norm.corner(task.draw(NOISE + number), task.x)
            point = torch.clamp(task.x + task.epsilon * noise, *PIXELS)
            found = margin(task.model(point).detach(), task.y).to(score.dtype)
            best = torch.where((found > score)[:, None, None, None], point, best)
            score = torch.maximum(score, found)
        return best


@dataclass(frozen=True)
class WorstOfK(Noise):
    """`Noise` of ten draws."""

    name: ClassVar[str] = "worst-of-k"
    k: int = 10


@dataclass(frozen=True)
class Square(Attack):
    """Random search over square patches by the model's answers alone (Andriushchenko et al. 2020).

    A query sets a square of x + d to ±epsilon, one sign a channel, and keeps it where the margin grows; squares shrink
    from `share` of the image on a schedule. Every image has its own squares, and one that is broken stays as it is. In
    L2 it is pyautoattack's.
    """

    name: ClassVar[str] = "square"
    about: ClassVar[str] = "black box: random squares, by queries"
    white_box: ClassVar[bool] = False
    queries: int = 1000
    share: float = 0.8

    def __post_init__(self) -> None:
        check_count("queries", self.queries)
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"`share` must be in (0, 1], got {self.share!r}")

    def stages(self, task: Task) -> list[Stage]:
        if task.norm.name == "l2":
            pyautoattack()
            return [("queries", partial(square_l2, queries=self.queries, share=self.share))]
        return [("queries", self.search)]

    @torch.no_grad()
    def search(self, task: Task) -> Tensor:
        """The last point that every image's search kept."""
        best = striped(task, fold(task.draw(SQUARE), STRIPES))
        score = margin(task.model(best).detach(), task.y)
        for first in range(1, self.queries, WAIT):
            left = (score <= 0).nonzero()[:, 0]
            if not len(left):
                break
            part = task.replace(x=task.x[left], y=task.y[left], keys=task.keys[left])
            numbers = range(first, min(first + WAIT, self.queries))
            best[left], score[left] = self.queried(part, best[left], score[left], numbers)
        return best

    def queried(self, task: Task, best: Tensor, score: Tensor, numbers: range) -> tuple[Tensor, Tensor]:
        """Points and margins after the queries of these numbers."""
        height, width = task.x.shape[2:]
        low, high = (torch.clamp(task.x + shift, *PIXELS) for shift in (-task.epsilon, task.epsilon))
        order = torch.arange(numbers.start, numbers.stop, device=task.x.device)
        words = fold(task.draw(SQUARE), 4 * order[:, None])  # [queries, B]
        signs = bits(fold(words, SIGNS), task.x.shape[1])[..., None, None]
        places = fold(words, ROW), fold(words, COLUMN)
        for step, query in enumerate(numbers):
            side = square_side(self.share, query, self.queries, height, width)
            rows, columns = span(places[0][step], side, height), span(places[1][step], side, width)
            inside = rows[:, None, :, None] & columns[:, None, None, :]
            point = torch.where(inside, torch.where(signs[step], high, low), best)
            found = margin(task.model(point).detach(), task.y)
            better = (found > score) & (score <= 0)
            best = torch.where(better[:, None, None, None], point, best)
            score = torch.where(better, found, score)
        return best, score


def bits(words: Tensor, count: int) -> Tensor:
    """`count` random bits a word, in a dimension of their own."""
    return (fold(words[..., None], torch.arange(count, device=words.device)) & 1).bool()


def striped(task: Task, word: Tensor) -> Tensor:
    """x ± epsilon with one sign a column and channel."""
    channels, width = task.x.shape[1], task.x.shape[3]
    stripes = 2 * bits(word, channels * width).view(-1, channels, 1, width).to(task.x.dtype) - 1
    return torch.clamp(task.x + task.epsilon * stripes, *PIXELS)


def square_side(share: float, query: int, queries: int, height: int, width: int) -> int:
    """sqrt(p·H·W), where p is `share` halved at each of the schedule's marks, rescaled to the number of queries."""
    place = query / queries * 10_000
    area = share * 0.5 ** sum(place > mark for mark in HALVINGS) * height * width
    return min(max(round(math.sqrt(area)), 1), height, width)


def span(word: Tensor, length: int, size: int) -> Tensor:
    """A mask [B, size] of `length` places in a row, from one that is uniform among those that fit."""
    first = (word * (size - length + 1)) >> 32
    offset = torch.arange(size, device=word.device) - first[:, None]
    return (offset >= 0) & (offset < length)


@dataclass(frozen=True)
class Transfer(Attack):
    """Images made on a source model with another attack, shown to the model: black box."""

    name: ClassVar[str] = "transfer"
    about: ClassVar[str] = "black box: images made on a source model"
    white_box: ClassVar[bool] = False
    attack: str = "pgd"

    def __post_init__(self) -> None:
        self.inner()

    def inner(self) -> Attack:
        from hyperball.attacks.methods.table import parse

        found = parse(self.attack)
        if isinstance(found, Transfer):
            raise ValueError(f"`attack` must be an attack on the source itself, got {self.attack!r}")
        return found

    def stages(self, task: Task) -> list[Stage]:
        if task.source is None:
            raise ValueError('`source` must be given for the attack "transfer": the model on which images are made')
        inner = self.inner().stages(task.replace(model=task.source))
        return [(name, partial(self.on_source, run)) for name, run in inner]

    def differentiated(self, task: Task) -> tuple[str, Model] | None:
        return ("source", task.source) if self.inner().white_box and task.source is not None else None

    def on_source(self, run: Any, task: Task) -> Tensor:
        result: Tensor = run(task.replace(model=task.source))
        return result

    def conditions(self, epsilon: float) -> dict[str, Any]:
        inner = self.inner()
        return super().conditions(epsilon) | {"source_attack": inner.conditions(epsilon) | {"name": inner.name}}
