"""Tables of Markdown from a folder of records, and files whose marked parts they fill.

A marked part is what stands between `<!-- results: NAME -->` and `<!-- /results -->`; NAME is a table's name, or
"summary" for one line a table.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.experiments.headings import heading
from hyperball.experiments.jobs.attack_jobs import doubts_of
from hyperball.experiments.pictures import filter_lengths
from hyperball.experiments.plan import SOURCE
from hyperball.experiments.reproduce import Comparison, compare, jobs_of, order_of, pairs_in_order
from hyperball.experiments.results.broken import damage, leave_out
from hyperball.experiments.results.collecting import TABLE, seeds_in
from hyperball.experiments.results.lengths import HEAD as LENGTHS
from hyperball.experiments.results.lengths import length_rows
from hyperball.experiments.results.text import part_of, spread
from hyperball.experiments.runtime import head_of, row_of
from hyperball.experiments.scales import SCALES, Scale
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables import TABLES, is_part
from hyperball.rows import nearest
from hyperball.training.files import FileError, read_tree
from hyperball.training.record import RECORD
from hyperball.verdicts import AGREES, CHANCE, CONTRADICTION, LOST, NEAR, Verdict, better, gain, verdict
from hyperball.verdicts import compares as comparable

SUMMARY = "summary"
NOTHING = "No record yet."
BEGIN, END = "<!-- results:", "<!-- /results -->"
MARKED = re.compile(rf"({BEGIN} (?P<name>[\w-]+) -->\n)(?:(?!{BEGIN}).)*?({END})", re.DOTALL)


class MarkerError(ValueError):
    """Markers that do not stand in pairs, name no table, or none."""


@dataclass(frozen=True)
class Found:
    """The records of one table at one scale; of those that lie there, `foreign` and `broken` ones are left out."""

    experiment: Experiment
    scale: Scale
    lines: tuple[Comparison, ...]
    foreign: int = 0
    broken: int = 0
    remarks: tuple[str, ...] = ()
    lengths: tuple[tuple[str, ...], ...] = ()

    @property
    def measured(self) -> list[Comparison]:
        """Those with a value, or with networks that did not converge."""
        return [line for line in self.lines if line.values or line.diverged]

    @property
    def is_part(self) -> bool:
        return is_part(self.experiment)

    @property
    def is_attacked(self) -> bool:
        return any(entry.attacks for entry in self.experiment.entries)

    @property
    def shown(self) -> list[Comparison]:
        """Those whose difference to the paper's is printed: a quick reduction shows an order, not numbers."""
        return [line for line in self.measured if compares(line) and self.scale != "quick"]

    @property
    def beside(self) -> list[Comparison]:
        """Those that are held against the paper's: at the published schedule alone, as shorter ones show an order."""
        return [line for line in self.measured if compares(line) and self.scale == "paper"]

    def is_close(self, line: Comparison) -> bool:
        """Whether ours is within 1.5 points of the paper's, or better; or both did not converge."""
        return self.verdict(line) in AGREES

    def verdict(self, line: Comparison) -> Verdict:
        return verdict(self.experiment.metric, line.published, line.difference, bool(line.diverged))


def compares(line: Comparison) -> bool:
    """Whether ours can be held against the paper's: two numbers, or networks that did not converge."""
    return comparable(line.published, line.difference, bool(line.diverged))


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
    for part in MARKED.finditer(text):
        check_name(part["name"])
    return MARKED.sub(lambda part: f"{part[1]}{made(part['name'], results)}\n{part[3]}", text)


def check_name(name: str) -> None:
    if name not in (SUMMARY, *TABLES):
        raise MarkerError(f"unknown table {name!r}; {nearest(name, [SUMMARY, *TABLES])}")


def made(name: str, results: Path) -> str:
    check_name(name)
    if name == SUMMARY:
        return summary(results)
    if not isinstance(TABLES[name](), Experiment):
        return "\n\n".join(times_of(name, results)) or NOTHING
    found = list(scales_of(name, results))
    return "\n\n".join([*map(detail, found[:1]), *map(folded, found[1:])]) or NOTHING


def scales_of(name: str, results: Path) -> Iterator[Found]:
    """A table at every scale of which there are records, the published one first."""
    whole = TABLES[name]()
    if not isinstance(whole, Experiment):
        return
    for scale in reversed(SCALES):
        folder = results / f"{whole.family or name}-{scale}"
        records = [path for path in folder.glob(f"*/seed-*/{RECORD}") if path.parents[1].name != SOURCE]
        if records:
            experiment = whole.at(scale)
            jobs = jobs_of(experiment, seeds_in(folder), folder)
            remarks = tuple(doubts_of(experiment, jobs))
            only_lengths = experiment.draws == (filter_lengths,)
            lengths = tuple(length_rows(experiment, [job for job in jobs if job.is_done])) if only_lengths else ()
            counts = left_out(records, kin(whole, scale), folder)
            yield Found(experiment, scale, tuple(compare(experiment, jobs)), *counts, remarks, lengths)


def kin(whole: Experiment, scale: Scale) -> list[Experiment]:
    """The tables, at a scale, whose runs lie in the folder of a table's: itself, and those of its family."""
    family = whole.family or whole.name
    made = (TABLES[name]() for name in TABLES)
    others = [table for table in made if isinstance(table, Experiment) and (table.family or table.name) == family]
    return [table.at(scale) for table in others]


