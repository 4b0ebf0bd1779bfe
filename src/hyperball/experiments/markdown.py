"""Tables of Markdown from a folder of records, and files whose marked parts they fill.

A marked part is what stands between `<!-- results: NAME -->` and `<!-- /results -->`; NAME is a table's name, or
"summary" for one line a table.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.experiments.attack_jobs import doubts_of
from hyperball.experiments.broken import leave_out
from hyperball.experiments.collecting import TABLE, seeds_in
from hyperball.experiments.lengths import HEAD as LENGTHS
from hyperball.experiments.lengths import length_rows
from hyperball.experiments.pictures import filter_lengths
from hyperball.experiments.plan import SOURCE
from hyperball.experiments.reproduce import Comparison, compare, jobs_of, order_of
from hyperball.experiments.runtime import head_of, row_of
from hyperball.experiments.scales import SCALES, Scale
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables import TABLES
from hyperball.experiments.text import DIVERGED, spread
from hyperball.rows import nearest
from hyperball.training.files import FileError, read_tree
from hyperball.training.record import RECORD, Record

SUMMARY = "summary"
NOTHING = "No record yet."
CLOSE = 1.5  # points from the paper that count as reproduced
BEGIN, END = "<!-- results:", "<!-- /results -->"
MARKED = re.compile(rf"({BEGIN} (?P<name>[\w-]+) -->\n)(?:(?!{BEGIN}).)*?({END})", re.DOTALL)


class MarkerError(ValueError):
    """Markers that do not stand in pairs, or none."""


@dataclass(frozen=True)
class Found:
    """The records of one table at one scale."""

    experiment: Experiment
    scale: Scale
    lines: tuple[Comparison, ...]
    foreign: int
    remarks: tuple[str, ...] = ()
    lengths: tuple[tuple[str, ...], ...] = ()

    @property
    def measured(self) -> list[Comparison]:
        """Those with a value, or with networks that did not converge."""
        return [line for line in self.lines if line.values or line.diverged]

    @property
    def beside(self) -> list[Comparison]:
        """Those that the paper's compare with: a quick reduction shows an order, not numbers."""
        return [line for line in self.measured if compares(line) and self.scale != "quick"]

    def is_close(self, line: Comparison) -> bool:
        """Whether ours is within 1.5 points of the paper's, or better; or both did not converge."""
        if line.diverged:
            return line.published == DIVERGED
        worse = line.difference if self.experiment.metric.endswith("error") else -(line.difference or 0.0)
        return worse is not None and worse <= CLOSE


def compares(line: Comparison) -> bool:
    """Whether ours can be held against the paper's: two numbers, or networks that did not converge here."""
    return line.difference is not None or bool(line.diverged and line.published is not None)


def fill(text: str, results: Path) -> str:
    """The text with every marked part made anew; a text must have one, and its markers must stand in pairs."""
    pairs, counts = len(MARKED.findall(text)), (text.count(BEGIN), text.count(END))
    if counts != (pairs, pairs):
        raise MarkerError(
            f"markers must stand in pairs `{BEGIN} NAME -->`, `{END}`, got {counts[0]} that begin, {counts[1]} that "
            f"end and {pairs} pairs"
        )
    if not pairs:
        raise MarkerError(f"there is no marker `{BEGIN} NAME -->`")
    return MARKED.sub(lambda part: f"{part[1]}{made(part['name'], results)}\n{part[3]}", text)


def made(name: str, results: Path) -> str:
    if name == SUMMARY:
        return summary(results)
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r} in a marker; {nearest(name, [SUMMARY, *TABLES])}")
    is_trained = isinstance(TABLES[name](), Experiment)
    parts = [detail(found) for found in scales_of(name, results)] if is_trained else times_of(name, results)
    return "\n\n".join(parts) or NOTHING


def scales_of(name: str, results: Path) -> Iterator[Found]:
    """A table at every scale of which there are records, the published one first."""
    whole = TABLES[name]()
    if not isinstance(whole, Experiment):
        return
    for scale in reversed(SCALES):
        folder = results / f"{whole.family or name}-{scale}"
        records = [path for path in folder.glob(f"*/seed-*/{RECORD}") if path.parents[1].name != SOURCE]
        for path in records:
            name_if_broken(path)
        if records:
            experiment = whole.at(scale)
            jobs = jobs_of(experiment, seeds_in(folder), folder)
            done = sum(job.is_done for job in jobs)
            remarks = tuple(doubts_of(experiment, jobs))
            only_lengths = experiment.draws == (filter_lengths,)
            lengths = tuple(length_rows(experiment, [job for job in jobs if job.is_done])) if only_lengths else ()
            yield Found(experiment, scale, tuple(compare(experiment, jobs)), len(records) - done, remarks, lengths)


