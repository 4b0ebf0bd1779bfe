"""From a CNN to another operator: the homotopy, calibration, and networks of B-cos."""

import copy
import math

import pytest
import torch
from convert_cases import assert_unchanged, images, small_net, state
from torch import nn

import hyperball as hb

TARGETS = [
    "tanh",
    {"magnitude": "ball", "angular": "square_cosine"},
    {"magnitude": "seg", "weighting": "joint"},
    {"magnitude": "log", "angular": "linear", "weighting": "linear"},
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("converted_first", [False, True])
def test_the_homotopy_begins_as_the_cnn_and_ends_as_the_target_with_nothing_left(target, converted_first):
    plain, x = small_net().eval(), images()
    model = copy.deepcopy(plain)
    if converted_first:
        model, _ = hb.convert_model(model, magnitude="linear", weighting="linear")
    homotopy = hb.convert.Homotopy(model, target, steps=3)
    assert homotopy.t == 0.0
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    for _ in range(3):
        homotopy.step()
    options = {"magnitude": target} if isinstance(target, str) else target
    expected, _ = hb.convert_model(plain, **options)
    assert homotopy.done
    assert torch.equal(model(x), expected(x))
    assert [type(part) for part in model.modules()] == [type(part) for part in expected.modules()]
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert not any(part._forward_hooks for part in model.modules())
    assert homotopy.step() == 1.0


def test_standardized_convolutions_move_too():
    layers = pytest.importorskip("timm.layers")
    model, x = (
        nn.Sequential(layers.ScaledStdConv2d(3, 8, 3), nn.ReLU(), layers.StdConv2dSame(8, 4, 3, 2)).eval(),
        images(),
    )
    expected, _ = hb.convert_model(model, magnitude="tanh")
    exact, _ = hb.convert_model(model, magnitude="linear", weighting="linear")
    homotopy = hb.convert.Homotopy(exact, "tanh", steps=1)
    torch.testing.assert_close(exact(x), model(x))
    homotopy.step()
    assert torch.equal(exact(x), expected(x))


def test_on_the_way_a_layer_gives_the_mean_of_both():
    conv, x = nn.Conv2d(3, 4, 3, padding=1), images()
    target, _ = hb.convert_model(conv, magnitude="ball(rho=0.7, relative=False)")
    model = nn.Sequential(copy.deepcopy(conv))
    homotopy = hb.convert.Homotopy(model, {"magnitude": "ball(rho=0.7, relative=False)"}, steps=4)
    homotopy.step()
    torch.testing.assert_close(model(x), 0.75 * conv(x) + 0.25 * target(x))


def test_the_homotopy_moves_little_from_step_to_step():
    model, x = small_net().eval(), images()
    homotopy = hb.convert.Homotopy(model, "tanh", steps=50)
    gaps, before = [], model(x)
    for _ in range(50):
        homotopy.step()
        after = model(x)
        gaps.append(float((after - before).detach().abs().max()))
        before = after
    assert max(gaps) < 10 * sum(gaps) / len(gaps)


def test_a_homotopy_can_be_resumed():
    x = images()
    model = small_net().eval()
    fresh = copy.deepcopy(model)
    homotopy = hb.convert.Homotopy(model, "tanh", steps=4)
    homotopy.step()
    homotopy.step()
    with torch.no_grad():
        model[0].magnitude.ratio.fill_(1.3)
    again = hb.convert.Homotopy(fresh, "tanh", steps=4)
    fresh.load_state_dict(model.state_dict())
    again.load_state_dict(homotopy.state_dict())
    assert again.t == 0.5
    assert torch.equal(fresh(x), model(x))
    assert again.step() == homotopy.step() == 0.75
    assert torch.equal(fresh(x), model(x))
    again.load_state_dict({"position": 4, "steps": 4})
    assert again.done
    assert not any(part._forward_hooks for part in fresh.modules())


def test_gradients_reach_weights_and_radii_along_the_way_and_radii_see_the_data():
    model = small_net()
    homotopy = hb.convert.Homotopy(model, "tanh", steps=2)
    homotopy.step()
    model(images()).square().sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    assert model[0].magnitude.ratio.grad.abs().sum() > 0
    assert model[0].magnitude.batches == 1


def exact_net():
    return hb.convert_model(small_net(), magnitude="linear", weighting="linear")[0]


def no_convolution():
    return nn.Sequential(nn.Linear(3, 3), nn.AdaptiveAvgPool1d(1), nn.Linear(3, 2))


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((small_net(), "tanh", 0), ValueError, "`steps` must be a whole number >= 1"),
        ((small_net(), {"angular": "cosine"}, 2), ValueError, "`target` must have a magnitude"),
        ((small_net(), "tanhh", 2), ValueError, "did you mean 'tanh'"),
        ((small_net(), {"magnitude": "tanh", "weigting": "none"}, 2), ValueError, "did you mean 'weighting'"),
        ((small_net(), {"magnitude": "tanh", "inplace": False}, 2), ValueError, "unknown option 'inplace'"),
        ((small_net(), {"magnitude": "tanh", "pool": "hubber"}, 2), ValueError, "did you mean 'huber'"),
        (
            (exact_net(), {"magnitude": "tanh", "pool": "huber"}, 2),
            ValueError,
            "'pool', which a model that is converted",
        ),
        ((exact_net(), {"magnitude": "tanh", "skip": "3"}, 2), ValueError, "'skip', which a model that is converted"),
        ((no_convolution(), {"magnitude": "tanh", "pool": "huber"}, 2), ValueError, "nothing to convert"),
        ((nn.Linear(2, 2), "tanh", 2), ValueError, "nothing to convert"),
        (("resnet", "tanh", 2), TypeError, "torch.nn.Module"),
    ],
)
def test_a_wrong_homotopy_is_refused_and_the_model_stays(arguments, error, message):
    model = arguments[0]
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        hb.convert.Homotopy(*arguments)
    if before:
        assert_unchanged(model, before)
        assert not any(part._forward_hooks for part in model.modules())


