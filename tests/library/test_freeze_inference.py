"""The fast path of frozen convolutions on a CPU gives what the layers give, also where float32 squares would not."""

import pytest
import torch
from torch import nn

import hyperball as hb
from hyperball.kernels.decoupled import inference

ABSOLUTE = "tanh(alpha=2, rho=0.3, relative=False, per='layer')"
MAGNITUDES = ["tanh", ABSOLUTE, "ball", "sphere", "seg", "log", "linear + tanh"]


def trained(magnitude, **options):
    """A convolution with radii that differ, and its BatchNorm with statistics of its own."""
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude=magnitude, **options), nn.BatchNorm2d(8)).eval()
    with torch.no_grad():
        for parameter in model[0].magnitude.parameters():
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    nn.init.uniform_(model[1].weight)
    nn.init.uniform_(model[1].bias)
    model[1].running_mean.normal_(std=0.1)
    model[1].running_var.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def fast_calls(monkeypatch):
    """How often the fast path ran."""
    calls = []
    plain = inference.convolve
    monkeypatch.setattr(inference, "convolve", lambda *given: calls.append(1) or plain(*given))
    return calls


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_frozen_layers_give_what_the_model_gives(magnitude, layout, fast_calls):
    model = trained(magnitude, padding=1, stride=2, bias=True)
    x = torch.randn(4, 3, 9, 9).contiguous(memory_format=layout)
    frozen = hb.freeze(model)
    with torch.no_grad():
        got = frozen(x)
    assert fast_calls == [1]
    torch.testing.assert_close(got, model(x).detach(), rtol=1e-5, atol=1e-6)
    assert got.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("magnitude", ["tanh", "ball", "sphere", "log"])
@pytest.mark.parametrize("scale", [1e25, 1e18, 1e-15, 1e-25, 0.0])
def test_extreme_and_empty_inputs_are_as_exact_as_before(magnitude, scale):
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude=magnitude)).eval()
    x = scale * torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        expected = model(x)
        size = float(expected.abs().max())  # rounding of a sum is in proportion to its terms
        torch.testing.assert_close(hb.freeze(model)(x), expected, rtol=1e-5, atol=1e-6 * size)


def test_tiny_patches_beside_large_ones_stay_finite_and_small():
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh")).eval()
    x = torch.randn(1, 3, 8, 16)
    x[..., 8:] *= 1e-22
    with torch.no_grad():
        got, expected = hb.freeze(model)(x), model(x)
    assert bool(got.isfinite().all())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, dtype",
    [({"groups": 3}, torch.float32), ({"angular": "square_cosine"}, torch.float32), ({}, torch.float64)],
)
def test_other_layers_keep_to_the_general_path(options, dtype, fast_calls):
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 9, 3, magnitude="tanh", **options)).eval().to(dtype)
    x = torch.randn(2, 3, 6, 6, dtype=dtype)
    torch.testing.assert_close(hb.freeze(model)(x), model(x).detach())
    assert fast_calls == []


def test_gradients_of_the_input_pass_through_a_frozen_model(fast_calls):
    model = trained("tanh")
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(hb.freeze(model)(x).square().sum(), x)
    assert fast_calls == []
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_nan_stays_where_it_is():
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh")).eval()
    x = torch.randn(1, 3, 8, 8)
    x[0, 0, 0, 0] = float("nan")
    with torch.no_grad():
        got, expected = hb.freeze(model)(x), model(x)
    assert torch.equal(got.isnan(), expected.isnan())


def test_timms_batch_norm_with_an_activation_is_folded_and_leaves_the_activation():
    layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh"), layers.BatchNormAct2d(8)).eval()
    model[1].running_mean.normal_(std=0.1)
    frozen = hb.freeze(model)
    assert frozen.freeze_report.layers[0].folded == "1"
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-5, atol=1e-6)
    assert float(frozen(x).min()) >= 0


@pytest.mark.parametrize("name", ["timm/nf_resnet26", "timm/tf_mobilenetv3_small_100"])
def test_standardized_and_same_padded_convolutions_are_frozen(name):
    pytest.importorskip("timm")
    converted, _ = hb.convert_model(hb.models.create(name, num_classes=4), magnitude="tanh")
    x = torch.randn(2, 3, 64, 64)
    hb.convert.calibrate(converted, [x])
    frozen = hb.freeze(converted)
    assert all(layer.frozen for layer in frozen.freeze_report.layers)
    expected = converted.eval()(x).detach()
    torch.testing.assert_close(frozen(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
