"""A published table: ours beside the paper's, cell by cell, with spread, doubts and conditions, and its curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from hyperball.experiments.headings import heading
from hyperball.experiments.layout import layout
from hyperball.report.doubts import Doubt, distinct, gathered
from hyperball.report.drawing.axes import Axis
from hyperball.report.drawing.svg import Safe, element, svg
from hyperball.report.files import clipped
from hyperball.report.kinds import Number, Published
from hyperball.report.page import Gallery, Section
from hyperball.report.sections.join import Joined, Line
from hyperball.report.sections.table_curves import convergence, outliers, radii
from hyperball.report.tables import MISSING, Cell, Table, ending, trimmed, where
from hyperball.verdicts import (
    AGREES,
    CONTRADICTION,
    LOST,
    METRICS,
    NEAR,
    better,
    in_order,
    is_error,
    order_words,
    verdict,
)
from hyperball.verdicts import compares as comparable

MOST_EXTRA = 10
PLOT_WIDTH, PLOT_HEIGHT = 150.0, 18.0


def published_section(joined: Joined, curves_too: bool = True, pictures: Sequence[Gallery] = ()) -> Section:
    """The table as published and at length, then curves and pictures."""
    table, lines = joined.table, joined.lines
    tables = [detail_table(table, lines)]
    overview = matrix(joined)
    if overview is not None:
        done = sum(line.is_done for line in lines)
        tables = [overview, replace(tables[0], folded=f"Number by number: {done} with best epoch and seeds")]
    words = f"Protocol: {table.protocol}." if table.protocol else ""
    how = ", last iterate, mean ± standard deviation over seeds" if is_share(table.metric) else ""
    lead = f"{table.source}. {metric_words(table.metric)}{how}. {words}"
    galleries = [*([convergence(joined), outliers(joined), radii(joined)] if curves_too else []), *pictures]
    said = [(f"{line.number.row}, {joined.split(line.number.column)[0]}", d) for line in lines for d in line.doubts]
    return Section(
        heading(table.title, table.source), lead, tuple(tables), remarks=tuple(table.notes), doubts=gathered(said),
        doubt_count=len(doubts_of(lines)),
        finding=finding(joined), badges=(table.experiment, f"scale: {table.scale}"),
        table=table.experiment, scale=table.scale, galleries=tuple(entry for entry in galleries if entry.charts),
    )  # fmt: skip


def doubts_of(lines: Sequence[Line]) -> tuple[Doubt, ...]:
    """The doubts about a table, each once, although one about a run concerns all its numbers."""
    return distinct(doubt for line in lines for doubt in line.doubts)


def metric_words(metric: str) -> str:
    return METRICS.get(metric, f"{clipped(metric)}, %" if is_share(metric) else clipped(metric))


def is_share(metric: str) -> bool:
    """Whether a metric is one of training's, in percent; others name a unit of their own, such as milliseconds."""
    return metric in METRICS or metric.startswith(("top", "map", "ece"))


def finding(joined: Joined) -> str:
    """How many cells there are, and how near to the paper's."""
    table, lines = joined.table, joined.one_a_cell
    done = [line for line in lines if line.is_done]
    if not any(line.is_done for line in joined.lines):
        return "No cell of this table has been run yet."
    if not done:
        return "Its cells hold runs of several recipes each, none with the table's own number."
    known = [line for line in done if compares(line)]
    lost = sum(bool(line.lost) for line in done)
    also = f", {lost} with networks that did not converge" if lost else ""
    said = f"{len(done)} of {len(lines)} cells have numbers{also}"
    if not is_share(table.metric):
        return f"{said}; times of other hardware than the paper's, so only ratios can be compared."
    if not known:
        return f"{said}; the paper has none of them."
    if table.scale != "paper":
        order = order_words(pairs_in_order(known))
        order = f": {order}" if order else ""
        return (
            f"{said}; differences to the paper are those of a shorter schedule, so only the ordering can be "
            f"compared{order}."
        )
    tones = [tone(table, line) for line in known]
    near, against = sum(word in AGREES for word in tones), tones.count("contradicts")
    also = f"; {against} contradict it: {CONTRADICTION}" if against else ""
    return f"{said}; {near} of {len(known)} are within {NEAR:g} points of the paper or better{also}."


def pairs_in_order(lines: Sequence[Line]) -> tuple[int, int]:
    """Of all pairs in a row or column that the paper has a point or more apart: how many ours have so too."""
    return in_order([
        (line.number.row, line.number.column, line.mean, line.mean - line.difference)
        for line in lines
        if line.mean is not None and line.difference is not None
    ])  # fmt: skip


