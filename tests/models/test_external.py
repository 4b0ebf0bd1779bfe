"""torchvision's and timm's models by name, and ours among timm's."""

import importlib

import pytest
import torch
from torch import nn

import hyperball as hb

timm = pytest.importorskip("timm")
pytest.importorskip("torchvision")


@pytest.mark.parametrize("name", ["torchvision/resnet18", "timm/resnet18", "timm/resnet18.a1_in1k"])
def test_a_model_is_made_by_name_and_converted_on_request(name):
    plain = hb.models.create(name, num_classes=6)
    assert not any(isinstance(part, hb.nn.DecoupledConv2d) for part in plain.modules())
    converted = hb.models.create(
        name, num_classes=6, magnitude="tanh", pool="huber", projection="l2_ball", convolutions="all_but_first"
    )
    kinds = [type(part) for part in converted.modules()]
    assert kinds.count(hb.nn.DecoupledConv2d) == 16
    assert kinds.count(hb.convert.ProjectedLinear) == 1
    assert converted.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 6)


def test_auxiliary_heads_are_off_so_that_training_gives_logits():
    model = hb.models.create("torchvision/googlenet", num_classes=4).train()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 4)


@pytest.mark.parametrize(
    "name, message",
    [
        ("timm/resnt50", "unknown timm model 'resnt50'; did you mean 'resnet50'"),
        ("timm/resnet50.a1_in1kk", "unknown timm model 'resnet50.a1_in1kk'; did you mean 'resnet50.a1_in1k'"),
        ("torchvision/resnet81", "unknown torchvision model 'resnet81'; did you mean 'resnet18'"),
    ],
)
def test_unknown_names_are_refused_with_suggestions(name, message):
    with pytest.raises(ValueError, match=message):
        hb.models.create(name)


def test_a_wrong_option_is_refused():
    with pytest.raises(ValueError, match=r"resnet18 refuses an option: .*'widht'"):
        hb.models.create("torchvision/resnet18", widht=3)
    with pytest.raises(TypeError, match="`pretrained` must be True or False"):
        hb.models.create("torchvision/resnet18", pretrained="yes")

    with pytest.raises(ValueError, match=r"'magnitud'; did you mean 'magnitude'\?"):
        hb.models.create("timm/resnet18", magnitud="tanh")
    with pytest.raises(ValueError, match=r"`weights` is not taken, got 'DEFAULT'; pretrained=True"):
        hb.models.create("torchvision/resnet18", weights="DEFAULT")


@pytest.mark.parametrize(
    "options, message",
    [({"angular": "bogus"}, "unknown angular function 'bogus'"), ({"weighting": "bogus"}, "`weighting` must be")],
)
def test_an_operator_is_checked_even_where_nothing_is_converted(options, message):
    with pytest.raises(ValueError, match=message):
        hb.models.create("timm/resnet18", **options)


def robust_parts(model):
    return [name for name, part in model.named_modules() if isinstance(part, hb.nn.RobustPool2d)]


def test_a_pooling_function_is_found_without_a_batch_and_again_on_loading(tmp_path):
    pytest.importorskip("safetensors")
    name, options = "torchvision/mobilenet_v2", {"pool": "huber(c=0.5)", "magnitude": "tanh"}
    model = hb.models.create(name, num_classes=4, **options).eval()
    assert robust_parts(model) == ["robust_pool.pool"]
    path = hb.models.save(model, tmp_path / "m.safetensors", name=name, num_classes=4, options=options)
    again = hb.models.load(path).eval()
    x = torch.randn(2, 3, 64, 64)
    assert robust_parts(again) == ["robust_pool.pool"]
    torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize("name", ["torchvision/densenet121", "torchvision/shufflenet_v2_x0_5"])
def test_a_batch_of_the_users_shows_where_a_function_pools(name):
    model = hb.models.create(name, num_classes=4, pool="huber", batch=torch.randn(2, 3, 64, 64))
    assert robust_parts(model) == ["robust_pool.pool"]


