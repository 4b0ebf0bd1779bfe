"""`grid`: every cell of a grid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperball._errors import INTERRUPTED, TERMINATED, Terminated
from hyperball._signals import terminable
from hyperball.cli.parsing import UsageError, parser

if TYPE_CHECKING:
    from hyperball.experiments.jobs.ends import End
    from hyperball.experiments.jobs.job import Job


def grid(given: Sequence[str]) -> int:
    """`hyperball grid GRID.yaml --jobs N`."""
    options = parser("grid")
    options.add_argument("file", metavar="GRID", help="a .yaml or .json file: base, overrides, axes, seeds")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default: 1)")
    options.add_argument(
        "--out", metavar="FOLDER", help="where the runs are written (default: runs/ and the file's name)"
    )
    options.add_argument("--executor", choices=("local", "ray"), default="local", help="(default: local)")
    options.add_argument("--address", metavar="URL", help="the Ray cluster (default: RAY_ADDRESS, else a local one)")
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    options.add_argument("--dry-run", action="store_true", help="list the cells and do nothing else")
    own = options.parse_args(given)
    if own.jobs < 1:
        raise UsageError(f"--jobs must be >= 1, got {own.jobs}")
    from hyperball.experiments.grid import read_grid
    from hyperball.experiments.jobs.job import Job

    out = Path(own.out) if own.out else Path("runs") / Path(own.file).stem
    jobs = [Job(cell, out / cell.name, own.data_root, own.accelerator) for cell in read_grid(own.file)]
    waiting = [job for job in jobs if not job.is_done]
    print(f"{len(jobs)} cells, {len(jobs) - len(waiting)} done before, in {out}", flush=True)
    if own.dry_run:
        print("\n".join(f"{'done' if job.is_done else 'to do':>5}  {job.cell.name}" for job in jobs))
        return 0
    return until_stopped(lambda: run(jobs, waiting, own, out))


def run(jobs: Sequence[Job], waiting: Sequence[Job], own: argparse.Namespace, out: Path) -> int:
    """Train what waits, and sum up all."""
    from hyperball.experiments.jobs.crew import run_local
    from hyperball.experiments.jobs.ray_tasks import run_ray
    from hyperball.experiments.results.summary import summarize, table
    from hyperball.files import write_json

    if own.executor == "ray":
        ends = run_ray(waiting, own.jobs, speak, own.address)
    else:
        ends = run_local(waiting, own.jobs, speak)
    summary = summarize(jobs, ends)
    write_json(out / "summary.json", summary)
    print(f"\n{table(summary)}\n\n{summary['done']} of {summary['cells']} cells done; wrote {out / 'summary.json'}")
    return conclude({entry["cell"]: entry["reason"] for entry in summary["missing"]}, ends)


def until_stopped(work: Callable[[], int]) -> int:
    """The exit code of work that SIGTERM stops as Ctrl-C does: 143 in place of 130 where SIGTERM came."""
    with terminable() as was_terminated:
        try:
            code = work()
        except KeyboardInterrupt:
            if was_terminated():
                raise Terminated from None
            raise
        return TERMINATED if was_terminated() and code == INTERRUPTED else code


def speak(text: str) -> None:
    print(text, flush=True)


def conclude(missing: Mapping[str, str], ends: Sequence[End]) -> int:
    """Name every cell that is not done; 1 if there is one, 130 if the work was interrupted."""
    for name, reason in missing.items():
        print(f"not done: {name}: {reason}", file=sys.stderr)
    if any(end.interrupted for end in ends):
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 1 if missing else 0
