"""A table in Markdown: ours beside the paper's, laid out as printed, and number by number behind a fold."""

from __future__ import annotations

from collections.abc import Sequence

from hyperball.experiments.layout import layout
from hyperball.experiments.results.comparison import Comparison, difference_of, head, order_of, row
from hyperball.experiments.results.found import Found
from hyperball.experiments.results.lengths import HEAD as LENGTHS
from hyperball.experiments.text import NOTHING, beside, seed_words, spread
from hyperball.verdicts import CHANCE, CONTRADICTION, LOST, METRICS, better, is_error


def detail(found: Found) -> str:
    """Every number that is measured, ours beside the paper's, and what they were measured under."""
    experiment = found.experiment
    if found.is_part:
        numbers = f"Its numbers are among those of {experiment.family}."
    elif found.is_attacked:
        numbers = markdown_table(*attack_rows(found))
    else:
        numbers = printed(found) or number_by_number(found)
    remarks = "".join(f"\n- {remark}" for remark in found.remarks)
    more = f"\n\nMean lengths:\n\n{markdown_table(LENGTHS, found.lengths)}" if found.lengths else ""
    return f"{above(found)}\n\n{numbers}{more}" + (f"\n{remarks}" if remarks else "")


def folded(found: Found) -> str:
    """A table behind a fold that says its scale."""
    words = f"The scale <code>{found.scale}</code>: {len(found.measured)} of {len(found.lines)} numbers"
    return fold(words, detail(found))


def fold(words: str, text: str) -> str:
    return f"<details>\n<summary>{words}</summary>\n\n{text}\n\n</details>"


def printed(found: Found) -> str:
    """Rows and columns as the paper prints them, and all numbers behind a fold; nothing where that does not fit."""
    laid = layout(cells_of(found))
    if laid is None:
        return ""
    lines = {place: found.measured[at] for place, at in laid.places.items()}
    best = {
        column: best_of(found, [line for (_, own), line in lines.items() if own == column]) for column in laid.columns
    }
    rows = [
        (row, *(printed_cell(lines.get((row, column)), best[column]) for column in laid.columns)) for row in laid.rows
    ]
    signs = "the paper's in parentheses, " if any(line.published is not None for line in found.measured) else ""
    metric = METRICS.get(found.experiment.metric, f"{found.experiment.metric}, %")
    table = f"{metric}, {signs}the best of a column in bold:\n\n{markdown_table(('', *laid.columns), rows)}"
    words = f"Number by number: {len(found.measured)} with best epochs, differences and seeds"
    return f"{table}\n\n{fold(words, number_by_number(found))}"


def cells_of(found: Found) -> list[tuple[str, str, str]]:
    """Row, column and condition of every number that is measured."""
    known = {(entry.row, entry.column): (entry.row, entry.column, "") for entry in found.experiment.entries}
    for entry in found.experiment.entries:
        names = {(entry.row, f"{entry.column}, {name}"): (entry.row, entry.column, name) for name in entry.conditions}
        known |= names
    return [known[line.row, line.column] for line in found.measured]


def best_of(found: Found, lines: Sequence[Comparison]) -> float | None:
    """The best mean of a column, where there is a choice; a row whose networks did not all converge is none."""
    means = [line.mean for line in lines if line.mean is not None and not line.diverged]
    return (min if is_error(found.experiment.metric) else max)(means) if len(lines) > 1 and means else None


def printed_cell(line: Comparison | None, best: float | None) -> str:
    """Ours over seeds, bold where it is the best of its column, and the paper's in parentheses."""
    if line is None:
        return ""
    ours = spread(line.values, len(line.diverged))
    ours = f"**{ours}**" if line.mean is not None and line.mean == best and not line.diverged else ours
    return ours if line.published is None else f"{ours} ({line.published})"


def number_by_number(found: Found) -> str:
    """One row a number, with best epoch, difference, seeds and further metrics."""
    rows = [row(line, difference_words(found, line)) for line in found.measured]
    return markdown_table(head(found.experiment), rows)


def above(found: Found) -> str:
    """What to know before reading a table: the scale, how much is measured, signs, and what was left out."""
    experiment, lines = found.experiment, found.measured
    seeds = (len(line.values) + len(line.diverged) for line in lines)
    said = [f"Scale `{found.scale}`: {experiment.words(found.scale)}"]
    said += [", ".join(filter(None, (f"{len(lines)} of {len(found.lines)} numbers", seed_words(seeds))))]
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
        return NOTHING
    if line in found.beside and found.verdict(line) == "contradicts":
        return "contradicts"
    return difference_of(line)


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
        shown = [NOTHING if line is None else attack_cell(line, count) for line in (clean, *cells)]
        rows.append((entry.row, entry.column, *shown, str(count)))
    return ("", "training", "clean", *names, "seeds"), rows


def attack_cell(line: Comparison, seeds: int) -> str:
    paper = float(line.published) if isinstance(line.published, int | float) else None
    return beside(line.values, paper, seeds, len(line.diverged))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
