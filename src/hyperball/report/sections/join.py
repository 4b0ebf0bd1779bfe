"""A published table and the runs beside it: which run stands behind which number."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hyperball.report.kinds import Number, Published, RobustCell
from hyperball.report.records import UNFINISHED, Run
from hyperball.report.tables import family, group, protocol

ERRORS = {"error": "top1", "top5_error": "top5"}


@dataclass(frozen=True)
class Line:
    """One cell: the published number, and ours from runs of one recipe; `values` are the last iterates by seed."""

    number: Number
    values: tuple[float, ...]
    best: tuple[float, ...]
    runs: tuple[Run, ...] = ()
    doubts: tuple[str, ...] = ()
    variant: str = ""

    @property
    def operator(self) -> str:
        return family(self.runs[0].recipe) if self.runs else self.number.row.partition(" ")[0]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        known = self.number.published
        return self.mean - known if isinstance(known, int | float) and self.mean is not None else None


def slug(text: str) -> str:
    """A cell's part of a folder's name, as experiments write it."""
    return re.sub(r"[^a-z0-9_.=+]+", "-", text.lower()).strip("-")


def percent_of(metric: str, results: dict[str, float]) -> float | None:
    """A metric in percent; errors are 100 less an accuracy."""
    name = ERRORS.get(metric, metric)
    if name not in results:
        return None
    return 100 * (1 - results[name]) if metric in ERRORS else 100 * results[name]


class Joined:
    """The cells of a table with the runs that lie beside it; runs of different recipes are different cells."""

    def __init__(self, table: Published, runs: Sequence[Run], robust: Sequence[RobustCell] = ()) -> None:
        self.table = table
        self.columns = set(number.column for number in table.numbers)
        self.robust = {cell.path.parent: cell for cell in robust}
        self.cells: dict[str, list[Run]] = {}
        for run in runs:
            fits = run.scale in ("", table.scale)
            if fits and run.folder != table.folder and run.folder.is_relative_to(table.folder):
                self.cells.setdefault(run.folder.relative_to(table.folder).parts[0], []).append(run)
        self.lines = [line for number in table.numbers for line in self.lines_of(number)]
        self.used = {id(run) for line in self.lines for run in line.runs}

    def lines_of(self, number: Number) -> list[Line]:
        runs, condition = self.runs_of(number)
        finished = [run for run in runs if run.status != UNFINISHED]
        if not finished:
            return [Line(number, number.values, number.best, doubts=number.doubts)]
        members: dict[str, list[Run]] = {}
        for run in finished:
            members.setdefault(protocol(run.recipe), []).append(run)
        labels = [entry.label for entry in group(finished)] if len(members) > 1 else [""]
        return [self.line(number, held, condition, text) for held, text in zip(members.values(), labels, strict=True)]

    def runs_of(self, number: Number) -> tuple[list[Run], str]:
        """The runs of a cell, and the condition they were tested under where the column names one."""
        base, condition = self.split(number.column)
        return self.cells.get(f"{slug(number.row)}--{slug(base)}", []), condition

    def split(self, column: str) -> tuple[str, str]:
        """A column's base, which is a column too, and the condition that it adds: "natural, fgsm"."""
        bases = [base for base in self.columns if column.startswith(f"{base}, ")]
        base = max(bases, key=len, default=column)
        return base, column[len(base) + 2 :]

    def condition(self, run: Run, name: str) -> dict[str, float]:
        """What a run has under a condition or an attack."""
        cell = self.robust.get(run.folder)
        attacked = None if cell is None else cell.accuracy(name)
        return run.measured.get(name, {}) if attacked is None else {"top1": attacked}

    def line(self, number: Number, runs: Sequence[Run], condition: str, variant: str) -> Line:
        metric = self.table.metric
        last = [self.condition(run, condition) if condition else run.results["last"] for run in runs]
        values = [value for held in last if (value := percent_of(metric, held)) is not None]
        best = [] if condition else [percent_of(metric, run.results.get("best", {})) for run in runs]
        doubts = [*number.doubts, *(f"seed {run.seed}: not finite" for run in runs if run.nonfinite)]
        attacked = [
            cell for run in runs if (cell := self.robust.get(run.folder)) and cell.accuracy(condition) is not None
        ]
        doubts += [doubt for cell in attacked for doubt in cell.doubts]
        if not variant and values and len(values) == len(number.values):
            gap = abs(statistics.fmean(values) - statistics.fmean(number.values))
            doubts += [f"table.json says {statistics.fmean(number.values):.2f}"] if gap > 0.01 else []
        doubts = list(dict.fromkeys(doubts))
        if condition and not values:
            return Line(number, number.values, number.best, tuple(runs), tuple(doubts), variant)
        kept = tuple(value for value in best if value is not None)
        return Line(number, tuple(values), kept, tuple(runs), tuple(doubts), variant)
