"""Tests with running means that are computed anew from training batches, at every evaluation of a training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import DECOUPLED, losses, run, same, small, weights, write_images

import hyperball as hb
from hyperball.data import load
from hyperball.training import Recipe, RecipeError, load_model, read_metrics, train
from hyperball.training.sets import train_feed
from hyperball.training.statistics import begin_at_first_batch, fresh_statistics, running_means

BATCHES = 3
FRESH = {"log.conditions": {"fresh": {"statistics": BATCHES}}}
SLOW = {"model.options": {"norm_momentum": 0.001}}


def first_batches(recipe: Recipe, count: int) -> list[Tensor]:
    """The first training batches of a run on digits, in [0, 1]."""
    feed = train_feed(recipe, small_digits(recipe), torch.device("cpu"), 0, 1)
    found = []
    for index in range(count):
        feed.set(0, index)
        found.append(feed.take()[0].clone())
    return found


def small_digits(recipe: Recipe) -> Any:
    whole = load("digits")
    data = recipe.data
    return type(whole)(
        whole.name, whole.kind, whole.classes, whole.train.subset(data.train_size), whole.test.subset(data.test_size)
    )


def by_hand(network: nn.Module, batches: list[Tensor]) -> None:
    """Put into every BatchNorm2d the mean over batches of what its input's mean and unbiased variance are."""
    layers = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    seen: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    handles = [
        layer.register_forward_pre_hook(lambda held, given: seen[held].append(given[0].double())) for layer in layers
    ]
    network.train()
    with torch.no_grad():
        for batch in batches:
            network(batch)
    for handle in handles:
        handle.remove()
    for layer, inputs in seen.items():
        held: Any = layer
        held.running_mean.copy_(torch.stack([x.mean((0, 2, 3)) for x in inputs]).mean(0))
        held.running_var.copy_(torch.stack([x.var((0, 2, 3)) for x in inputs]).mean(0))
    network.eval()


@pytest.mark.parametrize("changes", [{}, SLOW], ids=["momentum", "slow"])
def test_the_last_test_is_that_of_a_network_whose_statistics_are_set_by_hand(changes, tmp_path: Path):
    record = run(tmp_path, {**FRESH, **changes})
    recipe = small({**FRESH, **changes})
    network = load_model(tmp_path)
    by_hand(network, first_batches(recipe, BATCHES))
    test = small_digits(recipe).test
    with torch.no_grad():
        logits = network(test.inputs.float() / 255)
    last = record.results["conditions"]["fresh"]["last"]
    assert last["loss"] == pytest.approx(nn.functional.cross_entropy(logits, test.labels).item(), rel=1e-4)
    assert last["top1"] == pytest.approx((logits.argmax(1) == test.labels).double().mean().item())
    assert last["loss"] != record.results["last"]["loss"]


@pytest.mark.parametrize("changes", [{}, DECOUPLED], ids=["plain", "decoupled"])
def test_tests_with_fresh_statistics_change_nothing_of_a_training(changes, tmp_path: Path):
    plain, tested = run(tmp_path / "plain", changes), run(tmp_path / "tested", {**changes, **FRESH})
    assert losses(tmp_path / "plain") == losses(tmp_path / "tested")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "tested"))
    assert tested.results.pop("conditions")
    assert tested.results == plain.results


def test_with_a_slow_momentum_they_are_those_of_the_network_and_not_of_its_past(tmp_path: Path):
    record = run(tmp_path, {**FRESH, **SLOW, **DECOUPLED, "epochs": 8})
    stale, fresh = record.results["last"], record.results["conditions"]["fresh"]["last"]
    assert fresh["loss"] < 0.8 * stale["loss"]
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert [set(line["conditions"]) for line in lines] == [{"fresh"}] * 8


def test_a_condition_may_have_other_inputs_and_fresh_statistics(tmp_path: Path):
    made = Recipe.from_dict({
        "data": {"name": "clouds", "train_size": 80, "test_size": 60, "points": 32},
        "model": {"name": "points", "pool": "huber"}, "epochs": 1, "batch_size": 10, "deterministic": True,
        "log": {"conditions": {
            "fresh": {"statistics": 4}, "half": {"outliers": 0.5}, "both": {"outliers": 0.5, "statistics": 4},
        }},
    })  # fmt: skip
    found = train(made, tmp_path).results
    seen = {found["last"]["loss"], *(held["last"]["loss"] for held in found["conditions"].values())}
    assert len(seen) == 4


