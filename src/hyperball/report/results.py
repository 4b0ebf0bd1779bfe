"""The page about a results folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from hyperball.experiments.headings import heading
from hyperball.experiments.scales import SCALES
from hyperball.report.doubts import distinct, gathered
from hyperball.report.files import natural
from hyperball.report.folder import Found
from hyperball.report.kinds import Attack, Bench, Claims, Published, RobustCell, Robustness
from hyperball.report.page import Page, Section
from hyperball.report.pictures import Curves, Features, Filters
from hyperball.report.records import Run
from hyperball.report.sections import lines as curves
from hyperball.report.sections.against import against_paper
from hyperball.report.sections.bench import bench_sections
from hyperball.report.sections.claims import claims_section
from hyperball.report.sections.figures import figure_section, galleries, geometry_section
from hyperball.report.sections.join import Joined
from hyperball.report.sections.published import (
    compares,
    doubts_of,
    finding,
    is_share,
    pairs_in_order,
    published_section,
    tone,
)
from hyperball.report.sections.radii import Network, radii_gallery
from hyperball.report.sections.robustness import robustness_section
from hyperball.report.tables import Cell, Table, family, group, group_table, run_table, trimmed
from hyperball.verdicts import AGREES, APART, NEAR

DRAWN_ANYWAY = ("convergence", "convergence-training", "radii")  # from the runs themselves, with a line for every cell
MAIN = "table.json"  # of a folder; tables made of the same runs have files of their own names
MOST_RUNS, FEW_RUNS = 2000, 8
OWN = "Runs of no published table."
LAST = "Every result is that of the last iterate, as mean ± standard deviation over seeds."
HOW = "Hover over a number or a line, tap it or reach it with the Tab key, for its conditions; a click on a head sorts."


def results_page(found: Found, title: str = "Results") -> Page:
    """What holds, ours against the papers', tables, robustness, other runs, figures, benchmarks, geometry, all runs."""
    tables = in_reading_order(found.of(Published))
    joined = [Joined(table, found.runs, found.of(RobustCell)) for table in tables]
    used = set[int]().union(*(entry.used for entry in joined))
    others = [run for run in found.runs if id(run) not in used]
    sets: dict[tuple[int, str], list[Run]] = {}
    for run in others:
        sets.setdefault((table_of(run, joined), run.data), []).append(run)
    sections: list[Section | None] = [
        claims_section(found.of(Claims), joined),
        against_section(joined),
        overview(joined),
        *table_sections(joined, found),
        robustness_section(found),
        *(data_section(name, runs, joined[at].table if at >= 0 else None) for (at, name), runs in sets.items()),
        figure_section([record for record in pictures(found) if not of_a_table(record, joined, found)], found.runs),
        *bench_sections(found.of(Bench)),
        geometry_section(),
        every_run(found.runs),
    ]
    versions = sorted(
        {f"{k} {v}" for run in found.runs for k, v in run.conditions.items() if k in ("torch", "hyperball")}
    )
    shown = tuple(section for section in sections if section is not None)
    return Page(
        title,
        f"{counted(found)} {LAST if found.runs or joined else ''} {HOW}",
        shown,
        tuple(found.left_out),
        ", ".join(versions),
        filters=True,
    )


def in_reading_order(tables: Sequence[Published]) -> list[Published]:
    """Longer schedules before shorter ones, accuracies before times, then by name; the scales of one table together.

    A figure made of a table's runs lies in its folder, and follows it.
    """
    longest_first = list(reversed(SCALES))

    def rank(table: Published) -> int:
        return longest_first.index(table.scale) if table.scale in longest_first else len(SCALES)

    best: dict[str, int] = {}
    for table in tables:
        best[table.experiment] = min(rank(table), best.get(table.experiment, len(SCALES)))

    owners = {table.folder: table.experiment for table in tables if PurePath(table.name).name == MAIN}

    def place(table: Published) -> tuple[object, ...]:
        owner = owners.get(table.folder, table.experiment)
        parts = natural(owner), table.experiment != owner, natural(table.experiment)
        return best.get(owner, len(SCALES)), not is_share(table.metric), *parts, rank(table)

    return sorted(tables, key=place)


def table_of(run: Run, joined: Sequence[Joined]) -> int:
    """Which table is the first in whose folder a run lies; -1 for none."""
    inside = (at for at, entry in enumerate(joined) if run.folder.is_relative_to(entry.table.folder))
    return next(inside, -1)


