"""Layers that cannot be converted, what else a convolution holds, and copies of models that torch does not copy."""

import warnings

import pytest
import torch
from convert_cases import images, names
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

import hyperball as hb


def make_lazy():
    return nn.LazyConv2d(8, 3)


def make_weight_norm():
    return parametrizations.weight_norm(nn.Conv2d(3, 8, 3))


def make_pruned(name="weight"):
    layer = nn.Conv2d(3, 8, 3)
    prune.l1_unstructured(layer, name, 0.5)
    return layer


def make_normed_by_a_hook(norm):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have its parametrizations used
        return norm(nn.Conv2d(3, 8, 3))


def make_wrapped():
    layer = nn.Conv2d(3, 8, 3)
    layer.forward = lambda x: nn.Conv2d.forward(layer, x) * 2
    return layer


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledByCall(nn.Conv2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


class DoubledByAttribute(nn.Conv2d):
    doubled = False  # until the weight is initialized

    def __getattr__(self, name):
        held = super().__getattr__(name)
        return 2 * held if name == "weight" and self.doubled else held


def make_doubled_by_attribute():
    layer = DoubledByAttribute(3, 8, 3)
    layer.doubled = True
    return layer


def make_holding(name):
    layer = nn.Conv2d(3, 8, 3)
    layer.register_buffer(name, torch.ones(1))
    return layer


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "make, reason",
    [
        (make_lazy, "lazy"),
        (make_weight_norm, "parametrized"),
        (make_pruned, "weight is not a parameter"),
        (lambda: make_pruned("bias"), "bias is not a parameter"),
        (lambda: make_normed_by_a_hook(utils.weight_norm), "weight is not a parameter"),
        (lambda: make_normed_by_a_hook(utils.spectral_norm), "weight is not a parameter"),
        (lambda: make_holding("magnitude"), "'magnitude', which means something else"),
        (lambda: make_holding("filters"), "'filters', which means something else"),
        (make_wrapped, "wrapped"),
        (lambda: Doubled(3, 8, 3), "forward of its own"),
        (lambda: DoubledByCall(3, 8, 3), "call of its own"),
        (make_doubled_by_attribute, "getattr of its own"),
    ],
)
def test_layers_that_cannot_be_converted_are_reported_and_left_as_they_are(make, reason, inplace):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.ReLU(), nn.Conv2d(8, 4, 3))
    torch.manual_seed(0)
    twin = nn.Sequential(make(), nn.ReLU(), nn.Conv2d(8, 4, 3))
    converted, report = hb.convert_model(model, magnitude="linear", weighting="linear", inplace=inplace)
    assert names(report.replaced) == ["2"]
    assert reason in report.kept[0].reason
    x = images()
    torch.manual_seed(1)
    expected = twin(x)
    torch.manual_seed(1)
    torch.testing.assert_close(converted(x), expected)


def test_a_subclass_without_a_forward_of_its_own_is_converted():
    class Named(nn.Conv2d):
        pass

    converted, _ = hb.convert_model(nn.Sequential(Named(3, 4, 3)), magnitude="tanh")
    assert type(converted[0]) is hb.nn.DecoupledConv2d


class Masked(nn.Conv2d):
    """Has more than a convolution's weight and bias, and no forward of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("mask", torch.rand(2))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        self.gamma = nn.Parameter(torch.rand(1))
        self.sub = nn.Linear(2, 2)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_convolutions_own_parameters_buffers_and_submodules_are_kept(inplace):
    model = nn.Sequential(Masked(3, 4, 3))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    saved = set(model.state_dict())
    converted, report = hb.convert_model(model, magnitude="tanh", inplace=inplace)
    after = {**dict(converted.named_parameters()), **dict(converted.named_buffers())}
    assert before.keys() <= after.keys()
    assert all(torch.equal(after[name], held) for name, held in before.items())
    assert report.added_parameters == 4
    assert saved == {name for name in converted.state_dict() if "magnitude" not in name}
    assert "sub" in dict(converted[0].named_children())


def test_a_model_is_copied_with_what_a_forward_pass_left_behind_and_hooks_make_weights_again():
    model = nn.Sequential(make_pruned(), nn.Conv2d(8, 4, 3))
    model.left = {"outputs": [model(images())]}
    converted, _ = hb.convert_model(model, magnitude="linear", weighting="linear")
    with torch.no_grad():
        for net in (model, converted):
            net[0].weight_orig.fill_(0.3)
    x = images()
    torch.testing.assert_close(converted(x), model(x))
    frozen = hb.freeze(converted)
    torch.testing.assert_close(frozen(x), model(x))
    converted(x).sum().backward()
    assert converted[0].weight_orig.grad is not None
    assert model[0].weight_orig.grad is None


class Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("one is enough")


def test_what_cannot_be_copied_is_named_with_the_way_around():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.Conv2d(4, 4, 3)))
    model[1][0].lock = Uncopied()
    with pytest.raises(
        RuntimeError, match=r"'lock' of 1\.0 \(Conv2d\) cannot be copied .*one is enough.*`inplace=True`"
    ):
        hb.convert_model(model, magnitude="tanh")
    _, report = hb.convert_model(model, magnitude="tanh", inplace=True)
    assert len(report.replaced) == 2
