"""Local processes that train cells side by side on one device, each beside as many as have room."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hyperball._signals import shielded
from hyperball.experiments.jobs.ends import End, Say, ended, reason_of, told
from hyperball.experiments.jobs.failures import Room, length_of
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.jobs.orphans import PRCTL, follow

PAUSE = 0.05
GRACE = 25.0  # seconds for saving when the time is up
PATIENCE = 120.0  # and after Ctrl-C
WORTH = 60.0  # seconds that are worth beginning a cell which takes longer, as it saves itself
LATE = "not begun: too little time was left"
UNTRIED = "there was no memory for it beside others, and no time for another try"
Running = tuple[Job, "subprocess.Popen[bytes]"]


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
                crew.begin()
                seen = crew.state
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
        self.end_behind(self.failed())
        for job in list(self.waiting):
            running = [held.cell.name for held, _ in self.running]
            pending = {*running, *(other.cell.name for other in self.waiting)}
            ready = self.room.has_place(job.cell.name, running) and not pending & set(job.needs) and not self.is_late
            if ready and job in self.waiting:
                self.waiting.remove(job)
                self.launch(job, running)

    def failed(self, for_good: bool = False) -> dict[str, str]:
        """The names of cells that ended without being done, and why; `for_good` not those that were interrupted."""
        ends = (end for end in self.ends if end.reason and not (for_good and end.interrupted))
        return {end.job.cell.name: end.reason for end in ends if not end.job.is_done}

    def end_behind(self, failed: dict[str, str]) -> None:
        """End the jobs that need cells which failed, and those that need these."""
        while found := next(((job, need) for job in self.waiting for need in job.needs if need in failed), None):
            job, need = found
            failed[job.cell.name] = f"it needs {need}: {failed[need]}"
            self.waiting.remove(job)
            self.end(End(job, failed[job.cell.name]))

    def launch(self, job: Job, running: Sequence[str]) -> None:
        """Start a job beside those that run; one whose folder or process cannot be made ends alone."""
        self.since[job.cell.name], self.logs[job.cell.name] = time.monotonic(), length_of(job.log)
        try:
            process = start(job, self.count)
        except OSError as error:
            self.end(End(job, reason_of(error)))
            self.end_behind(self.failed())
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
                self.end_behind(self.failed(for_good=True))
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