def left_out(records: Sequence[Path], tables: Iterable[Experiment], folder: Path) -> tuple[int, int]:
    """How many records are of other recipes than their cells', and how many are broken; each is named."""
    jobs = {job.folder: job for table in tables for job in jobs_of(table, seeds_in(folder), folder)}
    foreign = broken = 0
    for path in records:
        if reason := damage(path.parent):
            broken += 1
        elif path.parent not in jobs:
            foreign, reason = foreign + 1, "it lies in the folder of no cell of the table"
        elif reason := jobs[path.parent].missing():
            foreign += 1
        if reason:
            said = reason.removeprefix(f"{path}: ").replace(f"{path} ", "it ", 1)
            leave_out(path, said.replace(f"{path.parent} holds a run", "it is", 1))
    return foreign, broken


def summary(results: Path) -> str:
    """One line a table and scale: how much of it is measured, and how much of that agrees with the paper.

    A table whose cells are all another's has no line of its own.
    """
    rows = []
    for name in TABLES:
        for found in scales_of(name, results):
            rows += [] if found.is_part else [summary_row(found)]
    if not rows:
        return NOTHING
    head = (
        "table", "scale", "numbers", "seeds", "pairs in the paper's order", f"within {NEAR:g} points or better",
        "median difference, + is better", "largest",
    )  # fmt: skip
    return markdown_table(head, rows)


def summary_row(found: Found) -> tuple[str, ...]:
    metric = found.experiment.metric
    seeds = sorted({len(line.values) + len(line.diverged) for line in found.measured})
    count = f"{seeds[0]}–{seeds[-1]}" if len(seeds) > 1 else str(seeds[0] if seeds else 0)
    gains = [gain(metric, line.difference) for line in found.beside if line.difference is not None]
    close = sum(map(found.is_close, found.beside))
    kept, pairs = pairs_in_order(found.measured)
    return (
        heading(found.experiment.title, found.experiment.source), found.scale,
        f"{len(found.measured)} of {len(found.lines)}", count,
        f"{kept} of {pairs}" if pairs else "–",
        f"{close} of {len(found.beside)}" if found.beside else "–",
        f"{statistics.median(gains):+.2f}" if gains else "–",
        f"{max(gains, key=abs):+.2f}" if gains else "–",
    )  # fmt: skip


def detail(found: Found) -> str:
    """Every number that is measured, ours beside the paper's, and what they were measured under."""
    experiment = found.experiment
    head: Sequence[str]
    if found.is_attacked:
        head, rows = attack_rows(found)
    else:
        head = ("", "", f"{experiment.metric}, %", "best epoch", "paper", "difference", "seeds", *experiment.also)
        rows = [detail_row(line, difference_words(found, line)) for line in found.measured]
    numbers = f"Its numbers are among those of {experiment.family}." if found.is_part else markdown_table(head, rows)
    remarks = "".join(f"\n- {remark}" for remark in found.remarks)
    more = f"\n\nMean lengths:\n\n{markdown_table(LENGTHS, found.lengths)}" if found.lengths else ""
    return f"{above(found)}\n\n{numbers}{more}" + (f"\n{remarks}" if remarks else "")


def folded(found: Found) -> str:
    """A table behind a fold that says its scale."""
    words = f"The scale <code>{found.scale}</code>: {len(found.measured)} of {len(found.lines)} numbers"
    return f"<details>\n<summary>{words}</summary>\n\n{detail(found)}\n\n</details>"


def above(found: Found) -> str:
    """What to know before reading a table: the scale, how much is measured, signs, and what was left out."""
    experiment, lines = found.experiment, found.measured
    said = [f"Scale `{found.scale}`: {experiment.words(found.scale)}", f"{len(lines)} of {len(found.lines)} numbers"]
    said += filter(None, [order_of(lines)])
    if any(line.difference is not None for line in found.shown) and not (found.is_part or found.is_attacked):
        said.append(f"Differences are ours less the paper's: {better(experiment.metric)}")
    if any(line.diverged or line.published == LOST for line in lines):
        said.append(CHANCE)
    if any(found.verdict(line) == "contradicts" for line in found.beside):
        said.append(f'"contradicts": {CONTRADICTION}')
    kinds = ((found.foreign, "of another recipe"), (found.broken, "that cannot be read"))
    parts = [f"{count} record{'' if count == 1 else 's'} {words}" for count, words in kinds if count]
    said += [f"Left out: {' and '.join(parts)}"] if parts else []
    return " ".join(f"{sentence}." for sentence in said)


def difference_words(found: Found, line: Comparison) -> str:
    """Ours less the paper's, where that is shown, or that the two contradict each other."""
    if line not in found.shown:
        return "–"
    if line in found.beside and found.verdict(line) == "contradicts":
        return "contradicts"
    return "–" if line.difference is None else f"{line.difference:+.2f}"


def detail_row(line: Comparison, difference: str) -> tuple[str, ...]:
    best = part_of(line.best, len(line.values))
    paper = "–" if line.published is None else str(line.published)
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
