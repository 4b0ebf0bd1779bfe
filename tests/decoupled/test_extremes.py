"""Zeros, ties, parallel vectors, 1e±20 and half precision: finite wherever the exact answer is."""

import copy
import itertools
import math

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyperball import functional as F
from hyperball import nn, radial
from hyperball.functional.windows import convolution_window
from hyperball.kernels.decoupled import native
from hyperball.kernels.norms import patch_norm

OPERATORS = [
    (m, g, w)
    for m, g, w in itertools.product(reference.MAGNITUDES, reference.ANGULARS, ("none", "linear", "joint", "split"))
    if not (w == "split" and m in ("seg", "mix"))
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.08, torch.float16: 0.02}


def check_against_reference(x, w, operator, gradients=True):
    """Finite and near the float64 reference wherever that is representable; gradients finite."""
    magnitude, angular, weighting = operator
    options = {"magnitude": magnitude, "angular": angular, "weighting": weighting}
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = F.decoupled_conv2d(x, w, padding=1, **options)
    exact = reference.decoupled_conv(x.detach(), w.detach(), None, 1, 1, **options)
    representable = exact.abs() < torch.finfo(out.dtype).max
    assert out[representable].isfinite().all()
    scale = exact[representable].abs().max().clamp(min=1e-6) if representable.any() else 1.0
    assert ((out.detach().double() - exact)[representable].abs() <= ERROR[x.dtype] * scale).all()
    if gradients:
        for gradient in torch.autograd.grad(out.double().clamp(-1e30, 1e30).sum(), (x, w)):
            assert not gradient.isnan().any()


PLACES = {
    "zeros": lambda x, w: (x * 0, w),
    "zero filters": lambda x, w: (x, w * 0),
    "parallel": lambda x, w: (w[:2].repeat(1, 1, 2, 2)[:, :, :5, :5], w),
    "sparse": lambda x, w: (x.relu() * (torch.rand_like(x) > 0.7), w),
    "ties": lambda x, w: (torch.ones_like(x), torch.ones_like(w)),
    "huge": lambda x, w: (x * 1e20, w),
    "tiny": lambda x, w: (x * 1e-20, w),
    "mixed": lambda x, w: (x * torch.where(torch.rand_like(x) > 0.5, 1e20, 1e-20), w),
    "huge filters": lambda x, w: (x, w * 1e20),
    "tiny filters": lambda x, w: (x, w * 1e-20),
}


BEYOND_HALF = ("huge", "tiny", "mixed", "huge filters", "tiny filters")
CASES = [(p, d) for p, d in itertools.product(PLACES, DTYPES) if not (d == torch.float16 and p in BEYOND_HALF)]


@pytest.mark.parametrize("place, dtype", CASES)
def test_no_operator_breaks_at_the_extremes(place, dtype):
    x, w = PLACES[place](torch.randn(2, 4, 5, 5), torch.randn(3, 4, 3, 3))
    for operator in OPERATORS:
        check_against_reference(x.to(dtype), w.to(dtype), operator)


@pytest.mark.parametrize("magnitude", ["sphere", "ball", "tanh", "log", "barron"])
@pytest.mark.parametrize("angular", reference.ANGULARS)
def test_float16_inputs_near_the_limit_give_finite_outputs(magnitude, angular):
    for x in (torch.full((2, 4, 5, 5), 6e4), torch.randn(2, 4, 5, 5).sign() * 6e4):
        check_against_reference(x.half(), torch.randn(3, 4, 3, 3).half(), (magnitude, angular, "none"), gradients=False)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
@pytest.mark.parametrize(
    "convolve, geometry",
    [
        (F.decoupled_conv2d, {}),
        (F.decoupled_conv2d, {"padding": 4, "stride": 2, "dilation": 2}),
        (F.decoupled_conv2d, {"groups": 2, "padding": (0, 2)}),
        (F.decoupled_conv_transpose2d, {"stride": 3, "output_padding": 1, "dilation": 2}),
        (F.decoupled_conv_transpose2d, {"groups": 2, "padding": 2}),
    ],
)
def test_float64_norms_hold_where_squares_do_not(scale, convolve, geometry):
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    w = torch.randn(4, 4 // geometry.get("groups", 1), 3, 3, dtype=torch.float64)
    options = {"angular": "square_cosine", **geometry}
    large = convolve(x * scale, w, magnitude=f"ball(rho={2 * scale})", **options)
    torch.testing.assert_close(large, convolve(x, w, magnitude="ball(rho=2)", **options))


def test_every_patch_has_its_own_scale():
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64) * 10.0 ** torch.randint(-250, 250, (2, 1, 7, 7)).double()
    window = convolution_window(2, x.shape, torch.empty(1, 3, 3, 3), 2, 1, 1, 1)
    patches = torch.nn.functional.unfold(x, 3, padding=1, stride=2)
    largest = patches.abs().amax(1, keepdim=True)
    expected = (patches / largest).norm(dim=1, keepdim=True) * largest
    torch.testing.assert_close(patch_norm(x, window).flatten(2), expected, rtol=1e-12, atol=0.0)


