"""Which kernel runs a decoupled layer, and why: a pure function of the operator and of facts about the tensors."""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.kernels.reading import export_records
from hyperball.rows import AnyValue, Row, Value

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


class Choice(NamedTuple):
    """A kernel, "triton" or "eager", and the reason."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


class Facts(NamedTuple):
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


def choose_again(magnitude: AnyValue, angular: Value, weighting: str, facts: Facts) -> Choice:
    """`choose`, which is asked at every call, from memory where nothing that it depends on has changed."""
    if not isinstance(magnitude, Value) or torch.compiler.is_compiling():
        return choose(magnitude, angular, weighting, facts)
    tables = (radial_table.TABLE.rows.get(magnitude.row.name), angular_table.TABLE.rows.get(angular.row.name), DEVICES)
    return _chosen(magnitude.row, angular.row, tables, weighting, facts)


@functools.lru_cache(maxsize=1024)
def _chosen(magnitude: Row, angular: Row, tables: tuple[object, ...], weighting: str, facts: Facts) -> Choice:
    return choose(Value(magnitude, {}), Value(angular, {}), weighting, facts)


def objection(facts: Facts) -> str:
    """What about the tensors or the surroundings asks for the eager kernel, or nothing."""
    if facts.device not in DEVICES:
        return facts.device
    return _surroundings(facts) or _tensors(facts)


def _surroundings(facts: Facts) -> str:
    if facts.rocm:
        return "ROCm"
    if not facts.triton:
        return "triton is not installed"
    if facts.exporting:
        return "exported graphs hold torch's own operators"
    if facts.forward_mode:
        return "needs forward-mode AD"
    return "inside torch.func transforms" if facts.transformed else ""


def _tensors(facts: Facts) -> str:
    per_group = facts.outputs // max(facts.groups, 1)
    if facts.dtype not in DTYPES:
        return str(facts.dtype).removeprefix("torch.")
    if facts.weight_dtype != facts.dtype and not facts.autocast:
        return "input and weight differ in dtype"
    if facts.transposed:
        return "transposed convolution"
    if facts.empty:
        return "an empty input"
    if facts.groups > 1 and per_group < NARROWEST:
        return f"groups of fewer than {NARROWEST} channels"
    return f"groups of more than {WIDEST} channels" if per_group > WIDEST else ""


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
    """The facts about an input and a weight; under autocast the input's dtype is the one it will have."""
    device = x.device.type
    autocast, dtype = device != "meta" and torch.is_autocast_enabled(device), x.dtype
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    if device not in DEVICES:
        return Facts(device, dtype, weight.dtype, outputs, groups, transposed, autocast=autocast)
    return Facts(
        device, dtype, weight.dtype, outputs, groups, transposed, x.numel() == 0, autocast, is_exporting(),
        is_transformed(), has_tangents(), HAS_TRITON, HAS_ROCM,
    )  # fmt: skip


def is_exporting() -> bool:
    """Whether torch.export, the ONNX exporter or torch.jit.trace is recording, and not torch.compile alone."""
    return export_records() or (not torch.compiler.is_compiling() and bool(torch._C._get_tracing_state()))


def is_transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) is at work; a compiled graph's operators have a rule for vmap."""
    if torch.compiler.is_compiling():
        return bool({"Grad", "Jvp"} & {*transforms()})
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return bool(active and active())


def transforms() -> tuple[str, ...]:
    """The transforms of torch.func at work, the outermost first; torch.compile asks once a graph, and guards them."""
    stack = getattr(torch._C._functorch, "get_interpreter_stack", lambda: None)()
    return tuple(str(level.key()).rpartition(".")[2] for level in stack or ())


# What torch.compiler.assume_constant_result sets, without its import of the compiler.
transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on."""
    return not torch.compiler.is_compiling() and getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
