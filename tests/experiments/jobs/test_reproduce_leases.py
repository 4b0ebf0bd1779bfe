"""`hyperball reproduce` on a machine that may be taken away: whatever goes wrong, what was found is kept."""

import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from experiment_cases import tiny_recipe, tiny_table
from runner_cases import RECORD, SAVES, FakeCells, write_run

from hyperball.cli import main
from hyperball.experiments import tables
from hyperball.experiments.jobs import crew
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.pictures import convergence
from hyperball.experiments.records.conditions import CONDITIONS
from hyperball.experiments.results import markdown
from hyperball.experiments.results.collecting import collect, write_table
from hyperball.experiments.results.comparison import compare, table
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.report import read_folder
from hyperball.training.storage.checkpoint import CheckpointError

ROWS = ("tanh", "ball", "sphere")


def filters(finished):
    """A picture of every network, of which one is gone."""
    for run in finished:
        if run.entry.row == "ball" and (run.folder / "gone").exists():
            raise CheckpointError(f"there is no checkpoint in {run.folder}")
    return {f"filters-{run.entry.name}": {"kind": "filters", "filters": []} for run in finished}


@pytest.fixture
def trio(monkeypatch) -> Experiment:
    """A table of three cells, each with a condition and pictures."""
    entries = tuple(
        Entry(row, "clean", tiny_recipe(**{"model.magnitude": row}), 60.0, {"50 %": {"outliers": 0.5}}) for row in ROWS
    )
    nothing = Reduction(lambda recipe: recipe, "nothing")
    made = Experiment("trio", "A table", "nobody", "error", entries, nothing, draws=(convergence, filters))
    monkeypatch.setitem(tables.TABLES, "trio", lambda: made)
    return made


@pytest.fixture
def cells(monkeypatch):
    """Cells that take no time."""
    made = FakeCells({})
    monkeypatch.setattr(crew, "start", made)
    return made


def command(tmp_path, *options):
    places = ["--out", str(tmp_path / "runs"), "--collect", str(tmp_path / "kept")]
    return ["reproduce", "trio", *places, "--accelerator", "cpu", *options]


def kept(tmp_path, name):
    return sorted(
        path.relative_to(tmp_path / "kept" / "trio-paper").parts[0] for path in (tmp_path / "kept").rglob(name)
    )


def test_a_network_that_cannot_be_drawn_is_named_and_all_else_is_kept(trio, cells, tmp_path, capsys):
    assert main(command(tmp_path)) == 0
    pictures = tmp_path / "kept" / "trio-paper" / "pictures"
    assert len(list(pictures.glob("filters-*"))) == 3
    for path in (tmp_path / "kept").rglob("*.json"):
        path.unlink()
    gone = tmp_path / "runs" / "trio-paper" / "ball--clean" / "seed-0"
    (gone / "gone").touch()
    for path in (tmp_path / "runs").rglob("filters-*"):
        path.unlink()
    capsys.readouterr()
    assert main(command(tmp_path)) == 0
    assert f"left out {gone}: it cannot be drawn: there is no checkpoint in {gone}" in capsys.readouterr().err
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]
    assert {path.stem for path in pictures.glob("filters-*")} == {"filters-tanh--clean", "filters-sphere--clean"}


def test_a_network_that_cannot_be_measured_ends_its_own_tests_alone(trio, cells, tmp_path, capsys):
    cells.tests["tanh"] = "import sys; sys.exit('there is no checkpoint')"
    assert main(command(tmp_path)) == 1
    assert "not done: tanh--clean_tests/seed-0: there is no checkpoint" in capsys.readouterr().err
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]
    assert kept(tmp_path, CONDITIONS) == ["ball--clean", "sphere--clean"]
    cells.tests.clear()
    cells.started.clear()
    assert main(command(tmp_path)) == 0
    assert cells.started == ["tanh--clean_tests/seed-0"]
    assert len(kept(tmp_path, CONDITIONS)) == 3


def test_a_network_is_tested_when_it_is_trained_and_before_others_are(trio, cells, tmp_path, capsys):
    assert main(command(tmp_path)) == 0
    assert cells.started == [f"{row}--clean{what}/seed-0" for row in ROWS for what in ("", "_tests")]
    assert "3 cells and 3 tests of them, 0 done before" in capsys.readouterr().out


STOPS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *arguments: sys.exit(143))
os.kill(os.getppid(), {number})
time.sleep(120)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["tests", "pictures"])
def test_an_interruption_after_training_keeps_what_was_found(
    when, number, code, trio, cells, tmp_path, capsys, monkeypatch
):
    def stop(finished):
        signal.raise_signal(number)

    if when == "tests":
        cells.tests["ball"] = STOPS.format(number=int(number))
    else:
        monkeypatch.setitem(tables.TABLES, "trio", lambda: replace(trio, draws=(stop,)))
    monkeypatch.setitem(tables.TABLES, "next", lambda: replace(tiny_table(), name="next", title="The next table"))
    arguments = command(tmp_path)
    assert main([*arguments[:2], "next", *arguments[2:]]) == code
    captured = capsys.readouterr()
    assert "the same command goes on" in captured.err
    assert "The next table" not in captured.out
    done = ["tanh", "ball"] if when == "tests" else ROWS
    assert kept(tmp_path, "record.json") == sorted(f"{row}--clean" for row in done)
    tested = ["tanh"] if when == "tests" else ROWS
    assert kept(tmp_path, CONDITIONS) == sorted(f"{row}--clean" for row in tested)
    numbers = json.loads((tmp_path / "kept" / "trio-paper" / "table.json").read_text())["numbers"]
    clean = [len(number["values"]) for number in numbers if "50 %" not in number["column"]]
    assert clean == [int(row in done) for row in ROWS]
    if when == "tests":
        assert "not done: ball--clean_tests/seed-0" in captured.err
        assert "not done: sphere--clean_tests/seed-0: not begun" in captured.err


