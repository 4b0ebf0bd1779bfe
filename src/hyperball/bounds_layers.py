"""How far a single layer can stretch a difference, and how large its outputs can be, in evaluation mode.

For f = factor·h(n)·g(c) on one patch, with û its direction, the derivative is
factor·(h'(n)·g(c)·ûᵀ + s(n)·g'(c)·(ŵ − c·û)ᵀ). Its two parts act on û and across it, so that with |g| <= G|c|,
|g'| <= D and |g'|·sqrt(1 − c²) <= T its norm is at most sqrt(a² + b²), a = ‖diag(factor·sup h'·G)·Ŵ‖ and b the smaller
of ‖diag(factor·sup s·D)·Ŵ‖ and T·‖factor·sup s‖. For cosine and one radius it is ‖diag(factor)·Ŵ‖·max(sup h', sup s).
Patches overlap: an input that lies in at most k of them adds a factor sqrt(k). A plain convolution is bounded by its
Fourier transform too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels.norms import norm
from hyperball.nn.decoupled import Decoupled, NormalizedLinear
from hyperball.rows import AnyValue, Value, map_scalars

SLACK = 1.0 + 1e-6  # norms are computed in floating point
GRID = 16  # frequencies per dimension and degree
FOURIER_LIMIT = 128  # channels beyond which a matrix per frequency takes too long


@dataclass(frozen=True)
class Stretch:
    """sup h', sup s and sup h of a magnitude: one value, or one per channel, in float64."""

    slope: Tensor
    gain: Tensor
    height: Tensor


@dataclass(frozen=True)
class Turn:
    """G = sup |g/c|, D = sup |g'|, T = sup |g'|·sqrt(1 − c²) and sup |g| of an angular function."""

    ratio: float
    slope: float
    across: float
    height: float


class NoBound(Exception):
    """Says why something has no bound."""


def of_magnitude(value: AnyValue) -> Stretch:
    """The bounds of a magnitude; those of a sum add up."""
    parts = [of_radial(term) for term in value.terms]
    return Stretch(*(sum((getattr(p, key) for p in parts), start=wide(0.0)) for key in ("slope", "gain", "height")))


def of_radial(term: Value) -> Stretch:
    if term.row.composed:
        raise NoBound(f"{term.name} is user-defined")
    p = {key: wide(held) for key, held in term.parameters.items() if held is not None and not isinstance(held, tuple)}
    infinite = wide(math.inf)
    if term.name == "sphere":
        steep = p["alpha"] / p["eps"].sqrt()
        return Stretch(steep, steep, p["alpha"])
    if term.name in ("ball", "tanh"):
        steep = p["alpha"] / p["rho"]
        return Stretch(steep, steep, p["alpha"])
    if term.name in ("linear", "log"):
        return Stretch(p["alpha"], p["alpha"], infinite)
    if term.name == "seg":
        steep = torch.maximum(p["alpha"].abs(), p["beta"].abs())
        return Stretch(steep, steep, torch.where(p["beta"] == 0, (p["alpha"] * p["rho"]).abs(), infinite))
    if term.name == "mix":
        steep = p["alpha"].abs() + p["beta"].abs()
        return Stretch(steep, steep, infinite)
    if term.name == "barron":
        return of_barron(p["alpha"], p["rho"], p["shape"])
    if term.name == "piecewise":
        slopes = torch.stack([wide(item) for item in term.parameters["slopes"]])  # type: ignore[union-attr]
        steep = slopes.amax()
        flat = slopes[-1] == 0
        return Stretch(steep, steep, torch.where(flat, 2.0 * steep * p["rho"], infinite))
    raise NoBound(f"no bound is known for {term.name}")


def of_barron(alpha: Tensor, rho: Tensor, shape: Tensor) -> Stretch:
    """sup s = sup |h'| = alpha for shape <= 2; h is largest where n² = rho²·b/(1 − shape), for shape < 1."""
    steep = torch.where(shape <= 2, alpha, math.inf)
    b = (shape - 2).abs().clamp(min=1e-6)
    below = (1 - shape).clamp(min=1e-12)
    peak = alpha * rho * (b / below).sqrt() * (1 + 1 / below) ** (shape / 2 - 1)
    height = torch.where(shape < 1, peak, torch.where(shape == 1, alpha * rho, math.inf))
    return Stretch(steep, steep, height)


