"""Figures that records hold: features in the plane, learned filters, any curves; and the geometry of the operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from hyperball.report.charts import Chart, Series
from hyperball.report.drawing.plane import level_sets, scatter, warp
from hyperball.report.drawing.png import address, rgba_png
from hyperball.report.drawing.svg import Picture, element, svg
from hyperball.report.functions import ANGULARS, MAGNITUDES, PENALTIES
from hyperball.report.page import Gallery, Section
from hyperball.report.pictures import Curves, Features, Filters
from hyperball.report.records import Run
from hyperball.report.sections.lines import COLOR_OF, colors, first_of
from hyperball.report.tables import family

MOST_CHECKPOINTS, MOST_SHOWN, MOST_PICTURES = 6, 64, 36
ZOOM = 6  # pixels of the image for one of a filter, so that gaps can be narrow
Drawn = Features | Filters | Curves
IMAGE_CHANNELS = (1, 3)
LEVEL_MAGNITUDES, LEVEL_ANGULARS = ("linear", "ball", "tanh", "log"), ("cosine", "square_cosine", "linear")
POINTS = "Each point is an image, placed by its two features, with the color of its class."
WEIGHTS = (
    "The weights of the first convolution, one small image a filter; of three channels they are red, green and blue."
)
UNITS = "z, in units of c"
GEOMETRY = (
    "A decoupled convolution is f(x) = h(‖x‖)·g(θ): a magnitude function of the length of a patch times an angular "
    "function of its angle to the filter. Drawn from the formulas with α = ρ = 1, and else at the library's default "
    "parameters but for the power, whose exponent is 3 (2 is the square cosine); no record is needed."
)
WARPS = (
    "A polar grid x (thin) and where h(‖x‖)·x/‖x‖ puts it (thick); the dashed circle has radius ρ. In the manner of "
    "figure 2 of Decoupled Networks."
)
LEVELS = (
    "f(x) over the plane with the filter w to the right: blue is positive, orange negative, and every band a sixth of "
    "the largest value. Bounded magnitudes answer to the angle alone once ‖x‖ is large."
)


def figure_section(records: Sequence[Drawn], runs: Sequence[Run]) -> Section | None:
    """Pictures of no table, and the filters of runs that have their weights; None where there are none."""
    shown = galleries(records, checkpoint_filters(runs))
    if not shown:
        return None
    lead = "Two-dimensional features, learned filters and curves as the records hold them."
    return Section("Figures", lead, galleries=shown, part="figures")


def galleries(
    records: Sequence[Drawn], filters: Sequence[Picture] = (), operators: Mapping[str, str] | None = None
) -> tuple[Gallery, ...]:
    """Features, filters and curves, each under a heading, the first of many; `operators` by the names of records."""
    known = operators or {}
    kinds: tuple[tuple[str, Sequence[Drawn | Picture], str], ...] = (
        ("Features in the plane", [record for record in records if isinstance(record, Features)], POINTS),
        ("First-layer filters", [*(record for record in records if isinstance(record, Filters)), *filters], WEIGHTS),
        ("Curves", [record for record in records if isinstance(record, Curves)], ""),
    )
    found = []
    for title, held, lead in kinds:
        shown, cut = first_of(held, MOST_PICTURES, "pictures")
        said = " ".join(filter(None, (lead, f"{cut}." if cut else "")))
        pictures = [
            one if isinstance(one, Picture) else replace(drawn_record(one), operator=known.get(one.name, ""))
            for one in shown
        ]
        found += [Gallery(title, tuple(pictures), said)] if shown else []
    return tuple(found)


def drawn_record(record: Drawn) -> Picture | Chart:
    """A record as its picture."""
    if isinstance(record, Features):
        return scatter(record.title, record.points, record.labels, record.note)
    if isinstance(record, Filters):
        return recorded_filters(record)
    return curves_chart(record)


def curves_chart(record: Curves) -> Chart:
    names = [line.name for line in record.lines]
    series = tuple(
        Series(line.name, line.points, color, band=line.band)
        for line, color in zip(record.lines, colors(names), strict=True)
    )
    cut = f"{len(series)} of {record.total} lines" if record.total > len(series) else ""
    note = "; ".join(filter(None, (record.note or record.name, cut)))
    label = record.y_label if record.y_label.lower() != record.title.lower() else ""
    return Chart(record.title, record.x_label, label, series, note=note, log=record.log)


def recorded_filters(record: Filters) -> Picture:
    return filter_picture(record.title, np.asarray(record.filters, dtype=np.float64), record.note, record.total)


def checkpoint_filters(runs: Iterable[Run]) -> list[Picture]:
    """The first-layer filters of those runs that still have their weights, at most six."""
    found: list[Picture] = []
    kept = [run for run in runs if (run.folder / "checkpoints").is_dir()]
    cut = f", drawn for {MOST_CHECKPOINTS} of {len(kept)} runs" if len(kept) > MOST_CHECKPOINTS else ""
    for run in kept:
        if len(found) < MOST_CHECKPOINTS:
            filters = first_filters(sorted((run.folder / "checkpoints").glob("*.safetensors")))
            if filters is not None:
                drawn = filter_picture(run.name, filters, f"from the run's last checkpoint{cut}")
                found.append(replace(drawn, operator=family(run.recipe)))
    return found


def first_filters(paths: Sequence[Path]) -> Any:
    """The first weight [n, 1 or 3, h, w] of the latest checkpoint that can be read; None without one."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return None
    for path in reversed(paths):
        try:
            with safe_open(str(path), framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    shape = file.get_slice(name).get_shape()
                    square = len(shape) == 4 and shape[1] in IMAGE_CHANNELS and 1 < shape[2] <= 64 and shape[3] <= 64
                    if square and name.startswith("model") and name.endswith("weight"):
                        filters = np.asarray(file.get_tensor(name), dtype=np.float64)
                        return filters if np.isfinite(filters).all() else None
        except (OSError, SafetensorError, TypeError, ValueError):
            continue
    return None


def filter_picture(title: str, filters: Any, note: str, total: int = 0) -> Picture:
    """Filters side by side, each stretched to the whole range; three channels are colors, others their mean."""
    total = max(total, len(filters))
    many = f"{MOST_SHOWN} of {total}" if total > MOST_SHOWN else f"{total}"
    filters = filters[:MOST_SHOWN]
    if filters.shape[1] != 3:
        filters = np.repeat(filters.mean(1, keepdims=True), 3, axis=1)
    low = filters.min((1, 2, 3), keepdims=True)
    reach = filters.max((1, 2, 3), keepdims=True) - low
    pixels = np.round(255 * (filters - low) / np.where(reach > 0, reach, 1)).astype(np.uint8)
    count, _, height, width = pixels.shape
    across = 16 if count > 16 else 8
    down, gap = -(-count // across), 2 * ZOOM // 3
    sheet = np.zeros((down * (height * ZOOM + gap), across * (width * ZOOM + gap), 4), dtype=np.uint8)
    for index, one in enumerate(pixels):
        large = one.transpose(1, 2, 0).repeat(ZOOM, 0).repeat(ZOOM, 1)
        y, x = (index // across) * (height * ZOOM + gap), (index % across) * (width * ZOOM + gap)
        sheet[y : y + height * ZOOM, x : x + width * ZOOM] = np.dstack([large, np.full(large.shape[:2], 255, np.uint8)])
    image = element("image", href=address(rgba_png(list(map(bytes, sheet.reshape(len(sheet), -1))))),
                    width=sheet.shape[1], height=sheet.shape[0], class_="pixels")  # fmt: skip
    said = f"{many} filter{'' if total == 1 else 's'} of {height}×{width}, each stretched to its own range"
    drawn = svg(sheet.shape[1], sheet.shape[0], image, label=f"{count} filters of {title}", class_="filters")
    return Picture(title, drawn, note=f"{note}{'; ' if note else ''}{said}")


@cache
def geometry_section() -> Section:
    """Magnitude, angular and penalty functions, how magnitudes warp the plane, and level sets of operators."""
    n, theta, z = np.linspace(0, 3, 61), np.linspace(0, 180, 73), np.union1d(np.linspace(-3, 3, 61), (-1.001, 1.001))
    cosines = np.cos(np.radians(theta))
    named = {
        ("Magnitude functions h(n)", "n = ‖x‖, in units of ρ"): (n, {k: h(n) for k, (_, h) in MAGNITUDES.items()}),
        ("Angular functions g(θ)", "θ in degrees"): (theta, {k: g(cosines) for k, (_, g) in ANGULARS.items()}),
        ("Penalties φ(z) of robust pooling", UNITS): (z, {k: phi(z) for k, (_, phi, _) in PENALTIES.items()}),
        ("Their influence ψ(z) = φ′(z)", UNITS): (z, {k: psi(z) for k, (_, _, psi) in PENALTIES.items()}),
    }
    charts = tuple(Chart(title, over, "", lines(*held)) for (title, over), held in named.items())
    warps = tuple(warp(name, formula, h, COLOR_OF.get(name, 1) or 1) for name, (formula, h) in MAGNITUDES.items())
    levels = tuple(
        level_sets(magnitude, MAGNITUDES[magnitude][1], angular, ANGULARS[angular][1])
        for angular in LEVEL_ANGULARS
        for magnitude in LEVEL_MAGNITUDES
    )
    return Section(
        "The geometry of the operators", GEOMETRY, charts=charts, part="geometry",
        galleries=(
            Gallery("How a magnitude warps the plane", warps, WARPS),
            Gallery("Level sets of the operators", levels, LEVELS),
        ),
    )  # fmt: skip


def lines(xs: Any, values: dict[str, Any]) -> tuple[Series, ...]:
    """Lines of functions, under their names."""
    names = list(values)
    return tuple(
        Series(name.replace("_", " "), tuple(zip(map(float, xs), map(float, values[name]))), color, operator=name)
        for name, color in zip(names, colors(names), strict=True)
    )
