"""Runners of a grid: local processes that share a device, or tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hyperball._errors import FAILED, USAGE, exit_code, one_line
from hyperball.experiments.cell import train_cell
from hyperball.experiments.grid import Cell
from hyperball.training.fields import RecipeError
from hyperball.training.files import FileError, write_json
from hyperball.training.folder import unlike
from hyperball.training.recipe import Recipe
from hyperball.training.record import RECIPE, RECORD, Record, has_diverged

LOG = "log.txt"
PAUSE = 0.05
GRACE = 25.0  # seconds for saving when the time is up
PATIENCE = 120.0  # and after Ctrl-C
INTERRUPTIONS = (128 + signal.SIGINT, 128 + signal.SIGTERM)
SPOKEN = (FAILED, USAGE, *INTERRUPTIONS)  # exit codes of a cell that said in its last line why


@dataclass(frozen=True)
class Job:
    """A cell and where it is run."""

    cell: Cell
    folder: Path
    data_root: str | None = None
    accelerator: str = "auto"
    trains: ClassVar[bool] = True

    @property
    def log(self) -> Path:
        """What its process says."""
        return self.folder / LOG

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of cells that must be done before this one begins."""
        return ()

    def command(self) -> list[str]:
        """What its process is started with, after what that reads has been written."""
        recipe = self.folder / "cell.json"
        write_json(recipe, self.cell.recipe.to_dict())
        module = "hyperball.experiments.cell"
        return [module, str(recipe), str(self.folder), self.data_root or "", self.accelerator]

    @property
    def is_done(self) -> bool:
        """Whether the folder holds a finished run of this very recipe; what else it may hold, training refuses."""
        return not self.missing()

    @property
    def diverged(self) -> bool:
        """Whether the folder says that the network did not converge."""
        return has_diverged(self.folder)

    def missing(self) -> str:
        """Why the folder does not hold a run of this recipe that came to an end, or nothing if it does."""
        if not (self.folder / RECORD).exists():
            return "there is no finished run"
        try:
            known = Recipe.from_file(self.folder / RECIPE)
            strange = foreign(Record.read(self.folder), known)
        except (FileError, RecipeError) as error:
            return str(error)
        if strange:
            return f"{self.folder / RECORD} is of another recipe than {RECIPE} beside it: {strange}"
        difference = unlike(known, self.cell.recipe)
        return f"{self.folder} holds a run of another recipe: {difference}" if difference else ""


def foreign(record: Record, known: Recipe) -> str:
    """Where a record's own recipe is not that of its folder, of what determines numbers; "" where it is.

    The folder in which the network that a run begins with lay may be called otherwise.
    """
    try:
        own = Recipe.from_dict(record.recipe)
    except RecipeError as error:
        return f"that of the record cannot be read ({error})"
    starts = [recipe.start.weights for recipe in (own, known)]
    if all(starts) and len({Path(str(start)).parts[-2:] for start in starts}) == 1:
        own = own.override({"start.weights": starts[1]})
    return unlike(own, known)


@dataclass(frozen=True)
class End:
    """How a job ended: an empty reason is well."""

    job: Job
    reason: str = ""
    interrupted: bool = False


Say = Callable[[str], object]


Running = tuple[Job, "subprocess.Popen[bytes]"]


def run_local(jobs: Sequence[Job], count: int, say: Say, seconds: float | None = None) -> list[End]:
    """Up to `count` processes at a time; a crash ends its cell, and those that need it, alone.

    Ctrl-C, or the end of so many `seconds`, lets every cell save itself.
    """
    waiting, ends, running = list(jobs), list[End](), list[Running]()
    over = math.inf if seconds is None else time.monotonic() + seconds
    grace = GRACE
    try:
        while (waiting or running) and time.monotonic() < over:
            begin(waiting, running, ends, count, say, len(jobs))
            for job, process in list(running):
                if process.poll() is not None:
                    running.remove((job, process))
                    ends.append(ended(job, process.returncode))
                    say(told(ends[-1], len(ends), len(jobs)))
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        grace = PATIENCE
    if waiting or running:
        with shielded():
            say("stopping: every cell saves itself first")
            ends += stop(running, grace)
        ends += [End(job, "not begun", interrupted=True) for job in waiting]
    return ends