def pictures(found: Found) -> list[Curves | Features | Filters]:
    return [*found.of(Curves), *found.of(Features), *found.of(Filters)]


def of_a_table(record: Curves | Features | Filters, joined: Sequence[Joined], found: Found) -> bool:
    """Whether a picture lies in the folder of a table."""
    return any((found.root / record.name).is_relative_to(entry.table.folder) for entry in joined)


def table_sections(joined: Sequence[Joined], found: Found) -> list[Section]:
    """The published tables; those that share a folder share its pictures, which are shown once.

    Curves are drawn by every table that has runs which none before it drew, and by figures of some of a table's runs.
    A table that has numbers at a longer scale is folded.
    """
    folders, drawn, sections = set(), set[int](), []
    for entry in joined:
        first = entry.table.folder not in folders
        beside = [one for one in joined if one.table.folder == entry.table.folder]
        own = [record for record in pictures(found) if of_a_table(record, [entry], found)]
        own = [record for record in own if shown_by(record, beside) is entry]
        own = [record for record in own if stem(record) not in DRAWN_ANYWAY or not entry.used]
        own.sort(key=lambda record: entry.place_of(stem(record)))
        shown = galleries(own, operators={record.name: entry.operator_of(stem(record)) for record in own})
        is_part = any(entry.used < one.used for one in beside)  # a figure of some of a table's runs
        section = published_section(entry, first or is_part or not entry.used <= drawn, shown)
        sections.append(replace(section, folded=any(is_longer(other, entry) for other in joined)))
        folders.add(entry.table.folder)
        drawn |= entry.used
    return sections


def shown_by(record: Curves | Features | Filters, beside: Sequence[Joined]) -> Joined:
    """Of the tables in whose folder a picture lies, the smallest that has all of its curves; else the first."""
    if isinstance(record, Curves):
        names = {line.name for line in record.lines}
        whole = [entry for entry in beside if names <= {f"{n.row}, {n.column}" for n in entry.table.numbers}]
        return min(whole or beside[:1], key=lambda entry: len(entry.table.numbers))
    return beside[0]


def is_longer(entry: Joined, other: Joined) -> bool:
    """Whether an entry is another's table at a longer scale, with numbers."""
    table, scales = entry.table, (entry.table.scale, other.table.scale)
    if table.experiment != other.table.experiment or not set(scales) <= set(SCALES):
        return False
    return SCALES.index(scales[0]) > SCALES.index(scales[1]) and any(line.is_done for line in entry.lines)


def stem(record: Curves | Features | Filters) -> str:
    """The name of a picture's file, which ends with that of its cell."""
    return PurePath(record.name).stem


def counted(found: Found) -> str:
    """What was found, in a sentence."""
    if len(found) == len(found.of(Claims)):
        return "No record was found in this folder: what follows is drawn from formulas."
    kinds = (
        (len(found.runs), "run"), (len(found.of(Published)), "published table"),
        (sum(len(found.of(kind)) for kind in (Attack, Robustness, RobustCell)), "robustness record"),
        (len(found.of(Bench)), "benchmark"),
    )  # fmt: skip
    parts = [f"{count:,} {word}{'' if count == 1 else 's'}" for count, word in kinds if count]
    figures = len(found) - len(found.of(Claims)) - sum(count for count, _ in kinds)
    parts += [f"{figures} figure{'' if figures == 1 else 's'}"] if figures else []
    return f"{', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def overview(joined: Sequence[Joined]) -> Section | None:
    """One row a table and scale: how many cells are done, and how near they are to the paper.

    A table whose cells are all another's, such as a figure of its curves, has no row of its own.
    """
    if not joined:
        return None
    rows = []
    for entry in (entry for entry in joined if not is_part(entry, joined)):
        table, cells = entry.table, entry.one_a_cell
        done = [line for line in cells if line.is_done]
        shares = is_share(table.metric)
        known = [line for line in done if compares(line)] if shares and table.scale == "paper" else []
        near = sum(tone(table, line) in AGREES for line in known)
        seeds = [line.seeds for line in done]
        doubts = len(doubts_of(entry.lines))
        kept, pairs = pairs_in_order(done) if shares else (0, 0)
        spans = f"{min(seeds)}–{max(seeds)}" if seeds and min(seeds) < max(seeds) else str(max(seeds, default=0))
        rows.append((
            Cell(heading(table.title, table.source), tip=f"{table.name}\n{finding(entry)}"), Cell(table.experiment),
            Cell(table.scale, tip=table.protocol),
            Cell(f"{len(done)} of {len(cells)}", sort=len(done) / max(len(cells), 1)),
            Cell(f"{kept} of {pairs}" if pairs else "–", sort=kept / pairs if pairs else None),
            Cell(f"{near} of {len(known)}" if known else "–", sort=near / len(known) if known else None),
            Cell(spans, sort=min(seeds, default=0)), Cell(str(doubts) if doubts else "–", sort=doubts),
        ))  # fmt: skip
    columns = (
        "table", "name", "scale", "cells done", "pairs in the paper's order", f"within {NEAR:g} points or better",
        "seeds", "doubts",
    )  # fmt: skip
    lead = (
        "Only runs of the published schedule are held against the paper; shorter ones show the ordering alone: of "
        f"the pairs in a row or column that the paper has {APART:g} point or more apart, how many are in its order."
    )
    return Section("At a glance", lead, (trimmed(Table(columns, tuple(rows), 3)),), part="overview")


