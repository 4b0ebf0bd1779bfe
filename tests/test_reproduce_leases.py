"""`hyperball reproduce` on a machine that may be taken away: whatever goes wrong, what was found is kept."""

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from experiment_cases import tiny_recipe, tiny_table
from runner_cases import RECORD, SAVES, FakeCells, write_run

from hyperball.cli import main
from hyperball.experiments import conditions, markdown, runners, tables
from hyperball.experiments.collecting import collect, write_table
from hyperball.experiments.conditions import CONDITIONS, measure_conditions
from hyperball.experiments.pictures import convergence
from hyperball.experiments.reproduce import compare, jobs_of, table
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.report import read_folder
from hyperball.training.checkpoint import CheckpointError

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
    monkeypatch.setattr(runners, "start", made)
    return made


@pytest.fixture
def measured(monkeypatch):
    """What measuring a cell raises, by its row; those that are not there are measured at once."""
    errors, seen = {}, []

    def fake(job, changes):
        row = job.cell.recipe.model.magnitude
        seen.append(row)
        if row in errors:
            raise errors[row]
        return {"top1": 0.5}

    monkeypatch.setattr(conditions, "measured", fake)
    return errors, seen


def command(tmp_path, *options):
    places = ["--out", str(tmp_path / "runs"), "--collect", str(tmp_path / "kept")]
    return ["reproduce", "trio", *places, "--accelerator", "cpu", *options]


def kept(tmp_path, name):
    return sorted(
        path.relative_to(tmp_path / "kept" / "trio-paper").parts[0] for path in (tmp_path / "kept").rglob(name)
    )


def test_a_network_that_cannot_be_drawn_is_named_and_all_else_is_kept(trio, cells, measured, tmp_path, capsys):
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


def test_a_network_that_cannot_be_measured_ends_its_own_tests_alone(trio, cells, measured, tmp_path, capsys):
    errors, seen = measured
    errors["tanh"] = CheckpointError("there is no checkpoint")
    errors["ball"] = MemoryError("out of memory")
    assert main(command(tmp_path)) == 1
    errs = capsys.readouterr().err
    assert "not done: tanh--clean/seed-0: conditions are to be measured: 50 %: there is no checkpoint" in errs
    assert "not done: ball--clean/seed-0: conditions are to be measured: 50 %: MemoryError: out of memory" in errs
    assert seen == list(ROWS)
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]
    assert kept(tmp_path, CONDITIONS) == ["sphere--clean"]
    errors.clear()
    assert main(command(tmp_path)) == 0
    assert seen == [*ROWS, "tanh", "ball"]


class Pool:
    """Futures that a killed process broke, but for those of one cell."""

    def __init__(self, killed):
        self.killed = killed

    def submit(self, work, job, *arguments):
        future = Future()
        if job.cell.recipe.model.magnitude in self.killed:
            future.set_exception(BrokenProcessPool("a process was terminated abruptly"))
        else:
            future.set_result(work(job, *arguments))
        return future


def test_what_a_killed_process_took_along_is_measured_again_one_by_one(trio, measured, tmp_path, monkeypatch):
    pools = []

    @contextmanager
    def workers(count):
        pools.append(count)
        yield Pool(ROWS[1:] if len(pools) == 1 else ["ball"])

    monkeypatch.setattr(conditions, "workers", workers)
    jobs = jobs_of(trio, [0], tmp_path)
    for job in jobs:
        write_run(job)
    assert measure_conditions(trio, jobs, count=3) == {"ball--clean/seed-0": conditions.DIED}
    assert pools == [3, 1, 1]
    assert measured[1] == ["tanh", "sphere"]


def test_networks_without_memory_beside_others_are_measured_again_by_half_as_many(
    trio, measured, tmp_path, monkeypatch
):
    errors, seen = measured
    whole = f"CUDA out of memory. Tried to allocate 4.00 GiB.{' Process 7 has 6 GiB memory in use.' * 90}"
    errors.update({row: torch.OutOfMemoryError(whole) for row in ROWS[1:]})
    pools = []

    @contextmanager
    def workers(count):
        pools.append(count)
        if len(pools) == 2:
            del errors["sphere"]
        yield Pool([])

    monkeypatch.setattr(conditions, "workers", workers)
    jobs = jobs_of(trio, [0], tmp_path)
    for job in jobs:
        write_run(job)
    short = "OutOfMemoryError: CUDA out of memory."
    assert measure_conditions(trio, jobs, count=8) == {"ball--clean/seed-0": short}
    assert pools == [3, 1]
    assert seen == [*ROWS, "ball", "sphere"]
    assert jobs[1].log.read_text().count(whole) == 2


