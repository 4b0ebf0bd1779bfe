"""A published table and the runs beside it: which run stands behind which number."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyperball.on_disk import cell_name
from hyperball.report.doubts import Doubt, distinct
from hyperball.report.files import clipped
from hyperball.report.kinds import Number, Published, RobustCell
from hyperball.report.records import UNFINISHED, Run
from hyperball.report.tables import BASELINE, Group, ending, family, family_of, group
from hyperball.verdicts import LOST, percent_of


@dataclass(frozen=True)
class Line:
    """One cell: the published number, and ours from runs of one recipe; `values` are the last iterates by seed.

    `lost` are the seeds whose networks did not converge; where none did, `runs` are theirs. `networks` are all that
    were trained, of which some may have no number under an attack or condition.
    """

    number: Number
    values: tuple[float, ...]
    best: tuple[float, ...]
    runs: tuple[Run, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    variant: str = ""
    lost: tuple[str, ...] = ()
    networks: int = 0

    @property
    def is_done(self) -> bool:
        """Whether there is a number, or the result that there is none."""
        return bool(self.values or self.lost)

    @property
    def seeds(self) -> int:
        """How many networks came to an end."""
        return len(self.values) + len(self.lost)

    @property
    def text(self) -> str:
        return ending(self.values, len(self.lost), self.networks)

    @property
    def operator(self) -> str:
        named = family_of(self.number.row)
        return family(self.runs[0].recipe) if self.runs and named != BASELINE else named

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        known = self.number.published
        return self.mean - known if isinstance(known, int | float) and self.mean is not None else None


class Joined:
    """The cells of a table with the runs that lie beside it; runs of different recipes are different lines.

    `one_a_cell` are the lines that count: every cell once, with the table's own number where there are several.
    """

    def __init__(self, table: Published, runs: Sequence[Run], robust: Sequence[RobustCell] = ()) -> None:
        self.table = table
        self.columns = set(number.column for number in table.numbers)
        self.robust = {cell.path.parent: cell for cell in robust}
        self.cells: dict[str, list[Run]] = {}
        for run in runs:
            fits = run.scale in ("", table.scale)
            if fits and run.folder != table.folder and run.folder.is_relative_to(table.folder):
                self.cells.setdefault(run.folder.relative_to(table.folder).parts[0], []).append(run)
        variants = [self.lines_of(number) for number in table.numbers]
        self.lines = [line for held in variants for line in held]
        self.one_a_cell = [held[0] if len(held) == 1 else counting(held) for held in variants]
        counted = {id(run) for line in self.lines for run in line.runs}
        ended = (run for number in table.numbers for run in self.runs_of(number)[0])
        self.used = counted | {id(run) for run in ended if run.diverged}

    def lines_of(self, number: Number) -> list[Line]:
        runs, condition = self.runs_of(number)
        ended = [run for run in runs if run.status != UNFINISHED]
        if not ended:
            lost, networks = number.diverged, self.told_networks(number)
            return [Line(number, number.values, number.best, doubts=told(number), lost=lost, networks=networks)]
        groups = group(ended)
        many = len(groups) > 1
        lines = [self.line(number, held, condition, held.label if many else "") for held in groups]
        return [replace(line, networks=len(held.runs)) for line, held in zip(lines, groups, strict=True)]

    def told_networks(self, number: Number) -> int:
        """How many networks a row has by the table itself: those with a number without attack or condition."""
        base = self.split(number.column)[0]
        return max(
            (
                len(one.values) + len(one.diverged)
                for one in self.table.numbers
                if (one.row, one.column) == (number.row, base)
            ),
            default=0,
        )

    def runs_of(self, number: Number) -> tuple[list[Run], str]:
        """The runs of a cell, and the condition they were tested under where the column names one."""
        base, condition = self.split(number.column)
        return self.cells.get(cell_name(number.row, base), []), condition

    def place_of(self, picture: str) -> int:
        """Where the cell of a picture, such as "filters-tanh--cosine", stands in the table; last for one of no cell."""
        names = [f"-{cell_name(number.row, number.column)}" for number in self.table.numbers]
        return next((at for at, name in enumerate(names) if picture.endswith(name)), len(names))

    def operator_of(self, picture: str) -> str:
        """The operator of a picture's cell; nothing for one of no cell."""
        at = self.place_of(picture)
        return self.one_a_cell[at].operator if at < len(self.one_a_cell) else ""

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

    def line(self, number: Number, held: Group, condition: str, variant: str) -> Line:
        metric, lost = self.table.metric, held.lost
        runs = tuple(run for run in held.runs if run.is_finished)
        if not runs:
            doubts = [*held.doubts, *told(number), *([] if variant else disagreement(number, (), lost))]
            return Line(number, (), (), held.runs, distinct(doubts), variant, lost)
        last = [self.condition(run, condition) if condition else run.results["last"] for run in runs]
        values = [value for entry in last if (value := percent_of(metric, entry)) is not None]
        chosen = [run.best_under.get(condition, {}) if condition else run.results.get("best", {}) for run in runs]
        best = [percent_of(metric, entry) for entry in chosen]
        doubts = [*held.doubts, *(doubt for run in runs for doubt in self.doubts_about(run, condition))]
        known = {text for doubt in doubts for text in (doubt.text, doubt.sentence)}
        doubts += [doubt for doubt in told(number) if doubt.text not in known]
        doubts += other_recipes(number, variant) if variant else disagreement(number, values, lost)
        if condition and not values:
            return Line(number, number.values, number.best, runs, distinct(doubts), variant, lost)
        kept = tuple(value for value in best if value is not None)
        return Line(number, tuple(values), kept, runs, distinct(doubts), variant, lost)

    def doubts_about(self, run: Run, condition: str) -> list[Doubt]:
        """What a run's own records say against its number."""
        cell = self.robust.get(run.folder)
        attacked = cell.doubts if cell is not None and cell.accuracy(condition) is not None else ()
        texts = [*(["not finite"] if run.nonfinite else []), *attacked]
        return [Doubt(run.name, text, clipped(run.seed)) for text in texts]


