"""Weights in safetensors with a JSON file beside them, and state dicts checked before they are loaded."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.convert.heads import ProjectedLinear
from hyperball.convert.recipes import stored_form
from hyperball.nn.batch_norm import RADII, RobustBatchNorm1d, RobustBatchNorm2d
from hyperball.nn.learned import LearnedValue
from hyperball.nn.pooling import RobustPool1d, RobustPool2d

FORMAT = "hyperball"


def save(model: nn.Module, path: str | Path, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the state dict as safetensors, and `metadata` with a SHA-256 as JSON beside it: model.safetensors, .json.

    `metadata` is in the safetensors file too. Each file is written whole and then renamed, and a description of older
    weights goes first, so that a crash never leaves two files that contradict each other. A .json file that `save` did
    not write is not touched: that is an error. Tensors that share memory are stored once each.
    """
    path, beside = checked_path(path), Path(path).with_suffix(".json")
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}")
    refuse_foreign(beside)
    stored = tensors_apart(model.state_dict())
    text = json.dumps({**dict(metadata or {}), "format": FORMAT}, sort_keys=True, default=stored_form)
    data = safetensors().save(stored, metadata={"hyperball": text})
    described = {**json.loads(text), "sha256": hashlib.sha256(data).hexdigest(), "tensors": len(stored)}
    with written(path, data) as weights, written(beside, (json.dumps(described, indent=2) + "\n").encode()) as words:
        beside.unlink(missing_ok=True)
        weights.replace(path)
        words.replace(beside)
    return path


def tensors_apart(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict on the CPU, each with memory of its own."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, held in state.items():
        if not isinstance(held, Tensor):
            raise TypeError(f"`model` has the entry {name!r} that is no tensor but {type(held).__name__}")
        tensor = held.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        whole = place not in seen and tensor.untyped_storage().nbytes() == tensor.nbytes
        stored[name] = tensor if whole else tensor.clone()
        seen.add(place)
    return stored


def refuse_foreign(beside: Path) -> None:
    """Raise where the place of the description is taken by a file that `save` did not write."""
    if beside.exists():
        try:
            ours = described_by(beside).get("format") == FORMAT
        except ValueError:
            ours = False
        if not ours:
            raise FileExistsError(f"{beside} was not written by hyperball.convert.save: take another `path` or move it")


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file and the metadata that `save` gave it ({} where another tool wrote it).

    Whatever is wrong with the file, or with the JSON beside it, is a ValueError that names it.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    data = path.read_bytes()
    beside = path.with_suffix(".json")
    if beside.is_file():
        described = described_by(beside)
        if described.get("format") == FORMAT and described.get("sha256") != hashlib.sha256(data).hexdigest():
            raise ValueError(f"{path} is not what {beside.name} describes: the SHA-256 differs")
    try:
        tensors = safetensors().load(data)
    except Exception as error:  # the package's own kind of error
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    return tensors, json_object(header.get("hyperball", "{}"), f"the metadata of {path}")


def described_by(beside: Path) -> dict[str, Any]:
    return json_object(beside.read_bytes(), str(beside))


def json_object(text: str | bytes, source: str) -> dict[str, Any]:
    """The mapping that a JSON text holds, or a ValueError that names where the text is from."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{source} is damaged, not JSON: {reason}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{source} is damaged: it must be a JSON object, got {type(held).__name__}")
    return held


def load(model: nn.Module, path: str | Path) -> dict[str, Any]:
    """Load a safetensors file into a model of the same architecture and return its metadata."""
    tensors, metadata = read(path)
    load_state(model, tensors)
    return metadata


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`model.load_state_dict` that checks names, shapes and kinds of numbers first: a wrong state changes nothing.

    What a plain network's state lacks (radii, mean norms, a projection before the classifier) keeps its values.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` must be a mapping of names to tensors, got {type(state).__name__}")
    own = model.state_dict()
    kept = {name: own[name] for name in own.keys() & optional_names(model) - state.keys()}
    wrong = {
        "are missing": sorted(own.keys() - state.keys() - kept.keys()),
        "are unknown": sorted(map(str, state.keys() - own.keys())),
        **unlike(own, state),
    }
    parts = [f"{len(names)} {fault} ({listed(names)})" for fault, names in wrong.items() if names]
    if parts:
        parts[0] = parts[0].replace(" are missing", " entries are missing")
        raise ValueError(f"the state dict is not of this {type(model).__name__}: {'; '.join(parts)}")
    model.load_state_dict({**state, **kept})


def unlike(own: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, list[str]]:
    """The entries of a state that are no tensors, or whose shape or kind of number is another, by fault."""
    strange, shapes, kinds = [], [], []
    for name in own.keys() & state.keys():
        held, given = own[name], state[name]
        if not isinstance(held, Tensor):
            continue
        if not isinstance(given, Tensor):
            strange.append(f"{name} is {type(given).__name__}")
        elif given.shape != held.shape:
            shapes.append(f"{name} is {tuple(given.shape)}, not {tuple(held.shape)}")
        elif number_kind(given) != number_kind(held):
            kinds.append(f"{name} is {given.dtype}, not {held.dtype}")
    faults = {"are no tensors": strange, "have another shape": shapes, "hold other numbers": kinds}
    return {fault: sorted(names) for fault, names in faults.items()}


def number_kind(tensor: Tensor) -> tuple[bool, bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


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


@contextmanager
def written(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside `path` with all of the data, flushed to the disk, to be renamed; it is gone at the end."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError("safetensors is needed to store weights: pip install 'hyperball[train]'") from error
