"""A model and images on which attacks are run, batch by batch, each result in the journal as soon as it is there."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hyperball.attacks.adapted import adapt
from hyperball.attacks.arguments import (
    check_count,
    check_epsilon,
    check_images,
    check_labels,
    check_mode,
    check_model,
    device_of,
)
from hyperball.attacks.gradient import gradient
from hyperball.attacks.journal import Journal, RecordError, from_tree, to_tree
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.methods.table import parse
from hyperball.attacks.methods.task import Attack, Model, Task, Verdict, cross_entropy, judge
from hyperball.attacks.norms import Norm, find_norm, wide
from hyperball.data.hashing import fold, key_of

Progress = Callable[[str, int, int], None]
GPU_PIXELS = 2000 * 3 * 32 * 32


@dataclass(frozen=True)
class Outcome:
    """An attack on a set: the verdict on every image, the accuracy after every stage, and the seconds it took."""

    verdict: Verdict
    stages: list[dict[str, Any]]
    seconds: float

    @property
    def accuracy(self) -> float:
        return float(self.verdict.correct.double().mean())


@dataclass(frozen=True)
class Bench:
    """Everything that stays the same from batch to batch; `progress(text, done, total)` hears of every batch."""

    model: Model
    inputs: Tensor
    labels: Tensor
    epsilon: float
    norm: Norm
    classes: int
    device: torch.device
    batch_size: int = 256
    seed: int = 0
    source: Model | None = None
    progress: Progress | None = None
    journal: Journal = field(default_factory=lambda: Journal(None, {}))

    def at(self, epsilon: float) -> Bench:
        """The same with another budget."""
        return replace(self, epsilon=epsilon)

    def task(self, index: Tensor) -> Task:
        """The images of these numbers as a task."""
        keys = fold(key_of(self.seed, device=self.device), index.to(self.device))
        x, y = (held[index.to(held.device)].to(self.device) for held in (self.inputs, self.labels))
        return Task(self.model, x, y, self.epsilon, self.norm, keys, self.classes, self.seed, self.source)

    def clean(self) -> Verdict:
        """The verdict on the images themselves."""
        return self._collect("clean", torch.arange(len(self.labels)), lambda task: task.x)[0]

    def run(self, attack: Attack, clean: Verdict, index: Tensor | None = None) -> Outcome:
        """The attack on the images of these numbers (all); one that is wrong already is not attacked.

        An image counts as right if it is so when clean and after every stage. Loss and distance are those of the point
        that broke it or, where none did, of the point of the largest loss.
        """
        chosen = torch.arange(len(self.labels)) if index is None else index
        result = Verdict(clean.correct[chosen], clean.loss[chosen].clone(), torch.zeros(len(chosen)))
        result = replace(result, correct=result.correct.clone())
        stages, total = [], 0.0
        for name, perturb in attack.stages(self.task(chosen[:1])):
            left = result.correct.nonzero()[:, 0]
            if self.epsilon > 0 and len(left):
                label = f"{attack} {name} at {self.epsilon:.6g}"
                verdict, seconds = self._collect(label, chosen[left], perturb)
                merge(result, left, verdict)
                total += seconds
            stages.append({"stage": name, "accuracy": float(result.correct.double().mean()), "attacked": len(left)})
        return Outcome(result, stages, total)

    def _collect(self, label: str, index: Tensor, perturb: Callable[[Task], Tensor]) -> tuple[Verdict, float]:
        parts = index.split(self.batch_size)
        lines = [self._line(label, number, len(parts), part, perturb) for number, part in enumerate(parts)]
        verdicts = [from_tree(line) for line in lines]
        joined = (torch.cat([getattr(v, name) for v in verdicts]) for name in ("correct", "loss", "distance"))
        return Verdict(*joined), sum(line["seconds"] for line in lines)

    def _line(
        self, label: str, number: int, count: int, index: Tensor, perturb: Callable[[Task], Tensor]
    ) -> dict[str, Any]:
        key = f"{label} | batch {number}, images {zlib.crc32(index.numpy().tobytes()):08x}"
        line = self.journal.get(key)
        if line is not None and len(line["correct"]) != len(index):
            raise RecordError(f"{self.journal.path} has {len(line['correct'])} images for {key}; move it away")
        if line is None:
            began = time.perf_counter()
            task = self.task(index)
            with seeded(self.seed, self.device):
                moved = perturb(task)
                verdict = judge(self.model, moved, task.y, task.x, self.norm).cpu()
            line = self.journal.put(key, seconds=round(time.perf_counter() - began, 4), **to_tree(verdict))
        if self.progress is not None:
            self.progress(label, number + 1, count)
        return line


def merge(result: Verdict, index: Tensor, verdict: Verdict) -> None:
    """Write a stage's verdict on images that were still right into the whole's."""
    worse = ~verdict.correct | (verdict.loss > result.loss[index])
    place = index[worse]
    result.loss[place], result.distance[place] = verdict.loss[worse], verdict.distance[worse]
    result.correct[index] = verdict.correct


def make_bench(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    *,
    epsilon: float | str,
    norm: str = "linf",
    batch_size: int | None = None,
    seed: int = 0,
    source: Any = None,
    progress: Progress | None = None,
) -> Bench:
    """The bench of checked arguments; inputs may be bytes or halves, and stay on the device they are on."""
    check_mode()
    called = check_model(model)
    if source is not None:
        check_model(source, "source")
    if batch_size is not None:
        check_count("batch_size", batch_size)
    check_count("seed", seed, least=0)
    images, targets = check_images(inputs, labels)
    images = wide(images)
    kind = find_norm(norm)
    budget = check_epsilon(epsilon, kind, images.shape[1:])
    device = device_of(model, images.device)
    called, classes = adapt(called, images[:2].to(device), "model")
    if source is not None:
        source, others = adapt(source, images[:2].to(device), "source")
        if others != classes:
            raise ValueError(f"`source` must have the {classes} classes of the model")
    check_labels(targets, classes)
    batch = batch_size or default_batch(device, images[0].numel())
    return Bench(called, images, targets, budget, kind, classes, device, batch, seed, source, progress)


def default_batch(device: torch.device, pixels: int) -> int:
    """256 images, or on a GPU as many as have the pixels of 2,000 images of CIFAR: fewer would leave it waiting."""
    return max(16, GPU_PIXELS // pixels) if device.type == "cuda" else 256


def check_attack(bench: Bench, attack: Attack) -> None:
    """Refuse what an attack lacks (a gradient, a source, an extra, a layer) before it has run."""
    task = bench.task(torch.arange(min(2, len(bench.labels))))
    attack.stages(task)
    followed = attack.differentiated(task)
    if followed is not None:
        name, model = followed
        gradient(model, task.x, lambda logits: cross_entropy(logits, task.y).sum(), name)


def perturb(
    model: Any,
    inputs: Tensor,
    labels: Tensor,
    epsilon: float | str,
    attack: str | Attack = "pgd",
    *,
    norm: str = "linf",
    seed: int = 0,
    source: Any = None,
) -> tuple[Tensor, Verdict]:
    """Perturbed images of one batch, and the verdict on them: the point that broke an image, or that of largest loss.

    Every stage sees every image, whether it was right when clean or not, so that the images are the attack's own.
    """
    chosen = parse(attack)
    bench = make_bench(model, inputs, labels, epsilon=epsilon, norm=norm, seed=seed, source=source)
    check_attack(bench, chosen)
    task = bench.task(torch.arange(len(bench.labels)))
    best, held = task.x, None
    for _, stage in chosen.stages(task):
        with seeded(seed, bench.device):
            moved = stage(task) if bench.epsilon > 0 else task.x
            found = judge(task.model, moved, task.y, task.x, bench.norm)
        if held is None:
            best, held = moved, found
            continue
        better = (held.correct & ~found.correct) | ((held.correct == found.correct) & (found.loss > held.loss))
        best = torch.where(better[:, None, None, None], moved, best)
        pairs = ((getattr(found, name), getattr(held, name)) for name in ("correct", "loss", "distance"))
        held = Verdict(*(torch.where(better, new, old) for new, old in pairs))
    assert held is not None
    return best, held
