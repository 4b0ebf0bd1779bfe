"""`list`: the names that recipes and options take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from hyperball.cli.parsing import choose, parser

Rows = list[tuple[str, str]]


def models() -> Rows:
    from hyperball import models

    own = [(name, models.describe(name).description) for name in models.names()]
    return [*own, ("torchvision/NAME", "any model of torchvision"), ("timm/NAME", "any model of timm")]


def radials(kind: Literal["magnitude", "penalty"]) -> Rows:
    from hyperball import radial

    return [(name, getattr(radial, name).formula) for name in radial.names(kind)]


def angulars() -> Rows:
    from hyperball import angular

    return [(name, getattr(angular, name).formula) for name in angular.names()]


def data_sets() -> Rows:
    from hyperball import data

    return [(name, data.about(name)) for name in data.names()]


def recipes() -> Rows:
    from hyperball.experiments.catalog import RECIPES

    return [(name, entry.about) for name, entry in RECIPES.items()]


def tables() -> Rows:
    from hyperball.experiments.tables import TABLES

    return [(name, make().title) for name, make in TABLES.items()]


KINDS: dict[str, Callable[[], Rows]] = {
    "models": models,
    "magnitudes": lambda: radials("magnitude"),
    "angulars": angulars,
    "penalties": lambda: radials("penalty"),
    "data": data_sets,
    "recipes": recipes,
    "tables": tables,
}


def names(given: Sequence[str]) -> int:
    """`hyperball list KIND`."""
    options = parser("list")
    options.add_argument("kind", nargs="?", metavar="KIND", help=f"{', '.join(KINDS)}; all of them without one")
    kind = options.parse_args(given).kind
    for number, name in enumerate([choose("kind", kind, KINDS)] if kind else KINDS):
        if kind is None:
            print(f"{chr(10) if number else ''}{name}")
        show(KINDS[name](), "" if kind else "  ")
    return 0


def show(rows: Rows, indent: str) -> None:
    width = max(len(name) for name, _ in rows)
    for name, about in rows:
        print(f"{indent}{name:<{width}}  {about}")