def name_if_broken(path: Path) -> None:
    try:
        Record.read(path.parent)
    except FileError as error:
        leave_out(path, str(error).removeprefix(f"{path}: "))


def summary(results: Path) -> str:
    """One line a table and scale: how much of it is measured, and how much of that agrees with the paper."""
    rows = []
    for name in TABLES:
        for found in scales_of(name, results):
            rows.append(summary_row(found))
    if not rows:
        return NOTHING
    head = ("table", "scale", "numbers", "seeds", f"within {CLOSE:g} points or better", "median difference", "largest")
    return markdown_table(head, rows)


def summary_row(found: Found) -> tuple[str, ...]:
    seeds = sorted({len(line.values) + len(line.diverged) for line in found.measured})
    count = f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0] if seeds else 0)
    differences = [line.difference for line in found.beside if line.difference is not None]
    close = sum(map(found.is_close, found.beside))
    return (
        found.experiment.title, found.scale, f"{len(found.measured)} of {len(found.lines)}", count,
        f"{close} of {len(found.beside)}" if found.beside else "–",
        f"{statistics.median(differences):+.2f}" if differences else "–",
        f"{max(differences, key=abs):+.2f}" if differences else "–",
    )  # fmt: skip


def detail(found: Found) -> str:
    """Every number that is measured, ours beside the paper's, and what they were measured under."""
    experiment = found.experiment
    head: Sequence[str]
    if any(entry.attacks for entry in experiment.entries):
        head, rows = attack_rows(found)
    else:
        head = ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds", *experiment.also)
        rows = [detail_row(line, line in found.beside) for line in found.measured]
    count = f"{len(found.measured)} of {len(found.lines)} numbers"
    protocol = f"Scale `{found.scale}`: {experiment.words(found.scale)}. {count}."
    order = order_of(found.measured)
    protocol += f" {order}." if order else ""
    if found.foreign:
        protocol += f" {found.foreign} records of other recipes are left out."
    remarks = "".join(f"\n- {remark}" for remark in found.remarks)
    more = f"\n\nMean lengths:\n\n{markdown_table(LENGTHS, found.lengths)}" if found.lengths else ""
    return f"{protocol}\n\n{markdown_table(head, rows)}{more}" + (f"\n{remarks}" if remarks else "")


def detail_row(line: Comparison, is_beside: bool) -> tuple[str, ...]:
    best = f"{statistics.fmean(line.best):.2f}" if line.best else "–"
    paper = "–" if line.published is None else str(line.published)
    difference = f"{line.difference:+.2f}" if is_beside and line.difference is not None else "–"
    also = [beside(values, line.published_also.get(name)) for name, values in line.also.items()]
    return (
        line.row,
        line.column,
        spread(line.values, len(line.diverged)),
        best,
        paper,
        difference,
        str(len(line.values) + len(line.diverged)),
        *also,
    )


def attack_rows(found: Found) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """One row a network and a column an attack: ours, the paper's in parentheses, and seeds where they are fewer."""
    lines = {(line.row, line.column): line for line in found.measured}
    entries = [entry for entry in found.experiment.entries if (entry.row, entry.column) in lines]
    names = [
        name
        for name in dict.fromkeys(name for entry in entries if entry.attacks for name in entry.attacks.shown)
        if any((entry.row, f"{entry.column}, {name}") in lines for entry in entries)
    ]
    rows = []
    for entry in entries:
        clean = lines[entry.row, entry.column]
        cells = [lines.get((entry.row, f"{entry.column}, {name}")) for name in names]
        count = len(clean.values) + len(clean.diverged)
        shown = ["–" if line is None else attack_cell(line, count) for line in (clean, *cells)]
        rows.append((entry.row, entry.column, *shown, str(count)))
    return ("", "training", "clean", *names, "seeds"), rows


def attack_cell(line: Comparison, seeds: int) -> str:
    paper = float(line.published) if isinstance(line.published, int | float) else None
    held = len(line.values) + len(line.diverged)
    return beside(line.values, paper, len(line.diverged)) + (f" [{held} of {seeds}]" if held < seeds else "")


def beside(values: Sequence[float], paper: float | None, diverged: int = 0) -> str:
    text = spread(values, diverged)
    return text if paper is None else f"{text} ({paper:g})"


def times_of(name: str, results: Path) -> list[str]:
    """A table of times at every scale of which there is one."""
    parts = []
    for scale in reversed(SCALES):
        path = results / f"{name}-{scale}" / TABLE
        if not path.exists():
            continue
        try:
            tree: dict[str, Any] = read_tree(path)
            rows = [row_of(entry) for entry in tree["numbers"]]
            parts.append(f"{tree['protocol']}.\n\n" + markdown_table(head_of(tree), rows))
        except (FileError, KeyError, TypeError, ValueError, AttributeError) as error:
            leave_out(path, f"it is no table of times ({type(error).__name__}: {error})")
    return parts


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
