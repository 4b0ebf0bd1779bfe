"""Weights from elsewhere: into a fresh network before training, or back out of a run's folder."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from hyperball.nn.learned import LearnedValue
from hyperball.on_disk import CHECKPOINTS
from hyperball.training.storage.checkpoint import Checkpoint, CheckpointError, check_fit, load_checkpoint, sections_of
from hyperball.training.update.optimizers import RADII


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a model's weights from a run's folder or a .safetensors file, strictly but for radii it does not have."""
    put(model, read_weights(Path(path)), str(path))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a run's latest checkpoint (with averaged weights, if it has them) or in a safetensors file."""
    if path.is_dir():
        return weights_of(load_checkpoint(path / CHECKPOINTS)[0])
    if path.suffix == ".safetensors":
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error
        sections = sections_of(payload, path)
        if "model" not in sections:
            return {key: tensor for key, held in sections.items() for tensor in held.values()}
        return {**sections["model"], **sections.get("average", {})}
    raise CheckpointError(f"weights must be a run's folder or a .safetensors file, got {path}")


def weights_of(checkpoint: Checkpoint, average: bool = True) -> dict[str, Tensor]:
    """The model's state dict in a checkpoint, with averaged weights where it has some and `average` asks for them."""
    averaged = checkpoint.tensors.get("average", {}) if average else {}
    return {**checkpoint.tensors["model"], **averaged}


def put(model: nn.Module, state: dict[str, Tensor], where: str, *, strict: bool = False) -> None:
    """Load a state dict; unless `strict`, entries of radii may be absent and keep their initial values."""
    optional = set() if strict else radius_names(model)
    check_fit(state, model.state_dict(), where, may_lack=optional.__contains__)
    model.load_state_dict(state, strict=False)


def radius_names(model: nn.Module) -> set[str]:
    """The entries of a state dict that belong to operators: what a plain network does not have."""
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    owned = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, LearnedValue))
    return {name for name in names if name.startswith(owned) or name.rpartition(".")[2] in RADII}
