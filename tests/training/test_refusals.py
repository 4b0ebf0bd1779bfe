"""What a run refuses before it begins, and what stops it on its way."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import DECOUPLED, run, small

from hyperball import data
from hyperball.training import DataConfig, NonFiniteError, Recipe, RecipeError, read_metrics, resume, train
from hyperball.training.sets import load_set

REFUSED = [
    ({"data.name": "digit"}, "did you mean 'digits'?"),
    ({"model.name": "digitz"}, "did you mean 'digits'?"),
    ({"model.options": {"widht": 3}}, "did you mean 'width'?"),
    ({"model.name": "cnn9"}, "`model.name` 'cnn9' does not take samples of 1x8x8"),
    ({"data.outliers": 0.1}, "`data.outliers` is for points, got 0.1 for the images of digits"),
    ({"data.name": "clouds", "data.flip": True}, "`data.flip` is for images"),
    (
        {"data.name": "clouds", "model.name": "points", "adversarial.method": "pgd"},
        "`adversarial.method` is for images",
    ),
    ({"batch_size": 200}, "`batch_size` must be at most the 192 samples of digits, got 200"),
    ({"precision": "fp16"}, '`precision` must be "fp32" or "bf16" on a CPU'),
    ({"engine.capture": True}, "`engine.capture` must be false or null here"),
    ({"schedule.warmup": 3.0}, "`schedule.warmup` must be shorter"),
    ({**DECOUPLED, "homotopy.steps": 13}, "`homotopy.steps` must be at most the 12 steps of the run, got 13"),
    ({"data.train_size": 9999}, "`data.train_size` must be at most the 1437 samples of digits, got 9999"),
    ({"data.test_size": 9999}, "`data.test_size` must be at most the 360 samples of digits, got 9999"),
    ({"data.crop": "zero", "data.pad": 20}, "`data.pad` must be at most the 8 pixels of an image's side of digits"),
    ({"data.cutout": 9}, "`data.cutout` must be at most the 8 pixels of an image's side of digits, got 9"),
    ({"data.name": "clouds", "data.points": 999}, "`data.points` must be at most the 256 points of a cloud of clouds"),
    (
        {"data.name": "clouds", "model.name": "points", "batch_size": 1, "data.train_size": 20},
        "`batch_size` must be at least 2 for 'points', got 1",
    ),
    ({"start.weights": "nowhere.safetensors"}, "nowhere.safetensors cannot be read"),
    ({"start.weights": "weights.pt"}, "weights must be a run's folder or a .safetensors file"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_cannot_be_trained_is_refused_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run(tmp_path / "run", changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match='`accelerator` must be "cpu" or "auto" where torch finds no GPU, got "cuda"'):
        train(small(), tmp_path, accelerator="cuda")
    with pytest.raises(ValueError, match="`accelerator` must be one of auto, cpu, cuda, got 'tpu'"):
        train(small(), tmp_path, accelerator="tpu")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    record = run(tmp_path, {"epochs": 1})
    with pytest.raises(RecipeError, match="already holds a run"):
        run(tmp_path, {"epochs": 1})
    assert resume(tmp_path, accelerator="cpu") == record
    with pytest.raises(RecipeError, match="another recipe: `seed` is 0 there and 1 here"):
        run(tmp_path, {"epochs": 1, "seed": 1}, resume=True)


def test_a_diverging_run_stops_with_step_and_layer(tmp_path: Path) -> None:
    changes = {"optimizer.lr": 1e30, "optimizer.name": "sgd", "model.norm": "none"}
    with pytest.raises(NonFiniteError, match=r"not finite at step \d+; first in layer model\.") as caught:
        run(tmp_path, changes)
    line = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (line["kind"], line["step"]) == ("failure", caught.value.step)
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    "changes",
    [{"steps": 1}, {"steps": 5, "log.checkpoint_steps": 1}, {"steps": 1, "regularizers.ema": 0.9}],
    ids=["last step", "checkpoint of each step", "averaged"],
)
def test_weights_that_the_last_update_spoiled_are_no_result(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"optimizer.lr": 1e30, "optimizer.name": "sgd", "epochs": None, **changes}
    with pytest.raises(NonFiniteError, match=r"the network is not finite at step 1; first in layer model\.") as caught:
        run(tmp_path, changes)
    assert caught.value.step == 1
    assert not (tmp_path / "record.json").exists()
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.parametrize(
    "split, value, message",
    [
        ("train", math.nan, "at step 0; first in the inputs"),
        ("test", math.inf, "evaluation is not finite at step 1; first in the logits of 1 of 20"),
    ],
)
def test_samples_that_are_not_finite_are_blamed(split: str, value: float, message: str, tmp_path: Path) -> None:
    clouds = load_set(DataConfig(name="clouds", points=16, train_size=40, test_size=20))
    samples = getattr(clouds, split)
    assert isinstance(samples, data.Samples)
    samples.inputs[3, 2, 1] = value
    recipe = Recipe(epochs=1, batch_size=40).override({"model.name": "points", "data.name": "clouds"})
    with pytest.raises(NonFiniteError, match=message):
        train(recipe, tmp_path / "run", dataset=clouds, accelerator="cpu")
