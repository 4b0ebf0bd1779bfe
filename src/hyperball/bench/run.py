"""The whole benchmark: checks, compiled kernels, then one section after another, written case by case."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperball._errors import Terminated
from hyperball.bench import checks, choice, records, table, warm
from hyperball.bench.case import Case, Setting
from hyperball.bench.choice import Plan
from hyperball.bench.measure import clean, measure, reason
from hyperball.bench.records import Record, Row, Section

SECTIONS = ("conv", "train", "pool", "projection", "inference", "scaling")
Say = Callable[[str], None]


class CasesFailed(RuntimeError):
    """Cases of which nothing could be measured, after the others were."""


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


@dataclass
class Taking:
    """A section that is being measured: its rows so far, what earlier runs left, and why chosen cases are not done."""

    name: str
    plan: Plan
    section: Section
    before: Section | None
    texts: Sequence[str] = ()
    one_dtype: bool = False
    done: set[str] = field(default_factory=set)
    why: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def leave(self, why: str) -> None:
        """Say why the chosen cases that are not done are not; a case that failed keeps its own reason."""
        self.why = {entry: self.failed.get(entry, why) for entry in self.plan.chosen if entry not in self.done}

    def missing(self) -> dict[str, str]:
        """Cases that are not done, with the reasons; one that was not chosen counts if earlier runs lack it too."""
        found = {}
        past = self.before or Section({})
        for entry, case in self.plan.cases.items():
            if entry in self.done:
                continue
            if entry in self.why or entry in past.missing:
                found[entry] = self.why.get(entry) or past.missing[entry]
            elif not any(is_row_of(row, case) for row in past.rows):
                found[entry] = f"not among --cases {' or '.join(map(repr, self.texts))}"
        return found

    def whole(self) -> Section:
        """What the record holds: this run's rows alone if it has all cases of all dtypes, else beside earlier ones."""
        alone = len(self.done) == len(self.plan.cases) and not self.one_dtype
        held = self.section if alone else records.merged(self.before, self.section)
        fits = getattr(module_of(self.name), "fits", None)
        held.fits = fits(held.rows) if fits else []
        return records.marked(held, self.missing(), len(self.plan.cases))


def is_row_of(row: Row, case: Case) -> bool:
    same = (row.case, row.work, row.dtype) == (case.name, case.work, case.dtype)
    return same and (row.subject, row.reference) in case.compared


def module_of(name: str) -> Any:
    return importlib.import_module(f"hyperball.bench.sections.{name}")


def run(
    sections: Sequence[str], setting: Setting, path: Path, tests: bool = True, show: Callable[[str], None] = print,
    cases: Sequence[str] = (), debug: bool = False,
) -> Record:  # fmt: skip
    """Check, measure, print and write; what was measured is in the file after every case.

    Where a section is not measured as a whole (`cases` chooses, a signal ends it, a case fails), the rows of this run
    replace those of the same key, the others stay with their date, and its conditions say what is missing and why. A
    case that fails is passed over, `CasesFailed` tells of it at the end; with `debug` its error is raised.
    """
    record = Record(records.device_name(setting.device))
    records.refuse_to_mix(path, record.device, setting.quick)
    plans = choice.planned(sections, setting, cases)
    load = records.load_average()  # before the checks and the first section load the machine themselves
    say = progress(time.monotonic())
    show(header(records.conditions(setting, load), setting))
    prepared(plans, setting, say, tests)
    until = time.monotonic() + setting.limit
    failed: dict[str, str] = {}
    try:
        for name, plan in plans.items():
            before = records.read(path).sections.get(name) if path.exists() else None
            taking = Taking(
                name, plan, Section(records.conditions(setting, load)), before, cases, setting.dtype is not None
            )
            measure_section(taking, setting, record, path, until, say, show, debug)
            failed |= {f"{name}, {entry}": why for entry, why in taking.failed.items()}
    finally:
        show(f"written to {path}" if record.sections else "nothing was measured, and nothing written")
    if failed:
        raise CasesFailed(f"nothing was measured of {'; '.join(records.first_of_each(failed))}")
    return record


def prepared(plans: Mapping[str, Plan], setting: Setting, say: Say, tests: bool) -> None:
    """Check the numbers while other processes compile the kernels of a GPU."""
    processes = warm.start(plans, setting) if setting.on_gpu and not setting.quick else []
    try:
        checks.check(list(plans), setting, say, tests)
        if processes:
            warm.finish(processes, say)
    finally:
        warm.stop(processes)


def measure_section(
    taking: Taking, setting: Setting, record: Record, path: Path, until: float, say: Say, show: Say, debug: bool
) -> None:
    """Measure the chosen cases of a section, each into the record and its file when it ends; then print them."""
    taking.section.notes = list(module_of(taking.name).notes(setting))
    taking.leave("the run ended before")
    try:
        for place, entry in enumerate(taking.plan.chosen):
            if time.monotonic() > until:
                taking.leave("the time of --quick was over")
                break
            say(f"{taking.name} {place + 1}/{len(taking.plan.chosen)}: {entry}")
            note(taking, entry, *attempt(taking.plan.cases[entry], setting, debug))
            keep(taking, record, path)
    except BaseException as error:
        taking.leave(ending(error))
        raise
    finally:
        keep(taking, record, path)
        show(shown(taking))


def attempt(case: Case, setting: Setting, debug: bool) -> tuple[list[Row], list[str]]:
    """The rows of a case and what failed, which is all where it raises."""
    try:
        return measure(case, setting)
    except Exception as error:
        if debug:
            raise
        why = reason(error)
    with contextlib.suppress(Exception):  # after an error a GPU may refuse this too, as it will the next case
        clean(setting)
    return [], [why]


def ending(error: BaseException) -> str:
    """Why a section ended."""
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted by {'SIGTERM' if isinstance(error, Terminated) else 'SIGINT'}"
    return f"ended by {reason(error)}"


def note(taking: Taking, entry: str, rows: list[Row], notes: list[str]) -> None:
    """Enter what a case gave: its rows and notes, or that it failed."""
    if rows:
        taking.section.rows += rows
        taking.section.notes += [text for text in notes if text not in taking.section.notes]
        taking.done.add(entry)
        taking.why.pop(entry, None)
    else:
        taking.failed[entry] = taking.why[entry] = first_of(notes, taking.plan.cases[entry])


def first_of(notes: list[str], case: Case) -> str:
    """The first of the subjects that failed, with its reason, and the number of the others."""
    if not notes:
        return "no subject was timed with its reference"
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    return notes[0].removeprefix(f"{case.name}, {case.dtype}, ") + more


def keep(taking: Taking, record: Record, path: Path) -> None:
    """Write the section as it stands, if anything of it was measured."""
    if taking.section.rows:
        record.sections[taking.name] = taking.whole()
        records.write(record, path)


def shown(taking: Taking) -> str:
    """What this run measured of a section, for the terminal; then what is missing, and what earlier runs left."""
    whole, section = taking.whole(), taking.section
    lines = ["", table.TITLES[taking.name] + table.doubt(whole), table.aligned(section.rows)]
    lines += [table.fits_table(whole.fits)] if whole.fits and section.rows else []
    return "\n".join([*lines, *table.remarks(whole)])