def begin(waiting: list[Job], running: list[Running], ends: list[End], count: int, say: Say, total: int) -> None:
    """Start the first jobs whose needs are met, and end those whose needs failed."""
    failed = {end.job.cell.name: end.reason for end in ends if end.reason}
    for job in list(waiting):
        broken = [name for name in job.needs if name in failed]
        if broken:
            waiting.remove(job)
            ends.append(End(job, f"it needs {broken[0]}: {failed[broken[0]]}"))
            say(told(ends[-1], len(ends), total))
            continue
        pending = {other.cell.name for other in (*waiting, *(held for held, _ in running))}
        if len(running) < count and not pending & set(job.needs):
            waiting.remove(job)
            running.append((job, start(job, count)))


def start(job: Job, count: int) -> subprocess.Popen[bytes]:
    """A process for a job, in a session of its own so that Ctrl-C reaches it through us alone."""
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    command = [sys.executable, "-m", *job.command()]
    with job.log.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={"OMP_NUM_THREADS": threads, **os.environ},
        )  # fmt: skip


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Ctrl-C and SIGTERM do nothing while the block lasts, so that a second one orphans no process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop(running: Sequence[Running], grace: float) -> list[End]:
    """Ask every process to save itself; one that has not after so many seconds is killed."""
    for _, process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    last = time.monotonic() + grace
    ends = []
    for job, process in running:
        try:
            code = process.wait(max(0.0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -signal.SIGTERM
        ends.append(ended(job, 128 + signal.SIGTERM if code == -signal.SIGTERM else code))
    return ends


def ended(job: Job, code: int) -> End:
    """How a job ended, by its exit code and, where it refused or failed, the last line of its log."""
    if code == 0:
        return End(job, job.missing())
    name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = last_line(job.log)
    if last and code not in SPOKEN:
        last = f"{last} ({name})"
    return End(job, last or name, code in INTERRUPTIONS)


def last_line(path: Path) -> str:
    """The last line that says something of a log, at most 300 characters."""
    try:
        text = path.read_bytes()[-4000:].decode("utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def told(end: End, number: int, total: int) -> str:
    well = "did not converge" if end.job.trains and end.job.diverged else "done"
    return f"{number}/{total}  {end.job.cell.name}: {end.reason or well}"


def run_ray(jobs: Sequence[Job], count: int | None, say: Say, address: str | None = None) -> list[End]:
    """Every cell as a task of a Ray cluster: that of `address` or the environment, else a local one of `count` CPUs.

    The folders must be on a disk that all machines of the cluster share.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"--executor ray needs ray ({error}); pip install 'hyperball[grid]'") from error
    ours = not ray.is_initialized()
    if ours:
        cluster = address or os.environ.get("RAY_ADDRESS")
        options: dict[str, Any] = (
            {"address": cluster} if cluster else {"num_cpus": count or 1, "include_dashboard": False}
        )
        ray.init(log_to_driver=False, configure_logging=False, **options)
    try:
        return list(collect(ray, jobs, count or 1, say))
    finally:
        if ours:
            ray.shutdown()


def collect(ray: Any, jobs: Sequence[Job], count: int, say: Say) -> Iterator[End]:
    # Without a share of a GPU, Ray hides all of them from a task.
    share = min(1.0, ray.cluster_resources().get("GPU", 0.0) / count)
    task = ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(run_task)
    tasks = {task.remote(job): job for job in jobs}
    for number in range(1, len(jobs) + 1):
        (done,), _ = ray.wait(list(tasks), num_returns=1)
        job = tasks.pop(done)
        try:
            reason = ray.get(done)
        except ray.exceptions.RayError as error:
            reason = f"the worker died ({type(error).__name__})"
        end = End(job, reason)
        say(told(end, number, len(jobs)))
        yield end


def run_task(job: Job) -> str:
    """Train a job in a worker; what goes wrong is returned as a text."""
    try:
        train_cell(job.cell.recipe, job.folder, job.data_root, job.accelerator)
    except Exception as error:
        return one_line(error) if exit_code(error) is not None else f"{type(error).__name__}: {one_line(error)}"
    return ""
