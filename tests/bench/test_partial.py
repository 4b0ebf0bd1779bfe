"""`hyperball bench` in pieces: what a signal, an error or `--cases` leaves of a section, and what stays of others."""

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from hyperball.bench import checks, choice, measure, memory, records, table
from hyperball.bench.case import Aim, Case, Setting
from hyperball.bench.records import Record, Row, Section
from hyperball.bench.sections import conv, projection, scaling
from hyperball.cli import main

running = importlib.import_module("hyperball.bench.run")
QUICKLY = ("conv", "--device", "cpu", "--quick", "--out", "x.json")
NAMES = ("first", "second", "third")
GPU = {"device": "NVIDIA H200"}


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "check", lambda *arguments: None)
    monkeypatch.setattr(memory, "with_peak", lambda build, device: (build(), None))  # a profile takes a second


def call(capsys, *arguments):
    code = main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def tiny(name, step=lambda: None):
    steps = {subject: (lambda sets: [step] * sets) for subject in ("nn.Conv2d", "ours")}
    return Case("conv", name, "forward", "fp32", steps, ("nn.Conv2d",), aims={("ours", "nn.Conv2d"): Aim(1e9)})


@pytest.fixture
def offered(monkeypatch):
    """Offer three cases, with steps of their own where given, as of a given time."""

    def offer(date="2026-01-01T10:00:00+00:00", **steps):
        cases = [tiny(name, steps.get(name, lambda: None)) for name in NAMES]
        monkeypatch.setattr(conv, "cases", lambda setting: cases)
        conditions = original(Setting("cpu", None, True), 0.0)
        monkeypatch.setattr(records, "conditions", lambda *given: {**conditions, "date": date})

    original = records.conditions
    return offer


def held(tmp_path):
    return records.read(tmp_path / "x.json").sections["conv"]


def dates(section):
    return {row.case: row.date[:10] for row in section.rows}


def label(name):
    return f"{name}, forward, fp32"


def raising(error):
    def step():
        raise error

    return step


def signaled(number):
    return lambda: os.kill(os.getpid(), number)


ENDS = {
    "SIGINT": (signaled(signal.SIGINT), 130, "interrupted by SIGINT"),
    "SIGTERM": (signaled(signal.SIGTERM), 143, "interrupted by SIGTERM"),
}


@pytest.mark.parametrize("step, code, why", ENDS.values(), ids=ENDS)
def test_a_signal_leaves_the_cases_that_were_measured_and_says_which_are_missing(
    step, code, why, capsys, offered, tmp_path
):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    offered(second=step)
    found, out, errors = call(capsys, *QUICKLY)
    assert found == code
    assert errors.splitlines()[-1] == "hyperball bench: interrupted"
    assert "Traceback" not in errors
    section = held(tmp_path)
    assert [row.case for row in section.rows] == ["first"]
    assert section.missing == {label("second"): why, label("third"): why}
    told = f"partial: 1 of 3 cases; not measured ({why}): {label('second')}; {label('third')}"
    assert section.conditions["partial"] == told.removeprefix("partial: ")
    assert "One convolution, partial\n" in out
    assert "\nfirst  forward" in out
    assert out.endswith(f"{told}\nwritten to x.json\n")
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_signal_that_comes_twice_does_not_disturb_the_end(capsys, offered, monkeypatch, tmp_path):
    write = records.write

    def disturbed(record, path):
        if (
            "partial" in record.sections["conv"].conditions
            and "SIGINT" in record.sections["conv"].conditions["partial"]
        ):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        write(record, path)

    monkeypatch.setattr(records, "write", disturbed)
    offered(second=signaled(signal.SIGINT))
    code, out, errors = call(capsys, *QUICKLY)
    assert code == 130
    assert out.endswith("written to x.json\n")
    assert "Traceback" not in errors
    assert set(held(tmp_path).missing.values()) == {"interrupted by SIGINT"}


def test_a_signal_before_anything_is_measured_writes_nothing(capsys, offered, tmp_path):
    offered(first=signaled(signal.SIGTERM))
    code, out, _ = call(capsys, *QUICKLY)
    assert code == 143
    assert out.endswith("nothing was measured, and nothing written\n")
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
import sys, time
from hyperball.bench import checks, memory
from hyperball.bench.case import Case
from hyperball.bench.sections import conv
from hyperball.cli import main

