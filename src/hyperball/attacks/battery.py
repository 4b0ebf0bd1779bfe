"""What masking checks have in common: their results, the sample that they attack, and when an attack is stronger."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hyperball.attacks.bench import Bench, Outcome
from hyperball.attacks.methods.task import Attack, Verdict

TOLERANCE = 0.01  # of the sample, by which one attack may break more than another


@dataclass(frozen=True)
class Check:
    """A check: whether all is well, its numbers, and the doubt in words where it is not."""

    name: str
    numbers: dict[str, Any] = field(default_factory=dict)
    doubt: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"numbers": told(self.numbers), "passed": self.doubt is None}


def told(value: Any) -> Any:
    """Numbers as JSON has them: null for one that is not finite."""
    if isinstance(value, dict):
        return {key: told(held) for key, held in value.items()}
    if isinstance(value, list):
        return [told(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Battery:
    """Attacks on the sample, each run once."""

    def __init__(self, bench: Bench, clean: Verdict, images: int) -> None:
        right = clean.correct.nonzero()[:, 0]
        spread = torch.linspace(0, max(len(right) - 1, 0), min(images, len(right))).round().long()
        self.bench, self.clean, self.index = told_as_checks(bench), clean, right[spread]
        self.held: dict[tuple[str, float], Outcome] = {}

    def __len__(self) -> int:
        return len(self.index)

    def run(self, attack: Attack, epsilon: float | None = None) -> Outcome:
        bench = self.bench if epsilon is None else self.bench.at(epsilon)
        key = (str(attack), bench.epsilon)
        if key not in self.held:
            self.held[key] = bench.run(attack, self.clean, self.index)
        return self.held[key]


def told_as_checks(bench: Bench) -> Bench:
    """The bench whose progress says that its attacks are masking checks, which nobody asked for by name."""
    speak = bench.progress
    if speak is None:
        return bench
    return replace(bench, progress=lambda text, done, total: speak(f"masking checks: {text}", done, total))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def stronger(a: Verdict, b: Verdict) -> bool:
    """Whether attack a breaks markedly more images than b."""
    only_a = int((~a.correct & b.correct).sum())
    only_b = int((a.correct & ~b.correct).sum())
    return only_a - only_b > max(TOLERANCE * len(a.correct), 2 * math.sqrt(only_a + only_b))


def sampled(correct: Tensor) -> Verdict:
    """A verdict of which only the marks count."""
    return Verdict(correct, torch.zeros(len(correct)), torch.zeros(len(correct)))
