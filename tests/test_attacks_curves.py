"""Curves of accuracy against budgets, severities and outliers."""

import json

import pytest
import torch
from attack_models import sample, trained
from torch import Tensor

from hyperball.attacks import evaluate_robustness, robustness_curve
from hyperball.data import corruptions, outliers


def test_accuracy_falls_with_the_budget_from_clean_to_nothing(tmp_path):
    model, (x, y) = trained(), sample(60)
    values = ["0", "16/255", "32/255", "1"]
    curve = robustness_curve(model, x, y, "epsilon", values, attack="bim")
    assert curve.values == [0, 16 / 255, 32 / 255, 1]
    assert curve.accuracies[0] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    assert curve.accuracies == sorted(curve.accuracies, reverse=True)
    assert curve.accuracies[-1] == 0
    assert curve.doubts == []
    one = evaluate_robustness(model, x, y, epsilon="32/255", attacks="bim", checks=False)
    assert curve.accuracies[2] == one.accuracy("bim")
    curve.write(tmp_path / "curve.json")
    assert json.loads((tmp_path / "curve.json").read_text())["conditions"]["attack"] == "bim"


def test_accuracy_that_rises_with_the_budget_is_a_doubt():
    def wrong_in_between(z: Tensor) -> Tensor:
        pixel = z[:, 0, 0, 0]  # black in every digit
        hit = ((pixel > 0.01) & (pixel < 0.1)).float()
        return torch.stack([1 - hit, hit], 1)

    x, y = sample(100)
    curve = robustness_curve(wrong_in_between, x, 0 * y, values=[0.05, 0.2], attack="noise")
    assert "accuracy rises from" in curve.doubts[0]
    assert "to 100.0 % at 0.2" in curve.doubts[0]


@pytest.mark.parametrize("name", corruptions.names())
def test_severity_zero_is_clean_and_five_is_the_corruption(name):
    model, (x, y) = trained(), sample(100)
    curve = robustness_curve(model, x, y, name, seed=4, batch_size=32)
    assert curve.values == [0, 1, 2, 3, 4, 5]
    assert curve.accuracies[0] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    worst = corruptions.corrupt(x, name, 5, seed=4)
    assert curve.accuracies[5] == pytest.approx(float((model(worst).argmax(1) == y).float().mean()))


def test_outliers_are_those_of_the_data():
    torch.manual_seed(0)
    labels = torch.arange(40) % 2
    clouds = 0.1 * torch.randn(40, 64, 3) + (2 * labels[:, None, None] - 1) * 0.3

    def mean_and_median(points: Tensor) -> Tensor:
        place = points.median(1).values.sum(1)
        return torch.stack([-place, place], 1)

    curve = robustness_curve(mean_and_median, clouds, labels, "outliers", [0, 0.5, 0.95], seed=2, batch_size=16)
    replaced = outliers(clouds, 0.95, 2)
    expected = float((mean_and_median(replaced).argmax(1) == labels).float().mean())
    assert curve.accuracies[:2] == [1.0, 1.0]
    assert curve.accuracies[2] == pytest.approx(expected)
    assert expected < 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"over": "rotation"}, "`over` must be one of epsilon, outliers, noise"),
        ({"over": "noise", "values": [6]}, "severities in 0..5, got 6"),
        ({"over": "epsilon", "values": []}, "`values` must have at least one entry"),
        ({"over": "epsilon", "values": [2]}, "`epsilon` must be <= 1"),
        ({"over": "epsilon", "attack": "fgms"}, "did you mean 'fgsm'?"),
        ({"over": "outliers", "values": [1.5]}, "shares in"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    x, y = sample(4)
    with pytest.raises(ValueError, match=message):
        robustness_curve(trained(), x, y, **arguments)
