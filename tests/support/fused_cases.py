"""Whole networks in fused blocks against the same modules in float64: run by kernels/test_fused_models.py.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy
import os

import pytest
import torch
from foreign_models import sequence, timm_units, torchvision_units
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.models import residual
from hyperball.models.layers import Layers
from hyperball.nn import fused

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
torch.backends.cudnn.allow_tf32 = False  # in a process of its own, as said above


def cnn(**options):
    """Two convolutions, max pooling, and a third."""
    return hb.models.create("digits", 5, in_channels=3, width=8, **options)


def resnet(last=True, **options):
    """A stem and a unit of 8 channels, and a unit of 16 with a 1×1 shortcut."""
    layers = Layers(**options)
    stem = [layers.conv2d(3, 8, 3), layers.norm2d(8), nn.Identity(), nn.Identity()]
    stages = [nn.Sequential(residual.Unit(layers, 8, width, width // 8, last)) for width in (8, 16)]
    return residual.ResNet(layers, 5, stem, stages, 16)


NETWORKS = {
    "chain": (lambda: cnn(magnitude="tanh"), 3, 1),
    "residual": (lambda: resnet(magnitude="tanh", angular="square_cosine"), 5, 4),
    "residual, prelu": (lambda: resnet(magnitude="tanh", activation="prelu", last=False), 5, 4),
}


@pytest.fixture(autouse=True)
def _triton_is_chosen(monkeypatch):
    """Blocks run on Triton here too, where "here" is the interpreter."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))


@pytest.fixture(name="calls")
def _recorded_blocks(monkeypatch):
    """Of every block that runs fused: whether it was given lengths and whether it gave them."""
    calls, run = [], fused._fused

    def record(parts, x, lengths, added, carry):
        calls.append((lengths is not None, carry))
        return run(parts, x, lengths, added, carry)

    monkeypatch.setattr(fused, "_fused", record)
    return calls


def images():
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-6))


def gradients(model, x, dtype=torch.float32):
    """The loss and its gradients by the input and by the parameters that have one."""
    x = x.detach().to(dtype).requires_grad_()
    out = model(x)
    seeds = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    loss = (out * seeds).sum()
    return [loss, *torch.autograd.grad(loss, [x, *(p for p in model.parameters() if p.requires_grad)])]


def same(model, truth, x, bound=5e-4 if NATIVE else 1e-4):
    for place, (a, b) in enumerate(zip(gradients(model, x), gradients(truth, x, torch.float64), strict=True)):
        assert error(a, b) < bound, (place, error(a, b))


def twins(make, **options):
    model = make(**options).to(DEVICE)
    return model, copy.deepcopy(model).double()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_in_fused_blocks_equals_its_modules_in_training_and_in_evaluation(name, calls):
    make, blocks, carried = NETWORKS[name]
    model, truth = twins(make)
    same(model, truth, images())
    assert len(calls) == blocks
    assert sum(given for given, _ in calls) == sum(carry for _, carry in calls) == carried
    for key, value in truth.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].double(), value.double(), rtol=1e-4, atol=1e-5)
    same(model.eval(), truth.eval(), images())


def test_the_gradient_of_the_input_is_whole_where_no_parameter_has_one(calls):
    model, truth = twins(NETWORKS["residual"][0])
    for each in (model, truth):
        each.eval().requires_grad_(False)
    same(model, truth, images())
    assert len(calls) == 5


def test_a_bias_before_batch_norm_is_fused_too(calls):
    model, truth = twins(cnn, magnitude="tanh", bias=True)
    for conv, twin in zip(model.modules(), truth.modules(), strict=True):
        if isinstance(conv, nn.Conv2d):
            nn.init.normal_(conv.bias)
            twin.bias.data.copy_(conv.bias)
    x = images()
    ours, exact = gradients(model, x), gradients(truth, x, torch.float64)
    for (name, _), a, b in zip(model.named_parameters(), ours[2:], exact[2:], strict=True):
        assert error(a, b) < 1e-4, name
    assert error(ours[1], exact[1]) < 1e-4
    for key, value in truth.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].double(), value.double(), rtol=1e-4, atol=1e-5)
    same(model.eval(), truth.eval(), x)
    assert len(calls) == 6


