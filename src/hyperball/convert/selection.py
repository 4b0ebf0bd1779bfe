"""Which layers a conversion takes: all, all but the first, by path patterns, or by a function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hyperball.rows import nearest

RULES = ("all", "all_but_first")
Choice = str | Iterable[str] | Callable[[str, nn.Module], bool]


def matches(name: str, pattern: str) -> bool:
    """Whether a path, or a module that it lies in, matches: "layer4" and "layer4.*" both match "layer4.0.conv1"."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def aliases(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every path of every module: those that are shared have several."""
    paths: dict[nn.Module, tuple[str, ...]] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        paths[part] = (*paths.get(part, ()), name)
    return paths


def skipped(paths: Iterable[str], patterns: Iterable[str]) -> str | None:
    """The reason why a module with these paths is skipped, or None."""
    found = next((pattern for pattern in patterns for path in paths if matches(path, pattern)), None)
    return None if found is None else f"skipped by {found!r}"


def as_patterns(argument: str, given: Any) -> tuple[str, ...]:
    """The patterns of an argument, a text or several."""
    if not isinstance(given, str) and (isinstance(given, Mapping) or not isinstance(given, Iterable)):
        raise TypeError(f"`{argument}` must be a path pattern such as 'layer4.*', or several, got {given!r}")
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"`{argument}` must hold path patterns such as 'layer4.*', got {pattern!r}")
    return patterns


def refuse_unmatched(argument: str, patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raise for a pattern that matches none of the names, with those nearest to it."""
    known = [name for name in names if name]
    for pattern in patterns:
        if any(matches(name, pattern) for name in known):
            continue
        parts = sorted({".".join(name.split(".")[:depth]) for name in known for depth in range(1, name.count(".") + 2)})
        close = difflib.get_close_matches(pattern.strip("*."), parts, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known: {', '.join(known[:8])}"
        raise ValueError(f"`{argument}` has the pattern {pattern!r}, which matches nothing; {hint}")


def check_skip(model: nn.Module, skip: Any) -> tuple[str, ...]:
    """The patterns of `skip`, each of which must match a module."""
    patterns = as_patterns("skip", skip)
    refuse_unmatched("skip", patterns, (name for name, _ in model.named_modules(remove_duplicate=False)))
    return patterns


def choose(
    found: Mapping[str, nn.Module], choice: Choice, paths: Mapping[nn.Module, tuple[str, ...]]
) -> dict[str, str | None]:
    """For every convolution the reason why it is not chosen, or None; a shared one is chosen by any of its paths."""
    if callable(choice):
        return {
            name: None if any(choice(path, part) for path in paths[part]) else "not chosen by the function"
            for name, part in found.items()
        }
    if isinstance(choice, str) and choice in RULES:
        first = next(iter(found), None) if choice == "all_but_first" else None
        return {name: "the first convolution" if name == first else None for name in found}
    patterns = as_patterns("convolutions", choice)
    known = [path for part in found.values() for path in paths[part]]
    unmatched = isinstance(choice, str) and not any(matches(path, choice) for path in known)
    if isinstance(choice, str) and unmatched and difflib.get_close_matches(choice, RULES, n=1):
        raise ValueError(f"`convolutions` must be one of {RULES}, patterns or a function; {nearest(choice, RULES)}")
    refuse_unmatched("convolutions", patterns, known)
    return {name: None if skipped(paths[part], patterns) else "not among the patterns" for name, part in found.items()}
