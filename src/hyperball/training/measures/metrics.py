"""Metrics of a classifier from its logits: accuracy, loss, calibration, average precision."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 15
SCORES = 2**24  # that are ranked at once: a dozen tensors of so many 8-byte numbers
FIRST = 6  # the published average precision covers the first six classes alone


@dataclass(frozen=True)
class Metrics:
    """What one evaluation found; shares in [0, 1].

    `nonfinite` counts samples with a logit that is not finite, which are wrong and ranked last.
    `map_raw` ranks raw logits across samples, `map_softmax` probabilities, both over all classes; `map6_raw` covers
    the first six classes, and is None below six. So do `voc6_raw` and `voc6_softmax`, which interpolate as Pascal VOC
    does: these are what the code of robust pooling (probabilities) and of projections (raw logits) computes. `ece` is
    the calibration error with 15 equal bins.
    """

    samples: int
    loss: float
    top1: float
    top5: float | None
    ece: float
    map_raw: float
    map_softmax: float
    map6_raw: float | None
    voc6_raw: float | None = None
    voc6_softmax: float | None = None
    nonfinite: int = 0

    def as_dict(self) -> dict[str, float | int | None]:
        """The numbers, None where one is not finite, as JSON has no other word for it."""
        return {key: value if value is None or math.isfinite(value) else None for key, value in asdict(self).items()}


def measure(logits: Tensor, labels: Tensor) -> Metrics:
    """All metrics of logits [N, K] and labels [N]."""
    logits = logits.double()
    probabilities = logits.softmax(1)
    classes = logits.shape[1]
    raw, raw_voc = average_precisions(logits, labels)
    sure, sure_voc = average_precisions(probabilities, labels)
    enough = classes >= FIRST
    return Metrics(
        samples=len(labels),
        loss=float(F.cross_entropy(logits, labels)),
        top1=top_k(logits, labels, 1),
        top5=top_k(logits, labels, 5) if classes > 5 else None,
        ece=calibration_error(probabilities, labels),
        map_raw=mean(raw),
        map_softmax=mean(sure),
        map6_raw=mean(raw[:FIRST]) if enough else None,
        voc6_raw=mean(raw_voc[:FIRST]) if enough else None,
        voc6_softmax=mean(sure_voc[:FIRST]) if enough else None,
        nonfinite=int((~logits.isfinite()).any(1).sum()),
    )


def top_k(logits: Tensor, labels: Tensor, k: int) -> float:
    """The share of labels among the k largest logits; ties go to the smaller class, and NaN is never among them."""
    own = logits.gather(1, labels[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    behind = (logits < own) | ((logits == own) & (classes >= labels[:, None]))
    return float(((~behind).sum(1) < k).double().mean())


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Σ_b |b|/N · |accuracy(b) − confidence(b)| over equal bins of the largest probability."""
    confidence, predicted = probabilities.max(1)
    correct = (predicted == labels).to(confidence.dtype)
    index = (confidence * bins).ceil().long().sub(1).clamp(0, bins - 1)
    gaps = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device)
    gaps.index_add_(0, index, correct - confidence)
    return float(gaps.abs().sum() / len(labels))


def average_precisions(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """AP = Σ (R_i − R_{i−1})·P_i per class against the rest, samples of one score counted together; NaN without any.

    Beside it the same with max_{j ≥ i} P_j for P_i, the interpolated precision of Pascal VOC.
    """
    classes = torch.arange(scores.shape[1], device=scores.device)
    at_once = max(1, SCORES // max(1, len(scores)))
    parts = zip(scores.split(at_once, 1), classes.split(at_once), strict=True)
    found = [precisions_of(some, labels[:, None] == own) for some, own in parts]
    return torch.cat([plain for plain, _ in found]), torch.cat([interpolated for _, interpolated in found])


def precisions_of(scores: Tensor, belongs: Tensor) -> tuple[Tensor, Tensor]:
    """The average precision of scores [N, K] of what `belongs` to each of K classes, plain and interpolated."""
    ranked, order = scores.nan_to_num(nan=-torch.inf).sort(dim=0, descending=True)
    positive = belongs.gather(0, order)
    hits = positive.cumsum(0).double()
    count = torch.arange(1, len(scores) + 1, device=scores.device, dtype=torch.float64)[:, None]
    ends = torch.ones_like(positive)
    ends[:-1] = ranked[:-1] != ranked[1:]
    precision = torch.where(ends, hits / count, 0.0)
    # A sample belongs to the next end of a group of equal scores, whose precision all of its hits share.
    following = torch.where(ends, torch.arange(len(scores), device=scores.device)[:, None], len(scores))
    following = following.flip(0).cummin(0).values.flip(0)
    shared = precision.gather(0, following)
    highest = precision.flip(0).cummax(0).values.flip(0)
    plain, interpolated = (torch.where(positive, held, 0.0).sum(0) / positive.sum(0) for held in (shared, highest))
    return plain, interpolated


def mean(values: Tensor) -> float:
    """The mean over the classes that occur."""
    return float(values[~values.isnan()].mean())
