"""Where and how a run computes: devices and precision through Lightning Fabric, determinism, and what was decided."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hyperball import angular as angular_table
from hyperball import radial as radial_table
from hyperball.functional.decoupled import needs_norm
from hyperball.kernels import dispatch
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.recipe.sections import ModelConfig

WORTH_COMPILING = 2_000  # steps; compilation takes half a minute or more
ACCELERATORS = ("auto", "cpu", "cuda")
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass(frozen=True)
class Decision:
    """Whether something is done, and why."""

    on: bool
    reason: str


@dataclass(frozen=True)
class Engine:
    """Fabric and what the loop asks of it."""

    fabric: Any

    @property
    def device(self) -> torch.device:
        device: torch.device = self.fabric.device
        return device

    @property
    def rank(self) -> int:
        return int(self.fabric.global_rank)

    @property
    def world_size(self) -> int:
        return int(self.fabric.world_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, value: int) -> int:
        """The largest of all processes' values."""
        if self.world_size == 1:
            return value
        return int(self.fabric.all_reduce(torch.tensor(value, device=self.device), reduce_op="max"))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.world_size == 1:
            return tensor
        found: Tensor = self.fabric.all_reduce(tensor, reduce_op="mean")
        return found

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fabric_class() -> Any:
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise RuntimeError(f"training needs lightning-fabric ({error}); pip install 'hyperball[train]'") from error
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # the record says what it would
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    return Fabric


def build_engine(recipe: Recipe, accelerator: str = "auto", devices: int | str = "auto") -> Engine:
    """Fabric for the recipe's precision: one device by default, `devices` with DDP, or what torchrun set."""
    if accelerator not in ACCELERATORS:
        raise ValueError(f"`accelerator` must be one of {', '.join(ACCELERATORS)}, got {accelerator!r}")
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise RecipeError('`accelerator` must be "cpu" or "auto" where torch finds no GPU, got "cuda"')
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if recipe.precision in ("fp16", "tf32") and accelerator == "cpu":
        raise RecipeError(f'`precision` must be "fp32" or "bf16" on a CPU, got {recipe.precision!r}')
    count, nodes = process_counts(devices, accelerator)
    present = torch.cuda.device_count()
    if accelerator == "cuda" and count > present:
        raise RecipeError(f"`devices` must be at most the {present} GPUs of this machine, got {count}")
    options: dict[str, Any] = {"accelerator": accelerator, "devices": count, "num_nodes": nodes}
    if count * nodes > 1:
        options["strategy"] = "ddp"
    fabric = fabric_class()(precision=PRECISIONS[recipe.precision], **options)
    fabric.launch()
    return Engine(fabric)


def process_counts(devices: int | str, accelerator: str) -> tuple[int, int]:
    """Processes a node, and nodes: as torchrun says, else as asked; "auto" is one, and "all" every GPU."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return local, int(os.environ.get("WORLD_SIZE", "1")) // local
    if devices == "auto":
        return 1, 1
    if devices == "all":
        return (torch.cuda.device_count() if accelerator == "cuda" else 1), 1
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f'`devices` must be a number >= 1, "auto" or "all", got {devices!r}')
    return devices, 1


@contextlib.contextmanager
def settings(recipe: Recipe) -> Iterator[None]:
    """Determinism, matrix precision and random state for a run, put back at its end."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        recipe.deterministic or before[0], warn_only=before[1] and not recipe.deterministic
    )
    torch.backends.cudnn.benchmark = not recipe.deterministic
    torch.set_float32_matmul_precision("high" if recipe.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = recipe.precision == "tf32"
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        torch.set_float32_matmul_precision(before[3])
        torch.backends.cudnn.allow_tf32 = before[4]


def decide_compile(recipe: Recipe, device_type: str, world_size: int, steps: int) -> Decision:
    """Whether the network is compiled: by default on one GPU, for runs long enough for it to pay.

    There it is a plain one, or one whose decoupled layers have no kernels of their own.
    """
    asked = recipe.engine.compile
    if asked is False:
        return Decision(False, "engine.compile is false")
    if asked:
        return Decision(True, "engine.compile is true")
    if device_type != "cuda":
        return Decision(False, "on a CPU eager is the default; engine.compile=true compiles")
    if world_size > 1:
        return Decision(False, "with several devices eager is the default; engine.compile=true compiles")
    operator = torch_operator(recipe.model)
    if recipe.model.magnitude is not None and not operator:
        return Decision(
            False, "decoupled layers run in fused kernels of their own; engine.compile=true compiles the rest"
        )
    if steps < WORTH_COMPILING:
        return Decision(False, f"{steps} steps end before compilation would pay; engine.compile=true compiles")
    why = f"; decoupled layers run in torch's operations, which compilation fuses ({operator})" if operator else ""
    return Decision(True, f"one GPU{why}")


def torch_operator(model: ModelConfig) -> str:
    """Why decoupled layers run in torch's operations on a GPU, if they do; functions of a user's own say nothing."""
    if model.magnitude is None:
        return ""
    magnitude, angular = radial_table.parse(model.magnitude), angular_table.parse(model.angular)
    if any(term.row.composed for term in (*magnitude.terms, angular)):
        return ""
    if not needs_norm(magnitude, angular, model.weighting):
        return "a linear magnitude with cosine needs no patch norm"
    return dispatch.refusal(magnitude, angular, model.weighting)


def decide_capture(recipe: Recipe, device_type: str, world_size: int, streamed: bool) -> Decision:
    """Whether the step is a CUDA graph: by default on one GPU."""
    asked = recipe.engine.capture
    if asked is False:
        return Decision(False, "engine.capture is false")
    reasons = {
        "CUDA graphs need a CUDA device": device_type != "cuda",
        "communication between devices is not captured": world_size > 1,
        "the loss scaling of fp16 is steered from the host": recipe.precision == "fp16",
    }
    for reason, holds in reasons.items():
        if holds:
            return refused(asked, "engine.capture", reason)
    return Decision(True, "one GPU" + (", batches copied into static memory" if streamed else ""))


def refused(asked: bool | None, name: str, reason: str) -> Decision:
    """No, or an error where the recipe insists."""
    if asked:
        raise RecipeError(f"`{name}` must be false or null here: {reason}, got true")
    return Decision(False, reason)
