"""The models: their architectures, options and names."""

import math

import pytest
import torch
from torch import nn

import hyperball as hb
from hyperball.nn.decoupled import Decoupled

SMALL = {
    "cnn9": {}, "cnn9_adv": {}, "resnet32": {"width": 8}, "cnn9_features": {}, "resnet18": {"width": 8},
    "resnet18_modified": {"width": 8}, "pointnet": {}, "digits": {}, "points": {},
}  # fmt: skip
OPTIONS = [
    {},
    {"magnitude": "tanh"},
    {"magnitude": "ball", "angular": "square_cosine", "weighting": "linear", "norm": None, "activation": None},
    {"magnitude": "seg", "norm": "robust", "activation": "prelu"},
    {"pool": "pseudo_huber(c=1)", "projection": "linf_ball(radius=3)"},
]


def inputs(name, batch=2):
    shape = hb.models.describe(name).input_shape
    if shape[-1] == 224:
        shape = (3, 64, 64)
    return torch.randn(batch, *((64, 3) if name in ("pointnet", "points") else shape))


def test_all_of_our_models_are_tested_here():
    assert {name for name in hb.models.names() if name != "tiny"} == set(SMALL)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SMALL)
def test_every_model_gives_logits_and_gradients_with_every_kind_of_option(name, options):
    model = hb.models.create(name, num_classes=7, **SMALL[name], **options)
    logits = model(inputs(name))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    decoupled = [part for part in model.modules() if isinstance(part, Decoupled)]
    assert bool(decoupled) == ("magnitude" in options)


@pytest.mark.parametrize("name", SMALL)
def test_the_plain_network_differs_from_the_decoupled_one_in_its_operators_alone(name):
    plain = hb.models.create(name, **SMALL[name])
    decoupled = hb.models.create(name, magnitude="linear", weighting="linear", **SMALL[name])
    assert plain.state_dict().keys() == decoupled.state_dict().keys()
    decoupled.load_state_dict(plain.state_dict())
    x = inputs(name)
    torch.testing.assert_close(decoupled.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)


