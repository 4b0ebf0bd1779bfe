"""Cases that once went wrong, each as the rule it broke."""

import pytest
import torch
from process_pairs import run_in_two
from torch import nn

import hyperball as hb
from hyperball import functional as F


@pytest.mark.parametrize("kind", ["magnitude", "angular"])
def test_fixed_tensor_slopes_are_kept(kind):
    table = hb.radial if kind == "magnitude" else hb.angular
    slopes, x = torch.tensor([1.0, 5.0, 9.0]), torch.randn(5, 4)
    options = {"magnitude": "tanh(relative=False, learn=False)"}
    radius = {"relative": False, "learn": False} if kind == "magnitude" else {}
    layer = hb.nn.DecoupledLinear(
        4, 3, **{**options, kind: table.piecewise(slopes=slopes, learn_slopes=False, **radius)}
    )
    fixed = {"magnitude": "tanh", kind: table.piecewise(slopes=slopes)}
    torch.testing.assert_close(layer(x), F.decoupled_linear(x, layer.weight, **fixed))


def _one_rank_is_empty(rank, folder):
    layer = hb.nn.DecoupledLinear(4, 3)
    layer(torch.ones(8 if rank == 0 else 0, 4))
    torch.save(layer.magnitude.running_length, folder / f"{rank}.pt")


def test_an_empty_batch_on_one_rank_does_not_stop_the_others(tmp_path):
    run_in_two(_one_rank_is_empty, tmp_path)
    for rank in (0, 1):
        mean = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(mean, torch.tensor(2.0), rtol=1e-4, atol=0)


def test_reset_parameters_brings_back_the_start_after_to_empty():
    texts = {"magnitude": "barron(rho=2, learn_shape=True)", "angular": "sigmoid(k=0.5, learn_k=True)"}
    with torch.device("meta"):
        layer = hb.nn.DecoupledConv2d(3, 4, 3, **texts)
    assert layer.weight.is_meta
    assert "learned" in hb.explain(layer)["radius"]
    layer = layer.to_empty(device="cpu")
    for tensor in layer.state_dict().values():
        tensor.fill_(77)
    layer.reset_parameters()
    fresh = hb.nn.DecoupledConv2d(3, 4, 3, **texts)
    for name, tensor in fresh.state_dict().items():
        if name != "weight":
            torch.testing.assert_close(layer.state_dict()[name], tensor)
    assert layer.weight.abs().max() < 1


def test_a_state_that_would_leave_a_radius_on_the_meta_device_is_refused():
    layer = hb.nn.DecoupledConv2d(3, 4, 3, device="meta")
    with pytest.raises(RuntimeError, match=r"magnitude\.ratio"):
        layer.load_state_dict(nn.Conv2d(3, 4, 3, bias=False).state_dict(), assign=True)


@pytest.mark.parametrize("magnitude", hb.radial.names("magnitude"))
def test_eps_of_zero_is_finite_on_zero_inputs(magnitude):
    layer = hb.nn.DecoupledConv2d(3, 2, 3, magnitude=magnitude, eps=0.0)
    x = torch.zeros(1, 3, 4, 4, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()) if t.grad is not None)


def test_a_batch_in_training_does_not_spoil_the_graph_of_one_in_evaluation():
    layer, x = hb.nn.DecoupledConv2d(3, 4, 3), torch.randn(4, 3, 6, 6)
    first = layer.eval()(x).sum()
    layer.train()(x)
    first.backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("stride, padding, kernel", [(1, 0, 2), (2, 1, 3), (2, 0, 1), (2, 3, 7)])
def test_export_with_dynamic_height_and_width(stride, padding, kernel):
    layer = hb.nn.DecoupledConv2d(4, 8, kernel, stride=stride, padding=padding).eval()
    sizes = {2: torch.export.Dim("h", min=8, max=64), 3: torch.export.Dim("w", min=8, max=64)}
    program = torch.export.export(layer, (torch.randn(2, 4, 12, 16),), dynamic_shapes=(sizes,))
    x = torch.randn(2, 4, 21, 9)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_projection_refuses_a_weight_shared_with_another_layer():
    for other in (hb.nn.DecoupledLinear(3, 3, weighting="linear"), nn.Linear(3, 3, bias=False)):
        model = nn.Sequential(hb.nn.DecoupledLinear(3, 3), other)
        other.weight = model[0].weight
        with pytest.raises(ValueError, match="share"):
            hb.optim.WeightProjection(model, skip_weighted=True)


def extra_kept(layer: nn.Module, plain: nn.Module, x: torch.Tensor) -> int:
    totals = []
    for module in (layer, plain):
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, kept=kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = module(x)
        assert out.requires_grad
        totals.append(sum(kept.values()))
    return totals[0] - totals[1]


