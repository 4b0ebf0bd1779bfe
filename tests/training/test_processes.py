"""Training in processes of its own: killed and resumed, stopped by a signal, and spread over two processes."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from data_files import write_folder
from places import SOURCE
from training_cases import losses, same, weights

from hyperball.training import Recipe, Record, read_metrics, resume, train

SCRIPT = """
    import sys
    import torch
    from hyperball.training import Interrupted, Recipe, train

    torch.set_num_threads(1)
    for folder, changes in eval(sys.argv[1]):
        try:
            train(Recipe().override(changes), folder, accelerator="cpu")
        except Interrupted as stop:
            sys.exit(str(stop))
"""
FLOAT64 = """
    import os, sys, torch
    from pathlib import Path
    import torch.nn.functional as F
    import torch.distributed as dist
    import hyperball as hb
    from hyperball import data
    from hyperball.training.process.distributed import synchronize

    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    network = hb.models.create("digits", 10, magnitude="tanh").double()
    trained = network
    if world > 1:
        dist.init_process_group("gloo")
        synchronize(network, torch.device("cpu"))
        trained = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    samples, generator, losses = data.load("digits").train, torch.Generator().manual_seed(1), []
    for _ in range(60):
        index = torch.randint(len(samples), (16,), generator=generator).chunk(world)[rank]
        loss = F.cross_entropy(trained(samples.inputs[index].double() / 255), samples.labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / world)
        if world > 1:
            dist.all_reduce(losses[-1])
    if rank == 0:
        Path(sys.argv[1]).write_text(" ".join(repr(float(loss)) for loss in losses))
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads may still drop a tensor, which aborts an interpreter that is shutting down
"""
CHANGES = {
    "epochs": 2, "batch_size": 32, "data.train_size": 320, "data.test_size": 50, "data.crop": "zero", "data.pad": 1,
    "deterministic": True, "log.every": 1, "log.checkpoint_steps": 3, "optimizer.name": "sgd", "optimizer.lr": 0.05,
}  # fmt: skip
PAIR: dict[str, dict[str, object]] = {
    "plain": {},
    "robust": {"model.norm": "robust"},
    "decoupled": {"model.magnitude": "tanh", "regularizers.clip_norm": 1.0, "regularizers.ema": 0.9},
}
STEPS = 20
ALONE = [sys.executable]
IN_TWO = [*ALONE, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def start(command: list[str], script: Path, argument: str) -> "subprocess.Popen[str]":
    root = SOURCE
    settings = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*command, str(script), argument],
        env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def run_to_the_end(command: list[str], script: Path, argument: str) -> None:
    """Wait for a script; no process of it outlives the test."""
    process = start(command, script, argument)
    try:
        _, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors


def wait_for_step(process: "subprocess.Popen[str]", folder: Path, step: int) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        lines = read_metrics(folder / "metrics.jsonl")
        if lines and lines[-1]["step"] >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)
    raise AssertionError("the run did not get that far")


def test_a_killed_run_resumes_to_the_same_bits(script: Path, tmp_path: Path) -> None:
    changes: dict[str, object] = {**CHANGES, **PAIR["decoupled"], "epochs": 5}
    folder = tmp_path / "killed"
    process = start(ALONE, script, repr([(str(folder), changes)]))
    wait_for_step(process, folder, 8)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "record.json").exists()
    record = resume(folder, accelerator="cpu")
    assert record.notes[0].startswith("resumed at step ")
    whole = train(Recipe().override(changes), tmp_path / "whole", accelerator="cpu")
    assert same(weights(tmp_path / "whole"), weights(folder))
    assert losses(tmp_path / "whole") == losses(folder)
    assert record.results == whole.results


@pytest.mark.slow
def test_sigterm_ends_a_process_with_the_resume_command(script: Path, tmp_path: Path) -> None:
    process = start(ALONE, script, repr([(str(tmp_path / "run"), {**CHANGES, "epochs": 50})]))
    wait_for_step(process, tmp_path / "run", 2)
    process.terminate()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 1
    assert f"resume with: hyperball resume {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors


def test_two_processes_give_the_losses_of_one_and_can_go_on_in_one(script: Path, tmp_path: Path) -> None:
    recipes = {name: {**CHANGES, **changes} for name, changes in PAIR.items()}
    run_to_the_end(IN_TWO, script, repr([(str(tmp_path / name), changes) for name, changes in recipes.items()]))
    for name, changes in recipes.items():
        two, one = tmp_path / name, tmp_path / f"{name} in one"
        train(Recipe().override(changes), one, accelerator="cpu")
        assert Record.read(two).environment["devices"] == 2
        assert len(losses(two)) == STEPS
        alike = 4 if name == "robust" else STEPS  # float32 rounding grows at a penalty's kink; float64 agrees to 1e-10
        assert losses(two)[:alike] == pytest.approx(losses(one)[:alike], abs=1e-5), name
        if name == "robust":
            continue
        assert evaluation_losses(two) == pytest.approx(evaluation_losses(one), abs=1e-4), name
    check_resumed_in_one(tmp_path / "plain")


def test_in_float64_two_processes_never_leave_one(tmp_path: Path) -> None:
    """In float32 rounding grows once a sample falls on the other side of a kink; this tells it from a mistake."""
    path = tmp_path / "float64.py"
    path.write_text(textwrap.dedent(FLOAT64))
    curves = []
    for command in (ALONE, IN_TWO):
        out = tmp_path / f"{len(command)}.txt"
        run_to_the_end(command, path, str(out))
        curves.append([float(word) for word in out.read_text().split()])
    assert len(curves[0]) == 60
    assert curves[1] == pytest.approx(curves[0], rel=1e-12)


def test_a_streamed_set_gives_two_processes_the_losses_of_one(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPERBALL_DATA", str(write_folder(tmp_path / "images")))
    streamed = {"data.name": "folder", "data.image_size": 8, "data.workers": 1, "data.flip": True, "batch_size": 4}
    whole: dict[str, object] = {"data.train_size": None, "data.test_size": None, "data.crop": None, "data.pad": 4}
    changes = {**CHANGES, **whole, **streamed, "model.magnitude": "tanh", "epochs": 3}
    run_to_the_end(IN_TWO, script, repr([(str(tmp_path / "two"), changes)]))
    train(Recipe().override(changes), tmp_path / "one", accelerator="cpu")
    assert len(losses(tmp_path / "one")) >= 3
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert evaluation_losses(tmp_path / "two") == pytest.approx(evaluation_losses(tmp_path / "one"), abs=1e-4)


def evaluation_losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "evaluation"]


def check_resumed_in_one(folder: Path) -> None:
    """A run of two processes, its end cut off, goes on in one, and says what differs."""
    before = losses(folder)
    (folder / "record.json").unlink()
    for suffix in ("json", "safetensors"):
        (folder / "checkpoints" / f"step-{STEPS:09d}.{suffix}").unlink()
    record = resume(folder, accelerator="cpu")
    assert any("resumed on 1 device(s), saved on 2" in note for note in record.notes)
    assert losses(folder) == pytest.approx(before, abs=1e-5)