def test_a_bias_moves_a_plain_mean_of_the_batches_as_torch_does():
    conv, norm = hb.nn.DecoupledConv2d(3, 8, 3, bias=True), nn.BatchNorm2d(8, momentum=None)
    model = nn.Sequential(conv, norm).to(DEVICE)
    truth = copy.deepcopy(model).double()
    for seed in range(3):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        fused.run_block((*model, None), x)
        truth(x.double())
    torch.testing.assert_close(norm.running_mean.double(), truth[1].running_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hooked, blocks", [("stages.0", 2), ("stages.0.2", 3), ("stages.1.0", 2)])
def test_hooks_see_whole_activations_and_whole_gradients(hooked, blocks, calls):
    model, truth = twins(cnn, magnitude="tanh")
    seen = {}

    def keep(module, given, output):
        assert all(isinstance(part, torch.Tensor) for part in (*given, output))
        output.retain_grad()
        seen.setdefault(id(module), []).append(output)

    for each in (model, truth):
        each.get_submodule(hooked).register_forward_hook(keep)
    x = images()
    for each, dtype in ((model, torch.float32), (truth, torch.float64)):
        each(x.to(dtype)).square().sum().backward()
    (ours,), (exact,) = seen.values()
    assert error(ours, exact) < 1e-4
    assert error(ours.grad, exact.grad) < 1e-4
    assert len(calls) == blocks


@pytest.mark.parametrize("hooked", ["layer1.0", "layer2.0.conv1"])
def test_hooks_inside_a_residual_network_fire_once_with_tensors(hooked, calls):
    model, truth = twins(resnet, magnitude="tanh")
    fired = []

    def fire(module, given, output):
        fired.append(all(isinstance(held, torch.Tensor) for held in (*given, output)))

    handle = model.get_submodule(hooked).register_forward_hook(fire)
    same(model, truth, images())
    assert fired == [True]
    assert len(calls) == (4 if hooked == "layer2.0.conv1" else 5)
    handle.remove()


def test_hooks_on_all_modules_let_every_module_be_called():
    model, names = resnet(magnitude="tanh").to(DEVICE), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: names.append(type(module).__name__))
    try:
        model(images())
    finally:
        handle.remove()
    assert names.count("Unit") == 2
    assert names.count("DecoupledConv2d") == 5
    assert names.count("Sequential") == 3


def doubled(module, given, value):
    """A hook that sees one norm a patch, and makes the radius twice as large."""
    assert given[0].shape[0] > 1
    return value.with_parameters(rho=2 * value.parameters["rho"])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["convolution", "linear", "block"])
def test_a_hook_on_a_magnitude_sees_the_norms_and_may_change_the_value(kind, training):
    torch.manual_seed(0)
    model: nn.Module = hb.nn.DecoupledConvBNAct(3, 8, 3, padding=1)
    if kind != "block":
        model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3) if kind == "convolution" else hb.nn.DecoupledLinear(4, 8))
    model = model.to(DEVICE).train(training)
    before, truth = gradients(model, images()), copy.deepcopy(model).double()
    for each in (model, truth):
        each[0].magnitude.register_forward_hook(doubled)
    same(model, truth, images())
    assert error(gradients(model, images())[0], before[0]) > 1e-3


@pytest.mark.parametrize(
    "part, dtype", [(1, torch.float64), (1, torch.float16), (2, torch.float64), (2, torch.float16)]
)
def test_a_block_refuses_the_mixtures_of_dtypes_that_its_modules_refuse(part, dtype, calls):
    block = hb.nn.DecoupledConvBNAct(3, 8, 3, activation="prelu").to(DEVICE)
    block(images())
    block[part].to(dtype)
    with pytest.raises(RuntimeError):
        block(images())
    assert len(calls) == 1


