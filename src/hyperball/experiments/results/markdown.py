"""Tables of Markdown from a folder of records, and files whose marked parts they fill.

A marked part is what stands between `<!-- results: NAME -->` and `<!-- /results -->`; NAME is a table's name, or
"summary" for one line a table, "claims" for what papers say with a verdict each.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hyperball.experiments.claims import FILE, VERDICTS, Claim, by_paper, read_claims, read_words
from hyperball.experiments.headings import heading
from hyperball.experiments.records.broken import leave_out
from hyperball.experiments.results.collecting import TABLE
from hyperball.experiments.results.comparison import pairs_in_order
from hyperball.experiments.results.details import detail, folded, markdown_table
from hyperball.experiments.results.evidence import outdated
from hyperball.experiments.results.found import Found, scales_of
from hyperball.experiments.runtime import head_of, row_of
from hyperball.experiments.scales import SCALES
from hyperball.experiments.table import Experiment
from hyperball.experiments.tables import TABLES
from hyperball.files import FileError, read_tree
from hyperball.rows import nearest
from hyperball.verdicts import NEAR, gain

SUMMARY, CLAIMS = "summary", "claims"
NOTHING = "No record yet."
BEGIN, END = "<!-- results:", "<!-- /results -->"
MARKED = re.compile(rf"({BEGIN} (?P<name>[\w-]+) -->\n)(?:(?!{BEGIN}).)*?({END})", re.DOTALL)


class MarkerError(ValueError):
    """Markers that do not stand in pairs, name no table, or none."""


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
    known = (SUMMARY, CLAIMS, *TABLES)
    if name not in known:
        raise MarkerError(f"unknown table {name!r}; {nearest(name, known)}")


def made(name: str, results: Path) -> str:
    check_name(name)
    if name == SUMMARY:
        return summary(results)
    if name == CLAIMS:
        return claims_of(results)
    if not isinstance(TABLES[name](), Experiment):
        return "\n\n".join(times_of(name, results)) or NOTHING
    found = list(scales_of(name, results))
    return "\n\n".join([*map(detail, found[:1]), *map(folded, found[1:])]) or NOTHING


def summary(results: Path) -> str:
    """One line a table at its longest scale: how much of it is measured, and how much of that agrees with the paper.

    A table whose cells are all another's has no line of its own.
    """
    longest = (next((found for found in scales_of(name, results) if found.measured), None) for name in TABLES)
    rows = [summary_row(found) for found in longest if found is not None and not found.is_part]
    if not rows:
        return NOTHING
    head = (
        "table", "scale", "numbers", "seeds", "pairs in the paper's order", f"within {NEAR:g} points or better",
        "median difference, + is better", "largest",
    )  # fmt: skip
    return "\n\n".join(filter(None, (verdicts(results), markdown_table(head, rows))))


def verdicts(results: Path) -> str:
    """How many of the papers' claims hold; nothing where none are kept."""
    held = claims_in(results)
    if held is None:
        return ""
    counts = Counter(claim.verdict for claim in held[0])
    told = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    return f"Claims of the papers, {len(held[0])}: {told}."


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


def claims_of(results: Path) -> str:
    """A table a paper, a row a claim: what was found, where more is said, and what the verdict stands on."""
    read = claims_in(results)
    if read is None:
        return NOTHING
    claims, words = read
    for at, claim in enumerate(claims, 1):
        for said in outdated(claim, results):
            print(f"{results / FILE}: claim {at} must be read anew: {said}", file=sys.stderr)
    found = {
        name: list(scales_of(name, results))
        for name in dict.fromkeys(claim.table for claim in claims)
        if name in TABLES
    }
    parts = [words] if words else []
    for paper, held in by_paper(claims).items():
        parts += [f"**{paper}**"] if paper else []
        parts.append(claim_table(held, found))
    return "\n\n".join(parts).replace("<", "&lt;")


def claims_in(results: Path) -> tuple[Sequence[Claim], str] | None:
    """The claims of a folder of results and the words that explain theirs; a file that is broken is named."""
    path = results / FILE
    if not path.exists():
        return None
    try:
        tree = read_tree(path)
        return read_claims(tree), read_words(tree)
    except (FileError, ValueError) as error:
        leave_out(path, str(error))
        return None


def claim_table(claims: Sequence[Claim], found: Mapping[str, Sequence[Found]]) -> str:
    rows = [
        (claim.claim + (f" ([{claim.see[0]}]({claim.see[1]}))" if claim.see else ""), f"**{claim.verdict}**",
         claim.found, claim.by(seeds_behind(claim, found.get(claim.table, ()))))
        for claim in claims
    ]  # fmt: skip
    return markdown_table(("the paper says", "", "found here", "by"), rows)


def seeds_behind(claim: Claim, found: Sequence[Found]) -> list[int]:
    """Over how many seeds each number that a claim tells was measured; where it does not say which, its table's."""
    measured = [line for entry in found if entry.scale == claim.scale for line in entry.measured]
    lines = [line for line in measured if claim.stands_on(line.row, line.column)]
    return [len(line.values) + len(line.diverged) for line in lines]


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