def test_a_homotopy_may_bring_a_robust_pooling_and_leave_layers_out():
    model = small_net()
    homotopy = hb.convert.Homotopy(model, {"magnitude": "tanh", "pool": "huber", "skip": "3"}, steps=2)
    assert homotopy.layers == (model[0], model[4])
    assert isinstance(model[6], hb.nn.RobustPool2d)


@pytest.mark.parametrize(
    "held",
    [
        {}, {"position": 1}, {"position": 5, "steps": 4}, {"position": "x", "steps": 4}, {"position": 1, "steps": None},
        {"position": 1.5, "steps": 4}, [1, 4],
    ],
)  # fmt: skip
def test_a_wrong_position_is_refused(held):
    homotopy = hb.convert.Homotopy(small_net(), "tanh", steps=4)
    with pytest.raises((TypeError, ValueError), match="`state_dict` must"):
        homotopy.load_state_dict(held)
    assert homotopy.position == 0


def test_calibration_sets_mean_norms_and_statistics_to_those_of_the_data():
    layer = hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh")
    model = nn.Sequential(layer, nn.BatchNorm2d(8)).eval()
    batches = [5 * images() + 1 for _ in range(3)]
    weight = layer.weight.detach().clone()
    calibration = hb.convert.calibrate(model, [(x, None) for x in batches])
    assert calibration.batches == 3
    lengths = [nn.functional.unfold(x, 3).norm(dim=1).square().add(1e-4).sqrt().mean() for x in batches]
    assert float(layer.magnitude.running_length) == pytest.approx(float(torch.stack(lengths).mean()), rel=1e-5)
    layer.train()
    outputs = [layer(x) for x in batches]
    mean = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    var = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[1].running_var, var.detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.weight, weight)
    assert not model[1].training
    assert model[1].momentum == 0.1


