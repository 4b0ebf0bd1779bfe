"""Layers and blocks on Triton against themselves run eagerly: run by kernels/test_triton.py, on a GPU or interpreted.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy

import pytest
import torch
from packaging.version import Version
from triton_cases import (
    DEVICE,
    _unwritten_memory_is_nan,  # noqa: F401 (a fixture of all cases)
    error,
    module_gradients,
    radius,
    random,
)

import hyperball as hb
from hyperball.kernels import dispatch, norms
from hyperball.kernels.triton.decoupled import layer as triton_layer
from hyperball.kernels.triton.decoupled import ops


@pytest.fixture(autouse=True)
def _triton_is_chosen(monkeypatch):
    """Layers run on Triton here too, where "here" is the interpreter."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))


def sum_of_terms(module, name, x):
    """Σ |v·∂f/∂p| over all outputs for a parameter of one value, 0 for others: what its gradient may cancel from."""
    parameter = dict(module.named_parameters())[name]
    if parameter.dim():
        return 0.0
    out = module(x)
    seed = torch.ones_like(out, requires_grad=True)
    (along,) = torch.autograd.grad(out, parameter, seed, create_graph=True)
    (slope,) = torch.autograd.grad(along, seed)
    return float((slope * random(*out.shape, seed=9).to(out.dtype)).abs().sum())


def same_state(a, b):
    for key, value in b.state_dict().items():
        torch.testing.assert_close(a.state_dict()[key].double(), value.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weighting", ["none", "linear", "joint"])
@pytest.mark.parametrize("magnitude", ["tanh", "ball(relative=False)", "seg(learn_alpha=True, per='layer')"])
def test_a_layer_equals_itself_run_eagerly_in_float64(magnitude, weighting):
    layer = hb.nn.DecoupledConv2d(5, 8, 3, 2, 1, bias=True, magnitude=magnitude, weighting=weighting).to(DEVICE)
    truth = copy.deepcopy(layer).double()
    x = random(3, 5, 7, 6, seed=1)
    scales = [0.0, 0.0, *(sum_of_terms(copy.deepcopy(truth), name, x.double()) for name, _ in truth.named_parameters())]
    ours, exact = module_gradients(layer, x), module_gradients(truth, x, torch.float64)
    for a, b, scale in zip(ours, exact, scales, strict=True):
        off = float((a.detach().double() - b.detach()).norm())
        assert off <= 2e-5 * float(b.norm()) + 1e-6 * scale
    same_state(layer, truth)
    layer.eval(), truth.eval()
    assert error(layer(x), truth(x.double())) < 2e-5


@pytest.mark.parametrize(
    "make", [lambda: hb.nn.DecoupledLinear(5, 8), lambda: hb.nn.DecoupledConv1d(5, 8, 3, padding="same")]
)
def test_linear_and_one_dimensional_layers_equal_themselves_run_eagerly(make):
    layer = make().to(DEVICE)
    truth = copy.deepcopy(layer).double()
    x = random(3, 5, 5, seed=1)
    for a, b in zip(module_gradients(layer, x), module_gradients(truth, x, torch.float64), strict=True):
        assert error(a, b) < 2e-5
    same_state(layer, truth)


def test_parameters_of_any_layout_and_place_are_read_right():
    x, w = random(2, 5, 4, 4, seed=1), random(6, 5, 3, 3, seed=2)
    rho = radius(12)[::2]
    value = hb.radial.tanh(rho=rho, alpha=torch.tensor(1.5))
    ours = hb.functional.decoupled_conv2d(x, w, magnitude=value, padding=1)
    truth = hb.functional.decoupled_conv2d(
        x.double(), w.double(), magnitude=hb.radial.tanh(rho=rho.double(), alpha=1.5), padding=1
    )
    assert error(ours, truth) < 1e-5


def test_a_chain_of_blocks_equals_its_modules_in_float64():
    blocks = torch.nn.ModuleList(
        hb.nn.DecoupledConvBNAct(c, 8, 3, padding=1, activation=a, carry=c == 5) for c, a in ((5, "relu"), (8, "prelu"))
    ).to(DEVICE)
    truth = copy.deepcopy(blocks).double()

    class Chain(torch.nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            pair = self.parts[0](x)
            return self.parts[1](pair, pair)

    x = random(3, 5, 4, 4, seed=1)
    assert blocks[0].choice(x).kernel == "triton"
    for a, b in zip(module_gradients(Chain(blocks), x), module_gradients(Chain(truth), x, torch.float64), strict=True):
        assert error(a, b) < 5e-5
    same_state(blocks, truth)
    blocks.eval(), truth.eval()
    assert error(Chain(blocks)(x), Chain(truth)(x.double())) < 2e-5


@pytest.mark.parametrize("make", [hb.nn.DecoupledConv2d, hb.nn.DecoupledConvBNAct])
def test_a_compiled_layer_is_one_graph_and_gives_the_same(make):
    layer, x = make(5, 8, 3, padding=1).to(DEVICE), random(3, 5, 4, 4, seed=1)
    truth = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours = module_gradients(compiled, x)
    for a, b in zip(ours, module_gradients(truth, x), strict=True):
        assert error(a, b) < 1e-5
    same_state(layer, truth)


def test_forward_mode_and_vmap_take_the_eager_path():
    layer, x = hb.nn.DecoupledConv2d(5, 8, 3, padding=1).to(DEVICE).eval(), random(2, 5, 4, 4, seed=1)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    step = (layer(x.double().float() + 1e-3) - layer(x - 1e-3)) / 2e-3
    assert error(tangent, step) < 1e-2
    assert error(torch.func.vmap(layer)(x.unsqueeze(1)).squeeze(1), layer(x)) < 1e-5


@pytest.mark.skipif(Version(torch.__version__) < Version("2.14"), reason="torch 2.11 cannot trace vmap of a Function")
@pytest.mark.parametrize(
    "transform",
    [
        lambda layer: lambda x: torch.func.vmap(layer)(x.unsqueeze(1)).squeeze(1),
        lambda layer: torch.func.grad(lambda x: layer(x).square().sum()),
        lambda layer: lambda x: torch.func.jvp(layer, (x,), (x.cos(),))[1],
    ],
)
def test_a_transformed_layer_compiles_to_one_graph_and_gives_the_same(transform):
    layer, x = hb.nn.DecoupledConv2d(5, 8, 3, padding=1).to(DEVICE).eval(), random(2, 5, 4, 4, seed=1)
    compiled = torch.compile(transform(layer), fullgraph=True, backend="aot_eager")
    assert error(compiled(x), transform(layer)(x)) < 1e-5


def test_inputs_in_any_layout_and_second_derivatives_of_a_block():
    blocks = hb.nn.DecoupledConvBNAct(3, 8, 3, padding=1, activation="prelu").to(DEVICE)
    x = torch.randn(2, 3, 4, 4, device=DEVICE, requires_grad=True)
    assert error(blocks(x), blocks(ops.dense(x))) < 1e-6

    def penalty(module, x):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), module[0].weight)[0]

    truth = copy.deepcopy(blocks).double()
    wide = x.detach().double().requires_grad_()
    assert error(penalty(blocks, x), penalty(truth, wide)) < 1e-3


