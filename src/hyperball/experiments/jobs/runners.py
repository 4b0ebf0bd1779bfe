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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from hyperball._errors import FAILED, USAGE, Terminated, exit_code, one_line
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs.cell import train_cell
from hyperball.experiments.jobs.failures import Room, first_sentence, length_of, lines_of, out_of_memory, write_down
from hyperball.experiments.jobs.orphans import PRCTL, follow
from hyperball.experiments.results.broken import damage
from hyperball.on_disk import RECIPE, RECORD
from hyperball.training.files import FileError, write_json
from hyperball.training.folder import unlike
from hyperball.training.recipe import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.record import Record, has_diverged

LOG = "log.txt"
PAUSE = 0.05
GRACE = 25.0  # seconds for saving when the time is up
PATIENCE = 120.0  # and after Ctrl-C
WORTH = 60.0  # seconds that are worth beginning a cell which takes longer, as it saves itself
LATE = "not begun: too little time was left"
UNSAVED = "stopped without saving: it had not begun, or was too slow"
UNTRIED = "there was no memory for it beside others, and no time for another try"
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
        module = "hyperball.experiments.jobs.cell"
        return [module, str(recipe), str(self.folder), self.data_root or "", self.accelerator]

    @property
    def is_done(self) -> bool:
        """Whether the folder holds a finished run of this very recipe; what else it may hold, training refuses."""
        return not self.missing()

    def is_kept(self, folder: Path) -> bool:
        """Whether a folder of records without weights holds what this job finds."""
        return not self.lack_in(folder)

    def lack_in(self, folder: Path) -> str:
        """Why it does not; nothing if it does."""
        return damage(folder) or replace(self, folder=folder).missing()

    @property
    def diverged(self) -> bool:
        """Whether the folder says that the network did not converge."""
        return has_diverged(self.folder)

    def missing(self) -> str:
        """Why the folder does not hold a run of this recipe that came to an end, or nothing if it does."""
        if not (self.folder / RECORD).exists():
            return "there is no finished run"
        try:
            record, known = Record.read(self.folder), recipe_in(self.folder)
        except (FileError, RecipeError) as error:
            return str(error)
        strange = foreign(record, known)
        if strange:
            return f"{self.folder / RECORD} is of another recipe than {RECIPE} beside it: {strange}"
        difference = unlike(known, self.cell.recipe)
        return f"{self.folder} holds a run of another recipe: {difference}" if difference else ""


def recipe_in(folder: Path) -> Recipe:
    """The recipe of a run's folder: that of recipe.json or, where there is none, the record's own."""
    path = folder / RECIPE
    return Recipe.from_file(path) if path.exists() else Recipe.from_dict(Record.read(folder).recipe)


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
    """How a job ended: an empty reason is well; one that is `late` was not begun as too little time was left.

    One that is `full` found no memory on its device.
    """

    job: Job
    reason: str = ""
    interrupted: bool = False
    late: bool = False
    full: bool = False


Say = Callable[[str], object]
Running = tuple[Job, "subprocess.Popen[bytes]"]


def reason_of(error: BaseException) -> str:
    """What went wrong with a cell, in one line; of an error that is not ours, its first sentence."""
    if exit_code(error) is not None:
        return one_line(error)
    return first_sentence(f"{type(error).__name__}: {one_line(error)}")


def run_local(
    jobs: Sequence[Job],
    count: int,
    say: Say,
    seconds: float | None = None,
    when_ended: Callable[[Job], object] = lambda job: None,
) -> list[End]:
    """Up to `count` processes at a time; a crash ends its cell, and those that need it, alone.

    A cell for which the device had no memory beside others is tried again, behind all and beside fewer.
    Ctrl-C, or the end of so many `seconds`, lets every cell save itself. `when_ended` is called as each one ends.
    """
    crew = Crew(list(jobs), count, say, math.inf if seconds is None else time.monotonic() + seconds)
    try:
        seen: tuple[int, ...] = ()
        while crew.goes_on:
            if crew.state != seen:  # many cells that wait take a while to look through
                seen = crew.state  # of before: a cell that could not begin may be what others wait for
                crew.begin()
            for job in crew.look():
                when_ended(job)
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        return crew.stopped(PATIENCE)
    except BaseException:
        crew.stopped(GRACE)
        raise
    return crew.stopped(GRACE, late=time.monotonic() < crew.over)


