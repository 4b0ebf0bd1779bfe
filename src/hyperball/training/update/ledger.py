"""What a run adds up on the device between two reports: losses, hits, and steps that came too late."""

from __future__ import annotations

import torch
from torch import Tensor


class Ledger:
    """Sums over steps, in six launches a step; nothing is read back until a report.

    `latest` holds of one step the flag that some loss so far was not finite, the loss, and for each sample of the batch
    whether it was hit. `sums` adds them up in float64: the flags count the steps since that loss, it included.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        numbers = 2 + batch_size
        self.latest = torch.zeros(numbers, dtype=torch.float32, device=device)  # as fused optimizers read the flag
        self.sums = torch.zeros(numbers, dtype=torch.float64, device=device)
        self.broken, self.loss, self.hits = self.latest[0], self.latest[1], self.latest[2:]

    def watch(self, loss: Tensor) -> None:
        """Raise the flag for good where the loss is not finite: 0·loss is 0, or else NaN, which is not 0 either."""
        self.broken.add_(loss, alpha=0).ne_(0)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a step."""
        self.loss.copy_(loss)
        torch.eq(logits.argmax(1), labels, out=self.hits)
        self.sums.add_(self.latest)

    @property
    def late(self) -> int:
        """How many steps were counted since the first loss that was not finite, it included."""
        return int(self.sums[0])

    def totals(self) -> Tensor:
        """The sum of losses, and the number of hits."""
        return torch.stack([self.sums[1], self.sums[2:].sum()])

    def begin(self, loss: float = 0.0, hits: float = 0.0) -> None:
        """Go on from such totals."""
        self.sums.zero_()
        self.sums[1], self.sums[2] = loss, hits

    def state(self) -> tuple[Tensor, Tensor]:
        return self.latest.clone(), self.sums.clone()

    def restore(self, state: tuple[Tensor, Tensor]) -> None:
        self.latest.copy_(state[0])
        self.sums.copy_(state[1])
