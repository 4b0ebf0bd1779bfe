"""Cells that fail: one line says why, and those for which a device had no memory are tried again beside fewer."""

import json
import signal
from dataclasses import dataclass

import pytest
from experiment_cases import tiny_recipe
from runner_cases import RECORD, FakeCells

from hyperball.cli import main
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs import crew
from hyperball.experiments.jobs.crew import UNTRIED, run_local
from hyperball.experiments.jobs.ends import UNSAVED, ended, reason_of
from hyperball.experiments.jobs.failures import (
    LONGEST,
    TRIES,
    Room,
    first_sentence,
    last_words,
    lines_of,
    out_of_memory,
    write_down,
)
from hyperball.experiments.jobs.job import LOG, Job

PROCESSES = "".join(f" Process {number} has 6.30 GiB memory in use." for number in range(3000, 3016))
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
    f" of which 1.20 GiB is free.{PROCESSES} See documentation for Memory Management  (https://pytorch.org/docs)"
)
SAID = "torch.OutOfMemoryError: CUDA out of memory."
FAILS = f"import sys\nprint('''Traceback (most recent call last):\n  File x\n{MEMORY}''', file=sys.stderr)\nsys.exit(1)"
FAILS_ONCE = f"""
import pathlib, sys
if not (pathlib.Path(sys.argv[1]) / "tried").exists():
    (pathlib.Path(sys.argv[1]) / "tried").touch()
    {FAILS.replace(chr(10), chr(10) + "    ", 1).rpartition(chr(10))[0]}
    sys.exit(1)
{RECORD}
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        (MEMORY, SAID),
        ("ValueError: out of luck", "ValueError: out of luck"),
        ("TypeError: a 3.5 x 2 map, e.g. Conv2d's, is odd. More", "TypeError: a 3.5 x 2 map, e.g. Conv2d's, is odd."),
        ("/file.json: is not valid JSON (line 1 column 2)", "/file.json: is not valid JSON (line 1 column 2)"),
        ("", ""),
        ("word " * 60, "word " * 31 + "…"),
    ],
)  # fmt: skip
def test_an_error_is_told_up_to_the_end_of_its_first_sentence(text, expected):
    assert first_sentence(text) == expected
    assert len(expected) <= LONGEST


def test_one_endless_word_is_cut_too():
    assert len(first_sentence("x" * 500)) <= LONGEST


@pytest.mark.parametrize(
    "line, is_full",
    [
        (MEMORY, True),
        ("OutOfMemoryError: CUDA out of memory.", True),
        ("torch.AcceleratorError: CUDA error: out of memory", True),
        ("RuntimeError: Triton Error [CUDA]: out of memory", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("MemoryError: out of memory", False),  # of the host
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("ValueError: out of luck", False),
    ],
)
def test_a_device_without_memory_is_known_by_what_the_log_says(line, is_full):
    assert out_of_memory(["Traceback", line, "[W] a warning at exit"]) == (line if is_full else "")


LAUNCH = (
    "torch.AcceleratorError: CUDA error: unspecified launch failure\n"
    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
TRACED = "Traceback (most recent call last):\n  File x, line 1\n    raise ValueError(text)\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (TRACED + LAUNCH, "torch.AcceleratorError: CUDA error: unspecified launch failure"),
        (TRACED + "KeyError: 'a'\n\nThe above exception was ...:\n\n" + TRACED + LAUNCH, LAUNCH.splitlines()[0]),
        (TRACED + "ValueError: one\nRuntimeError: is what this text speaks of\n", "ValueError: one"),
        (TRACED + "AssertionError\n", "AssertionError"),
        (TRACED + "my.Odd: nothing that is known\nmore\n", "more"),
        ("RuntimeError: of a warning\nepoch 3\nhyperball train: no room\n", "hyperball train: no room"),
        ("", ""),
    ],
)
def test_a_traceback_is_told_by_the_line_that_names_its_error(text, expected, tmp_path):
    job = job_in(tmp_path, text)
    assert last_words(lines_of(job.log)) == expected
    assert ended(job, 1).reason == (first_sentence(expected) or "exit code 1")


@pytest.mark.parametrize("code", [2, 130, 143])
def test_a_cell_that_says_why_in_its_last_line_is_taken_at_its_word(code, tmp_path):
    job = job_in(tmp_path, TRACED + "ValueError: that was passed over\nepoch 3\nstopped, saved at step 730\n")
    assert ended(job, code).reason == "stopped, saved at step 730"


def job_in(folder, text=""):
    job = Job(Cell("cell", 0, tiny_recipe()), folder)
    folder.mkdir(exist_ok=True)
    job.log.write_text(text)
    return job


@pytest.mark.parametrize("code", [1, 2])
def test_the_reason_is_short_and_the_log_whole(code, tmp_path):
    end = ended(job_in(tmp_path, f"Traceback\n{MEMORY}\n[W] a warning at exit\n"), code)
    assert (end.reason, end.full, end.interrupted) == (SAID, True, False)
    assert MEMORY in (tmp_path / LOG).read_text()
    error = RuntimeError(f"CUDA out of memory. {PROCESSES}")
    assert reason_of(error) == "RuntimeError: CUDA out of memory."
    job = job_in(tmp_path)
    write_down(job.log, error)
    assert lines_of(job.log) == [f"RuntimeError: CUDA out of memory. {PROCESSES}"]


def test_an_earlier_try_says_nothing_of_this_one(tmp_path):
    job = job_in(tmp_path, f"{MEMORY}\n")
    before = job.log.stat().st_size
    assert ended(job, 1, before).reason == "exit code 1"
    with job.log.open("a") as log:
        log.write("ValueError: out of luck\n")
    end = ended(job, 1, before)
    assert (end.reason, end.full) == ("ValueError: out of luck", False)


def test_what_was_stopped_is_not_out_of_memory(tmp_path):
    end = ended(job_in(tmp_path, MEMORY), 128 + signal.SIGTERM)
    assert (end.full, end.interrupted) == (False, True)


def test_a_cell_without_memory_runs_beside_half_as_many_and_at_last_alone():
    room = Room(16)
    names = [f"cell {number}" for number in range(16)]
    for at, name in enumerate(names):
        assert room.has_place(name, names[:at])
        room.begin(name, names[:at])
    assert not room.has_place("more", names)
    assert room.again("cell 3", left=15)
    assert (room.most["cell 3"], room.count) == (7, 15)
    assert not room.has_place("cell 3", names[:8])
    assert room.has_place("cell 3", names[4:11])
    room.begin("cell 3", names[4:11])
    assert not room.has_place("more", ["cell 3", *names[4:11]])
    assert room.has_place("more", ["cell 3", *names[4:10]])
    assert room.again("cell 3", left=7)
    assert room.most["cell 3"] == 0
    assert not room.has_place("cell 3", names[4:5])
    room.begin("cell 3", [])
    assert not room.has_place("more", ["cell 3"])
    assert not room.again("cell 3", left=0)


def test_a_cell_that_had_the_device_for_itself_is_not_tried_again():
    room = Room(4)
    room.begin("cell", [])
    assert not room.again("cell", left=0)


class Device:
    """A clock, and processes of which so many have room; each needs the most memory at half of its time."""

    def __init__(self, places, seconds=100.0):
        self.places, self.seconds, self.now = places, seconds, 0.0
        self.alive, self.started, self.beside = [], [], []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += 1.0

    def start(self, job, count):
        job.folder.mkdir(exist_ok=True)
        process = Process(self, job)
        self.alive.append(process)
        self.started.append(job.cell.name)
        self.beside.append((job.cell.name, len(self.alive) - 1))
        return process


class Process:
    def __init__(self, device, job):
        self.device, self.job, self.began, self.grown, self.returncode = device, job, device.now, False, None

    def poll(self):
        age = self.device.now - self.began
        if self.returncode is None and age >= self.device.seconds / 2 and not self.grown:
            self.grown = True
            if len(self.device.alive) > self.device.places:
                self.leave(1)
                with self.job.log.open("a") as log:
                    log.write(f"{MEMORY}\n")
        if self.returncode is None and age >= self.device.seconds:
            self.leave(0)
        return self.returncode

    def leave(self, code):
        self.returncode = code
        self.device.alive.remove(self)

    def send_signal(self, number):
        self.leave(128 + number)

    def wait(self, timeout):
        return self.returncode


@dataclass(frozen=True)
class Quiet(Job):
    """A job whose folder nobody looks into."""

    def missing(self):
        return ""


def side_by_side(monkeypatch, tmp_path, cells, places):
    device = Device(places)
    monkeypatch.setattr(crew, "time", device)
    monkeypatch.setattr(crew, "start", device.start)
    return device, [Quiet(Cell(f"cell {n}", 0, tiny_recipe()), tmp_path / str(n)) for n in range(cells)]


@pytest.mark.parametrize("cells, count, places", [(16, 16, 10), (40, 16, 10), (16, 16, 1), (3, 2, 1), (8, 8, 3)])
def test_all_cells_end_well_on_a_device_with_room_for_fewer(cells, count, places, monkeypatch, tmp_path):
    device, jobs = side_by_side(monkeypatch, tmp_path, cells, places)
    said, kept = [], []
    ends = run_local(jobs, count, said.append, None, kept.append)
    assert sorted(end.job.cell.name for end in ends) == sorted(job.cell.name for job in kept)
    assert {end.job.cell.name for end in ends} == {job.cell.name for job in jobs}
    assert len(device.started) <= (1 + TRIES) * cells
    again = [line for line in said if "no memory" in line]
    assert len(again) == len(device.started) - cells
    if places > count // 4:
        assert [end.reason for end in ends] == [""] * cells
        assert len(again) <= count - places + places // 3  # those that began later found room
    else:
        assert {end.reason for end in ends} <= {"", SAID}


def test_who_is_tried_again_waits_for_the_others(monkeypatch, tmp_path):
    device, jobs = side_by_side(monkeypatch, tmp_path, 5, 1)
    said = []
    run_local(jobs, 2, said.append)
    assert said[0] == "cell_0/seed-0: no memory beside 1 more; it is tried again later, by itself"
    assert device.started[-1] == device.started[0]
    assert device.beside[2:] == [(name, 0) for name in device.started[2:]]


def test_a_try_counts_into_the_time(monkeypatch, tmp_path):
    device, jobs = side_by_side(monkeypatch, tmp_path, 2, 1)
    ends = run_local(jobs, 2, lambda text: None, 70)
    assert device.now <= 71
    assert [(end.reason, end.interrupted) for end in ends] == [(UNSAVED, True), (UNTRIED, True)]


@pytest.fixture
def cells(monkeypatch):
    made = FakeCells({})
    monkeypatch.setattr(crew, "start", made)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    return made


def write_grid(folder, magnitudes):
    small = {"epochs": 1, "batch_size": 50, "data.train_size": 100, "data.test_size": 50}
    tree = {"base": "digits", "overrides": small, "axes": {"model.magnitude": magnitudes}}
    (folder / "grid.json").write_text(json.dumps(tree))
    return ["grid", str(folder / "grid.json"), "--out", str(folder / "out"), "--jobs", "2"]


def test_the_command_goes_on_and_says_that_a_cell_is_tried_again(cells, tmp_path, capsys):
    cells.scripts["tanh"] = FAILS_ONCE
    assert main(write_grid(tmp_path, ["tanh", "ball", "sphere"])) == 0
    captured = capsys.readouterr()
    assert captured.out.count("magnitude=tanh/seed-0: no memory beside 1 more; it is tried again") == 1
    assert "3 of 3 cells done" in captured.out
    assert captured.err == ""
    assert cells.started == [f"magnitude={name}/seed-0" for name in ("tanh", "ball", "sphere", "tanh")]


def test_a_cell_that_never_finds_memory_is_not_tried_for_ever(cells, tmp_path, capsys):
    cells.scripts["tanh"] = FAILS
    assert main(write_grid(tmp_path, ["tanh", "ball", "sphere"])) == 1
    assert capsys.readouterr().err == f"not done: magnitude=tanh/seed-0: {SAID}\n"
    assert cells.started.count("magnitude=tanh/seed-0") == 2  # the second time, by itself
    log = (tmp_path / "out" / "magnitude=tanh" / "seed-0" / LOG).read_text()
    assert log.count(MEMORY) == 2
