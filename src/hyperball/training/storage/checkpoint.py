"""Checkpoints: a safetensors file and a JSON file beside it that holds its SHA-256, and nothing that is unpickled.

The JSON file is written last and carries a checksum of its own; a pair counts once both are whole. The one before the
latest is kept, and is what a run resumes from where the latest is damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hyperball.diagnose import jsonable
from hyperball.files import write_bytes

FORMAT = 1
KEPT = 2
NAME = re.compile(r"^step-(\d{9})\.json$")
SEPARATOR = "/"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, of another model or could not be written."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a run at a step, by section ("model", "average", "optimizer"), and everything else of it."""

    step: int
    info: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    path: Path | None = None


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, whole or not at all, and drop all but the latest two."""
    path = folder / f"step-{checkpoint.step:09d}.json"
    try:
        payload = serialized(checkpoint.tensors)
        write_bytes(path.with_suffix(".safetensors"), payload)
        document = {
            "format": FORMAT,
            "step": checkpoint.step,
            "tensors": {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()},
            "info": jsonable(checkpoint.info),
        }
        document["sha256"] = digest(document)
        write_bytes(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {path} ({error}); {standing(folder)}") from error
    for step in saved_steps(folder)[:-KEPT]:
        for suffix in (".json", ".safetensors"):
            (folder / f"step-{step:09d}{suffix}").unlink(missing_ok=True)
    return path


def standing(folder: Path) -> str:
    """What is left to resume from, for messages."""
    steps = saved_steps(folder)
    return f"the checkpoint of step {steps[-1]} is untouched" if steps else "there is no earlier checkpoint"


def serialized(sections: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The bytes of a safetensors file with names "section/key"."""
    from safetensors.torch import save

    flat = {
        f"{section}{SEPARATOR}{key}": tensor.detach().cpu().clone().contiguous()
        for section, tensors in sections.items()
        for key, tensor in tensors.items()
    }
    return bytes(save(flat))


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document without its own checksum."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def saved_steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint, in ascending order."""
    names = (NAME.match(path.name) for path in folder.glob("step-*.json"))
    return sorted(int(name.group(1)) for name in names if name)


def load_checkpoint(folder: Path) -> tuple[Checkpoint, list[str]]:
    """The latest whole checkpoint, and a note on each damaged one that was passed over."""
    problems: list[str] = []
    for step in reversed(saved_steps(folder)):
        try:
            checkpoint = read_checkpoint(folder / f"step-{step:09d}.json")
        except CheckpointError as error:
            problems.append(str(error))
            continue
        return checkpoint, [f"{problem}; using the checkpoint of step {step}" for problem in problems]
    if problems:
        raise CheckpointError("; ".join([*problems, "there is no whole checkpoint to resume from"]))
    raise CheckpointError(f"there is no checkpoint in {folder}")


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, verified."""
    document = read_document(path)
    tensors_path = path.with_suffix(".safetensors")
    try:
        payload = tensors_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{tensors_path} cannot be read ({error})") from error
    expected = document["tensors"]
    if len(payload) != expected["bytes"]:
        raise CheckpointError(f"{tensors_path} has {len(payload)} bytes, must have {expected['bytes']}")
    if hashlib.sha256(payload).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{tensors_path} is damaged: its SHA-256 is not the one in {path.name}")
    return Checkpoint(int(document["step"]), document["info"], sections_of(payload, tensors_path), path)


def read_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        whole = digest(document) == document["sha256"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it is not a checkpoint's JSON ({type(error).__name__})") from error
    if not whole:
        raise CheckpointError(f"{path} is damaged: its checksum does not fit its content")
    if document["format"] != FORMAT:
        raise CheckpointError(f"{path} must have format {FORMAT}, got {document['format']!r}")
    return dict(document)


def sections_of(payload: bytes, path: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of a safetensors file, by section."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        flat = load(payload)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error})") from error
    sections: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        section, _, key = name.partition(SEPARATOR)
        sections.setdefault(section, {})[key] = tensor
    return sections


def check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], where: str, may_lack: Any = None) -> None:
    """Raise a CheckpointError unless names and shapes are those of the model; `may_lack(name)` allows absences."""
    missing = [name for name in expected if name not in found and not (may_lack and may_lack(name))]
    extra = [name for name in found if name not in expected]
    shapes = [
        f"{name} is {list(found[name].shape)}, must be {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    problems = [f"lacks {some(missing)}"] * bool(missing) + [f"has unknown {some(extra)}"] * bool(extra)
    problems += [some(shapes)] * bool(shapes)
    if problems:
        raise CheckpointError(f"{where} is of another model: it " + "; ".join(problems))


def some(items: list[str], limit: int = 3) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
