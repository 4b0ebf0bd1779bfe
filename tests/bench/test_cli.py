"""`hyperball bench`: mistakes, exit codes, what it writes and prints."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hyperball.bench import checks, records
from hyperball.bench.case import Aim, Case
from hyperball.bench.sections import conv, projection
from hyperball.cli import main
from hyperball.cli.bench import SECTIONS, chosen


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def call(capsys, *arguments):
    code = main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


MISTAKES = {
    "an unknown section": (["nonsense"], "unknown section 'nonsense'"),
    "a misspelled section": (["trian"], "did you mean train?"),
    "an unknown dtype": (["--dtype", "fp8"], "invalid choice: 'fp8'"),
    "an unknown option": (["--quik"], "unknown option --quik; did you mean --quick?"),
    "tf32 on a CPU": (["--device", "cpu", "--dtype", "tf32"], "--dtype tf32 needs a CUDA device"),
    "a document without a record": (["--into", "x.md"], "--into needs --markdown FILE"),
    "a section beside a record": (["pool", "--markdown", "x.json"], "--markdown measures nothing: it takes no pool"),
    "a file beside a record": (["--markdown", "x.json", "--out", "y.json"], "it takes no --out"),
    "tests beside a record": (["--markdown", "x.json", "--no-tests"], "it takes no --no-tests"),
    "a missing record": (["--markdown", "nothing.json"], "nothing.json: No such file"),
    "a folder as record": (["--device", "cpu", "--out", "."], "--out must be a file, got the folder ."),
    "cases without a text": (["--cases", " "], "--cases needs a text that a case holds"),
    "cases of no section": (
        ["train", "--device", "cpu", "--cases", "cnn99"],
        "no case of train holds 'cnn99'; near ones: 'cnn9, batch 16'",
    ),
    "cases that resemble none": (
        ["train", "pool", "--device", "cpu", "--cases", "@@@"],
        "no case of train, pool holds '@@@'; for example: 'cnn9, batch 16, training step, fp32'; '",
    ),
    "a record in no folder": (["--device", "cpu", "--out", "a/b.json"], "--out must be in a folder that is there"),
}


@pytest.mark.parametrize("arguments, message", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_with_one_line(arguments, message, capsys, tmp_path):
    code, out, errors = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert errors.count("\n") == 1
    assert errors.startswith("hyperball bench: ")
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_record_is_refused_before_anything_is_timed(capsys, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    code, _, errors = call(capsys, "conv", "--device", "cpu", "--out", "x.json")
    assert code == 2
    assert errors.splitlines()[-1] == "hyperball bench: x.json is no record of `hyperball bench` (schema 1)"
    assert (tmp_path / "x.json").read_text() == "{}"


def test_a_gpu_that_is_not_there_is_refused_with_one_line(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, errors = call(capsys, "conv", "--device", "cuda")
    assert code == 2
    assert errors == "hyperball bench: --device cuda needs a CUDA device, and torch finds none\n"


@pytest.mark.parametrize(
    "names, sections",
    [
        ([], list(SECTIONS)),
        (["all", "pool"], list(SECTIONS)),
        (["pool", "conv", "pool"], ["pool", "conv"]),
        (["decoupled", "pooling", "projection", "inference"], ["conv", "pool", "projection", "inference"]),
    ],
)
def test_sections_by_name_alias_or_all(names, sections):
    assert chosen(names) == sections


def test_the_command_lists_the_packages_sections():
    from hyperball import bench
    from hyperball.bench import table

    assert SECTIONS == bench.SECTIONS == tuple(table.TITLES)


def tiny(name, step=lambda: None):
    steps = {subject: (lambda sets: [step] * sets) for subject in ("nn.Conv2d", "ours")}
    return Case("conv", name, "forward", "fp32", steps, ("nn.Conv2d",), aims={("ours", "nn.Conv2d"): Aim(1e9)})


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(conv, "cases", lambda setting: [tiny("tiny")])
    monkeypatch.setattr(checks, "checkout", lambda: None)


QUICKLY = ("conv", "--device", "cpu", "--quick", "--out", "x.json")


def test_a_benchmark_checks_measures_prints_and_writes(capsys, one_case, tmp_path):
    code, out, errors = call(capsys, "conv", "--device", "cpu", "--quick", "--out", "x.json")
    assert code == 0
    assert "self-check of conv: relative error" in errors
    assert "load average" in out
    assert "threads" in out
    assert "reached" in out
    (found,) = records.read(tmp_path / "x.json").sections["conv"].rows
    assert (found.subject, found.reference, found.reached) == ("ours", "nn.Conv2d", True)
    code, out, _ = call(capsys, "--markdown", "x.json")
    assert code == 0
    assert "| tiny | fp32 | ours | nn.Conv2d |" in out


def test_without_a_name_the_record_is_named_after_the_device(capsys, one_case, tmp_path):
    assert call(capsys, "conv", "--device", "cpu", "--quick")[0] == 0
    (path,) = (tmp_path / "results" / "bench").iterdir()
    assert path.name.startswith("cpu-")
    assert path.name.endswith("-quick.json")


def test_a_failed_check_stops_before_anything_is_timed(capsys, one_case, monkeypatch, tmp_path):
    monkeypatch.setitem(checks.SELF_CHECKS, "conv", lambda setting: 1.0)
    code, _, errors = call(capsys, "conv", "--device", "cpu", "--out", "x.json")
    assert code == 1
    assert "the self-check of conv failed" in errors
    assert list(tmp_path.iterdir()) == []


def test_failed_tests_stop_before_anything_is_timed(capsys, one_case, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    monkeypatch.setattr(checks, "checkout", lambda: tmp_path)
    monkeypatch.setitem(checks.TESTS, "conv", ("test_wrong.py::test_wrong",))
    code, _, errors = call(capsys, "conv", "--device", "cpu", "--out", "x.json")
    assert code == 1
    assert "the tests failed, nothing was timed" in errors
    assert not (tmp_path / "x.json").exists()


def test_importing_the_library_does_not_import_its_benchmarks():
    code = "import hyperball, sys; print([name for name in sys.modules if name.startswith('hyperball.bench')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_document_holds_the_record_between_its_markers(capsys, one_case, tmp_path):
    document = tmp_path / "x.md"
    document.write_text("before\n<!-- bench: x.json -->\nold\n<!-- /bench -->\nafter\n")
    assert call(capsys, "conv", "--device", "cpu", "--quick", "--out", "x.json")[0] == 0
    assert call(capsys, "--markdown", "x.json", "--into", "x.md")[0] == 0
    printed = call(capsys, "--markdown", "x.json")[1]
    assert document.read_text() == f"before\n<!-- bench: x.json -->\n{printed}<!-- /bench -->\nafter\n"


def test_a_document_without_markers_is_refused(capsys, one_case, tmp_path):
    (tmp_path / "x.md").write_text("nothing\n")
    call(capsys, "conv", "--device", "cpu", "--quick", "--out", "x.json")
    code, _, errors = call(capsys, "--markdown", "x.json", "--into", "x.md")
    assert code == 2
    assert "the document has no lines <!-- bench: x.json --> and <!-- /bench -->" in errors
    assert (tmp_path / "x.md").read_text() == "nothing\n"


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [0.0]
    module = importlib.import_module("hyperball.bench.run")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_time_of_quick_begins_after_the_checks(capsys, one_case, monkeypatch, clock, tmp_path):
    def long_check(*arguments):
        clock[0] += 1000.0

    monkeypatch.setattr(checks, "check", long_check)
    assert call(capsys, *QUICKLY)[0] == 0
    assert len(records.read(tmp_path / "x.json").sections["conv"].rows) == 1


def test_a_section_for_which_no_time_is_left_replaces_nothing(capsys, one_case, monkeypatch, clock, tmp_path):
    assert call(capsys, *QUICKLY)[0] == 0
    before = records.read(tmp_path / "x.json")

    def slow():
        clock[0] += 1000.0

    monkeypatch.setattr(projection, "cases", lambda setting: [tiny("slow", slow)])
    code, out, _ = call(capsys, "projection", *QUICKLY)
    assert code == 0
    assert "partial: 0 of 1 cases; not measured (the time of --quick was over): tiny, forward, fp32\n" in out
    held = records.read(tmp_path / "x.json")
    assert held.sections["conv"] == before.sections["conv"]
    assert set(held.sections) == {"conv", "projection"}


def whole(changes):
    """A change of a record that is made to every section too."""

    def change(held):
        held.update({key: value for key, value in changes.items() if key == "device"})
        for section in held["sections"].values():
            section["conditions"].update(changes)

    return change


OTHERS = {
    "another device": (
        whole({"device": "NVIDIA H200"}),
        QUICKLY,
        "x.json holds times of NVIDIA H200, and this is CPU ",
    ),
    "a section of another device": (
        lambda held: held["sections"]["conv"]["conditions"].update(device="NVIDIA H200"),
        QUICKLY,
        "x.json holds times of NVIDIA H200",
    ),
    "a full record": (
        whole({"quick": False}),
        QUICKLY,
        "x.json holds a full record, and --quick must not be mixed into it",
    ),
    "a quick record": (
        whole({}),
        [given for given in QUICKLY if given != "--quick"],
        "x.json holds times of --quick, and a full record must not be mixed into it",
    ),
}


@pytest.mark.parametrize("change, arguments, message", OTHERS.values(), ids=OTHERS)
def test_times_are_not_mixed_with_those_of(change, arguments, message, capsys, one_case, tmp_path):
    assert call(capsys, *QUICKLY)[0] == 0
    path = tmp_path / "x.json"
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))
    before = path.read_text()
    code, out, errors = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors
    assert path.read_text() == before


def test_the_load_is_read_once_before_anything_runs(capsys, one_case, monkeypatch, tmp_path):
    loads = iter([0.0, *[100.0] * 9])
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0), raising=False)
    monkeypatch.setattr(projection, "cases", lambda setting: [tiny("tiny")])
    code, out, _ = call(capsys, "projection", *QUICKLY)
    assert code == 0
    assert "load average 0.0 on" in out
    for section in records.read(tmp_path / "x.json").sections.values():
        assert (section.conditions["load_average"], section.conditions["busy"]) == (0.0, False)
