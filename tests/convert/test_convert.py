"""The converter: what it replaces and keeps, what it preserves, and what it refuses."""

import copy
import json
import math
import pickle

import pytest
import torch
from convert_cases import assert_unchanged, images, names, small_net, state
from torch import nn

import hyperball as hb
from hyperball.convert.layers import TWINS
from hyperball.convert.running import difference


def test_convolutions_are_replaced_and_shortcuts_found_by_structure_are_kept():
    converted, report = hb.convert_model(small_net(), magnitude="tanh")
    assert names(report.replaced) == ["0", "3.body.0", "3.body.2", "4"]
    assert [(entry.name, "shortcut" in entry.reason) for entry in report.kept] == [("3.match", True)]
    assert isinstance(converted[0], hb.nn.DecoupledConv2d)
    assert report.added_parameters == 8 + 12 + 12 + 12
    assert converted(images()).shape == (4, 5)


def test_shortcuts_are_converted_on_request():
    _, report = hb.convert_model(small_net(), magnitude="tanh", keep_shortcuts=False)
    assert "3.match" in names(report.replaced)


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("all_but_first", ["3.body.0", "3.body.2", "4"]),
        ("3", ["3.match", "3.body.0", "3.body.2"]),
        (["0", "*.body.2"], ["0", "3.body.2"]),
        (lambda name, part: part.kernel_size == (1, 1), ["3.match", "4"]),
    ],
)
def test_which_convolutions_can_be_chosen(choice, expected):
    _, report = hb.convert_model(small_net(), magnitude="ball", convolutions=choice)
    assert names(report.replaced) == expected


def test_skipped_layers_say_which_pattern_skipped_them():
    _, report = hb.convert_model(small_net(), magnitude="ball", skip=["3.body"])
    assert {entry.name: entry.reason for entry in report.kept}["3.body.0"] == "skipped by '3.body'"


def test_the_model_is_copied_unless_inplace():
    model = small_net()
    before = state(model)
    converted, _ = hb.convert_model(model, magnitude="tanh")
    assert converted is not model
    assert_unchanged(model, before)
    same, _ = hb.convert_model(model, magnitude="tanh", inplace=True)
    assert same is model
    assert isinstance(model[0], hb.nn.DecoupledConv2d)


def test_inplace_keeps_modules_and_parameters_so_that_an_optimizer_stays_valid():
    model = small_net()
    first, weight = model[0], model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hb.convert_model(model, magnitude="tanh", inplace=True)
    assert model[0] is first
    assert model[0].weight is weight
    before = weight.detach().clone()
    model(images()).sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_mode_and_requires_grad_are_kept(dtype):
    model = small_net().to(dtype)
    model[0].eval()
    model[0].weight.requires_grad_(False)
    converted, _ = hb.convert_model(model, magnitude="ball")
    assert converted[0].weight.dtype == dtype
    assert converted[0].magnitude.ratio.dtype == dtype
    assert not converted[0].training
    assert converted[4].training
    assert not converted[0].magnitude.training
    assert not converted[0].weight.requires_grad
    assert converted[0].bias.requires_grad


def test_the_meta_device_is_kept():
    with torch.device("meta"):
        model = small_net()
    converted, report = hb.convert_model(model, magnitude="ball", pool="huber(learn_c=True)", projection="l2_ball")
    assert len(report.replaced) == 6
    assert all(tensor.is_meta for tensor in converted.state_dict().values())


def test_hooks_attributes_and_handles_survive():
    model = small_net()
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("after"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[0].label = "stem"
    converted, _ = hb.convert_model(model, magnitude="tanh", inplace=True)
    converted(images())
    assert calls == ["before", "after"]
    assert converted[0].label == "stem"
    handle.remove()
    converted(images())
    assert calls == ["before", "after", "before"]


def test_shared_modules_and_shared_weights_stay_shared():
    shared = nn.Conv2d(4, 4, 3, padding=1)
    tied = nn.Conv2d(4, 4, 3, padding=1)
    tied.weight = shared.weight
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, tied)})
    converted, report = hb.convert_model(model, magnitude="tanh")
    assert converted["a"] is converted["b"][0]
    assert converted["a"].weight is converted["b"][1].weight
    assert names(report.replaced) == ["a", "b.1"]


