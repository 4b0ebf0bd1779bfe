"""A page: sections of text, tables and pictures in one file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count, groupby
from math import log
from pathlib import Path
from typing import Any

from hyperball.files import write_bytes
from hyperball.report.charts import Chart, draw, picture
from hyperball.report.doubts import counted
from hyperball.report.drawing.svg import Picture, Safe
from hyperball.report.records import LeftOut
from hyperball.report.tables import Table

FEW, MANY = 4, 6  # pictures that are shown of many, and how many are many
WIDE = 16.0  # ratios that differ by more are drawn on a logarithmic scale
TAKEN = ("main", "left-out")  # addresses of the page's own parts
UNNAMED = re.compile(r"[^a-z0-9]+")  # what an address is written without
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class Bar:
    """A value with its place on a common scale; `goal` is what is aimed at, `heading` what it shares with others."""

    label: str
    value: float
    text: str
    operator: str = ""
    tip: str = ""
    color: int = 1
    goal: float | None = None
    heading: str = ""
    is_speed: bool = False

    @property
    def reached(self) -> bool:
        """Whether a value is as good as what is aimed at: a speed not below it, a time not above."""
        return self.goal is None or (self.value >= self.goal if self.is_speed else self.value <= self.goal)


@dataclass(frozen=True)
class Bars:
    """Bars on one scale, with a line at `mark`."""

    title: str
    bars: tuple[Bar, ...]
    note: str = ""
    mark: float | None = None
    mark_text: str = ""

    @property
    def ends(self) -> tuple[float, float]:
        """The scale: from 0, or logarithmic where values differ widely."""
        values = [number for bar in self.bars for number in (bar.value, bar.goal, self.mark) if number is not None]
        positive = [value for value in values if value > 0]
        if positive and max(positive) > WIDE * min(positive):
            return min(positive) / 1.15, 1.15 * max(positive)
        return 0.0, 1.04 * max(positive, default=1.0)

    def place(self, value: float) -> float:
        """Where a value stands, in percent of the width."""
        low, high = self.ends
        share = (value - low) / (high - low) if low == 0 else log(max(value, low) / low) / log(high / low)
        return round(100 * min(max(share, 0.0), 1.0), 2)

    def span(self, value: float) -> tuple[float, float]:
        """Left end and width of a bar: from 0, or on a logarithmic scale from the line at `mark`."""
        start = self.place(self.mark or 1.0) if self.ends[0] > 0 else 0.0
        end = self.place(value)
        return min(start, end), max(abs(end - start), 0.4)

    @property
    def goals(self) -> bool:
        return self.kept or self.missed

    @property
    def kept(self) -> bool:
        """Whether a bar has an aim that it reaches."""
        return any(bar.goal is not None and bar.reached for bar in self.bars)

    @property
    def missed(self) -> bool:
        """Whether one has an aim that it misses."""
        return any(bar.goal is not None and not bar.reached for bar in self.bars)


Figure = Chart | Picture | Bars


@dataclass(frozen=True)
class Gallery:
    """Pictures under a heading of their own."""

    title: str
    charts: tuple[Figure, ...]
    lead: str = ""


@dataclass(frozen=True)
class Statement:
    """A claim with a verdict and its sign, what was found and by what; `table` and `scale` are where it links to.

    Those of one paper stand together under its name.
    """

    claim: str
    sign: str
    verdict: str
    found: str
    by: str
    table: str = ""
    scale: str = ""
    paper: str = ""


@dataclass(frozen=True)
class Section:
    """A heading, a lead, a finding, statements, tables, pictures, remarks; `folded` hides it all behind the heading.

    `table` and `scale` are what the page's filter knows it by; `badges` stand below the heading; `facts` are
    conditions behind a fold; `doubts` are sentences that gather `doubt_count` doubts about runs.
    """

    title: str
    lead: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Figure, ...] = ()
    remarks: tuple[str, ...] = ()
    folded: bool = False
    finding: str = ""
    badges: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    doubt_count: int = 0
    facts: tuple[str, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    statements: tuple[Statement, ...] = ()
    table: str = ""
    scale: str = ""
    part: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page; `filters` puts a search field and a table of contents on it."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    left_out: tuple[LeftOut, ...] = ()
    footer: str = ""
    filters: bool = False

    @property
    def anchors(self) -> list[str]:
        """What links lead to, by section: its table and scale, else its title; a number makes each the only one."""
        found = list(TAKEN)
        for section in self.sections:
            name = UNNAMED.sub("-", f"{section.table or section.title} {section.scale}".lower()).strip("-") or "section"
            others = (f"{name}-{number}" for number in count(2))
            found.append(name if name not in found else next(other for other in others if other not in found))
        return found[len(TAKEN) :]

    @property
    def named(self) -> list[tuple[str, Section]]:
        """Sections by their anchors."""
        return list(zip(self.anchors, self.sections, strict=True))

    @property
    def contents(self) -> list[list[tuple[str, Section]]]:
        """Sections by anchor; those of one table at several scales, which follow each other, as one entry."""
        return [list(entry) for _, entry in groupby(self.named, lambda one: (one[1].title, one[1].table))]

    def place(self, table: str, scale: str) -> str:
        """The anchor of the section of a table at a scale; nothing where there is none."""
        return next((at for at, held in self.named if table and (held.table, held.scale) == (table, scale)), "")

    def choices(self, name: str) -> list[str]:
        """The tables, scales or operators that the filter offers."""
        if name == "operator":
            found = {text for section in self.sections for table in section.tables for text in table.operators}
        else:
            parts = [part for section in self.sections for part in (section, *section.tables, *section.statements)]
            found = {line for part in parts for line in getattr(part, name).splitlines()}
        return sorted(found - {""})


def templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(f"a page needs jinja2 ({error}); pip install 'hyperball[report]'") from error
    loader = jinja2.FunctionLoader(lambda name: asset(f"templates/{name}"))
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def asset(name: str) -> str:
    """The text of a file of this package."""
    return resources.files("hyperball.report").joinpath(name).read_text(encoding="utf-8")


def render(page: Page) -> str:
    """The HTML of a page; every text is escaped by the template, and the script's hash is the only one allowed."""
    environment = templates()
    script = asset("page.js")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn = environment.get_template("page.html").render(
        page=page, style=Safe(asset("page.css")), script=Safe(script), script_hash=allowed,
        figures=figures, parted=parted, counted=counted, kind=lambda entry: type(entry).__name__,
    )  # fmt: skip
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(drawn))