def twice(layer, x):
    return layer(layer(x))


def with_itself(block, x):
    return block(x, x)


def unit(block, x):
    return block(block(x), x)


@pytest.mark.parametrize(
    "kind, options, run",
    [
        (hb.nn.DecoupledConv2d, {"weighting": "linear"}, torch.nn.Module.__call__),
        (hb.nn.DecoupledConv2d, {"weighting": "joint"}, torch.nn.Module.__call__),
        (hb.nn.DecoupledConv2d, {}, twice),
        (hb.nn.DecoupledConvBNAct, {"activation": "prelu"}, with_itself),
        (hb.nn.DecoupledConvBNAct, {"activation": "prelu"}, unit),
    ],
)
def test_derivatives_with_a_graph_count_an_input_once_that_another_depends_on(kind, options, run):
    module = kind(8, 8, 3, padding=1, **options).to(DEVICE)
    truth = copy.deepcopy(module).double()
    found = []
    for each, x in ((module, random(2, 8, 4, 4, seed=1)), (truth, random(2, 8, 4, 4, seed=1).double())):
        leaves = [x.requires_grad_(), *each.parameters()]
        first = torch.autograd.grad(run(each, x).square().sum(), leaves, create_graph=True)
        found.append([*first[:2], *torch.autograd.grad(first[0].square().sum(), leaves[:2])])
    for ours, exact in zip(*found, strict=True):
        assert error(ours, exact) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "strided"])
def test_lengths_of_filters_and_their_gradients_are_those_of_the_eager_norm(layout, dtype):
    whole = random(7, 5, 3, 3, seed=1)
    whole[1], whole[2, 0, 0, 0], whole[3] = 0.0, 1e4, whole[3] * 1e-3
    made = {
        "contiguous": whole, "channels last": whole.contiguous(memory_format=torch.channels_last),
        "strided": whole.transpose(2, 3),
    }[layout].to(dtype)  # fmt: skip
    weight, wide = made.detach().requires_grad_(), made.detach().double().requires_grad_()
    pull = random(7, seed=2)
    m, exact = triton_layer.filter_lengths(weight), norms.filter_norms(wide)
    assert error(m, exact) < 1e-6
    (ours,), (truth,) = torch.autograd.grad(m, weight, pull), torch.autograd.grad(exact, wide, pull.double())
    assert ours.dtype == dtype
    assert ours[1].abs().max() == 0
    assert error(ours, truth) < (1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("size", [(0, 5, 3, 3), (4, 0, 3, 3), (3, 4100)])
def test_lengths_of_no_filters_of_empty_and_of_long_ones(size):
    weight = random(*size, seed=1).requires_grad_()
    m = triton_layer.filter_lengths(weight)
    assert m.shape == size[:1]
    torch.testing.assert_close(m, weight.flatten(1).norm(dim=1) if weight.numel() else torch.zeros_like(m))
    (grad,) = torch.autograd.grad(m.sum(), weight)
    assert grad.shape == weight.shape


def test_lengths_of_filters_have_a_second_derivative():
    weight = random(3, 2, 2, 2, seed=1).requires_grad_()
    (first,) = torch.autograd.grad(triton_layer.filter_lengths(weight).square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    torch.testing.assert_close(second, 8 * weight)


@pytest.mark.parametrize("weighting", ["linear", "joint"])
def test_a_weighted_layer_takes_no_eager_norm_of_its_filters(weighting, monkeypatch):
    def refuse(*_):
        raise AssertionError("an eager norm takes some twenty launches")

    monkeypatch.setattr(triton_layer, "filter_norms", refuse)
    conv = hb.nn.DecoupledConv2d(5, 8, 3, weighting=weighting).to(DEVICE)
    conv(random(2, 5, 6, 6, seed=1)).sum().backward()
    assert conv.weight.grad.isfinite().all()
