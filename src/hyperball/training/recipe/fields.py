"""Typed fields of frozen dataclasses: values checked against annotations, and trees read from plain mappings."""

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

from hyperball.rows import nearest

T = TypeVar("T", bound="Section")
HINTS: dict[type, dict[str, Any]] = {}


class RecipeError(ValueError):
    """A recipe says something unknown, of a wrong type, or impossible."""


class Section:
    """Part of a recipe: a frozen dataclass whose fields are checked against their annotations when it is made.

    `section` is the dotted name under which messages speak of it. Whole numbers are taken for floats and lists for
    tuples; nothing else is converted. `check` refuses values that the types allow.
    """

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, kind in hints(type(self)).items():
            object.__setattr__(self, name, conform(self.dotted(name), kind, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Refuse what is impossible; sections override this."""

    def override(self: T, changes: Mapping[str, Any]) -> T:
        """A copy with other values at dotted names."""
        return override(self, changes)

    @classmethod
    def dotted(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name

    def require(self, holds: bool, name: str, must: str) -> None:
        """Raise unless a field is as it must be."""
        if not holds:
            raise RecipeError(f"`{self.dotted(name)}` must be {must}, got {getattr(self, name)!r}")


def hints(kind: Any) -> dict[str, Any]:
    """The annotations of the fields of a dataclass, in order."""
    if kind not in HINTS:
        HINTS[kind] = resolved_hints(kind)
    return HINTS[kind]


def resolved_hints(kind: Any) -> dict[str, Any]:
    resolved = typing.get_type_hints(kind)
    return {field.name: resolved[field.name] for field in dataclasses.fields(kind)}


def conform(path: str, kind: Any, value: Any) -> Any:
    """The value as its annotation wants it, or a RecipeError that says what would do."""
    for option in options(kind):
        matched, converted = match(option, value)
        if matched:
            return converted
    raise RecipeError(f"`{path}` must be {described(kind)}, got {value!r}{suggestion(kind, value)}")


def suggestion(kind: Any, value: Any) -> str:
    """The nearest of the texts that an annotation lists, as the end of a message."""
    listed = [item for option in options(kind) if get_origin(option) is Literal for item in get_args(option)]
    close = difflib.get_close_matches(value, listed, n=3, cutoff=0.5) if isinstance(value, str) else []
    begun = [item for item in close if value.startswith(item)]
    return f"; did you mean {(begun or close)[0]!r}?" if close else ""


def options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def match(kind: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value is of one plain kind, and the value in that kind's own type."""
    origin = get_origin(kind)
    if kind is Any:
        return True, value
    if kind is type(None):
        return value is None, None
    if origin is Literal:
        return value in get_args(kind) and not isinstance(value, bool), value
    if kind is float:
        return is_number(value), float(value) if is_number(value) else value
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if origin is tuple:
        return match_tuple(get_args(kind), value)
    if origin in (dict, Mapping):
        fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        return fits, dict(value) if fits else value
    return isinstance(value, kind), value


def match_tuple(items: tuple[Any, ...], value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, value
    kinds = [items[0]] * len(value) if items[-1] is Ellipsis else list(items)
    if len(kinds) != len(value):
        return False, value
    pairs = [match(kind, item) for kind, item in zip(kinds, value, strict=True)]
    return all(fits for fits, _ in pairs), tuple(item for _, item in pairs)


def is_number(value: Any) -> bool:
    """Whether a value is a finite float, or a whole number that one can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", type(None): "null"}


def described(kind: Any) -> str:
    """An annotation in words."""
    return " or ".join(described_one(option) for option in options(kind))


def described_one(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(repr(item) for item in arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each entry {described(arguments[0])}"
        return "a list of " + ", ".join(described(item) for item in arguments)
    if dataclasses.is_dataclass(kind) or origin is dict or origin is Mapping:
        return "a mapping"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def read_section(kind: type[T], values: Any) -> T:
    """A section from a plain mapping; unknown keys are refused with the nearest known one."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"`{kind.section or 'recipe'}` must be a mapping, got {values!r}")
    fields = hints(kind)
    for key in values:
        if key not in fields:
            raise RecipeError(f"unknown key `{kind.dotted(str(key))}`; {nearest(str(key), fields)}")
    return kind(**{key: read_value(fields[key], value) for key, value in values.items()})


def read_value(kind: Any, value: Any) -> Any:
    """A section where the annotation names one, else the value as it is, which the section checks."""
    if isinstance(kind, type) and issubclass(kind, Section) and not isinstance(value, Section):
        return read_section(kind, value)
    return value


def plain(section: Section) -> dict[str, Any]:
    """Mappings, lists, texts, numbers and None alone: what JSON and YAML hold."""
    return {name: plain_value(getattr(section, name)) for name in hints(type(section))}


def plain_value(value: Any) -> Any:
    if isinstance(value, Section):
        return plain(value)
    return list(value) if isinstance(value, tuple) else value


def override(section: T, changes: Mapping[str, Any]) -> T:
    """A copy with other values at dotted names such as "model.magnitude"."""
    values: dict[str, Any] = {name: getattr(section, name) for name in hints(type(section))}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if head not in values:
            raise RecipeError(f"unknown key `{section.dotted(head)}`; {nearest(head, values)}")
        if not rest:
            values[head] = read_value(hints(type(section))[head], value)
        elif isinstance(values[head], Section):
            nested.setdefault(head, {})[rest] = value
        elif isinstance(values[head], dict):
            values[head] = {**values[head], rest: value}
        else:
            raise RecipeError(f"`{section.dotted(head)}` has no parts, got `{section.dotted(path)}`")
    values.update({head: override(values[head], part) for head, part in nested.items()})
    return type(section)(**values)


def differences(first: Section, second: Section) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two sections of a kind differ, with both values."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in hints(type(first)):
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(one, Section) and type(one) is type(other):
            found.update(differences(one, other))
        elif one != other:
            found[first.dotted(name)] = (one, other)
    return found