def test_checkpoints_give_the_same_gradients():
    model, truth = twins(NETWORKS["residual"][0])

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    same(Checkpointed(), truth, images())


def test_transforms_and_forward_mode_run_module_after_module(calls):
    model, x = NETWORKS["residual"][0]().to(DEVICE).eval(), images()
    by_transform = torch.func.grad(lambda x: model(x).square().sum())(x)
    assert not calls
    x.requires_grad_()
    (by_autograd,) = torch.autograd.grad(model(x).square().sum(), x)
    assert calls
    assert error(by_transform, by_autograd) < 1e-4
    assert error(torch.func.vmap(model)(x.detach().unsqueeze(1)).squeeze(1), model(x)) < 1e-4


def test_the_second_derivative_goes_through_the_lengths():
    model, truth = twins(lambda: cnn(magnitude="tanh", activation="prelu"))
    results = []
    for each, dtype in ((model, torch.float32), (truth, torch.float64)):
        x = images().to(dtype).requires_grad_()
        (dx,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, each.stages[0][0].weight]))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-3


def test_a_compiled_network_is_one_graph_and_gives_the_same():
    model, truth = twins(NETWORKS["residual"][0])
    graphs = []

    def keep(graph, given):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    same(torch.compile(model, fullgraph=True, backend=keep), truth, images())
    assert [targets.count("hyperball.decoupled_block.default") for targets in graphs] == [5]


def test_an_exported_network_holds_torchs_operators_alone(calls):
    # On a GPU the choice of torch's own BatchNorm kernel bounds a batch of any size: that is no matter here.
    program = hb.convert.export_program(NETWORKS["residual"][0]().to(DEVICE), images(), dynamic_batch=False)
    assert not calls
    assert "hyperball" not in str(program.graph)


@pytest.mark.parametrize("make, blocks, carried", [(torchvision_units, 5, 4), (timm_units, 6, 5), (sequence, 2, 1)])
def test_a_converted_model_in_fused_blocks_equals_its_modules(make, blocks, carried, calls):
    model, _ = hb.convert_model(make(), magnitude="tanh", fuse=True)
    model, truth = twins(lambda: model)
    same(model, truth, images())
    assert (len(calls), sum(given for given, _ in calls)) == (blocks, carried)
    same(model.eval(), truth.eval(), images())


def moved(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_tensors_that_hooks_kept_in_another_layout_give_the_same_gradients(layout, calls):
    torch.manual_seed(0)
    block = hb.nn.DecoupledConvBNAct(5, 8, 3, padding=1, magnitude="tanh").to(DEVICE).to(memory_format=layout)
    twin = copy.deepcopy(block).double()
    x = torch.randn(2, 5, 4, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(moved, lambda kept: kept):
        out = block(found)
    assert calls
    parameters = list(block.parameters()), list(twin.parameters())
    ours = torch.autograd.grad(out.square().sum(), [found, *parameters[0]])
    theirs = torch.autograd.grad(twin(exact).square().sum(), [exact, *parameters[1]])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_the_sum_of_the_lengths_that_a_block_gives_has_its_gradient(calls):
    torch.manual_seed(0)
    block = hb.nn.DecoupledConvBNAct(5, 8, 3, padding=1, magnitude="tanh", carry=True).to(DEVICE)
    twin = copy.deepcopy(block).double()
    x = torch.randn(2, 5, 4, 6, device=DEVICE).contiguous(memory_format=torch.channels_last)
    found, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    (ours,) = torch.autograd.grad(block(found)[1].sum(), found)  # its gradient is one number, repeated
    assert calls
    (theirs,) = torch.autograd.grad(twin(exact)[1].sum(), exact)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