CONVOLUTIONS = {
    "cnn9": [64] * 3 + [128] * 3 + [256] * 3,
    "cnn9_adv": [32] * 3 + [64] * 3 + [128] * 3,
    "resnet32": [96] * 11 + [192] * 10 + [384] * 10,
    "resnet18": [64] * 5 + [128] * 4 + [256] * 4 + [512] * 4,
    "resnet18_modified": [128] * 4 + [256] * 5 + [512] * 7 + [1024],
    "pointnet": [64, 128, 1024],
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_widths_are_those_of_the_papers(name):
    with torch.device("meta"):
        model = hb.models.create(name, magnitude="tanh")
    found = [part for part in model.modules() if isinstance(part, hb.nn.DecoupledConv1d | hb.nn.DecoupledConv2d)]
    assert [part.out_channels for part in found] == CONVOLUTIONS[name]


def test_fully_connected_layers_are_those_of_the_papers():
    with torch.device("meta"):
        nets = {name: hb.models.create(name) for name in ("cnn9", "cnn9_adv", "pointnet", "cnn9_features")}
    linear = {
        name: [(part.in_features, part.out_features) for part in net.modules() if isinstance(part, nn.Linear)]
        for name, net in nets.items()
    }
    assert linear["cnn9"] == [(4 * 4 * 256, 512), (512, 10)]
    assert linear["cnn9_adv"] == [(4 * 4 * 128, 256), (256, 10)]
    assert linear["pointnet"] == [(1024, 512), (512, 256), (256, 40)]
    assert linear["cnn9_features"] == [(3 * 3 * 128, 2), (2, 10)]
    (dropout,) = [part for part in nets["pointnet"].modules() if isinstance(part, nn.Dropout)]
    assert dropout.p == 0.3


def test_shortcuts_and_classifiers_are_plain_and_without_bias():
    model = hb.models.create("resnet32", magnitude="tanh", width=4)
    shortcuts = [part.downsample[0] for part in model.modules() if getattr(part, "downsample", None) is not None]
    assert [type(part) for part in (*shortcuts, model.fc)] == [nn.Conv2d, nn.Conv2d, nn.Linear]
    assert all(part.bias is None for part in (*shortcuts, model.fc))
    assert isinstance(model.relu, nn.Identity)  # nothing follows the normalization of the root


def test_weights_are_normal_with_variance_two_over_fan_in():
    model = hb.models.create("cnn9", magnitude="tanh")
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            expected = math.sqrt(2 / part.weight[0].numel())
            assert float(part.weight.detach().std()) == pytest.approx(expected, rel=0.1)


def test_normalization_takes_the_authors_constants():
    model = hb.models.create("digits", norm_eps=1e-3, norm_momentum=0.001)
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert {(part.eps, part.momentum) for part in norms} == {(1e-3, 0.001)}


def test_robust_normalization_takes_a_penalty():
    model = hb.models.create("pointnet", norm="robust", norm_penalty="pseudo_huber(c=2)")
    norms = [part for part in model.modules() if isinstance(part, hb.nn.RobustBatchNorm1d)]
    assert {(part.penalty.name, float(part.radius)) for part in norms} == {("pseudo_huber", 2.0)}


def test_prelu_begins_as_relu():
    options = {"magnitude": "tanh", "width": 4}
    relu, prelu = (hb.models.create("resnet32", activation=a, **options) for a in ("relu", "prelu"))
    prelu.load_state_dict(relu.state_dict(), strict=False)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(prelu.eval()(x), relu.eval()(x))


def test_features_are_what_the_classifier_is_given():
    model = hb.models.create("cnn9_features", magnitude="tanh").eval()
    x = torch.randn(3, 1, 28, 28)
    features = model.forward_features(x)
    assert features.shape == (3, 2)
    assert float(features.detach().min()) < 0  # nothing rectifies them
    torch.testing.assert_close(model.classifier(features), model(x))


def test_the_order_of_points_does_not_matter():
    model = hb.models.create("points", pool="huber(c=0.5)").eval()
    x = torch.randn(2, 50, 3)
    torch.testing.assert_close(model(x[:, torch.randperm(50)]), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool", ["max", "mean", "median"])
def test_points_are_pooled_by_name(pool):
    model = hb.models.create("points", pool=pool)
    x = torch.randn(2, 4, 9)
    expected = {"max": x.amax(-1), "mean": x.mean(-1), "median": x.median(-1).values}[pool]
    assert torch.equal(model.pool(x), expected)


def test_torchvisions_weights_load_into_our_resnet18():
    models = pytest.importorskip("torchvision.models")
    theirs = models.resnet18(num_classes=10).eval()
    ours = hb.models.create("resnet18", 10, classifier_bias=True).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("resnet23", {}, "unknown model 'resnet23'; did you mean 'resnet32'?"),
        ("tim/resnet18", {}, "unknown source 'tim'"),
        ("digits", {"magnitud": "tanh"}, "digits has no option 'magnitud'; did you mean 'magnitude'?"),
        ("digits", {"magnitude": "tan"}, "did you mean 'tanh'?"),
        ("digits", {"norm": "bach"}, "`norm` must be one of"),
        ("digits", {"activation": "gelu"}, "`activation` must be one of"),
        ("digits", {"projection": "l3_ball"}, "unknown projection 'l3_ball'"),
        ("digits", {"width": 0}, "`width` must be a whole number >= 1, got 0"),
        ("digits", {"num_classes": 0}, "`num_classes` must be >= 1, got 0"),
        ("cnn9", {"image_size": 4}, "`image_size` must be a whole number >= 8, got 4"),
        ("resnet18", {"stem": "cifr"}, "did you mean 'cifar'?"),
        ("pointnet", {"dropout": 1.0}, "`dropout` must be in"),
        ("points", {"pool": "maxx"}, "`pool` must be one of max, mean, median or a penalty"),
        ("cnn9", {"norm_eps": -1}, "`norm_eps` must be a number > 0, got -1"),
        ("cnn9", {"norm_eps": "x"}, "`norm_eps` must be a number > 0, got 'x'"),
        ("cnn9", {"norm_momentum": 7}, "`norm_momentum` must be None or a number in"),
        ("cnn9", {"norm_penalty": "huber"}, "`norm_penalty` goes with norm='robust', got norm='batch'"),
        ("cnn9", {"norm": "robust", "norm_penalty": "absolute"}, "`penalty` of a robust batch norm must be one of"),
    ],
)
def test_unknown_names_and_options_are_refused_with_a_suggestion(name, options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        hb.models.create(name, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bias": "yes"}, "`bias` must be True or False, got 'yes'"),
        ({"classifier_bias": 1}, "`classifier_bias` must be True or False, got 1"),
        ({"pool": 5}, "`pool` must be None, a penalty such as 'huber.c=1.' or its value, got 5"),
    ],
)
def test_options_of_another_type_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        hb.models.create("cnn9", **options)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("projection", [None, "l2_ball(radius=3)"])
def test_a_classifier_is_exchanged_for_another_number_of_classes(name, projection):
    model = hb.models.create(name, 5, projection=projection, **SMALL[name]).eval().double()
    x = inputs(name).double()
    features = model.forward_features(x)
    assert model.num_classes == 5
    torch.testing.assert_close(model.forward_head(features), model(x))
    kind, bias = type(model.get_classifier()), model.get_classifier().bias is not None
    model.reset_classifier(0)
    assert model.num_classes == 0
    assert torch.equal(model(x), features)
    model.reset_classifier(3)
    made = model.get_classifier()
    assert (type(made), made.bias is not None, made.weight.dtype) == (kind, bias, torch.float64)
    assert not made.training
    assert model(x).shape == (2, 3)


