"""Grids: a base recipe, axes of changes, and seeds, as a list of cells.

```yaml
base: digits                  # a recipe's name, a file beside this one, or a mapping
overrides: {epochs: 5}        # changes of every cell
axes:
  - product: {model.magnitude: [null, tanh], optimizer.lr: [1.e-3, 3.e-3]}   # every combination
  - zip: {model.norm: [batch, none], model.activation: [relu, none]}        # side by side
  - list: [{model.options.width: 16}, {name: wide, model.options.width: 32}]   # one by one; a name is a label
seeds: 3                      # 0, 1, 2; or a list
```
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.experiments.catalog import RECIPES, changed
from hyperball.files import SUFFIXES, FileError, read_tree
from hyperball.rows import nearest
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError

KEYS = ("base", "overrides", "axes", "seeds")
AXES = ("product", "zip", "list")


class GridError(ValueError):
    """A grid says something unknown or impossible."""


@dataclass(frozen=True)
class Cell:
    """One recipe of a grid: the label says what it changes, and cells of one label differ in the seed alone."""

    label: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """The folder of the cell's run, below that of the grid."""
        return f"{folder_name(self.label)}/seed-{self.seed}"


def folder_name(label: str) -> str:
    """A label as the name of a folder, which dots alone are not."""
    name = re.sub(r"[^\w.=+-]+", "_", label).strip("_") or "base"
    if not name.strip("."):
        raise GridError(f"the label of a cell must not be of dots alone, got {label!r}")
    return name


def read_grid(path: str | Path) -> list[Cell]:
    """The cells of a .yaml or .json file."""
    try:
        return expand(read_tree(Path(path)), Path(path).parent)
    except (GridError, RecipeError, FileError) as error:
        raise GridError(f"{path}: {error}") from None


def expand(tree: Any, folder: Path = Path()) -> list[Cell]:
    """The cells of a grid's mapping, every combination of its axes with every seed, each once."""
    if not isinstance(tree, Mapping):
        raise GridError(f"a grid must be a mapping, got {tree!r}")
    for key in tree:
        if key not in KEYS:
            raise GridError(f"unknown key `{key}`; {nearest(str(key), KEYS)}")
    base = changed(read_base(tree.get("base", {}), folder), changes_of("overrides", tree.get("overrides") or {}))
    axes = [read_axis(axis) for axis in as_axes(tree.get("axes") or [])]
    cells = []
    for combination in itertools.product(*axes):
        label = ", ".join(label for label, _ in combination)
        changes: dict[str, Any] = {}
        for _, part in combination:
            for key in part.keys() & changes.keys():
                raise GridError(f"`{key}` stands in two axes")
            changes |= part
        cells += [Cell(label, seed, variant(base, changes, label, seed)) for seed in read_seeds(tree.get("seeds", 1))]
    return distinct(cells)


def variant(base: Recipe, changes: Mapping[str, Any], label: str, seed: int) -> Recipe:
    try:
        return changed(base, {**changes, "seed": seed})
    except RecipeError as error:
        raise GridError(f"cell {label or 'base'!r}: {error}") from None


def distinct(cells: list[Cell]) -> list[Cell]:
    """The cells, unless two would share a folder."""
    seen: dict[str, Cell] = {}
    for cell in cells:
        if cell.name in seen:
            raise GridError(f"two cells would be written to {cell.name}: {seen[cell.name].label!r} and {cell.label!r}")
        seen[cell.name] = cell
    return cells


def read_base(base: Any, folder: Path) -> Recipe:
    """The recipe that all cells start from."""
    if isinstance(base, Mapping):
        return Recipe.from_dict(base)
    if not isinstance(base, str):
        raise GridError(f"`base` must be a recipe's name, a file or a mapping, got {base!r}")
    if Path(base).suffix in SUFFIXES:
        return Recipe.from_file(folder / base)
    if base not in RECIPES:
        raise GridError(f"`base`: unknown recipe {base!r}; {nearest(base, RECIPES)}")
    return RECIPES[base].recipe


def read_seeds(seeds: Any) -> list[int]:
    """0 … n − 1 for a number n, or the seeds themselves."""
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds >= 1:
        return list(range(seeds))
    if (
        isinstance(seeds, list)
        and seeds
        and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    ):
        return seeds
    raise GridError(f"`seeds` must be a number >= 1 or a list of whole numbers, got {seeds!r}")


def as_axes(axes: Any) -> list[Mapping[str, Any]]:
    """A mapping of fields to lists is short for one product."""
    if isinstance(axes, Mapping):
        return [axes] if set(axes) <= set(AXES) else [{"product": axes}]
    if isinstance(axes, list) and all(isinstance(axis, Mapping) for axis in axes):
        return axes
    raise GridError(f"`axes` must be a list of mappings, got {axes!r}")


def read_axis(axis: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The labelled changes of one axis."""
    if len(axis) != 1 or next(iter(axis)) not in AXES:
        hint = nearest(str(next(iter(axis), "")), AXES)
        raise GridError(
            f"an axis must have one key of {', '.join(AXES)}, got {', '.join(map(str, axis)) or 'none'}; {hint}"
        )
    ((kind, content),) = axis.items()
    if kind == "list":
        return [labelled(changes_of("list", entry)) for entry in as_list("list", content)]
    columns = {key: as_list(key, values) for key, values in changes_of(kind, content).items()}
    if not columns:
        raise GridError(f"a {kind} must have at least one field")
    if kind == "zip" and len({len(values) for values in columns.values()}) > 1:
        raise GridError(f"the lists of a zip must be of one length, got {[len(v) for v in columns.values()]}")
    rows: Iterable[tuple[Any, ...]] = (
        itertools.product(*columns.values()) if kind == "product" else zip(*columns.values(), strict=True)
    )
    return [labelled(dict(zip(columns, row, strict=True))) for row in rows]


def labelled(changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The changes, and their `name` or what they say."""
    rest = {key: value for key, value in changes.items() if key != "name"}
    said = ", ".join(f"{key.rpartition('.')[2]}={'none' if value is None else value}" for key, value in rest.items())
    return str(changes.get("name", said)), rest


def changes_of(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise GridError(f"`{where}` must map fields to values, got {value!r}")
    if "seed" in value:
        raise GridError(f"`{where}`: the seeds of a grid stand in `seeds`, got `seed`")
    return dict(value)


def as_list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise GridError(f"`{where}` must be a list with entries, got {value!r}")
    return value
