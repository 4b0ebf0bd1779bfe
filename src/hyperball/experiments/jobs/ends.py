"""How jobs ended, and why."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from hyperball._errors import FAILED, USAGE, exit_code, one_line
from hyperball.experiments.jobs.failures import first_sentence, last_words, lines_of, out_of_memory
from hyperball.experiments.jobs.job import Job

UNSAVED = "stopped without saving: it had not begun, or was too slow"
INTERRUPTIONS = (128 + signal.SIGINT, 128 + signal.SIGTERM)
SPOKEN = (FAILED, USAGE, *INTERRUPTIONS)  # exit codes of a cell that said in its last line why
Say = Callable[[str], object]


@dataclass(frozen=True)
class End:
    """How a job ended: an empty reason is well; one that is `late` was not begun as too little time was left.

    One that is `full` found no memory on its device.
    """

    job: Job
    reason: str = ""
    interrupted: bool = False
    late: bool = False
    full: bool = False


def ended(job: Job, code: int, since: int = 0) -> End:
    """How a job ended, by its exit code and, where it refused or failed, a line of its log behind `since` bytes."""
    if code == 0:
        return End(job, job.missing())
    name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    asked = code in INTERRUPTIONS
    lines = lines_of(job.log, since)
    full = "" if asked else out_of_memory(lines)
    if full or code not in (USAGE, *INTERRUPTIONS):
        last = first_sentence((full or last_words(lines))[:300])
    else:
        last = lines[-1][:300] if lines else ""
    if last and code not in SPOKEN:
        last = f"{last} ({name})"
    return End(job, last or (UNSAVED if asked else name), asked, full=bool(full))


def reason_of(error: BaseException) -> str:
    """What went wrong with a cell, in one line; of an error that is not ours, its first sentence."""
    if exit_code(error) is not None:
        return one_line(error)
    return first_sentence(f"{type(error).__name__}: {one_line(error)}")


def told(end: End, number: int, total: int) -> str:
    well = "did not converge" if end.job.trains and end.job.diverged else "done"
    return f"{number}/{total}  {end.job.cell.name}: {end.reason or well}"
