"""Which kernel runs a decoupled layer, and why: a pure function of the operator and of facts about the tensors."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.rows import AnyValue, Value

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_ROCM = torch.version.hip is not None
DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 4096  # channels of a group that fit a tile
NARROWEST = 8  # channels of a group below which rows of a tile are too short to read
BUILT_IN = {
    "radial": ("sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron", "piecewise"),
    "angular": ("linear", "cosine", "sigmoid", "square_cosine", "power", "rectified_cosine", "piecewise"),
}


@dataclass(frozen=True)
class Choice:
    """A kernel, "triton" or "eager", and the reason."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@dataclass(frozen=True)
class Facts:
    """What the choice depends on beside the operator."""

    device: str
    dtype: torch.dtype
    weight_dtype: torch.dtype
    outputs: int
    groups: int = 1
    transposed: bool = False
    empty: bool = False
    autocast: bool = False
    exporting: bool = False
    transformed: bool = False
    forward_mode: bool = False
    triton: bool = True
    rocm: bool = False


def choose(magnitude: AnyValue, angular: Value, weighting: str, facts: Facts) -> Choice:
    """The kernel for an operator on such tensors: Triton's where nothing speaks against it."""
    against = objection(facts) or refusal(magnitude, angular, weighting)
    if against:
        return Choice("eager", against)
    return Choice("triton", f"{facts.device}, {str(facts.dtype).removeprefix('torch.')}, channels last")


def objection(facts: Facts) -> str:
    """What about the tensors or the surroundings asks for the eager kernel, or nothing."""
    per_group = facts.outputs // max(facts.groups, 1)
    rules = [
        (facts.device not in DEVICES, facts.device),
        (facts.rocm, "ROCm"),
        (not facts.triton, "triton is not installed"),
        (facts.exporting, "exported graphs hold torch's own operators"),
        (facts.forward_mode, "needs forward-mode AD"),
        (facts.transformed, "inside torch.func transforms"),
        (facts.dtype not in DTYPES, str(facts.dtype).removeprefix("torch.")),
        (facts.weight_dtype != facts.dtype and not facts.autocast, "input and weight differ in dtype"),
        (facts.transposed, "transposed convolution"),
        (facts.empty, "an empty input"),
        (facts.groups > 1 and per_group < NARROWEST, f"groups of fewer than {NARROWEST} channels"),
        (per_group > WIDEST, f"groups of more than {WIDEST} channels"),
    ]
    reasons = [reason for holds, reason in rules if holds]
    return reasons[0] if reasons else ""


def refusal(magnitude: AnyValue, angular: Value, weighting: str) -> str:
    """What about the operator asks for the eager kernel, or nothing."""
    own = [term.name for term in (*magnitude.terms, angular) if term.row.composed]
    if own:
        return f"{', '.join(own)} is user-defined"
    if len(magnitude.terms) > 1:
        return "a sum of magnitudes"
    if weighting == "split":
        return "split weighting"
    if magnitude.terms[0].name not in BUILT_IN["radial"] or angular.name not in BUILT_IN["angular"]:
        return f"no Triton row for {magnitude.name} and {angular.name}"
    known = (radial_table.TABLE.rows.get(magnitude.name), angular_table.TABLE.rows.get(angular.name))
    return "" if known == (magnitude.terms[0].row, angular.row) else "a row that is not the table's"


def facts_of(x: Tensor, weight: Tensor, outputs: int, groups: int = 1, transposed: bool = False) -> Facts:
    """The facts about an input and a weight."""
    device = x.device.type
    if device not in DEVICES:
        return Facts(device, x.dtype, weight.dtype, outputs, groups, transposed)
    return Facts(
        device, x.dtype, weight.dtype, outputs, groups, transposed, x.numel() == 0, torch.is_autocast_enabled(device),
        is_exporting(), is_transformed(), has_tangents(), HAS_TRITON, HAS_ROCM,
    )  # fmt: skip


def is_exporting() -> bool:
    """Whether torch.export, the ONNX exporter or torch.jit.trace is recording."""
    check = getattr(torch.compiler, "is_exporting", None)
    return bool(check and check()) or (not torch.compiler.is_compiling() and bool(torch._C._get_tracing_state()))


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) is at work."""
    if torch.compiler.is_compiling():
        return False
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on."""
    return not torch.compiler.is_compiling() and getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