def case(name, step):
    steps = {subject: (lambda sets: [step] * sets) for subject in ("nn.Conv2d", "ours")}
    return Case("conv", name, "forward", "fp32", steps, ("nn.Conv2d",))

checks.check = lambda *arguments: None
memory.with_peak = lambda build, device: (build(), None)
def long():  # many short sleeps: a signal that comes just before a single one would wait for its end
    for _ in range(6000):
        time.sleep(0.01)

conv.cases = lambda setting: [case("first", lambda: None), case("second", long)]
sys.exit(main(["bench", "conv", "--device", "cpu", "--quick", "--out", "x.json"]))
"""


@pytest.mark.skipif(os.name != "posix", reason="processes have no groups")
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_process_that_is_signaled_with_its_group_ends_with_its_code_and_no_traceback(number, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    )
    while "conv 2/2" not in (line := process.stderr.readline()):
        assert line, "the second case was not begun"
    os.kill(process.pid, number)
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "hyperball bench: interrupted\n")
    assert out.endswith("written to x.json\n")
    assert [row.case for row in held(tmp_path).rows] == ["first"]


def test_rows_are_in_the_file_when_the_next_case_begins(capsys, offered, tmp_path):
    seen = []

    def look():
        seen.append((dates(held(tmp_path)), held(tmp_path).missing))

    offered(second=look)
    assert call(capsys, *QUICKLY)[0] == 0
    ended = {label("second"): "the run ended before", label("third"): "the run ended before"}
    assert seen[0] == ({"first": ""}, ended)
    assert held(tmp_path).missing == {}
    assert "partial" not in held(tmp_path).conditions


FAILURES = {
    "a subject": (
        {"second": raising(RuntimeError("no memory\nat all"))},
        "nn.Conv2d: RuntimeError: no memory and 1 more",
    ),
    "the case": ({}, "ValueError: not this one"),
}


@pytest.mark.parametrize("steps, why", FAILURES.values(), ids=FAILURES)
def test_a_case_that_fails_is_passed_over_and_told_with_exit_code_1(steps, why, capsys, offered, monkeypatch, tmp_path):
    def measured(case, setting):
        if case.name == "second" and not steps:
            raise ValueError("not this one")
        return measure.measure(case, setting)

    monkeypatch.setattr(running, "measure", measured)
    offered(**steps)
    code, out, errors = call(capsys, *QUICKLY)
    assert code == 1
    assert errors.splitlines()[-1] == f"hyperball bench: nothing was measured of conv, {label('second')}: {why}"
    assert "Traceback" not in errors
    assert [row.case for row in held(tmp_path).rows] == ["first", "third"]
    assert held(tmp_path).missing == {label("second"): why}
    assert f"partial: 2 of 3 cases; not measured ({why}): {label('second')}" in out


def test_debug_shows_the_traceback_of_a_case_and_keeps_what_was_measured(capsys, offered, monkeypatch, tmp_path):
    def measured(case, setting):
        return [][0] if case.name == "second" else measure.measure(case, setting)

    monkeypatch.setattr(running, "measure", measured)
    offered()
    code, _, errors = call(capsys, *QUICKLY, "--debug")
    assert code == 1
    assert "Traceback" in errors
    why = "ended by IndexError: list index out of range"
    assert held(tmp_path).missing == {label("second"): why, label("third"): why}


def test_rows_of_an_earlier_run_stay_with_their_date_where_a_later_one_ends_early(capsys, offered, tmp_path):
    offered("2026-01-01T10:00:00+00:00")
    assert call(capsys, *QUICKLY)[0] == 0
    old = held(tmp_path)
    offered("2026-02-02T20:00:00+00:00", second=signaled(signal.SIGINT))
    code, out, _ = call(capsys, *QUICKLY)
    assert code == 130
    section = held(tmp_path)
    assert dates(section) == {"first": "", "second": "2026-01-01", "third": "2026-01-01"}
    assert section.conditions["date"] == "2026-02-02T20:00:00+00:00"
    assert section.earlier == {old.conditions["date"]: {**old.conditions, "notes": old.notes}}
    assert section.conditions["older"] == "2 rows of 2026-01-01T10:00:00+00:00"
    assert set(section.missing) == {label("second"), label("third")}
    assert "kept from 2026-01-01 10:00: 2 rows of 2 cases (CPU " in out
    assert "\nsecond " not in out, "what was not measured is not in the table"
    printed = call(capsys, "--markdown", "x.json")[1]
    assert "**One convolution, partial** (CPU " in printed
    assert "2026-02-02 20:00; in part of 2026-01-01 10:00)" in printed
    assert "| case | dtype | subject | reference | measured | ref. ms |" in printed
    assert "| first | fp32 | ours | nn.Conv2d |  |" in printed
    assert "| second | fp32 | ours | nn.Conv2d | 2026-01-01 10:00 |" in printed
    assert "- partial: 1 of 3 cases; not measured (interrupted by SIGINT): second" in printed
    assert "3 of 3 reached; partial: One convolution." in printed


def test_a_section_that_is_measured_to_its_end_keeps_nothing_of_earlier_runs(capsys, offered, monkeypatch, tmp_path):
    offered("2026-01-01T10:00:00+00:00", second=signaled(signal.SIGINT))
    call(capsys, *QUICKLY)
    monkeypatch.setattr(conv, "cases", lambda setting: [tiny("second"), tiny("other")])
    assert call(capsys, *QUICKLY)[0] == 0
    section = held(tmp_path)
    assert dates(section) == {"second": "", "other": ""}
    assert (section.missing, section.earlier) == ({}, {})
    assert not {"partial", "missing", "older"} & set(section.conditions)
    assert "earlier" not in json.loads((tmp_path / "x.json").read_text())["sections"]["conv"]


def test_a_section_in_one_dtype_leaves_rows_of_others(capsys, offered, monkeypatch, tmp_path):
    offered()
    assert call(capsys, *QUICKLY)[0] == 0
    narrow = [replace(tiny(name), dtype="bf16") for name in NAMES]
    monkeypatch.setattr(conv, "cases", lambda setting: narrow)
    assert call(capsys, *QUICKLY, "--dtype", "bf16")[0] == 0
    assert sorted((row.case, row.dtype) for row in held(tmp_path).rows) == sorted(
        (name, dtype) for name in NAMES for dtype in ("fp32", "bf16")
    )


def test_cases_are_measured_in_pieces(capsys, offered, tmp_path):
    pieces = {"2026-01-01": "FIRST", "2026-02-02": "second", "2026-03-03": "third"}
    missing = []
    for date, text in pieces.items():
        offered(f"{date}T10:00:00+00:00")
        code, out, errors = call(capsys, *QUICKLY, "--cases", text)
        assert code == 0
        assert f"conv 1/1: {label(text.lower())}" in errors
        assert out.count("forward") - out.partition("partial: ")[2].count("forward") == 1, "one row in the table"
        missing.append(held(tmp_path).missing)
    assert missing == [
        {label("second"): "not among --cases 'FIRST'", label("third"): "not among --cases 'FIRST'"},
        {label("third"): "not among --cases 'FIRST'"},
        {},
    ]
    section = held(tmp_path)
    assert dates(section) == {"first": "2026-01-01", "second": "2026-02-02", "third": ""}
    assert [date[:10] for date in section.earlier] == ["2026-01-01", "2026-02-02"]
    assert "**One convolution** (" in call(capsys, "--markdown", "x.json")[1]


def test_the_reason_of_a_case_stays_until_it_is_measured(capsys, offered, tmp_path):
    offered()
    call(capsys, *QUICKLY)
    offered("2026-02-02T20:00:00+00:00", second=signaled(signal.SIGTERM))
    call(capsys, *QUICKLY)
    for text, left in (("first", {"second", "third"}), ("third", {"second"}), ("second", set())):
        offered("2026-03-03T20:00:00+00:00")
        assert call(capsys, *QUICKLY, "--cases", text)[0] == 0
        assert held(tmp_path).missing == {label(name): "interrupted by SIGTERM" for name in NAMES if name in left}


def test_several_texts_choose_the_cases_of_each_and_sections_without_one_are_left_alone(
    capsys, offered, monkeypatch, tmp_path
):
    offered()
    monkeypatch.setattr(projection, "cases", lambda setting: [tiny("other")])
    assert call(capsys, "projection", *QUICKLY, "--cases", "first", "--cases", "third, forward")[0] == 0
    assert set(records.read(tmp_path / "x.json").sections) == {"conv"}
    assert list(dates(held(tmp_path))) == ["first", "third"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("section", running.SECTIONS)
def test_every_case_has_a_label_of_its_own_and_is_chosen_by_it(section, device):
    setting = Setting(device)
    cases = choice.section_cases(section, setting)
    assert list(choice.labeled(cases).values()) == cases
    last = list(choice.labeled(cases))[-1]
    assert last in choice.planned([section], setting, [last])[section].chosen


@pytest.mark.parametrize("text, count", [("cnn9, batch 128", 1), ("PGD", 1), ("fgsm", 2), ("resnet", 3)])
def test_cases_are_chosen_by_network_batch_or_work(text, count):
    plan = choice.planned(running.SECTIONS, Setting("cuda"), [text])["train"]
    assert len(plan.chosen) == count
    assert all(text.lower() in entry.lower() for entry in plan.chosen)


ROW = Row(
    "scaling", "batch 16", "forward+backward", "graph", "bf16", "tanh + cosine", "nn.Conv2d", 0.45, None, None, 0.3,
    None, None, 1.5,
)  # fmt: skip


def test_slopes_of_a_partial_section_say_so_and_of_which_dates_they_are():
    rows = [ROW, replace(ROW, case="batch 32", date="2026-01-01T10:00:00+00:00")]
    conditions = {**GPU, "date": "2026-02-02", "partial": "2 of 3 cases", "missing": {"batch 64": "why"}}
    section = Section(conditions, rows, [], scaling.fits(rows), {rows[1].date: {**GPU, "notes": ["old"]}})
    text = table.markdown(Record("NVIDIA H200", {"scaling": section}))
    assert text.startswith("**Where cost grows, partial** (NVIDIA H200, 2026-02-02; in part of 2026-01-01 10:00)")
    assert text.endswith("- partial: 2 of 3 cases\n- kept from 2026-01-01 10:00: 1 row of 1 case (NVIDIA H200); old")


def test_lines_of_slopes_stand_under_their_sizes_where_one_lacks_some():
    rows = [ROW, replace(ROW, case="batch 32"), replace(ROW, case="batch 32", mode="eager")]
    lines = table.slopes(Section(GPU, rows, [], scaling.fits(rows))).splitlines()
    assert "| batch, ms | mode | 16 | 32 | slope |" in lines
    assert "| nn.Conv2d | eager |  | 0.300 | – |" in lines


def test_a_section_that_stood_beside_the_complete_one_is_read_as_partial(tmp_path):
    path = tmp_path / "x.json"
    old, later = asdict(ROW), asdict(replace(ROW, case="batch 32"))
    tree = {
        "schema": 1, "device": "NVIDIA H200",
        "sections": {"scaling": {"conditions": {**GPU, "date": "2026-01-01"}, "rows": [old, later]}},
        "partial": {"scaling": {"conditions": {**GPU, "date": "2026-02-02"}, "rows": [old], "notes": ["1 of 2"]}},
    }  # fmt: skip
    path.write_text(json.dumps(tree))
    section = records.read(path).sections["scaling"]
    assert dates(section) == {"batch 16": "", "batch 32": "2026-01-01"}
    assert section.missing
    assert section.notes == ["1 of 2"]


def test_a_row_of_a_date_without_conditions_is_refused(tmp_path):
    path = tmp_path / "x.json"
    rows = [asdict(replace(ROW, date="2026-01-01"))]
    path.write_text(json.dumps({"schema": 1, "device": "x", "sections": {"scaling": {"conditions": {}, "rows": rows}}}))
    with pytest.raises(ValueError, match="has rows of 2026-01-01, and `earlier` no conditions of that date"):
        records.read(path)
