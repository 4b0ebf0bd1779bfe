"""`reproduce`: published tables, with the papers' numbers beside ours."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperball._errors import FAILED, INTERRUPTED
from hyperball.cli.documents import read_document
from hyperball.cli.grid import conclude, speak, until_stopped
from hyperball.cli.parsing import UsageError, parser
from hyperball.experiments.scales import SCALES, Scale

MOST_SEEDS = 1000

if TYPE_CHECKING:
    from hyperball.experiments.jobs.ends import End
    from hyperball.experiments.jobs.job import Job
    from hyperball.experiments.runtime import Timing
    from hyperball.experiments.table import Experiment


def reproduce(given: Sequence[str]) -> int:
    """`hyperball reproduce TABLE … [--cells …] [--seeds N] [--scale …]`, or `--markdown RESULTS [--into FILE …]`."""
    own = options().parse_args(given)
    check_markdown(own)
    if own.markdown is not None:
        return markdown(Path(own.markdown), own.tables, [Path(path) for path in own.into], own.check)
    if not own.tables:
        raise UsageError("name a table, such as dcnet-table3; `hyperball list tables` lists them")
    check_counts(own)
    for option in ("out", "collect"):
        if getattr(own, option) == "":
            raise UsageError(f"--{option} must name a folder, got ''")
    if own.missing and own.collect is None:
        raise UsageError("--missing goes with --collect FOLDER: it leaves out what that folder has")
    from hyperball.experiments.tables import experiment

    tables = [experiment(name) for name in own.tables]
    for table in tables:
        check_use(table, own)
    over = math.inf if own.time_limit is None else time.monotonic() + own.time_limit
    return until_stopped(lambda: max([make(table, own, over) for table in tables]))


def check_counts(own: argparse.Namespace) -> None:
    """Refuse numbers of seeds, jobs and seconds that nothing can be done with."""
    if own.jobs < 1:
        raise UsageError(f"--jobs must be >= 1, got {own.jobs}")
    if not 1 <= own.seeds <= MOST_SEEDS:
        raise UsageError(f"--seeds must be from 1 to {MOST_SEEDS}, got {own.seeds}")
    if own.first_seed < 0:
        raise UsageError(f"--first-seed must be >= 0, got {own.first_seed}")
    if own.time_limit is not None and not own.time_limit > 0:
        raise UsageError(f"--time-limit must be > 0, got {own.time_limit:g}")


def check_markdown(own: argparse.Namespace) -> None:
    """Refuse options that would be passed over in silence: of training beside --markdown, and of that without it."""
    if own.markdown is None:
        for option, given in (("--into", own.into), ("--check", own.check)):
            if given:
                raise UsageError(f"{option} goes with --markdown RESULTS")
        return
    if own.check and not own.into:
        raise UsageError("--check goes with --into FILE: it says whether the files are what the records say")
    if own.tables and own.into:
        raise UsageError(f"--into fills the tables that the markers of a file name, got {' '.join(own.tables)} too")
    made = options()
    for name, given in vars(own).items():
        if name not in ("markdown", "into", "check", "tables", "debug") and given != made.get_default(name):
            raise UsageError(f"--markdown trains nothing: it takes no --{name.replace('_', '-')}")


def check_use(table: Experiment | Timing, own: argparse.Namespace) -> None:
    """Refuse cells that a table does not have, and what a table of times has no use for."""
    from hyperball.experiments.runtime import TIMED_SCALES, Timing

    if not isinstance(table, Timing):
        table.select(chosen(own.cells, table))
        return
    for option, given, default in (
        ("--cells", own.cells, ""),
        ("--seeds", own.seeds, 1),
        ("--first-seed", own.first_seed, 0),
        ("--missing", own.missing, False),
    ):
        if given != default:
            raise UsageError(f"{table.name} is a table of times, without cells and seeds: it takes no {option}")
    if own.scale not in TIMED_SCALES:
        raise UsageError(f"--scale of {table.name} must be one of {', '.join(TIMED_SCALES)}, got {own.scale}")


def options() -> argparse.ArgumentParser:
    made = parser("reproduce")
    made.add_argument("tables", nargs="*", metavar="TABLE", help="those of `hyperball list tables`")
    made.add_argument("--cells", default="", metavar="A,B", help="rows, columns, cells, published, control, ours")
    made.add_argument("--seeds", type=int, default=1, metavar="N", help="so many seeds (default: 1)")
    made.add_argument("--first-seed", type=int, default=0, metavar="N", help="the first of them (default: 0)")
    made.add_argument("--scale", choices=SCALES, default="paper", help="(default: paper)")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default: 1)")
    made.add_argument("--out", default="runs", metavar="FOLDER", help="runs go to FOLDER/TABLE-SCALE (default: runs)")
    made.add_argument("--collect", metavar="FOLDER", help="copy records to FOLDER/TABLE-SCALE, without weights")
    made.add_argument("--missing", action="store_true", help="with --collect: only cells that FOLDER lacks")
    made.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="then save what runs; the same command goes on"
    )
    made.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    made.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    made.add_argument("--dry-run", action="store_true", help="list the cells and do nothing else")
    made.add_argument(
        "--markdown", metavar="RESULTS", help="print the TABLEs of a folder of records, or all in short; train nothing"
    )
    made.add_argument(
        "--into", nargs="+", default=[], metavar="FILE", help="with --markdown: fill these files' markers"
    )
    made.add_argument(
        "--check", action="store_true", help="with --into: change nothing, fail where a file would change"
    )
    return made


def make(table: Experiment | Timing, own: argparse.Namespace, over: float) -> int:
    """One table, until the time is over: a measurement of times, or the training of its cells."""
    from hyperball.experiments.runtime import Timing, measure_times
    from hyperball.training.process.allocator import keep_freed_memory

    folder = f"{getattr(table, 'family', None) or table.name}-{own.scale}"
    if not isinstance(table, Timing):
        return train_cells(table, own, folder, over)
    print(f"{table.title} ({table.source})", flush=True)
    if own.dry_run:
        return 0
    keep_freed_memory()  # as processes that train do: layers are timed, not the system that clears pages
    kept = Path(own.collect) / folder if own.collect else None
    text = measure_times(table, own.scale, own.accelerator, Path(own.out) / folder, kept, over)
    return say_times(table.name, text)


def say_times(name: str, text: str) -> int:
    if text:
        print(text)
        return 0
    print(f"not done: {name}: the time was over before all was timed", file=sys.stderr)
    return INTERRUPTED


def train_cells(whole: Experiment, own: argparse.Namespace, folder: str, over: float) -> int:
    """Train what is not done, test, draw, compare, and keep."""
    from hyperball._signals import shielded
    from hyperball.experiments.jobs.attack_jobs import with_attacks
    from hyperball.experiments.jobs.conditions import with_conditions
    from hyperball.experiments.jobs.crew import run_local
    from hyperball.experiments.jobs.lacking import lacking
    from hyperball.experiments.jobs.of_table import check_data, jobs_of
    from hyperball.experiments.jobs.sharing import take_over
    from hyperball.experiments.results.collecting import Keeper

    table = whole.select(chosen(own.cells, whole)).at(own.scale)
    out, kept = Path(own.out) / folder, Path(own.collect) / folder if own.collect else None
    seeds = range(own.first_seed, own.first_seed + own.seeds)
    jobs = jobs_of(table, seeds, out, own.data_root, own.accelerator)
    asked = with_conditions(table, with_attacks(table, jobs, seeds))
    everything, stuck = lacking(asked, out, kept) if own.missing and kept is not None else (asked, [])
    for taken in [] if own.dry_run else take_over(everything, out):
        speak(taken)
    waiting = [job for job in everything if not job.is_done]
    announce(table, own, everything, waiting, out)
    if left_out := [job for job in asked if job not in [*everything, *(end.job for end in stuck)]]:
        print(f"left out, as {kept} has them: {counted(left_out)}", flush=True)
    if own.dry_run:
        return say_rest([], [], stuck, True)
    check_data(waiting)
    keeper = Keeper(whole.at(own.scale), own.scale, out, kept)

    def keep(ended: Job) -> None:
        keeper.keep_cells([job for job in everything if job.folder == ended.folder])

    ends = run_local(waiting, own.jobs, speak, None if over == math.inf else over - time.monotonic(), keep)
    stopped = time.monotonic() < over and any(end.interrupted and not end.late for end in ends)
    with shielded():
        keeper.keep_all(everything)
    drawn = draw_all(whole, own, out, time.monotonic() if stopped else over)
    with shielded():
        keeper.keep_all(everything)
    say_table(table, own.scale, jobs_of(table, seeds, kept) if own.missing and kept is not None else jobs)
    code = max(say_rest(everything, ends, stuck, drawn), FAILED if keeper.has_lost else 0)
    if stopped or not (drawn or time.monotonic() >= over):
        raise KeyboardInterrupt  # no other table is begun
    return code


def announce(
    table: Experiment, own: argparse.Namespace, jobs: Sequence[Job], waiting: Sequence[Job], out: Path
) -> None:
    """Say which table it is, how much of it is done, and with `--dry-run` every cell."""
    print(f"{table.title} ({table.source})")
    print(f"{counted(jobs)}, {len(jobs) - len(waiting)} done before, in {out}", flush=True)
    if own.scale != "paper":
        print(f"{own.scale}: {table.words(own.scale)}; the paper's numbers are those of the full schedule")
    if own.dry_run and jobs:
        print("\n".join(f"{'to do' if job in waiting else 'done':>5}  {job.cell.name}" for job in jobs))


def counted(jobs: Sequence[Job]) -> str:
    """How many networks are trained, and how many jobs test them."""
    cells = sum(job.trains for job in jobs)
    words = "1 cell" if cells == 1 else f"{cells} cells"
    tests = len(jobs) - cells
    return f"{words} and {tests} {'test' if tests == 1 else 'tests'} of them" if tests else words


def draw_all(whole: Experiment, own: argparse.Namespace, out: Path, over: float) -> bool:
    """Draw the pictures of a table until the time is over or Ctrl-C; whether all are drawn."""
    from hyperball.experiments.jobs.drawing import draw
    from hyperball.experiments.jobs.of_table import jobs_of
    from hyperball.experiments.results.collecting import seeds_in
    from hyperball.experiments.tables import whole_of

    drawn = whole_of(whole).at(own.scale)
    with contextlib.suppress(KeyboardInterrupt):
        return draw(drawn, jobs_of(drawn, seeds_in(out), out, own.data_root, own.accelerator), out, over)
    return False


def say_table(table: Experiment, scale: Scale, jobs: Sequence[Job]) -> None:
    """Print the cells of a command beside the paper's, and what to know when reading them."""
    from hyperball.experiments.results import comparison

    lines = comparison.compare(table, jobs)
    print(f"\n{comparison.table(table, lines, scale)}")
    notes = (f"note: {note}" for note in comparison.notes_of(table, lines))
    print("\n".join([*comparison.doubts_of(table, jobs), *notes]))