def of_angular(value: Value) -> Turn:
    if value.row.composed:
        raise NoBound(f"{value.name} is user-defined")
    if value.name in ("cosine", "rectified_cosine"):
        return Turn(1.0, 1.0, 1.0, 1.0)
    if value.name == "linear":
        return Turn(1.0, math.inf, 2.0 / math.pi, 1.0)
    if value.name in ("square_cosine", "power"):
        b = 2.0 if value.name == "square_cosine" else float(wide(value.parameters["b"]).amax())
        least = 2.0 if value.name == "square_cosine" else float(wide(value.parameters["b"]).amin())
        across = max(b_across(b), b_across(least), 1.0)
        return Turn(1.0, b, across if b > 1 else 1.0, 1.0)
    if value.name == "sigmoid":
        k = float(wide(value.parameters["k"]).amin())
        end = math.tanh(math.pi / (4 * k))
        return Turn(math.pi / (4 * k) / end, math.inf, 1.0 / (2 * k * end), 1.0)
    if value.name == "piecewise":
        steep = max(float(wide(item).amax()) for item in value.parameters["slopes"])  # type: ignore[union-attr]
        return Turn(steep, steep, steep, steep)
    raise NoBound(f"no bound is known for {value.name}")


def b_across(b: float) -> float:
    """sup b·c^(b−1)·sqrt(1 − c²), at c² = (b − 1)/b."""
    return b * ((b - 1) / b) ** ((b - 1) / 2) / math.sqrt(b)


def wide(item: Any) -> Tensor:
    return torch.as_tensor(item).detach().to("cpu", torch.float64)


def spectral_norm(rows: Tensor, groups: int = 1) -> float:
    """The largest singular value over the groups of a matrix [out, in/groups], from the smaller Gram matrix."""
    blocks = wide(rows).unflatten(0, (groups, -1))
    scale = float(blocks.abs().max()) if blocks.numel() else 0.0
    if scale == 0.0 or not math.isfinite(scale):
        return scale
    blocks = blocks / scale
    gram = blocks @ blocks.mT if blocks.shape[1] <= blocks.shape[2] else blocks.mT @ blocks
    return scale * math.sqrt(max(float(torch.linalg.eigvalsh(gram).max()), 0.0)) * SLACK


def covering(kernel: Sequence[int], step: Sequence[int], gap: Sequence[int]) -> float:
    """In how many windows an entry lies at most: Π ⌈k/(stride/gcd(stride, dilation))⌉."""
    return float(math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in zip(kernel, step, gap, strict=True)))


def overlap(layer: Any) -> float:
    """In how many patches an input lies at most, with all its copies in the padding; all taps if transposed."""
    if getattr(layer, "transposed", False):
        return float(math.prod(layer.kernel_size))
    return covering(layer.kernel_size, layer.stride, layer.dilation) * copies(layer)


def paddings(layer: Any) -> list[tuple[int, int]]:
    """Before and after, for every dimension."""
    widths = layer._reversed_padding_repeated_twice
    return list(zip(widths[::2], widths[1::2], strict=True))[::-1]


def copies(layer: Any) -> float:
    """How often an input may appear in the padded one: a replicated edge often, else once more a side."""
    if layer.padding_mode == "zeros":
        return 1.0
    if layer.padding_mode == "replicate":
        return float(math.prod(1 + before + after for before, after in paddings(layer)))
    return float(math.prod(1 + (before > 0) + (after > 0) for before, after in paddings(layer)))


def wraps_once(layer: Any) -> bool:
    """Whether a circular convolution has no more outputs than inputs, so that it computes each place once at most."""
    reach = [gap * (size - 1) for size, gap in zip(layer.kernel_size, layer.dilation, strict=True)]
    return all(before + after <= most for (before, after), most in zip(paddings(layer), reach, strict=True))


def row_factor(layer: Decoupled, lengths: Tensor) -> Tensor:
    """What multiplies h·g of a channel: 1, m (linear; in joint it multiplies the slopes) or h(m)/alpha (split)."""
    if layer.weighting == "none":
        return torch.ones_like(lengths)
    if layer.weighting in ("linear", "joint"):
        return lengths
    value = radial_table.unit_alpha(layer.magnitude(None))
    return radial_table.gain(_as_wide(value), lengths) * lengths


def _as_wide(value: AnyValue) -> AnyValue:
    return map_scalars(value, lambda item: wide(item) if isinstance(item, Tensor) else item)


def decoupled(layer: Any) -> tuple[float, Tensor, bool]:
    """The Lipschitz constant of a decoupled layer, a bound of |output| per channel, and whether the first is exact."""
    magnitude, angular = layer.operator.magnitude(None), layer.operator.angular
    radial, turn = of_magnitude(magnitude), of_angular(angular)
    filters = wide(layer.filters()).flatten(1)
    lengths = norm(filters, (1,)).flatten()
    unit = filters / lengths.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    factor = row_factor(layer, lengths)
    groups = getattr(layer, "groups", 1)
    many = overlap(layer) if filters.shape[1] and layer.weight.dim() > 2 else 1.0
    if not layer._needs_norm and many > 1.0:
        whole = (unit * (factor * radial.gain)[:, None]).reshape(layer.filters().shape)
        return convolution_norm(layer, whole)[0], heights(layer, math.inf), False
    patch = patch_stretch(unit, factor, radial, turn, groups, angular_table.is_cosine(angular))
    return math.sqrt(many) * patch, heights(layer, math.inf), many == 1.0 and not layer._needs_norm


