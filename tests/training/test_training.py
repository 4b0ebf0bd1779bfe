"""Training end to end on small sets: what a run does and what it writes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import DECOUPLED, PER_EPOCH, Heard, losses, noise, run, same, small, weights

from hyperball.nn.decoupled import Decoupled
from hyperball.training import (
    Recipe,
    Record,
    evaluate,
    load_model,
    read_metrics,
)
from hyperball.training.network import Network, build_network


def test_a_small_network_learns_digits(tmp_path: Path) -> None:
    record = run(tmp_path / "run", {"epochs": 4, "data.train_size": 960, "data.test_size": 200})
    assert record.results["last"]["top1"] > 0.9
    assert record.results["first_epoch"]["top1"] < record.results["best"]["top1"]


def test_a_run_leaves_recipe_metrics_record_and_two_checkpoints(tmp_path: Path) -> None:
    record = run(tmp_path, {**DECOUPLED, "optimizer.radius_lr": 0.1})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints", "metrics.jsonl", "recipe.json", "record.json",
    ]  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-000000006.json", "step-000000006.safetensors", "step-000000012.json", "step-000000012.safetensors",
    ]  # fmt: skip
    assert Recipe.from_file(tmp_path / "recipe.json") == small({**DECOUPLED, "optimizer.radius_lr": 0.1})
    assert Record.read(tmp_path) == record
    lines = read_metrics(tmp_path / "metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, 13))
    assert {"loss", "accuracy", "lr", "radius_lr", "epoch", "images_per_second"} <= trained[0].keys()
    evaluated = [line for line in lines if line["kind"] == "evaluation"]
    assert [line["epoch"] for line in evaluated] == [1.0, 2.0]
    layers = [name for name, part in load_model(tmp_path).model.named_modules() if isinstance(part, Decoupled)]
    assert list(evaluated[0]["radii"]) == layers
    assert evaluated[0]["radii"] != evaluated[1]["radii"]


def test_a_record_carries_conditions_and_reasons(tmp_path: Path) -> None:
    record = run(tmp_path).to_dict()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["status"] == "finished"
    assert {"top1", "top5", "loss", "ece", "map_raw", "map_softmax", "map6_raw", "epoch"} <= record["results"][
        "last"
    ].keys()
    assert {"torch", "python", "numpy"} <= record["environment"]["versions"].keys()
    assert record["conditions"]["seed"] == 0
    assert record["conditions"]["test_samples"] == 50
    assert record["timing"]["images_per_second"] > 0
    assert record["timing"]["peak_memory_bytes"] > 1e6
    assert not record["engine"]["captured"]
    assert record["engine"]["captured_why"] == "CUDA graphs need a CUDA device"


def test_a_seed_determines_a_run(tmp_path: Path) -> None:
    for name, seed in {"first": 0, "again": 0, "other": 1}.items():
        run(tmp_path / name, {"seed": seed, "data.crop": "zero", "data.pad": 1})
        torch.randn(3)  # what the process drew before must not matter
    assert losses(tmp_path / "first") == losses(tmp_path / "again")
    assert same(weights(tmp_path / "first"), weights(tmp_path / "again"))
    assert losses(tmp_path / "first") != losses(tmp_path / "other")


FEATURES: dict[str, dict[str, Any]] = {
    "label smoothing": {"regularizers.label_smoothing": 0.1},
    "clipping": {"regularizers.clip_norm": 1e-3, "optimizer.name": "sgd"},
    "orthogonality": {**DECOUPLED, "regularizers.orthogonality": 1.0},
    "weighted gradients": {**DECOUPLED, "regularizers.weighted_gradients": "grad", "optimizer.name": "sgd"},
    "weighted updates": {**DECOUPLED, "regularizers.weighted_gradients": "update"},
    "weight projection": {**DECOUPLED, "projection.every": 2},
    "radius rate": {**DECOUPLED, "optimizer.radius_lr": 0.5},
    "weight decay": {"optimizer.weight_decay": 0.5},
    "adamw": {"optimizer.name": "adamw", "optimizer.weight_decay": 0.5},
    "nesterov": {"optimizer.name": "sgd", "optimizer.nesterov": True},
    "cosine": {"schedule.name": "cosine"},
    "warmup": {"schedule.warmup": 0.5},
    "crop": {"data.crop": "mirror", "data.pad": 2},
    "fgsm": {"adversarial.method": "fgsm", "adversarial.epsilon": 0.1},
    "fast fgsm": {"adversarial.method": "fast", "adversarial.epsilon": 0.1, "adversarial.share": 0.5},
    "pgd": {"adversarial.method": "pgd", "adversarial.epsilon": 0.1, "adversarial.iterations": 2},
    "trades": {"adversarial.method": "trades", "adversarial.epsilon": 0.1, "adversarial.iterations": 2},
    "homotopy": {**DECOUPLED, "homotopy.steps": 4},
    "bf16": {"precision": "bf16"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_changes_the_losses(name: str, tmp_path: Path) -> None:
    changes = FEATURES[name]
    base = {key: value for key, value in changes.items() if key in ("model.magnitude", "optimizer.name")}
    if name in ("adamw", "nesterov"):
        base = {}
    run(tmp_path / "with", {**changes, "epochs": 1})
    run(tmp_path / "without", {**base, "epochs": 1})
    found = losses(tmp_path / "with")
    assert all(math.isfinite(loss) for loss in found)
    assert found != losses(tmp_path / "without")


def test_weight_projection_acts_every_so_many_steps(tmp_path: Path) -> None:
    run(tmp_path, {**DECOUPLED, "projection.every": PER_EPOCH, "projection.scale": 2.0})
    layers = [part for part in load_model(tmp_path).model.modules() if isinstance(part, Decoupled)]
    for layer in layers:
        torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.full((len(layer.weight),), 2.0))


def test_an_average_is_what_is_evaluated_and_loaded(tmp_path: Path) -> None:
    record = run(tmp_path, {"regularizers.ema": 0.9})
    assert record.conditions["weights"] == "moving average of the iterates"
    assert evaluate(tmp_path, accelerator="cpu").loss == pytest.approx(record.results["last"]["loss"])
    assert evaluate(tmp_path, accelerator="cpu", average=False).loss != pytest.approx(record.results["last"]["loss"])


def test_an_evaluation_repeats_the_records_numbers(tmp_path: Path) -> None:
    record = run(tmp_path, DECOUPLED)
    found = evaluate(tmp_path, accelerator="cpu").as_dict()
    assert {key: record.results["last"][key] for key in found} == found


def test_a_homotopy_starts_plain_and_ends_decoupled(tmp_path: Path) -> None:
    record = run(tmp_path, {**DECOUPLED, "homotopy.steps": 8})
    network = load_model(tmp_path)
    assert any(isinstance(part, Decoupled) for part in network.modules())
    assert not any(part._forward_hooks for part in network.modules())
    assert evaluate(tmp_path, accelerator="cpu").top1 == record.results["last"]["top1"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_decoupled_run_starts_from_plain_weights(kind: str, tmp_path: Path) -> None:
    run(tmp_path / "plain", {"epochs": 4})
    start = tmp_path / "plain"
    if kind == "file":
        from safetensors.torch import save_file

        start = tmp_path / "plain.safetensors"
        save_file(load_model(tmp_path / "plain").model.state_dict(), start)
    decoupled = {"model.magnitude": "linear", "model.weighting": "linear", "optimizer.lr": 1e-9, "epochs": 1}
    decoupled |= {"model.options": {"norm_momentum": 0.0}, "start.statistics": "torch"}  # they stay the pretrained ones
    record = run(tmp_path / "decoupled", {**decoupled, "start.weights": str(start)})
    plain = Record.read(tmp_path / "plain").results["last"]
    assert record.results["last"]["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_a_run_shorter_than_an_epoch_has_no_result_of_one(tmp_path: Path) -> None:
    record = run(tmp_path, {"epochs": None, "steps": 2})
    assert record.results["first_epoch"] is None
    assert record.results["last"]["step"] == 2


def test_progress_hears_of_everything_in_order(tmp_path: Path) -> None:
    heard = Heard()
    run(tmp_path, progress=heard)
    names = [name for name, _ in heard.calls]
    epoch = ["trained"] * PER_EPOCH + ["evaluated"]
    assert names == ["started", *epoch, *epoch, "finished"]
    assert heard.of("started")[0].total_steps == 12
    assert [report.step for report in heard.of("trained")] == list(range(1, 13))
    assert heard.of("finished")[0]["status"] == "finished"


def test_losses_are_means_over_the_steps_since_the_last_report(tmp_path: Path) -> None:
    run(tmp_path / "each")
    run(tmp_path / "third", {"log.every": 3})
    each, third = losses(tmp_path / "each"), losses(tmp_path / "third")
    assert third == pytest.approx([sum(each[i : i + 3]) / 3 for i in range(0, 12, 3)])


def test_a_run_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    run(tmp_path, {"epochs": 1})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_normalization_is_inside_of_the_network() -> None:
    network, _ = build_network(small(), noise())
    x = torch.rand(2, 1, 8, 8)
    network.eval()
    torch.testing.assert_close(network(x), network.model((x - 0.5) / (128 / 255)))
    assert set(Network(torch.nn.Identity()).state_dict()) == set()


LINEAR = {"model.magnitude": "linear"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [DECOUPLED, LINEAR, {**LINEAR, "adversarial.method": "fgsm", "adversarial.epsilon": 0.1}],
    ids=["tanh", "linear", "linear, attacked"],
)
def test_a_compiled_run_on_a_cpu_stays_near_the_eager_one(operator: dict[str, Any], tmp_path: Path) -> None:
    changes = {**operator, "epochs": 1}
    record = run(tmp_path / "compiled", {**changes, "engine.compile": True})
    run(tmp_path / "eager", changes)
    assert record.engine["compiled"], record.engine
    assert "errors of gradients: compiled" in record.engine["compiled_why"]
    assert losses(tmp_path / "compiled")[:3] == pytest.approx(losses(tmp_path / "eager")[:3], rel=1e-4)
    ours, theirs = weights(tmp_path / "compiled"), weights(tmp_path / "eager")
    counts = [key for key in theirs if key.endswith("num_batches_tracked")]
    assert counts
    assert all(torch.equal(ours[key], theirs[key]) for key in counts)


@pytest.mark.slow
def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, {**DECOUPLED, "epochs": 1, "log.tensorboard": True})
    assert list((tmp_path / "tensorboard").rglob("events.out.tfevents.*"))
