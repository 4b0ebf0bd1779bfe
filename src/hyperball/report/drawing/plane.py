"""Pictures of the plane: points by class, how a magnitude warps it, and the level sets of an operator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyperball.report.charts import COLORS
from hyperball.report.drawing.axes import Axis, ticks
from hyperball.report.drawing.png import Color, address, palette_png
from hyperball.report.drawing.svg import Key, Picture, Safe, element, number, path, svg
from hyperball.report.functions import RHO, Array, Function

SIDE, EDGE = 240.0, 10.0
EXTENT = 2.0  # of the pictures of operators, in radii
MOST_POINTS = 3000
BLUE, ORANGE = (0x2F, 0x7F, 0xBF), (0xD9, 0x6A, 0x12)
LEVELS, PIXELS = 6, 120


def scatter(title: str, points: Sequence[tuple[float, float]], labels: Sequence[str], note: str) -> Picture:
    """Points in the plane, one color a label; at most 3,000, evenly over the record."""
    stride = -(-len(points) // MOST_POINTS)
    shown = list(zip(points, labels, strict=True))[::stride]
    classes = sorted(set(labels), key=lambda text: (len(text), text))
    reach = max(max(abs(x), abs(y)) for (x, y), _ in shown) or 1.0
    across, up = Axis(-reach, reach, EDGE, SIDE - EDGE), Axis(-reach, reach, SIDE - EDGE, EDGE)
    parts = [frame(across, up, reach)]
    for index, name in enumerate(classes):
        dots = "".join(f"M{number(across(x))} {number(up(y))}h0" for (x, y), label in shown if label == name)
        parts.append(element("g", element("path", class_="dots", d=dots), class_=f"s{index % COLORS}", data_name=name))
    said = f"{len(points):,} point{'' if len(points) == 1 else 's'}" + (f", {len(shown):,} drawn" if stride > 1 else "")
    said += f"; {COLORS} of {len(classes)} classes are named" if len(classes) > COLORS else ""
    keys = tuple(Key(name, index % COLORS, swatch=True) for index, name in enumerate(classes[:COLORS]))
    drawn = svg(SIDE, SIDE, *parts, label=f"{title}: {said}", class_="plane")
    return Picture(title, drawn, note=f"{note}; {said}" if note else said, legend=keys)


def frame(across: Axis, up: Axis, reach: float) -> Safe:
    """Axes through the origin, with the last round number on each."""
    mark = [value for value in ticks([0.0, reach], 3) if value <= reach][-1]
    return Safe(
        element("path", class_="grid", d=f"M{EDGE:g} {up(0):g}H{SIDE - EDGE:g}M{across(0):g} {EDGE:g}V{SIDE - EDGE:g}")
        + element("text", f"{mark:g}", x=across(mark), y=up(0) + 13, text_anchor="middle")
        + element("text", f"{mark:g}", x=across(0) - 5, y=up(mark) + 4, text_anchor="end")
    )


def warp(name: str, formula: str, magnitude: Function, color: int) -> Picture:
    """x → h(‖x‖)·x/‖x‖ on a polar grid: thin what was, thick where it goes; the dashed circle is ρ."""
    across = Axis(-EXTENT, EXTENT, EDGE, SIDE - EDGE, bounded=False)
    up = Axis(-EXTENT, EXTENT, SIDE - EDGE, EDGE, bounded=False)
    angles, radii = np.linspace(0, 2 * np.pi, 49), np.linspace(0.25, 1.75, 7)
    before, after = [], []
    for radius in radii:
        before.append(ring(float(radius), angles, across, up))
        after.append(ring(float(magnitude(np.array(radius))), angles, across, up))
    along = np.linspace(0.02, 1.75, 24)
    for angle in np.linspace(0, 2 * np.pi, 13)[:-1]:
        before.append(spoke(along, float(angle), across, up))
        after.append(spoke(magnitude(along), float(angle), across, up))
    parts = (
        element("path", class_="before", d="".join(before)),
        element("path", class_="after", d="".join(after)),
        element("path", class_="radius", d=ring(RHO, angles, across, up)),
    )
    drawn = svg(SIDE, SIDE, *parts, label=f"how {name} warps the plane", class_=f"plane s{color}")
    return Picture(name, drawn, note=f"h(n) = {formula}", small=True, operator=name)


def ring(radius: float, angles: Array, across: Axis, up: Axis) -> str:
    return path((across(radius * np.cos(a)), up(radius * np.sin(a))) for a in angles)


def spoke(lengths: Array, angle: float, across: Axis, up: Axis) -> str:
    return path((across(n * np.cos(angle)), up(n * np.sin(angle))) for n in map(float, lengths))


def level_sets(magnitude_name: str, magnitude: Function, angular_name: str, angular: Function) -> Picture:
    """f(x) = h(‖x‖)·g(θ) over the plane, w to the right; each band of color is a sixth of the largest |f| shown."""
    axis = np.linspace(-EXTENT, EXTENT, PIXELS)
    x, y = np.meshgrid(axis, -axis)
    lengths = np.hypot(x, y)
    values = magnitude(lengths) * angular(np.clip(x / np.maximum(lengths, 1e-9), -1, 1))
    steps = np.round(values / np.abs(values).max() * LEVELS - 1e-9).astype(int) + LEVELS
    image = palette_png([row.tobytes() for row in steps.astype(np.uint8)], band_colors())
    middle = SIDE / 2
    parts = (
        element("image", href=address(image), width=SIDE, height=SIDE),
        element("path", class_="w", d=f"M{middle:g} {middle:g}h58m-7 -4.5l7 4.5l-7 4.5"),
        element("text", "w", x=middle + 64, y=middle + 4),
    )
    title = f"{magnitude_name} · {angular_name.replace('_', ' ')}"
    drawn = svg(SIDE, SIDE, *parts, label=f"level sets of {title}", class_="plane field")
    return Picture(title, drawn, small=True, operator=magnitude_name)


def band_colors() -> list[Color]:
    """From orange through nothing to blue, by opacity, so that the page's own background shows."""
    shares = [level / LEVELS for level in range(-LEVELS, LEVELS + 1)]
    return [(*(BLUE if share > 0 else ORANGE), round(225 * abs(share))) for share in shares]