def compares(line: Line) -> bool:
    """Whether ours can be held against the paper's: two numbers, or a network that did not converge."""
    return comparable(line.number.published, line.difference, bool(line.lost))


def tone(table: Published, line: Line) -> str:
    """better, near, worse or "contradicts"; nothing at another scale, where that would be unfair."""
    if not compares(line) or table.scale != "paper" or not is_share(table.metric):
        return ""
    return verdict(table.metric, line.number.published, line.difference, bool(line.lost))


def matrix(joined: Joined) -> Table | None:
    """Rows and columns as the paper prints them; None where they would not fit or a table has a cell twice.

    A cell of several recipes has the table's own number; the others stand in the long table.
    """
    table, lines = joined.table, joined.one_a_cell
    laid = layout([(line.number.row, *joined.split(line.number.column)) for line in lines])
    if laid is None:
        return None
    placed = {place: lines[at] for place, at in laid.places.items()}
    best = {
        column: best_of(table, [line for (_, own), line in placed.items() if own == column]) for column in laid.columns
    }
    cells, operators = [], []
    for row in laid.rows:
        held = [placed.get((row, column)) for column in laid.columns]
        first = next(line for line in held if line is not None)
        ours = [cell(table, line, best[column]) for line, column in zip(held, laid.columns, strict=True)]
        cells.append((Cell(row, remark=kind_of(table, first)), *ours))
        operators.append(first.operator)
    caption = matrix_caption(table, lines)
    missing = sum(not line.is_done for line in lines)
    return trimmed(Table(("", *laid.columns), tuple(cells), caption=caption, operators=tuple(operators)), missing)


def matrix_caption(table: Published, lines: Sequence[Line]) -> str:
    seeds = sorted({line.seeds for line in lines if line.is_done})
    counted = f"n = {seeds[0]}" if len(seeds) == 1 else f"n = {seeds[0]} to {seeds[-1]}" if seeds else "no runs yet"
    known = [line for line in lines if line.number.published is not None]
    compared = is_share(table.metric) and any(line.is_done for line in known)
    also = f" and ours less the paper's ({better(table.metric)})" if compared else ""
    paper_too = f"; below each the paper's number{also}" if known else ""
    word = f"; {LOST}: did not converge" if any(line.lost or line.number.published == LOST for line in lines) else ""
    return f"{metric_words(table.metric)}, {counted}{paper_too}{word}."


def best_of(table: Published, lines: Sequence[Line]) -> float | None:
    """The best mean of a column that is not in doubt; None without a choice, or without better and worse."""
    done = [line for line in lines if line.is_done]
    means = [line.mean for line in done if line.mean is not None and not line.doubts and not line.lost]
    if len(done) < 2 or not means or not is_share(table.metric):
        return None
    return (min if is_error(table.metric) else max)(means)


def kind_of(table: Published, line: Line) -> str:
    """What a row is that the paper does not have; nothing in a table of which it has none."""
    if not any(number.kind == "published" for number in table.numbers):
        return ""
    words = {"published": "", "control": "a control that the paper lacks", "ours": "an operator of ours"}
    told = "(ours)" in line.number.row or "(control)" in line.number.row
    return "" if told else words.get(line.number.kind, line.number.kind)


def cell(table: Published, line: Line | None, best: float | None) -> Cell:
    if line is None:
        return Cell("")
    gap = "" if line.difference is None or not is_share(table.metric) else f" ({signed(line.difference)})"
    known = line.number.published is not None
    word = tone(table, line)
    gap = " (contradicts)" if word == "contradicts" else gap
    remark = f"paper\N{NO-BREAK SPACE}{paper(line.number)}{gap}" if known else ""
    marked = best is not None and line.mean == best and not line.doubts and not line.lost
    return Cell(line.text, marked, remark, line.mean, tip(table, line), word, doubted=bool(line.doubts))


def paper(number: Number) -> str:
    return MISSING if number.published is None else str(number.published)


def difference(gap: float | None, word: str) -> str:
    """Ours less the paper's, or that it contradicts a network that the paper could not train."""
    return "contradicts" if word == "contradicts" else MISSING if gap is None else signed(gap)


def signed(value: float) -> str:
    text = f"{value:+.2f}".replace("-", "−")
    return "±0.00" if text[1:] == "0.00" else text


