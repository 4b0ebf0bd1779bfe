"""Training end to end on small sets: what a run does, writes, and refuses."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import DECOUPLED, PER_EPOCH, Heard, losses, noise, run, same, small, weights

from hyperball import data
from hyperball.nn.decoupled import Decoupled
from hyperball.training import (
    DataConfig,
    NonFiniteError,
    Recipe,
    RecipeError,
    Record,
    evaluate,
    load_model,
    read_metrics,
    resume,
    train,
)
from hyperball.training.network import Network, build_network
from hyperball.training.sets import Source, StreamFeed, for_evaluation, load_set, train_feed


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
    decoupled["model.options"] = {"norm_momentum": 0.0}  # running statistics stay the pretrained ones
    record = run(tmp_path / "decoupled", {**decoupled, "start.weights": str(start)})
    plain = Record.read(tmp_path / "plain").results["last"]
    assert record.results["last"]["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_clouds_with_outliers_go_through_a_point_network(tmp_path: Path) -> None:
    changes = {
        "data.name": "clouds", "data.points": 32, "data.outliers": 0.25, "data.rotate": True, "data.jitter": 0.01,
        "model.name": "points", "model.pool": "huber", "epochs": 1,
    }  # fmt: skip
    record = run(tmp_path, changes)
    assert record.conditions["set"] == "clouds"
    clean = evaluate(tmp_path, data=DataConfig(name="clouds", points=32, test_size=50), accelerator="cpu")
    assert clean.loss != record.results["last"]["loss"]


def test_an_evaluation_makes_outliers_for_the_test_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "data.name": "clouds", "data.points": 16, "data.outliers": 0.25, "data.train_size": 60, "data.test_size": 20,
        "model.name": "points", "model.pool": "mean", "epochs": 1, "batch_size": 30,
    }  # fmt: skip
    record = run(tmp_path, changes)
    made, outliers = [], data.outliers

    def counted(points: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append(len(points))
        return outliers(points, *rest)

    monkeypatch.setattr(data, "outliers", counted)
    load_model(tmp_path)
    assert made == []
    own = evaluate(tmp_path, accelerator="cpu")
    assert own.loss == pytest.approx(record.results["last"]["loss"], rel=1e-6)
    more = evaluate(tmp_path, data=small(changes).data.override({"outliers": 0.5}), accelerator="cpu")
    assert made == [20, 20]
    assert more.loss != own.loss


def test_outliers_are_the_same_every_time_and_differ_between_splits() -> None:
    config = DataConfig(name="clouds", points=16, outliers=0.5, train_size=20, test_size=20)
    first, second = load_set(config), load_set(config)
    assert isinstance(first.train, data.Samples)
    assert isinstance(first.test, data.Samples)
    assert torch.equal(first.train.inputs, second.train.inputs)  # type: ignore[union-attr]
    assert not torch.equal(first.train.inputs, first.test.inputs)


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


def test_a_run_shorter_than_an_epoch_has_no_result_of_one(tmp_path: Path) -> None:
    record = run(tmp_path, {"epochs": None, "steps": 2})
    assert record.results["first_epoch"] is None
    assert record.results["last"]["step"] == 2


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    record = run(tmp_path, {"epochs": 1})
    with pytest.raises(RecipeError, match="already holds a run"):
        run(tmp_path, {"epochs": 1})
    assert resume(tmp_path, accelerator="cpu") == record
    with pytest.raises(RecipeError, match="another recipe: `seed` is 0 there and 1 here"):
        run(tmp_path, {"epochs": 1, "seed": 1}, resume=True)


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


def test_a_test_sample_without_finite_logits_ends_a_run(tmp_path: Path) -> None:
    clouds = load_set(DataConfig(name="clouds", points=16, train_size=40, test_size=20))
    assert isinstance(clouds.test, data.Samples)
    clouds.test.inputs[3, 2, 1] = math.inf
    recipe = Recipe(epochs=1, batch_size=40).override({"model.name": "points", "data.name": "clouds"})
    with pytest.raises(NonFiniteError, match="evaluation is not finite at step 1; first in the logits of 1 of 20"):
        train(recipe, tmp_path / "run", dataset=clouds, accelerator="cpu")


def test_inputs_that_are_not_finite_are_blamed(tmp_path: Path) -> None:
    clouds = load_set(DataConfig(name="clouds", points=16, train_size=40, test_size=20))
    assert isinstance(clouds.train, data.Samples)
    clouds.train.inputs[3, 2, 1] = math.nan
    recipe = Recipe(epochs=1, batch_size=40).override({"model.name": "points", "data.name": "clouds"})
    with pytest.raises(NonFiniteError, match="at step 0; first in the inputs"):
        train(recipe, tmp_path / "run", dataset=clouds, accelerator="cpu")


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


def test_a_stream_is_read_in_order_and_anew_after_a_jump() -> None:
    class Stream:
        asked: list[tuple[int, int]] = []

        def __len__(self) -> int:
            return 3

        def epoch(self, n: int, start_step: int = 0) -> Any:
            self.asked.append((n, start_step))
            return ((torch.full((2, 1), float(10 * n + k)), torch.tensor([k, k])) for k in range(start_step, 3))

    stream = Stream()
    feed = StreamFeed(stream, 2, torch.device("cpu"))
    seen = []
    for epoch, step in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)]:
        feed.set(epoch, step)
        seen.append(int(feed.take()[0][0]))
    assert seen == [0, 1, 2, 10, 12]
    assert stream.asked == [(0, 0), (1, 0), (1, 2)]


@pytest.mark.slow
def test_a_compiled_run_on_a_cpu_stays_near_the_eager_one(tmp_path: Path) -> None:
    changes = {**DECOUPLED, "epochs": 1}
    record = run(tmp_path / "compiled", {**changes, "engine.compile": True})
    run(tmp_path / "eager", changes)
    assert record.engine["compiled"], record.engine
    assert "errors of gradients: compiled" in record.engine["compiled_why"]
    assert losses(tmp_path / "compiled")[:3] == pytest.approx(losses(tmp_path / "eager")[:3], rel=1e-4)


@pytest.mark.slow
def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(tmp_path, {**DECOUPLED, "epochs": 1, "log.tensorboard": True})
    assert list((tmp_path / "tensorboard").rglob("events.out.tfevents.*"))


def write_images(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for index in range(48):
        path = folder / ("train", "val")[index % 2] / "ab"[index // 2 % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(torch.randint(256, (40, 48, 3), dtype=torch.uint8).numpy()).save(path)
    return folder


@pytest.mark.parametrize("name, value", [("crop", "zero"), ("pad", 2), ("rotate", True)])
def test_options_that_streamed_images_do_not_have_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"`data.{name}` is for"):
        load_set(DataConfig(name="folder", **{name: value}), Source(write_images(tmp_path)))


@pytest.mark.parametrize("changes", [{}, {"flip": True}, {"cutout": 8}], ids=str)
def test_streamed_images_are_varied_as_the_recipe_says(changes: dict[str, Any], tmp_path: Path) -> None:
    config = DataConfig(name="folder", image_size=16, workers=0, **changes)
    dataset = load_set(config, Source(write_images(tmp_path)))
    feed = train_feed(Recipe(data=config, batch_size=16), dataset, torch.device("cpu"), 0, 1)
    feed.set(0, 0)
    expected = data.stream(
        dataset.train, 16, size=16, augment=data.Augment(**changes), shuffle=True, drop_last=True, workers=0
    )
    assert torch.equal(feed.take()[0], next(expected.epoch(0))[0])


CHANGELESS = {
    "train_size": 20, "crop": "zero", "pad": 1, "flip": True, "cutout": 2, "rotate": True, "jitter": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGELESS)
def test_what_changes_no_evaluation_is_refused_there(name: str) -> None:
    known = DataConfig(train_size=192, test_size=50)
    with pytest.raises(RecipeError, match=f"`data.{name}` acts on training alone and changes no evaluation"):
        for_evaluation(known.override({name: CHANGELESS[name]}), known)
    held = known.override({name: CHANGELESS[name]})
    assert for_evaluation(held, held) == DataConfig(test_size=50)


def test_an_evaluation_takes_the_size_of_images_from_the_data_it_is_given(tmp_path: Path) -> None:
    place = write_images(tmp_path / "set")
    config = DataConfig(name="folder", image_size=16, workers=0)
    recipe = Recipe(steps=1, batch_size=8, data=config)
    train(recipe, tmp_path / "run", data_root=place, accelerator="cpu")
    results = [
        evaluate(tmp_path / "run", data=config.override({"image_size": size}), data_root=place, accelerator="cpu").loss
        for size in (16, 32)
    ]
    assert results[0] != results[1]


@pytest.mark.slow
def test_image_files_are_streamed(tmp_path: Path) -> None:
    write_images(tmp_path / "set")
    recipe = Recipe(epochs=1, batch_size=8).override(
        {"data.name": "folder", "data.image_size": 32, "data.workers": 0, "model.name": "cnn9_adv"}
    )
    record = train(recipe, tmp_path / "run", data_root=tmp_path / "set", accelerator="cpu")
    assert record.conditions["steps"] == 3
    assert record.results["last"]["samples"] == 24
    assert evaluate(tmp_path / "run", data_root=tmp_path / "set", accelerator="cpu").as_dict().items() <= (
        record.results["last"].items()
    )