@pytest.mark.parametrize("choice", ["b", "b.*", ["b.0"], lambda name, part: name == "b.0"])
def test_every_path_of_a_shared_layer_counts(choice):
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.ModuleDict({"a": conv, "b": nn.Sequential(conv), "c": nn.Conv2d(3, 3, 3)})
    converted, report = hb.convert_model(model, magnitude="tanh", convolutions=choice)
    assert names(report.replaced) == ["a"]
    assert converted["a"] is converted["b"][0]
    if not callable(choice):
        _, report = hb.convert_model(model, magnitude="tanh", skip=choice)
        assert names(report.replaced) == ["c"]
        assert names(report.kept) == ["a"]


def test_a_shared_pooling_and_a_shared_classifier_are_skipped_by_any_path():
    model = small_net()
    model.last, model.pooling = model[8], model[6]
    options = {"magnitude": "tanh", "pool": "huber", "projection": "l2_ball"}
    _, report = hb.convert_model(model, **options, skip=["last", "pooling"])
    assert {entry.name: entry.reason for entry in report.kept}["6"] == "skipped by 'pooling'"
    assert {entry.name: entry.reason for entry in report.kept}["8"] == "skipped by 'last'"


def test_converting_twice_changes_nothing():
    once, _ = hb.convert_model(small_net(), magnitude="tanh", pool="huber", projection="l2_ball")
    before = state(once)
    twice, report = hb.convert_model(once, magnitude="tanh", pool="huber", projection="l2_ball")
    assert report.replaced == ()
    assert report.added_parameters == 0
    assert_unchanged(twice, before)
    assert {entry.reason for entry in report.kept} >= {
        "it is decoupled already", "it is robust already", "it is projected already"
    }  # fmt: skip


@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_kind_of_convolution_keeps_its_function(kind, groups):
    dims = int(kind.__name__[-2])
    model = nn.Sequential(kind(4, 8, 3, stride=2, padding=1, dilation=1, groups=groups))
    x = torch.randn(2, 4, *(9, 8, 7)[:dims])
    converted, report = hb.convert_model(model, magnitude="linear", weighting="linear", batch=x)
    assert type(converted[0]) is TWINS[kind]
    assert report.difference.relative < 1e-6
    torch.testing.assert_close(converted(x), model(x))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding_modes_keep_their_function(mode):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, padding_mode=mode))
    converted, _ = hb.convert_model(model, magnitude="linear", weighting="linear")
    x = images()
    torch.testing.assert_close(converted(x), model(x))


def test_depthwise_and_pointwise_convolutions_are_decoupled():
    model = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 3))
    converted, report = hb.convert_model(model, magnitude="ball(rho=0.5, relative=False)")
    assert len(report.replaced) == 3
    x = torch.randn(2, 6, 8, 8)
    expected = hb.functional.decoupled_conv2d(
        x, model[0].weight, model[0].bias, padding=1, groups=6, magnitude="ball(rho=0.5)"
    )
    torch.testing.assert_close(converted[0](x), expected)


def test_a_bare_convolution_is_converted():
    converted, _ = hb.convert_model(nn.Conv2d(3, 4, 3), magnitude="tanh")
    assert type(converted) is hb.nn.DecoupledConv2d


def test_conversion_draws_nothing_from_the_generator():
    model = small_net()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    hb.convert_model(model, magnitude="tanh", pool="huber", projection="linf_ball", batch=images().detach())
    torch.manual_seed(3)
    hb.convert_model(model, magnitude="tanh", projection="linf_ball")
    assert torch.equal(torch.rand(3), expected)


def test_the_report_is_data_and_a_text():
    _, report = hb.convert_model(small_net(), magnitude="tanh", batch=images())
    read = json.loads(json.dumps(report.as_dict()))
    assert read["replaced"][0] == {"name": "0", "before": "Conv2d", "after": "DecoupledConv2d"}
    assert read["difference"]["absolute"] > 0
    text = str(report)
    assert "4 layers replaced, 1 kept; operator tanh × cosine" in text
    assert "3.match" in text
    assert "output difference on the batch" in text


def test_a_difference_that_is_no_number_is_a_text_in_json():
    x = images()
    x[1, 0, 4, 4] = math.nan
    _, report = hb.convert_model(nn.Sequential(nn.Conv2d(3, 4, 3)), magnitude="tanh", batch=x)
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert read["difference"] == {"absolute": "nan", "relative": "nan"}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "before, after, expected",
    [
        ([2.0, 4.0], [2.0, 3.0], (1.0, 0.25)),
        ([math.inf, 4.0], [math.inf, 3.0], (1.0, 0.25)),
        ([math.inf, 4.0], [-math.inf, 3.0], (math.inf, math.inf)),
        ([1.0, 4.0], [math.inf, 4.0], (math.inf, math.inf)),
        ([1.0, 4.0], [math.nan, 4.0], (math.nan, math.nan)),
        ([math.nan, 4.0], [math.nan, 4.0], (math.nan, math.nan)),
    ],
)
def test_differences_see_what_is_not_finite_wherever_it_stands(before, after, expected, place):
    outputs = [[torch.tensor(values), torch.tensor([1.0])] for values in (before, after)]
    gap = difference(*(held[::-1] if place else held for held in outputs))
    assert (gap.absolute, gap.relative) == pytest.approx(expected, nan_ok=True)


