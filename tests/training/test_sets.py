"""The data of runs: clouds with outliers, streamed image files, and what an evaluation takes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import run, small, write_images

from hyperball import data
from hyperball.training import DataConfig, Recipe, RecipeError, evaluate, load_model, train
from hyperball.training.sets import Source, StreamFeed, for_evaluation, load_set, train_feed


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
