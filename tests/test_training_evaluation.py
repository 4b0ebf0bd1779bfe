"""Evaluations: logits that do not tie, image files that are decoded once, and statistics that fit the operator."""

from pathlib import Path

import pytest
import torch
from test_training_sets import write_images
from torch import nn

from hyperball import data, models
from hyperball.convert.heads import ProjectedLinear
from hyperball.experiments.cell import main as cell_main
from hyperball.nn import NormalizedLinear
from hyperball.training import DataConfig, Recipe, RecipeError, evaluate, train
from hyperball.training import evaluation as evaluation_module
from hyperball.training.evaluation import decoded, precise_logits
from hyperball.training.files import read_tree, write_json
from hyperball.training.loop import starts_afresh
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
        for image, index in zip((inputs * 255).round().to(torch.uint8), feed.index.tolist(), strict=True):
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
