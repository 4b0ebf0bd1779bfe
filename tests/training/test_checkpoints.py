"""Checkpoints: whole or not there, resumed to the bit, damaged ones recognized."""

import errno
import json
import os
import pickle
import signal
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import DECOUPLED, Heard, losses, noise, run, same, small, weights

from hyperball.files import FileError
from hyperball.training import CheckpointError, Interrupted, evaluate, load_model, loop, read_metrics, resume
from hyperball.training.process.interrupts import resume_command
from hyperball.training.storage import checkpoint as checkpoints
from hyperball.training.storage.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, saved_steps
from hyperball.training.storage.folder import held
from hyperball.training.storage.state import changes as environment_changes
from hyperball.training.update.step import Step

RESUMED: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.nesterov": True},
    "averaged": {"regularizers.ema": 0.9, "data.crop": "zero", "data.pad": 1},
    "projected": {**DECOUPLED, "projection.every": 5, "optimizer.radius_lr": 0.1},
    "plateau": {"schedule.name": "plateau", "schedule.patience": 0, "optimizer.lr": 0.5},
    "homotopy": {**DECOUPLED, "homotopy.steps": 9},
    "attacked": {"adversarial.method": "fast", "adversarial.epsilon": 0.1},
    "dropout": {
        "data.name": "clouds",
        "data.points": 16,
        "model.name": "pointnet",
        "data.train_size": 48,
        "batch_size": 8,
    },
}


class Crash(Exception):
    """Stands for anything that ends a process at once."""


def crash_at(step: int) -> Heard:
    def act(report: Any) -> None:
        if report.step == step:
            raise Crash

    return Heard(act)


