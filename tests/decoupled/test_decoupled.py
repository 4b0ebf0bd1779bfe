"""Decoupled functions against the independent reference, the identities of the algebra, and peers."""

import itertools

import pytest
import reference
import torch
from torch import nn

import hyperball as hb
from hyperball import functional as F

COMBINATIONS = [
    (magnitude, angular, weighting)
    for magnitude, angular, weighting in itertools.product(
        reference.MAGNITUDES, reference.ANGULARS, reference.WEIGHTINGS
    )
    if not (weighting == "split" and magnitude in ("seg", "mix"))
]
CONV = {1: F.decoupled_conv1d, 2: F.decoupled_conv2d, 3: F.decoupled_conv3d}
TRANSPOSED = {1: F.decoupled_conv_transpose1d, 2: F.decoupled_conv_transpose2d, 3: F.decoupled_conv_transpose3d}
LAYER = {1: hb.nn.DecoupledConv1d, 2: hb.nn.DecoupledConv2d, 3: hb.nn.DecoupledConv3d}
PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_equal_with_gradients(ours, theirs, inputs, atol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=atol)
    v = torch.randn_like(ours)
    for got, want in zip(torch.autograd.grad(ours, inputs, v), torch.autograd.grad(theirs, inputs, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("magnitude, angular, weighting", COMBINATIONS)
def test_every_operator_equals_the_reference(magnitude, angular, weighting):
    operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
    for stride, padding, dilation, groups in [
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (1, "same", 2, 1),
        ((2, 1), (0, 2), (1, 2), 4),
    ]:
        x, w = double(2, 4, 7, 6).requires_grad_(), double(8, 4 // groups, 3, 2).requires_grad_()
        arguments = (double(8), stride, padding, dilation, groups)
        ours = F.decoupled_conv2d(x, w, *arguments, **operator)
        assert_equal_with_gradients(ours, reference.decoupled_conv(x, w, *arguments, **operator), (x, w))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("magnitude", ["sphere", "tanh"])
@pytest.mark.parametrize("angular", ["cosine", "sigmoid"])
def test_transposed_convolutions_equal_the_reference(dims, magnitude, angular):
    for stride, padding, output_padding, groups, dilation in [(1, 0, 0, 1, 1), (2, 1, 1, 2, 1), (3, 0, 2, 1, 2)]:
        x, w = double(2, 4, *(4,) * dims).requires_grad_(), double(4, 3, *(3,) * dims).requires_grad_()
        arguments = (None, stride, padding, output_padding, groups, dilation)
        for weighting in ("none", "joint"):
            operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
            ours = TRANSPOSED[dims](x, w, *arguments, **operator)
            assert_equal_with_gradients(ours, reference.decoupled_conv_transpose(x, w, *arguments, **operator), (x, w))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", reference.PADDING_MODES)
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_the_norm_sees_the_padded_patch_in_every_padding_mode(dims, mode, padding):
    layer = LAYER[dims](
        4, 6, 3, padding=padding, groups=2, padding_mode=mode, bias=True, dtype=torch.float64, angular="square_cosine",
        magnitude="tanh(rho=1.5, relative=False, learn=False)",
    )  # fmt: skip
    x = double(2, 4, *(6,) * dims)
    expected = reference.decoupled_conv(
        x,
        layer.weight,
        layer.bias,
        1,
        padding,
        1,
        2,
        padding_mode=mode,
        magnitude="tanh",
        angular="square_cosine",
        rho=1.5,
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighting", reference.WEIGHTINGS)
def test_linear_layers_equal_the_reference(weighting):
    x, w, b = double(3, 5, 7).requires_grad_(), double(4, 7).requires_grad_(), double(4)
    for magnitude, angular in [("tanh", "cosine"), ("log", "linear"), ("sphere", "square_cosine")]:
        operator = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
        ours = F.decoupled_linear(x, w, b, **operator)
        assert_equal_with_gradients(ours, reference.decoupled_linear(x, w, b, **operator), (x, w))


@pytest.mark.parametrize("name", ["ball", "tanh", "seg", "barron"])
def test_per_channel_parameters_equal_the_reference(name):
    x, w, rho, alpha = double(2, 4, 6, 6), double(6, 2, 3, 3), torch.rand(6).double() + 1, torch.rand(6).double() + 0.5
    magnitude = getattr(hb.radial, name)(rho=rho, alpha=alpha)
    for layout in (torch.contiguous_format, torch.channels_last):
        ours = F.decoupled_conv2d(
            x.contiguous(memory_format=layout), w, groups=2, magnitude=magnitude, angular="linear"
        )
        expected = reference.decoupled_conv(x, w, groups=2, magnitude=name, angular="linear", rho=rho, alpha=alpha)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_sum_of_rows_is_the_sum_of_operators():
    x, w = double(2, 3, 6, 6), double(4, 3, 3, 3)
    both = F.decoupled_conv2d(x, w, magnitude="linear + tanh(rho=2)", angular="square_cosine")
    parts = [F.decoupled_conv2d(x, w, magnitude=m, angular="square_cosine") for m in ("linear", "tanh(rho=2)")]
    torch.testing.assert_close(both, parts[0] + parts[1], rtol=1e-12, atol=1e-12)


X, W = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randn(5, 3, 3, 3, dtype=torch.float64)


def conv(magnitude, angular="cosine", weighting="none", eps=1e-4):
    return F.decoupled_conv2d(X, W, padding=1, magnitude=magnitude, angular=angular, weighting=weighting, eps=eps)


def plain(w=W):
    return torch.nn.functional.conv2d(X, w, padding=1)


def test_seg_without_outer_slope_is_rho_times_ball():
    torch.testing.assert_close(conv("seg(beta=0, rho=3)"), 3 * conv("ball(rho=3)"))


def test_seg_with_one_slope_is_linear():
    torch.testing.assert_close(conv("seg(beta=1, rho=3)"), conv("linear"))


def test_ball_of_vanishing_radius_is_sphere():
    torch.testing.assert_close(conv("ball(rho=1e-9)"), conv("sphere", eps=0))


def test_barron_of_shape_two_is_linear():
    torch.testing.assert_close(conv("barron(shape=2, rho=0.7)"), conv("linear"))


def test_linearly_weighted_linear_cosine_is_the_plain_convolution():
    torch.testing.assert_close(conv("linear", weighting="linear"), plain(), rtol=0, atol=0)


def test_linear_without_weighting_is_a_weight_normalized_layer():
    unit = W / W.flatten(1).norm(dim=1)[:, None, None, None]
    torch.testing.assert_close(conv("linear"), plain(unit))


def test_sphere_with_linear_weighting_is_a_feature_normalized_layer():
    norms = reference.patch_norm(reference.patches(X, 3, padding=1))
    torch.testing.assert_close(conv("sphere", weighting="linear", eps=0), plain() / norms)


def test_power_of_two_is_square_cosine_and_of_one_is_cosine():
    torch.testing.assert_close(conv("tanh", "power(b=2)"), conv("tanh", "square_cosine"))
    torch.testing.assert_close(conv("tanh", "power(b=1)"), conv("tanh", "cosine"))


def test_rectified_cosine_is_relu_behind_the_layer():
    torch.testing.assert_close(conv("tanh", "rectified_cosine"), conv("tanh").relu())


@pytest.mark.parametrize("magnitude", reference.MAGNITUDES)
@pytest.mark.parametrize("angular", reference.ANGULARS)
def test_unweighted_operators_do_not_see_the_filter_length(magnitude, angular):
    scaled = F.decoupled_conv2d(X, W * torch.rand(5, 1, 1, 1) * 9, magnitude=magnitude, angular=angular)
    torch.testing.assert_close(scaled, F.decoupled_conv2d(X, W, magnitude=magnitude, angular=angular))


@pytest.mark.parametrize("name, degree", [("ball", 0), ("tanh", 0), ("seg", 1), ("barron", 1)])
@pytest.mark.parametrize("weighting", ["none", "linear"])
def test_eulers_identity_ties_the_radius_gradient_to_the_input_gradient(name, degree, weighting):
    x, rho = X.clone().requires_grad_(), (torch.rand(5).double() + 2).requires_grad_()
    out = F.decoupled_conv2d(x, W, magnitude=getattr(hb.radial, name)(rho=rho), weighting=weighting)
    v = torch.randn_like(out)
    grad_x, grad_rho = torch.autograd.grad(out, (x, rho), v)
    torch.testing.assert_close((rho * grad_rho).sum(), degree * (v * out).sum() - (grad_x * x).sum())


def test_linear_square_cosine_equals_a_bcos_convolution():
    bcos = pytest.importorskip("bcos")
    peer = bcos.modules.BcosConv2d(3, 5, 3, padding=1, b=2, max_out=1).double()
    weight = dict(peer.named_parameters())["linear.weight"]
    with torch.no_grad():
        weight.copy_(W)
    torch.testing.assert_close(conv("linear", "square_cosine"), peer(X), rtol=1e-6, atol=1e-6)


def test_inputs_without_a_batch_give_outputs_without_one():
    for dims in (1, 2, 3):
        x, w = double(3, *(5,) * dims), double(4, 3, *(3,) * dims)
        for function, weight in ((CONV[dims], w), (TRANSPOSED[dims], w.transpose(0, 1))):
            batched = function(x[None], weight, magnitude="tanh")
            torch.testing.assert_close(function(x, weight, magnitude="tanh"), batched[0])


def test_an_empty_batch_gives_an_empty_output():
    for angular in ("cosine", "linear"):
        assert F.decoupled_conv2d(X[:0], W, magnitude="tanh", angular=angular).shape == (0, 5, 6, 6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"magnitude": "tahn"}, ValueError, "did you mean 'tanh'"),
        ({"magnitude": 3}, TypeError, "`magnitude`"),
        ({"angular": "cosinus"}, ValueError, "did you mean 'cosine'"),
        ({"weighting": "linaer"}, ValueError, "`weighting`.*did you mean 'linear'"),
        ({"weighting": "split", "magnitude": "seg"}, ValueError, "split.*'seg'"),
        ({"weighting": "split", "magnitude": "mix"}, ValueError, "split.*'mix'"),
        ({"magnitude": "tanh(relative=True)"}, ValueError, "for modules"),
        ({"magnitude": hb.radial.tanh(rho=torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0]))}, ValueError, "`rho` must be > 0"),
        ({"magnitude": hb.radial.tanh(rho=torch.ones(4))}, ValueError, "1 or 5 values"),
        ({"magnitude": "tanh(rho=0)"}, ValueError, "`rho` must be > 0, got 0.0"),
        ({"angular": "sigmoid(k=-1)"}, ValueError, "`k` must be > 0, got -1.0"),
        ({"eps": -1.0}, ValueError, "`eps`"),
        ({"groups": 2}, ValueError, "`groups` must divide"),
        ({"groups": 0}, ValueError, "`groups`"),
        ({"stride": 0}, ValueError, "`stride`"),
        ({"padding": "some"}, ValueError, "`padding`"),
        ({"padding": "same", "stride": 2}, ValueError, "stride 1"),
        ({"dilation": (1, 2, 3)}, ValueError, "`dilation`"),
        ({"dilation": 9}, ValueError, "the kernel needs"),
        ({"bias": torch.zeros(3)}, ValueError, "`bias` must have shape"),
        ({"input": torch.zeros(2, 8)}, ValueError, "`input` must have 4 dimensions"),
        ({"input": torch.zeros(2, 4, 8, 8)}, ValueError, "channels"),
        ({"weight": torch.zeros(5, 3, 3)}, ValueError, "`weight` must have 4 dimensions"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, error, message):
    arguments = {"input": X, "weight": W, "magnitude": "tanh", **change}
    with pytest.raises(error, match=message):
        F.decoupled_conv2d(**arguments)