def heights(layer: Any, size: float) -> Tensor:
    """sup |output| per channel where no |input| is above `size`: of sup h and sup s·size·sqrt(patch) the smaller."""
    radial, turn = of_magnitude(layer.operator.magnitude(None)), of_angular(layer.operator.angular)
    filters = wide(layer.filters()).flatten(1)
    lengths = norm(filters, (1,)).flatten()
    factor = row_factor(layer, lengths)
    longest = size * math.sqrt(filters.shape[1])
    bounded = radial.height * (torch.ones_like(lengths) if layer.weighting == "joint" else factor)
    linear = radial.gain * factor * longest if longest else torch.zeros_like(factor)
    height = torch.where(lengths > 0, torch.minimum(bounded.nan_to_num(math.inf), linear) * turn.height, 0.0)
    return height * SLACK if layer.bias is None else height * SLACK + wide(layer.bias).abs()


def patch_stretch(unit: Tensor, factor: Tensor, radial: Stretch, turn: Turn, groups: int, cosine: bool) -> float:
    slope, gain = (item.expand_as(factor) for item in (radial.slope, radial.gain))
    alike = bool((slope == slope[0]).all() and (gain == gain[0]).all())
    if cosine and alike:
        return spectral_norm(unit * factor[:, None], groups) * max(float(slope[0]), float(gain[0]))
    along = spectral_norm(unit * (factor * slope * turn.ratio)[:, None], groups)
    sized = factor * gain
    across = float((sized * turn.across).unflatten(0, (groups, -1)).norm(dim=1).max()) * SLACK
    if math.isfinite(turn.slope):
        across = min(across, spectral_norm(unit * (sized * turn.slope)[:, None], groups))
    return math.hypot(along, across)


def fourier_norm(weight: Tensor, groups: int) -> float:
    """sup over frequencies of ‖Σ_k w_k·exp(−ikθ)‖, which no convolution with w exceeds, whatever its zeros or stride.

    At its maximum a real trigonometric polynomial of degree d = ⌊k/2⌋ falls off no faster than cos(d·δ) (M. Riesz), so
    the maximum over N frequencies, divided by Π cos(d·π/N), is a bound.
    """
    sizes = weight.shape[2:]
    counts = [GRID * max(1, size // 2) for size in sizes]
    dims = tuple(range(-len(sizes), 0))
    spectrum = torch.fft.rfftn(wide(weight), s=counts, dim=dims).flatten(2).movedim(-1, 0)  # [frequencies, out, in]
    blocks = spectrum.unflatten(1, (groups, -1))
    small = blocks.shape[2] <= blocks.shape[3]
    gram = blocks @ blocks.mH if small else blocks.mH @ blocks
    largest = math.sqrt(max(float(torch.linalg.eigvalsh(gram).max()), 0.0))
    loss = math.prod(math.cos(size // 2 * math.pi / count) for size, count in zip(sizes, counts, strict=True))
    return largest / loss * SLACK


def convolution_norm(layer: Any, weight: Tensor) -> tuple[float, bool]:
    """The norm of a plain convolution with the layer's geometry, output channels first, and whether it is exact.

    sqrt(overlap)·‖W‖ or, where that is not exact and the matrices are small, the smaller of it and `fourier_norm`.
    """
    many = overlap(layer)
    over_patches = math.sqrt(many) * spectral_norm(weight.flatten(1), layer.groups)
    inputs, outputs = weight.shape[1], weight.shape[0] // layer.groups
    if many == 1.0 or min(inputs, outputs) > FOURIER_LIMIT or not math.isfinite(over_patches):
        return over_patches, many == 1.0
    padded = 1.0 if layer.padding_mode == "circular" and wraps_once(layer) else math.sqrt(copies(layer))
    return min(over_patches, padded * fourier_norm(weight, layer.groups)), False


def linear_map(layer: Any) -> tuple[float, bool]:
    """The Lipschitz constant of a plain convolution or linear layer, and whether it is exact."""
    if isinstance(layer, NormalizedLinear):
        weight = wide(layer.weight)
        return spectral_norm(weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-300)), True
    if isinstance(layer, nn.Linear):
        return spectral_norm(layer.weight), True
    weight = wide(layer.weight)
    if getattr(layer, "transposed", False):
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return convolution_norm(layer, weight)
