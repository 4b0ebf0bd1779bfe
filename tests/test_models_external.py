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