def test_more_batches_than_an_epoch_has_are_refused(tmp_path: Path):
    words = r"`log\.conditions\.fresh\.statistics` must be at most the 6 batches of an epoch, got 1000000000"
    with pytest.raises(RecipeError, match=words):
        run(tmp_path / "run", {"log.conditions": {"fresh": {"statistics": 10**9}}})
    assert not (tmp_path / "run").exists()


def test_a_run_that_begins_with_another_s_radii_keeps_their_lengths():
    """Statistics of normalization begin at the first batch, lengths that radii follow are those that were loaded."""
    layer = hb.nn.DecoupledConv2d(2, 4, 3, magnitude="tanh")
    network = nn.Sequential(layer, nn.BatchNorm2d(4, momentum=0.001))
    network(torch.randn(5, 2, 6, 6))
    length = layer.magnitude.running_length.clone()
    assert begin_at_first_batch(network, lambda: network(9 * torch.randn(5, 2, 6, 6)))
    assert torch.equal(layer.magnitude.running_length, length)
    assert not torch.equal(network[1].running_mean, torch.zeros(4))


def test_a_relative_radius_begins_its_length_anew():
    layer = hb.nn.DecoupledConv2d(2, 4, 3, magnitude="tanh")
    network = nn.Sequential(layer, nn.BatchNorm2d(4, momentum=0.001))
    old, new = [torch.randn(5, 2, 6, 6) for _ in range(4)], [9 * torch.randn(5, 2, 6, 6) for _ in range(3)]
    for x in old:
        network(x)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    alone = [hb.nn.DecoupledConv2d(2, 4, 3, magnitude="tanh") for _ in new]
    for twin, x in zip(alone, new, strict=True):
        twin.load_state_dict({**layer.state_dict(), "magnitude.batches": torch.zeros((), dtype=torch.long)})
        twin(x)
    wanted = torch.stack([twin.magnitude.running_length for twin in alone]).mean()
    with fresh_statistics(network, [lambda x=x: network(x) for x in new], lambda tensor: tensor):
        assert torch.allclose(layer.magnitude.running_length, wanted)
        assert layer.magnitude.running_length > 5 * before["0.magnitude.running_length"]
        assert torch.equal(network[0].weight, before["0.weight"])
    assert same(before, network.state_dict())
    assert network[1].momentum == 0.001


def test_state_is_put_back_where_a_pass_fails():
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, momentum=0.3))
    before = {key: value.clone() for key, value in network.state_dict().items()}

    def fail() -> None:
        raise RuntimeError("no such batch")

    with pytest.raises(RuntimeError, match="no such batch"):
        running_means(network, [lambda: network(torch.randn(4, 1, 3, 3)), fail])
    assert same(before, network.state_dict())
    assert network[1].momentum == 0.3


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "16", None])
def test_a_number_that_counts_no_batches_is_refused(count):
    with pytest.raises(
        RecipeError, match=r"`log\.conditions\.fresh\.statistics` must be a number of training batches >= 1"
    ):
        small({"log.conditions": {"fresh": {"statistics": count}}})


def test_a_network_without_running_means_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"`log\.conditions\.fresh\.statistics` needs a network with running means"):
        run(tmp_path / "run", {**FRESH, "model.norm": "none"})
    assert not (tmp_path / "run").exists()


def test_image_files_may_have_them(tmp_path: Path):
    write_images(tmp_path)
    config = {"data": {"name": "folder", "image_size": 16}, "model": {"name": "resnet18", "options": {"width": 4}}}
    asked = {**config, "batch_size": 2, "epochs": 2, "log": {"conditions": {"fresh": {"statistics": 2}}}}
    record = train(Recipe.from_dict(asked), tmp_path / "run", data_root=tmp_path)
    plain = train(Recipe.from_dict({**asked, "log": {}}), tmp_path / "plain", data_root=tmp_path)
    assert record.results["conditions"]["fresh"]["last"]["loss"] != record.results["last"]["loss"]
    assert record.results["last"] == plain.results["last"]
