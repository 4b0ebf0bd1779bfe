"""Results on disk: a journal that an interrupted evaluation goes on from, and records that are whole or not there.

The journal is `<record>.partial.jsonl`: a first line with what identifies the evaluation, then one line for every batch
of every stage. A last line that was cut off is dropped. When the record is written, the journal goes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.attacks.methods.task import Verdict
from hyperball.files import write_bytes
from hyperball.on_disk import is_number

DIGITS = 6
SOURCE = ("source_sha256", "source_answers")  # a source may come later: nothing before depended on one
ANSWERS = ("answers", "source_answers")
ELSEWHERE = "write elsewhere, or pass resume=False (--fresh) to begin anew"


class RecordError(ValueError):
    """A record or a journal is of another evaluation, or unreadable."""


def journal_path(record: Path) -> Path:
    """Where the journal of a record is."""
    return record.with_name(f"{record.name}.partial.jsonl")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is not a readable record ({error})") from None


def fingerprint(*parts: Any) -> str:
    """SHA-256 over tensors, modules and texts, in order."""
    digest = hashlib.sha256()
    for part in parts:
        tensors = part.state_dict() if isinstance(part, nn.Module) else {"": part} if isinstance(part, Tensor) else None
        if tensors is None:
            digest.update(str(part).encode())
            continue
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):  # what `get_extra_state` gives
                digest.update(f"{name}{tensor!r}".encode())
                continue
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rounded(values: Tensor) -> list[float | None]:
    """Six significant digits; null for what is not finite."""
    return [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def to_tree(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON: a text of 0 and 1, and two lists."""
    correct = "".join("1" if value else "0" for value in verdict.correct.tolist())
    return {"correct": correct, "loss": rounded(verdict.loss), "distance": rounded(verdict.distance)}


def from_tree(tree: dict[str, Any]) -> Verdict:
    """The verdict of `to_tree`, with inf for null, and NaN for what a slim record leaves out."""
    count = len(tree["correct"])
    loss, distance = (
        torch.tensor(
            [math.inf if value is None else value for value in tree.get(key, [math.nan] * count)], dtype=torch.float32
        )
        for key in ("loss", "distance")
    )
    return Verdict(torch.tensor([mark == "1" for mark in tree["correct"]], dtype=torch.bool), loss, distance)


class Journal:
    """Verdicts by key, in memory and, where a path is given, on disk at once."""

    def __init__(self, path: Path | None, identity: dict[str, Any], resume: bool = True) -> None:
        self.path = path
        self.lines: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        if resume and path.exists():
            self.lines = read_lines(path, identity)
        text = "".join(json.dumps(line) + "\n" for line in ({"evaluation": identity}, *self.lines.values()))
        write_bytes(path, text.encode())

    def get(self, key: str) -> dict[str, Any] | None:
        return self.lines.get(key)

    def put(self, key: str, **values: Any) -> dict[str, Any]:
        """Keep a line, and write it before going on."""
        line = {"key": key, **values}
        self.lines[key] = line
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return line

    def close(self) -> None:
        """Remove the file: its lines are in a record."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def read_lines(path: Path, identity: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The whole lines of a journal, by key, if it is of this evaluation; a file that is no journal is refused."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is no readable journal ({error}); move it away") from None
    lines: list[Any] = []
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    if not texts:
        return {}
    head = lines[0].get("evaluation") if lines and isinstance(lines[0], dict) else None
    if not isinstance(head, dict) or not all(is_line(line) for line in lines[1:]):
        raise RecordError(f"{path} is no journal of attacks; move it away")
    check_identity(path, head, identity)
    return {line["key"]: line for line in lines[1:]}


def is_line(line: Any) -> bool:
    """Whether a line of a journal holds a key, seconds and a verdict."""
    kinds = {"key": str, "correct": str, "loss": list, "distance": list, "seconds": int | float}
    sound = isinstance(line, dict) and all(isinstance(line.get(key), kind) for key, kind in kinds.items())
    lists = (line["loss"], line["distance"]) if sound else ()
    return sound and all(len(held) == len(line["correct"]) and are_numbers(held) for held in lists)


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether every entry is a number, or null for one that is not finite."""
    return all(value is None or is_number(value) for value in values)


def check_identity(path: Path, held: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to mix two evaluations in one file; a file from before answers were kept tells none."""
    for key, value in asked.items():
        known = held.get(key)
        if (key in ANSWERS and key not in held) or (key in SOURCE and known is None):
            continue
        if key in ANSWERS and known is not None and value is not None:
            if not alike(known, value):
                raise RecordError(
                    f"{path} is of another evaluation: the {'source' if key in SOURCE else 'model'} gives other "
                    f"logits here (`{key}`); {ELSEWHERE}"
                )
        elif known != value:
            raise RecordError(
                f"{path} is of another evaluation: `{key}` is {shown(known)} there and {shown(value)} here; {ELSEWHERE}"
            )


def shown(value: Any) -> str:
    return repr(value) if len(repr(value)) < 100 else "something else"


def alike(held: Any, asked: Any) -> bool:
    """Whether two tables of logits are the same up to rounding; null equals null."""
    try:
        known, found = (
            torch.tensor([[math.nan if v is None else v for v in row] for row in table["logits"]])
            for table in (held, asked)
        )
        within = max(held["within"], asked["within"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False
    if known.shape != found.shape:
        return False
    largest = float(torch.nan_to_num(found).abs().amax())
    return torch.allclose(known, found, rtol=0.0, atol=within * largest, equal_nan=True)
