"""Files that are whole or not there: temporary file, fsync, rename, fsync of the folder; JSON and YAML trees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hyperball.on_disk import deeper_than

SUFFIXES = (".json", ".yaml", ".yml")
DEEPEST = 50
FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


class FileError(ValueError):
    """A file is missing, unreadable or of another kind than its name says."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _sync(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, tree: Any) -> None:
    write_bytes(path, (json.dumps(tree, indent=1, allow_nan=False) + "\n").encode())


def write_tree(path: Path, tree: Any) -> None:
    """JSON or YAML, by the suffix."""
    _check_suffix(path)
    if path.suffix == ".json":
        write_json(path, tree)
    else:
        write_bytes(path, _yaml().safe_dump(tree, sort_keys=False, allow_unicode=True).encode())


def read_tree(path: Path) -> Any:
    """The tree of a JSON or YAML file."""
    _check_suffix(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError("is no regular file")  # to read from a pipe is to wait for ever
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileError("no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"cannot be read ({error})") from None
    if path.suffix == ".json":
        return _parsed(lambda source: json.loads(source, object_pairs_hook=_each_once), text, ValueError, "JSON")
    yaml = _yaml()
    odd = (yaml.YAMLError, ValueError, IndexError)  # the last two: scalars that only look like a date or a number
    return _parsed(lambda source: yaml.load(source, _loader(yaml)), text, odd, "YAML") or {}


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of a JSON object, whose keys must differ as YAML's do."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def _parsed(
    read: Callable[[str], Any], text: str, failures: type[Exception] | tuple[type[Exception], ...], kind: str
) -> Any:
    try:
        tree = read(text)
    except failures as error:
        raise FileError(f"is not valid {kind} ({' '.join(str(error).split())})") from None
    except RecursionError:
        raise FileError(f"must be nested at most {DEEPEST} deep") from None
    if deeper_than(tree, DEEPEST):
        raise FileError(f"must be nested at most {DEEPEST} deep")
    return tree


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise FileError(f"must end in one of {', '.join(SUFFIXES)}, got {path.suffix!r}")


def _yaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise FileError(f"YAML needs PyYAML ({error}); write JSON, or pip install 'hyperball[train]'") from None
    return yaml


def _loader(yaml: Any) -> Any:
    """The safe loader, which also takes 1e-3 for a number, as JSON and people do, and refuses a key given twice."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = [key for key in keys if keys.count(key) > 1]
            if twice:
                raise yaml.YAMLError(f"the key {twice[0]!r} stands there twice")
            return super().construct_mapping(node, deep)

    known = yaml.SafeLoader.yaml_implicit_resolvers
    Loader.yaml_implicit_resolvers = {key: list(value) for key, value in known.items()}
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
    return Loader
