"""First and second derivatives, forward and backward, and what the backward keeps."""

import itertools

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import hyperball as hb
from hyperball import functional as F

MAGNITUDES = [*(name for name in hb.radial.names("magnitude")), "linear + tanh(rho=2)"]
UNSPLITTABLE = ("seg", "mix", "piecewise", "linear + tanh(rho=2)")
OPERATORS = [
    (magnitude, angular, weighting)
    for magnitude, angular, weighting in itertools.product(
        MAGNITUDES, hb.angular.names(), ("none", "linear", "joint", "split")
    )
    if not (weighting == "split" and magnitude in UNSPLITTABLE)
]
RADIAL_PARAMETERS = {
    "sphere": {"alpha": 0.7},
    "ball": {"rho": 2.0, "alpha": 1.5},
    "tanh": {"rho": 2.0, "alpha": 1.5},
    "linear": {"alpha": 0.7},
    "seg": {"rho": 2.0, "alpha": 1.5, "beta": 0.3},
    "log": {"alpha": 0.7},
    "mix": {"alpha": 1.5, "beta": 0.3},
    "barron": {"rho": 2.0, "alpha": 1.5, "shape": 0.5},
    "piecewise": {"rho": 1.3, "slopes": (0.2, 1.0, 0.5)},
}
ANGULAR_PARAMETERS = {
    "cosine": {},
    "sigmoid": {"k": 0.3},
    "power": {"b": 1.7},
    "piecewise": {"slopes": (0.3, 0.8, 1.2)},
}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("magnitude, angular, weighting", OPERATORS)
def test_derivatives_in_input_and_weight(magnitude, angular, weighting):
    def function(x, w):
        return F.decoupled_conv2d(x, w, magnitude=magnitude, angular=angular, weighting=weighting)

    inputs = (leaf(1, 2, 4, 4), leaf(2, 2, 2, 2))
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


def spread(value: float) -> torch.Tensor:
    return (value + 0.1 * torch.rand(4, dtype=torch.float64)).requires_grad_()


def tensors_of(parameters: dict) -> list[torch.Tensor]:
    held = [item for value in parameters.values() for item in (value if isinstance(value, tuple) else (value,))]
    scalar = [
        isinstance(value, tuple) for value in parameters.values() for _ in (value if isinstance(value, tuple) else (0,))
    ]
    return [
        torch.tensor(item, dtype=torch.float64, requires_grad=True) if single else spread(item)
        for item, single in zip(held, scalar, strict=True)
    ]


def filled(parameters: dict, tensors) -> dict:
    return {
        key: tuple(next(tensors) for _ in value) if isinstance(value, tuple) else next(tensors)
        for key, value in parameters.items()
    }


@pytest.mark.parametrize("name", RADIAL_PARAMETERS)
@pytest.mark.parametrize("angular", ANGULAR_PARAMETERS)
@pytest.mark.parametrize("weighting", ["none", "linear", "joint", "split"])
def test_derivatives_in_every_parameter_per_channel(name, angular, weighting):
    if weighting == "split" and name in UNSPLITTABLE:
        with pytest.raises(ValueError, match="split"):
            hb.nn.DecoupledLinear(2, 2, magnitude=name, weighting="split")
        return
    radial_tensors = tensors_of(RADIAL_PARAMETERS[name])
    angular_tensors = tensors_of(ANGULAR_PARAMETERS[angular])

    def function(x, w, *parameters):
        remaining = iter(parameters)
        magnitude = getattr(hb.radial, name)(**filled(RADIAL_PARAMETERS[name], remaining))
        g = getattr(hb.angular, angular)(**filled(ANGULAR_PARAMETERS[angular], remaining))
        return F.decoupled_conv2d(
            x, w, groups=2, stride=2, padding=1, magnitude=magnitude, angular=g, weighting=weighting
        )

    inputs = (leaf(2, 2, 4, 4), leaf(4, 1, 2, 2), *radial_tensors, *angular_tensors)
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("dims", [1, 3])
def test_derivatives_in_other_dimensions_and_transposed(dims):
    conv = {1: F.decoupled_conv1d, 3: F.decoupled_conv3d}[dims]
    transposed = {1: F.decoupled_conv_transpose1d, 3: F.decoupled_conv_transpose3d}[dims]
    x, w = leaf(1, 2, *(3,) * dims), leaf(2, 2, *(2,) * dims)
    for function in (conv, transposed):
        call = lambda x, w, f=function: f(x, w, stride=2, padding=1, magnitude="tanh", angular="square_cosine")  # noqa: E731
        assert gradcheck(call, (x, w), check_forward_ad=True)
        assert gradgradcheck(call, (x, w), fast_mode=True)


