"""Axes: round ticks, and where a value stands between them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST = 1e-100  # what is nearer to zero has no place on a logarithmic axis
DECADE = 10.0


@dataclass(frozen=True)
class Axis:
    """Maps low…high to start…end, and what lies beyond to the nearer end where `bounded`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    bounded: bool = True

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = (math.log10(number) for number in (low, high, max(value, low)))
        share = (value - low) / (high - low)
        share = min(max(share, 0.0), 1.0) if self.bounded else share
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def text(self) -> str:
        """The axis for the page's script."""
        return f"{self.low:.7g} {self.high:.7g} {self.start:g} {self.end:g} {int(self.log)}"


def ticks(values: Sequence[float], count: int = 5) -> list[float]:
    """About `count` round numbers, from just below the least value to just above the largest."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST):
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def is_positive(values: Sequence[float]) -> bool:
    """Whether values can stand on a logarithmic axis."""
    return bool(values) and min(values) > SMALLEST


def is_wide(values: Sequence[float]) -> bool:
    """Whether positive values differ by more than ten times, so that a logarithmic axis shows more of them."""
    return is_positive(values) and max(values) > DECADE * min(values)


def log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten around the values; powers alone where that would be many."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        marks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        first = max((i for i, mark in enumerate(marks) if mark <= low), default=0)
        last = min((i for i, mark in enumerate(marks) if mark >= high), default=len(marks) - 1)
        marks = marks[first : max(last, first + 1) + 1]
        if len(marks) <= 8:
            break
    return [marks[0], *marks[1:-1][:: math.ceil(len(marks) / 8)], marks[-1]]


def ends(marks: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: that of the values where given, else that of the ticks."""
    low, high = (min(values), max(values)) if values else (marks[0], marks[-1])
    return (low, high) if high > low else (marks[0], marks[-1])


def label(value: float, marks: Sequence[float]) -> str:
    """A tick's text with as many digits as the distance of the ticks needs."""
    step = marks[1] - marks[0]
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    if round(step, digits) != round(step, digits + 1):
        digits += 1
    if digits > 6 or abs(value) >= 1e6:
        return short(value)
    return f"{value or 0.0:,.{digits}f}".replace("-", "−")


def short(value: float) -> str:
    """A number with few characters: 5,000, 0.02, 1.25e6, 2e−5."""
    text = f"{value:,g}" if 1e-4 <= abs(value) < 1e6 or not value else f"{value:.3g}"
    return re.sub(r"e([+-])0*", lambda found: "e" + found[1].strip("+"), text).replace("-", "−")