def test_each_cell_is_kept_as_it_ends(trio, cells, tmp_path, monkeypatch):
    found = []

    def start(job, count):
        found.append(kept(tmp_path, "record.json"))
        return cells(job, count)

    monkeypatch.setattr(crew, "start", start)
    assert main(command(tmp_path)) == 0
    assert found[::2] == [[], ["tanh--clean"], ["ball--clean", "tanh--clean"]]
    assert found[1::2] == [*found[2::2], ["ball--clean", "sphere--clean", "tanh--clean"]]
    record = json.loads((tmp_path / "kept" / "trio-paper" / "tanh--clean" / "seed-0" / "record.json").read_text())
    assert record["experiment"]["row"] == "tanh"


def test_the_end_of_the_time_lets_cells_save_themselves_and_keeps_the_others(
    trio, cells, tmp_path, capsys, monkeypatch
):
    cells.scripts["ball"] = SAVES
    running = tmp_path / "runs" / "trio-paper" / "ball--clean" / "seed-0"
    began = time.monotonic()

    class Clock:
        """Stands still until a cell runs that would not end by itself."""

        def monotonic(self):
            return began + (10_000 if (running / "up").exists() else 0)

        def sleep(self, seconds):
            os.sched_yield()

    monkeypatch.setattr(crew, "time", Clock())
    monkeypatch.setattr("hyperball.cli.reproduce.time", Clock())
    assert main(command(tmp_path, "--time-limit", "5000")) == 130
    assert (running / "saved").exists()
    errs = capsys.readouterr().err
    assert "not done: sphere--clean/seed-0: not begun" in errs
    assert "the same command goes on" in errs
    assert kept(tmp_path, "record.json") == ["tanh--clean"]
    cells.scripts.clear()
    (running / "up").unlink()
    assert main(command(tmp_path)) == 0
    trained = [name for name in cells.started if "_tests" not in name]
    assert trained == ["tanh--clean/seed-0", "ball--clean/seed-0", "ball--clean/seed-0", "sphere--clean/seed-0"]


@pytest.mark.parametrize("tested", [True, False])
def test_a_cell_that_cannot_save_itself_at_the_end_of_the_time_has_failed(
    tested, trio, cells, tmp_path, capsys, monkeypatch
):
    untested = tuple(replace(entry, conditions={}) for entry in trio.entries)
    monkeypatch.setitem(tables.TABLES, "trio", lambda: trio if tested else replace(trio, entries=untested))
    cells.scripts["sphere"] = SAVES.replace("sys.exit(143)", "sys.exit('there is no room to save it')")
    running = tmp_path / "runs" / "trio-paper" / "sphere--clean" / "seed-0"
    began = time.monotonic()
    clock = SimpleNamespace(
        monotonic=lambda: began + (10_000 if (running / "up").exists() else 0), sleep=lambda seconds: os.sched_yield()
    )
    monkeypatch.setattr(crew, "time", clock)
    monkeypatch.setattr("hyperball.cli.reproduce.time", clock)
    assert main(command(tmp_path, "--time-limit", "5000")) == 1
    errors = capsys.readouterr().err
    assert "not done: sphere--clean/seed-0: there is no room to save it" in errors
    needs = "not done: sphere--clean_tests/seed-0: it needs sphere--clean/seed-0: there is no room to save it"
    assert (needs in errors) is tested
    assert "the same command goes on" not in errors


def test_a_cell_that_another_runner_has_finished_is_not_named(trio, cells, tmp_path, capsys):
    cells.scripts["ball"] = RECORD + "\nsys.exit('another process is training into it')"
    assert main(command(tmp_path)) == 0
    assert "not done" not in capsys.readouterr().err


@pytest.fixture
def one_run(trio, tmp_path):
    """The first cell's finished run, and where it is kept."""
    job = jobs_of(trio, [0], tmp_path / "runs")[0]
    write_run(job)
    assert collect([job], tmp_path / "kept" / "trio-paper") == []
    return job, tmp_path / "kept" / "trio-paper" / job.cell.name


@pytest.mark.parametrize("text", ["", '{"recipe": ', "[]", '{"results": {"last": {"top1": 50.0}}}'])
def test_a_kept_record_that_cannot_be_read_is_replaced(one_run, text):
    job, target = one_run
    before = (target / "record.json").read_bytes()
    (target / "record.json").write_text(text)
    (said,) = collect([job], target.parents[1])
    assert f"replaced {target / 'record.json'}, which could not be read" in said
    assert (target / "record.json").read_bytes() == before
    assert collect([job], target.parents[1]) == []


