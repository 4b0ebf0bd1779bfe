"""The parameters of a row as a module: what is learned, per channel or per layer, and relative radii."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball.kernels import dispatch
from hyperball.kernels.decoupled.relative import Relative
from hyperball.kernels.norms import mean_length
from hyperball.rows import AnyValue, Row, Sum, Value, fill, map_scalars, require_positive

FLOOR = 1e-4  # a relative radius is (ratio² + FLOOR) mean norms
MOMENTUM = 0.999
LEARNED_BY_DEFAULT = ("rho", "slopes")


def _softplus_inverse(y: Tensor) -> Tensor:
    y = y.clamp(min=1e-6)
    return y + torch.log(-torch.expm1(-y))


def _raw_and_map(row: Row, key: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """How a learned parameter is stored, and how it is read: exp where it must be positive, softplus above a bound."""
    if key in row.positive:
        return torch.log, torch.exp
    if key in row.at_least:
        least = row.at_least[key]
        return lambda v: _softplus_inverse(v - least), lambda raw: least + F.softplus(raw)
    if key == "shape":
        return lambda v: _softplus_inverse(2.0 - v), lambda raw: 2.0 - F.softplus(raw)
    return lambda v: v, lambda raw: raw


class LearnedValue(nn.Module):
    """A radial or angular value whose parameters may be learned; called with the patch norms, it gives the value.

    A relative radius is rho = (ratio² + 1e-4)·mean(sqrt(n² + eps)): the batch's mean in training, through which
    gradients flow, and a running mean, kept in float32 and averaged over ranks, in evaluation.
    """

    running_length: Tensor
    batches: Tensor
    objection: ClassVar[str] = ""  # what speaks against a kernel that resolves the radius by itself
    owner = "a decoupled layer"  # what error messages call the layer, also of one stored without a name

    def __init__(
        self, value: AnyValue, channels: int, patch_size: int, eps: float, device: Any = None, dtype: Any = None,
        owner: str = owner,
    ) -> None:  # fmt: skip
        super().__init__()
        self.owner = owner
        self._initial = map_scalars(fill(value, eps=eps), lambda p: p.detach() if isinstance(p, Tensor) else p)
        require_positive(self._initial)
        self.value = _without_tensors(self._initial)
        self.eps = eps
        self.channels = channels
        self.patch_size = patch_size
        self._stored: dict[tuple[int, str], str] = {}
        for index, term in enumerate(self._initial.terms):
            for key in term.parameters:
                self._store(index, term, key, {"device": device, "dtype": dtype})
        if self.is_relative:
            double = (dtype or torch.get_default_dtype()) == torch.float64
            wide = {"device": device, "dtype": torch.float64 if double else torch.float32}
            self.register_buffer("running_length", torch.full((), math.sqrt(patch_size), **wide))
            self.register_buffer("batches", torch.zeros((), device=device, dtype=torch.long))

    def _store(self, index: int, term: Value, key: str, factory: dict[str, Any]) -> None:
        """Make a parameter of what is learned, and a buffer of what is a fixed tensor; numbers stay numbers."""
        learned = _learned(term, key)
        if not learned and not _holds_tensor(term.parameters[key]):
            return
        name = ("ratio" if _relative(term, key) else f"raw_{key}") + (f"_{index}" if len(self.value.terms) > 1 else "")
        exact = self._start(term, key)
        start = torch.empty(exact.shape, **factory).copy_(exact)
        if learned:
            self.register_parameter(name, nn.Parameter(start))
        else:
            self.register_buffer(name, start)
        self._stored[index, key] = name

    def _start(self, term: Value, key: str) -> Tensor:
        """The stored form of a parameter's initial value, in float64 on the CPU."""
        held, learned = term.parameters[key], _learned(term, key)
        exact: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}
        if isinstance(held, tuple):
            start = torch.tensor([float(item) for item in held], **exact)
        elif isinstance(held, Tensor) and held.dim():
            if tuple(held.shape) not in ((1,), (self.channels,)) or term.options.get("per") == "layer":
                shape = tuple(held.shape)
                raise ValueError(
                    f"`{key}` of {term.name} must have {self.channels} values per channel, got shape {shape}"
                )
            start = held.detach().to(**exact).expand(self.channels).clone()
        else:
            size = () if not learned or term.options.get("per") == "layer" else (self.channels,)
            start = torch.full(size, float(held), **exact)
        if key == "shape" and learned and not bool((start < 2).all()):
            raise ValueError(f"`shape` must be < 2 to be learned, got {held}")
        return start.sqrt() if _relative(term, key) else _raw_and_map(term.row, key)[0](start)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Put every parameter and the running mean back to where they began."""
        for (index, key), name in self._stored.items():
            getattr(self, name).copy_(self._start(self._initial.terms[index], key))
        if self.is_relative:
            self.running_length.fill_(math.sqrt(self.patch_size))
            self.batches.zero_()

    @property
    def is_relative(self) -> bool:
        """Whether any radius is in units of the mean patch norm."""
        return any("rho" in term.parameters and _relative(term, "rho") for term in self.value.terms)

    def forward(self, norm: Tensor | None = None) -> AnyValue:
        """The value with its present parameters; in training this also updates the running mean."""
        unit = self._unit(norm) if self.is_relative else None
        terms = tuple(
            Value(term.row, {key: self._present(index, term, key, unit) for key in term.parameters}, term.options)
            for index, term in enumerate(self.value.terms)
        )
        return Sum(terms) if isinstance(self.value, Sum) else terms[0]

    def _present(self, index: int, term: Value, key: str, unit: Tensor | None) -> Any:
        name = self._stored.get((index, key))
        if _relative(term, key):
            assert unit is not None
            ratio: Any = term.parameters[key] if name is None else getattr(self, name).to(unit.dtype).square()
            return (ratio + FLOOR) * unit
        if name is None:
            return term.parameters[key]
        present = _raw_and_map(term.row, key)[1](getattr(self, name))
        return tuple(present.unbind(0)) if isinstance(term.row.parameters[key], tuple) else present

    def unresolved(self) -> tuple[AnyValue, Relative | None]:
        """The value of one term with a relative radius left open (at 1), and that radius, for a kernel to resolve."""
        if not self.is_relative or len(self.value.terms) > 1:
            return self(), None
        term = self.value.terms[0]
        present = {key: 1.0 if key == "rho" else self._present(0, term, key, None) for key in term.parameters}
        name = self._stored.get((0, "rho"))
        ratio: Any = term.parameters["rho"] if name is None else getattr(self, name)
        relative = Relative(ratio, self.running_length, self.batches, self.training, self.eps, self._track)
        return Value(term.row, present, term.options), relative

    def _unit(self, norm: Tensor | None) -> Tensor:
        if not self.training or norm is None:
            return self.running_length.clone()  # a later batch may change it before a backward reads it
        unit = mean_length(norm, self.eps) if norm.numel() else self.running_length.clone()
        self._track(unit.detach(), norm.numel())
        return unit

    def _track(self, unit: Tensor, count: int) -> None:
        """Let the running mean follow; torch.func changes no buffer from outside, and evaluation needs this one."""
        try:
            self._follow(unit, count)
        except RuntimeError as error:
            if not dispatch.is_transformed():
                raise
            raise RuntimeError(
                f"{self.owner} got a call in training mode inside torch.func ({', '.join(dispatch.transforms())}), "
                f"which cannot update the running mean of its relative radius ({self.value}): call `.eval()` first, "
                "make the layer with `relative=False` in its magnitude, or pass its buffers through "
                "torch.func.functional_call as arguments of the function that is transformed"
            ) from error

    @torch.no_grad()
    def _follow(self, unit: Tensor, count: int) -> None:
        """running ← running + w·(unit − running), w = max(1 − 0.999, 1/batches): a plain mean at first.

        Over ranks, `unit` is the mean over all of their patches; an empty or a non-finite batch changes nothing.
        """
        unit = unit.to(self.running_length.dtype)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            pair = torch.stack([unit * count, torch.full_like(unit, count)])
            torch.distributed.all_reduce(pair)
            counted, unit = pair[1] > 0, pair[0] / pair[1]
        elif count == 0:
            return
        else:
            counted = torch.ones_like(unit, dtype=torch.bool)
        counted = counted & unit.isfinite()
        self.batches.add_(counted.to(self.batches.dtype))
        weight = (1.0 / self.batches.clamp(min=1)).clamp(min=1.0 - MOMENTUM).to(unit.dtype)
        moved = torch.lerp(self.running_length, unit, weight)
        self.running_length.copy_(torch.where(counted, moved, self.running_length))

    def learns(self, key: str) -> bool:
        """Whether a parameter of that name is learned."""
        return any(key in term.parameters and _learned(term, key) for term in self.value.terms)

    def current(self, key: str) -> Tensor | None:
        """The present value of one parameter (of the first term that has it), as evaluation would use it."""
        unit = self.running_length if self.is_relative else None
        for index, term in enumerate(self.value.terms):
            if key in term.parameters:
                present = self._present(index, term, key, unit)
                return torch.stack(present) if isinstance(present, tuple) else torch.as_tensor(present)
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedValue:
        """Move or cast; a running mean in half precision would never move, so it stays at least float32."""
        before = self._buffers.get("running_length")
        super()._apply(fn, recurse)
        if before is not None and self.running_length.element_size() < 4:
            self.running_length = before.to(self.running_length.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        """A plain layer's state has no entries for a row: what is missing keeps its initial value, if it has one."""
        absent: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, absent, *rest)
        held = self.state_dict(keep_vars=True)
        missing.extend(key for key in absent if held[key.removeprefix(prefix)].is_meta)

    def extra_repr(self) -> str:
        return str(self.value)


def _learned(term: Value, key: str) -> bool:
    return key != "eps" and bool(term.options.get(f"learn_{key}", key in LEARNED_BY_DEFAULT))


def _relative(term: Value, key: str) -> bool:
    return key == "rho" and bool(term.options.get("relative", True))


def _without_tensors(value: AnyValue) -> AnyValue:
    """The value with defaults in place of tensors, which live on as parameters or buffers."""
    terms = tuple(
        term.with_parameters(**{k: term.row.parameters[k] for k, v in term.parameters.items() if _holds_tensor(v)})
        for term in value.terms
    )
    return Sum(terms) if isinstance(value, Sum) else terms[0]


def _holds_tensor(held: Any) -> bool:
    return any(isinstance(item, Tensor) for item in (held if isinstance(held, tuple) else (held,)))
