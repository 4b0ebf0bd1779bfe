"""The whole benchmark: checks, compiled kernels, then one section after another, written as they come."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


def header(held: dict[str, Any], setting: Setting) -> str:
    """The device, the versions, and on a CPU the threads and whether others use it."""
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
    """Check, measure, print and write; what was measured is in the file after every case.

    A section is under `partial` until its last case is measured, and what an earlier run left of it stays until then.
    """
    record = Record(records.device_name(setting.device))
    records.refuse_to_mix(path, record.device, setting.quick)
    load = records.load_average()  # before the checks and the first section load the machine themselves
    say = progress(time.monotonic())
    show(header(records.conditions(setting, load), setting))
    prepared(sections, setting, say, tests)
    until = time.monotonic() + setting.limit
    for name in sections:
        section = measure_section(name, Section(records.conditions(setting, load)), setting, record, path, until, say)
        show(shown(name, section))
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


def measure_section(
    name: str, section: Section, setting: Setting, record: Record, path: Path, until: float, say: Say
) -> Section:
    """Measure a section, case by case, into the record's `partial` and its file, then into its `sections`."""
    module = importlib.import_module(f"hyperball.bench.sections.{name}")
    cases: list[Case] = module.cases(setting)
    notes = list(module.notes(setting))
    record.partial[name] = section
    for done, case in enumerate(cases):
        section.notes = [f"incomplete: {done} of {len(cases)} cases", *notes]
        if section.rows:
            records.write(record, path)
        if time.monotonic() > until:
            section.notes.append("the time of --quick was over")
            break
        say(f"{name} {done + 1}/{len(cases)}: {case.name}, {case.work}, {case.dtype}")
        rows, failed = measure(case, setting)
        section.rows += rows
        notes += [text for text in failed if text not in notes]
        if name == "scaling":
            section.fits = module.fits(section.rows)
    else:
        section.notes = notes
        if section.rows:
            record.sections[name] = record.partial.pop(name)
    records.write(record, path)
    return section


def shown(name: str, section: Section) -> str:
    """A section for the terminal."""
    lines = ["", table.TITLES[name], table.aligned(section.rows)]
    lines += [table.fits_table(section.fits)] if section.fits else []
    return "\n".join([*lines, *section.notes])