def test_saving_often_takes_no_time_of_the_steps_and_gives_none_away(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    whole_step = Step.__call__

    def step(self: Step, *place: int) -> None:
        whole_step(self, *place)
        now[0] += 1.0

    monkeypatch.setattr(Step, "__call__", step)
    monkeypatch.setattr(loop, "save_checkpoint", lambda *_: now.__setitem__(0, now[0] + 100.0))
    changes = {"log.checkpoint_steps": 1, "log.every": 1000, "log.evaluate_every": 100}
    record = run(tmp_path / "run", changes)
    steps = record.conditions["steps"]
    assert record.timing["training_seconds"] == steps - 1  # the first one compiles
    assert record.timing["images_per_second"] == record.conditions["batch_size"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_was_cut_off_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    changes = {**RESUMED[name], "log.checkpoint_steps": 4}
    run(tmp_path / "whole", changes)
    with pytest.raises(Crash):
        run(tmp_path / "cut", changes, progress=crash_at(11))
    heard = Heard()
    record = resume(tmp_path / "cut", accelerator="cpu", progress=heard)
    assert record.notes == ["resumed at step 8"]
    assert heard.of("started")[0].step == 8
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def test_a_report_over_an_interval_that_was_cut_is_that_of_the_whole_run(tmp_path: Path) -> None:
    changes = {"log.every": 5, "log.checkpoint_steps": 4}
    run(tmp_path / "whole", changes)
    with pytest.raises(Crash):
        run(tmp_path / "cut", changes, progress=crash_at(10))
    assert resume(tmp_path / "cut", accelerator="cpu").notes == ["resumed at step 8"]
    reports = [
        [(line["step"], line["loss"], line["accuracy"]) for line in read_metrics(tmp_path / name / "metrics.jsonl")
         if line["kind"] == "train"]
        for name in ("whole", "cut")
    ]  # fmt: skip
    assert reports[0] == reports[1]
    assert 10 in [step for step, _, _ in reports[0]]


def test_results_of_before_are_remembered(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Crash):
        run(tmp_path / "cut", progress=crash_at(9))
    assert resume(tmp_path / "cut", accelerator="cpu").results == whole.results


def test_a_torn_last_line_of_the_metrics_is_no_line(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(tmp_path, progress=crash_at(9))
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "train", "step": 10, "lo')
    assert read_metrics(path)[-1]["step"] == 9
    resume(tmp_path, accelerator="cpu")
    assert len(losses(tmp_path)) == 12


BROKEN_LINES = {
    "no JSON": (b'{"kind": "tra\n', "line 2 is damaged"),
    "bytes": (b"\xff\xfe\n", "line 2 is damaged"),
    "no step": (b'{"kind": "train"}\n', "line 2 must be an object with `kind` and `step`"),
    "a number": (b"3\n", "line 2 must be an object with `kind` and `step`"),
    "nested": (b"[" * 100_000 + b"\n", "line 2 is damaged"),
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_of_the_metrics_is_named(name: str, trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    (folder / "record.json").unlink()
    path = folder / "metrics.jsonl"
    line, message = BROKEN_LINES[name]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], line, *lines[2:]]))
    with pytest.raises(FileError, match=message) as caught:
        resume(folder, accelerator="cpu")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("results", [{}, [], {"last": None}, {"last": {"step": 1}}], ids=str)
def test_a_record_without_results_is_named(results: Any, trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    tree = json.loads((folder / "record.json").read_text())
    (folder / "record.json").write_text(json.dumps({**tree, "results": results}))
    with pytest.raises(FileError, match=r"record\.json: `results\.last` must hold an evaluation's metrics"):
        resume(folder, accelerator="cpu")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    def act(report: Any) -> None:
        if report.step == 3:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    folder = tmp_path / "a run"
    with pytest.raises(Interrupted) as caught:
        run(folder, progress=Heard(act))
    assert caught.value.command == f"hyperball resume '{folder}' --accelerator=cpu"
    assert str(caught.value) == f"stopped by {number.name}, saved at step 3; resume with: {caught.value.command}"
    assert saved_steps(folder / "checkpoints") == [3]
    assert signal.getsignal(number) == before
    run(tmp_path / "whole")
    resume(folder, accelerator="cpu")
    assert same(weights(tmp_path / "whole"), weights(folder))


@pytest.mark.parametrize(
    "place, expected",
    [
        ((None, "auto", "auto"), "hyperball resume runs/a"),
        (("my data", "cpu", 2), "hyperball resume runs/a '--data-root=my data' --accelerator=cpu --devices=2"),
    ],
)
def test_the_resume_command_repeats_what_was_said_of_the_place(place: Any, expected: str) -> None:
    assert resume_command(Path("runs/a"), *place) == expected


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = {
    "a changed byte of a tensor": (".safetensors", lambda path: flip(path, -5), "its SHA-256 is not the one"),
    "a changed byte of the header": (".safetensors", lambda path: flip(path, 12), "its SHA-256 is not the one"),
    "truncated tensors": (".safetensors", cut, "bytes, must have"),
    "missing tensors": (".safetensors", Path.unlink, "cannot be read"),
    "truncated JSON": (".json", cut, "is not a checkpoint's JSON"),
    "a changed step": (".json", lambda path: replace(path, '"step": 12', '"step": 13'), "its checksum does not fit"),
    "no JSON at all": (".json", lambda path: path.write_bytes(b"\x80\x04"), "is not a checkpoint's JSON"),
    "a list": (".json", lambda path: path.write_text("[]"), "is not a checkpoint's JSON"),
    "a pickle": (".safetensors", lambda path: path.write_bytes(pickle.dumps({"a": 1})), "bytes, must have"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder)
    return folder


def copied(source: Path, target: Path) -> Path:
    import shutil

    return Path(shutil.copytree(source, target))


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(name: str, trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    whole = weights(folder)
    suffix, damage, message = DAMAGES[name]
    damage(folder / "checkpoints" / f"step-000000012{suffix}")
    (folder / "record.json").unlink()
    record = resume(folder, accelerator="cpu")
    note = record.notes[1]
    assert message in note
    assert note.endswith("using the checkpoint of step 6")
    assert same(whole, weights(folder))


def test_without_a_whole_checkpoint_there_is_one_clear_line(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    for path in (folder / "checkpoints").glob("*.safetensors"):
        flip(path, -1)
    (folder / "record.json").unlink()
    for act in (lambda: resume(folder, accelerator="cpu"), lambda: load_model(folder)):
        with pytest.raises(CheckpointError, match="there is no whole checkpoint to resume from") as caught:
            act()
        assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_named_as_such(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is of another model: it") as caught:
        run(tmp_path / "other", {"model.options": {"width": 4}, "start.weights": str(trained)})
    assert "must be [4" in str(caught.value)
    other = run(tmp_path / "decoupled", {**DECOUPLED, "epochs": 1})
    assert other.status == "finished"
    with pytest.raises(CheckpointError, match=r"it has unknown .*magnitude"):
        run(tmp_path / "plain", {"start.weights": str(tmp_path / "decoupled")})


def test_another_set_does_not_resume_a_run(tmp_path: Path) -> None:
    whole = {"data.train_size": None, "data.test_size": None}
    run(tmp_path / "run", whole, dataset=noise(96))
    (tmp_path / "run" / "record.json").unlink()
    with pytest.raises(CheckpointError, match="counts 3 steps an epoch, but the set here gives 2"):
        resume(tmp_path / "run", dataset=noise(64), accelerator="cpu")


@pytest.mark.parametrize("act", [resume, evaluate, load_model])
def test_a_checkpoint_of_another_recipe_is_refused(act: Any, trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    (folder / "record.json").unlink()
    small({"optimizer.lr": 1e-3}).to_file(folder / "recipe.json")
    with pytest.raises(CheckpointError, match=r"is of another recipe: `optimizer\.lr` is 0\.01 there and 0\.001 here"):
        act(folder)


def test_a_resumed_run_may_log_otherwise(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    (folder / "record.json").unlink()
    assert run(folder, {"log.every": 3}, resume=True).status == "finished"


def test_a_run_without_its_checkpoints_begins_anew_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        run(tmp_path, progress=crash_at(3))
    record = resume(tmp_path, accelerator="cpu")
    assert record.notes == ["there was no checkpoint to resume from; begun anew"]
    assert len(losses(tmp_path)) == 12


@pytest.mark.parametrize("again", [True, False], ids=["resumed", "begun"])
def test_checkpoints_without_a_recipe_are_not_built_on(again: bool, trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    for name in ("record.json", "recipe.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"holds checkpoints but no recipe\.json"):
        run(folder, resume=again)


def test_weights_of_a_plain_network_are_no_decoupled_one(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path / "run")
    small(DECOUPLED).to_file(folder / "recipe.json")
    held, _ = load_checkpoint(folder / "checkpoints")
    save_checkpoint(folder / "checkpoints", replaced(held, info={**held.info, "recipe": small(DECOUPLED).to_dict()}))
    for act in (load_model, lambda place: evaluate(place, accelerator="cpu")):
        with pytest.raises(CheckpointError, match=r"is of another model: it lacks .*magnitude"):
            act(folder)


def test_a_folder_takes_one_training_at_a_time(tmp_path: Path) -> None:
    refused: list[str] = []

    def act(report: Any) -> None:
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path, {"epochs": 1}, resume=True)
        refused.append(str(caught.value))

    run(tmp_path, {"epochs": 1}, progress=Heard(lambda report: act(report) if report.step == 2 else None))
    assert len(refused) == 1
    assert "another process is training into" in refused[0]
    assert not (tmp_path / ".training.lock").exists()


def test_workers_of_a_killed_training_do_not_hold_its_folder(tmp_path: Path) -> None:
    with held(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with held(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("act", [resume, evaluate, load_model])
def test_a_folder_without_a_run_is_named(act: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no run: there is no recipe\.json in it"):
        act(tmp_path)


@pytest.mark.parametrize("file", ["safetensors", "json"])
def test_a_full_disk_leaves_the_previous_checkpoint(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = checkpoints.write_bytes

    def full(path: Path, content: bytes) -> None:
        if path.name == f"step-000000012.{file}":
            (path.parent / f".{path.name}.partial.tmp").unlink(missing_ok=True)
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_bytes", full)
        with pytest.raises(CheckpointError, match=r"No space left.*the checkpoint of step 6 is untouched"):
            run(tmp_path / "full")
    resume(tmp_path / "full", accelerator="cpu")
    run(tmp_path / "whole")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "full"))


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    big = Checkpoint(2, {}, {"model": {"w": torch.zeros(100_000)}})
    save_checkpoint(tmp_path, Checkpoint(1, {}, {"model": {"w": torch.zeros(10)}}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*the checkpoint of step 1 is untouched"):
            save_checkpoint(tmp_path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001.json", "step-000000001.safetensors"]
    assert load_checkpoint(tmp_path)[0].step == 1


def test_a_checkpoint_gives_back_every_tensor(tmp_path: Path) -> None:
    tensors = {
        "bits": torch.tensor([1, -2], dtype=torch.int64), "half": torch.randn(3).bfloat16(),
        "strided": torch.randn(4, 5).t(), "scalar": torch.tensor(2.5, dtype=torch.float64), "empty": torch.zeros(0, 3),
    }  # fmt: skip
    save_checkpoint(tmp_path, Checkpoint(3, {"a": [1, None, 0.1]}, {"model": tensors}))
    found, notes = load_checkpoint(tmp_path)
    assert same(found.tensors["model"], tensors)
    assert (found.step, found.info, notes) == (3, {"a": [1, None, 0.1]}, [])


def test_what_differs_on_other_devices_is_said() -> None:
    before = {"devices": 2, "device": "cpu", "versions": {"torch": "2.8"}}
    assert environment_changes(before, before) == []
    found = environment_changes(before, {"devices": 1, "device": "gpu", "versions": {"torch": "2.9"}})
    assert "resumed on 1 device(s), saved on 2" in found[0]
    assert "another device" in found[1]
    assert "another versions (torch)" in found[2]
