"""Commands that train: from a recipe to a record, stopped and resumed, in one process and in two."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from places import SOURCE

from hyperball.cli import main

pytest.importorskip("jsonargparse")
pytest.importorskip("lightning_fabric")

SMALL = ["--data.train_size=200", "--data.test_size=100", "--epochs=1", "--batch_size=100", "--accelerator=cpu"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run made by `hyperball train`."""
    folder = tmp_path_factory.mktemp("runs") / "tanh"
    assert main(["train", "--out", str(folder), "--model.magnitude=tanh", "--model.options.width=8", *SMALL]) == 0
    return folder


def test_train_writes_a_run_and_says_how_it_went(tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL]) == 0
    text = capsys.readouterr().out
    assert re.search(r"run: \d+\.\d\d % on 100 test samples", text)
    assert "\x1b" not in text
    assert {"recipe.json", "metrics.jsonl", "record.json"} <= {path.name for path in (tmp_path / "run").iterdir()}


def test_options_override_a_file_field_by_field(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("epochs: 7\noptimizer: {lr: 1e-2, name: sgd}\nmodel: {options: {width: 4}}\n")
    arguments = ["--optimizer.lr=0.5", "--model.magnitude=tanh(rho=2)", "--schedule.name=step", "--print_config"]
    more = ["--schedule.milestones=[2,4]", "--model.options.in_channels=1", "--data.crop=null"]
    assert main(["train", str(tmp_path / "recipe.yaml"), *arguments, *more]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)

    from hyperball.training import Recipe

    recipe = Recipe.from_file(tmp_path / "printed.yaml")
    assert (recipe.epochs, recipe.optimizer.name, recipe.optimizer.lr) == (7, "sgd", 0.5)
    assert recipe.model.magnitude == "tanh(rho=2)"
    assert recipe.schedule.milestones == (2.0, 4.0)
    assert recipe.model.options == {"width": 4, "in_channels": 1}


def test_every_recipe_of_the_catalog_is_printed_and_read_again(tmp_path, capsys):
    from hyperball.experiments.catalog import RECIPES
    from hyperball.training import Recipe

    for name, entry in RECIPES.items():
        assert main(["train", name, "--print_config"]) == 0
        (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
        assert Recipe.from_file(tmp_path / "again.yaml") == entry.recipe


def printed(capsys, tmp_path, *arguments):
    """The recipe that `--print_config` prints."""
    from hyperball.training import Recipe

    assert main(["train", *arguments, "--print_config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    return Recipe.from_file(tmp_path / "printed.yaml")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["cifar10", "--epochs=2"], (2, None)),
        (["cifar10", "--steps=7"], (None, 7)),
        (["digits", "--steps=7"], (None, 7)),
        (["cifar10", "--steps=null", "--epochs=2"], (2, None)),
    ],
)
def test_epochs_replace_a_recipes_steps_and_the_other_way_round(arguments, expected, tmp_path, capsys):
    recipe = printed(capsys, tmp_path, *arguments)
    assert (recipe.epochs, recipe.steps) == expected


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--deterministic"], (True, False)),
        (["--deterministic", "--data.flip"], (True, True)),
        (["--data.flip", "digits"], (False, True)),
        (["--data.flip", "true", "--deterministic", "false"], (False, True)),
        (["--data.flip=false", "--deterministic=true"], (True, False)),
    ],
)
def test_a_field_that_is_true_or_false_needs_no_value(arguments, expected, tmp_path, capsys):
    recipe = printed(capsys, tmp_path, *arguments)
    assert (recipe.deterministic, recipe.data.flip) == expected


def test_print_config_leaves_the_recipe_behind_it_alone(capsys):
    for option in ("--print_config", "--print-config"):
        assert main(["train", option, "cifar10"]) == 0
        assert "steps: 42500" in capsys.readouterr().out


def test_help_of_train_lists_every_field(capsys):
    from hyperball.cli.recipes import fields

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in fields())