@pytest.mark.parametrize("before", [0, 1])
def test_conditions_that_the_time_was_too_short_for_are_all_that_the_same_command_does(
    before, trio, cells, measured, tmp_path, capsys, monkeypatch
):
    began, (_, seen) = time.monotonic(), measured

    class Clock:
        """Goes on when all cells are trained and so many are measured."""

        def monotonic(self):
            trained = len(list((tmp_path / "runs").rglob("record.json"))) == len(ROWS)
            return began + (10_000 if trained and len(seen) >= before else 0)

        def sleep(self, seconds):
            os.sched_yield()

    for module in ("cli.reproduce", "experiments.conditions", "experiments.drawing"):
        monkeypatch.setattr(f"hyperball.{module}.time", Clock())
    assert main(command(tmp_path, "--time-limit", "5000")) == 130
    assert seen == list(ROWS[:before])
    errs = capsys.readouterr().err
    for row in ROWS:
        told = f"not done: {row}--clean/seed-0: conditions are to be measured: 50 %\n"
        assert (told in errs) == (row not in seen)
    assert "the same command goes on" in errs
    assert kept(tmp_path, CONDITIONS) == [f"{row}--clean" for row in ROWS[:before]]
    monkeypatch.undo()
    monkeypatch.setitem(tables.TABLES, "trio", lambda: trio)
    monkeypatch.setattr(runners, "start", None)  # there is nothing to begin
    monkeypatch.setattr(conditions, "measured", lambda job, changes: seen.append(job.cell.label) or {"top1": 0.5})
    assert main(command(tmp_path)) == 0
    assert seen == [*ROWS[:before], *(f"{row}--clean" for row in ROWS[before:])]
    assert len(kept(tmp_path, CONDITIONS)) == len(ROWS)


def test_processes_that_measure_end_with_an_interruption():
    processes = []

    def work():
        with conditions.workers(1) as pool:
            pool.submit(time.sleep, 90)
            processes.extend(multiprocessing.active_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert processes
    over = time.monotonic() + 60
    for process in processes:
        while process.exitcode is None and time.monotonic() < over:  # a thread of the pool waits for it too
            time.sleep(0.02)
        assert process.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["conditions", "pictures"])
def test_an_interruption_after_training_keeps_what_was_found(
    when, number, code, trio, cells, measured, tmp_path, capsys, monkeypatch
):
    (_, seen), measure = measured, conditions.measured

    def stop(finished):
        signal.raise_signal(number)

    def measure_until_ball(job, changes):
        found = measure(job, changes)
        if seen[-1] == "ball":
            signal.raise_signal(number)
        return found

    if when == "conditions":
        monkeypatch.setattr(conditions, "measured", measure_until_ball)
    else:
        monkeypatch.setitem(tables.TABLES, "trio", lambda: replace(trio, draws=(stop,)))
    monkeypatch.setitem(tables.TABLES, "next", lambda: replace(tiny_table(), name="next", title="The next table"))
    arguments = command(tmp_path)
    assert main([*arguments[:2], "next", *arguments[2:]]) == code
    captured = capsys.readouterr()
    assert "the same command goes on" in captured.err
    assert "The next table" not in captured.out
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]
    assert kept(tmp_path, CONDITIONS) == (
        ["tanh--clean"] if when == "conditions" else sorted(f"{r}--clean" for r in ROWS)
    )
    numbers = json.loads((tmp_path / "kept" / "trio-paper" / "table.json").read_text())["numbers"]
    assert [len(number["values"]) for number in numbers if "50 %" not in number["column"]] == [1, 1, 1]
    if when == "conditions":
        assert seen == ["tanh", "ball"]
        assert "not done: sphere--clean/seed-0: conditions are to be measured: 50 %" in captured.err


def test_records_are_kept_before_conditions_are_measured(trio, cells, tmp_path, monkeypatch):
    found = []

    def measured(job, changes):
        found.append((kept(tmp_path, "record.json"), kept(tmp_path, "table.json")))
        return {"top1": 0.5}

    monkeypatch.setattr(conditions, "measured", measured)
    assert main(command(tmp_path)) == 0
    assert found[0] == (["ball--clean", "sphere--clean", "tanh--clean"], ["table.json"])


def test_each_cell_is_kept_as_it_ends(trio, cells, measured, tmp_path, monkeypatch):
    found = []

    def start(job, count):
        found.append(kept(tmp_path, "record.json"))
        return cells(job, count)

    monkeypatch.setattr(runners, "start", start)
    assert main(command(tmp_path)) == 0
    assert found == [[], ["tanh--clean"], ["ball--clean", "tanh--clean"]]
    record = json.loads((tmp_path / "kept" / "trio-paper" / "tanh--clean" / "seed-0" / "record.json").read_text())
    assert record["experiment"]["row"] == "tanh"


def test_the_end_of_the_time_lets_cells_save_themselves_and_keeps_the_others(
    trio, cells, measured, tmp_path, capsys, monkeypatch
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

    monkeypatch.setattr(runners, "time", Clock())
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
    assert cells.started == ["tanh--clean/seed-0", "ball--clean/seed-0", "ball--clean/seed-0", "sphere--clean/seed-0"]


def test_a_cell_that_another_runner_has_finished_is_not_named(trio, cells, measured, tmp_path, capsys):
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


@pytest.mark.parametrize("place", ["runs", "kept"])
def test_a_full_disk_is_named(place, trio, cells, measured, tmp_path, monkeypatch, capsys):
    replaced = os.replace

    def full(source, target):
        if str(target) == str(tmp_path / place / "trio-paper" / "table.json"):
            raise OSError(28, "No space left on device")
        replaced(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert main(command(tmp_path)) == 2
    folder = tmp_path / place / "trio-paper"
    assert capsys.readouterr().err.splitlines()[-1] == f"hyperball reproduce: {folder}: No space left on device"
    assert kept(tmp_path, "record.json") == ["ball--clean", "sphere--clean", "tanh--clean"]


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
