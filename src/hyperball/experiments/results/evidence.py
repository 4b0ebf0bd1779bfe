"""Whether what claims tell is still what the kept tables say: numbers in a sentence do not follow new records."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball.experiments.claims import Claim, Evidence
from hyperball.experiments.results.collecting import kept_table
from hyperball.files import FileError, read_tree
from hyperball.on_disk import is_number


def outdated(claim: Claim, results: Path) -> list[str]:
    """What a claim tells otherwise than the table that is kept beside it, a sentence each."""
    if not claim.numbers:
        return []
    path = kept_table(results, claim.table, claim.scale)
    try:
        tree = read_tree(path)
    except FileError as error:
        return [f"its numbers cannot be looked up: {path}: {error}"]
    lines = tree.get("numbers") if isinstance(tree, Mapping) else None
    lines = [line for line in lines if isinstance(line, Mapping)] if isinstance(lines, list) else []
    now = {told: words(numbers_of(evidence, lines)) for told, evidence in claim.numbers.items()}
    return [
        f"it says {told!r}, {path} {f'has {held!r}' if held else 'has no such number'}"
        for told, held in now.items()
        if told != held
    ]


def numbers_of(evidence: Evidence, lines: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    for line in lines:
        if line.get("row") in evidence.rows and line.get("column") in evidence.columns:
            value = line.get(evidence.of)
            held = [one for one in (value if isinstance(value, list) else [value]) if is_number(one)]
            if held:
                yield statistics.fmean(held)


def words(numbers: Iterator[float]) -> str:
    """One value, or the lowest and the highest, to a decimal; nothing without any."""
    told = [f"{value:.1f}" for value in sorted(numbers)]
    return " to ".join(dict.fromkeys((told[0], told[-1]))) if told else ""
