"""The whole benchmark: checks, compiled kernels, then one section after another, written as they come."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hyperball.bench import checks, records, table, warm
from hyperball.bench.case import Case, Setting
from hyperball.bench.measure import measure
from hyperball.bench.records import Record, Section

SECTIONS = ("conv", "train", "pool", "projection", "inference", "scaling")
Say = Callable[[str], None]


def progress(began: float) -> Say:
    """Prints a line with the seconds since the beginning on stderr."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def header(setting: Setting) -> str:
    """The device, the versions, and on a CPU the threads and whether others use it."""
    held = records.conditions(setting)
    versions = ", ".join(f"{name} {text}" for name, text in held["versions"].items() if text)
    lines = [f"{held['device']}: {versions}"]
    if not setting.on_gpu:
        load = f"load average {held['load_average']} on {held['cores']} cores"
        doubt = ": busy, so that ratios count and times do not" if held["busy"] else ""
        lines.append(f"{held['threads']} threads, {load}{doubt}; ratios are of one run, subjects in turn")
    return "\n".join(lines)


def run(
    sections: Sequence[str], setting: Setting, path: Path, tests: bool = True, show: Callable[[str], None] = print
) -> Record:
    """Check, measure, print and write; what was measured is in the file after every case."""
    began = time.monotonic()
    say = progress(began)
    show(header(setting))
    prepared(sections, setting, say, tests)
    record = Record(records.device_name(setting.device))
    for name in sections:
        measure_section(name, setting, record, path, began)
        show(shown(name, record.sections[name]))
    show(f"written to {path}")
    return record


def prepared(sections: Sequence[str], setting: Setting, say: Say, tests: bool) -> None:
    """Check the numbers while other processes compile the kernels of a GPU."""
    processes = warm.start(sections, setting) if setting.on_gpu and not setting.quick else []
    try:
        checks.check(list(sections), setting, say, tests)
    except BaseException:
        warm.stop(processes)
        raise
    if processes:
        warm.finish(processes, say)


def measure_section(name: str, setting: Setting, record: Record, path: Path, began: float) -> None:
    """Fill one section of the record, and write the record after every case."""
    say = progress(began)
    module = importlib.import_module(f"hyperball.bench.sections.{name}")
    cases: list[Case] = module.cases(setting)
    section = record.sections[name] = Section(records.conditions(setting), notes=module.notes(setting))
    for index, case in enumerate(cases, 1):
        if time.monotonic() - began > setting.limit:
            section.notes.append(f"{len(cases) - index + 1} of {len(cases)} left out: the time of --quick was over")
            break
        say(f"{name} {index}/{len(cases)}: {case.name}, {case.work}, {case.dtype}")
        rows, failed = measure(case, setting)
        section.rows += rows
        section.notes += [text for text in failed if text not in section.notes]
        if name == "scaling":
            section.fits = module.fits(section.rows)
        records.write(record, path)
    records.write(record, path)


def shown(name: str, section: Section) -> str:
    """A section for the terminal."""
    lines = ["", table.TITLES[name], table.aligned(section.rows)]
    lines += [table.fits_table(section.fits)] if section.fits else []
    return "\n".join([*lines, *section.notes])
