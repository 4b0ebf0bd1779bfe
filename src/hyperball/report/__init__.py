"""One HTML page about runs and results, from their records alone; nothing here needs torch."""

from hyperball.report.charts import Chart, Series
from hyperball.report.demo import DemoRow, demo_page, demo_text
from hyperball.report.folder import Found, read_folder
from hyperball.report.page import Page, Section, render, write_page
from hyperball.report.records import LeftOut, Run, Runs, read_runs
from hyperball.report.tables import Table

__all__ = [
    "Chart",
    "DemoRow",
    "Found",
    "LeftOut",
    "Page",
    "Run",
    "Runs",
    "Section",
    "Series",
    "Table",
    "demo_page",
    "demo_text",
    "read_folder",
    "read_runs",
    "render",
    "write_page",
]