@pytest.mark.parametrize(
    "name, heads",
    [
        ("timm/mobilenetv3_small_050", ["classifier"]),
        ("timm/deit_tiny_distilled_patch16_224", ["head", "head_dist"]),
        ("torchvision/alexnet", ["classifier.6"]),
    ],
)
def test_every_linear_classifier_is_projected(name, heads):
    model = hb.models.create(name, num_classes=10, projection="l1_ball(radius=1)")
    found = [path for path, part in model.named_modules() if isinstance(part, hb.convert.ProjectedLinear)]
    assert found == heads


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Cast(nn.Linear):
    def forward(self, input):
        return nn.functional.linear(input, self.weight.to(input.dtype), self.bias)


def test_a_subclass_of_linear_is_projected_if_it_is_a_linear_map():
    plain, scaled = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), kind(4, 2)) for kind in (Cast, Scaled))
    converted, _ = hb.convert_model(plain, projection="l2_ball")
    assert isinstance(converted[2], hb.convert.ProjectedLinear)
    assert torch.equal(converted[2].weight, plain[2].weight)
    with pytest.raises(ValueError, match="needs a linear classifier at the end, Sequential has Scaled '2'"):
        hb.convert_model(scaled, projection="l2_ball")


def test_another_number_of_classes_replaces_a_pretrained_classifier():
    from hyperball.models.external import with_classes

    model = hb.models.create("torchvision/mobilenet_v2", num_classes=10)
    assert with_classes(model, 3).classifier[1].out_features == 3
    with pytest.raises(ValueError, match="has no linear classifier"):
        with_classes(nn.Sequential(nn.Conv2d(3, 4, 3)), 3)


def test_ours_are_models_of_timm():
    added = hb.models.register_with_timm()
    assert "hyperball_resnet32" in added
    assert hb.models.register_with_timm() == added
    model = timm.create_model("hyperball_resnet32", num_classes=7, in_chans=1, width=4, magnitude="tanh")
    assert isinstance(model.conv1, hb.nn.DecoupledConv2d)
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 7)
    assert set(timm.list_models("hyperball_*")) == set(added)


@pytest.mark.parametrize("name", ["timm/resnet18", "torchvision/resnet18"])
def test_a_missing_package_is_named_with_the_extra(name, monkeypatch):
    def missing(package, *_):
        raise ImportError(f"No module named {package!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'hyperball\[vision\]'"):
        hb.models.create(name)


def test_ours_tell_timm_what_it_asks_for():
    hb.models.register_with_timm()
    model = timm.create_model("hyperball_resnet32", num_classes=0, width=4, drop_rate=0.1)
    assert (model.num_classes, model.drop_rate) == (0, 0.1)
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, model.num_features)
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 32, 32)
    model.reset_classifier(3)
    assert model.get_classifier() is model.fc
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)
    gray = timm.create_model("hyperball_cnn9_features", image_size=16)
    data = timm.data.resolve_model_data_config(gray)
    assert (data["input_size"], len(data["mean"])) == ((1, 16, 16), 1)
    assert gray.pretrained_cfg["classifier"] == "classifier"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"features_only": True}, "`features_only`: hyperball_digits gives no feature maps"),
        ({"drop_path_rate": 0.1}, "`drop_path_rate`: hyperball_digits has no stochastic depth"),
        ({"drop_rate": 1.5}, "`drop_rate` must be in"),
        ({"pretrained": True}, "there are no pretrained weights"),
    ],
)
def test_what_timm_asks_of_ours_in_vain_is_refused_in_words(options, message):
    hb.models.register_with_timm()
    with pytest.raises(ValueError, match=message):
        timm.create_model("hyperball_digits", **options)


@pytest.mark.parametrize("name", ["alexnet", "vgg11", "vgg11_bn"])
def test_a_small_head_is_one_linear_layer_that_can_be_projected(name):
    pytest.importorskip("torchvision")
    network = hb.models.create(f"torchvision/{name}", num_classes=7, small_head=True, projection="l2_ball").eval()
    linear = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linear) == 1
    assert linear[0].in_features == (256 if name == "alexnet" else 512)
    with torch.no_grad():
        assert network(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_a_small_head_is_refused_where_there_is_no_large_one():
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match="`small_head` is for networks with a pooling and several linear layers"):
        hb.models.create("torchvision/resnet18", num_classes=7, small_head=True)
    with pytest.raises(TypeError, match="`small_head` must be True or False, got 3"):
        hb.models.create("torchvision/vgg11", num_classes=7, small_head=3)
