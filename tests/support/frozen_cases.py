"""Frozen layers and networks on Triton against the unfrozen ones in float64: run by library/test_freeze_gpu.py.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from foreign_models import sequence, timm_units, torchvision_units
from frozen_models import scrambled
from torch import nn

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.triton.frozen import launch as frozen_launch
from hyperball.models import residual
from hyperball.models.layers import Layers

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
BOUNDS = {torch.float32: 2e-5 if NATIVE else 2e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if NATIVE else [])]
F32 = torch.float32
C = hb.nn
torch.backends.cudnn.allow_tf32 = False  # in a process of its own, as said above
torch.backends.cuda.matmul.allow_tf32 = False
np.seterr(over="ignore", invalid="ignore")  # of the interpreter


@pytest.fixture(autouse=True)
def _triton_is_chosen(monkeypatch):
    """Frozen layers run on Triton here too, where "here" is the interpreter; unwritten memory is NaN."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(name="calls")
def _recorded_launches(monkeypatch):
    """Of every frozen layer that runs on Triton: whether it was given lengths, whether it gave them, and its plan."""
    calls, run = [], frozen_launch.run

    def record(x, held, plan, lengths, leak, added):
        calls.append((lengths is not None, plan.carry, plan))
        return run(x, held, plan, lengths, leak, added)

    monkeypatch.setattr(frozen_launch, "run", record)
    return calls


def drawn(*shape, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def error(ours, truth):
    ours, truth = ours.detach().double().cpu(), truth.detach().double().cpu()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-30))


def frozen_and_exact(model, x, dtype=torch.float32):
    """The frozen model in a dtype, and what the unfrozen one gives in float64 on the CPU for the same input."""
    exact = copy.deepcopy(model).double()
    truth = exact(x.to(dtype).double()).detach()
    return hb.freeze(model).to(DEVICE, dtype), truth


