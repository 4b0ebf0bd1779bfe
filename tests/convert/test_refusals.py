"""What the converter refuses, in which words, and that the model is then as it was."""

import pytest
import torch
from convert_cases import assert_unchanged, images, small_net, state
from torch import nn

import hyperball as hb


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "give a `magnitude`, a `pool` or a `projection`"),
        ({"magnitude": "tan"}, "did you mean 'tanh'"),
        ({"magnitude": "tanh", "angular": "cosin"}, "did you mean 'cosine'"),
        ({"magnitude": "tanh", "weighting": "liner"}, "did you mean 'linear'"),
        ({"magnitude": "seg", "weighting": "split"}, "split"),
        ({"magnitude": "tanh", "skip": "3.bod"}, "matches nothing; did you mean '3.body'"),
        ({"magnitude": "tanh", "skip": ["layer9.*"]}, "matches nothing; known: 0, 1, 2"),
        ({"magnitude": "tanh", "convolutions": "all_but_frist"}, "did you mean 'all_but_first'"),
        ({"magnitude": "tanh", "convolutions": ["9"]}, "`convolutions` has the pattern '9', which matches nothing"),
        ({"projection": "l2_bal"}, "did you mean 'l2_ball'"),
        ({"projection": "l2_ball(radus=2)"}, "did you mean 'radius'"),
        ({"projection": "l2_ball(radius=-1)"}, "`radius` must be finite and > 0"),
        ({"pool": "hubr"}, "`pool` must be a penalty .*did you mean 'huber'"),
        ({"pool": 5}, "`pool` must be a penalty such as 'huber(c=1)', got 5"),
        ({"pool": "huber", "angular": "cosin"}, "did you mean 'cosine'"),
        ({"pool": "huber", "weighting": "liner"}, "did you mean 'linear'"),
        ({"magnitude": "tanh", "skip": 5}, "`skip` must be a path pattern"),
        ({"magnitude": "tanh", "skip": None}, "`skip` must be a path pattern"),
        ({"magnitude": "tanh", "skip": [5]}, "`skip` must hold path patterns"),
        ({"magnitude": "tanh", "convolutions": 5}, "`convolutions` must be a path pattern"),
        ({"magnitude": "tanh", "convolutions": None}, "`convolutions` must be a path pattern"),
        ({"magnitude": "tanh", "keep_shortcuts": "no"}, "`keep_shortcuts` must be True or False"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_wrong_arguments_are_refused_by_name_and_the_model_stays(options, message, inplace):
    model = small_net()
    before = state(model)
    with pytest.raises((TypeError, ValueError), match="(?s)" + message.replace("(", r"\(").replace(")", r"\)")):
        hb.convert_model(model, **options, inplace=inplace)
    assert_unchanged(model, before)


def test_a_model_without_convolutions_is_refused_with_what_it_holds():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="nothing to convert in Sequential: it holds 2 Linear, 1 ReLU"):
        hb.convert_model(model, magnitude="tanh")


def test_keeping_every_convolution_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="2 kept: skipped by '\\*'"):
        hb.convert_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), magnitude="tanh", skip="*")


def test_a_convolutional_classifier_takes_no_projection():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(
        ValueError, match="`projection` needs a linear classifier at the end, Sequential has Conv2d '2'"
    ):
        hb.convert_model(model, projection="l2_ball")


def test_a_model_is_converted_before_it_is_wrapped():
    with pytest.raises(ValueError, match="before it is wrapped"):
        hb.convert_model(nn.DataParallel(small_net()), magnitude="tanh")


def test_something_else_is_no_model():
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got str"):
        hb.convert_model("resnet18", magnitude="tanh")


class Fussy(nn.Module):
    """Fails once its convolution is decoupled."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        if isinstance(self.conv, hb.nn.DecoupledConv2d):
            raise RuntimeError("no such layer here")
        return self.conv(x)


def test_a_failure_after_the_swap_puts_everything_back():
    model = Fussy()
    handle = model.conv.register_forward_hook(lambda *_: None)
    before, weight = state(model), model.conv.weight
    with pytest.raises(RuntimeError, match="no such layer here"):
        hb.convert_model(model, magnitude="tanh", batch=images(), inplace=True)
    assert_unchanged(model, before)
    assert model.conv.weight is weight
    assert len(model.conv._forward_hooks) == 1
    handle.remove()
    assert len(model.conv._forward_hooks) == 0


def test_a_batch_that_does_not_fit_leaves_the_model_as_it_was():
    model = small_net()
    before = state(model)
    with pytest.raises(RuntimeError):
        hb.convert_model(model, magnitude="tanh", batch=torch.randn(2, 5, 8, 8), inplace=True)
    assert_unchanged(model, before)