@pytest.mark.parametrize("magnitude", ["tanh", "ball", "seg", "barron", "piecewise"])
@pytest.mark.parametrize("groups", [1, 2])
def test_derivatives_through_a_relative_radius(magnitude, groups):
    layer = hb.nn.DecoupledConv2d(2, 4, 3, padding=1, groups=groups, magnitude=magnitude, dtype=torch.float64)

    def function(x, weight, ratio):
        return torch.func.functional_call(layer, {"weight": weight, "magnitude.ratio": ratio}, (x,))

    inputs = (leaf(2, 2, 4, 4), leaf(*layer.weight.shape), (torch.rand(4).double() + 0.5).requires_grad_())
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_the_blockwise_epilogue_equals_the_whole(monkeypatch):
    from hyperball.kernels.decoupled import epilogue

    layer = hb.nn.DecoupledConv2d(3, 8, 3, groups=1, angular="sigmoid(learn_k=True)", weighting="joint")
    x = torch.randn(7, 3, 9, 9, requires_grad=True)
    results = []
    for block in (1 << 30, 300):
        monkeypatch.setattr(epilogue, "BLOCK", block)
        out = layer(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieces)


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes of distinct storages that the forward keeps for the backward, parameters and input left out."""
    kept: dict[int, int] = {}
    outside = {x.untyped_storage().data_ptr(), *(p.untyped_storage().data_ptr() for p in layer.parameters())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in outside:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("angular", ["cosine", "sigmoid", "square_cosine"])
@pytest.mark.parametrize("magnitude", ["tanh", "seg", "barron", "sphere", "linear + log"])
def test_backward_keeps_one_activation_map_and_one_map_of_groups_channels(magnitude, angular, layout, groups):
    layer = hb.nn.DecoupledConv2d(8, 16, 3, padding=1, groups=groups, magnitude=magnitude, angular=angular)
    x = torch.randn(4, 8, 32, 32).contiguous(memory_format=layout).requires_grad_()
    positions = 4 * 32 * 32
    small = 8 * sum(p.numel() for p in layer.parameters()) + 4096
    assert saved_bytes(layer, x) <= 4 * positions * (16 + groups) + small


def test_an_in_place_relu_may_follow():
    conv = hb.nn.DecoupledConv2d(3, 8, 3, padding=1).double()
    x = leaf(2, 3, 6, 6)
    for act in (nn.ReLU(inplace=True), nn.ReLU()):
        conv.zero_grad()
        x.grad = None
        act(conv(x)).square().sum().backward()
        if act.inplace:
            first = x.grad.clone()
    torch.testing.assert_close(x.grad, first)


def test_a_user_defined_row_gets_its_derivatives_from_autograd():
    hb.radial.register("cubic_ball", gain=lambda n, rho: 1 / (rho**3 + n**3) ** (1 / 3), parameters={"rho": 1.0})
    hb.angular.register("cubic", lambda c, mixing: mixing * c + (1 - mixing) * c**3, parameters={"mixing": 0.5})
    try:
        layer = hb.nn.DecoupledConv2d(
            2, 3, 3, magnitude="cubic_ball(rho=2)", angular="cubic(learn_mixing=True)"
        ).double()
        x = leaf(2, 2, 5, 5)
        assert gradcheck(lambda x: layer.eval()(x), (x,))
        layer.train()(x).sum().backward()
        assert layer.magnitude.ratio.grad.abs().sum() > 0
        assert layer.angular.raw_mixing.grad.abs().sum() > 0
    finally:
        hb.radial.TABLE.rows.pop("cubic_ball")
        hb.angular.TABLE.rows.pop("cubic")


@pytest.mark.parametrize("magnitude", hb.radial.names("magnitude"))
@pytest.mark.parametrize("angular", hb.angular.names())
def test_second_derivatives_are_finite_on_zero_patches(magnitude, angular):
    x = torch.zeros(1, 2, 6, 6)
    x[:, :, 3:, 3:] = torch.randn(1, 2, 3, 3)
    x.requires_grad_()
    w = torch.randn(3, 2, 3, 3, requires_grad=True)
    out = F.decoupled_conv2d(x, w, magnitude=magnitude, angular=angular)
    first = torch.autograd.grad(out.square().sum(), (x, w), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))
    assert all(g.isfinite().all() for g in (*first, *second))
