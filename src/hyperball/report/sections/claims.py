"""What the papers say and what was found, in a sentence each: how a page about their tables begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hyperball.experiments.claims import VERDICTS, Claim, by_paper
from hyperball.report.kinds import Claims
from hyperball.report.page import Section, Statement
from hyperball.report.sections.join import Joined

SIGNS = {"holds": "✓", "in part": "◐", "does not hold": "✗", "not decided": "?"}


def claims_section(records: Sequence[Claims], joined: Sequence[Joined]) -> Section | None:
    """One statement a claim, with a link to the table that it stands on."""
    claims = [claim for record in records for claim in record.claims]
    if not claims:
        return None
    counts = Counter(claim.verdict for claim in claims)
    told = ", ".join(f"{counts[word]} {SIGNS[word]} {word}" for word in VERDICTS if counts[word])
    lead = f"What the papers say, and what was found here: {told}."
    lead = " ".join([lead, *(record.words for record in records if record.words)])
    ordered = [claim for held in by_paper(claims).values() for claim in held]
    return Section("What holds", lead, statements=tuple(statement(claim, joined) for claim in ordered), part="claims")


def statement(claim: Claim, joined: Sequence[Joined]) -> Statement:
    held = [entry for entry in joined if (entry.table.experiment, entry.table.scale) == (claim.table, claim.scale)]
    lines = [line for entry in held for line in entry.one_a_cell if line.is_done and line.runs]
    seeds = [line.seeds for line in lines if claim.stands_on(line.number.row, line.number.column)]
    return Statement(
        claim.claim, SIGNS[claim.verdict], claim.verdict, claim.found, claim.by(seeds), claim.table, claim.scale,
        claim.paper,
    )  # fmt: skip
