"""Diagnose a model on a batch: lengths, angles, radii and filters of every decoupled layer, as data and as a table.

A radius is dead where no patch of the batch feels it: |rho·∂s/∂rho| <= 1e-6·|s| for every patch with n > 0, s the
gain h/n of the whole magnitude. A ball whose patches all lie outside is dead, a seg whose patches all lie inside, a
tanh that is saturated everywhere. With `joint` weighting the magnitude reads n·m in place of n; with `split` the
radius also acts through h(m), whose share of the derivative is counted.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.convert.running import call, evaluating
from hyperball.functional.decoupled import batched
from hyperball.functional.windows import transposed_window
from hyperball.kernels.decoupled import operation as kernel
from hyperball.kernels.decoupled.operation import Operator
from hyperball.kernels.norms import filter_norms, inverse, norm, norm_dtype, patch_norm, wide_dtype
from hyperball.kernels.window import Window
from hyperball.nn.decoupled import Decoupled, DecoupledConvNd, DecoupledConvTransposeNd
from hyperball.nn.frozen import Frozen
from hyperball.rows import AnyValue, map_scalars

LIMIT = 1_000_000  # values of cos kept per layer; patches beyond are drawn at random with a fixed seed
NEGLIGIBLE = 1e-6
PLAIN = Operator(lambda _: radial_table.TABLE["linear"](), angular_table.parse("cosine"), "none", False)


@dataclass(frozen=True)
class Distribution:
    """Mean and quantiles."""

    mean: float
    q05: float
    q25: float
    q50: float
    q75: float
    q95: float


@dataclass(frozen=True)
class Spread:
    """Least, mean and largest of a few numbers."""

    minimum: float
    mean: float
    maximum: float


@dataclass(frozen=True)
class RadiusDiagnosis:
    """The radius of one term of the magnitude, in the absolute value that evaluation uses.

    `inside` is the share of patches with n < rho, the mean over channels; `dead` lists the channels whose radius no
    patch feels (0 for a radius per layer). Both are None for a layer that was not called.
    """

    term: str
    count: int
    value: Spread
    inside: float | None
    dead: tuple[int, ...] | None


@dataclass(frozen=True)
class LayerDiagnosis:
    """One decoupled layer; `norm` and `cosine` are None where no finite patch was seen."""

    name: str
    kind: str
    operator: str
    calls: int
    patches: int
    norm: Distribution | None
    cosine: Distribution | None
    radii: tuple[RadiusDiagnosis, ...]
    filter_norm: Spread
    zero_filters: tuple[int, ...]
    nonfinite: int


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found, layer by layer; printed, it is a table."""

    layers: tuple[LayerDiagnosis, ...]

    def as_dict(self) -> dict[str, Any]:
        """Lists, texts, numbers and None alone, ready for JSON; a number that is not finite becomes None."""
        plain = jsonable(asdict(self))
        assert isinstance(plain, dict)
        return plain

    def __getitem__(self, name: str) -> LayerDiagnosis:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no decoupled layer {name!r}; known: {', '.join(layer.name for layer in self.layers)}")

    def __str__(self) -> str:
        rows = [HEADER, *(row for layer in self.layers for row in table_rows(layer))]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def jsonable(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: jsonable(held) for key, held in item.items()}
    if isinstance(item, tuple | list):
        return [jsonable(held) for held in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


HEADER = (
    "layer", "operator", "calls", "n 5/50/95%", "cos 5/50/95%", "inside", "radius min/mean/max", "dead",
    "filter norm min/mean/max", "zero", "notes",
)  # fmt: skip


def table_rows(layer: LayerDiagnosis) -> Iterator[tuple[str, ...]]:
    """One line per layer, and a further one for every further radius."""
    notes = [] if layer.calls else ["not called"]
    notes += [f"{layer.nonfinite} outputs not finite"] if layer.nonfinite else []
    w = layer.filter_norm
    right = (numbers(w.minimum, w.mean, w.maximum), str(len(layer.zero_filters)), ", ".join(notes))
    left = (layer.name or "(model)", layer.operator, str(layer.calls), *map(central, (layer.norm, layer.cosine)))
    radii = [radius_cells(radius) for radius in layer.radii] or [("-", "-", "-")]
    yield (*left, *radii[0], *right)
    for cells in radii[1:]:
        yield ("",) * len(left) + cells + ("",) * len(right)


def radius_cells(radius: RadiusDiagnosis) -> tuple[str, str, str]:
    inside = "-" if radius.inside is None else f"{radius.inside:.0%}"
    dead = "-" if radius.dead is None else f"{len(radius.dead)}/{radius.count}"
    return inside, numbers(radius.value.minimum, radius.value.mean, radius.value.maximum), dead


def central(distribution: Distribution | None) -> str:
    return "-" if distribution is None else numbers(distribution.q05, distribution.q50, distribution.q95)


def numbers(*values: float) -> str:
    return " ".join(f"{value:.3g}" for value in values)


class Record:
    """What the calls of one layer leave behind: norms [patches, groups] and cosines [patches, channels]."""

    def __init__(self) -> None:
        self.calls = self.patches = self.nonfinite = 0
        self.thinning = 1
        self.rows: tuple[Tensor, Tensor] | None = None
        self.generator = torch.Generator().manual_seed(0)

    def hear(self, layer: Decoupled, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A forward hook."""
        input = args[0] if args else kwargs["input"]
        self.calls += 1
        self.nonfinite += int((~torch.isfinite(output)).sum())
        with kernel.full_precision(input):
            self.add(*norms_and_responses(layer, input, output))

    def add(self, n: Tensor, y: Tensor) -> None:
        """Keep these patches, or a random part of them, so that every patch of all calls is as likely to be kept."""
        total, limit = n.shape[0], max(1, LIMIT // y.shape[1])
        self.patches += total
        while self.kept + total // self.thinning > limit:
            self.thinning *= 2
            if self.rows is not None:
                self.rows = self.draw(self.rows, self.kept // 2)
        n, y = self.draw((n, y), -(-total // self.thinning))
        c = y * inverse(n).repeat_interleave(y.shape[1] // n.shape[1], 1)
        self.rows = (n, c) if self.rows is None else (torch.cat([self.rows[0], n]), torch.cat([self.rows[1], c]))

    @property
    def kept(self) -> int:
        return 0 if self.rows is None else self.rows[0].shape[0]

    def draw(self, rows: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
        total = rows[0].shape[0]
        if count == total:
            return rows
        index = torch.randperm(total, generator=self.generator)[:count].to(rows[0].device)
        return rows[0][index], rows[1][index]

    def finite(self) -> tuple[Tensor, Tensor] | None:
        """The patches without NaN or inf; None if there are none."""
        if self.rows is None:
            return None
        n, c = self.rows
        valid = torch.isfinite(n).all(1) & torch.isfinite(c).all(1)
        return (n[valid], c[valid]) if bool(valid.any()) else None


def norms_and_responses(layer: Decoupled, input: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """n [patches, groups] and y = conv(x, ŵ) [patches, channels] of one call."""
    weight = layer.weight.to(norm_dtype(layer.weight))
    input = input.to(weight.dtype)
    if weight.dim() == 2:
        return norm(input, (-1,)).reshape(-1, 1), kernel.linear(input, weight, None, PLAIN).reshape(-1, len(weight))
    x, window = windowed(layer, input, output)
    n, y = patch_norm(x, window), kernel.convolve(x, weight, None, window, PLAIN)
    return n.movedim(1, -1).reshape(-1, n.shape[1]), y.movedim(1, -1).reshape(-1, y.shape[1])


def windowed(layer: Any, input: Tensor, output: Tensor) -> tuple[Tensor, Window]:
    """The input, batched and padded, and the window over it."""
    if isinstance(layer, DecoupledConvNd):
        return layer.padded(input)
    assert isinstance(layer, DecoupledConvTransposeNd)
    dims = layer.weight.dim() - 2
    x = batched(input, dims)
    reach = [gap * (taps - 1) for gap, taps in zip(layer.dilation, layer.kernel_size, strict=True)]
    bare = [(x.shape[2 + i] - 1) * layer.stride[i] - 2 * layer.padding[i] + reach[i] + 1 for i in range(dims)]
    extra = [output.shape[i - dims] - bare[i] for i in range(dims)]  # what `output_size` or `output_padding` came to
    return x, transposed_window(
        dims, x.shape, layer.weight, layer.stride, layer.padding, extra, layer.groups, layer.dilation
    )


def diagnose(model: nn.Module, batch: Any) -> Diagnosis:
    """Run the model on a batch and report, per decoupled layer, lengths, angles, radii and filter norms.

    `batch` is a tuple of positional arguments, a mapping of keyword arguments, or the one argument itself: inputs
    alone, without labels. The model runs in evaluation mode without gradients; modes, parameters, buffers and random
    generators are afterwards what they were. A layer that is called several times is described over all its calls.

    >>> import torch, hyperball as hb
    >>> model = torch.nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="ball"), torch.nn.ReLU())
    >>> hb.diagnose(model, torch.randn(2, 3, 8, 8))["0"].patches
    72
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    layers = {name: part for name, part in model.named_modules() if isinstance(part, Decoupled)}
    if not layers:
        frozen = any(isinstance(part, Frozen) for part in model.modules())
        raise ValueError(
            f"`model` has no decoupled layer to diagnose, got {type(model).__name__}"
            + ("; it is frozen: diagnose the model it was made from" if frozen else "")
        )
    records = {name: Record() for name in layers}
    with torch.inference_mode(False), evaluating(model), eager():
        handles = [layer.register_forward_hook(records[name].hear, with_kwargs=True) for name, layer in layers.items()]
        try:
            call(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        return Diagnosis(tuple(summary(name, layer, records[name]) for name, layer in layers.items()))


def eager() -> contextlib.AbstractContextManager[Any]:
    """Without compiled code, which would not call the hooks."""
    compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def summary(name: str, layer: Decoupled, record: Record) -> LayerDiagnosis:
    filters = layer.filters()
    m = filter_norms(filters)
    seen = record.finite()
    lengths = angles = None
    if seen is not None:
        n, c = seen
        there = (per_channel(n, c) > 0) & (m > 0)  # a zero vector has no direction
        lengths, angles = distribution(n.flatten()), distribution(c[there])
    weighting = "" if layer.weighting == "none" else f", {layer.weighting}"
    return LayerDiagnosis(
        name, type(layer).__name__, f"{layer.magnitude.value} × {layer.angular.value}{weighting}", record.calls,
        record.patches, lengths, angles, tuple(radii(layer, m, seen)), spread(m),
        tuple((m == 0).nonzero().flatten().tolist()), record.nonfinite,
    )  # fmt: skip


def per_channel(n: Tensor, c: Tensor) -> Tensor:
    """The norm that belongs to each output channel."""
    return n.repeat_interleave(c.shape[1] // n.shape[1], 1)


def radii(layer: Decoupled, m: Tensor, seen: tuple[Tensor, Tensor] | None) -> Iterator[RadiusDiagnosis]:
    """Every radius of the magnitude, with what the patches say about it."""
    wide = wide_dtype(m)
    value = map_scalars(layer.magnitude(), lambda item: item.to(wide) if isinstance(item, Tensor) else item)
    for index, term in enumerate(value.terms):
        if "rho" not in term.parameters:
            continue
        rho = torch.as_tensor(term.parameters["rho"], dtype=wide, device=m.device)
        inside = dead = None
        if seen is not None:
            n = per_channel(*seen).to(wide)
            u = n * m.to(wide) if layer.weighting == "joint" else n
            inside = (u < rho).to(wide).mean().item()
            felt = elasticity(value, index, u)
            if layer.weighting == "split":
                felt = felt + elasticity(value, index, m.to(wide))
            alive = ((felt.abs() > NEGLIGIBLE) & (n > 0)).any(0)
            dead = tuple((~(alive if rho.dim() else alive.any().reshape(1))).nonzero().flatten().tolist())
        yield RadiusDiagnosis(term.name, rho.numel(), spread(rho.flatten()), inside, dead)


def elasticity(value: AnyValue, index: int, u: Tensor) -> Tensor:
    """(rho/s)·∂s/∂rho at every u, rho the radius of one term and s the gain of all; inf where s alone vanishes."""
    terms = list(value.terms)
    with torch.enable_grad():
        rho = torch.as_tensor(terms[index].parameters["rho"], dtype=u.dtype, device=u.device)
        rho = rho.detach().expand_as(u).clone().requires_grad_()
        s = terms[index].row.gain(u, **{**terms[index].parameters, "rho": rho})
        (slope,) = torch.autograd.grad(s.sum(), rho, allow_unused=True) if s.requires_grad else (None,)
    if slope is None:
        return torch.zeros_like(u)
    total = radial_table.gain(value, u)
    return torch.where(slope == 0, 0.0, slope * rho.detach() / total)


def distribution(values: Tensor) -> Distribution | None:
    if values.numel() == 0:
        return None
    at = torch.tensor((0.05, 0.25, 0.5, 0.75, 0.95), dtype=values.dtype, device=values.device)
    return Distribution(values.mean().item(), *torch.quantile(values, at).tolist())


def spread(values: Tensor) -> Spread:
    return Spread(values.min().item(), values.mean().item(), values.max().item())