def tip(table: Published, line: Line) -> str:
    """Everything behind a cell's number."""
    number = line.number
    parts = [f"{number.row}, {number.column}", f"{metric_words(table.metric)} at scale {table.scale}"]
    if line.values:
        parts.append(f"last iterate {', '.join(f'{value:.2f}' for value in line.values)} (n = {len(line.values)})")
    if line.lost:
        parts.append(f"did not converge ({LOST}): seed {', '.join(line.lost)}")
    if line.best:
        parts.append(f"best epoch, chosen on the test set: {', '.join(f'{value:.2f}' for value in line.best)}")
    parts.append(f"paper {paper(number)}")
    parts += [f"{key} {value}" for key, value in number.facts.items()]
    parts += [where(line.runs)] if line.runs else without_runs(line)
    parts += [f"doubt: {doubt.sentence}" for doubt in line.doubts]
    return "\n".join(parts)


def without_runs(line: Line) -> list[str]:
    """What to say of a number whose runs are not in the folder."""
    if not line.is_done:
        return ["not run yet"]
    return [f"seeds {', '.join(line.number.seeds)}"] if line.number.seeds else []


def detail_table(table: Published, lines: Sequence[Line]) -> Table:
    """One row a number: ours, the paper's, the difference, a picture of the three, the best epoch, seeds."""
    axis = plot_axis(lines)
    more = list(dict.fromkeys(key for line in lines for key in line.number.extra))[:MOST_EXTRA]
    rows = []
    for line in lines:
        number, told = line.number, tip(table, line)
        known = number.published if isinstance(number.published, int | float) else None
        gap = line.difference
        rows.append((
            Cell(number.row, remark=line.variant or kind_of(table, line)), Cell(number.column),
            Cell(line.text, sort=line.mean, tip=told), Cell(paper(number), sort=known),
            Cell(difference(gap, tone(table, line)), sort=gap, tone=tone(table, line)),
            Cell("", sort=gap, plot=plot(line, axis) if axis and (line.values or known is not None) else None),
            Cell(ending(line.best, 0, len(line.values)), sort=statistics.fmean(line.best) if line.best else None),
            Cell(str(line.seeds) if line.is_done else MISSING, sort=line.seeds),
            doubt_cell(line),
            *(extra_cell(number.extra.get(key)) for key in more),
        ))  # fmt: skip
    columns = (
        "row",
        "column",
        "ours",
        "paper",
        "difference",
        "○ paper  ● ours",
        "best epoch",
        "seeds",
        "doubts",
        *more,
    )
    chosen = ", last iterate; the best epoch was chosen looking at the test set" if is_share(table.metric) else ""
    sign = f"; difference: ours less the paper's, {better(table.metric)}" if is_share(table.metric) else ""
    caption = f"{metric_words(table.metric)}{chosen}{sign}."
    whole = Table(columns, tuple(rows), 2, caption, tuple(line.operator for line in lines))
    return trimmed(whole, sum(not line.is_done for line in lines))


def doubt_cell(line: Line) -> Cell:
    count = len(line.doubts)
    told = "\n".join(doubt.sentence for doubt in line.doubts)
    return Cell(str(count) if count else MISSING, tip=told, sort=count, tone="worse" if count else "")


def extra_cell(value: float | None) -> Cell:
    return Cell(MISSING) if value is None else Cell(f"{value:,.2f}", sort=value)


def plot_axis(lines: Sequence[Line]) -> Axis | None:
    """One scale for all small pictures of a table."""
    known = [float(line.number.published) for line in lines if isinstance(line.number.published, int | float)]
    values = [*known, *(value for line in lines for value in line.values)]
    if len(values) < 2 or min(values) == max(values):
        return None
    return Axis(min(values), max(values), 6, PLOT_WIDTH - 6)


def plot(line: Line, axis: Axis) -> Safe:
    """The paper's number as a ring, ours as a dot with its standard deviation."""
    middle = PLOT_HEIGHT / 2
    parts = [element("path", class_="grid", d=f"M{axis.start:g} {middle:g}H{axis.end:g}")]
    known, mean = line.number.published, line.mean
    if isinstance(known, int | float) and mean is not None:
        parts.append(element("path", class_="gap", d=f"M{axis(float(known)):g} {middle:g}H{axis(mean):g}"))
    if mean is not None and len(line.values) > 1:
        width = statistics.stdev(line.values)
        ends = f"M{axis(mean - width):g} {middle:g}H{axis(mean + width):g}"
        parts.append(element("path", class_="whisker", d=ends))
    if isinstance(known, int | float):
        parts.append(element("circle", class_="paper", cx=axis(float(known)), cy=middle, r=4))
    if mean is not None:
        parts.append(element("circle", class_="ours", cx=axis(mean), cy=middle, r=3.6))
    label = f"paper {paper(line.number)}, ours {line.text}"
    return svg(PLOT_WIDTH, PLOT_HEIGHT, *parts, label=label, class_="inline")