def test_a_second_run_into_the_same_folder_is_refused(trained, capsys):
    assert main(["train", "--out", str(trained), *SMALL]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_resuming_a_finished_run_changes_nothing(trained, capsys):
    before = (trained / "record.json").read_bytes()
    assert main(["resume", str(trained)]) == 0
    assert (trained / "record.json").read_bytes() == before
    assert "test samples" in capsys.readouterr().out


def test_evaluate_gives_the_numbers_of_the_record(trained, capsys):
    assert main(["evaluate", str(trained), "--json", "--accelerator=cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = json.loads((trained / "record.json").read_text())["results"]["last"]
    assert found["top1"] == last["top1"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert main(["evaluate", str(trained), "--accelerator=cpu"]) == 0
    assert f"{100 * last['top1']:.2f} %" in capsys.readouterr().out


def test_evaluate_takes_other_data_but_no_other_fields(trained, capsys):
    assert main(["evaluate", str(trained), "--data.test_size=50", "--json", "--accelerator=cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 50
    assert main(["evaluate", str(trained), "--epochs=3"]) == 2
    assert "unknown option --epochs" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_evaluate_says_what_is_not_finite(trained, capsys, monkeypatch, missing):
    from hyperball.cli import runs
    from hyperball.training import Metrics

    found = Metrics(100, missing, 0.25, None, missing, 0.1, 0.1, None, nonfinite=7)
    monkeypatch.setattr(runs, "measure", lambda *given, **options: found)
    assert main(["evaluate", str(trained), "--json"]) == 0
    text = capsys.readouterr().out
    assert "NaN" not in text
    tree = json.loads(text)
    assert (tree["loss"], tree["ece"], tree["nonfinite"]) == (None, None, 7)
    assert main(["evaluate", str(trained)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"cross-entropy +not finite", text)
    assert text.endswith("the logits of 7 of 100 samples are not finite\n")


def test_resuming_a_finished_run_without_a_finite_loss_says_so(trained, tmp_path, capsys):
    copy = shutil.copytree(trained, tmp_path / "copy")
    tree = json.loads((copy / "record.json").read_text())
    tree["results"]["last"].update(loss=None, nonfinite=3)
    (copy / "record.json").write_text(json.dumps(tree))
    assert main(["resume", str(copy)]) == 0
    text = capsys.readouterr().out
    assert "loss not finite" in text
    assert "the logits of 3 of 100 samples are not finite" in text


def test_a_damaged_checkpoint_is_a_mistake_in_one_line(trained, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    for path in (copy / "checkpoints").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])
    assert main(["evaluate", str(copy)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "bytes" in errors


@pytest.mark.slow
def test_export_writes_onnx_that_agrees(trained, tmp_path, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert main(["export", str(trained), "--onnx", str(tmp_path / "model.onnx")]) == 0
    gap = re.search(r"differ by (\S+) of", capsys.readouterr().out)
    assert float(gap[1]) < 1e-4


def test_a_loss_that_is_not_finite_ends_with_1_and_names_the_layer(tmp_path, capsys):
    wrong = ["--optimizer.name=sgd", "--optimizer.lr=1e30"]
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL, *wrong]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "not finite at step" in errors
    assert "layer" in errors


def read_one_line_of(command, folder):
    """Start a command, read the first line of its output and close the pipe; its exit code and errors."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hyperball", *command], cwd=folder, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    return process.wait(), errors


def test_training_goes_on_when_nobody_reads_its_output(tmp_path):
    assert read_one_line_of(["train", "--out", "run", *SMALL], tmp_path) == (0, "")
    assert (tmp_path / "run" / "record.json").exists()


@pytest.mark.slow
def test_a_grid_goes_on_when_nobody_reads_its_output(tmp_path):
    overrides = {"data.train_size": 100, "data.test_size": 50, "epochs": 1, "batch_size": 50}
    (tmp_path / "grid.json").write_text(json.dumps({"base": "digits", "overrides": overrides, "seeds": 2}))
    assert read_one_line_of(["grid", "grid.json", "--out", "out", "--accelerator", "cpu"], tmp_path) == (0, "")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["done"] == 2


def test_a_listing_ends_when_nobody_reads_it(tmp_path):
    assert read_one_line_of(["list"], tmp_path) == (0, "")


class FakeRun:
    """What a progress display needs to know of a run."""

    def __init__(self, recipe, folder):
        self.recipe, self.run_dir = recipe, folder
        self.step, self.total_steps, self.steps_per_epoch, self.device, self.parameters = 0, 100, 10, "cpu", 1234


def test_plain_lines_come_at_most_every_few_seconds(tmp_path, monkeypatch):
    from hyperball.cli.progress import Lines
    from hyperball.training import Recipe, TrainReport

    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    said = []
    lines = Lines(said.append, seconds=5.0)
    lines.started(FakeRun(Recipe(), tmp_path))
    for step in range(1, 101):
        lines.trained(TrainReport(step, step / 10, 1.0, 0.5, 1e-3, 10.0))
        clock[0] += 1.0
    lines.noted("resumed")
    assert len(said) == 1 + 20 + 1
    assert said[0].endswith("on cpu")
    assert "step 6/100" in said[2]


@pytest.mark.slow
def test_a_terminal_gets_a_bar_and_a_pipe_gets_plain_lines(tmp_path):
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "hyperball", "train", *SMALL]
    piped = subprocess.run(
        [*command, "--out", "a"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert "\x1b" not in piped.stdout + piped.stderr
    import pty

    master, slave = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen([*command, "--out", "b"], cwd=tmp_path, env=environment, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        shown += part
        if not part:
            break
    assert process.wait() == 0
    assert b"\x1b[" in shown


@pytest.mark.slow
def test_ctrl_c_saves_says_how_to_go_on_and_the_run_ends_as_if_nothing_had_been(tmp_path):
    recipe = ["--data.train_size=1000", "--epochs=12", "--batch_size=20", "--deterministic=true", "--log.every=5"]
    command = [sys.executable, "-m", "hyperball", "train", *recipe, "--accelerator=cpu"]
    process = subprocess.Popen(
        [*command, "--out", "stopped"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors.count("\n") == 1
    assert errors.strip().endswith("resume with: hyperball resume stopped --accelerator=cpu")
    resumed = [sys.executable, "-m", "hyperball", "resume", "stopped", "--accelerator=cpu"]
    subprocess.run(resumed, cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
    subprocess.run([*command, "--out", "whole"], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
    last = [
        json.loads((tmp_path / name / "record.json").read_text())["results"]["last"] for name in ("stopped", "whole")
    ]
    assert last[0] == last[1]


@pytest.mark.slow
def test_torchrun_starts_two_processes_that_speak_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "hyperball",
    ]
    done = subprocess.run(
        [*command, "train", "--out", "two", *SMALL],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test samples") == 1
    record = json.loads((tmp_path / "two" / "record.json").read_text())
    assert record["environment"]["devices"] == 2
