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


def matching(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if matches(name, pattern)), None)


def as_patterns(argument: str, given: Any) -> tuple[str, ...]:
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


def choose(found: Mapping[str, nn.Module], choice: Choice) -> dict[str, str | None]:
    """For every convolution the reason why it is not chosen, or None."""
    if callable(choice):
        return {name: None if choice(name, part) else "not chosen by the function" for name, part in found.items()}
    if choice == "all":
        return dict.fromkeys(found)
    if choice == "all_but_first":
        first = next(iter(found), None)
        return {name: "the first convolution" if name == first else None for name in found}
    patterns = as_patterns("convolutions", choice)
    if isinstance(choice, str) and not any(matches(name, choice) for name in found):
        close = difflib.get_close_matches(choice, RULES, n=1)
        if close:
            raise ValueError(f"`convolutions` must be one of {RULES}, patterns or a function; {nearest(choice, RULES)}")
    refuse_unmatched("convolutions", patterns, found)
    return {name: None if matching(name, patterns) else "not among the patterns" for name in found}
