"""Robust batch normalization: its definition, its limit nn.BatchNorm, its derivatives, and the layer around it."""

import copy
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperball
from hyperball import radial
from hyperball.functional.batch_norm import moments, robust_batch_norm
from hyperball.kernels import batch_norm as kernel
from hyperball.kernels.batch_norm import Estimator
from hyperball.nn.batch_norm import RobustBatchNorm1d, RobustBatchNorm2d

CONVEX = ("quadratic", "huber", "pseudo_huber", "barron(shape=1)", "barron(shape=1.6)", "barron(shape=2)")
REDESCENDING = ("welsch", "truncated_quadratic", "barron(shape=0)", "barron(shape=-2)")
PENALTIES = CONVEX + REDESCENDING
LAYERS = ((RobustBatchNorm1d, nn.BatchNorm1d, (9, 4)), (RobustBatchNorm1d, nn.BatchNorm1d, (5, 4, 7)))
LAYERS += ((RobustBatchNorm2d, nn.BatchNorm2d, (5, 4, 6, 3)),)


def with_radius(penalty: str, c: object) -> radial.Value:
    return radial.parse(penalty, "penalty").with_parameters(rho=c)


def estimate(x: Tensor, penalty: str, c: float) -> tuple[Tensor, Tensor]:
    """(m, s) of every channel."""
    value = radial.parse(penalty, "penalty")
    radius = torch.full((x.shape[1],), c, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    return moments(x, radius, Estimator(value.name, value.parameters.get("shape", 1.0)))


def with_outliers(count: int, share: float, channels: int = 40, at: float = 30.0) -> Tensor:
    x = torch.randn(count, channels)
    x[torch.randperm(count)[: int(share * count)]] = at + 3 * torch.randn(int(share * count), channels)
    return x


def huber_by_substitution(x: Tensor, c: float) -> tuple[float, float]:
    """Huber's own iteration for one channel: m <- m + s·mean psi, s² <- s²·mean psi²/E psi(Z)²."""
    tail = math.erfc(c / math.sqrt(2))
    beta = 1 - tail - c * math.sqrt(2 / math.pi) * math.exp(-c * c / 2) + c * c * tail
    m, s = x.median().item(), x.std().item()
    for _ in range(4000):
        psi = ((x - m) / s).clamp(-c, c)
        m, s = m + s * psi.mean().item(), s * math.sqrt(psi.square().mean().item() / beta)
    return m, s


@pytest.mark.parametrize("c", [0.7, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("count", [6, 40, 500])
def test_huber_agrees_with_hubers_own_iteration(c: float, count: int) -> None:
    x = torch.randn(count, 3, dtype=torch.float64).exp()
    m, s = estimate(x, "huber", c)
    for channel in range(3):
        assert (m[channel].item(), s[channel].item()) == pytest.approx(
            huber_by_substitution(x[:, channel], c), rel=1e-7
        )


@pytest.mark.parametrize("penalty", CONVEX)
@pytest.mark.parametrize("c", [0.5, 1.0, 2.5])
def test_no_other_location_and_scale_has_a_smaller_objective(penalty: str, c: float) -> None:
    x = with_outliers(120, 0.1, channels=2).double()
    value = with_radius(penalty, c)
    m, s = estimate(x, penalty, c)
    beta, _ = kernel.expectation(
        torch.tensor([c, c], dtype=torch.float64), Estimator(value.name, value.parameters.get("shape", 1.0))
    )

    def objective(m: Tensor, s: Tensor) -> Tensor:
        return s * (value.row.phi((x - m) / s, **value.parameters).mean(0) + beta / 2)

    lowest = objective(m, s)
    for _ in range(300):
        size = 10.0 ** torch.empty(2, dtype=torch.float64).uniform_(-4, 0.5)
        moved = objective(m + s * size * torch.randn(2), s * (size * torch.randn(2)).exp())
        assert (moved >= lowest * (1 - 1e-13)).all()


@pytest.mark.parametrize("penalty", REDESCENDING)
@pytest.mark.parametrize("c", [1.5, 3.0])
def test_redescending_location_is_a_minimum_at_hubers_scale(penalty: str, c: float) -> None:
    x = with_outliers(400, 0.1, channels=3).double()
    value = with_radius(penalty, c)
    _, unit = estimate(x, "huber", c)
    m, s = estimate(x, penalty, c)

    def objective(u: Tensor) -> Tensor:
        return value.row.phi((x - u) / unit, **value.parameters).sum(0)

    for step in (1e-3, -1e-3, 3e-2, -3e-2):
        assert (objective(m + step * unit) > objective(m)).all()
    t = (x - m) / unit
    weighted = (t.square() * value.row.gain(t.abs(), **value.parameters)).mean(0)
    z = torch.linspace(-12, 12, 200001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    expected = torch.trapezoid(density * z.square() * value.row.gain(z.abs(), **value.parameters), z)
    torch.testing.assert_close(s, unit * (weighted / expected).sqrt(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("c", [0.8, 2.0])
def test_scale_of_normal_samples_is_their_standard_deviation(penalty: str, c: float) -> None:
    m, s = estimate(3.0 * torch.randn(40000, 8) + 5.0, penalty, c)
    torch.testing.assert_close(m, torch.full((8,), 5.0), rtol=0, atol=0.1)
    torch.testing.assert_close(s, torch.full((8,), 3.0), rtol=0.03, atol=0)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_estimates_follow_shift_and_scale(penalty: str) -> None:
    x = with_outliers(90, 0.1, channels=5).double()
    m, s = estimate(x, penalty, 1.8)
    for factor, shift in ((-2.5, 7.0), (1e-20, 0.0), (1e20, -1e20)):
        other_m, other_s = estimate(factor * x + shift, penalty, 1.8)
        torch.testing.assert_close(other_m, factor * m + shift, rtol=1e-9, atol=1e-9 * abs(factor))
        torch.testing.assert_close(other_s, abs(factor) * s, rtol=1e-9, atol=0)


@pytest.mark.parametrize("penalty", ["huber", "pseudo_huber", "welsch", "truncated_quadratic", "barron(shape=0)"])
def test_a_tenth_of_gross_outliers_hardly_moves_the_rest(penalty: str) -> None:
    clean = torch.randn(500, 6)
    spoiled = torch.cat([clean, torch.full((50, 6), 1e6)])
    value = with_radius(penalty, 2.0 if penalty in REDESCENDING else 1.0)
    wanted = robust_batch_norm(clean, None, None, training=True, penalty=value)
    got = robust_batch_norm(spoiled, None, None, training=True, penalty=value)[:500]
    plain = F.batch_norm(spoiled, None, None, training=True)[:500]
    assert (got - wanted).abs().max().item() < 2.0
    assert got.std().item() > 0.5 * wanted.std().item()
    assert plain.std().item() < 1e-4


@pytest.mark.parametrize("layer, plain, shape", LAYERS)
@pytest.mark.parametrize(
    "penalty",
    [
        "quadratic",
        "huber(c=1e6)",
        "pseudo_huber(c=1e5)",
        "welsch(c=1e5)",
        "truncated_quadratic(c=1e4)",
        "barron(c=1e5)",
    ],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_infinite_radius_is_batch_norm(
    layer: type, plain: type, shape: tuple[int, ...], penalty: str, momentum: float | None
) -> None:
    robust, reference = layer(4, penalty=penalty, momentum=momentum), plain(4, momentum=momentum)
    with torch.no_grad():
        reference.weight.uniform_(0.5, 2.0)
        reference.bias.normal_()
    robust.load_state_dict(reference.state_dict())
    upstream = torch.randn(shape)
    for _ in range(3):
        results = []
        x = 3 * torch.randn(shape) + torch.arange(4.0).reshape(-1, *(1,) * (len(shape) - 2))
        for module in (robust, reference):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append([y, *torch.autograd.grad((y * upstream).sum(), [leaf, module.weight, module.bias])])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-6, atol=4e-6)
    for key, wanted in reference.state_dict().items():
        torch.testing.assert_close(robust.state_dict()[key], wanted, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(robust.eval()(x), reference.eval()(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("shape", [(7, 3), (3, 2, 4)])
def test_derivatives_in_input_radius_weight_and_bias_pass_gradcheck(penalty: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    c, weight, bias = (torch.rand(shape[1], dtype=torch.float64) + 1.2 for _ in range(3))
    leaves = (x, c.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())

    def function(x: Tensor, c: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        value = with_radius(penalty, c)
        return robust_batch_norm(x, None, None, weight, bias, True, penalty=value)

    assert torch.autograd.gradcheck(function, leaves, atol=1e-6, rtol=1e-4)
    assert torch.autograd.gradgradcheck(function, leaves, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_output_does_not_feel_shift_and_scale_so_gradients_are_orthogonal_to_them(penalty: str) -> None:
    x = with_outliers(50, 0.1, channels=4).double().requires_grad_()
    y = robust_batch_norm(x, None, None, training=True, eps=1e-30, penalty=with_radius(penalty, 2.0))
    (g,) = torch.autograd.grad((y * torch.randn(50, 4)).sum(), x)
    torch.testing.assert_close(g.sum(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close((g * x).sum(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.45])
@pytest.mark.parametrize("count", [64, 300, 6000])
@pytest.mark.parametrize("penalty, c", [("huber", 1.0), ("huber", 2.0), ("pseudo_huber", 2.0), ("welsch", 3.0)])
def test_fixed_step_counts_reach_the_minimum(
    penalty: str, c: float, count: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = with_outliers(count, share)
    wanted_m, wanted_s = estimate(x.double(), penalty, c)
    monkeypatch.setattr(kernel, "readable", lambda tensor: False)
    m, s = estimate(x, penalty, c)
    near_breakdown = share == 0.45 and c == 1.0  # the estimate jumps between the two clusters there
    tolerance = 2e-2 if near_breakdown else 2e-5
    torch.testing.assert_close(m.double(), wanted_m, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(s.double(), wanted_s, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [8, 64, 300, 6000])
@pytest.mark.parametrize("penalty", ["huber", "pseudo_huber", "barron(shape=1.6)"])
def test_float32_agrees_with_float64(penalty: str, count: int) -> None:
    x = with_outliers(count, 0.25)
    for got, wanted in zip(estimate(x, penalty, 1.0), estimate(x.double(), penalty, 1.0), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=3e-5, atol=3e-5)


def test_a_channel_does_not_depend_on_the_others() -> None:
    x = with_outliers(300, 0.1, channels=6)
    together = robust_batch_norm(x, None, None, training=True)
    alone = torch.cat([robust_batch_norm(x[:, k : k + 1], None, None, training=True) for k in range(6)], 1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_inside(dtype: torch.dtype) -> None:
    x = with_outliers(200, 0.1, channels=5, at=3000.0).to(dtype)
    layer = RobustBatchNorm1d(5)
    leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    y, wanted = layer(leaf), layer(wide)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-2)
    upstream = torch.randn(200, 5)
    (g,) = torch.autograd.grad((y * upstream).sum(), leaf)
    (wanted_g,) = torch.autograd.grad((wanted * upstream.to(dtype).float()).sum(), wide)
    assert g.dtype == dtype
    torch.testing.assert_close(g.float(), wanted_g, rtol=2e-2, atol=2e-2)
    assert layer.running_mean.dtype == torch.float32
    assert RobustBatchNorm1d(5, penalty="huber(learn_c=True)").to(dtype)(x).dtype == dtype


def test_autocast_gives_batch_norms_dtype() -> None:
    robust, plain = RobustBatchNorm2d(3), nn.BatchNorm2d(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(4, 3, 5, 5, dtype=dtype)
            assert robust(x).dtype == plain(x).dtype


def test_channels_last_is_kept_in_both_directions() -> None:
    x = torch.randn(4, 6, 5, 7).to(memory_format=torch.channels_last).requires_grad_()
    layer = RobustBatchNorm2d(6)
    y = layer(x)
    (g,) = torch.autograd.grad(y.square().sum(), x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert g.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, layer(x.detach().contiguous()), rtol=1e-5, atol=1e-5)


def test_backward_keeps_the_input_and_numbers_per_channel() -> None:
    x = torch.randn(32, 4, 8, 8, requires_grad=True)
    kept: list[Tensor] = []
    layer = RobustBatchNorm2d(4, penalty="huber(learn_c=True)")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    others = [t for t in kept if t.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()]
    assert sum(t.numel() for t in others) <= 30 * 4


def test_samples_at_extremes() -> None:
    base = with_outliers(60, 0.1, channels=3)
    wanted = robust_batch_norm(base, None, None, training=True, eps=1e-30)
    for factor in (1e-15, 1e15, 1e20, 1e30):
        leaf = (base * factor).requires_grad_()
        y = robust_batch_norm(leaf, None, None, training=True, eps=1e-37)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
        (g,) = torch.autograd.grad(y.square().sum(), leaf)
        assert g.isfinite().all()


@pytest.mark.parametrize("penalty", PENALTIES)
def test_constant_and_nearly_constant_channels_stay_finite(penalty: str) -> None:
    x = torch.zeros(40, 3)
    x[:, 1], x[:10, 2] = 7.0, torch.randn(10)
    leaf = x.requires_grad_()
    y = robust_batch_norm(leaf, None, None, training=True, penalty=penalty)
    (g,) = torch.autograd.grad((y * torch.randn(40, 3)).sum(), leaf)
    assert y.isfinite().all()
    assert g.isfinite().all()
    torch.testing.assert_close(y[:, :2], torch.zeros(40, 2), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "penalty, c, limit", [("huber", 1.0, 0.484), ("huber", 2.0, 0.774), ("pseudo_huber", 1.0, 0.78)]
)
def test_scale_vanishes_where_more_than_the_stated_share_coincides(penalty: str, c: float, limit: float) -> None:
    e, radius = Estimator(penalty), torch.tensor([c], dtype=torch.float64)
    largest = kernel.influence(torch.tensor([1e12], dtype=torch.float64), radius, e)[1] * 2
    assert (1 - kernel.expectation(radius, e)[0] / largest).item() == pytest.approx(limit, abs=0.01)
    for share, vanishes in ((limit - 0.04, False), (limit + 0.04, True)):
        x = torch.randn(1000, 1)
        x[: int(share * 1000)] = 0.0
        _, s = estimate(x, penalty, c)
        assert (s.item() < 1e-6) == vanishes


def test_infinite_samples_count_as_outliers_for_huber() -> None:
    x = torch.randn(100, 2)
    x[0, 0], x[1, 0] = math.inf, -math.inf
    y = robust_batch_norm(x, None, None, training=True)
    assert y[2:].isfinite().all()
    assert y[:2, 0].tolist() == [math.inf, -math.inf]


def test_nan_stays_in_its_channel() -> None:
    x = torch.randn(300, 3)
    x[5, 1] = math.nan
    y = robust_batch_norm(x, None, None, training=True)
    assert y.isnan().any(0).tolist() == [False, True, False]


def test_state_dict_has_batch_norms_keys_and_the_radius() -> None:
    plain = nn.BatchNorm2d(5)
    assert list(RobustBatchNorm2d(5).state_dict()) == list(plain.state_dict())
    learned = RobustBatchNorm2d(5, penalty="huber(c=2, learn_c=True)")
    assert set(learned.state_dict()) == {*plain.state_dict(), "log_c"}
    plain(torch.randn(3, 5, 4, 4))
    assert learned.load_state_dict(plain.state_dict(), strict=True).missing_keys == []
    torch.testing.assert_close(learned.radius, torch.full((5,), 2.0))
    torch.testing.assert_close(learned.running_var, plain.running_var)
    again = RobustBatchNorm2d(5, penalty="huber(learn_c=True)")
    again.load_state_dict(learned.state_dict())
    torch.testing.assert_close(again.radius, learned.radius)
    with pytest.raises(RuntimeError, match="Missing key"):
        learned.load_state_dict({"log_c": torch.zeros(5)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        RobustBatchNorm2d(5).load_state_dict(learned.state_dict())


@pytest.mark.parametrize(
    "text, shape", [("huber(c=2, learn_c=True)", (6,)), ('huber(c=2, learn_c=True, per="layer")', ())]
)
def test_radius_learns_per_channel_or_per_layer(text: str, shape: tuple[int, ...]) -> None:
    layer = RobustBatchNorm1d(6, penalty=text)
    assert layer.log_c.shape == shape
    x = with_outliers(200, 0.1, channels=6)
    optimizer = torch.optim.SGD([layer.log_c], lr=0.05)
    losses = []
    for _ in range(20):
        loss = layer(x)[x < 10].square().mean().sub(1.0).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    layer.reset_parameters()
    torch.testing.assert_close(layer.radius, torch.full(shape, 2.0))


def test_radius_may_be_a_fixed_tensor() -> None:
    c = torch.tensor([1.0, 2.0, 1e6])
    layer = RobustBatchNorm1d(3, penalty=radial.huber(c=c))
    assert layer.state_dict()["fixed_c"].tolist() == c.tolist()
    x = with_outliers(80, 0.1, channels=3)
    y = layer(x)
    for k in range(3):
        alone = robust_batch_norm(x[:, k : k + 1], None, None, training=True, penalty=radial.huber(c=c[k].item()))
        torch.testing.assert_close(y[:, k : k + 1], alone, rtol=1e-5, atol=1e-5)


def test_layer_is_an_ordinary_module() -> None:
    layer = RobustBatchNorm2d(3, eps=1e-3, penalty="pseudo_huber(c=1.5, learn_c=True)", dtype=torch.float64)
    assert "pseudo_huber(c=1.5" in repr(layer)
    assert "eps=0.001" in repr(layer)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other.eval()(x), layer.eval()(x), rtol=0, atol=0)
    assert RobustBatchNorm2d(3, device="meta", penalty="huber(learn_c=True)").log_c.is_meta
    bare = RobustBatchNorm2d(3, affine=False, track_running_stats=False)
    assert list(bare.state_dict()) == []
    torch.testing.assert_close(bare.eval()(x), bare.train()(x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("penalty", ["pseudo_huber(learn_c=True)", pytest.param("welsch(c=3)", marks=pytest.mark.slow)])
def test_training_step_compiles_without_graph_breaks(penalty: str, backend: str) -> None:
    torch.compiler.reset()
    layer = RobustBatchNorm2d(4, penalty=penalty)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    x, upstream = torch.randn(6, 4, 9, 9), torch.randn(6, 4, 9, 9)
    results = []
    for module, owner in ((layer, layer), (compiled, twin)):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        results.append([y, *torch.autograd.grad((y * upstream).sum(), [leaf, *owner.parameters()]), owner.running_var])
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


def test_rough_estimate_is_a_proper_operator() -> None:
    rows, c = torch.randn(64, 3), torch.ones(3)
    for arguments in ((rows, c, "huber", 1.0, False), (rows, c, "welsch", 1.0, True)):
        torch.library.opcheck(kernel.rough_moments, arguments)


def test_exported_evaluation_equals_eager() -> None:
    layer = RobustBatchNorm2d(3, penalty="huber(learn_c=True)")
    x = torch.randn(4, 3, 5, 5)
    layer(x)
    layer.eval()
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_vmap_equals_a_loop() -> None:
    x = torch.randn(3, 40, 2, dtype=torch.float64)

    def normalize(x: Tensor) -> Tensor:
        return robust_batch_norm(x, None, None, training=True, penalty="pseudo_huber(c=1.5)")

    torch.testing.assert_close(torch.func.vmap(normalize)(x), torch.stack([normalize(part) for part in x]))
    weights = torch.randn(40, 2, dtype=torch.float64)
    mapped = torch.func.vmap(torch.func.grad(lambda x: (normalize(x) * weights).sum()))(x)
    leaf = x.clone().requires_grad_()
    looped = torch.autograd.grad(sum((normalize(part) * weights).sum() for part in leaf), leaf)[0]
    torch.testing.assert_close(mapped, looped, rtol=1e-9, atol=1e-9)


def test_forward_mode_is_refused() -> None:
    x = torch.randn(10, 2)
    with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        torch.func.jvp(lambda x: robust_batch_norm(x, None, None, training=True), (x,), (torch.ones_like(x),))


ONE_RANK = """
import sys, torch, torch.distributed as dist
from hyperball.nn.batch_norm import RobustBatchNorm1d
rank, folder, penalty = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt")
layer = RobustBatchNorm1d(3, penalty=penalty, dtype=torch.float64)
part = slice(0, 30) if rank == 0 else slice(30, None)
x = given["x"][part].requires_grad_()
y = layer(x)
(y * given["upstream"][part]).sum().backward()
grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
torch.save({"y": y.detach(), "x": x.grad, "grads": grads, "state": layer.state_dict()}, f"{folder}/{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


def run_two_ranks(folder: Path, penalty: str) -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": str(Path(hyperball.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ONE_RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder), penalty], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    "penalty", ["huber(c=1.3, learn_c=True)", pytest.param("welsch(c=3, learn_c=True)", marks=pytest.mark.slow)]
)
def test_two_processes_agree_with_one_over_the_joint_batch(penalty: str, tmp_path: Path) -> None:
    x = with_outliers(75, 0.15, channels=3).double()
    upstream = torch.randn(75, 3, dtype=torch.float64)
    torch.save({"x": x, "upstream": upstream}, tmp_path / "given.pt")
    first, second = run_two_ranks(tmp_path, penalty)
    layer = RobustBatchNorm1d(3, penalty=penalty, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (y * upstream).sum().backward()
    torch.testing.assert_close(torch.cat([first["y"], second["y"]]), y.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat([first["x"], second["x"]]), leaf.grad, rtol=1e-7, atol=1e-9)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(first["grads"][name] + second["grads"][name], parameter.grad, rtol=1e-7, atol=1e-9)
    for name, wanted in layer.state_dict().items():
        torch.testing.assert_close(first["state"][name], wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(second["state"][name], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "layer, shape, message",
    [
        (RobustBatchNorm1d, (1, 4), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm2d, (1, 4, 1, 1), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm1d, (0, 4), "Expected more than 1 value per channel when training"),
        (RobustBatchNorm1d, (2, 4, 3, 3), r"expected 2D or 3D input \(got 4D input\)"),
        (RobustBatchNorm2d, (2, 4, 3), r"expected 4D input \(got 3D input\)"),
        (RobustBatchNorm1d, (8, 5), "`input` must have 4 channels"),
    ],
)
def test_wrong_inputs_are_refused(layer: type, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(4)(torch.randn(shape))


@pytest.mark.parametrize(
    "penalty, message",
    [
        ("absolute", "must be one of quadratic"),
        ("huber(c=-1)", "`c` must be > 0"),
        ("barron(shape=3)", "`shape` of barron in a robust batch norm must be <= 2"),
        ("huber(relative=True)", "`relative` has no effect"),
        ("barron(learn_shape=True)", "`learn_shape` is not offered"),
        ("truncated_quadratic(learn_c=True)", "`learn_c` is not offered with truncated_quadratic"),
        (radial.huber(c=torch.ones(3)), "`c` must be a number or 4 of them"),
        (radial.huber(c=-torch.ones(4)), "must be > 0 everywhere"),
        (radial.huber(c=torch.ones(4), learn_c=True, per="layer"), "must be one number where it is learned per layer"),
        ("tanh", "'tanh' is not a penalty"),
    ],
)
def test_wrong_penalties_are_refused_by_name(penalty: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RobustBatchNorm1d(4, penalty=penalty)


def test_wrong_arguments_of_the_function_are_refused_by_name() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match="`running_mean` and `running_var` must be tensors"):
        robust_batch_norm(x, None, None)
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        robust_batch_norm(x, None, None, torch.ones(3), training=True)
    with pytest.raises(ValueError, match="`eps` must be > 0, got -1"):
        robust_batch_norm(x, None, None, training=True, eps=-1.0)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        robust_batch_norm(x[0], None, None, training=True)
    with pytest.raises(TypeError, match="`input` must be a floating-point tensor"):
        robust_batch_norm(torch.ones(3, 4, dtype=torch.long), None, None, training=True)
    with pytest.raises(TypeError, match="`shape` of barron in a robust batch norm must be a number"):
        robust_batch_norm(x, None, None, training=True, penalty=radial.barron(shape=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="`c` must have 1 or 4 values"):
        robust_batch_norm(x, None, None, training=True, penalty=radial.huber(c=torch.ones(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("shape", [(16, 8), (8, 16, 12, 12), (64, 32, 16, 16)])
def test_cuda_equals_cpu(penalty: str, shape: tuple[int, ...]) -> None:
    x, upstream, results = torch.randn(shape), torch.randn(shape), []
    for device in ("cpu", "cuda"):
        leaf = x.to(device).requires_grad_()
        c = torch.full((shape[1],), 1.7, device=device, requires_grad=True)
        y = robust_batch_norm(leaf, None, None, training=True, penalty=with_radius(penalty, c))
        gradients = torch.autograd.grad((y * upstream.to(device)).sum(), (leaf, c), allow_unused=True)
        results.append([item.cpu() for item in (y, *gradients) if item is not None])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=2e-3)
