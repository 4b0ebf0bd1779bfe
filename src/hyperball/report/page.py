"""A page: sections of text, tables and charts in one file that asks the network for nothing."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperball.report.charts import Chart, draw
from hyperball.report.records import LeftOut
from hyperball.report.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading, a lead, a finding, tables, charts, remarks; `folded` hides it all behind the heading."""

    title: str
    lead: str = ""
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()
    remarks: tuple[str, ...] = ()
    folded: bool = False
    finding: str = ""


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str
    lead: str
    sections: tuple[Section, ...]
    left_out: tuple[LeftOut, ...] = ()
    footer: str = ""


def templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(f"a page needs jinja2 ({error}); pip install 'hyperball[report]'") from error
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def render(page: Page) -> str:
    """The HTML of a page; every text is escaped by the template."""
    environment = templates()
    environment.filters["draw"] = draw
    return str(environment.get_template("page.html").render(page=page))


def check_target(path: str | Path) -> Path:
    """The file that a page is to be written to, its folder made, or an error before any work is done."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target} is a folder; name a file for the page, such as {target / 'report.html'}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"{target.parent} cannot be written to")
    return target


def write_page(path: str | Path, page: Page) -> None:
    """Write the page whole or not at all."""
    target = check_target(path)
    text = render(page)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
