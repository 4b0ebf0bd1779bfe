"""Kernels compiled in other processes before a benchmark: what is told of those that fail."""

import sys
from types import SimpleNamespace

import pytest

from hyperball.bench import checks, choice, measure, warm
from hyperball.bench.case import Setting
from hyperball.bench.run import prepared

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which " + (
    "1.10 GiB is free. " + "Process 1234 has 30.00 GiB memory in use. " * 60
)


@pytest.fixture
def processes(monkeypatch):
    """Processes that run a text in the place of the compiling one, and what is said of them."""
    made = []

    def run(program, *cases):
        command = [sys.executable, "-c", program]
        made.append(warm.started(command, {f"train:{index}": case for index, case in enumerate(cases)}, {}))
        return made

    yield run
    warm.stop(made)


def said_of(compilers):
    lines = []
    warm.finish(compilers, lines.append)
    return lines


def test_a_reason_is_one_line_that_is_cut_between_words():
    told = measure.reason(RuntimeError(OUT_OF_MEMORY + "\nmore"))
    assert len(told) < 200
    assert told.startswith(
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    )
    assert told.endswith(" …")
    assert measure.reason(ValueError("short")) == "ValueError: short"
    assert measure.reason(KeyError()) == "KeyError"


def test_cases_that_fail_are_told_with_their_reason_and_the_others_counted(processes):
    program = "import sys; sys.stderr.write('noise' * 50_000); print('done', 'train:0', sep='\\t'); print('noise')"
    program += "; print('failed', 'train:1', 'OutOfMemoryError: no', sep='\\t'); sys.exit(1)"
    assert said_of(processes(program, "train, cnn9", "train, resnet32")) == [
        "kernels of 1 of 2 cases compiled in 1 processes",
        "not compiled ahead: train, resnet32: OutOfMemoryError: no",
    ]


ENDS = {
    "an import that fails": (
        "import nothing_of_this_name",
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ),
    "a signal": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
    "an exit without a word": ("import sys; sys.exit(3)", "exit code 3"),
}


@pytest.mark.parametrize("program, why", ENDS.values(), ids=ENDS)
def test_a_process_that_ends_before_its_cases_is_told_once(program, why, processes):
    assert said_of(processes(program, "pool, first", "pool, second", "pool, third")) == [
        "kernels of 0 of 3 cases compiled in 1 processes",
        f"not compiled ahead: pool, first and 2 more: {why}",
    ]


def test_a_process_that_takes_too_long_is_ended(processes, monkeypatch):
    monkeypatch.setattr(warm, "LIMIT", 0.5)
    made = processes("import time; time.sleep(60)", "train, cnn9")
    assert said_of(made)[1] == "not compiled ahead: train, cnn9: not within 0.5 s"
    assert made[0].process.returncode < 0


def test_a_process_says_of_each_case_whether_it_was_compiled(monkeypatch, capsys):
    calls = []

    def called(case):
        calls.append(case.name)
        if case.name == "b":
            raise RuntimeError(OUT_OF_MEMORY)

    monkeypatch.setattr(measure, "warm", called)
    monkeypatch.setattr(warm, "section_cases", lambda name, setting: [SimpleNamespace(name=letter) for letter in "abc"])
    assert warm.main(["cuda", "-", "train:0", "train:1", "train:2"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, third, calls) == ("done\ttrain:0", "done\ttrain:2", ["a", "b", "c"])
    assert second.startswith("failed\ttrain:1\tRuntimeError: CUDA out of memory.")
    assert len(second) < 220


def test_only_chosen_cases_are_compiled():
    plans = choice.planned(["conv", "train"], Setting("cuda"), ["cnn9, batch 128", "PGD"])
    assert warm.groups(plans, 16) == [{"train:1": "train, cnn9, batch 128, training step, bf16"}]


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("module, name", [(checks, "check"), (warm, "finish")])
def test_processes_do_not_outlive_an_interrupt(module, name, processes, monkeypatch):
    made = processes("import time; time.sleep(60)", "train, cnn9")
    monkeypatch.setattr(warm, "start", lambda plans, setting: made)
    monkeypatch.setattr(checks, "check", lambda *arguments: None)
    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared({}, Setting("cuda"), print, True)
    assert made[0].process.returncode is not None
