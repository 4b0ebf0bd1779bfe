"""Evaluations: logits that do not tie, image files that are decoded once, and statistics that fit the operator."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from training_cases import write_images

from hyperball import data, models
from hyperball.convert.heads import ProjectedLinear
from hyperball.experiments.jobs.cell import main as cell_main
from hyperball.files import read_tree, write_json
from hyperball.nn import NormalizedLinear
from hyperball.training import DataConfig, Recipe, RecipeError, evaluate, train
from hyperball.training.loop import starts_afresh
from hyperball.training.measures import evaluation as evaluation_module
from hyperball.training.measures.evaluation import (
    MOST_MAP,
    Evaluator,
    decoded,
    largest_map,
    power_below,
    precise_logits,
)
from hyperball.training.process.engine import Decision, build_engine
from hyperball.training.recipe.sections import LogConfig
from hyperball.training.sets import ResidentFeed, Source, load_set, train_feed


def coarse() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


HEADS = {
    "linear": lambda: nn.Linear(32, 10),
    "projected": lambda: ProjectedLinear(32, 10, projection="l2_ball(radius=15.0)"),
    "normalized": lambda: NormalizedLinear(32, 10),
}


@pytest.mark.parametrize("head", HEADS)
def test_logits_are_those_of_the_last_layer_in_float32(head):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), HEADS[head]()).eval()
    x = torch.randn(64, 8)
    with torch.no_grad():
        with coarse():
            features, rough = network[:2](x), network(x)
        found = precise_logits(network, x, coarse)
        expected = network[2](features.float())
    assert rough.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert found.dtype == torch.float32
    assert len(found.unique()) > 1.25 * len(rough.unique())
    assert not network[2]._forward_hooks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.mark.parametrize("network", [Scaled(), nn.Sequential(nn.Conv2d(8, 4, 1), nn.Flatten())], ids=["scaled", "conv"])
def test_logits_of_something_else_than_a_last_linear_layer_are_what_the_network_gives(network):
    x = torch.randn(16, 8) if isinstance(network, Scaled) else torch.randn(16, 8, 1, 1)
    with torch.no_grad():
        with coarse():
            expected = network(x).float()
        assert torch.equal(precise_logits(network, x, coarse), expected)


@pytest.mark.parametrize("name", ["cnn9", "resnet18", "points"])
def test_the_classifier_of_our_networks_is_their_last_linear_layer(name):
    network = models.create(name, 10, **({"width": 4} if name != "points" else {})).eval()
    x = torch.randn(2, 16, 3) if name == "points" else torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        with coarse():
            rough = network(x)
        found = precise_logits(network, x, coarse)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(found, rough.float(), rtol=0.05, atol=0.05)
    assert not torch.equal(found, rough.float())


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_images(tmp_path / "set")


def test_test_files_are_decoded_once_to_what_a_stream_would_give(images, tmp_path, monkeypatch):
    config = DataConfig(name="folder", image_size=16, workers=0)
    files = load_set(config, Source(images)).test
    held = decoded(files, 16, 0)
    streamed = torch.cat([inputs for inputs, _ in data.stream(files, 8, size=16, workers=0).epoch(0)])
    assert torch.equal(held.inputs.float() / 255, streamed)
    assert torch.equal(held.labels, files.labels)
    reads: list[Path] = []
    read = data.stream.__globals__["read_image"]
    monkeypatch.setitem(data.stream.__globals__, "read_image", lambda path: (reads.append(path), read(path))[1])
    recipe = Recipe(epochs=3, batch_size=24, data=config.override({"crop": "window"}))
    record = train(recipe, tmp_path / "run", data_root=images, accelerator="cpu")
    assert len(reads) == len(set(reads)) == 48
    monkeypatch.setattr(evaluation_module, "MOST_BYTES", 100)
    again = evaluate(tmp_path / "run", data_root=images, accelerator="cpu")
    assert again.loss == pytest.approx(record.results["last"]["loss"], rel=1e-6)


def test_windows_are_cut_out_of_squares_that_are_decoded_once(images):
    config = DataConfig(name="folder", image_size=14, workers=0, crop="window", flip=True)
    dataset = load_set(config, Source(images))
    feed = train_feed(Recipe(data=config, batch_size=24, seed=3), dataset, torch.device("cpu"), 0, 1)
    assert isinstance(feed, ResidentFeed)
    squares = data.decode(dataset.train, 16).inputs
    seen = set()
    for epoch in range(3):
        feed.set(epoch, 0)
        inputs, _ = feed.take()
        assert inputs.shape == (24, 3, 14, 14)
        chosen = feed.batches.draw(epoch, 0).indices.tolist()
        for image, index in zip((inputs * 255).round().to(torch.uint8), chosen, strict=True):
            places = [
                (y, x, turned)
                for y in range(3)
                for x in range(3)
                for turned in (False, True)
                if torch.equal(image.flip(2) if turned else image, squares[index, :, y : y + 14, x : x + 14])
            ]
            assert places
            seen.update(places)
    assert len(seen) > 12


def test_windows_are_for_files_that_fit_into_memory(images, monkeypatch):
    with pytest.raises(RecipeError, match=r'`data\.crop` "window" is for image files, got it for digits'):
        load_set(DataConfig(name="digits", crop="window"))
    config = DataConfig(name="folder", image_size=14, crop="window")
    monkeypatch.setattr("hyperball.training.sets.MOST_BYTES", 1000)
    with pytest.raises(RecipeError, match=r"in memory, more than .*; null streams random parts"):
        train_feed(Recipe(data=config, batch_size=8), load_set(config, Source(images)), torch.device("cpu"), 0, 1)


DEFAULT = LogConfig().evaluation_batch


@pytest.fixture(scope="module")
def cpu():
    return build_engine(Recipe(), "cpu")


def evaluator_of(engine, network, inputs, batch_size=DEFAULT, captured=False, **options):
    labels = torch.arange(len(inputs)) % 4
    samples = data.Samples(inputs, labels)
    dataset = data.Dataset("some", "points" if inputs.dim() == 3 else "images", tuple("abcd"), samples, samples)
    return Evaluator(engine, network, dataset, batch_size, Decision(captured, ""), options)


SAMPLES = {  # a network, the shape of a sample, and bytes of its largest map
    "clouds": ("points", (32, 3), 64 * 32 * 4),
    "images": ("digits", (1, 8, 8), None),
    "wide clouds": ("pointnet", (16, 3), 1024 * 16 * 4),
}


def some(name, count=70):
    torch.manual_seed(0)
    kind, shape, _ = SAMPLES[name]
    network = models.create(kind, 4).eval()
    inputs = torch.randn(count, *shape) if len(shape) == 2 else torch.randint(256, (count, *shape), dtype=torch.uint8)
    return network, inputs


@pytest.mark.parametrize("name", ["clouds", "wide clouds"])
def test_a_map_is_measured_by_the_networks_own_layers(name, cpu):
    network, inputs = some(name)
    assert largest_map(network, lambda: network(inputs[:3])) == 3 * SAMPLES[name][2]
    assert not any(module._forward_hooks for module in network.modules())
    assert largest_map(network, lambda: None) == 0


@pytest.mark.parametrize("points, expected", [(1024, 64), (2048, 32), (128, 512)])
def test_a_batch_of_clouds_is_as_large_as_its_maps_allow(points, expected, cpu):
    network = models.create("pointnet", 4).eval()
    evaluator = evaluator_of(cpu, network, torch.zeros(600, points, 3))
    with torch.no_grad():
        evaluator.fit()
    assert evaluator.batch_size == expected
    assert expected * points * 1024 * 4 <= MOST_MAP


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("size", [1, 8, 32])
def test_smaller_batches_give_the_same_logits_and_metrics(name, size, cpu, monkeypatch):
    network, inputs = some(name)
    before = evaluator_of(cpu, network, inputs, batch_size=DEFAULT - 1)
    expected, labels = before.predict()
    assert before.batch_size == len(inputs)
    with torch.no_grad():
        bytes_each = largest_map(network, lambda: network(inputs[:1].float()))
    monkeypatch.setattr(evaluation_module, "MOST_MAP", 2 * size * bytes_each - 1)
    fitted = evaluator_of(cpu, network.train(), inputs)
    assert (fitted.batch_size, fitted.fitted) == (len(inputs), False)
    found, again = fitted.predict()
    assert fitted.batch_size == len(fitted.index) == size
    assert network.training
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(again, labels)
    ours, theirs = fitted.measure().as_dict(), before.measure().as_dict()
    assert ours.keys() == theirs.keys()
    assert [ours[key] for key in ("samples", "top1", "nonfinite")] == [
        theirs[key] for key in ("samples", "top1", "nonfinite")
    ]
    assert [ours[key] for key in ("loss", "ece", "map_raw", "map_softmax")] == pytest.approx(
        [theirs[key] for key in ("loss", "ece", "map_raw", "map_softmax")], rel=1e-5
    )


def test_a_batch_that_a_recipe_asks_for_is_taken(cpu, monkeypatch):
    monkeypatch.setattr(evaluation_module, "MOST_MAP", 1)
    network, inputs = some("clouds")
    passes = []
    network.register_forward_hook(lambda module, given, made: passes.append(len(made)))
    asked = evaluator_of(cpu, network, inputs, batch_size=40)
    asked.predict()
    assert passes == [40, 40]
    fitted = evaluator_of(cpu, network, inputs)
    assert (len(fitted.predict()[0]), fitted.batch_size) == (70, 1)


def test_no_hook_is_on_the_network_while_its_maps_are_measured(cpu, monkeypatch):
    network, inputs = some("clouds")
    measured = []
    monkeypatch.setattr(evaluation_module, "largest_map", lambda other, work: measured.append(other) or work() is None)
    evaluator_of(cpu, network, inputs).predict()
    assert [next(other.parameters()).device.type for other in measured] == ["meta"]


def test_the_maps_of_a_network_that_needs_values_are_measured_on_itself(cpu, monkeypatch):
    class Sized(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x[:, 0] * (1.0 if float(x.sum()) > -1e9 else 0.0))

    monkeypatch.setattr(evaluation_module, "MOST_MAP", 16 * 8)
    evaluator = evaluator_of(cpu, Sized(3, 4).eval(), torch.randn(70, 32, 3))
    assert len(evaluator.predict()[0]) == 70
    assert evaluator.batch_size == 8


def test_the_batches_of_small_images_stay_as_they_are(cpu):
    network, _ = some("images")
    evaluator = evaluator_of(cpu, network, torch.zeros(600, 1, 8, 8, dtype=torch.uint8))
    evaluator.predict()
    assert evaluator.batch_size == DEFAULT


def test_streamed_files_come_in_batches_that_fit(images, cpu, monkeypatch):
    files = load_set(DataConfig(name="folder", image_size=16, workers=0), Source(images))
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    monkeypatch.setattr(evaluation_module, "MOST_BYTES", 100)
    monkeypatch.setattr(evaluation_module, "MOST_MAP", 5 * 8 * 16 * 16 * 4)
    options = {"size": 16, "workers": 0}
    evaluator = Evaluator(cpu, network, files, DEFAULT, Decision(False, ""), options)
    sizes = []
    network.register_forward_hook(lambda module, given, made: sizes.append(len(made)))
    found, _ = evaluator.predict()
    assert evaluator.batch_size == max(sizes) == 4
    whole, _ = Evaluator(cpu, network, files, 999, Decision(False, ""), options).predict()
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("number, expected", [(0, 1), (1, 1), (2, 2), (3, 2), (64, 64), (83, 64), (1 << 40, 1 << 40)])
def test_the_largest_power_of_two_below_a_number(number, expected):
    assert power_below(number) == expected


class Graph:
    """What a CUDA graph does: the same work on the memory that it was captured with."""

    made: ClassVar[list["Graph"]] = []

    def __init__(self, body):
        body()
        self.replay = body
        Graph.made.append(self)


def test_one_graph_serves_all_batches_of_all_evaluations(cpu, monkeypatch):
    network, inputs = some("clouds")
    expected, _ = evaluator_of(cpu, network, inputs, batch_size=8).predict()
    monkeypatch.setattr(evaluation_module, "MOST_MAP", 8 * SAMPLES["clouds"][2])
    monkeypatch.setattr(evaluation_module.graphs, "capture", Graph)
    captured = evaluator_of(cpu, network, inputs, captured=True)
    places = set()
    for _ in range(2):
        found, _ = captured.predict()
        places.add(captured.index.data_ptr())
        assert torch.equal(found, expected)
    assert (captured.batch_size, len(Graph.made), len(places)) == (8, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wide clouds", "images"])
def test_a_captured_evaluation_of_small_batches_is_the_eager_one(name, monkeypatch):
    engine = build_engine(Recipe(), "cuda")
    network, inputs = some(name)
    network.to(engine.device)
    monkeypatch.setattr(evaluation_module, "MOST_MAP", 2**16 if name == "images" else 2**20)
    eager, captured = (evaluator_of(engine, network, inputs, captured=on) for on in (False, True))
    expected, _ = eager.predict()
    for _ in range(2):
        found, _ = captured.predict()
        assert torch.equal(found, expected)
    assert captured.graph is not None
    assert captured.batch_size == eager.batch_size < len(inputs)


SMALL = {"steps": 2, "batch_size": 50, "data.train_size": 100, "data.test_size": 50}


def test_statistics_of_another_operator_are_begun_anew_and_those_of_the_same_kept(tmp_path):
    plain = Recipe().override(SMALL)
    train(plain, tmp_path / "plain", accelerator="cpu")
    begun = {"start.weights": str(tmp_path / "plain")}
    assert starts_afresh(plain)
    assert not starts_afresh(plain.override(begun))
    assert starts_afresh(plain.override({**begun, "model.magnitude": "tanh"}))
    assert not starts_afresh(plain.override({**begun, "model.magnitude": "tanh", "homotopy.steps": 1}))
    assert not starts_afresh(plain.override({**begun, "start.weights": str(tmp_path / "some.safetensors")}))


def test_a_network_that_starts_with_another_operator_has_the_statistics_of_its_first_batch(tmp_path):
    train(Recipe().override(SMALL), tmp_path / "plain", accelerator="cpu")
    losses = {}
    for words in ("first_batch", "torch"):
        changes = {
            **SMALL, "steps": 1, "optimizer.lr": 1e-12, "model.magnitude": "sphere", "start.statistics": words,
            "start.weights": str(tmp_path / "plain"),
        }  # fmt: skip
        record = train(Recipe().override(changes), tmp_path / words, accelerator="cpu")
        losses[words] = record.results["last"]["loss"]
    assert losses["first_batch"] < losses["torch"]


def test_a_cell_does_not_begin_with_a_network_that_ended_at_chance(tmp_path, capsys):
    recipe = Recipe().override(SMALL)
    train(recipe, tmp_path / "plain", accelerator="cpu")
    tree = read_tree(tmp_path / "plain" / "record.json")
    tree["results"]["last"].update(top1=0.1, samples=500)
    tree["recipe"]["data"]["name"] = "imagewoof"
    write_json(tmp_path / "plain" / "record.json", tree)
    recipe.override({"start.weights": str(tmp_path / "plain")}).to_file(tmp_path / "cell.json")
    assert cell_main([str(tmp_path / "cell.json"), str(tmp_path / "next"), "", "cpu"]) == 2
    assert "did not converge" in capsys.readouterr().err
    tree["results"]["last"].update(top1=0.3)
    write_json(tmp_path / "plain" / "record.json", tree)
    assert cell_main([str(tmp_path / "cell.json"), str(tmp_path / "next"), "", "cpu"]) == 0


def test_records_say_in_what_the_classifier_was_tested(tmp_path):
    record = train(Recipe().override({**SMALL, "precision": "bf16"}), tmp_path / "run", accelerator="cpu")
    assert record.conditions["classifier_in_tests"] == "fp32"