@pytest.mark.parametrize("given", [-1, 2.5, True])
def test_a_classifier_for_no_number_of_classes_is_refused(given):
    model = hb.models.create("digits")
    with pytest.raises(ValueError, match="`num_classes` must be a whole number >= 0"):
        model.reset_classifier(given)
    with pytest.raises(ValueError, match="`global_pool` cannot be changed"):
        model.reset_classifier(3, "avg")


def test_dropout_before_the_classifier_is_for_training_alone():
    model = hb.models.create("digits", classifier_bias=False)
    features = torch.ones(1, 64)
    model.drop_rate = 0.5
    assert set(model.forward_head(features, pre_logits=True).unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval().forward_head(features, pre_logits=True), features)


def test_images_are_no_points():
    with pytest.raises(ValueError, match=r"`x` must be points \[batch, number, 3\], got shape \(2, 3, 8, 8\)"):
        hb.models.create("points")(torch.randn(2, 3, 8, 8))


def test_a_model_can_be_registered_once_and_replaced_on_request():
    def bare(layers, num_classes, *, width=4):
        return nn.Sequential(
            layers.conv2d(3, width, 3), layers.global_pool(), nn.Flatten(), nn.Linear(width, num_classes)
        )

    hb.models.register("bare", bare, description="one convolution")
    try:
        assert "bare" in hb.models.names()
        assert hb.models.create("bare", 3, width=5, magnitude="log")(torch.randn(2, 3, 6, 6)).shape == (2, 3)
        with pytest.raises(ValueError, match="already a model"):
            hb.models.register("bare", bare)
        hb.models.register("bare", bare, replace=True)
    finally:
        hb.models.registry.TABLE.pop("bare")


def test_a_model_comes_back_from_its_file(tmp_path):
    pytest.importorskip("safetensors")
    options = {"magnitude": "ball", "pool": "huber(c=2)", "projection": "l2_ball(radius=3)"}
    model = hb.models.create("digits", 4, **options).eval()
    path = hb.models.save(model, tmp_path / "m.safetensors", name="digits", num_classes=4, options=options)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(hb.models.load(path).eval()(x), model(x))
    nameless = hb.convert.save(model, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not say which model it holds"):
        hb.models.load(nameless)