def settled(model):
    """In evaluation, with statistics, radii and scales as training leaves them."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_var.uniform_(0.5, 1.5)
                part.running_mean.normal_(std=0.1)
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_(std=0.1)
            if hasattr(part, "running_length"):
                part.running_length.fill_(2.0)
    return model.eval()


LAYERS = [
    (lambda: (C.DecoupledConv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), (2, 3, 6, 6)),
    (
        lambda: (
            C.DecoupledConv2d(3, 8, (3, 2), (2, 1), (1, 0), bias=True, angular="square_cosine", weighting="joint"),
            nn.BatchNorm2d(8),
        ),
        (2, 3, 7, 6),
    ),
    (lambda: (C.DecoupledConv2d(4, 16, 3, groups=2, padding="same", dilation=2, magnitude="ball"),), (2, 4, 7, 6)),
    (lambda: (C.DecoupledConv2d(3, 12, 7, 2, 3, magnitude="seg"), nn.BatchNorm2d(12)), (2, 3, 9, 9)),
    (lambda: (C.DecoupledConv2d(3, 8, 4, padding="same", padding_mode="reflect"), nn.BatchNorm2d(8)), (2, 3, 6, 6)),
    (lambda: (C.DecoupledConv2d(3, 160, 1, magnitude="piecewise", angular="piecewise"),), (2, 3, 5, 5)),
    (lambda: (C.DecoupledConv2d(12, 512, 3, padding=1, magnitude="sphere"), nn.BatchNorm2d(512)), (1, 12, 3, 3)),
    (lambda: (C.DecoupledConv2d(3, 8, 3, magnitude="linear", angular="square_cosine"),), (2, 3, 6, 6)),
    (lambda: (C.DecoupledConv2d(3, 8, 3, weighting="split", angular="power(learn_b=True)"),), (2, 3, 6, 6)),
    (lambda: (C.DecoupledConv1d(3, 8, 3, padding=1, magnitude="barron"), nn.BatchNorm1d(8)), (2, 3, 6)),
    (lambda: (C.DecoupledConv3d(3, 8, 3, padding=1, magnitude="log"), nn.BatchNorm3d(8)), (2, 3, 4, 3, 4)),
    (lambda: (C.DecoupledLinear(5, 8, angular="sigmoid(learn_k=True)"), nn.BatchNorm1d(8)), (4, 5)),
]  # fmt: skip


@pytest.mark.parametrize(
    "make, shape, dtype",
    [*((*case, F32) for case in LAYERS), *((*case, dtype) for case in LAYERS[:4] for dtype in DTYPES[1:])],
)
def test_a_frozen_layer_equals_the_unfrozen_one(make, shape, dtype, calls):
    model, x = scrambled(nn.Sequential(*make()), torch.float32), drawn(*shape)
    x[0] = 0.0
    frozen, truth = frozen_and_exact(model, x, dtype)
    with torch.no_grad():
        out = frozen(x.to(DEVICE, dtype))
    assert len(calls) == 1
    assert out.dtype == dtype
    assert error(out, truth) < BOUNDS[dtype]


def chain(**options):
    """Two convolutions, max pooling, and a third."""
    return hb.models.create("digits", 5, in_channels=3, width=8, **options)


def resnet(last=True, **options):
    """A stem with max pooling and a unit of 8 channels, and a unit of 16 with a plain 1×1 shortcut."""
    layers = Layers(magnitude="tanh", **options)
    stem = [layers.conv2d(3, 8, 3), layers.norm2d(8), layers.act(8), nn.MaxPool2d(3, 2, 1)]
    stages = [nn.Sequential(residual.Unit(layers, 8, width, width // 8, last)) for width in (8, 16)]
    return residual.ResNet(layers, 5, stem, stages, 16)


def blocks():
    first, second = C.DecoupledConvBNAct(3, 8, 3, padding=1, carry=True), C.DecoupledConvBNAct(8, 8, 3, padding=1)
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(128, 5))


def converted(make, **options):
    return hb.convert_model(make(), magnitude="tanh", **options)[0]


NETWORKS = {
    "chain": (chain, {"magnitude": "tanh"}, 3, 2),
    "residual": (resnet, {"angular": "square_cosine"}, 5, 4),
    "residual, prelu": (resnet, {"activation": "prelu", "last": False}, 5, 4),
    "blocks": (blocks, {}, 2, 1),
    "torchvision": (converted, {"make": torchvision_units}, 5, 4),
    "torchvision, fused": (converted, {"make": torchvision_units, "fuse": True}, 5, 4),
    "timm": (converted, {"make": timm_units}, 6, 5),
    "sequence": (converted, {"make": sequence}, 2, 1),
}


@pytest.mark.parametrize(
    "name, dtype", [*((name, F32) for name in NETWORKS), *(("residual", dtype) for dtype in DTYPES[1:])]
)
def test_a_frozen_network_hands_lengths_on_and_equals_the_unfrozen_one(name, dtype, calls):
    make, options, layers, carried = NETWORKS[name]
    model, x = settled(make(**options)), drawn(2, 3, 4, 4)
    frozen, truth = frozen_and_exact(model, x, dtype)
    state, x = frozen.state_dict(), x.to(DEVICE, dtype)
    with torch.no_grad():
        out = frozen(x)
        assert (len(calls), sum(given for given, *_ in calls)) == (layers, carried)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(frozen)))
        assert error(twin(x), out) < 1e-3 * BOUNDS[dtype] + 1e-5
    assert error(out, truth) < 3 * BOUNDS[dtype]
    assert list(frozen.state_dict()) == list(state)


@pytest.mark.parametrize(
    "window, activation",
    [
        ((3, 2, 1), nn.ReLU()),
        ((3, 2, 1), nn.PReLU(8)),
        ((2, 2, 0), nn.Identity()),
        ((3, 1, 1), nn.ReLU()),
        (((2, 3), (1, 2), (0, 1)), nn.PReLU()),
    ],
)
def test_a_max_pooling_behind_a_layer_is_part_of_its_pass(window, activation, calls):
    layers = [C.DecoupledConv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), copy.deepcopy(activation)]
    last = C.DecoupledConv2d(8, 8, 1)
    model, x = scrambled(nn.Sequential(*layers, nn.MaxPool2d(*window), last), torch.float32), drawn(1, 3, 11, 10)
    frozen, truth = frozen_and_exact(model, x)
    with torch.no_grad():
        out = frozen(x.to(DEVICE))
    assert [plan.pooled for *_, plan in calls] == [True, False]
    assert error(out, truth) < BOUNDS[F32]


def test_a_pooling_that_rounds_up_is_called_as_itself(calls):
    parts = [C.DecoupledConv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
    model, x = scrambled(nn.Sequential(*parts), torch.float32), drawn(2, 3, 7, 7)
    frozen, truth = frozen_and_exact(model, x)
    with torch.no_grad():
        assert error(frozen(x.to(DEVICE)), truth) < BOUNDS[F32]
    assert [plan.pooled for *_, plan in calls] == [False]


def test_a_module_with_hooks_is_called_as_itself(calls):
    model, x = settled(chain(magnitude="tanh")), drawn(2, 3, 4, 4)
    frozen, truth = frozen_and_exact(model, x)
    x, seen = x.to(DEVICE), []
    with torch.no_grad():
        frozen(x)
        frozen.stages[0][2].register_forward_hook(lambda module, given, out: seen.append(float(out.min())))
        assert error(frozen(x), truth) < 1e-5
        assert seen == [0.0]
        assert sum(given for given, *_ in calls[3:]) == 1


def test_an_exchanged_module_is_noticed():
    model, x = settled(chain(magnitude="tanh")), drawn(2, 3, 4, 4)
    frozen, x = hb.freeze(model).to(DEVICE), x.to(DEVICE)
    with torch.no_grad():
        before = frozen(x)
        for each in (frozen, model):
            each.stages[0][2] = nn.Tanh()
        assert not torch.allclose(frozen(x), before)
        assert error(frozen(x), model.to(DEVICE)(x)) < 1e-5


def test_changed_buffers_are_noticed():
    model, x = settled(resnet()), drawn(2, 3, 4, 4).to(DEVICE)
    frozen, other = hb.freeze(model).to(DEVICE), hb.freeze(settled(resnet())).to(DEVICE)
    with torch.no_grad():
        assert not torch.allclose(frozen(x), other(x))
        other.load_state_dict(frozen.state_dict())
        assert error(frozen(x), other(x)) < 1e-5
        before = frozen(x)
        frozen.conv1.bias.add_(1.0)
        frozen.layer2[0].downsample[1].bias.add_(1.0)
        changed = frozen(x)
        assert not torch.allclose(changed, before)
        other.load_state_dict(frozen.state_dict())
        assert error(other(x), changed) < 1e-5


def test_a_shortcut_in_training_mode_is_not_folded():
    model, x = settled(resnet()), drawn(4, 3, 4, 4).to(DEVICE)
    frozen = hb.freeze(model).to(DEVICE)
    with torch.no_grad():
        before = frozen(x)
        frozen.layer2.train()
        assert not torch.allclose(frozen(x), before)


def test_gradients_of_the_input_go_through_torchs_operators(calls):
    model, x = settled(resnet(angular="square_cosine")), drawn(2, 3, 4, 4)
    frozen, exact = hb.freeze(model).to(DEVICE), copy.deepcopy(model).double()
    ours, wide = x.clone().to(DEVICE).requires_grad_(), x.double().requires_grad_()
    (got,) = torch.autograd.grad(frozen(ours).square().sum(), ours)
    (expected,) = torch.autograd.grad(exact(wide).square().sum(), wide)
    assert not calls
    assert error(got, expected) < 1e-4


def test_a_weight_that_needs_its_gradient_is_in_no_chain(calls):
    model, x = settled(resnet(angular="square_cosine")), drawn(2, 3, 4, 4)
    frozen, exact = hb.freeze(model).to(DEVICE), copy.deepcopy(model).double()
    learned, wide = (net.layer2[0].downsample[0].weight.requires_grad_() for net in (frozen, exact))
    (got,) = torch.autograd.grad(frozen(x.to(DEVICE)).square().sum(), learned)
    (expected,) = torch.autograd.grad(exact(x.double()).square().sum(), wide)
    assert error(got, expected) < 1e-4
    carried = {plan.shape[1] for *_, plan in calls if plan.carry}
    assert carried == {8}  # inside the first unit, which holds no such weight; the second has 16 channels


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_neither_lengths_nor_norms_overflow_or_vanish(scale):
    parts = [C.DecoupledConv2d(3, 8, 3, padding=1, magnitude=f"tanh(rho={scale:g}, relative=False)"), nn.ReLU()]
    last = C.DecoupledConv2d(8, 512, 3, magnitude=f"tanh(rho={scale:g}, relative=False)")
    model, x = nn.Sequential(*parts, last).eval(), drawn(1, 3, 6, 6, scale=scale)
    with torch.no_grad():
        frozen, truth = hb.freeze(model).to(DEVICE), copy.deepcopy(model).double()(x.double())
        first = frozen[:2](x.to(DEVICE))
        assert error(first, copy.deepcopy(model[:2]).double()(x.double())) < 1e-5
        out = frozen(x.to(DEVICE))
    assert bool(out.isfinite().all())
    assert error(out, truth) < 1e-4


def test_a_nan_stays_where_it_is():
    parts = [C.DecoupledConv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), C.DecoupledConv2d(8, 8, 1), nn.ReLU()]
    model, x = nn.Sequential(*parts).eval(), drawn(1, 3, 8, 8)
    x[0, 0, 1, 1] = float("nan")
    with torch.no_grad():
        got, expected = hb.freeze(model).to(DEVICE)(x.to(DEVICE)), model(x)
    assert torch.equal(got.isnan().cpu(), expected.isnan())


def test_patches_longer_than_float16_holds_stay_finite():
    model = scrambled(nn.Sequential(C.DecoupledConv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)), torch.float32)
    x = drawn(2, 3, 6, 6, scale=2e4).clamp(-6e4, 6e4)
    frozen, truth = frozen_and_exact(model, x, torch.float16)
    with torch.no_grad():
        assert error(frozen(x.to(DEVICE, torch.float16)), truth) < 1e-2


def test_autocast_convolves_in_its_dtype(calls):
    dtype = torch.bfloat16 if NATIVE else torch.float16
    model, x = settled(resnet()), drawn(2, 3, 4, 4)
    frozen, truth = frozen_and_exact(model, x)
    with torch.no_grad(), torch.autocast(DEVICE, dtype):
        out = frozen(x.to(DEVICE))
    assert out.dtype == dtype
    assert len(calls) == 5
    assert error(out, truth) < 10 * BOUNDS[dtype]


def test_inputs_in_another_layout_and_of_another_size_give_the_same(calls):
    model, x = settled(resnet()), drawn(3, 3, 4, 4)
    frozen, _ = frozen_and_exact(model, x)
    with torch.no_grad():
        whole = frozen(x.to(DEVICE))
        last = frozen(x.to(DEVICE).contiguous(memory_format=torch.channels_last)[1:])
        assert error(last, whole[1:]) < 1e-5
    assert len(calls) == 10


def test_compiled_exported_and_transformed_models_hold_torchs_operators(calls):
    model, x = settled(chain(magnitude="tanh")), drawn(2, 3, 4, 4)
    frozen, truth = frozen_and_exact(model, x)
    x = x.to(DEVICE)
    with torch.no_grad():
        compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
        assert error(compiled(x), truth) < 1e-5
        program = hb.convert.export_program(frozen, x)
        assert error(program.module()(x), truth) < 1e-5
        assert "hyperball" not in str(program.graph)
        assert error(torch.func.vmap(frozen)(x.unsqueeze(1)).squeeze(1), truth) < 1e-5
    assert not calls


def test_explain_names_the_kernel_of_frozen_layers():
    frozen = hb.freeze(settled(chain(magnitude="tanh"))).to(DEVICE)
    assert f"frozen, triton: {DEVICE}, float32" in str(hb.explain(frozen))
