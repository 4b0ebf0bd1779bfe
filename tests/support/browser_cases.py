"""What tests of the report's page in a browser share."""

import os
import shutil

from report_cases import page_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
TABLE = "section[data-table='synthetic-table'][data-scale='paper']"


def visit_records(visit, folder, *title, **options):
    """The page of the records in `folder`/in, opened."""
    (folder / "page.html").write_text(page_of(folder / "in", *title), encoding="utf-8")
    return visit((folder / "page.html").as_uri(), **options)


def visible_rows(page, table):
    return page.locator(f"{table} .scroll").first.locator("tbody tr:visible")


def tip_of(page):
    return page.locator(".tip").inner_text()