def told(number: Number) -> tuple[Doubt, ...]:
    """The doubts that the table itself has."""
    return tuple(Doubt(f"{number.row}, {number.column}", text) for text in number.doubts)


def other_recipes(number: Number, variant: str) -> list[Doubt]:
    """That a cell holds runs of several recipes, of which a table counts one."""
    return [Doubt(f"{number.row}, {number.column}", f"runs of other recipes lie in the same cell; these are {variant}")]


def counting(variants: Sequence[Line]) -> Line:
    """Of the lines of one cell that with the table's own number; one that is not done, and says so, where none has."""
    number = variants[0].number
    several = Doubt(f"{number.row}, {number.column}", "runs of several recipes, none with the table's own number")
    return next(filter(is_the_tables, variants), Line(number, (), (), doubts=(several,)))


def is_the_tables(line: Line) -> bool:
    """Whether the runs of a line are those that the table has a number of."""
    number = line.number
    told = bool(number.values or number.diverged)
    return line.is_done and told and not disagreement(number, line.values, line.lost)


def disagreement(number: Number, values: Sequence[float], lost: Sequence[str]) -> list[Doubt]:
    """Where the table and the records beside it say something else."""
    if not (values or lost) or not (number.values or number.diverged):
        return []
    about = f"{number.row}, {number.column}"
    said = f"table.json says {statistics.fmean(number.values):.2f}" if number.values else f"table.json says {LOST}"
    if (len(values), len(lost)) != (len(number.values), len(number.diverged)):
        seeds = len(number.values) + len(number.diverged)
        told = f"{said} over {seeds} seed{'' if seeds == 1 else 's'}, the records have {len(values)}"
        return [Doubt(about, told + (f" and {len(lost)} that did not converge" if lost else ""))]
    gap = abs(statistics.fmean(values) - statistics.fmean(number.values)) if values else 0.0
    return [Doubt(about, said)] if gap > 0.01 else []
