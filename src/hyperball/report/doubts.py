"""Doubts about numbers: sentences about runs, counted once each and named with their seeds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NUMBERS = re.compile(r"[\d.,%+−-]+")


@dataclass(frozen=True)
class Doubt:
    """A sentence about one run; `run` is its name, or that of the cell where no run stands behind a number."""

    run: str
    text: str
    seed: str = ""

    @property
    def sentence(self) -> str:
        return f"seed {self.seed}: {self.text}" if self.seed else self.text


def distinct(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """Each sentence about a run once, however many numbers it concerns."""
    return tuple({(doubt.run, doubt.text): doubt for doubt in doubts}.values())


def counted(count: int) -> str:
    return f"{count:,} doubt{'' if count == 1 else 's'}"


def gathered(said: Iterable[tuple[str, Doubt]]) -> tuple[str, ...]:
    """Sentences about things, those that differ in their numbers alone once, with their seeds and how many they are."""
    found: dict[tuple[str, str], dict[tuple[str, str], Doubt]] = {}
    for about, doubt in said:
        held = found.setdefault((about, NUMBERS.sub("#", doubt.text)), {})
        held[doubt.run, doubt.text] = doubt
    return tuple(together(about, list(held.values())) for (about, _), held in found.items())


def together(about: str, doubts: list[Doubt]) -> str:
    seeds = list(dict.fromkeys(doubt.seed for doubt in doubts if doubt.seed))
    who = f", seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}" if seeds else ""
    alike = len({doubt.text for doubt in doubts}) == 1
    more = f" ({len(doubts)} such doubts{'' if alike else ', the first is quoted'})" if len(doubts) > 1 else ""
    return f"{about}{who}: {doubts[0].text}{more}"