def numbers(largest: float):
    bound = float(np.float32(largest))
    return st.floats(-bound, bound, allow_nan=False, width=32)


@given(
    st.lists(numbers(1e20), min_size=18, max_size=18),
    st.lists(numbers(1e10), min_size=9, max_size=9),
    st.sampled_from(OPERATORS),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_any_finite_input_gives_finite_outputs_and_gradients(values, weights, operator, dtype):
    x = torch.tensor(values).reshape(2, 1, 3, 3).to(dtype)
    w = torch.tensor(weights).reshape(1, 1, 3, 3).to(dtype)
    magnitude, angular, weighting = operator
    x.requires_grad_()
    w.requires_grad_()
    out = F.decoupled_conv2d(x, w, padding=1, magnitude=magnitude, angular=angular, weighting=weighting)
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), (x, w)):
        assert not gradient.isnan().any()


@given(st.lists(numbers(6e4), min_size=18, max_size=18), st.sampled_from(["sphere", "ball", "tanh"]))
def test_any_float16_input_gives_bounded_outputs_of_bounded_operators(values, magnitude):
    x = torch.tensor(values).reshape(2, 1, 3, 3).half()
    for angular in reference.ANGULARS:
        out = F.decoupled_conv2d(x, torch.ones(2, 1, 3, 3).half(), padding=1, magnitude=magnitude, angular=angular)
        assert (out.abs() <= 1.01).all()


def output_and_input_gradient(x, weight, angular):
    x = x.clone().requires_grad_()
    out = F.decoupled_conv2d(x, weight, magnitude="tanh", angular=angular)
    return out, torch.autograd.grad(out.sum(), x)[0]


BROKEN = [(value, dtype) for value in (float("nan"), float("inf")) for dtype in DTYPES]
BROKEN += [(1e160, torch.float64), (1e300, torch.float64), (1e30, torch.float32), (1e30, torch.bfloat16)]


@pytest.mark.parametrize("angular", ["cosine", "linear"])
@pytest.mark.parametrize("value, dtype", BROKEN)
def test_a_broken_pixel_stays_in_the_patches_that_contain_it(value, dtype, angular, tolerance):
    x, weight = torch.randn(2, 3, 8, 8).to(dtype), torch.randn(4, 3, 3, 3).to(dtype)
    broken = x.clone()
    broken[0, 0, 0, 0] = value
    out, gradient = output_and_input_gradient(broken, weight, angular)
    expected, its_gradient = output_and_input_gradient(x, weight, angular)
    if math.isnan(value):
        assert out[0, :, 0, 0].isnan().all()
    out[0, :, 0, 0] = expected[0, :, 0, 0]
    gradient[0, :, :3, :3] = its_gradient[0, :, :3, :3]
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    torch.testing.assert_close(gradient, its_gradient, **tolerance(dtype))


def test_a_huge_pixel_changes_no_other_patch_under_vmap_either():
    x, weight = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    call = lambda x: F.decoupled_conv2d(x, weight, magnitude="tanh", angular="linear")  # noqa: E731
    expected = call(x)
    x[0, 0, 0, 0] = 1e300
    out = torch.func.vmap(call)(x)
    out[0, :, 0, 0] = expected[0, :, 0, 0]
    torch.testing.assert_close(out, expected)


@pytest.fixture(params=["native", "eager"])
def kernel(request, monkeypatch):
    """Both kernels in turn: the compiled one where there is a compiler, and its eager twin."""
    if request.param == "eager":
        monkeypatch.setattr(native, "library", lambda: native.Library(None, None, "switched off by a test"))
    elif native.library().epilogue is None:
        pytest.skip("no C compiler")


