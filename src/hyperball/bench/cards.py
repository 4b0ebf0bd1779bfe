"""What other cards should give: extra passes scale with the bandwidth, convolutions with the matrix rate.

    ratio ≈ 1 + extra·(B₀/B) / max(plain·(R₀/R), bytes/B)

with the measured times plain and extra = decoupled − plain, a card's bandwidth B and dense bf16 rate R (B₀ and R₀ of
the card that was measured) and the bytes of six passes, which the convolutions of a plain step read and write at least.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperball.bench.records import Record, Row

PASSES = 6
BYTES = 2  # of a bf16 number
SUBJECT, REFERENCE = "tanh + cosine", "nn.Conv2d"


@dataclass(frozen=True)
class Card:
    """A card of the makers' data sheets: terabytes a second, and bf16 teraflops without sparsity."""

    name: str
    bandwidth: float
    rate: float


CARDS = (
    Card("H200", 4.8, 989),
    Card("H100 SXM", 3.35, 989),
    Card("A100 80GB SXM", 2.04, 312),
    Card("RTX 4090", 1.01, 165),
    Card("L4", 0.30, 121),
)


def card_of(device: str) -> Card | None:
    """The card of a device's name, if it is in the table."""
    return next((card for card in CARDS if card.name.split()[0] in device and card.name.split()[-1] in device), None)


def predict(plain_ms: float, extra_ms: float, elements: int, base: Card, card: Card) -> float:
    """1 + extra·(B₀/B) / max(plain·(R₀/R), bytes/B)."""
    least_ms = 1e-9 * PASSES * BYTES * elements / card.bandwidth
    convolution = max(plain_ms * base.rate / card.rate, least_ms)
    return 1 + extra_ms * base.bandwidth / card.bandwidth / convolution


def elements(case: str) -> int | None:
    """The numbers in the output of a case such as "CNN-9 512×64→64×32² 3×3"."""
    found = re.search(r"(\d+)×\d+→(\d+)×(\d+)² 3×3$", case)
    return int(found[1]) * int(found[2]) * int(found[3]) ** 2 if found else None


def predictions(record: Record) -> list[tuple[Row, dict[str, float]]]:
    """For each 3×3 convolution in bf16 inside graphs: the measured row and the ratios of the other cards."""
    base, section = card_of(record.device), record.sections.get("conv")
    if base is None or section is None:
        return []
    chosen = [row for row in section.rows if is_studied(row)]
    return [(row, {card.name: of_row(row, base, card) for card in CARDS if card != base}) for row in chosen]


def is_studied(row: Row) -> bool:
    held = row.subject, row.reference, row.work, row.mode, row.dtype
    wanted = SUBJECT, REFERENCE, "forward+backward", "graph", "bf16"
    return held == wanted and row.aim is not None and elements(row.case) is not None


def of_row(row: Row, base: Card, card: Card) -> float:
    count = elements(row.case) or 0
    return predict(row.reference_median_ms, row.median_ms - row.reference_median_ms, count, base, card)


def markdown(record: Record) -> str:
    """A table of predictions."""
    rows = predictions(record)
    names = list(rows[0][1])
    lines = [
        f"**Predictions, not measurements**, for {SUBJECT} over {REFERENCE}, forward + backward, bf16:", "",
        f"| convolution | {record.device}, measured | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names),
    ]  # fmt: skip
    for row, ratios in rows:
        lines.append(f"| {row.case} | {row.ratio:.2f} | " + " | ".join(f"{ratios[name]:.2f}" for name in names) + " |")
    return "\n".join(lines)
