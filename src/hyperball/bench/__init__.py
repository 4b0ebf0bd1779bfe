"""Benchmarks of the layers against torch's own in one run; `hyperball bench` is the command."""

from hyperball.bench.case import Aim, Case, Setting
from hyperball.bench.records import Record, Row, read, write
from hyperball.bench.run import SECTIONS, run

__all__ = ["SECTIONS", "Aim", "Case", "Record", "Row", "Setting", "read", "run", "write"]
