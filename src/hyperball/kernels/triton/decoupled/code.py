"""What a kernel is told beside tensors: an operator's rows and numbers, as a value and as a text for torch's ops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any


@dataclass(frozen=True)
class Code:
    """The rows of an operator and its numbers; None where a parameter is a tensor or the row has none.

    `bend` is the sigmoid's k or the power's b. `unit` says what a radius is relative to: "none" (it is absolute),
    "batch" (the mean length of this batch's patches, sqrt(n² + unit_eps)) or "running" (a mean that is given).
    """

    radial: str
    angular: str
    alpha: float | None = None
    beta: float | None = None
    rho: float | None = None
    shape: float | None = None
    bend: float | None = None
    eps: float = 0.0
    angular_eps: float = 0.0
    unit_eps: float = 0.0
    unit: str = "none"

    def text(self) -> str:
        """The names, then the numbers: "tanh cosine batch 1.0 None …"."""
        numbers = (self.alpha, self.beta, self.rho, self.shape, self.bend, self.eps, self.angular_eps, self.unit_eps)
        return " ".join([self.radial, self.angular, self.unit, *[str(number) for number in numbers]])

    @cached_property
    def written(self) -> str:
        """`text`, kept."""
        return self.text()


@lru_cache(maxsize=4096)
def coded(*entries: Any) -> Code:
    """The code of these entries: one object for all who ask."""
    return Code(*entries)


@lru_cache(maxsize=4096)
def read(text: str) -> Code:
    """The code that `Code.text` wrote."""
    radial, angular, unit, *rest = text.split(" ")
    numbers = [None if word == "None" else float(word) for word in rest]
    alpha, beta, rho, shape, bend, eps, angular_eps, unit_eps = numbers
    return Code(radial, angular, alpha, beta, rho, shape, bend, eps or 0.0, angular_eps or 0.0, unit_eps or 0.0, unit)