def test_uneven_padding_and_autocast_keep_no_second_input():
    x, small = torch.randn(8, 32, 32, 32, requires_grad=True), 40_000
    positions = 8 * 32 * 32
    layer, plain = hb.nn.DecoupledConv2d(32, 16, 2, padding="same"), nn.Conv2d(32, 16, 2, padding="same", bias=False)
    assert extra_kept(layer, plain, x) <= 4 * positions * 17 + small
    layer, plain = hb.nn.DecoupledConv2d(32, 16, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert extra_kept(layer, plain, x) <= 2 * positions * 16 + 4 * positions + small


@pytest.mark.parametrize("angular", ["cosine", "square_cosine"])
def test_split_compiles_with_dynamic_shapes_and_many_channels(angular):
    layer, x = hb.nn.DecoupledConv2d(4, 8, 3, weighting="split", angular=angular), torch.randn(4, 4, 8, 8)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    assert hb.nn.DecoupledLinear(2, 140_000, weighting="split")(torch.randn(2, 2)).shape == (2, 140_000)


def test_replacing_a_named_row_takes_effect():
    cosine, linear = hb.angular.TABLE.rows["cosine"], hb.radial.TABLE.rows["linear"]
    x, w = torch.randn(3, 4), torch.randn(2, 4)
    try:
        hb.angular.register("cosine", lambda c: c**3, replace=True)
        hb.radial.register("linear", gain=lambda n: n, replace=True)
        n, unit = x.norm(dim=1, keepdim=True), w / w.norm(dim=1, keepdim=True)
        expected = n**2 * (x @ unit.T / n) ** 3
        torch.testing.assert_close(F.decoupled_linear(x, w, magnitude="linear"), expected)
    finally:
        hb.angular.TABLE.rows["cosine"], hb.radial.TABLE.rows["linear"] = cosine, linear


def test_a_non_finite_batch_does_not_poison_the_running_mean():
    layer = hb.nn.DecoupledLinear(4, 3)
    layer(torch.ones(2, 4))
    before = layer.magnitude.running_length.clone()
    for value in (float("nan"), float("inf")):
        layer(torch.full((2, 4), value))
    torch.testing.assert_close(layer.magnitude.running_length.isfinite(), torch.tensor(True))
    assert layer.magnitude.running_length <= max(before, 3.5e38)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x, w: F.decoupled_conv2d(x, w, stride=None, magnitude="tanh"), ValueError, "`stride`"),
        (lambda x, w: F.decoupled_conv2d(x, w, padding=1.5, magnitude="tanh"), ValueError, "`padding`"),
        (lambda x, w: F.decoupled_conv2d(x, w, magnitude="sphere(eps=-1)"), ValueError, "`eps`"),
        (lambda x, w: F.decoupled_conv2d(x, w, magnitude="tanh", angular="linear(eps=-1)"), ValueError, "`eps`"),
        (lambda x, w: F.decoupled_conv2d(x.numpy(), w, magnitude="tanh"), TypeError, "`input`"),
        (lambda x, w: F.decoupled_conv2d(x, None, magnitude="tanh"), TypeError, "`weight`"),
        (lambda x, w: F.decoupled_conv2d(x.long(), w, magnitude="tanh"), TypeError, "`input`.*int64"),
        (lambda x, w: F.decoupled_conv2d(x.to(torch.complex64), w, magnitude="tanh"), TypeError, "`input`.*complex"),
        (lambda x, w: F.decoupled_conv2d(x, w, bias=[0.0], magnitude="tanh"), TypeError, "`bias`"),
        (lambda x, w: F.decoupled_conv2d(x, w[:, :, :0], magnitude="tanh"), ValueError, "`weight`"),
        (lambda x, w: F.decoupled_conv2d(x, w, magnitude="tanh(rho=1, c=2)"), ValueError, "same parameter"),
        (lambda x, w: F.decoupled_conv2d(x, w, magnitude="barron(shape=~inf)"), ValueError, "literals"),
        (lambda x, w: hb.angular.parse(hb.angular.power(b=torch.tensor(0.5))) and F.decoupled_conv2d(
            x, w, magnitude="tanh", angular=hb.angular.power(b=torch.tensor(0.5))), ValueError, "`b` must be >= 1"),
        (lambda x, w: hb.nn.NormalizedLinear(3, 2)(x), ValueError, "features"),
        (lambda x, w: hb.radial.register(3, gain=torch.exp), ValueError, "`name`"),
        (lambda x, w: hb.radial.register("names", gain=torch.exp), ValueError, "`name`"),
        (lambda x, w: hb.radial.register("lambda", gain=torch.exp), ValueError, "`name`"),
        (lambda x, w: hb.radial.register("own", gain=3), ValueError, "`gain`"),
        (lambda x, w: hb.radial.register("own", gain=torch.exp, parameters={"rho": -1}), ValueError, "`rho`"),
    ],
)  # fmt: skip
def test_more_bad_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3))


def test_numbers_of_other_types_are_numbers():
    numpy = pytest.importorskip("numpy")
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    out = F.decoupled_conv2d(x, w, stride=numpy.int64(2), magnitude=hb.radial.tanh(rho=numpy.float32(2)))
    torch.testing.assert_close(out, F.decoupled_conv2d(x, w, stride=2, magnitude="tanh(rho=2)"))
    layer = hb.nn.DecoupledLinear(4, 3, magnitude="tanh(rho=1e5, relative=False)", dtype=torch.float16)
    assert layer(torch.randn(2, 4).half()).isfinite().all()
