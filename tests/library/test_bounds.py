"""Bounds are never exceeded, are met where they are exact, and say what they cannot bound."""

import json
import math

import pytest
import torch
from torch import nn

import hyperball as hb

MAGNITUDES = [
    "sphere", "ball(rho=0.7, relative=False)", "ball", "tanh", "tanh(rho=0.5, relative=False)", "linear(alpha=1.5)",
    "seg", "log", "mix", "barron", "barron(shape=-2)", "barron(shape=1.5)", "piecewise", "linear + ball",
]  # fmt: skip
ANGULARS = ["cosine", "linear", "sigmoid(k=0.3)", "square_cosine", "power(b=3)", "rectified_cosine", "piecewise"]
GEOMETRIES = [
    lambda **o: (hb.nn.DecoupledLinear(6, 5, **o), (6,)),
    lambda **o: (hb.nn.DecoupledConv2d(2, 4, 3, padding=1, **o), (2, 6, 6)),
    lambda **o: (hb.nn.DecoupledConv2d(4, 4, 3, stride=2, groups=2, **o), (4, 7, 7)),
    lambda **o: (hb.nn.DecoupledConv2d(2, 3, 2, padding=2, dilation=2, padding_mode="reflect", **o), (2, 6, 6)),
    lambda **o: (hb.nn.DecoupledConvTranspose2d(2, 3, 3, stride=2, **o), (2, 4, 4)),
    lambda **o: (hb.nn.DecoupledConv1d(3, 4, 1, **o), (3, 8)),
]


def steepest(f, x, rounds=4):
    """A lower bound of the norm of the derivative of f at x, by power iteration."""
    v = torch.randn_like(x)
    for _ in range(rounds):
        v = v / v.norm()
        _, up = torch.func.jvp(f, (x,), (v,))
        _, pull = torch.func.vjp(f, x)
        (back,) = pull(up)
        if not bool(back.any()):
            break
        v = back
    v = v / v.norm().clamp(min=1e-30)
    return float(torch.func.jvp(f, (x,), (v,))[1].detach().norm())


def largest_seen(model, shape, scales=(1e-2, 0.5, 5.0)):
    """The steepest derivative and the largest |output| over random points of several sizes."""
    model = model.double().eval()
    steep = high = 0.0
    for scale in scales:
        x = scale * torch.randn(1, *shape, dtype=torch.float64)
        steep = max(steep, steepest(model, x))
        high = max(high, float(model(x).detach().abs().max()))
    return steep, high


