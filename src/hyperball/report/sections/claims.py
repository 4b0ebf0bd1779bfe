"""What the papers say and what was found, in a sentence each: how a page about their tables begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hyperball.experiments.claims import VERDICTS, Claim
from hyperball.report.kinds import Claims
from hyperball.report.page import Section, Statement
from hyperball.report.sections.join import Joined

SIGNS = {"holds": "✓", "in part": "◐", "does not hold": "✗", "not decided": "…"}


def claims_section(records: Sequence[Claims], joined: Sequence[Joined]) -> Section | None:
    """One statement a claim, with a link to the table that it stands on."""
    claims = [claim for record in records for claim in record.claims]
    if not claims:
        return None
    counts = Counter(claim.verdict for claim in claims)
    told = ", ".join(f"{counts[word]} {SIGNS[word]} {word}" for word in VERDICTS if counts[word])
    lead = f"What the papers say, and what was found here: {told}."
    return Section("What holds", lead, statements=tuple(statement(claim, joined) for claim in claims), part="claims")


def statement(claim: Claim, joined: Sequence[Joined]) -> Statement:
    held = [entry for entry in joined if (entry.table.experiment, entry.table.scale) == (claim.table, claim.scale)]
    seeds = [line.seeds for entry in held for line in entry.one_a_cell if line.is_done and line.runs]
    return Statement(
        claim.claim, SIGNS[claim.verdict], claim.verdict, claim.found, claim.by(seeds), claim.table, claim.scale
    )
