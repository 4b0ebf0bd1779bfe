"""Tables of texts, and runs gathered over their seeds."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyperball.experiments.text import SCATTERED
from hyperball.experiments.text import spread as over_seeds
from hyperball.report.doubts import Doubt
from hyperball.report.drawing.svg import Safe
from hyperball.report.files import clipped, flat
from hyperball.report.records import UNFINISHED, Run

MISSING = "–"
BASELINE = "baseline"
PLAIN = ("baseline", "plain", "none", "nn.conv2d", "nn.linear")
FAMILIES = (
    "sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron", "piecewise", "max", "quadratic", "huber",
    "pseudo_huber", "welsch", "truncated_quadratic", "absolute", "median", "l1_ball", "l1_sphere", "l2_ball",
    "l2_sphere", "linf_ball", "linf_sphere",
)  # fmt: skip
SAME = {"mean": "quadratic"}  # operators of two names
USUAL, SETS = ("max", "quadratic"), ("pointnet", "points")  # poolings that plain networks have, but for those of sets
OF_A_SEED = ("seed", "start.weights")  # the weights that a run began with are those of its own seed
LOGGED, CHOOSES = "log.", "log.evaluate_every"  # of what a run logs, among how many epochs the best is chosen


@dataclass(frozen=True)
class Cell:
    """A text, whether it is the best of its column, and a remark below it.

    `sort` is the number that a column is sorted by, `tip` what hovering says, `tone` a word that colors the text,
    `plot` a small drawing in place of a text, and `doubted` puts a warning sign beside it.
    """

    text: str
    best: bool = False
    remark: str = ""
    sort: float | None = None
    tip: str = ""
    tone: str = ""
    plot: Safe | None = None
    doubted: bool = False

    @property
    def parts(self) -> tuple[str, str]:
        """A number over seeds, and what is told of them: the seeds themselves and how many have no number."""
        at = min((found for mark in ("{", "[") if (found := self.text.find(f" {mark}")) > 0), default=len(self.text))
        return self.text[:at], self.text[at + 1 :]


@dataclass(frozen=True)
class Table:
    """Columns and rows; all columns but the first `texts` hold numbers.

    `operators` are what the page's filter knows the rows by, `table` (one a line) and `scale` what it knows all of
    them by; `folded` is a heading behind which the table is hidden.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    texts: int = 1
    caption: str = ""
    operators: tuple[str, ...] = ()
    folded: str = ""
    heading: str = ""
    table: str = ""
    scale: str = ""

    @property
    def told(self) -> str:
        """The caption, and what brackets and braces mean where there are any."""
        marks = {mark for row in self.rows for cell in row[self.texts :] for mark in cell.parts[1]}
        words = (
            ("{", f"{{…}}: each seed, where their standard deviation is above {SCATTERED:g}"),
            ("[", "[1 of 3]: so many of the networks have a number"),
        )
        said = "; ".join(text for mark, text in words if mark in marks)
        return f"{self.caption} {said}.".strip() if said else self.caption


@dataclass(frozen=True)
class Group:
    """Runs whose recipes differ in the seed alone, one a seed."""

    label: str
    runs: tuple[Run, ...]
    doubts: tuple[Doubt, ...] = ()

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose numbers are averaged: the finished ones, or all where none is."""
        return tuple(run for run in self.runs if run.is_finished) or self.runs

    @property
    def lost(self) -> tuple[str, ...]:
        """The seeds whose networks did not converge."""
        return tuple(clipped(run.seed) for run in self.runs if run.diverged)


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs of one recipe apart from the seed, labelled by what the recipes differ in."""
    gathered: dict[str, list[Run]] = {}
    for run in runs:
        gathered.setdefault(protocol(run.recipe), []).append(run)
    trees = [flat(members[0].recipe) for members in gathered.values()]
    keys = differing(trees)
    return [
        Group(label(tree, keys), *one_a_seed(members)) for tree, members in zip(trees, gathered.values(), strict=True)
    ]


def one_a_seed(runs: Sequence[Run]) -> tuple[tuple[Run, ...], tuple[Doubt, ...]]:
    """The first run of every seed, a finished one before others, and doubts about the seeds whose runs disagree."""
    seeds: dict[str, list[Run]] = {}
    for run in runs:
        seeds.setdefault(clipped(run.seed), []).append(run)
    kept, doubts = [], []
    for seed, held in seeds.items():
        first, *others = sorted(held, key=lambda run: (not run.is_finished, not run.diverged, -run.tested))
        kept.append(first)
        for other in others:
            if other.status != UNFINISHED and other.results != first.results:
                said = f"{other.name} is another run of this seed, {instead(other, first)}, and is not counted"
                doubts.append(Doubt(first.name, said, seed))
    return tuple(kept), tuple(doubts)


