"""Decoupled layers as ordinary modules: state, dtypes, devices, radii, precision, transforms, ranks."""

import copy
import io
import pickle

import pytest
import reference
import torch
from conftest import tolerance
from process_pairs import run_in_two
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyperball as hb

LAYERS = {
    "linear": (hb.nn.DecoupledLinear, nn.Linear, (6, 4), (5, 6)),
    "conv1d": (hb.nn.DecoupledConv1d, nn.Conv1d, (4, 6, 3), (2, 4, 9)),
    "conv2d": (hb.nn.DecoupledConv2d, nn.Conv2d, (4, 6, 3), (2, 4, 9, 9)),
    "conv3d": (hb.nn.DecoupledConv3d, nn.Conv3d, (4, 6, 3), (2, 4, 5, 5, 5)),
    "transpose1d": (hb.nn.DecoupledConvTranspose1d, nn.ConvTranspose1d, (4, 6, 3), (2, 4, 9)),
    "transpose2d": (hb.nn.DecoupledConvTranspose2d, nn.ConvTranspose2d, (4, 6, 3), (2, 4, 9, 9)),
    "transpose3d": (hb.nn.DecoupledConvTranspose3d, nn.ConvTranspose3d, (4, 6, 3), (2, 4, 5, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_shape_and_the_state_of_torchs(name):
    ours, theirs, arguments, shape = LAYERS[name]
    layer, plain, x = ours(*arguments, bias=True), theirs(*arguments, bias=True), torch.randn(shape)
    assert layer(x).shape == plain(x).shape
    assert isinstance(layer, theirs)
    layer.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(layer.weight, plain.weight)
    assert set(plain.state_dict()) <= set(layer.state_dict())
    assert ours(*arguments).bias is None
    exact = ours(*arguments, bias=True, magnitude="linear", weighting="linear")
    exact.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(exact(x), plain(x))


@pytest.mark.parametrize("name", LAYERS)
def test_copies_and_pickles_compute_the_same(name):
    ours, _, arguments, shape = LAYERS[name]
    layer, x = (
        ours(*arguments, magnitude="barron(learn_shape=True)", angular="sigmoid(learn_k=True)"),
        torch.randn(shape),
    )
    layer(x)
    layer.eval()
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    loaded = ours(*arguments, magnitude="barron(learn_shape=True)", angular="sigmoid(learn_k=True)").eval()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


def test_unknown_keys_and_wrong_shapes_in_a_state_are_still_errors():
    layer = hb.nn.DecoupledConv2d(3, 4, 3)
    with pytest.raises(RuntimeError, match="Unexpected"):
        layer.load_state_dict({**layer.state_dict(), "magnitude.nothing": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({**layer.state_dict(), "magnitude.ratio": torch.zeros(9)})
    with pytest.raises(RuntimeError, match="Missing"):
        layer.load_state_dict({"magnitude.ratio": torch.ones(4)})


def test_repr_names_the_operator():
    layer = hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh(rho=2, relative=False)", angular="sigmoid(k=0.5)")
    text = repr(layer)
    assert "magnitude='tanh(rho=2, relative=False)'" in text
    assert "angular='sigmoid(k=0.5)'" in text
    assert "kernel_size=(3, 3)" in text
    assert "\n" not in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_layout_of_the_output_are_those_of_a_plain_convolution(dtype):
    layer = hb.nn.DecoupledConv2d(4, 8, 3, groups=2, dtype=dtype, magnitude="tanh + log", angular="linear")
    x = torch.randn(2, 4, 8, 8).to(dtype).contiguous(memory_format=torch.channels_last)
    out = layer.to(memory_format=torch.channels_last)(x)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last)
    expected = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(out.double(), expected, **tolerance(dtype, 8))


def test_a_layer_on_the_meta_device_allocates_nothing_and_materializes():
    layer = hb.nn.DecoupledConv2d(4, 8, 3, device="meta", magnitude="barron", angular="piecewise")
    assert all(t.is_meta for t in layer.state_dict().values())
    assert layer(torch.empty(2, 4, 8, 8, device="meta")).shape == (2, 8, 6, 6)
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(hb.nn.DecoupledConv2d(4, 8, 3, magnitude="barron", angular="piecewise").state_dict())
    assert layer(torch.randn(2, 4, 8, 8)).isfinite().all()


def test_a_relative_radius_is_the_ratio_of_the_mean_length():
    layer = hb.nn.DecoupledConv2d(3, 5, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.magnitude.ratio.copy_(torch.rand(5) + 0.5)
    x = torch.randn(2, 3, 7, 7, dtype=torch.float64)
    n = reference.patch_norm(reference.patches(x, 3))
    rho = reference.relative_radius(n, layer.magnitude.ratio)
    expected = reference.decoupled_conv(x, layer.weight, magnitude="tanh", rho=rho)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    layer.eval()
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.radius, rho, rtol=1e-12, atol=0)


def test_the_running_mean_is_a_plain_mean_first_and_then_forgets():
    layer = hb.nn.DecoupledLinear(6, 3)
    means = []
    for step in range(5):
        x = torch.randn(10, 6) * (step + 1)
        layer(x)
        means.append((x.square().sum(1) + 1e-4).sqrt().mean())
    torch.testing.assert_close(layer.magnitude.running_length, torch.stack(means).mean())
    layer.magnitude.batches.fill_(10**6)
    before = layer.magnitude.running_length.clone()
    layer(x)
    torch.testing.assert_close(layer.magnitude.running_length, before + 0.001 * (means[-1] - before))
    layer.eval()
    before = layer.magnitude.running_length.clone()
    layer(x)
    torch.testing.assert_close(layer.magnitude.running_length, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_running_mean_stays_in_float32(dtype):
    layer = hb.nn.DecoupledConv2d(3, 4, 3)
    layer(torch.randn(2, 3, 8, 8))
    before = layer.magnitude.running_length.clone()
    layer = layer.to(dtype)
    assert layer.weight.dtype == layer.magnitude.ratio.dtype == dtype
    torch.testing.assert_close(layer.magnitude.running_length, before, rtol=0, atol=0)
    assert layer.double().magnitude.running_length.dtype == torch.float64


def test_an_all_zero_batch_keeps_the_radius_above_zero():
    layer = hb.nn.DecoupledConv2d(3, 4, 3, magnitude="ball")
    x = torch.zeros(2, 3, 8, 8, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert (layer.radius > 0).all()
    assert x.grad.isfinite().all()
    assert layer.weight.grad.isfinite().all()
    assert layer.magnitude.ratio.grad.isfinite().all()


@pytest.mark.parametrize(
    "text, shapes",
    [
        ("tanh", {"ratio": (6,), "running_length": (), "batches": ()}),
        ("tanh(per='layer')", {"ratio": (), "running_length": (), "batches": ()}),
        ("tanh(relative=False)", {"raw_rho": (6,)}),
        ("tanh(relative=False, per='layer')", {"raw_rho": ()}),
        ("tanh(relative=False, learn=False)", {}),
        ("tanh(learn=False)", {"running_length": (), "batches": ()}),
        ("sphere", {}),
        ("sphere(learn_alpha=True)", {"raw_alpha": (6,)}),
        ("mix(learn_alpha=True, learn_beta=True, per='layer')", {"raw_alpha": (), "raw_beta": ()}),
        ("linear + tanh", {"ratio_1": (6,), "running_length": (), "batches": ()}),
    ],
)
def test_what_is_learned_is_what_the_text_says(text, shapes):
    layer = hb.nn.DecoupledConv2d(4, 6, 3, magnitude=text)
    assert {key: tuple(value.shape) for key, value in layer.magnitude.state_dict().items()} == shapes


@pytest.mark.parametrize("text", ["tanh(rho=2.5)", "tanh(rho=2.5, relative=False)", "tanh(rho=2.5, learn=False)"])
def test_a_radius_starts_at_its_value(text):
    layer = hb.nn.DecoupledConv2d(4, 6, 3, magnitude=text)
    unit = (1 if "relative=False" in text else 6.0) * torch.ones(())  # an untrained unit is sqrt(4·3·3)
    torch.testing.assert_close(layer.radius, (2.5 * unit).expand_as(layer.radius), rtol=1e-4, atol=0)


def test_parameters_start_at_their_values_and_stay_in_range():
    layer = hb.nn.DecoupledLinear(
        3, 4, magnitude="barron(shape=0.5, learn_shape=True)", angular="power(b=1.5, learn_b=True)"
    )
    torch.testing.assert_close(layer.magnitude.current("shape"), torch.full((4,), 0.5))
    torch.testing.assert_close(layer.angular.current("b"), torch.full((4,), 1.5))
    with torch.no_grad():
        for raw in (layer.magnitude.raw_shape, layer.angular.raw_b):
            raw.copy_(torch.tensor([-50.0, -3.0, 3.0, 50.0]))
    assert (layer.magnitude.current("shape") <= 2).all()
    assert (layer.angular.current("b") >= 1).all()
    assert layer(torch.randn(5, 3)).isfinite().all()


def test_bad_learning_options_are_refused():
    with pytest.raises(ValueError, match="`shape` must be < 2"):
        hb.nn.DecoupledLinear(3, 4, magnitude="barron(shape=2, learn_shape=True)")
    with pytest.raises(ValueError, match="4 values"):
        hb.nn.DecoupledLinear(3, 4, magnitude=hb.radial.tanh(rho=torch.ones(3)))
    with pytest.raises(ValueError, match="`rho` must be > 0"):
        hb.nn.DecoupledLinear(3, 4, magnitude=hb.radial.tanh(rho=torch.tensor([1.0, 1.0, 0.0, 1.0])))
    with pytest.raises(TypeError, match="`learn`"):
        hb.nn.DecoupledLinear(3, 4, magnitude="tanh(learn=1)")
    with pytest.raises(ValueError, match="features"):
        hb.nn.DecoupledLinear(3, 4)(torch.zeros(2, 5))


def test_training_lowers_the_loss_and_moves_every_radius():
    model = nn.Sequential(
        hb.nn.DecoupledConv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True),
        hb.nn.DecoupledConv2d(8, 8, 3, magnitude="ball", angular="square_cosine"),
        nn.Flatten(), hb.nn.NormalizedLinear(288, 2),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=1e-2), lr=1e-2)
    x = torch.randn(64, 1, 8, 8)
    target = (x.mean((1, 2, 3)) > 0).long()
    start = [model[i].magnitude.ratio.clone() for i in (0, 2)]
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all((model[i].magnitude.ratio != r).all() for i, r in zip((0, 2), start, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("angular", ["cosine", "linear"])
def test_autocast_gives_the_dtype_of_a_plain_convolution(dtype, angular):
    for layer, plain, x in [
        (hb.nn.DecoupledConv2d(3, 8, 3, bias=True, angular=angular), nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)),
        (hb.nn.DecoupledLinear(6, 8, bias=True, angular=angular), nn.Linear(6, 8), torch.randn(2, 6)),
    ]:
        exact = layer(x)
        with torch.autocast("cpu", dtype=dtype):
            out = layer(x)
            assert out.dtype == plain(x).dtype == dtype
        torch.testing.assert_close(out.float(), exact, **tolerance(dtype, 4))
        out.float().square().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


def test_amp_with_a_grad_scaler_trains():
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, target = torch.randn(32, 3, 8, 8), torch.randint(0, 2, (32,))
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant):
    layer = hb.nn.DecoupledConv2d(3, 4, 3, angular="square_cosine")
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    for p, want in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want)


def test_normalized_linear_ignores_the_length_of_its_weight():
    layer, x = hb.nn.NormalizedLinear(6, 4), torch.randn(3, 6)
    before = layer(x)
    with torch.no_grad():
        layer.weight.mul_(torch.tensor([[2.0], [0.1], [5.0], [1.0]]))
    torch.testing.assert_close(layer(x), before)
    assert layer.bias is None
    assert (before.abs() <= x.norm(dim=1, keepdim=True) + 1e-6).all()


def _train_on_rank(rank, folder):
    torch.manual_seed(0)
    layer = hb.nn.DecoupledLinear(4, 3)
    layer(torch.full((8, 4), float(rank + 1)))
    torch.save(layer.magnitude.running_length, folder / f"{rank}.pt")


def test_the_running_mean_is_averaged_over_ranks(tmp_path):
    run_in_two(_train_on_rank, tmp_path)
    means = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    torch.testing.assert_close(means[0], torch.tensor(3.0), rtol=1e-4, atol=0)
    torch.testing.assert_close(means[0], means[1], rtol=0, atol=0)
