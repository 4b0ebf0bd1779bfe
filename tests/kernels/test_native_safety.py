"""What the compiled paths are handed: default dtypes and devices, saved tensors that hooks changed, extreme numbers."""

import copy

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import hyperball as hb
from hyperball.functional import decoupled_conv2d, robust_pool, robust_pool2d
from hyperball.kernels.decoupled import native
from hyperball.kernels.decoupled.operation import eager_epilogue
from hyperball.kernels.pooling import native as pooling_native
from hyperball.kernels.window import Window

pytestmark = pytest.mark.skipif(native.library().epilogue is None, reason="no C compiler")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def input_of(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def gradients(layer, x, seed=3):
    """f, and the gradients of x and of all parameters."""
    x = x.detach().clone().requires_grad_()
    f = layer(x)
    return f, *torch.autograd.grad(f, [x, *layer.parameters()], input_of(*f.shape, seed=seed).to(f.dtype))


def everything():
    """The outcomes of both compiled paths, with numbers and with tensors for parameters."""
    x, weight, rows = input_of(2, 4, 6, 6), input_of(5, 4, 3, 3, seed=1), input_of(5, 60)
    options = {"magnitude": "tanh(rho=2, alpha=3)", "angular": "sigmoid(k=0.3)"}
    x.requires_grad_()
    found = [decoupled_conv2d(x, weight, **options), robust_pool2d(x.detach(), 3, 2, 1, penalty="huber(c=0.5)")]
    found += torch.autograd.grad(found[0].sum(), x)
    for text in ("huber(c=0.5)", "welsch(c=0.5)", "absolute"):
        held = rows.clone().requires_grad_()
        found += [robust_pool(held, penalty=text), robust_pool(rows, penalty=text, weights=rows.abs())]
        found += torch.autograd.grad(found[-2].sum(), held)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_default_dtype_plays_no_part(dtype):
    expected = everything()
    torch.set_default_dtype(dtype)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_default_device_plays_no_part():
    expected = everything()
    with torch.device("meta"):
        found = everything()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


CHANGES = {
    "every other number": lambda t: torch.stack([t, torch.full_like(t, 7)], -1)[..., 0],
    "float64": lambda t: t.double(),
    "the other layout": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "negated view": lambda t: torch._neg_view(-t),
}


def stages(x, weight, alpha, change):
    """The gradients of a layer both of whose compiled stages get their saved tensors back changed."""
    window = Window((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1))
    magnitude, angular = hb.radial.TABLE["tanh"](alpha=alpha, rho=2.0), hb.angular.parse("square_cosine")
    with saved_tensors_hooks(lambda t: t.detach(), change):
        n, seen = native.patch_norms(x, window)
    y = torch.conv2d(seen, weight, padding=1)
    with saved_tensors_hooks(lambda t: t.detach(), change):
        f = native.finish(y, n, None, None, magnitude, angular, 1, eager_epilogue)
    return torch.autograd.grad(f, [x, weight, alpha], input_of(*f.shape, seed=3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", CHANGES)
def test_saved_tensors_may_come_back_in_another_form(change, layout):
    x = input_of(2, 4, 6, 5).to(memory_format=LAYOUTS[layout]).requires_grad_()
    weight, alpha = input_of(9, 4, 3, 3).requires_grad_(), torch.linspace(1, 2, 9, requires_grad=True)
    expected = stages(x, weight, alpha, lambda t: t)
    for a, b in zip(stages(x, weight, alpha, CHANGES[change]), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_saved_tensor_of_another_shape_is_refused():
    layer, x = hb.nn.DecoupledConv2d(4, 8, 3), input_of(2, 4, 6, 6).requires_grad_()
    with saved_tensors_hooks(lambda t: t, lambda t: t[:, :1] if t.dim() == 4 and t.shape[1] == 8 else t):
        f = layer(x)
    with pytest.raises(RuntimeError, match="handed back as"):
        f.sum().backward()


def test_expanded_saved_tensors_are_read_within_their_memory():
    layer, x = hb.nn.DecoupledConv2d(4, 8, 3, padding=1), torch.full((2, 4, 6, 6), 0.5)
    expected = gradients(layer, x)

    def unpack(t):
        return t[:1, :1, :1, :1].clone().expand(t.shape) if t.shape == x.shape else t

    with saved_tensors_hooks(lambda t: t.detach().clone(), unpack):
        found = gradients(layer, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_negated_view_is_not_read_as_its_memory():
    x = input_of(2, 4, 6, 6)
    view = torch._neg_view(-x)
    layer = hb.nn.DecoupledConv2d(4, 5, 3)
    torch.testing.assert_close(layer(view), layer(x))
    for weights in (None, torch.rand(6)):
        expected = robust_pool(x, penalty="huber(c=0.5)", weights=weights)
        assert torch.equal(robust_pool(view, penalty="huber(c=0.5)", weights=weights), expected)


@pytest.mark.parametrize("groups", [1, 2, 4, 12])
@pytest.mark.parametrize("angular", ["cosine", "linear"])
def test_groups_of_few_channels_equal_their_eager_twin_in_both_layouts(groups, angular):
    layer = hb.nn.DecoupledConv2d(12, 12, 3, padding=1, groups=groups, magnitude="tanh", angular=angular)
    x = input_of(3, 12, 7, 6)
    exact = gradients(copy.deepcopy(layer).double(), x.double())
    for layout in LAYOUTS.values():
        found = gradients(layer, x.to(memory_format=layout))
        assert found[0].is_contiguous(memory_format=layout)
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))
        with torch.no_grad():
            assert layer(x.to(memory_format=layout)).is_contiguous(memory_format=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "size, weight_size, magnitude",
    [(1e-20, 1e20, "ball(rho=1e-20)"), (1e20, 1e-20, "tanh(rho=1e20)"), (1e20, 1e-20, "ball(rho=1e20)")],
)
def test_a_factor_and_a_gain_whose_product_is_no_number_give_a_number(size, weight_size, magnitude, layout):
    x, weight = size * input_of(2, 3, 5, 5), weight_size * input_of(16, 3, 3, 3, seed=1)
    options = {"magnitude": magnitude, "angular": "square_cosine", "weighting": "linear"}
    found = decoupled_conv2d(x.to(memory_format=LAYOUTS[layout]), weight, **options)
    exact = decoupled_conv2d(x.double(), weight.double(), **options)
    assert float((found - exact).abs().max() / exact.abs().max()) < 2e-6


def test_a_small_incoming_gradient_and_a_small_gain_do_not_vanish_before_a_large_factor():
    call = native.Call("linear", "square_cosine", 1, {"alpha": 1e-20, "angle": 2.0}, ("factor",), None)
    y, n, v = torch.full((1, 16), 0.5), torch.ones(1, 1), torch.full((1, 16), 1e-30)
    dy, sums = torch.empty_like(y), torch.zeros(len(native.SUMS), 16, dtype=torch.float64)
    native._epilogue(call, y, n, [torch.full((16,), 1e20)], v=v, sums=sums, dy=dy, dn=torch.empty_like(n))
    torch.testing.assert_close(dy * 1e30, torch.ones_like(dy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [5, 40, 300])
@pytest.mark.parametrize("name", pooling_native.PENALTIES)
def test_pooling_depends_on_the_ratios_of_the_weights_alone(name, count, dtype):
    small = 1e-25 if dtype == torch.float32 else 1e-200
    x = small * input_of(3, count).to(dtype)
    weights = 0.1 + 0.7 * torch.rand(3, count, generator=torch.Generator().manual_seed(2)).to(dtype)
    options = {"penalty": name if name == "absolute" else f"{name}(c={0.7 * small!r})"}
    held = x.clone().requires_grad_()
    expected = robust_pool(held, weights=weights, **options)
    slope = torch.autograd.grad(expected.sum(), held)[0]
    for power in (-100, -66, 60, 110):
        again = x.clone().requires_grad_()
        found = robust_pool(again, weights=weights * 2.0**power, **options)
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), again)[0], slope)