def figures(entries: Sequence[Figure]) -> list[Picture | Bars]:
    """Charts as pictures, others as they are; a chart without a line that can be drawn is left out."""
    return [picture(entry) if isinstance(entry, Chart) else entry for entry in entries if is_drawn(entry)]


def parted(entries: Sequence[Picture | Bars]) -> tuple[Sequence[Picture | Bars], Sequence[Picture | Bars]]:
    """Pictures to show and those behind a fold: of more than six the first four; small ones are all shown."""
    small = isinstance(entries[0], Picture) and entries[0].small if entries else False
    shown = len(entries) if small or len(entries) <= MANY else FEW
    return entries[:shown], entries[shown:]


def is_drawn(entry: Figure) -> bool:
    return not isinstance(entry, Chart) or bool(draw(entry).series)


def check_target(path: str | Path) -> Path:
    """The file that a page is to be written to, its folder made, or an error before any work is done."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder; name a file for the page, such as {target / 'report.html'}")
    if target.suffix in (".json", ".jsonl"):
        raise ValueError(f"{target} would be a record; name a page, such as {target.with_suffix('.html')}")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target} is no regular file, and would be replaced by one; name a page, such as report.html")
    target = Path(os.path.realpath(target))  # a link stays one, and its file becomes the page
    if target.parent.exists() and not target.parent.is_dir():
        raise NotADirectoryError(f"{target.parent} is no folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"{target.parent} cannot be written to")
    return target


def write_page(path: str | Path, page: Page) -> None:
    """Write the page whole or not at all."""
    target = check_target(path)
    write_bytes(target, render(page).encode())