def say_rest(jobs: Sequence[Job], ends: Sequence[End], stuck: Sequence[End], drawn: bool) -> int:
    """Name what is not done, and what cannot be; 0 if nothing is, 130 where the same command goes on."""
    from hyperball.experiments.results.summary import unfinished

    code = conclude({**unfinished(jobs, ends), **{end.job.cell.name: end.reason for end in stuck}}, ends)
    if not drawn and code != INTERRUPTED:
        print("interrupted before all pictures were drawn; the same command goes on", file=sys.stderr)
    return code if drawn else INTERRUPTED


def chosen(text: str, table: Experiment) -> list[str]:
    """What `--cells` names between commas, where the most parts that make up a known name, with commas, are one."""
    from hyperball.experiments.table import handles

    known = {spaced(name): name for entry in table.entries for name in handles(entry)}
    parts = [part.strip(" \"'") for part in text.split(",")]
    names, at = list[str](), 0
    while at < len(parts):
        ends = range(len(parts), at, -1)
        end = next((end for end in ends if spaced(",".join(parts[at:end])) in known), at + 1)
        told = spaced(",".join(parts[at:end]))
        names += [known.get(told, told)] if told else []
        at = end
    if text and not names:
        raise UsageError(f"--cells must name rows, columns or cells, got {text!r}")
    return names


def spaced(name: str) -> str:
    """A name with one space behind each comma, however it was typed."""
    return ", ".join(part.strip() for part in name.split(","))


def markdown(results: Path, tables: Sequence[str], files: Sequence[Path], check: bool) -> int:
    """Print tables of a folder of records, without names one line each; or fill the markers of files with them."""
    from hyperball.experiments.results import markdown as work

    if not results.is_dir():
        raise UsageError(f"--markdown: {results} is no folder")
    if not files:
        print("\n\n".join([work.made(name, results) for name in tables]) or work.summary(results))
        return 0
    stale = []
    for path in files:
        document = read_document(path)
        try:
            filled = work.fill(document.text, results)
        except work.MarkerError as error:
            raise UsageError(f"--into {path}: {error}") from None
        if filled != document.text and check:
            stale.append(path)
        elif filled != document.text:
            document.replace(filled)
    for path in stale:
        print(f"{path} is not what the records say; run `hyperball reproduce --markdown {results} --into {path}`")
    return 1 if stale else 0
