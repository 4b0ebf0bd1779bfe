"""The loop on one GPU: compiled, captured, deterministic."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hyperball import data
from hyperball.training import NonFiniteError, Recipe, evaluate, load_model, read_metrics, train
from hyperball.training.update.step import Step

pytestmark = pytest.mark.gpu

DECOUPLED = {"model.magnitude": "tanh"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoupled": DECOUPLED,
    "sgd, clipped, averaged": {
        "optimizer.name": "sgd", "optimizer.lr": 0.05, "optimizer.nesterov": True, "regularizers.clip_norm": 1.0,
        "regularizers.ema": 0.9,
    },
    "regularized": {
        **DECOUPLED, "regularizers.orthogonality": 1e-4, "projection.every": 3, "optimizer.radius_lr": 1e-2,
        "regularizers.weighted_gradients": "update", "schedule.name": "cosine", "schedule.warmup": 0.5,
    },
    "adversarial": {"adversarial.method": "fast"},
    "parts of images": {"data.crop": "part"},
    "linear, smoothed": {"model.magnitude": "linear", "regularizers.label_smoothing": 0.1},
}  # fmt: skip


def colors() -> data.Dataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(640) % 10
    pixels = torch.randint(256, (640, 3, 32, 32), generator=generator, dtype=torch.uint8)
    pixels[:, 0] = (labels * 25).to(torch.uint8)[:, None, None]
    samples = data.Samples(pixels, labels)
    return data.Dataset("colors", "images", tuple("0123456789"), samples, samples.subset(100))


def recipe(changes: dict[str, Any]) -> Recipe:
    common = {
        "model.name": "cnn9", "data.crop": "mirror", "data.flip": True, "batch_size": 64, "epochs": 2, "log.every": 1,
        "deterministic": True,
    }  # fmt: skip
    return Recipe().override({**common, **changes})


def losses(folder: Path, changes: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    record = train(recipe(changes), folder, dataset=colors())
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"], record.engine


@pytest.mark.parametrize("name", VARIANTS)
def test_a_captured_step_is_the_eager_step(name: str, tmp_path: Path) -> None:
    changes = {**VARIANTS[name], "engine.compile": False}
    eager, _ = losses(tmp_path / "eager", {**changes, "engine.capture": False})
    captured, engine = losses(tmp_path / "captured", changes)
    assert engine["captured"], engine
    assert captured == eager


@pytest.mark.parametrize("name", ["plain", "adversarial"])
def test_a_step_that_cannot_be_captured_goes_on_eagerly(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**VARIANTS[name], "engine.compile": False, "epochs": 1}
    eager, _ = losses(tmp_path / "eager", {**changes, "engine.capture": False})
    plain = Step.body

    def body(self: Step) -> None:
        plain(self)
        if torch.cuda.is_current_stream_capturing():
            float(self.ledger.sums.sum())  # reads back from the device, which no graph can

    monkeypatch.setattr(Step, "body", body)
    found, engine = losses(tmp_path / "found", changes)
    assert not engine["captured"]
    assert "cannot be captured" in engine["captured_why"]
    assert found == eager


@pytest.mark.parametrize("name", ["plain", "decoupled", "linear, smoothed"])
def test_a_compiled_and_captured_run_stays_near_the_eager_one(name: str, tmp_path: Path) -> None:
    eager, _ = losses(tmp_path / "eager", {**VARIANTS[name], "engine.capture": False, "engine.compile": False})
    ours, engine = losses(tmp_path / "ours", {**VARIANTS[name], "engine.compile": True})
    assert engine["compiled"], engine
    assert engine["captured"], engine
    # Adam's first steps have the size of the learning rate whatever the gradient's, so rounding grows with the steps.
    torch.testing.assert_close(torch.tensor(ours[:2]), torch.tensor(eager[:2]), rtol=1e-3, atol=1e-3)
    assert abs(ours[-1] - eager[-1]) < 0.2


def test_a_captured_run_resumes_to_the_bit(tmp_path: Path) -> None:
    changes = {**DECOUPLED, "engine.compile": False, "log.checkpoint_steps": 7, "regularizers.ema": 0.9}
    train(recipe(changes), tmp_path / "whole", dataset=colors())
    folder = tmp_path / "broken"
    train(recipe(changes), folder, dataset=colors())
    (folder / "record.json").unlink()
    latest = sorted((folder / "checkpoints").glob("*.json"))[-1]
    latest.unlink()
    record = train(recipe(changes), folder, dataset=colors(), resume=True)
    assert "resumed" in record.notes[0]
    whole, resumed = (load_model(path, dataset=colors()).state_dict() for path in (tmp_path / "whole", folder))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("capture", [False, True])
def test_a_loss_that_is_not_finite_names_step_and_layer(capture: bool, tmp_path: Path) -> None:
    changes = {"optimizer.lr": 1e18, "optimizer.name": "sgd", "model.norm": "none", "engine.compile": False}
    with pytest.raises(NonFiniteError, match=r"at step \d+; first in (layer|the parameter)"):
        losses(tmp_path / "run", {**changes, "engine.capture": capture, "log.every": 5})


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_every_precision_learns(precision: str, tmp_path: Path) -> None:
    curve, engine = losses(
        tmp_path / "run", {"precision": precision, "engine.compile": False, "deterministic": False, "epochs": 4}
    )
    assert curve[-1] < curve[0] / 2
    assert engine["captured"] == (precision != "fp16")


def test_a_captured_test_sees_the_inputs_of_each_condition(tmp_path: Path) -> None:
    """A graph reads memory at fixed addresses, into which the inputs of conditions are copied."""
    clouds = Recipe().override({
        "data.name": "clouds", "data.train_size": 160, "data.test_size": 60, "data.points": 64, "model.name": "points",
        "model.pool": "huber", "batch_size": 32, "epochs": 3, "optimizer.lr": 0.02,
        "log.conditions": {"half": {"outliers": 0.5}, "few": {"outliers": 0.1}},
    })  # fmt: skip
    record = train(clouds, tmp_path)
    assert record.engine["evaluation_captured"], record.engine
    for name, changes in clouds.log.conditions.items():
        alone = evaluate(tmp_path, data=clouds.data.override(changes))
        assert record.results["conditions"][name]["last"]["top1"] == pytest.approx(alone.top1, abs=0.02)
        assert record.results["conditions"][name]["last"]["loss"] == pytest.approx(alone.loss, rel=1e-3)
    assert record.results["last"]["loss"] == pytest.approx(evaluate(tmp_path).loss, rel=1e-3)


@pytest.mark.parametrize("name", ["plain", "decoupled"])
def test_tests_with_fresh_statistics_change_nothing_of_a_captured_training(name: str, tmp_path: Path) -> None:
    """Their passes are eager, between replays of graphs that read and write the same running means."""
    fresh = {**VARIANTS[name], "engine.compile": False, "log.conditions": {"fresh": {"statistics": 4}}}
    without, _ = losses(tmp_path / "without", {**fresh, "log.conditions": {}})
    captured, engine = losses(tmp_path / "captured", fresh)
    eager = train(recipe({**fresh, "engine.capture": False}), tmp_path / "eager", dataset=colors()).results
    assert engine["captured"], engine
    assert captured == without
    lines = [line for line in read_metrics(tmp_path / "captured" / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert lines[-1]["conditions"]["fresh"] == pytest.approx(eager["conditions"]["fresh"]["last"]["top1"], abs=0.02)
