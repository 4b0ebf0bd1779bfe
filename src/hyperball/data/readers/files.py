"""Finding and checking the files of a set on disk."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from hyperball.data.errors import DataError, MissingFiles


def locate(root: Path, name: str, folders: Iterable[str], marker: str) -> Path:
    """The folder of a set: one of `folders` inside the root, or the root itself, that matches the glob `marker`."""
    folders = tuple(folders)
    if not root.exists():
        raise MissingFiles(f"{root} does not exist; it should be the folder that holds {name}")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; it should be the folder that holds {name}")
    for folder in [root / part for part in folders] + [root]:
        if next(folder.glob(marker), None) is not None:
            return folder
    raise MissingFiles(f"no {name} in {root}: {root / folders[0] / marker} is missing; download it or name its folder")


def read_bytes(path: Path) -> bytes:
    """A file's bytes, or an error that names it."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise MissingFiles(f"{path} is missing; move its folder away and download the set again") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def read_lines(path: Path) -> tuple[str, ...]:
    """The lines of a text file that are not blank."""
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text; download the set again") from error
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def class_names(path: Path, count: int, default: Iterable[str]) -> tuple[str, ...]:
    """The names of the classes from their file, where there is one, else the default."""
    found = read_lines(path) if path.exists() else tuple(default)
    if len(found) != count or len(set(found)) != count:
        raise DataError(f"{path} must name {count} different classes, one a line, got {len(set(found))}")
    return found


def check_official(path: Path, content: bytes, known: Mapping[str, str], other: Mapping[str, str]) -> None:
    """Refuse bytes that are not the publisher's; `known` and `other` map this and a sister set's file names to MD5."""
    expected = known.get(path.name.removesuffix(".gz"))
    if expected is None:
        return
    found = md5(content)
    if found == expected:
        return
    if found in other.values():
        raise DataError(f"{path} belongs to the sister set of the same layout; name the folder of the right set")
    raise DataError(f"{path} is damaged: MD5 {found}, the official file has {expected}; download the set again")


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
