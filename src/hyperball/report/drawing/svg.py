"""SVG as text: whatever is not markup already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass


class Safe(str):
    """Markup that is not to be escaped again."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    color: int
    operator: str = ""
    dash: int = 0
    swatch: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawing with its caption and legend; `operator`, `table` and `scale` are what the page's filter knows it by."""

    title: str
    svg: Safe
    label: str = ""
    note: str = ""
    legend: tuple[Key, ...] = ()
    small: bool = False
    table: str = ""
    scale: str = ""
    operator: str = ""


def element(tag: str, *children: str, **attributes: str | float | None) -> Safe:
    """<tag attributes>children</tag>; `class_` is class, an underscore a dash, None no attribute."""
    held = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(child if isinstance(child, Safe) else html.escape(child) for child in children)
    return Safe(f"<{tag}{held}>{inside}</{tag}>" if inside else f"<{tag}{held}/>")


def number(value: str | float) -> str:
    """Numbers of a picture with one digit."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def svg(width: float, height: float, *children: str, label: str, **attributes: str | float | None) -> Safe:
    """A picture that scales with its place."""
    box = f"0 0 {width:g} {height:g}"
    inside = Safe("".join(children))
    return element("svg", inside, viewBox=box, role="img", aria_label=label, **attributes)


def path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
