"""Curves of accuracy against budgets, severities and outliers."""

import json

import pytest
import torch
from attack_models import sample, trained
from torch import Tensor

from hyperball.attacks import RecordError, evaluate_robustness, robustness_curve
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
        ({"over": "noise", "values": [2.7]}, "severities in 0..5, got 2.7"),
        ({"over": "noise", "values": ["2.5"]}, "severities in 0..5, got '2.5'"),
        ({"over": "noise", "values": [True]}, "severities in 0..5, got True"),
        ({"over": "noise", "values": ["strong"]}, "`values` must be a number or a fraction"),
        ({"over": "noise", "batch_size": 0}, "`batch_size` must be a whole number >= 1"),
        ({"over": "outliers"}, r"`inputs` must be at least one cloud of floats \[N, P, 3\]"),
        ({"over": "noise", "values": 3}, "`values` must have at least one entry"),
        ({"over": "noise", "values": "3"}, "`values` must have at least one entry"),
        ({"over": "noise", "path": ""}, "`path` must be the name of a file"),
        ({"over": "noise", "seed": 1.0}, "`seed` must be a whole number >= 0"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    x, y = sample(4)
    with pytest.raises(ValueError, match=message):
        robustness_curve(trained(), x, y, **arguments)


@pytest.mark.parametrize("values", [(0, 2), range(0, 3, 2), (value for value in (0, 2)), torch.tensor([0, 2])])
def test_values_may_be_anything_that_holds_some(values):
    curve = robustness_curve(trained(), *sample(8), "blur", values)
    assert curve.values == [0, 2]


@pytest.mark.parametrize(
    "index", [torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.zeros(3).long(), [0, 1, 2, 3]]
)
def test_places_of_images_are_integers(index):
    with pytest.raises(ValueError, match="`index` must be a tensor of 4 integers, one an image"):
        corruptions.corrupt(sample(4)[0], "noise", 1, index=index)


CLOUDS = torch.linspace(-1, 1, 12 * 5 * 3).view(12, 5, 3)


def by_first_coordinate(points: Tensor) -> Tensor:
    place = points.flatten(1)[:, 0]
    return torch.stack([-place, place], 1)


@pytest.mark.parametrize("over", ["outliers", "noise"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, y: (x, y[:, None]), "`labels` must be 12 integers"),
        (lambda x, y: (x, y[:5]), "`labels` must be 12 integers"),
        (lambda x, y: (x, y.float()), "`labels` must be 12 integers"),
        (lambda x, y: (x, y + 5), r"`labels` must be in 0..1, the model's 2 classes"),
        (lambda x, y: (x[:0], y[:0]), "`inputs` must be at least one"),
    ],
)
def test_labels_and_samples_are_checked_under_damage_too(over, change, message):
    clouds = CLOUDS if over == "outliers" else CLOUDS.abs().view(12, 1, 5, 3)
    inputs, labels = change(clouds, torch.arange(12) % 2)
    with pytest.raises(ValueError, match=message):
        robustness_curve(by_first_coordinate, inputs, labels, over)


@pytest.mark.parametrize("over", ["outliers", "noise"])
def test_logits_that_are_not_finite_count_as_wrong_under_damage(over):
    clouds = CLOUDS if over == "outliers" else CLOUDS.abs().view(12, 1, 5, 3)
    curve = robustness_curve(lambda z: torch.full((len(z), 2), torch.nan), clouds, torch.zeros(12).long(), over, [0])
    assert curve.accuracies == [0.0]


@pytest.mark.parametrize("over", ["outliers", "noise"])
def test_a_model_that_writes_into_its_input_leaves_the_samples_as_they_are(over):
    clouds = CLOUDS.clone() if over == "outliers" else CLOUDS.abs().view(12, 1, 5, 3)
    before = clouds.clone()
    robustness_curve(lambda z: by_first_coordinate(z.sub_(0.5)), clouds, torch.zeros(12).long(), over, [0, 1])
    assert torch.equal(clouds, before)


def test_clouds_may_be_measured_in_inference_mode():
    labels = torch.zeros(12).long()
    with torch.inference_mode():
        found = robustness_curve(by_first_coordinate, CLOUDS, labels, "outliers", [0])
    assert found.accuracies == robustness_curve(by_first_coordinate, CLOUDS, labels, "outliers", [0]).accuracies


@pytest.mark.parametrize("over, values", [("epsilon", ["0", 1]), ("blur", [0, 5])])
def test_a_finished_curve_is_read_and_not_computed_again(tmp_path, over, values):
    model, (x, y) = trained(), sample(20)
    options = {"over": over, "values": values, "attack": "fgsm", "path": tmp_path / "curve.json"}
    first = robustness_curve(model, x, y, **options)
    calls = []
    again = robustness_curve(model, x, y, **options, progress=lambda *line: calls.append(line))
    assert again == first
    assert calls == []
    robustness_curve(model, x, y, **options, resume=False, progress=lambda *line: calls.append(line))
    assert calls


@pytest.mark.parametrize("over, values", [("epsilon", ["0", 1]), ("blur", [0, 5])])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"network": 1}, "of another evaluation"),
        ({"over": "contrast"}, "`over` is '.*' there and 'contrast' here"),
        ({"values": [0]}, "`values` is "),
        ({"seed": 3}, "`seed` is 0 there and 3 here"),
    ],
)
def test_another_curve_at_the_same_path_is_refused_and_stays(tmp_path, over, values, change, message):
    x, y = sample(20)
    path = tmp_path / "curve.json"
    options = {"over": over, "values": values, "attack": "fgsm", "path": path}
    robustness_curve(trained(), x, y, **options)
    held = path.read_text()
    model = trained(seed=change.get("network", 0))
    with pytest.raises(RecordError, match=message):
        robustness_curve(model, x, y, **options | {key: value for key, value in change.items() if key != "network"})
    assert path.read_text() == held
    assert list(tmp_path.iterdir()) == [path]


HEAD = '{"over": "epsilon", "conditions": {}, "doubts": [], '


@pytest.mark.parametrize(
    "text",
    [
        "[]", "null", "{}", '{"over": "epsilon"}', "no JSON",
        HEAD + '"values": [0], "accuracies": []}', HEAD + '"values": [0], "accuracies": ["x"]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_curve_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "notes.json"
    path.write_text(text)
    x, y = sample(4)
    with pytest.raises(RecordError, match=r"notes\.json is not? "):
        robustness_curve(trained(), x, y, values=[0], path=path)
    assert path.read_text() == text


def test_what_an_attack_lacks_is_refused_before_a_journal_is_there(tmp_path):
    x, y = sample(4)
    with pytest.raises(ValueError, match="`source` must be given"):
        robustness_curve(trained(), x, y, attack="transfer", path=tmp_path / "curve.json")
    with pytest.raises(ValueError, match="gives no gradient"):
        robustness_curve(lambda z: trained()(z.detach()), x, y, attack="fgsm", path=tmp_path / "curve.json")
    assert list(tmp_path.iterdir()) == []


def test_budgets_in_l2_are_lengths_up_to_the_farthest_image():
    x, y = sample(20)
    curve = robustness_curve(trained(), x, y, attack="fgsm", norm="l2")
    assert curve.values == [0, 0.125, 0.25, 0.5, 1, 2, 4, 8]
    assert curve.accuracies[-1] < curve.accuracies[0]
    small = robustness_curve(
        by_first_coordinate, x[:, :, :2, :2], (x[:, 0, 0, 0] > 0).long(), attack="noise", norm="l2"
    )
    assert small.values == [0, 0.125, 0.25, 0.5, 1, 2]