@pytest.mark.parametrize("name", ["recipe.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", [None, "{\n"])
def test_what_lacks_beside_a_kept_record_is_completed(one_run, name, text):
    job, target = one_run
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    (target / name).unlink()
    if text is not None:
        (target / name).write_text(text)
    assert collect([job], target.parents[1]) == []
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


def test_a_kept_record_is_whole_or_not_there(trio, tmp_path, monkeypatch):
    jobs = jobs_of(trio, [0], tmp_path / "runs")
    for job in jobs:
        write_run(job)
    replaced = os.replace

    def full(source, target):
        if str(target).endswith("ball--clean/seed-0/record.json"):
            raise OSError(28, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", full)
    (said,) = collect(jobs, tmp_path / "kept" / "trio-paper")
    target = tmp_path / "kept" / "trio-paper" / jobs[1].cell.name
    assert said == f"could not keep {jobs[1].folder} as {target}: No space left on device"
    assert kept(tmp_path, "record.json") == ["sphere--clean", "tanh--clean"]
    beside = (tmp_path / "kept" / "trio-paper" / "ball--clean" / "seed-0").iterdir()
    assert {path.name for path in beside} == {"metrics.jsonl", "recipe.json"}


def test_a_record_that_could_not_be_kept_is_a_failure(trio, cells, tmp_path, monkeypatch, capsys):
    replaced = os.replace

    def full(source, target):
        if "kept" in str(target) and str(target).endswith("tanh--clean/seed-0/record.json"):
            raise OSError(28, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert main(command(tmp_path)) == 1
    assert "could not keep" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setitem(tables.TABLES, "trio", lambda: trio)
    assert main(command(tmp_path)) == 0


@pytest.fixture
def full(monkeypatch):
    """Fills the disk for one file."""
    replaced = os.replace

    def fill(path):
        def replace(source, target):
            if str(target) == str(path):
                raise OSError(28, "No space left on device")
            replaced(source, target)

        monkeypatch.setattr(os, "replace", replace)

    return fill


def test_a_full_disk_is_named(trio, cells, tmp_path, full, capsys):
    folder = tmp_path / "runs" / "trio-paper"
    full(folder / "table.json")
    assert main(command(tmp_path)) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hyperball reproduce: {folder}: No space left on device"
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]


def test_the_table_is_printed_where_it_cannot_be_kept(trio, cells, tmp_path, full, capsys):
    folder = tmp_path / "kept" / "trio-paper"
    full(folder / "table.json")
    assert main(command(tmp_path)) == 1
    said = capsys.readouterr().out
    assert f"could not keep the table and the pictures in {folder}: No space left on device" in said
    assert "tanh    clean           50.00" in said
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]


@pytest.mark.parametrize("place", ["runs", "kept"])
def test_a_folder_that_nothing_can_be_written_to_is_refused_before_the_work(
    place, trio, cells, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / place / "trio-paper"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(folder) and access(path, mode))
    assert main(command(tmp_path)) == 2
    assert f"{folder} cannot be written to" in capsys.readouterr().err
    assert cells.started == []


def test_a_run_with_broken_metrics_keeps_its_record(trio, tmp_path):
    job = jobs_of(trio, [0], tmp_path / "runs")[0]
    (write_run(job) / "metrics.jsonl").write_text("no JSON\n")
    (said,) = collect([job], tmp_path / "kept" / "trio-paper")
    assert "kept no metrics.jsonl" in said
    assert kept(tmp_path, "record.json") == ["tanh--clean"]


def test_a_record_without_its_recipe_counts_for_all_readers_alike(trio, one_run, tmp_path, capsys):
    _, target = one_run
    (target / "recipe.json").unlink()
    folder = target.parents[1]
    write_table(trio, "paper", folder)
    assert json.loads((folder / "table.json").read_text())["numbers"][0]["values"] == [25.0]
    assert "Left out" not in markdown.made("trio", tmp_path / "kept")
    assert "| tanh | clean | 25.00 |" in markdown.made("trio", tmp_path / "kept")
    assert [run.results["last"]["top1"] for run in read_folder(folder).runs] == [0.75]
    record = json.loads((target / "record.json").read_text())
    record["recipe"]["epochs"] = 7
    (target / "record.json").write_text(json.dumps(record))
    assert "`epochs` is 7 there and 1 here" in jobs_of(trio, [0], folder)[0].missing()


def test_the_quick_scale_prints_no_differences(trio, tmp_path):
    jobs = jobs_of(trio, [0], tmp_path)
    write_run(jobs[0])
    lines = compare(trio, jobs)
    assert "-35.00" in table(trio, lines, "quarter")
    assert "difference: ours less the paper's" in table(trio, lines, "quarter")
    quick = table(trio, lines, "quick")
    assert "-35.00" not in quick
    assert "ours less" not in quick
    assert "25.00" in quick
