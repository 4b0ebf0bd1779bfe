"""Lengths of filters and gradients in a run's reports."""

import math

import pytest
import torch
from training_cases import losses, noise, run

import hyperball as hb
from hyperball.training import read_metrics, train
from hyperball.training.measures.lengths import lengths

TANH = {"model.magnitude": "tanh", "log.norms": True}


def test_lengths_are_those_of_filters_of_decoupled_layers_alone():
    model = torch.nn.Sequential(
        hb.nn.DecoupledConv2d(2, 3, 3, magnitude="ball"), torch.nn.Conv2d(3, 5, 1), torch.nn.Flatten()
    )
    assert set(lengths(model)) == {"weight_norm", "largest_weight_norm"}
    model(torch.randn(2, 2, 5, 5)).square().sum().backward()
    found = lengths(model)
    for key, tensor in (("weight_norm", model[0].weight), ("gradient_norm", model[0].weight.grad)):
        norms = [filter.norm().item() for filter in tensor]
        assert found[key] == pytest.approx(sum(norms) / 3)
        assert found[f"largest_{key}"] == pytest.approx(max(norms))


def test_a_plain_network_has_the_lengths_of_its_convolutions_and_no_filters_give_nothing():
    conv = torch.nn.Conv2d(2, 3, 3)
    found = lengths(torch.nn.Sequential(conv, torch.nn.Linear(4, 4)))
    assert found["weight_norm"] == pytest.approx(conv.weight.flatten(1).norm(dim=1).mean().item())
    assert lengths(torch.nn.Linear(4, 4)) == {}
    conv.weight.data[0, 0, 0, 0] = math.nan
    assert lengths(conv) == {}


def reported(folder) -> list[dict]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "train"]


def test_reports_hold_lengths_that_change_no_loss(tmp_path):
    run(tmp_path / "with", TANH)
    run(tmp_path / "without", {**TANH, "log.norms": False})
    lines = reported(tmp_path / "with")
    assert all(line["weight_norm"] > 0 and line["gradient_norm"] > 0 for line in lines)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert "weight_norm" not in reported(tmp_path / "without")[0]


def test_weight_projection_keeps_the_length_that_free_filters_leave(tmp_path):
    run(tmp_path / "free", TANH)
    run(tmp_path / "projected", {**TANH, "projection.every": 1})
    assert reported(tmp_path / "projected")[-1]["weight_norm"] == pytest.approx(1.0, abs=1e-5)
    assert reported(tmp_path / "projected")[-1]["largest_weight_norm"] == pytest.approx(1.0, abs=1e-5)
    assert abs(reported(tmp_path / "free")[-1]["weight_norm"] - 1.0) > 0.05


@pytest.mark.gpu
def test_lengths_of_captured_steps_are_those_of_eager_ones(tmp_path):
    from hyperball.training import Recipe

    common = {**TANH, "log.every": 1, "epochs": 2, "batch_size": 16, "deterministic": True, "engine.compile": False}
    found = {}
    for capture in (False, True):
        recipe = Recipe().override({**common, "engine.capture": capture})
        train(recipe, tmp_path / str(capture), dataset=noise(), accelerator="cuda")
        found[capture] = [(line["weight_norm"], line["gradient_norm"]) for line in reported(tmp_path / str(capture))]
    assert found[True] == found[False]