def instead(other: Run, first: Run) -> str:
    """How a run differs from a finished one."""
    if other.diverged:
        return "which did not converge"
    theirs, ours = (f"{100 * run.results['last']['top1']:.2f}" for run in (other, first))
    return f"with an accuracy of {theirs} % instead of {ours} %"


def protocol(recipe: dict[str, Any]) -> str:
    """A recipe without its seed and what it logs, as a text: runs of one text may be averaged."""
    rest = {key: value for key, value in flat(recipe).items() if counts(key)}
    return json.dumps(rest, sort_keys=True, default=str)


def counts(key: str) -> bool:
    """Whether runs that differ in a field of their recipes are different ones."""
    return key == CHOOSES or (key not in OF_A_SEED and not key.startswith(LOGGED))


def differing(trees: Sequence[dict[str, Any]]) -> list[str]:
    """Dotted names, of those that count, that do not have one value in all trees."""
    names = {name: None for tree in trees for name in tree if counts(name)}
    return [name for name in names if len({json.dumps(tree.get(name), default=str) for tree in trees}) > 1]


def operator(tree: dict[str, Any]) -> str:
    magnitude = tree.get("model.magnitude")
    return "plain" if magnitude is None else clipped(f"{magnitude} + {tree.get('model.angular', 'cosine')}")


def family(recipe: dict[str, Any]) -> str:
    """What the page's filter calls a recipe: by its magnitude, else its pooling or projection, else the baseline.

    Nothing where there is no recipe: a network of which nothing is known is no baseline.
    """
    tree = flat(recipe)
    if not tree:
        return ""
    for name in ("model.magnitude", "model.pool", "model.projection"):
        found = family_of(tree[name]) if isinstance(tree.get(name), str) else BASELINE
        is_usual = name == "model.pool" and found in USUAL and tree.get("model.name") not in SETS
        if found != BASELINE and not is_usual:
            return found
    return BASELINE


def family_of(text: str) -> str:
    """The known operator that a text begins with, or nothing; all that others are compared with is the baseline."""
    word = re.split(r"[ ,(+]", text.strip().lower(), maxsplit=1)[0]
    word = SAME.get(word, word)
    return BASELINE if word in PLAIN else word if word in FAMILIES else ""


def label(tree: dict[str, Any], keys: Sequence[str]) -> str:
    """The operator if it differs, and every other field that does."""
    parts = [operator(tree)] if not keys or {"model.magnitude", "model.angular"} & set(keys) else []
    for key in keys:
        if key not in ("model.magnitude", "model.angular"):
            value = tree.get(key)
            parts += [] if value is None else [f"{key.rpartition('.')[2]} {value}"]
    return clipped(", ".join(parts)) or "default"


def percent(values: Sequence[float], digits: int = 2) -> str:
    return spread([100 * value for value in values], digits)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """mean ± standard deviation, or the one value there is."""
    if not values:
        return MISSING
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def ending(values: Sequence[float], lost: int = 0, networks: int = 0) -> str:
    """mean ± standard deviation in percent as all tables of the laboratory tell it, and where seeds lack a number.

    "24.10 ± 0.20 (1 N/C)" or "N/C" alone; "12.67 ± 21.94 {0.0, 0.0, 38.0}" where seeds are far apart; "38.11 [1 of 3]"
    where `networks` are more than have one.
    """
    ended = len(values) + lost
    return over_seeds(values, lost) + (f" [{ended} of {networks}]" if 0 < ended < networks else "")


def trimmed(table: Table, missing: int = 0) -> Table:
    """A table without those columns and rows of numbers that are empty; the caption says so, and what is missing."""
    hollow = [all(map(is_hollow, row[table.texts :])) for row in table.rows]
    rows = [row for row, empty in zip(table.rows, hollow, strict=True) if not empty]
    if not rows:
        return table
    kept = [k for k in range(len(table.columns)) if k < table.texts or not all(is_hollow(row[k]) for row in rows)]
    counts = ((sum(hollow), "row"), (len(table.columns) - len(kept), "column"))
    hidden = [f"{count} empty {word}{'' if count == 1 else 's'}" for count, word in counts if count]
    said = [f"{missing:,} number{' is' if missing == 1 else 's are'} missing"] if missing else []
    said += [f"not shown: {' and '.join(hidden)}"] if hidden and missing else []
    return replace(
        table,
        columns=tuple(table.columns[k] for k in kept),
        rows=tuple(tuple(row[k] for k in kept) for row in rows),
        operators=tuple(name for name, empty in zip(table.operators, hollow) if not empty),
        caption=f"{table.caption} {'; '.join(said).capitalize()}.".strip() if said else table.caption,
    )


