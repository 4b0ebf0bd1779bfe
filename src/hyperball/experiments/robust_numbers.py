"""What attacks on the networks of a table found: numbers over seeds, doubts, and the budgets of the paper."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball.attacks import RecordError
from hyperball.attacks.journal import read_json
from hyperball.experiments.plan import Attacks
from hyperball.experiments.robustness_record import KIND, ROBUSTNESS
from hyperball.experiments.table import Experiment


def robust_records(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The records of those folders that have one."""
    found = []
    for folder in folders:
        try:
            record = read_json(folder / ROBUSTNESS)
        except RecordError:
            continue
        if isinstance(record, dict) and record.get("kind") == KIND:
            found.append(record)
    return found


def attacked_numbers(
    attacks: Attacks | None, folders: Mapping[int, Path]
) -> Iterator[tuple[str, float | None, dict[int, float]]]:
    """(name, the paper's number, ours in percent by seed) of every attack that the table shows."""
    if attacks is None:
        return
    records = {seed: record for seed, folder in folders.items() for record in robust_records([folder])}
    planned = {name for part in (*attacks.parts, *attacks.last) for name in part.attacks}
    for name in attacks.shown:
        if name in planned:
            found = {
                seed: 100 * line["accuracy"]
                for seed, record in records.items()
                for line in record["attacks"]
                if line["name"] == name
            }
            yield name, attacks.published.get(name), found


def told_doubts(experiment: Experiment, folders: Mapping[str, Sequence[Path]]) -> list[str]:
    """What to know before believing the numbers under attack: doubts by network, and where the paper's budgets lie.

    `folders` are those of an entry's runs, by its name.
    """
    texts = []
    for entry in experiment.entries:
        if entry.attacks is None:
            continue
        records = robust_records(folders.get(entry.name, ()))
        where = f"{entry.row}, {entry.column}"
        for sentence, count in counted([record["doubts"] for record in records]):
            texts.append(f"doubt: {where} ({count} of {len(records)} seeds): {sentence}")
        if records and not any(record["doubts"] for record in records):
            texts.append(f"no doubts: {where} ({len(records)} seeds)")
        texts += [f"budget: {where}: {text}" for text in located(entry.attacks, records)]
    return texts


def counted(lists: Sequence[Sequence[str]]) -> list[tuple[str, int]]:
    """Sentences that say the same with other numbers, once, with how many of the lists hold one."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for sentences in lists:
        said = {
            "".join(c for c in sentence if not (c.isdigit() or c in ".%+-")): sentence for sentence in sentences[::-1]
        }
        counts.update(said.keys())
        found = said | found
    return [(sentence, counts[bare]) for bare, sentence in found.items()]


def located(attacks: Attacks, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The budgets at which our networks have the paper's numbers."""
    for name in attacks.shown:
        lines = [line for record in records for line in record["sweeps"] if line["name"] == name]
        known = [line for line in lines if line["published"] is not None]
        if known:
            at = [255 * line["located"] for line in known if line["located"] is not None]
            place = f"{statistics.fmean(at):.2f}/255 ({len(at)} of {len(known)} seeds)" if at else "none of the budgets"
            yield f"{name} gives the paper's {known[0]['published']} % at {place}"
