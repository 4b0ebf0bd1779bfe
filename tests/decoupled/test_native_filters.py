"""Filters on the compiled CPU path are not divided by their lengths: one factor a channel behind the convolution."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import hyperball as hb
from hyperball.functional import decoupled_conv2d
from hyperball.kernels import norms
from hyperball.kernels.decoupled import native
from hyperball.kernels.decoupled import operation as decoupled
from hyperball.kernels.decoupled.filters import Shape, as_they_are

pytestmark = pytest.mark.skipif(native.library().epilogue is None, reason="no C compiler")
OPERATORS = [
    {"angular": angular, "weighting": weighting}
    for angular in ("cosine", "square_cosine")
    for weighting in ("none", "linear", "joint", "split")
]
LAYERS = [
    (hb.nn.DecoupledLinear, (40, 24), (5, 40)),
    (hb.nn.DecoupledConv1d, (6, 8, 3), (2, 6, 9)),
    (hb.nn.DecoupledConv2d, (6, 16, 3, 1, 1, 1, 2), (2, 6, 5, 5)),
    (hb.nn.DecoupledConv3d, (2, 8, 2), (2, 2, 4, 4, 4)),
    (hb.nn.DecoupledConvTranspose2d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 5, 4)),
]


def input_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(layer, x, create_graph=False):
    """f, and the gradients of x and of all parameters for a fixed incoming gradient."""
    x = x.detach().clone().requires_grad_()
    f = layer(x)
    v = input_of(*f.shape, seed=2).to(f.dtype)
    return f, *torch.autograd.grad(f, [x, *layer.parameters()], v, create_graph=create_graph)


@pytest.fixture
def undivided(monkeypatch):
    """Dividing a filter by its length is an error."""

    def refuse(*_):
        raise AssertionError("filters were divided by their lengths")

    monkeypatch.setattr(decoupled, "unit_filters", refuse)
    monkeypatch.setattr(norms, "unit_filters", refuse)


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("kind, arguments, shape", LAYERS, ids=lambda held: getattr(held, "__name__", ""))
def test_filters_of_any_ordinary_length_stay_as_they_are(kind, arguments, shape, operator, undivided, monkeypatch):
    torch.manual_seed(0)
    layer = kind(*arguments, **operator)
    with torch.no_grad():
        layer.weight.mul_(
            torch.logspace(-1.5, 1.5, layer.weight.shape[1]).reshape(1, -1, *(1,) * (layer.weight.dim() - 2))
        )
    found = gradients(layer, input_of(*shape))
    monkeypatch.undo()
    exact = gradients(copy.deepcopy(layer).double(), input_of(*shape).double())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 * float(b.detach().abs().max()))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_the_backward_keeps_no_copy_of_the_filters(operator):
    layer, x, kept = hb.nn.DecoupledConv2d(64, 48, 3, padding=1, **operator), input_of(1, 64, 3, 3).requires_grad_(), {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t):
        f = layer(x)
    own = {t.untyped_storage().data_ptr() for t in (x, *layer.parameters())}
    beside = sum(size for place, size in kept.items() if place not in own)
    assert beside < 2 * f.untyped_storage().nbytes() < layer.weight.untyped_storage().nbytes() / 10


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_second_derivatives_through_the_filters_are_those_of_the_eager_layer(operator):
    torch.manual_seed(0)
    layer = hb.nn.DecoupledConv2d(3, 6, 3, padding=1, **operator)
    seconds = []
    for each in (layer, copy.deepcopy(layer).double()):
        x = input_of(2, 3, 5, 5).to(each.weight.dtype).requires_grad_()
        (first,) = torch.autograd.grad(each(x).square().sum(), each.weight, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), [x, *each.parameters()]))
    for a, b in zip(*seconds, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-4 * float(b.abs().max()))


def test_the_gradient_is_orthogonal_to_the_filter():
    layer = hb.nn.DecoupledConv2d(64, 32, 3, padding=1)
    _, _, slope, *_ = gradients(layer, input_of(4, 64, 8, 8))
    cosines = torch.nn.functional.cosine_similarity(slope.flatten(1), layer.weight.detach().flatten(1))
    assert float(cosines.abs().max()) < 2e-6


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_zero_filter_stays_zero_and_the_others_are_not_divided(operator, undivided):
    layer = hb.nn.DecoupledConv2d(3, 6, 3, **operator)
    with torch.no_grad():
        layer.weight[2] = 0
    f, slope_x, slope, *_ = gradients(layer, input_of(2, 3, 5, 5))
    assert f[:, 2].abs().max() == 0
    assert slope.isfinite().all()
    assert slope_x.isfinite().all()
    assert operator["weighting"] != "none" or slope[2].abs().max() == 0


ENDS = [
    (1.0, 1e-5), (1.0, 1e5), (1.0, 1e-30), (1.0, 1e30), (1e37, 30.0), (1e-28, 0.01), (1e-30, 1e-30), (1e30, 1e30),
]  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS[:1] + OPERATORS[4:5], ids=str)
@pytest.mark.parametrize("size, length", ENDS)
def test_filters_are_divided_where_lengths_or_patches_are_near_the_ends_of_float32(size, length, operator):
    x, weight = (
        size * input_of(2, 3, 5, 5),
        length * torch.nn.functional.normalize(input_of(16, 27)).reshape(16, 3, 3, 3),
    )
    assert as_they_are(x, weight, norms.patch_norm(x, hb.nn.DecoupledConv2d(3, 16, 3).padded(x)[1]), Shape()) is None
    options = {"magnitude": f"tanh(rho={size})", **operator}
    found, exact = decoupled_conv2d(x, weight, **options), decoupled_conv2d(x.double(), weight.double(), **options)
    assert float((found - exact).abs().max() / exact.abs().max()) < 2e-6


def test_one_long_patch_or_one_short_filter_is_enough_to_divide():
    window = hb.nn.DecoupledConv2d(3, 16, 3).padded(input_of(1, 3, 5, 5))[1]

    def stays(x, weight):
        return as_they_are(x, weight, norms.patch_norm(x, window), Shape()) is not None

    x, weight = input_of(2, 3, 5, 5), input_of(16, 3, 3, 3)
    assert stays(x, weight)
    assert stays(x * 0, weight)
    long, short = x.clone(), weight.clone()
    long[1, 2, 4, 4], short[15] = 1e33, 1e-6
    assert not stays(long, weight)
    assert not stays(x, short)
    assert not stays(x, weight.masked_fill(weight > 2, float("nan")))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_lengths_of_filters_are_exact_to_rounding_with_any_number_of_threads(threads):
    weight, x, before = input_of(70, 33, 5, 5), input_of(1, 33, 5, 5), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, m, over = as_they_are(x, weight, torch.ones(1, 1, 1, 1), Shape())
    finally:
        torch.set_num_threads(before)
    exact = weight.double().flatten(1).norm(dim=1)
    assert torch.equal(m, exact.float())
    torch.testing.assert_close(over, 1 / exact.float(), rtol=1e-7, atol=0)
