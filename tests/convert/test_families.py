"""Linearly weighted linear + cosine is the network itself, for many families of torchvision and timm."""

import pytest
import torch
from convert_families import FAMILIES, SLOW_FAMILIES, family

import hyperball as hb

pytest.importorskip("timm")
pytest.importorskip("torchvision")


def check_exact(name, size):
    model = family(name)
    x = torch.randn(2, 3, size, size)
    converted, report = hb.convert_model(model, magnitude="linear", weighting="linear", batch=x)
    with torch.no_grad():
        expected = model(x)
    assert expected.std() > 1e-6
    assert (expected[0] - expected[1]).abs().max() > 1e-6 * expected.abs().max()  # the input matters
    torch.testing.assert_close(converted(x), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert report.difference.relative < 1e-5
    assert len(report.replaced) + len(report.kept) == sum(
        isinstance(part, torch.nn.modules.conv._ConvNd) for part in model.modules()
    )
    assert len(report.replaced) >= 1


@pytest.mark.parametrize("name, size", FAMILIES.items())
def test_linear_cosine_linearly_weighted_is_the_network_itself(name, size):
    check_exact(name, size)


@pytest.mark.slow
@pytest.mark.parametrize("name, size", SLOW_FAMILIES.items())
def test_linear_cosine_linearly_weighted_is_the_network_itself_for_more_families(name, size):
    check_exact(name, size)


@pytest.mark.parametrize(
    "name", ["torchvision/mobilenet_v3_small", "timm/nf_resnet26", "timm/tf_mobilenetv3_small_100"]
)
def test_gradients_of_the_exact_conversion_are_those_of_the_network(name):
    model = family(name)
    converted, _ = hb.convert_model(model, magnitude="linear", weighting="linear")
    x = torch.randn(2, 3, 64, 64)
    for net in (model, converted):
        (net(x).square().sum() / 100).backward()
    plain = dict(model.named_parameters())
    for path, parameter in converted.named_parameters():
        if path in plain:
            scale = float(plain[path].grad.abs().max()) + 1e-12
            torch.testing.assert_close(parameter.grad / scale, plain[path].grad / scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, kept",
    [
        ("torchvision/resnet18", {"layer2.0.downsample.0", "layer3.0.downsample.0", "layer4.0.downsample.0"}),
        ("torchvision/resnet50", {f"layer{i}.0.downsample.0" for i in (1, 2, 3, 4)}),
        ("torchvision/regnet_x_400mf", {f"trunk_output.block{i}.block{i}-0.proj.0" for i in (1, 2, 3, 4)}),
        ("timm/regnetx_002", {f"s{i}.b1.downsample.conv" for i in (1, 2, 3, 4)}),
        ("torchvision/squeezenet1_1", {"classifier.1"}),
        ("torchvision/googlenet", set()),
        ("torchvision/densenet121", set()),
        ("torchvision/mobilenet_v2", set()),
        ("timm/convnext_atto", set()),
        ("timm/repvit_m0_9", set()),
    ],
)
def test_shortcuts_and_classifiers_alone_stay_plain(name, kept):
    _, report = hb.convert_model(hb.models.create(name, num_classes=10), magnitude="tanh", inplace=True)
    assert {entry.name for entry in report.kept} == kept


def test_the_two_entrances_of_a_nasnet_cell_are_no_shortcuts():
    with torch.device("meta"):
        model = hb.models.create("timm/nasnetalarge", num_classes=10)
    _, report = hb.convert_model(model, magnitude="tanh", convolutions="all", inplace=True)
    assert report.kept == ()


@pytest.mark.parametrize(
    "name", ["torchvision/resnet18", "torchvision/googlenet", "torchvision/densenet121", "timm/convnext_atto"]
)
def test_robust_pooling_with_a_wide_radius_is_the_average(name):
    model = family(name)
    x = torch.randn(2, 3, 64, 64)
    _, report = hb.convert_model(model, pool="huber(c=1e4)", batch=x)
    assert len(report.replaced) == 1
    assert report.difference.relative < 1e-4


@pytest.mark.parametrize(
    "name, classifier",
    [
        ("torchvision/resnet18", "fc"),
        ("torchvision/googlenet", "fc"),
        ("torchvision/densenet121", "classifier"),
        ("torchvision/alexnet", "classifier.6"),
        ("torchvision/vgg11", "classifier.6"),
        ("timm/convnext_atto", "head.fc"),
        ("timm/vit_tiny_patch16_224", "head"),
    ],
)
def test_a_projection_is_put_before_the_linear_classifier(name, classifier):
    model = hb.models.create(name, num_classes=5)
    converted, report = hb.convert_model(model, projection="l2_ball(radius=3)", inplace=True)
    head = converted.get_submodule(classifier)
    assert isinstance(head, hb.convert.ProjectedLinear)
    assert [entry.name for entry in report.replaced] == [classifier]
    assert report.added_parameters == 1  # the radius: the whitening has no affine parameters
    features = head.features(10 * torch.randn(8, head.in_features))
    assert features.norm(dim=1).max() <= 3 * (1 + 1e-5)
    with torch.no_grad():
        head.projection.log_radius.fill_(20.0)
        head.norm.reset_running_stats()
        head.norm.running_var.fill_(1.0 - head.norm.eps)
        given = torch.randn(4, head.in_features)
        expected = torch.nn.functional.linear(given, head.weight, head.bias)
        torch.testing.assert_close(head.eval()(given), expected, rtol=1e-4, atol=1e-4)
