"""The demo's page and table, from its runs' records and what it measured under outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hyperball.report.charts import Chart, Series
from hyperball.report.page import Page, Section
from hyperball.report.records import Runs
from hyperball.report.sections.lines import accuracy, colors, loss, run_chart
from hyperball.report.sections.radii import Network, step_charts
from hyperball.report.tables import Cell, Table, percent


@dataclass(frozen=True)
class DemoRow:
    """One network: accuracies in [0, 1] by seed, those under outliers by their share, seconds, and its runs' folder."""

    data: str
    name: str
    about: str
    folder: str
    last: tuple[float, ...]
    first_epoch: tuple[float, ...]
    outliers: dict[float, tuple[float, ...]]
    table_share: float
    seconds: tuple[float, ...]


TITLES = {"digits": "Digits, plain and decoupled", "clouds": "Point clouds and how to pool them"}
LEADS = {
    "digits": "The same three-layer CNN on scikit-learn's 8×8 digits; only the convolution and the ReLU differ.",
    "clouds": "The same small PointNet on clouds of ten procedural solids; only the pooling over the points differs.",
}
OUTLIERS = {
    "digits": "Outliers are pixels replaced by random gray; no network saw one in training.",
    "clouds": "Outliers are points replaced by random points of the unit ball; no network saw one in training.",
}
UNITS = {"digits": "pixels", "clouds": "points"}


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """Accuracy, accuracy after the first epoch, under outliers, seconds; the best of each column is marked."""
    columns = [[fmean(row.last) for row in rows], [fmean(row.first_epoch) for row in rows]]
    columns.append([fmean(row.outliers[row.table_share]) for row in rows])
    best = [max(column) for column in columns]
    cells = []
    for index, row in enumerate(rows):
        texts = [percent(values, 1) for values in (row.last, row.first_epoch, row.outliers[row.table_share])]
        marked = [Cell(text, columns[k][index] == best[k]) for k, text in enumerate(texts)]
        cells.append((Cell(row.name, remark=row.about), *marked, Cell(f"{fmean(row.seconds):.1f}")))
    head = ("", "accuracy, %", "after 1 epoch, %", f"{100 * rows[0].table_share:g} % outliers, %", "seconds")
    return Table(head, tuple(cells))


def demo_text(rows: Sequence[DemoRow]) -> str:
    """The table for a terminal, one part a data set."""
    lines = []
    for name in dict.fromkeys(row.data for row in rows):
        table = demo_table([row for row in rows if row.data == name])
        texts = [[name, *table.columns[1:]], *([cell.text for cell in row] for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines.append("")
        for first, *rest in texts:
            lines.append("  ".join([first.ljust(widths[0]), *(text.rjust(w) for text, w in zip(rest, widths[1:]))]))
    return "\n".join(lines[1:])


def demo_page(found: Runs, rows: Sequence[DemoRow]) -> Page:
    """Both sets with tables, curves, and accuracy over the share of outliers."""
    names = list(dict.fromkeys(row.data for row in rows))
    sections = tuple(demo_section(name, [row for row in rows if row.data == name], found) for name in names)
    seeds = len(rows[0].last)
    lead = (
        "A convolution multiplies length and angle; a decoupled one models them separately. Max pooling listens to one "
        "point; robust pooling asks all of them and bounds what each may say. Two small experiments, made on "
        "your machine."
    )
    spread = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    versions = [f"{k} {v}" for k, v in found.runs[0].conditions.items() if k in ("torch", "hyperball")]
    footer = (
        f"Accuracies on the test set, last iterate, {spread}. One CPU thread, "
        f"deterministic: the same numbers every time. {', '.join(versions)}."
    )
    return Page("hyperball: a first look", lead, sections, found.left_out, footer)


def demo_section(name: str, rows: Sequence[DemoRow], found: Runs) -> Section:
    names = [{f"{row.folder}/seed-{seed}" for seed in range(len(row.last))} for row in rows]  # of this time's runs
    runs = [tuple(run for run in found.runs if run.name in held) for held in names]
    groups = [(row.name, "", held) for row, held in zip(rows, runs, strict=True)]
    firsts = (Network(row.name, "", held[0]) for row, held in zip(rows, runs, strict=True) if held)
    charts = [
        run_chart("Test accuracy", "%", groups, lambda run: run.evaluations, accuracy, unit="%"),
        outlier_chart(name, rows),
        run_chart("Training loss", "", groups, lambda run: run.training, loss, log=True),
        *step_charts([network for network in firsts if network.measured]),
    ]
    lead = f"{LEADS.get(name, '')} {OUTLIERS.get(name, '')}"
    shown = tuple(chart for chart in charts if chart.series)
    return Section(TITLES.get(name, name), lead, (demo_table(rows),), shown, finding=finding(rows))


def finding(rows: Sequence[DemoRow]) -> str:
    """What the numbers say about the first network and the best of the others, after one epoch and under outliers."""
    first, *others = rows
    share = first.table_share
    strong = max(others, key=lambda row: fmean(row.outliers[share]))
    quick = max(others, key=lambda row: fmean(row.first_epoch))
    return (
        f"After one epoch: {first.name} {whole(first.first_epoch)}, {quick.name} {whole(quick.first_epoch)}. "
        f"With {100 * share:g}\N{NO-BREAK SPACE}% outliers: {first.name} from {whole(first.last)} down to "
        f"{whole(first.outliers[share])}, {strong.name} from {whole(strong.last)} to {whole(strong.outliers[share])}."
    )


def whole(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):.0f}\N{NO-BREAK SPACE}%"


def outlier_chart(name: str, rows: Sequence[DemoRow]) -> Chart:
    """Accuracy over the share of outliers in the test set."""
    series = tuple(
        Series(row.name, tuple((100 * share, 100 * fmean(values)) for share, values in row.outliers.items()), color)
        for row, color in zip(rows, colors([row.name for row in rows]), strict=True)
    )
    return Chart("Accuracy under outliers", f"% of {UNITS.get(name, 'inputs')}", "%", series, "%", y_range=(0.0, 100.0))