def randomize(layer):
    """Radii that differ from channel to channel, and a bias."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "weight":
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("angular", ANGULARS)
def test_no_derivative_and_no_output_of_a_layer_exceeds_its_bounds(magnitude, angular):
    index = MAGNITUDES.index(magnitude) + ANGULARS.index(angular)
    for step in range(1 + index % 2):
        weighting = ("none", "linear", "joint")[(index + step) % 3]
        make = GEOMETRIES[(index + 2 * step) % len(GEOMETRIES)]
        layer, shape = make(bias=True, magnitude=magnitude, angular=angular, weighting=weighting)
        if step or index % 4 == 0:
            randomize(layer)
        bound = hb.bounds(layer).layers[0]
        steep, high = largest_seen(layer, shape)
        assert steep <= bound.lipschitz * (1 + 1e-6)
        assert high <= bound.output * (1 + 1e-6)
        limited = hb.bounds(layer, input_bound=0.2)
        x = 0.2 * (2 * torch.rand(4, *shape, dtype=torch.float64) - 1)
        assert float(layer(x).detach().abs().max()) <= limited.output * (1 + 1e-6)


@pytest.mark.parametrize("magnitude", ["tanh", "ball", "sphere", "log"])
def test_split_weighting_is_bounded_too(magnitude):
    layer = hb.nn.DecoupledConv2d(2, 4, 3, magnitude=magnitude, weighting="split")
    bound = hb.bounds(layer)
    steep, high = largest_seen(layer, (2, 5, 5))
    assert steep <= bound.lipschitz
    assert high <= bound.output


@pytest.mark.parametrize("magnitude, expected", [("sphere", 1.0), ("ball", 1.0), ("tanh(alpha=2.5)", 2.5)])
def test_the_output_of_a_bounded_operator_is_bounded_by_alpha_and_comes_near_it(magnitude, expected):
    layer = hb.nn.DecoupledLinear(4, 3, magnitude=magnitude)
    assert hb.bounds(layer).output == pytest.approx(expected, rel=1e-5)
    along = 1e4 * layer.weight.detach()
    assert float(layer.eval()(along).detach().abs().max()) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.Linear(7, 5), (7,)),
        (nn.Conv2d(3, 4, 1, stride=1), (3, 5, 5)),
        (nn.Conv2d(3, 4, 2, stride=2, groups=1), (3, 6, 6)),
        (nn.BatchNorm2d(3), (3, 4, 4)),
        (hb.nn.NormalizedLinear(6, 4), (6,)),
        (hb.nn.DecoupledLinear(6, 4, magnitude="linear"), (6,)),
        (hb.nn.Projection(2, radius=100.0), (6,)),
    ],
)
def test_exact_constants_are_reached(layer, shape):
    if isinstance(layer, nn.BatchNorm2d):
        nn.init.uniform_(layer.weight)
        layer.running_var.uniform_(0.5, 2.0)
    bound = hb.bounds(layer)
    assert bound.layers[0].exact
    steep = steepest(layer.double().eval(), torch.randn(1, *shape, dtype=torch.float64), rounds=200)
    assert steep == pytest.approx(bound.lipschitz, rel=1e-3)


PLAIN = [
    (nn.Conv2d(3, 4, 3, padding=1), (3, 12, 12)),
    (nn.Conv2d(4, 6, 5, stride=2, padding=2, groups=2), (4, 12, 12)),
    (nn.Conv2d(3, 4, 4, dilation=2, padding=3), (3, 12, 12)),
    (nn.Conv2d(3, 4, 3, padding=2, padding_mode="replicate"), (3, 8, 8)),
    (nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 8, 8)),
    (nn.Conv1d(2, 3, 7, padding=3), (2, 40)),
    (nn.Conv3d(2, 3, 2), (2, 5, 5, 5)),
    (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 8, 8)),
    (nn.ConvTranspose1d(4, 6, 4, groups=2), (4, 20)),
    (hb.nn.DecoupledConv2d(3, 4, 3, padding=1, magnitude="linear(alpha=2)"), (3, 12, 12)),
]


@pytest.mark.parametrize("layer, shape", PLAIN)
def test_plain_convolutions_come_near_their_bound_and_never_exceed_it(layer, shape):
    with torch.no_grad():
        layer.weight.add_(0.2)  # one direction stands out, which all patches share
    bound = hb.bounds(layer).lipschitz
    steep = steepest(layer.double().eval(), torch.randn(1, *shape, dtype=torch.float64), rounds=60)
    assert steep <= bound
    assert bound <= 3.5 * steep


def test_the_fourier_bound_of_a_circular_convolution_is_nearly_exact():
    layer = nn.Conv2d(5, 6, 3, padding=1, padding_mode="circular").double()
    steep = steepest(layer, torch.randn(1, 5, 32, 32, dtype=torch.float64), rounds=200)
    whole = torch.fft.fft2(layer.weight.detach(), s=(256, 256)).permute(2, 3, 0, 1)
    supremum = float(torch.linalg.matrix_norm(whole, 2).max())
    assert steep <= supremum * (1 + 1e-9)
    copied = nn.Conv2d(5, 6, 3, padding=1).double()
    copied.load_state_dict(layer.state_dict())
    bound = hb.bounds(copied).lipschitz
    assert supremum <= bound <= 1.05 * supremum


class Sum(nn.Module):
    """Adds, concatenates, scales and reshapes in forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), hb.nn.DecoupledConv2d(3, 4, 3, padding=1, magnitude="ball")
        self.act, self.fc = nn.PReLU(4), nn.Linear(8 * 16, 3)

    def forward(self, x):
        y = self.act(self.a(x) + self.b(x))
        return self.fc(torch.cat([0.5 * y, y + y], 1).flatten(1)) / 2 + 1