def is_hollow(cell: Cell) -> bool:
    return cell.plot is None and cell.text in (MISSING, "")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def result(runs: Sequence[Run], which: str, name: str) -> list[float]:
    return [run.results[which][name] for run in runs if name in run.results.get(which, {})]


COLUMNS = ("", "seeds", "accuracy, %", "best epoch, %", "1st epoch, %", "loss", "calibration error, %", "time")


def accuracies(runs: Sequence[Run]) -> list[float]:
    """The accuracies of the last iterates, in percent."""
    return [100 * value for value in result(runs, "last", "top1")]


def group_table(groups: Sequence[Group]) -> Table:
    """One row a group; the highest mean accuracy of the last iterate that is not in doubt is marked."""
    doubted = [bool(entry.doubts) or any(run.nonfinite for run in entry.counted) for entry in groups]
    means = [statistics.fmean(found) if (found := result(g.counted, "last", "top1")) else None for g in groups]
    sure = [mean for mean, odd in zip(means, doubted, strict=True) if mean is not None and not odd]
    best = max(sure, default=None)
    rows = []
    for entry, mean, odd in zip(groups, means, doubted, strict=True):
        runs = entry.counted
        seconds = [run.timing["seconds"] for run in runs if "seconds" in run.timing]
        time = statistics.fmean(seconds) if seconds else None
        marked = len(groups) > 1 and mean is not None and mean == best and not odd
        told = "\n".join([where(runs), *(f"doubt: {doubt.sentence}" for doubt in entry.doubts)])
        rows.append((
            Cell(entry.label, remark=warning(entry)), Cell(str(len(runs)), tip=where(runs)),
            Cell(ending(accuracies(runs), len(entry.lost)), marked, tip=told, doubted=odd),
            Cell(percent(result(runs, "best", "top1"))), Cell(percent(result(runs, "first_epoch", "top1"))),
            Cell(spread(result(runs, "last", "loss"), 4)), Cell(percent(result(runs, "last", "ece"))),
            Cell(duration(time), sort=time),
        ))  # fmt: skip
    return trimmed(
        Table(COLUMNS, tuple(rows), operators=tuple(family(entry.runs[0].recipe) for entry in groups), texts=1)
    )


def where(runs: Sequence[Run]) -> str:
    """Seeds and conditions of runs, for hovering: one line each, several values where runs differ."""
    lines = [f"seeds {', '.join(clipped(run.seed) for run in runs)}"]
    for name in ("device", "torch", "hyperball", "commit", "engine"):
        held = dict.fromkeys(run.conditions[name] for run in runs if name in run.conditions)
        lines += [f"{name} {' and '.join(held)}"] if held else []
    lines += [f"seed {clipped(run.seed)}: {note}" for run in runs[:3] for note in run.notes]
    return "\n".join(lines)


def warning(entry: Group) -> str:
    """How many runs of a group are unfinished, did not converge or are not finite, or nothing."""
    counts = {
        "unfinished": sum(run.status == UNFINISHED for run in entry.runs),
        "did not converge": len(entry.lost),
        "not finite": sum(run.nonfinite for run in entry.runs),
    }
    return ", ".join(f"{count} of {len(entry.runs)} {word}" for word, count in counts.items() if count)


def run_table(runs: Sequence[Run]) -> Table:
    """One row a run, with its conditions."""
    columns = ("run", "model", "operator", "device", "engine", "seed", "epochs", "accuracy, %", "time", "samples/s")
    rows = []
    for run in runs:
        last = run.results.get("last", {})
        epoch = last.get("epoch", run.evaluations[-1].epoch if run.evaluations else None)
        name = f"{run.name} (not finite)" if run.nonfinite else run.name
        texts = (
            name, clipped(run.field("model.name", MISSING)), operator(flat(run.recipe)),
            run.conditions.get("device", MISSING), run.conditions.get("engine", run.status),
            clipped(run.recipe.get("seed", MISSING)), MISSING if epoch is None else f"{epoch:g}",
            ending(accuracies([run]), int(run.diverged)),
        )  # fmt: skip
        seconds, speed = run.timing.get("seconds"), run.timing.get("images_per_second")
        rows.append((
            *map(Cell, texts), Cell(duration(seconds), sort=seconds),
            Cell(MISSING if speed is None else f"{speed:,.0f}", sort=speed),
        ))  # fmt: skip
    return Table(columns, tuple(rows), texts=5, operators=tuple(family(run.recipe) for run in runs))