@dataclass
class Crew:
    """Jobs that wait, processes that run since when, and how the others ended; `over` is a time of `time.monotonic`."""

    waiting: list[Job]
    count: int
    say: Say
    over: float
    running: list[Running] = field(default_factory=list)
    since: dict[str, float] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    shortest: float = math.inf
    logs: dict[str, int] = field(default_factory=dict)
    room: Room = field(init=False)

    def __post_init__(self) -> None:
        self.room = Room(self.count)

    @property
    def state(self) -> tuple[int, ...]:
        """What changes with every job that begins, ends or waits again."""
        return len(self.waiting), len(self.running), len(self.ends)

    @property
    def goes_on(self) -> bool:
        """Whether there is something to do, and time for it."""
        return bool(self.running or (self.waiting and not self.is_late)) and time.monotonic() < self.over

    @property
    def is_late(self) -> bool:
        """Whether the time left is less than the shortest that a cell has taken, and not worth a part of one."""
        left = self.over - time.monotonic()
        return self.shortest < math.inf and left < min(self.shortest, WORTH)

    def begin(self) -> None:
        """Start the first jobs whose needs are met, and end those whose needs failed."""
        failed = self.failed()
        for job in list(self.waiting):
            broken = [name for name in job.needs if name in failed]
            if broken:
                self.waiting.remove(job)
                self.end(End(job, f"it needs {broken[0]}: {failed[broken[0]]}"))
                failed = self.failed()  # others may need this one
                continue
            running = [held.cell.name for held, _ in self.running]
            pending = {*running, *(other.cell.name for other in self.waiting)}
            if self.room.has_place(job.cell.name, running) and not pending & set(job.needs) and not self.is_late:
                self.waiting.remove(job)
                self.launch(job, running)
                failed = self.failed()

    def failed(self) -> dict[str, str]:
        """The names of cells that ended without being done, and why."""
        return {end.job.cell.name: end.reason for end in self.ends if end.reason and not end.job.is_done}

    def launch(self, job: Job, running: Sequence[str]) -> None:
        """Start a job beside those that run; one whose folder or process cannot be made ends alone."""
        self.since[job.cell.name], self.logs[job.cell.name] = time.monotonic(), length_of(job.log)
        try:
            process = start(job, self.count)
        except OSError as error:
            self.end(End(job, reason_of(error)))
            return
        self.room.begin(job.cell.name, running)
        self.running.append((job, process))

    def look(self) -> list[Job]:
        """The jobs that have ended since the last look; one without memory may wait for another try."""
        known = len(self.ends)
        for job, process in [held for held in self.running if held[1].poll() is not None]:
            self.running.remove((job, process))
            end = ended(job, process.returncode, self.logs[job.cell.name])
            if end.full and self.room.again(job.cell.name, len(self.running)):
                self.wait(job)
                continue
            self.end(end)
            if not end.reason:
                self.shortest = min(self.shortest, time.monotonic() - self.since[job.cell.name])
        return [end.job for end in self.ends[known:]]

    def wait(self, job: Job) -> None:
        """Another try for a job, behind all others."""
        self.waiting.append(job)
        name = job.cell.name
        beside, most = self.room.beside[name], self.room.most[name]
        where = f"beside at most {most}" if most else "by itself"
        self.say(f"{name}: no memory beside {beside} more; it is tried again later, {where}")

    def end(self, end: End) -> None:
        self.ends.append(end)
        total = len(self.waiting) + len(self.running) + len(self.ends)
        self.say(told(end, len(self.ends), total))

    def stopped(self, grace: float, late: bool = False) -> list[End]:
        """How all jobs ended, after those that run have saved themselves."""
        if self.waiting and late:
            self.say(f"no cell is begun in the {max(0.0, self.over - time.monotonic()):.0f} seconds that are left")
        elif self.waiting or self.running:
            with shielded():
                self.say("stopping: every cell saves itself first")
                self.ends += stop(self.running, grace, self.logs)
        reasons = {job.cell.name: LATE if late else "not begun" for job in self.waiting}
        reasons |= dict.fromkeys(self.room.most, UNTRIED)
        return [*self.ends, *(End(job, reasons[job.cell.name], interrupted=True, late=late) for job in self.waiting)]


def start(job: Job, count: int) -> subprocess.Popen[bytes]:
    """A process for a job, in a session of its own so that Ctrl-C reaches it through us alone.

    Where we are killed, Linux tells it to save itself.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    command = [sys.executable, "-m", *job.command()]
    follows = None if PRCTL is None else partial(follow, os.getpid())
    with job.log.open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=follows,
            env={"OMP_NUM_THREADS": threads, "TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ},
        )  # fmt: skip


def stop_at_sigterm() -> None:
    """SIGTERM ends the process of a job as Ctrl-C does, with all that it leaves in order."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)


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


def stop(running: Sequence[Running], grace: float, logs: Mapping[str, int]) -> list[End]:
    """Ask every process to save itself; one that has not after so many seconds is killed.

    `logs` are the lengths of logs when the processes began.
    """
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
        ends.append(ended(job, 128 + signal.SIGTERM if code == -signal.SIGTERM else code, logs[job.cell.name]))
    return ends


def ended(job: Job, code: int, since: int = 0) -> End:
    """How a job ended, by its exit code and, where it refused or failed, a line of its log behind `since` bytes."""
    if code == 0:
        return End(job, job.missing())
    name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    asked = code in INTERRUPTIONS
    lines = lines_of(job.log, since)
    full = "" if asked else out_of_memory(lines)
    last = full or (lines[-1][:300] if lines else "")
    if full or code not in (USAGE, *INTERRUPTIONS):
        last = first_sentence(last)
    if last and code not in SPOKEN:
        last = f"{last} ({name})"
    return End(job, last or (UNSAVED if asked else name), asked, full=bool(full))


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
        write_down(job.log, error)
        return reason_of(error)
    return ""
