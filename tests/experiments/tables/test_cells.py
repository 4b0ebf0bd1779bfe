"""Cells whose networks do not converge, and what interruptions leave behind."""

import json
import os
import signal

import pytest

from hyperball._signals import shielded
from hyperball.cli import main
from hyperball.experiments.grid import expand
from hyperball.experiments.jobs.cell import main as cell_main
from hyperball.experiments.jobs.ends import End, told
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.results.summary import summarize, table

SMALL = {"epochs": 1, "batch_size": 50, "data.train_size": 100, "data.test_size": 50}


def diverging(tmp_path, **changes):
    (cell,) = expand({"base": "digits", "overrides": {**SMALL, "epochs": 3, **changes}})
    cell.recipe.to_file(tmp_path / "cell.json")
    return Job(cell, tmp_path / "run"), [str(tmp_path / "cell.json"), str(tmp_path / "run"), "", "cpu"]


def test_a_network_that_does_not_converge_is_a_result_and_not_trained_again(tmp_path, capsys):
    job, command = diverging(tmp_path, **{"optimizer.name": "sgd", "optimizer.lr": 1e30})
    assert cell_main(command) == 0
    assert "did not converge: the loss is not finite at step" in capsys.readouterr().out
    tree = json.loads((job.folder / "record.json").read_text())
    assert (tree["status"], tree["results"]) == ("diverged", {})
    assert tree["failure"]["step"] >= 1
    assert tree["failure"]["where"]
    assert job.is_done
    assert job.diverged
    assert told(End(job), 1, 1).endswith("did not converge")
    summary = summarize([job], [])
    assert (summary["done"], summary["results"][0]["diverged"]) == (1, [0])
    assert "N/C" in table(summary)
    assert main(["resume", str(job.folder), "--accelerator", "cpu"]) == 1
    assert "is not finite at step" in capsys.readouterr().err
    assert main(["evaluate", str(job.folder), "--accelerator", "cpu"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_what_begins_with_a_network_that_did_not_converge_is_refused(tmp_path, capsys):
    job, command = diverging(tmp_path, **{"optimizer.name": "sgd", "optimizer.lr": 1e30})
    assert cell_main(command) == 0
    (tmp_path / "next").mkdir()
    _, command = diverging(tmp_path / "next", **{"start.weights": str(job.folder)})
    assert cell_main(command) == 2
    assert "did not converge" in capsys.readouterr().err


def test_a_training_that_fails_outside_a_cell_leaves_no_record(tmp_path, capsys):
    fast = ["--optimizer.name=sgd", "--optimizer.lr=1e30", "--epochs=1", "--data.train_size=100"]
    assert main(["train", "digits", *fast, "--accelerator=cpu", "--out", str(tmp_path / "run")]) == 1
    assert "is not finite at step" in capsys.readouterr().err
    assert not (tmp_path / "run" / "record.json").exists()


def test_a_record_that_cannot_be_read_is_refused_with_what_would_do(tmp_path, capsys):
    job, command = diverging(tmp_path, epochs=1)
    job.folder.mkdir()
    (job.folder / "record.json").write_text("{")
    assert cell_main(command) == 2
    error = capsys.readouterr().err
    assert f"{job.folder / 'record.json'}: is not valid JSON" in error
    assert "remove it, and the run goes on from its last checkpoint" in error
    assert (job.folder / "record.json").read_text() == "{"


def test_training_removes_what_a_killed_one_left_of_a_checkpoint(tmp_path):
    job, command = diverging(tmp_path, epochs=1)
    torn = job.folder / "checkpoints" / ".step-000000002.safetensors.abc.tmp"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    assert cell_main(command) == 0
    assert not torn.exists()


def test_a_second_interruption_while_cells_save_themselves_is_not_heard():
    with shielded():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