def test_a_converted_model_can_be_copied_pickled_and_frozen():
    converted, _ = hb.convert_model(small_net().eval(), magnitude="tanh", pool="huber")
    x = images()
    expected = converted(x)
    torch.testing.assert_close(copy.deepcopy(converted)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(converted))(x), expected)
    torch.testing.assert_close(hb.freeze(converted)(x), expected, rtol=1e-5, atol=1e-5)


class FunctionalPool(nn.Module):
    """Pools by a function, after a ReLU that is a function too."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = nn.functional.adaptive_avg_pool2d(self.features(x).relu(), 1)
        return self.fc(self.drop(x.flatten(1)))


def test_pooling_by_a_function_is_replaced_by_hooks_where_a_batch_shows_it():
    model, x = FunctionalPool().eval(), images()
    _, report = hb.convert_model(model, pool="huber(c=1e4)", batch=x)
    assert report.difference.relative < 1e-4
    assert "by hooks on features and drop" in report.replaced[0].after
    far, report = hb.convert_model(model, pool="huber(c=0.1, learn_c=True)", batch=x)
    pooled = hb.functional.robust_pool(model.features(x).relu(), (2, 3), penalty="huber(c=0.1)")
    torch.testing.assert_close(far(x), model.fc(pooled), rtol=1e-4, atol=1e-5)
    assert "robust_pool.pool.log_c" in far.state_dict()
    far(x).sum().backward()
    assert far.robust_pool.pool.log_c.grad is not None
    torch.testing.assert_close(copy.deepcopy(far)(x), far(x))


def test_pooling_by_a_function_is_refused_without_a_batch():
    model = FunctionalPool()
    before = state(model)
    with pytest.raises(ValueError, match="give a `batch`"):
        hb.convert_model(model, magnitude="tanh", pool="huber", inplace=True)
    assert_unchanged(model, before)


class Gate(nn.Module):
    """Squeeze and excitation, by a module or by a function."""

    def __init__(self, by_function=False):
        super().__init__()
        self.pool, self.conv = (None if by_function else nn.AdaptiveAvgPool2d(1)), nn.Conv2d(6, 6, 1)

    def forward(self, x):
        return x * self.conv(x.mean((2, 3), keepdim=True) if self.pool is None else self.pool(x)).sigmoid()


def test_a_gate_that_pools_by_a_function_is_not_taken_for_the_global_pooling():
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), Gate(by_function=True), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(216, 4)
    )
    with pytest.raises(ValueError, match="none of its modules is given the average"):
        hb.convert_model(model, pool="huber", batch=images())


def test_a_skipped_classifier_takes_no_projection():
    _, report = hb.convert_model(small_net(), magnitude="tanh", projection="l2_ball", skip="8")
    assert report.kept[-1].name == "8"
    assert report.kept[-1].reason == "skipped by '8'"


def test_the_pooling_inside_squeeze_and_excitation_is_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Gate(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    _, report = hb.convert_model(model, pool="huber")
    assert names(report.replaced) == ["2"]


@pytest.mark.gpu
def test_conversion_on_a_gpu_stays_there_and_gives_what_the_cpu_gives():
    options = {"magnitude": "tanh", "pool": "huber(learn_c=True)", "projection": "l2_ball(radius=2)"}
    model, x = small_net(), images()
    here, _ = hb.convert_model(model, **options)
    there, _ = hb.convert_model(model.cuda(), **options, batch=x.cuda())
    assert all(tensor.is_cuda for tensor in there.state_dict().values())
    for net, given in ((here, x), (there, x.cuda())):
        hb.convert.calibrate(net, [given])
    torch.testing.assert_close(there.eval()(x.cuda()).cpu(), here.eval()(x), rtol=1e-3, atol=1e-3)
    assert hb.bounds(there).lipschitz == pytest.approx(hb.bounds(here).lipschitz, rel=1e-2)
