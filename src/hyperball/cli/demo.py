"""`demo`: a first look."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hyperball._errors import Terminated
from hyperball._signals import terminable
from hyperball.cli.parsing import parser

if TYPE_CHECKING:
    from hyperball.experiments.demo import Outcome
    from hyperball.report.demo import DemoRow


def demo(given: Sequence[str]) -> int:
    """`hyperball demo`."""
    options = parser("demo")
    options.add_argument("-o", "--out", default="demo.html", metavar="PAGE", help="(default: demo.html)")
    options.add_argument("--seeds", type=int, default=3, metavar="N", help="(default: 3)")
    options.add_argument("--epochs", type=int, default=10, metavar="N", help="(default: 10)")
    options.add_argument("--runs", metavar="FOLDER", help="keep the runs there (default: they are deleted)")
    own = options.parse_args(given)
    from hyperball.experiments.demo import CELLS, run
    from hyperball.report import read_runs, write_page
    from hyperball.report.demo import demo_page, demo_text
    from hyperball.report.page import check_target
    from hyperball.training import Interrupted
    from hyperball.training.process.allocator import keep_freed_memory

    check_target(own.out)
    keep_freed_memory()
    began = time.perf_counter()
    print(f"{len(CELLS)} small networks on digits and point clouds, {own.seeds} seeds each, one CPU thread", flush=True)
    folder = Path(own.runs) if own.runs else Path(tempfile.mkdtemp(prefix="hyperball-demo-"))
    try:
        with terminable():
            rows = [row(outcome) for outcome in run(folder, seeds=own.seeds, epochs=own.epochs, say=speak)]
            write_page(own.out, demo_page(read_runs(folder), rows))
    except Interrupted as stop:
        # The runs are deleted: there is nothing to resume.
        raise Terminated if stop.signal_number == signal.SIGTERM else KeyboardInterrupt from None
    finally:
        if not own.runs:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{demo_text(rows)}\n\nwrote {own.out} in {time.perf_counter() - began:.0f} s: open it in a browser")
    return 0


def speak(text: str) -> None:
    print(text, flush=True)


def row(outcome: Outcome) -> DemoRow:
    """A cell's outcome as the page takes it."""
    from hyperball.experiments.demo import TABLE_SHARES, folder_name
    from hyperball.report.demo import DemoRow

    cell = outcome.cell
    return DemoRow(
        cell.data, cell.name, cell.about, f"{cell.data}/{folder_name(cell)}", outcome.last, outcome.first_epoch,
        outcome.outliers, TABLE_SHARES[cell.data], outcome.seconds,
    )  # fmt: skip
