"""What papers say and what was found: the claims of a results folder, written by hand, one verdict each.

{"kind": "claims", "words": "an operator is a magnitude times an angular function", "claims": [
 {"paper": "Liu et al., CVPR 2018", "claim": "operators train without BatchNorm", "verdict": "holds", "found": "30.7 %",
  "table": "dcnet-table2", "scale": "paper", "see": ["table 2", "#table-2"], "how": "whole schedule",
  "numbers": {"30.7": {"rows": ["tanh"], "columns": ["cosine"]}}}]}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from hyperball.experiments.text import seed_words

Standing = Literal["holds", "in part", "does not hold", "not decided"]
VERDICTS: tuple[Standing, ...] = get_args(Standing)
FILE, KIND = "claims.json", "claims"
LINK = re.compile(r"(https?://|(?![\w+.-]+:))[^\s()<>\[\]]+")
LONGEST = 1000  # characters of a text
LENGTHS = {
    "paper": "whole schedule", "half": "half of the schedule", "quarter": "a quarter of the schedule", "quick": "quick",
}  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """The numbers of a table that a text tells, as one value or as "LOWEST to HIGHEST".

    Args:
        rows, columns: where they stand; a place without a number is passed over.
        of: what of them is told: the "mean" over seeds, what is "published", or another field of a kept table.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    of: str = "mean"

    @property
    def is_published(self) -> bool:
        """Whether it is the paper's."""
        return self.of == "published" or self.of.endswith(", paper")


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, whether it holds here, and what says so.

    Args:
        paper: whose sentence it is; claims of one paper stand together.
        table, scale: the table whose records were looked at.
        how: what these records are, where the scale does not say it.
        see: where more is said: a text and what it links to.
        numbers: what texts of `found`, such as "24.7 to 26.1", were read from.
    """

    claim: str
    verdict: Standing
    found: str
    table: str
    scale: str
    how: str = ""
    see: tuple[str, str] | None = None
    paper: str = ""
    numbers: Mapping[str, Evidence] = field(default_factory=dict)

    def by(self, seeds: Sequence[int]) -> str:
        """What the verdict stands on: the length of training, and over how many seeds its numbers were measured."""
        return ", ".join(filter(None, (self.how or LENGTHS.get(self.scale, self.scale), seed_words(seeds))))

    def stands_on(self, row: str, column: str) -> bool:
        """Whether it tells a number of ours in this place of its table, or does not say which it tells."""
        ours = [held for held in self.numbers.values() if not held.is_published]
        return not ours or any(row in held.rows and column in held.columns for held in ours)


def by_paper(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """The claims of each paper, in the order of the first ones."""
    found: dict[str, list[Claim]] = {}
    for claim in claims:
        found.setdefault(claim.paper, []).append(claim)
    return found


def read_claims(tree: Any) -> tuple[Claim, ...]:
    """The claims of a file; a ValueError names what is none."""
    if not isinstance(tree, Mapping) or tree.get("kind") != KIND:
        raise ValueError(f'it must be an object whose `kind` is "{KIND}"')
    held = tree.get("claims")
    if not isinstance(held, list):
        raise ValueError("`claims` must be a list")
    return tuple(read_claim(entry, at) for at, entry in enumerate(held, 1))


def read_words(tree: Mapping[str, Any]) -> str:
    """What the words of a file's claims mean."""
    return read_text(tree.get("words", ""), "`words`")


def read_claim(entry: Any, at: int) -> Claim:
    if not isinstance(entry, dict):
        raise ValueError(f"claim {at} must be an object")
    names = {field.name for field in fields(Claim)}
    if unknown := sorted(set(entry) - names):
        raise ValueError(f"claim {at} has an unknown field {unknown[0]!r}; known: {', '.join(sorted(names))}")
    verdict = next((known for known in VERDICTS if known == entry.get("verdict")), None)
    if verdict is None:
        raise ValueError(f"claim {at}: `verdict` must be one of {', '.join(VERDICTS)}, got {entry.get('verdict')!r}")
    written = sorted(names - {"verdict", "see", "numbers"})
    texts = {name: read_text(entry.get(name, ""), f"claim {at}: `{name}`") for name in written}
    if missing := [name for name in texts if name not in ("how", "paper") and not texts[name]]:
        raise ValueError(f"claim {at} has no `{min(missing)}`")
    see = entry.get("see")
    if see is not None and not (isinstance(see, list) and len(see) == 2):
        raise ValueError(f"claim {at}: `see` must be a text and what it links to")
    parts = [read_text(part, f"claim {at}: `see`") for part in see or ()]
    if parts and not LINK.fullmatch(parts[1]):
        raise ValueError(f"claim {at}: `see` must link to a place, a file or http(s), without spaces or brackets")
    numbers = read_numbers(entry.get("numbers", {}), texts["found"], f"claim {at}: `numbers`")
    return Claim(**texts, verdict=verdict, see=(parts[0], parts[1]) if parts else None, numbers=numbers)


def read_numbers(held: Any, found: str, name: str) -> dict[str, Evidence]:
    if not isinstance(held, dict):
        raise ValueError(f"{name} must map texts of `found` to where they were read from")
    for told in held:
        if not told or told not in found:
            raise ValueError(f"{name} has {told[:LONGEST]!r}, which `found` does not say")
    return {told: read_evidence(entry, f"{name}: {told!r}") for told, entry in held.items()}


def read_evidence(entry: Any, name: str) -> Evidence:
    known = [part.name for part in fields(Evidence)]
    if not isinstance(entry, dict) or not {"rows", "columns"} <= set(entry) <= set(known):
        raise ValueError(f"{name} must be an object of `rows`, `columns` and, if need be, `of`")
    places = {}
    for part in ("rows", "columns"):
        if not isinstance(entry[part], list) or not entry[part]:
            raise ValueError(f"{name}: `{part}` must be a list of texts")
        places[part] = tuple(read_text(place, f"{name}: `{part}`") for place in entry[part])
    return Evidence(places["rows"], places["columns"], read_text(entry.get("of", "mean"), f"{name}: `of`"))


def read_text(value: Any, name: str) -> str:
    """A text on one line."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError(f"{name} must be a text of at most {LONGEST} characters")
    if not all(letter.isprintable() or letter.isspace() for letter in value):
        raise ValueError(f"{name} must be a text of printable characters, got {value!r}")
    return " ".join(value.split())