def against_section(joined: Sequence[Joined]) -> Section | None:
    """One picture a table of the published schedule: every number against the paper's."""
    drawn = [against_paper(entry) for entry in joined if not is_part(entry, joined)]
    pictures = tuple(picture for picture in drawn if picture is not None)
    lead = (
        "A dot for every number of the published schedule that the paper has too: on the dotted line they are equal, "
        f"the band is ±{NEAR:g} points."
    )
    return Section("Ours against the papers'", lead, charts=pictures, part="against") if pictures else None


def is_part(entry: Joined, joined: Sequence[Joined]) -> bool:
    """Whether another table of the same runs has all cells of a table, and more."""
    return any(
        entry.table.folder == other.table.folder
        and entry.table.scale == other.table.scale
        and cells_of(entry) < cells_of(other)
        for other in joined
    )


def cells_of(entry: Joined) -> set[tuple[str, str]]:
    return {(number.row, number.column) for number in entry.table.numbers}


def data_section(name: str, runs: Sequence[Run], table: Published | None = None) -> Section:
    """Table and curves of the runs on one set behind no number of a published table, be it that in whose folder."""
    groups = group(runs)
    named = [(entry.label, family(entry.runs[0].recipe), entry.counted) for entry in groups]
    in_training = partial(curves.trained, is_error=False)
    charts = (
        curves.run_chart("Test accuracy", "%", named, lambda run: run.evaluations, curves.accuracy, unit=" %"),
        curves.run_chart("Training accuracy", "%", named, lambda run: run.training, in_training, unit=" %"),
        curves.run_chart("Test loss", "", named, lambda run: run.evaluations, curves.loss, log=True),
        curves.run_chart("Training loss", "", named, lambda run: run.training, curves.loss, log=True),
    )
    learned = radii_gallery([Network(entry.label, "", entry.counted[0]) for entry in groups])
    doubts = distinct(doubt for entry in groups for doubt in entry.doubts)
    return Section(
        f"Runs on {name}{'' if table is None else f', beside {table.experiment}'}",
        f"{OWN if table is None else beside(table)} The best epoch was chosen looking at the test set.",
        (group_table(groups),), tuple(chart for chart in charts if chart.series),
        remarks=tuple(f"{run.name}: {note}" for run in runs for note in run.notes),
        galleries=(learned,) if learned.charts else (), part="runs",
        doubts=gathered((entry.label, doubt) for entry in groups for doubt in entry.doubts), doubt_count=len(doubts),
        table="" if table is None else table.experiment, scale="" if table is None else table.scale,
    )  # fmt: skip


def beside(table: Published) -> str:
    return (
        f"Runs in the folder of {table.experiment} that stand behind none of its numbers: networks that others start "
        "from or are attacked with, cells that were interrupted, and runs of another scale."
    )


def every_run(runs: Sequence[Run]) -> Section | None:
    if not runs:
        return None
    cut = f"{MOST_RUNS:,} of {len(runs):,} runs." if len(runs) > MOST_RUNS else ""
    table = replace(run_table(runs[:MOST_RUNS]), caption=cut)
    return Section("Every run", tables=(table,), folded=len(runs) > FEW_RUNS, part="runs")
