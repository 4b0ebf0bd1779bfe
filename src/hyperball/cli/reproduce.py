"""`reproduce`: published tables, with the papers' numbers beside ours."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hyperball.cli.grid import as_interrupt, conclude, speak
from hyperball.cli.parsing import UsageError, parser

if TYPE_CHECKING:
    from hyperball.experiments.runtime import Timing
    from hyperball.experiments.table import Experiment

SCALES = ("quick", "quarter", "half", "paper")


def reproduce(given: Sequence[str]) -> int:
    """`hyperball reproduce TABLE … [--cells …] [--seeds N] [--scale …]`, or `--markdown RESULTS [--into FILE …]`."""
    own = options().parse_args(given)
    if own.markdown:
        return markdown(Path(own.markdown), [Path(path) for path in own.into], own.check)
    if not own.tables:
        raise UsageError("name a table, such as dcnet-table3; `hyperball list tables` lists them")
    for name in ("seeds", "jobs"):
        if getattr(own, name) < 1:
            raise UsageError(f"--{name} must be >= 1, got {getattr(own, name)}")
    if own.time_limit is not None and own.time_limit <= 0:
        raise UsageError(f"--time-limit must be > 0, got {own.time_limit:g}")
    from hyperball.experiments.tables import experiment

    chosen = [experiment(name) for name in own.tables]
    signal.signal(signal.SIGTERM, as_interrupt)
    over = None if own.time_limit is None else time.monotonic() + own.time_limit
    codes = [make(table, own, None if over is None else over - time.monotonic()) for table in chosen]
    return max(codes)


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
    made.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="then save what runs; the same command goes on"
    )
    made.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    made.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    made.add_argument("--dry-run", action="store_true", help="list the cells and do nothing else")
    made.add_argument(
        "--markdown", metavar="RESULTS", help="print the tables of a folder of records, and train nothing"
    )
    made.add_argument(
        "--into", nargs="+", default=[], metavar="FILE", help="with --markdown: fill these files' markers"
    )
    made.add_argument(
        "--check", action="store_true", help="with --into: change nothing, fail where a file would change"
    )
    return made


def make(table: Experiment | Timing, own: argparse.Namespace, seconds: float | None) -> int:
    """One table: a measurement of times, or the training of its cells."""
    from hyperball.experiments.runtime import Timing, measure_times

    folder = f"{getattr(table, 'family', None) or table.name}-{own.scale}"
    if not isinstance(table, Timing):
        return train_cells(table, own, folder, seconds)
    print(f"{table.title} ({table.source})", flush=True)
    if not own.dry_run:
        targets = [Path(own.out) / folder, *([Path(own.collect) / folder] if own.collect else [])]
        print(measure_times(table, own.scale, own.accelerator, targets))
    return 0


def train_cells(whole: Experiment, own: argparse.Namespace, folder: str, seconds: float | None) -> int:
    """Train what is not done, test, draw, compare, and keep."""
    from hyperball.experiments import reproduce as work
    from hyperball.experiments.attack_jobs import doubts_of, with_attacks
    from hyperball.experiments.collecting import collect, keep_pictures, write_table
    from hyperball.experiments.runners import run_local
    from hyperball.experiments.summary import unfinished

    table = whole.select(text.strip() for text in own.cells.split(",") if text.strip()).at(own.scale)
    out = Path(own.out) / folder
    seeds = range(own.first_seed, own.first_seed + own.seeds)
    jobs = work.jobs_of(table, seeds, out, own.data_root, own.accelerator)
    began = time.monotonic()
    everything = with_attacks(table, jobs, seeds)
    waiting = [job for job in everything if not job.is_done]
    print(f"{table.title} ({table.source})")
    print(f"{len(everything)} cells, {len(everything) - len(waiting)} done before, in {out}", flush=True)
    if own.scale != "paper":
        print(f"{own.scale}: {table.words(own.scale)}; the paper's numbers are those of the full schedule")
    if own.dry_run:
        print("\n".join(f"{'done' if job.is_done else 'to do':>5}  {job.cell.name}" for job in everything))
        return 0
    ends = run_local(waiting, own.jobs, speak, seconds)
    if seconds is not None and time.monotonic() - began >= seconds:
        ends = [replace(end, interrupted=bool(end.reason)) for end in ends]
    work.annotate(table, own.scale, jobs)
    work.measure_conditions(table, jobs, own.jobs)
    pictures = work.draw(table, jobs, out)
    lines = work.compare(table, jobs)
    write_table(whole.at(own.scale), own.scale, out)
    if own.collect:
        kept = Path(own.collect) / folder
        for sentence in collect(everything, kept):
            print(sentence)
        keep_pictures(pictures, kept)
        write_table(whole.at(own.scale), own.scale, kept)
    print(f"\n{work.table(table, lines)}")
    print("\n".join([*doubts_of(table, jobs), *(f"note: {note}" for note in table.notes)]))
    return conclude(unfinished(everything, ends), ends)


def markdown(results: Path, files: Sequence[Path], check: bool) -> int:
    """Print the tables of a folder of records, or fill the markers of files with them."""
    from hyperball.experiments import markdown as work

    if not results.is_dir():
        raise UsageError(f"--markdown: {results} is no folder")
    if not files:
        print(work.summary(results))
        return 0
    stale = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        filled = work.fill(text, results)
        if filled != text and check:
            stale.append(path)
        elif filled != text:
            path.write_text(filled, encoding="utf-8")
    for path in stale:
        print(f"{path} is not what the records say; run `hyperball reproduce --markdown {results} --into {path}`")
    return 1 if stale else 0
