"""What the records of a table's cells hold: conditions that go on, kept tables, networks that did not converge."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_cases import tiny_table

from hyperball.experiments import markdown, reproduce
from hyperball.experiments.collecting import collect, write_table
from hyperball.experiments.lengths import length_rows
from hyperball.experiments.reproduce import annotate, as_data, compare, draw, jobs_of, measure_conditions, table
from hyperball.experiments.table import Experiment
from hyperball.experiments.text import spread
from hyperball.training import train
from hyperball.training.record import Record


@pytest.fixture(scope="module")
def tiny() -> Experiment:
    return tiny_table()


def trained_job(tiny, out: Path):
    job = jobs_of(tiny, [0], out)[0]
    if not job.is_done:
        train(job.cell.recipe, job.folder)
    return job


def several(tiny) -> Experiment:
    conditions = {f"{share} %": {"outliers": share / 100} for share in (10, 30, 50)}
    return replace(tiny, entries=(replace(tiny.entries[0], conditions=conditions),))


def test_conditions_end_with_the_time_and_go_on_where_they_were(tiny, tmp_path: Path, monkeypatch):
    made = several(tiny)
    job = trained_job(made, tmp_path)
    assert measure_conditions(made, [job], over=0.0) == {job.cell.name: ["10 %", "30 %", "50 %"]}
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(reproduce.time, "monotonic", lambda: next(clock))
    assert measure_conditions(made, [job], over=1.0) == {job.cell.name: ["30 %", "50 %"]}
    monkeypatch.undo()
    assert list(json.loads((job.folder / "conditions.json").read_text())) == ["10 %"]
    assert draw(replace(made, draws=(lambda finished: pytest.fail("drawn"),)), [job], tmp_path, over=0.0) == []
    assert measure_conditions(made, [job]) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"10 %": {"top1": "x"}}', '{"10 %": null}'])
def test_broken_conditions_are_measured_again(tiny, tmp_path: Path, text):
    made = several(tiny)
    job = trained_job(made, tmp_path)
    assert measure_conditions(made, [job]) == {}
    before = json.loads((job.folder / "conditions.json").read_text())
    (job.folder / "conditions.json").write_text(text)
    assert not compare(made, [job])[1].values
    assert measure_conditions(made, [job]) == {}
    assert json.loads((job.folder / "conditions.json").read_text()) == before


def test_kept_conditions_grow_with_those_of_the_run(tiny, tmp_path: Path):
    made = several(tiny)
    job = trained_job(made, tmp_path / "runs")
    measure_conditions(made, [job])
    whole = json.loads((job.folder / "conditions.json").read_text())
    (job.folder / "conditions.json").write_text(json.dumps({"10 %": whole["10 %"]}))
    kept = tmp_path / "results" / job.cell.name / "conditions.json"
    for content in ({"10 %": whole["10 %"]}, {**whole, "10 %": {"top1": 0.0}}):
        (job.folder / "conditions.json").write_text(json.dumps(content))
        collect([job], tmp_path / "results")
    assert json.loads(kept.read_text()) == whole


def test_a_kept_table_does_not_lose_numbers(tiny, tmp_path: Path):
    job = trained_job(tiny, tmp_path)
    assert write_table(tiny, "paper", tmp_path, shrinks=False) == ""
    before = (tmp_path / "table.json").read_text()
    (job.folder / "record.json").unlink()
    assert "have fewer numbers of mean, clean" in write_table(tiny, "paper", tmp_path, shrinks=False)
    assert (tmp_path / "table.json").read_text() == before
    assert write_table(tiny, "paper", tmp_path) == ""
    assert json.loads((tmp_path / "table.json").read_text())["numbers"][0]["values"] == []


def test_a_network_that_did_not_converge_counts_as_done_and_not_as_a_number(tiny, tmp_path: Path):
    job = trained_job(tiny, tmp_path / "runs")
    record = Record.read(job.folder)
    lost = replace(record, status="diverged", results={}, failure={"step": 3, "where": "layer a"})
    lost.write(job.folder)
    assert job.is_done
    annotate(tiny, "paper", [job])
    assert measure_conditions(tiny, [job]) == {}
    assert draw(replace(tiny, draws=(lambda finished: pytest.fail("drawn"),)), [job], tmp_path) == []
    line, outliers, _ = compare(tiny, [job])
    assert (line.values, line.diverged, line.difference) == ((), (0,), None)
    assert "N/C" in table(tiny, [line])
    assert outliers.diverged == (0,)
    assert as_data(tiny, "paper", [line], ["a doubt"])["numbers"][0]["diverged"] == (0,)
    assert collect([job], tmp_path / "results") == []
    assert Record.read(tmp_path / "results" / job.cell.name).status == "diverged"


@pytest.mark.parametrize(
    "values, diverged, text",
    [((), 0, "–"), ((), 2, "N/C"), ((1.0,), 0, "1.00"), ((1.0, 2.0), 1, "1.50 ± 0.71 (1 N/C)")],
)
def test_numbers_over_seeds_say_how_many_did_not_converge(values, diverged, text):
    assert spread(values, diverged) == text


def test_lengths_of_filters_and_gradients_are_told_at_the_first_and_the_last_step(tiny, tmp_path: Path, capsys):
    job, other = jobs_of(tiny, range(2), tmp_path)[:3:2]
    lines = [
        {"kind": "train", "step": step, "weight_norm": 1.0 + step, "gradient_norm": 0.5 / (1 + step)} for step in (0, 4)
    ]
    lines += [{"kind": "evaluation", "step": 4}, {"kind": "train", "step": 5, "weight_norm": None}]
    for held in (job, other):
        held.folder.mkdir(parents=True)
        (held.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert length_rows(tiny, [job, other]) == [("mean", "1", "5", "0.5", "0.1", "2")]
    (other.folder / "metrics.jsonl").write_text("{\n")
    assert length_rows(tiny, [job, other])[0][-1] == "1"
    assert "left out" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_pipe_in_place_of_a_record_is_named_and_not_waited_for(tiny, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(markdown.TABLES, "tiny", lambda: tiny)
    job = trained_job(tiny, tmp_path / "tiny-paper")
    (job.folder / "record.json").unlink()
    os.mkfifo(job.folder / "record.json")
    assert "0 of 3 numbers" in markdown.made("tiny", tmp_path)
    assert "is no regular file" in capsys.readouterr().err
