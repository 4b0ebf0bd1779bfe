"""Pictures as records hold them: features in the plane, filters of a first layer, any curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.on_disk import is_number
from hyperball.report.files import RecordError, all_numbers, clipped, pairs, same_length, sequence, shown, texts

MOST_FILTERS, LARGEST_FILTER, MOST_SERIES = 256, 64, 24


@dataclass(frozen=True)
class Features:
    """Two-dimensional features with their labels."""

    name: str
    title: str
    points: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class Filters:
    """Filters [n][c][h][w] of a first layer, the first of `total`."""

    name: str
    title: str
    filters: tuple[Any, ...]
    note: str = ""
    total: int = 0


@dataclass(frozen=True)
class Line:
    """A named line, and half the width of its band where it has one."""

    name: str
    points: tuple[tuple[float, float], ...]
    band: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curves:
    """Any lines over any axis, the first of `total`."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    note: str = ""
    log: bool = False
    total: int = 0


def read_features(tree: Mapping[str, Any], path: Path, name: str) -> Features:
    """Points [n][2] with a label each; one that is not finite, or whose label is none, is no mistake and not drawn."""
    points, labels = sequence(tree, "points", path.name), sequence(tree, "labels", path.name)
    same_length(("points", "labels"), points, labels, path.name)
    told = f"{path.name}: `points` must be pairs of numbers, one a label"
    for point in points:
        if not is_pair(point):
            raise RecordError(f"{told}, got {shown(point)}")
    kept = [
        ((float(point[0]), float(point[1])), clipped(label))
        for point, label in zip(points, labels, strict=True)
        if all(map(is_number, point)) and (isinstance(label, str) or is_number(label))
    ]
    if not kept:
        raise RecordError(told)
    return Features(
        name, clipped(tree.get("title", path.stem)), tuple(p for p, _ in kept), tuple(label for _, label in kept),
        note(tree),
    )  # fmt: skip


def is_pair(point: Any) -> bool:
    return isinstance(point, list) and len(point) == 2 and all(x is None or type(x) in (float, int) for x in point)


def read_filters(tree: Mapping[str, Any], path: Path, name: str) -> Filters:
    """Filters [n][c][h][w], all of one shape."""
    everything = sequence(tree, "filters", path.name)
    filters = everything[:MOST_FILTERS]
    shapes = {shape_of(entry) for entry in filters}
    if len(shapes) != 1 or None in shapes:
        raise RecordError(f"{path.name}: `filters` must be numbers [n, c, h, w] of one shape")
    return Filters(name, clipped(tree.get("title", path.stem)), tuple(filters), note(tree), len(everything))


def shape_of(entry: Any) -> tuple[int, int, int] | None:
    """(c, h, w) of a filter in nested lists of finite numbers, at most 64 a side."""
    try:
        shape = (len(entry), len(entry[0]), len(entry[0][0]))
        whole = all(
            len(plane) == shape[1] and all(len(row) == shape[2] and all(map(is_number, row)) for row in plane)
            for plane in entry
        )
    except (TypeError, IndexError, KeyError):
        return None
    return shape if whole and min(shape) > 0 and max(shape) <= LARGEST_FILTER else None


def read_curves(tree: Mapping[str, Any], path: Path, name: str) -> Curves:
    lines = []
    series = sequence(tree, "series", path.name)
    for entry in series[:MOST_SERIES]:
        if not isinstance(entry, dict):
            raise RecordError(f"{path.name}: an entry of `series` must be an object, got {shown(entry)}")
        points = pairs(entry, ("x", "y"), path.name)
        band = all_numbers(entry, "band", path.name) if entry.get("band") else ()
        if band:
            same_length(("y", "band"), entry["y"], entry["band"], path.name)
        lines.append(Line(clipped(entry.get("name", "")), points, band if len(band) == len(points) else ()))
    if not any(line.points for line in lines):
        raise RecordError(f"{path.name}: `series` must hold finite numbers `x` and `y`")
    return Curves(
        name, clipped(tree.get("title", path.stem)), clipped(tree.get("x_label", "")), clipped(tree.get("y_label", "")),
        tuple(lines), note(tree), tree.get("log") is True or tree.get("y_scale") == "log",
        len(series),
    )  # fmt: skip


def note(tree: Mapping[str, Any]) -> str:
    found = tree.get("note", tree.get("what"))
    return texts([found])[0] if isinstance(found, str) else ""
