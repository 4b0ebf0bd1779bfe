"""`reproduce`: a published table, with the paper's numbers beside ours."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from hyperball.cli.grid import as_interrupt, conclude, speak
from hyperball.cli.parsing import UsageError, parser


def reproduce(given: Sequence[str]) -> int:
    """`hyperball reproduce TABLE [--cells …] [--seeds N] [--scale quick|paper]`."""
    options = parser("reproduce")
    options.add_argument("table", help="one of those of `hyperball list tables`")
    options.add_argument("--cells", default="", metavar="A,B", help="rows, columns or cells (default: all)")
    options.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 … N − 1 (default: 1)")
    options.add_argument("--scale", choices=("quick", "paper"), default="paper", help="(default: paper)")
    options.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time (default: 1)")
    options.add_argument("--out", metavar="FOLDER", help="where the runs are written (default: runs/TABLE-SCALE)")
    options.add_argument("--collect", metavar="FOLDER", help="copy the records there, without weights")
    options.add_argument("--data-root", metavar="FOLDER", help="the folder of the data sets (default: HYPERBALL_DATA)")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    options.add_argument("--dry-run", action="store_true", help="list the cells and do nothing else")
    own = options.parse_args(given)
    for name in ("seeds", "jobs"):
        if getattr(own, name) < 1:
            raise UsageError(f"--{name} must be >= 1, got {getattr(own, name)}")
    from hyperball.experiments import reproduce as work
    from hyperball.experiments.runners import run_local
    from hyperball.experiments.summary import unfinished
    from hyperball.experiments.tables import experiment
    from hyperball.training.files import write_json

    wanted = [text.strip() for text in own.cells.split(",") if text.strip()]
    table = experiment(own.table).select(wanted).at(own.scale)
    out = Path(own.out) if own.out else Path("runs") / f"{own.table}-{own.scale}"
    jobs = work.jobs_of(table, range(own.seeds), out, own.data_root, own.accelerator)
    waiting = [job for job in jobs if not job.is_done]
    print(f"{table.title} ({table.source})")
    print(f"{len(jobs)} cells, {len(jobs) - len(waiting)} done before, in {out}", flush=True)
    if own.scale == "quick":
        print(f"quick: {table.reduction.words}; the paper's numbers are those of the full schedule")
    if own.dry_run:
        print("\n".join(f"{'done' if job.is_done else 'to do':>5}  {job.cell.name}" for job in jobs))
        return 0
    signal.signal(signal.SIGTERM, as_interrupt)
    ends = run_local(waiting, own.jobs, speak)
    work.measure_conditions(table, jobs)
    lines = work.compare(table, jobs)
    write_json(out / "table.json", work.as_data(table, own.scale, lines))
    if own.collect:
        work.collect(jobs, Path(own.collect))
        write_json(Path(own.collect) / "table.json", work.as_data(table, own.scale, lines))
    print(f"\n{work.table(table, lines)}")
    print("\n".join(f"note: {note}" for note in table.notes))
    return conclude(unfinished(jobs, ends), ends)
