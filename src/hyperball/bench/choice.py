"""Which cases are measured: all of the sections, or those whose label holds a text of `--cases`."""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hyperball.bench.case import Case, Setting

NEAR = 3  # cases that a message about an unknown one names


@dataclass(frozen=True)
class Plan:
    """All cases of a section by their labels, and the labels of those that are measured."""

    cases: dict[str, Case]
    chosen: tuple[str, ...]


def section_cases(name: str, setting: Setting) -> list[Case]:
    made: list[Case] = importlib.import_module(f"hyperball.bench.sections.{name}").cases(setting)
    return made


def label(case: Case) -> str:
    """A case in words: "cnn9, batch 512, training step, bf16"."""
    return f"{case.name}, {case.work}, {case.dtype}"


def labeled(cases: Sequence[Case]) -> dict[str, Case]:
    """Cases by their labels; those that differ in nothing but their subjects name them too."""
    counts = Counter(map(label, cases))
    made = {}
    for case in cases:
        ours = ", ".join(dict.fromkeys(subject for subject, _ in case.compared))
        made[label(case) + (f" ({ours})" if counts[label(case)] > 1 else "")] = case
    return made


def planned(sections: Sequence[str], setting: Setting, texts: Sequence[str] = ()) -> dict[str, Plan]:
    """The sections that have a case to measure, with these cases; without texts all are."""
    known = {name: labeled(section_cases(name, setting)) for name in sections}
    labels = [text for cases in known.values() for text in cases]
    for text in texts:
        if not any(holds(text, entry) for entry in labels):
            raise ValueError(unknown(text, known))
    plans = {}
    for name, cases in known.items():
        chosen = tuple(entry for entry in cases if not texts or any(holds(text, entry) for text in texts))
        if chosen:
            plans[name] = Plan(cases, chosen)
    return plans


def holds(text: str, entry: str) -> bool:
    return text.strip().lower() in entry.lower()


def unknown(text: str, known: dict[str, dict[str, Case]]) -> str:
    """The message about a text that no label holds: the nearest names, kinds of work and labels, or the first ones."""
    texts: dict[str, None] = {}
    for cases in known.values():
        for entry, case in cases.items():
            texts.update(dict.fromkeys((case.name, case.work, entry)))
    shown = {entry.lower(): entry for entry in texts}
    close = difflib.get_close_matches(text.strip().lower(), list(shown), n=NEAR, cutoff=0.4)
    names = [shown[entry] for entry in close] or [entry for cases in known.values() for entry in list(cases)[:1]]
    told = "; ".join(repr(name) for name in names)
    return f"no case of {', '.join(known)} holds {text!r}; " + ("near ones: " if close else "for example: ") + told
