"""Runs that two tables have in common are trained once."""

import json
from dataclasses import replace

import pytest
from experiment_cases import tiny_recipe, tiny_table, write_record

from hyperball.cli import main
from hyperball.experiments import tables
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.jobs.sharing import take_over
from hyperball.experiments.results.annotation import annotate
from hyperball.experiments.table import Entry
from hyperball.experiments.tables import trained
from hyperball.files import write_json
from hyperball.training.storage.record import Record


@pytest.fixture
def first(tmp_path):
    """A finished run of one table, with a checkpoint, a lock and what was measured under conditions."""
    job = jobs_of(tiny_table(), [0], tmp_path / "tiny-paper")[0]
    write_record(job, experiment={"table": "tiny"})
    (job.folder / "checkpoints").mkdir()
    (job.folder / "checkpoints" / "step-000000004.json").write_text("{}")
    (job.folder / ".training.lock").touch()
    write_json(job.folder / "conditions.json", {"50 %": {}})
    return job


def other_job(tmp_path, **changes):
    table = replace(tiny_table(), name="other", entries=(Entry("mean", "of another table", tiny_recipe(**changes)),))
    (job,) = jobs_of(table, [0], tmp_path / "other-paper")
    return table, job


def test_a_run_of_the_same_recipe_is_taken_over_and_is_a_cell_of_the_other_table(first, tmp_path):
    table, job = other_job(tmp_path, **{"log.every": 7})
    assert take_over([job], tmp_path / "other-paper") == [f"{job.cell.name}: taken over from {first.folder}"]
    assert job.is_done
    record = Record.read(job.folder)
    assert record.results == Record.read(first.folder).results
    assert "a copy of tiny-paper/mean--clean/seed-0" in record.notes[-1]
    held = sorted(path.name for path in job.folder.iterdir())
    assert held == ["checkpoints", "metrics.jsonl", "recipe.json", "record.json"]
    annotate(table, "paper", [job])
    assert Record.read(job.folder).experiment["table"] == "other"
    assert Record.read(first.folder).experiment["table"] == "tiny"
    assert take_over([job], tmp_path / "other-paper") == []


@pytest.mark.parametrize("changes", [{"model.pool": "max"}, {"epochs": 2}, {"seed": 1}, {"log.norms": True}], ids=str)
def test_a_run_of_another_recipe_or_without_the_lengths_that_are_asked_for_is_not(first, tmp_path, changes):
    _, job = other_job(tmp_path, **changes)
    job = replace(job, cell=replace(job.cell, recipe=job.cell.recipe.override(changes)))
    assert take_over([job], tmp_path / "other-paper") == []
    assert not job.folder.exists()


HALF, FEW = {"outliers": 0.5}, {"outliers": 0.1}


@pytest.mark.parametrize(
    "tested, asked, fits",
    [
        ({"50 %": HALF, "10 %": FEW}, {"50 %": HALF}, True),
        ({"50 %": HALF}, {}, True),
        ({}, {"50 %": HALF}, False),
        ({"50 %": FEW}, {"50 %": HALF}, False),
        ({"10 %": HALF}, {"50 %": HALF}, False),
    ],
    ids=["more", "none asked", "none tested", "others", "other names"],
)
def test_a_run_is_taken_over_if_its_epochs_were_tested_as_is_asked(first, tmp_path, tested, asked, fits):
    for name in ("recipe.json", "record.json"):
        tree = json.loads((first.folder / name).read_text())
        held = tree if name == "recipe.json" else tree["recipe"]
        held["log"]["conditions"] = tested
        write_json(first.folder / name, tree)
    _, job = other_job(tmp_path, **{"log.conditions": asked})
    assert bool(take_over([job], tmp_path / "other-paper")) == fits
    assert job.folder.exists() == fits


def test_a_cell_that_has_begun_and_a_record_that_is_broken_are_left_alone(first, tmp_path):
    _, job = other_job(tmp_path)
    job.folder.mkdir(parents=True)
    assert take_over([job], tmp_path / "other-paper") == []
    job.folder.rmdir()
    tree = json.loads((first.folder / "record.json").read_text())
    write_json(first.folder / "record.json", {**tree, "recipe": tiny_recipe(epochs=9).to_dict()})
    assert take_over([job], tmp_path / "other-paper") == []
    (first.folder / "record.json").write_text("{")
    assert take_over([job], tmp_path / "other-paper") == []
    assert not job.folder.exists()
    assert not list(job.folder.parent.glob(".*"))


def equal_cells(one: str, other: str) -> set[tuple[str, str]]:
    """The cells of two tables whose runs would be taken over."""
    pairs = [(a, b) for a in trained(one).entries for b in trained(other).entries]
    return {
        (a.name, b.name)
        for a, b in pairs
        if all(key.startswith(("log.", "engine.")) and key != "log.norms" for key in a.recipe.differences(b.recipe))
    }


def test_clean_poolings_are_trained_once():
    shared = equal_cells("pooling-outliers", "pooling-test-outliers")
    clean = [entry.name for entry in trained("pooling-outliers").entries if entry.column == "0 %"]
    assert {own for own, _ in shared} == set(clean)
    assert len(shared) == len(clean) == 17


def test_table_1_has_a_cell_of_table_4():
    assert equal_cells("dcnet-table1", "dcnet-table4") == {("gradients=projection--tanh+cosine", "tanh--cosine")}


def test_a_pooling_whose_c_stands_still_is_trained_with_outliers_in_the_test_alone():
    rows = {
        name: {entry.row for entry in trained(name).entries} for name in ("pooling-outliers", "pooling-test-outliers")
    }
    still = "truncated_quadratic adaptive"
    assert still in rows["pooling-test-outliers"]
    assert still not in rows["pooling-outliers"]


def test_the_command_takes_over_what_another_table_has_trained(first, tmp_path, monkeypatch, capsys):
    table, job = other_job(tmp_path)
    monkeypatch.setitem(tables.TABLES, "other", lambda: table)
    monkeypatch.setitem(tables.TRAINED, "other", lambda: table)
    kept = tmp_path / "kept"
    command = ["reproduce", "other", "--out", str(tmp_path), "--accelerator", "cpu", "--collect", str(kept)]
    assert main([*command, "--dry-run"]) == 0
    assert not job.folder.exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert f"{job.cell.name}: taken over from {first.folder}" in said
    assert "1 cell, 1 done before" in said
    assert Record.read(kept / "other-paper" / job.cell.name).experiment["table"] == "other"
