"""Weights in safetensors with a JSON file beside them, and state dicts checked before they are loaded."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hyperball.convert.heads import ProjectedLinear
from hyperball.nn.batch_norm import RADII, RobustBatchNorm1d, RobustBatchNorm2d
from hyperball.nn.learned import LearnedValue
from hyperball.nn.pooling import RobustPool1d, RobustPool2d

FORMAT = "hyperball"


def save(model: nn.Module, path: str | Path, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the state dict as safetensors, and `metadata` with a SHA-256 as JSON beside it: model.safetensors, .json.

    Each file is written whole and then renamed. Tensors that share memory are stored once each.
    """
    path = checked_path(path)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    seen: set[int] = set()
    for name, tensor in stored.items():
        place = tensor.untyped_storage().data_ptr()
        if place in seen or tensor.untyped_storage().nbytes() != tensor.nbytes:
            stored[name] = tensor.clone()
        seen.add(place)
    text = json.dumps({"format": FORMAT, **dict(metadata or {})}, sort_keys=True)
    data = safetensors().save(stored, metadata={"hyperball": text})
    described = {**json.loads(text), "sha256": hashlib.sha256(data).hexdigest(), "tensors": len(stored)}
    write_whole(path, data)
    write_whole(path.with_suffix(".json"), (json.dumps(described, indent=2, sort_keys=True) + "\n").encode())
    return path


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file and the metadata that `save` gave it ({} where another tool wrote it)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    data = path.read_bytes()
    beside = path.with_suffix(".json")
    if beside.is_file():
        expected = json.loads(beside.read_text(encoding="utf-8")).get("sha256")
        if expected is not None and expected != hashlib.sha256(data).hexdigest():
            raise ValueError(f"{path} is not what {beside.name} describes: the SHA-256 differs")
    try:
        tensors = safetensors().load(data)
    except Exception as error:  # the package's own kind of error
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return tensors, json.loads(header.get("hyperball", "{}"))


def load(model: nn.Module, path: str | Path) -> dict[str, Any]:
    """Load a safetensors file into a model of the same architecture and return its metadata."""
    tensors, metadata = read(path)
    load_state(model, tensors)
    return metadata


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`model.load_state_dict` that checks names and shapes first, so that a wrong state leaves the model as it was.

    What a plain network's state lacks (radii, mean norms, a projection before the classifier) keeps its values.
    """
    own = model.state_dict()
    kept = {name: own[name] for name in own.keys() & optional_names(model) - state.keys()}
    missing = sorted(own.keys() - state.keys() - kept.keys())
    unexpected = sorted(state.keys() - own.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if missing or unexpected or shapes:
        parts = [f"{len(missing)} entries are missing ({listed(missing)})"] if missing else []
        parts += [f"{len(unexpected)} are unknown ({listed(unexpected)})"] if unexpected else []
        parts += [f"{len(shapes)} have another shape ({listed(shapes)})"] if shapes else []
        raise ValueError(f"the state dict is not of this {type(model).__name__}: {'; '.join(parts)}")
    model.load_state_dict({**state, **kept})


def optional_names(model: nn.Module) -> set[str]:
    """The entries of operators, robust poolings, projections and radii of robust BatchNorm."""
    names: set[str] = set()
    for path, part in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        held = part.state_dict()
        if isinstance(part, LearnedValue | RobustPool1d | RobustPool2d):
            names.update(prefix + name for name in held)
        elif isinstance(part, ProjectedLinear):
            names.update(prefix + name for name in held if name.partition(".")[0] in ("norm", "projection"))
        elif isinstance(part, RobustBatchNorm1d | RobustBatchNorm2d):
            names.update(prefix + name for name in held if name in RADII)
    return names


def listed(names: list[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", …" if len(names) > shown else "")


def checked_path(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"`path` must end in .safetensors, got {path.name!r}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the file, flush to the disk, then rename: a reader sees all or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("safetensors is needed to store weights: pip install 'hyperball[train]'") from error
