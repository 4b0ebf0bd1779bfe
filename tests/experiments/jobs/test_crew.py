"""The local runner: what it begins in the time that is left, how it stops, and that nothing outlives it."""

import errno
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from experiment_cases import tiny_recipe
from runner_cases import SAVES, write_run

from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs import cell, crew, orphans
from hyperball.experiments.jobs.crew import LATE, run_local
from hyperball.experiments.jobs.ends import UNSAVED, End
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.results.summary import unfinished
from hyperball.training.storage.folder import LOCK, held


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Process:
    """A process that takes so many seconds, and ends at once when it is asked to."""

    def __init__(self, clock, seconds):
        self.clock, self.last, self.returncode, self.signals = clock, clock.now + seconds, None, []

    def poll(self):
        if self.returncode is None and self.clock.now >= self.last:
            self.returncode = 0
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)
        self.returncode = 128 + number

    def wait(self, timeout):
        return self.poll()


@dataclass(frozen=True)
class Quiet(Job):
    """A job whose folder nobody looks into."""

    def missing(self):
        return ""


@dataclass(frozen=True)
class Behind(Job):
    """A job that needs another one, by its name."""

    after: tuple[str, ...] = ()

    @property
    def needs(self):
        return self.after


def jobs(tmp_path, count):
    return [Quiet(Cell(f"cell {seed}", 0, tiny_recipe()), tmp_path / str(seed)) for seed in range(count)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nothing_is_begun_behind_a_cell_that_could_not_begin(order, tmp_path, monkeypatch):
    def start(job, count):
        assert job.cell.label == "a"
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(crew, "start", start)
    chain = [
        Behind(Cell(name, 0, tiny_recipe()), tmp_path / name, after=after)
        for name, after in (("a", ()), ("b", ("a/seed-0",)), ("c", ("b/seed-0",)))
    ]
    ends = run_local([chain[place] for place in order], 2, lambda text: None)
    reasons = {end.job.cell.label: end.reason for end in ends}
    assert "no space left" in reasons["a"]
    assert reasons["b"] == f"it needs a/seed-0: {reasons['a']}"
    assert reasons["c"] == f"it needs b/seed-0: {reasons['b']}"


@pytest.fixture
def seconds(monkeypatch):
    """How long the processes of a runner take, one after the other, on a clock of their own."""
    clock, lengths, begun = Clock(), [], []

    def start(job, count):
        begun.append(Process(clock, lengths[len(begun)]))
        return begun[-1]

    monkeypatch.setattr(crew, "time", clock)
    monkeypatch.setattr(crew, "start", start)
    return SimpleNamespace(clock=clock, lengths=lengths, begun=begun)


@pytest.mark.parametrize(
    "lengths, limit, begun",
    [
        ([30, 30, 30], 100, 3),
        ([30, 30, 30], 80, 2),  # 20 s are less than any cell took
        ([50, 30, 40, 30], 125, 3),  # 5 s are too short for the shortest
        ([200, 200], 270, 2),  # 70 s of 200 are worth it, as the cell saves itself
        ([200, 200], 250, 1),
        ([200], 1, 1),  # nothing is known of the first
    ],
)
def test_no_cell_is_begun_that_the_time_left_is_too_short_for(lengths, limit, begun, seconds, tmp_path):
    seconds.lengths += lengths
    said = []
    ends = run_local(jobs(tmp_path, len(lengths)), 1, said.append, limit)
    assert len(seconds.begun) == begun
    late = [end for end in ends if end.late]
    assert [end.reason for end in late] == [LATE] * (len(lengths) - begun)
    assert all(end.interrupted for end in late)
    if late:
        assert seconds.clock.now < limit - 1
        assert "no cell is begun in the" in said[-1]


def test_when_the_time_is_over_running_cells_are_asked_to_save_themselves(seconds, tmp_path):
    seconds.lengths += [500, 500, 500]
    ends = run_local(jobs(tmp_path, 3), 2, lambda text: None, 100)
    assert [process.signals for process in seconds.begun] == [[signal.SIGTERM], [signal.SIGTERM]]
    assert [(end.reason, end.interrupted, end.late) for end in ends] == [
        (UNSAVED, True, False), (UNSAVED, True, False), ("not begun", True, False),
    ]  # fmt: skip


def test_a_cell_that_cannot_be_started_ends_alone(seconds, tmp_path, monkeypatch):
    seconds.lengths += [10, 10]
    start = crew.start

    def blocked(job, count):
        if job.cell.label == "cell 1":
            raise PermissionError(errno.EACCES, "Permission denied", "folder")
        return start(job, count)

    monkeypatch.setattr(crew, "start", blocked)
    ends = run_local(jobs(tmp_path, 3), 1, lambda text: None)
    assert [(end.job.cell.label, end.reason) for end in ends] == [
        ("cell 0", ""), ("cell 1", "folder: Permission denied"), ("cell 2", ""),
    ]  # fmt: skip


def test_each_cell_is_handed_over_as_it_ends(seconds, tmp_path):
    seconds.lengths += [10, 30]
    seen = []
    run_local(
        jobs(tmp_path, 2), 2, lambda text: None, None, lambda job: seen.append((job.cell.label, seconds.clock.now))
    )
    (first, early), (second, late) = seen
    assert (first, second) == ("cell 0", "cell 1")
    assert early < 11 < 30 <= late


def test_an_error_of_whoever_is_handed_a_cell_leaves_no_process_behind(seconds, tmp_path):
    seconds.lengths += [10, 500]

    def fail(job):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        run_local(jobs(tmp_path, 2), 2, lambda text: None, None, fail)
    assert seconds.begun[1].signals == [signal.SIGTERM]


@dataclass(frozen=True)
class Stub(Job):
    """A job whose process says that it is up, and what it was asked."""

    def command(self):
        return ["stub", str(self.folder)]


def begin_and_wait(job):
    crew.start(job, 1)
    time.sleep(120)


def wait_until(condition):
    last = time.monotonic() + 60
    while not condition() and time.monotonic() < last:
        time.sleep(0.01)
    return condition()


@pytest.mark.skipif(orphans.PRCTL is None, reason="needs Linux's prctl")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_cells_of_a_killed_runner_save_themselves(tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(SAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = Stub(Cell("cell", 0, tiny_recipe()), tmp_path / "run")
    runner = multiprocessing.get_context("fork").Process(target=begin_and_wait, args=(job,))
    runner.start()
    assert wait_until((job.folder / "up").exists), job.log.read_text()
    runner.kill()
    runner.join()
    assert wait_until((job.folder / "saved").exists)


@pytest.mark.skipif(orphans.PRCTL is None, reason="needs Linux's prctl")
def test_a_process_whose_parent_has_ended_already_ends(monkeypatch):
    asked = []
    monkeypatch.setattr(orphans, "PRCTL", lambda *arguments: None)
    monkeypatch.setattr(orphans.os, "kill", lambda *arguments: asked.append(arguments))
    orphans.follow(os.getppid())
    assert asked == []
    orphans.follow(os.getppid() + 1)
    assert asked == [(os.getpid(), signal.SIGTERM)]


def test_a_cell_waits_for_one_that_is_still_saving_itself(tmp_path, monkeypatch):
    other = held(tmp_path)
    other.__enter__()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        other.__exit__(None, None, None)

    monkeypatch.setattr(cell, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setattr(cell, "train", lambda *arguments, **options: slept.append("trained"))
    cell.train_cell(tiny_recipe(), tmp_path)
    assert slept == [cell.PAUSE, "trained"]


def test_a_cell_does_not_wait_for_ever(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cell, "time", clock)
    with held(tmp_path):
        cell.wait_for(tmp_path)
        assert clock.now >= cell.PATIENCE
    (tmp_path / LOCK).touch()  # what a killed process leaves
    clock.now = 0.0
    cell.wait_for(tmp_path)
    assert clock.now == 0.0


def test_a_cell_that_another_runner_finished_is_done(tmp_path):
    job, other = (Job(Cell(name, 0, tiny_recipe()), tmp_path / name) for name in "ab")
    ends = [End(each, f"another process is training into {each.folder}") for each in (job, other)]
    write_run(job)
    assert unfinished([job, other], ends) == {other.cell.name: ends[1].reason}


def test_a_crash_after_the_record_was_written_loses_nothing(tmp_path):
    job = Job(Cell("a", 0, tiny_recipe()), tmp_path)
    write_run(job)
    assert unfinished([job], [End(job, "killed by SIGSEGV")]) == {}
