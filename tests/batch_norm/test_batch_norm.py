"""Robust batch normalization: its definition, its derivatives and its extremes."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball import radial
from hyperball.functional.batch_norm import moments, robust_batch_norm
from hyperball.kernels.batch_norm import brackets, solver
from hyperball.kernels.batch_norm import operation as kernel
from hyperball.kernels.batch_norm.operation import Estimator

CONVEX = ("quadratic", "huber", "pseudo_huber", "barron(shape=1)", "barron(shape=1.6)", "barron(shape=2)")
REDESCENDING = ("welsch", "truncated_quadratic", "barron(shape=0)", "barron(shape=-2)")
PENALTIES = CONVEX + REDESCENDING


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


@pytest.mark.parametrize("penalty, shape", [*((penalty, (6, 2)) for penalty in PENALTIES), ("huber", (3, 2, 2))])
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
    for module in (solver, brackets):
        monkeypatch.setattr(module, "readable", lambda tensor: False)
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


@pytest.mark.parametrize("shape", [(300, 11), (30, 11, 9, 9), (5, 11, 7)])
@pytest.mark.parametrize("penalty", ["huber(c=0.7)", "pseudo_huber", "welsch(c=2)"])
def test_a_channel_does_not_depend_on_the_others_bit_for_bit(penalty: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * torch.logspace(-2, 2, 11).reshape(-1, *(1,) * (len(shape) - 2))
    x[: shape[0] // 3, ::3] = 1e3  # channels that take many more steps
    together = robust_batch_norm(x, None, None, training=True, penalty=penalty)
    for part in (slice(0, 1), slice(4, 5), slice(2, 9)):
        alone = robust_batch_norm(x[:, part].contiguous(), None, None, training=True, penalty=penalty)
        assert torch.equal(together[:, part], alone)


def nested_bisection(x: Tensor, penalty: str, c: float) -> tuple[Tensor, Tensor]:
    """(m, s) by bisecting log s for mean 2·chi = beta, and inside it m for mean psi = 0."""
    value = with_radius(penalty, c)
    e = Estimator(value.name, value.parameters.get("shape", 1.0))
    radius = torch.full((x.shape[1],), c, dtype=torch.float64)
    beta = kernel.expectation(radius, e)[0]
    low, high = torch.full_like(radius, -30.0), torch.full_like(radius, 40.0)
    for _ in range(52):
        s, first, last = ((low + high) / 2).exp(), x.amin(0), x.amax(0)
        for _ in range(60):
            m = (first + last) / 2
            psi, chi, _, _ = kernel.influence((x - m) / s, radius, e)
            right = psi.mean(0) > 0
            first, last = torch.where(right, m, first), torch.where(right, last, m)
        larger = 2 * chi.mean(0) > beta
        low, high = torch.where(larger, (low + high) / 2, low), torch.where(larger, high, (low + high) / 2)
    return m, s


@pytest.mark.parametrize(
    "penalty, c", [("huber", 0.3), ("huber", 0.5), ("pseudo_huber", 0.3), ("barron(shape=1.5)", 1.0)]
)
def test_far_outliers_near_half_of_the_samples_do_not_stop_the_solver_short(penalty: str, c: float) -> None:
    x = torch.randn(1000, 6, dtype=torch.float64)
    for channel, (share, far) in enumerate(
        [(0.45, 1e3), (0.45, 1e6), (0.4, 1e10), (0.48, 30.0), (0.47, 1e3), (0.0, 1)]
    ):
        x[: int(share * 1000), channel] = far
    wanted_m, wanted_s = nested_bisection(x, penalty, c)
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 3e-3)):
        m, s = estimate(x.to(dtype), penalty, c)
        assert ((m.double() - wanted_m).abs() <= tolerance * wanted_s).all()
        torch.testing.assert_close(s.double(), wanted_s, rtol=tolerance, atol=0)


def test_the_solver_recovers_from_a_start_on_tied_outliers() -> None:
    x = torch.randn(1000, 2, dtype=torch.float64)
    x[:480, 0], x[:300, 1] = 1e6, -1e4
    wanted_m, wanted_s = nested_bisection(x, "huber", 0.3)
    m, s = torch.tensor([1e6, -1e4]), torch.full((2,), solver.least_scale(torch.ones(1)))
    found = solver.settle(kernel.in_rows(x.float()), torch.full((2,), 0.3), Estimator("huber"), m, s, 1e-5)
    assert found.settled.all()
    assert ((found.m.double() - wanted_m).abs() <= 1e-3 * wanted_s).all()
    torch.testing.assert_close(found.s.double(), wanted_s, rtol=1e-3, atol=0)


@pytest.mark.slow
def test_compiled_estimates_agree_with_eager_ones_near_breakdown() -> None:
    x = torch.randn(1000, 3)
    x[:450, 0], x[:480, 1] = 1e3, 1e5
    compiled = torch.compile(lambda x: estimate(x, "huber", 0.3), fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), estimate(x, "huber", 0.3), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_output_and_gradient_of_samples_at_extremes_are_those_of_usual_ones(penalty: str) -> None:
    base, upstream = with_outliers(60, 0.1, channels=3), torch.randn(60, 3)
    results = []
    for factor in (1.0, 1e-12, 1e15, 1e25, 1e34):
        leaf = (base * factor).requires_grad_()
        y = robust_batch_norm(leaf, None, None, training=True, eps=1e-37, penalty=penalty)
        results.append((y, torch.autograd.grad((y * upstream).sum(), leaf)[0].double() * factor))
    for y, g in results[1:]:
        torch.testing.assert_close(y, results[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(g, results[0][1], rtol=1e-3, atol=1e-4)


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
    for share, vanishes in ((limit - 0.04, False), (limit + 0.08, True)):
        x = torch.randn(1000, 1)
        x[: int(share * 1000)] = 0.0
        _, s = estimate(x, penalty, c)
        assert (s.item() < 1e-6) == vanishes


@pytest.mark.parametrize(
    "penalty, c, limit",
    [("huber", 1.0, 0.66), ("huber", 1.5, 0.743), ("huber", 2.0, 0.813), ("pseudo_huber", 1.0, 0.812)],
)
def test_scale_vanishes_later_where_all_others_lie_on_one_side(penalty: str, c: float, limit: float) -> None:
    for share, vanishes in ((limit - 0.01, False), (limit + 0.01, True)):
        x = 1.0 + torch.rand(1000, 1, dtype=torch.float64)
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


def test_rough_estimate_is_a_proper_operator() -> None:
    rows, c = torch.randn(1, 3, 64), torch.ones(3)
    for arguments in ((rows, c, "huber", 1.0, False), (rows, c, "welsch", 1.0, True)):
        torch.library.opcheck(solver.rough_moments, arguments)


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


@pytest.mark.parametrize(
    "transform", [lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.jacfwd(f)(x)]
)
def test_forward_mode_is_refused_by_name(transform: Callable[..., object]) -> None:
    with pytest.raises(NotImplementedError, match=r"`robust_batch_norm` has no forward-mode derivative.*jacrev"):
        transform(lambda x: robust_batch_norm(x, None, None, training=True), torch.randn(10, 2))


def test_wrong_arguments_of_the_function_are_refused_by_name() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match="`running_mean` and `running_var` must be tensors"):
        robust_batch_norm(x, None, None)
    with pytest.raises(ValueError, match=r"`weight` must have shape \(4,\)"):
        robust_batch_norm(x, None, None, torch.ones(3), training=True)
    with pytest.raises(ValueError, match="`eps` must be > 0 and finite, got -1"):
        robust_batch_norm(x, None, None, training=True, eps=-1.0)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        robust_batch_norm(x[0], None, None, training=True)
    with pytest.raises(TypeError, match="`input` must be a floating-point tensor"):
        robust_batch_norm(torch.ones(3, 4, dtype=torch.long), None, None, training=True)
    with pytest.raises(TypeError, match="`shape` of barron in a robust batch norm must be a number"):
        robust_batch_norm(x, None, None, training=True, penalty=radial.barron(shape=torch.tensor(1.0)))
    with pytest.raises(ValueError, match="`c` must have 1 or 4 values"):
        robust_batch_norm(x, None, None, training=True, penalty=radial.huber(c=torch.ones(3)))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_one_far_outlier_has_finite_gradients(penalty: str) -> None:
    x = torch.randn(64, 3)
    x[0, 0] = 1e26
    leaf = x.requires_grad_()
    y = robust_batch_norm(leaf, None, None, training=True, penalty=penalty)
    (g,) = torch.autograd.grad((y * torch.randn(64, 3)).sum(), leaf)
    assert y.isfinite().all()
    assert g.isfinite().all()


@pytest.mark.parametrize("shape", [(37, 5), (4, 5, 40), (3, 5, 8, 9)])
def test_quadratic_is_mean_and_deviation_to_rounding(shape: tuple[int, ...]) -> None:
    x = 3.0 * torch.randn(shape, dtype=torch.float64) - 7.0
    m, s = estimate(x, "quadratic", 1.0)
    dims = [d for d in range(x.dim()) if d != 1]
    torch.testing.assert_close(m, x.mean(dims), rtol=1e-14, atol=0)
    torch.testing.assert_close(s, x.std(dims, correction=0), rtol=1e-14, atol=0)


def test_settled_channels_are_left_out_of_further_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(200, 32)
    x[:88, 0] = 1e3  # takes many more steps than the others
    seen = []
    original = solver.packed_totals

    def counted(x: Tensor, *rest: object) -> Tensor:
        seen.append(x.shape[1])
        return original(x, *rest)

    monkeypatch.setattr(solver, "packed_totals", counted)
    estimate(x, "huber", 1.0)
    assert seen[-1] < 8
    assert sum(seen) < 8 * 32