def test_calibration_makes_evaluation_give_what_training_gives():
    converted, _ = hb.convert_model(small_net(), magnitude="tanh")
    x = 3 * images(16)
    hb.convert.calibrate(converted, [x])
    torch.testing.assert_close(converted.eval()(x), converted.train()(x), rtol=2e-2, atol=2e-2)


def test_calibration_leaves_dropout_off_and_modes_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.9), nn.BatchNorm2d(4)).train()
    x = images()
    hb.convert.calibrate(model, [x])
    torch.testing.assert_close(model[2].running_mean, model[0](x).mean((0, 2, 3)).detach(), rtol=1e-4, atol=1e-5)
    assert model.training
    assert model[1].training


@pytest.mark.parametrize(
    "batches, message",
    [
        ([], "at least one batch"),
        ([torch.full((2, 3, 8, 8), math.nan)], "not finite"),
        ([torch.zeros(2, 5, 8, 8)], "channels"),
    ],
)
def test_calibration_that_fails_changes_nothing(batches, message):
    converted, _ = hb.convert_model(small_net(), magnitude="tanh")
    hb.convert.calibrate(converted, [images()])
    before = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        hb.convert.calibrate(converted, batches)
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("batches", [5, None, images(), "images", {"x": images()}, ["images"], [(None, 1)]])
def test_calibration_takes_batches_not_one_batch(batches):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model(images())
    before = model[1].running_mean.clone()
    with pytest.raises(TypeError, match="`batches` must"):
        hb.convert.calibrate(model, batches)
    assert torch.equal(model[1].running_mean, before)


def test_there_must_be_something_to_calibrate():
    with pytest.raises(ValueError, match="no relative radius and no BatchNorm"):
        hb.convert.calibrate(nn.Linear(2, 2), [torch.zeros(1, 2)])


def test_state_dicts_of_bcos_networks_load_and_give_the_same_outputs():
    modules = pytest.importorskip("bcos.modules")
    theirs = nn.Sequential(
        modules.BcosConv2d(3, 8, 3, padding=1, b=2), modules.BcosConv2d(8, 6, 3, stride=2, groups=2, b=2)
    )
    options = {"magnitude": "linear", "angular": "square_cosine"}
    ours = nn.Sequential(
        hb.nn.DecoupledConv2d(3, 8, 3, padding=1, **options),
        hb.nn.DecoupledConv2d(8, 6, 3, stride=2, groups=2, **options),
    )
    hb.convert.load_bcos(ours, theirs.state_dict())
    x = images()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "layer, message",
    [
        (nn.Conv2d(3, 8, 3, bias=False), "linear [+] square_cosine layer at 0, got Conv2d"),
        (hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh"), "DecoupledConv2d of tanh × cosine, weighting none"),
        (hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear"), "linear × cosine"),
        (hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear(alpha=2)", angular="square_cosine"), "alpha=2"),
        (
            hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear", angular="square_cosine", weighting="linear"),
            "weighting linear",
        ),
    ],
)
def test_bcos_states_go_into_no_other_operator(layer, message):
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        hb.convert.load_bcos(nn.Sequential(layer), {"0.linear.weight": torch.randn(8, 3, 3, 3)})
    with pytest.raises(ValueError, match="no entry of a B-cos layer"):
        hb.convert.load_bcos(nn.Sequential(layer), nn.Sequential(layer).state_dict())
    assert torch.equal(layer.weight, before)


def test_a_bcos_layer_with_maxout_is_refused_for_its_shape():
    modules = pytest.importorskip("bcos.modules")
    theirs = nn.Sequential(modules.BcosConv2d(3, 8, 3, b=2, max_out=2))
    ours = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear", angular="square_cosine"))
    before = ours[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"0.weight is \(16, 3, 3, 3\), not \(8, 3, 3, 3\)"):
        hb.convert.load_bcos(ours, theirs.state_dict())
    assert torch.equal(ours[0].weight, before)
