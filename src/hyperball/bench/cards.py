"""What other cards should give: extra passes scale with the bandwidth, convolutions with the matrix rate.

    ratio ≈ 1 + extra·(B₀/B) / max(plain·(R₀/R), bytes/B)

with the measured times plain and extra = decoupled − plain, a card's bandwidth B and dense bf16 rate R (B₀ and R₀ of
the card that was measured) and the bytes of six passes, which the convolutions of a plain step read and write at least.
A card is predicted from times of the kernels that it would run: implicit GEMMs leave six extra passes, cuDNN's nine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyperball.bench.records import Record, Row
from hyperball.kernels.triton.implicit.choice import CAPABILITY

PASSES = 6
BYTES = 2  # of a bf16 number
SUBJECT, REFERENCE = "tanh + cosine", "nn.Conv2d"


@dataclass(frozen=True)
class Card:
    """A card of the makers' data sheets: terabytes a second, bf16 teraflops without sparsity, compute capability."""

    name: str
    bandwidth: float
    rate: float
    capability: tuple[int, int]

    @property
    def implicit(self) -> bool:
        """Whether convolutions run as implicit GEMMs on it."""
        return self.capability == CAPABILITY


CARDS = (
    Card("H200", 4.8, 989, (9, 0)),
    Card("H100 SXM", 3.35, 989, (9, 0)),
    Card("A100 80GB SXM", 2.04, 312, (8, 0)),
    Card("RTX 4090", 1.01, 165, (8, 9)),
    Card("L4", 0.30, 121, (8, 9)),
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
    """For each 3×3 convolution in bf16 inside graphs: the measured row, and ratios of cards that run such kernels."""
    base, section = card_of(record.device), record.sections.get("conv")
    if base is None or section is None:
        return []
    implicit = section.conditions.get("implicit_gemms", base.implicit)
    alike = [card for card in CARDS if card != base and card.implicit == implicit]
    chosen = [row for row in section.rows if is_studied(row)]
    return [(row, {card.name: of_row(row, base, card) for card in alike}) for row in chosen]


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
        f"**Predictions, not measurements**, for {SUBJECT} over {REFERENCE}, forward + backward, bf16, on cards that "
        "convolve as this record does:", "",
        f"| convolution | {record.device}, measured | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names),
    ]  # fmt: skip
    for row, ratios in rows:
        lines.append(f"| {row.case} | {row.ratio:.2f} | " + " | ".join(f"{ratios[name]:.2f}" for name in names) + " |")
    return "\n".join(lines)
