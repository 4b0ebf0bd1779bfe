"""Files that others wrote, read with suspicion: whole JSON of a bearable size, or a sentence that says why not."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.on_disk import deeper_than, is_number

MOST_BYTES = 32 * 2**20
DEEPEST = 100  # levels of a record
LONGEST = 160
LINKED = "a link to a folder: links are not followed"


class RecordError(ValueError):
    """A file is not what it should be."""


def read_text(path: Path) -> str:
    """The text of a regular file; a pipe, a loop of links or a file beyond all measure is refused."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise RecordError(f"{path.name} is no regular file")
        if found.st_size > MOST_BYTES:
            raise RecordError(
                f"{path.name} has {found.st_size / 2**20:,.0f} MiB, more than the {MOST_BYTES >> 20} read"
            )
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise RecordError(f"{path.name} cannot be read: {error.strerror}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    try:
        tree = json.loads(read_text(path))
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path.name} is not whole JSON: {' '.join(str(error).split())[:LONGEST]}") from None
    if deeper_than(tree, DEEPEST):
        raise RecordError(f"{path.name} must be nested at most {DEEPEST} deep")
    if not isinstance(tree, dict):
        raise RecordError(f"{path.name} must hold an object, got {shown(tree)}")
    return tree


@dataclass(frozen=True)
class Place:
    """A folder, the names of its files, and what could not be entered: its name and why."""

    folder: Path
    files: tuple[str, ...] = ()
    closed: tuple[tuple[str, str], ...] = ()


def walk(root: Path) -> Iterator[Place]:
    """A folder and those below, in the order of numbers in names, however deep; hidden folders are passed over."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: natural(entry.name))
        except OSError as error:
            yield Place(folder, closed=((".", f"cannot be read: {error.strerror}"),))
            continue
        inside = {entry.name: entry.is_symlink() for entry in entries if os.path.isdir(entry)}
        folders = [name for name in inside if not name.startswith(".")]
        files = tuple(entry.name for entry in entries if entry.name not in inside)
        yield Place(folder, files, tuple((name, LINKED) for name in folders if inside[name]))
        waiting += [folder / name for name in reversed(folders) if not inside[name]]


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts seed-2 before seed-10."""
    parts = [part for part in re.split(r"(\d{1,18})", name) if part]
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def mapping(tree: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    value = tree.get(key)
    if not isinstance(value, dict):
        raise RecordError(f"{file}: `{key}` must be an object, got {shown(value)}")
    return value


def sequence(tree: Mapping[str, Any], key: str, file: str) -> list[Any]:
    value = tree.get(key)
    if not isinstance(value, list):
        raise RecordError(f"{file}: `{key}` must be a list, got {shown(value)}")
    return value


def shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def clipped(value: Any) -> str:
    """A text of bearable length."""
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def texts(value: Any) -> tuple[str, ...]:
    """The texts and numbers of a list as texts; nothing where there is no list."""
    held = value if isinstance(value, list) else ()
    return tuple(clipped_note(entry) for entry in held if isinstance(entry, str) or is_number(entry))


def clipped_note(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 4 * LONGEST else f"{text[: 4 * LONGEST - 1]}…"


def is_share(value: Any) -> bool:
    """Whether a value is an accuracy: a number in [0, 1]."""
    return is_number(value) and 0 <= value <= 1


def check_shares(held: Mapping[str, Any], file: str) -> None:
    """Refuse accuracies outside of [0, 1], which are percentages or no accuracies."""
    for name, value in held.items():
        if is_number(value) and not is_share(value):
            raise RecordError(f"{file}: `{clipped(name)}` must be an accuracy in [0, 1], got {shown(value)}")


def numbers(tree: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a mapping."""
    return {str(key): float(value) for key, value in tree.items() if is_number(value)}


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a list; nothing where there is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def number_list(value: Any) -> list[float]:
    """The finite numbers of a list; nothing where there is no list."""
    return [float(entry) for entry in value if is_number(entry)] if isinstance(value, list) else []


def all_numbers(tree: Mapping[str, Any], key: str, file: str) -> tuple[float, ...]:
    """A list that holds finite numbers and nothing else."""
    held = sequence(tree, key, file)
    for entry in held:
        if not is_number(entry):
            raise RecordError(f"{file}: `{key}` must hold numbers, got {shown(entry)}")
    return tuple(map(float, held))


def pairs(tree: Mapping[str, Any], names: tuple[str, str], file: str) -> tuple[tuple[float, float], ...]:
    """The pairs of finite numbers of two lists of one length, which hold numbers and gaps: NaN, infinity or null."""
    xs, ys = (sequence(tree, name, file) for name in names)
    same_length(names, xs, ys, file)
    for name, held in zip(names, (xs, ys), strict=True):
        for entry in held:
            if entry is not None and type(entry) not in (float, int):
                raise RecordError(f"{file}: `{name}` must hold numbers, got {shown(entry)}")
    return tuple((float(x), float(y)) for x, y in zip(xs, ys, strict=True) if is_number(x) and is_number(y))


def same_length(names: tuple[str, str], first: list[Any], second: list[Any], file: str) -> None:
    """Refuse two lists of which one goes on where the other ends."""
    if len(first) != len(second):
        told = f"`{names[0]}` and `{names[1]}` must be of one length"
        raise RecordError(f"{file}: {told}, got {len(first):,} and {len(second):,}")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves.update(flat(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