NETWORKS = {
    "sum": (Sum, (3, 4, 4)),
    "digits": (lambda: hb.models.create("digits", magnitude="tanh", width=4), (1, 8, 8)),
    "plain digits": (lambda: hb.models.create("digits", width=4, activation="prelu"), (1, 8, 8)),
    "robust": (lambda: hb.models.create("digits", magnitude="ball", width=4, pool="huber(c=0.3)"), (1, 8, 8)),
    "residual": (lambda: hb.models.create("resnet32", magnitude="tanh", width=4), (3, 8, 8)),
    "projected": (
        lambda: hb.models.create("digits", magnitude="seg", width=4, projection="l1_ball(radius=2)"),
        (1, 8, 8),
    ),
    "points": (lambda: hb.models.create("points", magnitude="log", pool="mean"), (16, 3)),
    "point maximum": (lambda: hb.models.create("points", magnitude="ball"), (16, 3)),
    "modified": (
        lambda: hb.models.create("resnet18_modified", 5, magnitude="ball", width=4, stem="cifar"),
        (3, 16, 16),
    ),
    "chain": (
        lambda: hb.models.create("cnn9_adv", angular="square_cosine", magnitude="linear", image_size=8),
        (3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_network_exceeds_its_bounds(name):
    make, shape = NETWORKS[name]
    model = make()
    if any(isinstance(part, nn.modules.batchnorm._NormBase) for part in model.modules()):
        hb.convert.calibrate(model, [torch.randn(8, *shape)])
    bound = hb.bounds(model, input_bound=10.0)
    assert bound.unbounded == ()
    assert math.isfinite(bound.lipschitz)
    model = model.double().eval()
    for scale in (0.1, 1.0):
        x = scale * torch.randn(1, *shape, dtype=torch.float64)
        assert float(model(x).detach().abs().max()) <= bound.output
        assert steepest(model, x, rounds=2) <= bound.lipschitz
        other = x + 1e-2 * torch.randn_like(x)
        assert float((model(x) - model(other)).detach().norm() / (x - other).norm()) <= bound.lipschitz


def test_a_bounded_network_has_bounded_outputs_for_any_input():
    model = hb.models.create("digits", magnitude="ball", width=4)
    bound = hb.bounds(model)
    assert math.isfinite(bound.output)
    assert float(model.eval()(1e6 * torch.randn(4, 1, 8, 8)).detach().abs().max()) <= bound.output
    assert math.isinf(hb.bounds(hb.models.create("digits", width=4)).output)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) * self.b(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "make, words",
    [
        (Gated, "mul of activations has no known bound"),
        (Branching, "cannot be traced"),
        (lambda: nn.Sequential(nn.Linear(4, 4), hb.nn.Projection(2, "sphere")), "1: a projection onto a sphere"),
        (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "0: it normalizes with the batch's own"),
        (lambda: nn.Sequential(hb.nn.RobustPool1d(penalty="welsch")), "welsch, which is not convex"),
        (lambda: nn.TransformerEncoderLayer(4, 1, batch_first=True), "no known bound"),
    ],
)
def test_what_has_no_bound_is_named(make, words):
    bound = hb.bounds(make())
    assert math.isinf(bound.lipschitz)
    assert any(words in text for text in bound.unbounded)
    assert words in str(bound)


def test_hooks_take_the_networks_bound_away():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, given, out: 100 * out)
    bound = hb.bounds(model)
    assert math.isinf(bound.lipschitz)
    assert "has hooks" in bound.unbounded[0]


def test_bounds_are_data_and_a_table_and_leave_the_model_alone():
    model = hb.models.create("digits", magnitude="tanh", width=4)
    bound = hb.bounds(model)
    assert model.training
    read = json.loads(json.dumps(bound.as_dict()))
    assert read["layers"][0]["name"] == "stages.0.0"
    assert read["layers"][1]["output"] is None
    assert bound["stages.0.0"].kind == "DecoupledConv2d"
    assert "network" in str(bound)
    with pytest.raises(KeyError, match=r"known: stages\.0\.0"):
        bound["stem"]


@pytest.mark.parametrize("given", [-1.0, "x", math.nan, True])
def test_a_wrong_input_bound_is_refused(given):
    with pytest.raises(ValueError, match="`input_bound` must be a number >= 0"):
        hb.bounds(nn.Linear(2, 2), input_bound=given)