def responses(x, magnitude, rho, dtype):
    """(f, df/drho) of four filters, in a dtype."""
    held = torch.tensor(rho).to(dtype).requires_grad_()
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = radial.parse(magnitude, "magnitude").with_parameters(rho=held)
    f = F.decoupled_linear(x.to(dtype), weight, magnitude=given)
    return f.detach(), torch.autograd.grad(f.sum(), held)[0]


@pytest.mark.parametrize("lengths", [0.1, 1.0, 8.0, 9.0, 10.0, 30.0])
def test_the_radius_of_tanh_has_an_exact_gradient_however_long_the_vector(kernel, lengths):
    x = torch.tensor([[2.0, -1.0, 2.0]]) / 3 * lengths * 0.7
    found, exact = (responses(x, "tanh", 0.7, dtype)[1] for dtype in (torch.float32, torch.float64))
    assert float(found) == pytest.approx(float(exact), rel=1e-5)


def input_gradient(x, magnitude, angular, dtype, memory_format):
    """df/dx, of weighted outputs of a convolution, in float64."""
    draw = torch.Generator().manual_seed(1)
    weight, weights = torch.randn(3, 20, 3, 3, generator=draw), torch.randn(2, 3, 6, 6, generator=draw)
    x = x.to(dtype).contiguous(memory_format=memory_format).requires_grad_()
    f = F.decoupled_conv2d(x, weight.to(dtype), padding=1, magnitude=magnitude, angular=angular)
    return torch.autograd.grad((f * weights.to(dtype)).sum(), x)[0].double()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("angular", ["cosine", "sigmoid"])
@pytest.mark.parametrize("magnitude", ["sphere", "ball", "tanh", "log"])
@pytest.mark.parametrize("scale", [1e18, 1e21, 1e24, 1e30, 1e36])
def test_long_vectors_have_the_gradient_through_their_length(kernel, scale, magnitude, angular, memory_format):
    x = torch.randn(2, 20, 6, 6, generator=torch.Generator().manual_seed(0)) * scale
    x[0, :, 3, 3] = 0.0
    found, exact = (input_gradient(x, magnitude, angular, d, memory_format) for d in (torch.float32, torch.float64))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("shape, rho", [(1.0, 1.0), (1.0, 1e10), (1.5, 1e-20), (1.5, 1.0), (1.9, 1e-3), (1.9, 1e8)])
@pytest.mark.parametrize("scale", [1e12, 1e25, 0.9e38])
def test_barron_holds_up_to_the_largest_number(kernel, shape, rho, scale):
    x = scale * torch.tensor([[1.0, -2.0, 3.0]])
    pairs = [responses(x, f"barron(shape={shape})", rho, dtype) for dtype in (torch.float32, torch.float64)]
    for found, exact in zip(*pairs, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=2e-4, atol=1e-30)


def test_barron_of_a_vector_longer_than_the_largest_number_is_that_of_the_largest_number(kernel):
    x = 1e38 * torch.tensor([[1.0, -2.0, 3.0]])  # of length 3.7e38
    found, exact = (responses(x, "barron(shape=1.5)", 1.0, dtype)[0] for dtype in (torch.float32, torch.float64))
    longer = x.double().norm() / torch.finfo(torch.float32).max
    torch.testing.assert_close(found.double(), exact * longer.sqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("magnitude", ["ball", "tanh", "seg", "sphere"])
@pytest.mark.parametrize("dtype, scale", [(torch.float32, 2e37), (torch.bfloat16, 2e37), (torch.float64, 1e307)])
def test_a_relative_radius_holds_where_the_sum_of_all_lengths_does_not(magnitude, dtype, scale):
    torch.manual_seed(0)
    layer = nn.DecoupledConv2d(4, 3, 3, padding=1, magnitude=magnitude).to(dtype)
    twin = copy.deepcopy(layer).double()
    x = torch.rand(2, 4, 12, 12).to(dtype)
    out = layer(x * scale).double()
    shorter = 2.0**20  # lengths beside which epsilon is nothing; the outputs have degree 0, seg's degree 1
    expected = twin(x.double() * shorter) * (scale / shorter if magnitude == "seg" else 1)
    assert out.isfinite().all()
    assert (out - expected).abs().max() <= ERROR[dtype] * expected.abs().max()
