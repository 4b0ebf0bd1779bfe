"""Barron's general loss: the properties its author tests, its special cases, and its derivatives everywhere."""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from hyperball.functional.robust_loss import robust_loss

INF = math.inf
ALPHAS = (-INF, -1e6, -50.0, -2.0, -1.0, -1e-9, 0.0, 1e-9, 1e-4, 0.5, 1.0, 1.5, 1.999, 2.0, 2.001, 2.5, 3.5, 8.0, INF)
FINITE = tuple(alpha for alpha in ALPHAS if math.isfinite(alpha))
POINTS = (-3.1, -1.3, -0.4, -0.01, 0.02, 0.7, 1.1, 2.9)


def tensor(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def exact_loss(x: float, alpha: object, c: object) -> mpmath.mpf:
    """The loss as Barron prints it, with |alpha - 2| held at 1e-6, to 400 digits."""
    q = (mpmath.mpf(x) / c) ** 2
    if alpha == INF:
        return mpmath.expm1(q / 2)
    if alpha == -INF:
        return -mpmath.expm1(-q / 2)
    if alpha == 0:
        return mpmath.log(1 + q / 2)
    b = max(abs(mpmath.mpf(alpha) - 2), mpmath.mpf(1e-6))
    return b / alpha * ((q / b + 1) ** (mpmath.mpf(alpha) / 2) - 1)


def exact_gradients(x: float, alpha: float, c: float) -> tuple[mpmath.mpf, ...]:
    """d/dx, d/dalpha and d/dc by differences over 1e-60."""
    h = mpmath.mpf(10) ** -60
    in_x = (exact_loss(mpmath.mpf(x) + h * x, alpha, c) - exact_loss(mpmath.mpf(x) - h * x, alpha, c)) / (2 * h * x)
    in_c = (exact_loss(x, alpha, mpmath.mpf(c) + h) - exact_loss(x, alpha, mpmath.mpf(c) - h)) / (2 * h)
    if math.isinf(alpha):
        return in_x, mpmath.mpf(0), in_c
    above, below = (exact_loss(x, mpmath.mpf(alpha) + sign * h * (1 + abs(alpha)), c) for sign in (1, -1))
    return in_x, (above - below) / (2 * h * (1 + abs(alpha))), in_c


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 2e-13), (torch.float32, 2e-5)])
def test_value_and_gradients_agree_with_400_digits(alpha: float, dtype: torch.dtype, tolerance: float) -> None:
    c, largest, smallest = 0.75, torch.finfo(dtype).max, torch.finfo(dtype).tiny
    with mpmath.workdps(400):
        for x in (1e-12, 1e-4, 0.03, 0.6, 2.0, 40.0, 1e9, 1e20):
            leaves = [tensor(item, dtype).requires_grad_() for item in (x, alpha, c)]
            loss = robust_loss(*leaves)
            found = [loss, *torch.autograd.grad(loss, leaves)]
            given = [leaf.item() for leaf in leaves]
            expected = [exact_loss(*given), *exact_gradients(*given)]
            for got, want in zip((item.item() for item in found), expected, strict=True):
                if abs(want) > largest:
                    assert math.copysign(1.0, want) * got == INF
                elif abs(want) > 1e3 * smallest:
                    assert abs((got - want) / want) < tolerance, (x, got, want)
                else:
                    assert abs(got) <= 1e4 * smallest


@pytest.mark.parametrize(
    "alpha, closed",
    [
        (2.0, lambda q: q / 2),
        (1.0, lambda q: (q + 1).sqrt() - 1),
        (0.0, lambda q: (q / 2).log1p()),
        (-2.0, lambda q: 2 * q / (q + 4)),
        (-INF, lambda q: -torch.expm1(-q / 2)),
        (INF, lambda q: torch.expm1(q / 2)),
    ],
    ids=["quadratic", "pseudo_huber", "cauchy", "geman_mcclure", "welsch", "exponential"],
)
@pytest.mark.parametrize("nearby", [0.0, 1e-12])
def test_special_shapes_are_the_named_losses(alpha: float, closed: object, nearby: float) -> None:
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    expected = closed((x / 1.3).square())
    tolerance = 1e-4 if abs(alpha) == 2.0 and nearby == 0.0 else 1e-10
    torch.testing.assert_close(robust_loss(x, alpha + nearby, 1.3), expected, rtol=tolerance, atol=1e-12)


def test_a_large_finite_shape_approaches_the_infinite_one() -> None:
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    for sign in (-1.0, 1.0):
        torch.testing.assert_close(robust_loss(x, sign * 1e12, 1.0), robust_loss(x, sign * INF, 1.0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_loss_is_zero_at_zero_positive_elsewhere_and_symmetric(alpha: float) -> None:
    x = torch.logspace(-6, 0.8, 60, dtype=torch.float64)
    assert robust_loss(torch.zeros(1, dtype=torch.float64), alpha, 2.0).item() == 0.0
    assert (robust_loss(x, alpha, 2.0) > 0).all()
    assert torch.equal(robust_loss(x, alpha, 2.0), robust_loss(-x, alpha, 2.0))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_and_its_slope_are_monotone_in_the_size_of_the_residual(alpha: float, dtype: torch.dtype) -> None:
    x = torch.linspace(0, 12, 400, dtype=dtype).requires_grad_()
    loss = robust_loss(x, alpha, 1.0)
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert (loss.diff() >= -torch.finfo(dtype).eps * 20 * loss[1:]).all()
    assert (slope >= 0).all()
    if alpha >= 1.0:
        assert (slope.diff() >= -torch.finfo(dtype).eps * 40 * slope[1:]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_is_monotone_in_the_shape(dtype: torch.dtype) -> None:
    alphas = torch.cat([torch.tensor([-INF, -1e9]), torch.linspace(-20, 20, 801), torch.tensor([1e9, INF])]).to(dtype)
    for size in (1e-3, 0.1, 1.0, 3.0, 6.0):
        shapes = alphas.clone().requires_grad_()
        loss = robust_loss(torch.tensor(size, dtype=dtype), shapes, 1.0)
        (slope,) = torch.autograd.grad(loss.sum(), shapes)
        held = (loss.detach() - loss.detach().roll(1))[1:]
        assert (held >= -40 * torch.finfo(dtype).eps * loss[1:]).all()
        assert (slope >= 0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [1e-4, 0.3, 7.0, 1e5])
def test_scaling_residual_and_scale_together_changes_nothing(alpha: float, scale: float) -> None:
    x = tensor(POINTS)
    torch.testing.assert_close(
        robust_loss(x * scale, alpha, 1.7 * scale), robust_loss(x, alpha, 1.7), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("alpha", FINITE)
def test_residual_and_scale_gradients_satisfy_euler(alpha: float) -> None:
    x, c = tensor(POINTS).requires_grad_(), torch.full((8,), 0.9, dtype=torch.float64).requires_grad_()
    in_x, in_c = torch.autograd.grad(robust_loss(x, alpha, c).sum(), (x, c))
    torch.testing.assert_close(x * in_x + c * in_c, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)


def gradient_bound(alpha: float, c: float) -> float:
    """The largest |dloss/dx|, at the inflection x² = c²·b/(1 - alpha); 1/c at alpha = 1."""
    if alpha == 1.0:
        return 1.0 / c
    if alpha == -INF:
        return math.exp(-0.5) / c
    return math.sqrt((2 - alpha) / (1 - alpha)) * ((2 - alpha) / (1 - alpha)) ** (alpha / 2 - 1) / c


@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha <= 1.0])
@pytest.mark.parametrize("c", [0.2, 1.0, 30.0])
def test_gradient_in_the_residual_is_bounded_up_to_shape_one(alpha: float, c: float) -> None:
    x = (c * torch.logspace(-3, 20, 4001, dtype=torch.float64)).requires_grad_()
    (slope,) = torch.autograd.grad(robust_loss(x, alpha, c).sum(), x)
    bound = gradient_bound(alpha, c)
    assert slope.max().item() <= bound * (1 + 1e-12)
    assert slope.max().item() >= bound * 0.999
    assert (slope <= x / c**2 * (1 + 1e-12)).all()


@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha < 0.0])
def test_loss_saturates_below_its_limit_for_negative_shapes(alpha: float) -> None:
    x = torch.tensor([1.0, 1e3, 1e10, 1e20, INF], dtype=torch.float64)
    limit = 1.0 if math.isinf(alpha) else (alpha - 2.0) / alpha
    loss = robust_loss(x, alpha, 1.0)
    assert (loss <= limit * (1 + 1e-12)).all()
    assert loss[-1].item() == pytest.approx(limit)


def test_shape_gradient_at_zero_has_all_three_terms() -> None:
    x, c = torch.logspace(-1, 3, 9, dtype=torch.float64), 0.8
    alpha = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(robust_loss(x, alpha, c).sum(), alpha)
    q = (x / c).square()
    t = 1 + q / 2
    torch.testing.assert_close(slope, -t.log() / 2 + q / (4 * t) + t.log().square() / 4, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_first_derivatives_pass_gradcheck(alpha: float) -> None:
    x, c = tensor(POINTS).requires_grad_(), tensor(0.8).requires_grad_()
    if math.isinf(alpha):
        assert torch.autograd.gradcheck(lambda x, c: robust_loss(x, alpha, c), (x, c), check_forward_ad=True)
        return
    shape = tensor(alpha).requires_grad_()
    step = 1e-7 if alpha == 2.0 else 1e-6  # at 2 the loss has kinks at 1e-6 to either side
    tolerance = dict(eps=step, atol=1e-6, rtol=1e-4 if step < 1e-6 else 1e-5)
    assert torch.autograd.gradcheck(robust_loss, (x, shape, c), check_forward_ad=True, **tolerance)


@pytest.mark.parametrize("alpha", FINITE)
def test_second_derivatives_pass_gradgradcheck(alpha: float) -> None:
    leaves = [tensor(item).requires_grad_() for item in ((0.7, -1.2, 3.0, 0.01), alpha, 0.8)]
    step = 1e-7 if alpha == 2.0 else 1e-6
    tolerance = dict(eps=step, atol=1e-5, rtol=1e-4)
    assert torch.autograd.gradgradcheck(
        robust_loss, leaves, check_fwd_over_rev=True, check_rev_over_rev=True, **tolerance
    )


def test_mixed_second_derivative_reads_the_same_from_both_sides() -> None:
    x, alpha = tensor(0.9).requires_grad_(), tensor(0.3).requires_grad_()
    in_x, in_alpha = torch.autograd.grad(robust_loss(x, alpha, 1.1), (x, alpha), create_graph=True)
    (one_way,) = torch.autograd.grad(in_x, alpha, retain_graph=True)
    (other_way,) = torch.autograd.grad(in_alpha, x)
    assert one_way.item() == pytest.approx(other_way.item(), rel=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_second_derivative_in_the_shape_agrees_with_400_digits(alpha: float) -> None:
    with mpmath.workdps(400):
        for x in (1e-4, 0.03, 0.6, 2.0, 9.0, 1e3):
            shape = tensor(alpha).requires_grad_()
            (slope,) = torch.autograd.grad(robust_loss(tensor(x), shape, 0.75), shape, create_graph=True)
            (got,) = torch.autograd.grad(slope, shape)
            if math.isinf(alpha):
                assert got.item() == 0.0
                continue
            h = mpmath.mpf(10) ** -60 * (1 + abs(alpha))
            low, here, high = (exact_loss(x, mpmath.mpf(alpha) + k * h, 0.75) for k in (-1, 0, 1))
            want = (low - 2 * here + high) / h**2
            assert abs((got.item() - want) / want) < 1e-11, (x, got.item(), want)


@pytest.mark.parametrize("outer", [torch.func.grad, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.grad, torch.func.jacfwd])
def test_second_derivative_is_the_same_in_every_mode_or_refused(
    outer: Callable[..., Any], inner: Callable[..., Any]
) -> None:
    x = tensor(0.4)
    wanted = torch.func.grad(torch.func.grad(lambda x: robust_loss(x, 0.5, 1.0)))(x)
    if outer is inner is torch.func.jacfwd:
        with pytest.raises(RuntimeError, match="`robust_loss` has no forward-mode derivative of a forward-mode"):
            outer(inner(lambda x: robust_loss(x, 0.5, 1.0)))(x)
        return
    torch.testing.assert_close(outer(inner(lambda x: robust_loss(x, 0.5, 1.0)))(x), wanted)


@pytest.mark.parametrize("outer", [torch.func.grad, torch.func.jacfwd])
@pytest.mark.parametrize("inner", [torch.func.grad, torch.func.jacfwd])
def test_third_derivative_is_refused(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    third = outer(inner(inner(lambda x: robust_loss(x, 0.5, 1.0))))
    with pytest.raises(RuntimeError, match=r"no third derivatives|forward-mode derivative of a forward-mode"):
        third(tensor(0.4))


def test_hessian_of_torch_func_agrees_in_both_modes() -> None:
    def loss(arguments: Tensor) -> Tensor:
        return robust_loss(arguments[0], arguments[1], arguments[2])

    at = tensor([0.8, -1.3, 1.4])
    forward_over_reverse = torch.func.hessian(loss)(at)
    reverse_over_reverse = torch.func.jacrev(torch.func.jacrev(loss))(at)
    reverse_over_forward = torch.func.jacrev(torch.func.jacfwd(loss))(at)
    torch.testing.assert_close(forward_over_reverse, reverse_over_reverse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forward_over_reverse, reverse_over_forward, rtol=1e-12, atol=1e-12)


def test_forward_mode_gives_the_directional_derivative() -> None:
    leaves = [tensor(item).requires_grad_() for item in (0.8, 0.0, 1.3)]
    gradients = torch.autograd.grad(robust_loss(*leaves), leaves)
    direction = [tensor(item) for item in (0.3, -0.7, 0.2)]
    _, tangent = torch.func.jvp(robust_loss, tuple(leaf.detach() for leaf in leaves), tuple(direction))
    expected = sum(g * d for g, d in zip(gradients, direction, strict=True))
    assert tangent.item() == pytest.approx(expected.item(), rel=1e-12)


def test_arguments_broadcast_and_gradients_have_their_shapes() -> None:
    leaves = [torch.rand(shape, dtype=torch.float64).add(0.5).requires_grad_() for shape in ((4, 1, 3), (2, 1), (3,))]
    loss = robust_loss(*leaves)
    assert loss.shape == (4, 2, 3)
    for gradient, leaf in zip(torch.autograd.grad(loss.sum(), leaves), leaves, strict=True):
        assert gradient.shape == leaf.shape
    single = robust_loss(leaves[0][3, 0, 1], leaves[1][1, 0], leaves[2][1])
    assert loss[3, 1, 1].item() == pytest.approx(single.item(), rel=1e-14)


def test_vmap_equals_a_loop() -> None:
    x, alpha = torch.randn(5, 7, dtype=torch.float64), tensor([-INF, -1.0, 0.0, 1.0, 2.0])
    looped = torch.stack([robust_loss(row, shape, 0.7) for row, shape in zip(x, alpha, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda x, alpha: robust_loss(x, alpha, 0.7))(x, alpha), looped)
    slopes = torch.func.vmap(torch.func.grad(lambda x, alpha: robust_loss(x, alpha, 0.7).sum()))(x, alpha)
    leaf = x.clone().requires_grad_()
    looped = torch.autograd.grad(robust_loss(leaf, alpha[:, None], 0.7).sum(), leaf)[0]
    torch.testing.assert_close(slopes, looped)


@pytest.mark.parametrize(
    "backend, learned",
    [
        ("aot_eager", (0, 1, 2)),
        ("inductor", (0, 2)),
        pytest.param("inductor", (0, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_compiled_without_graph_breaks_equals_eager(backend: str, learned: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    compiled = torch.compile(robust_loss, fullgraph=True, backend=backend)
    leaves = [torch.randn(6, 5), torch.tensor([-2.0, 0.0, 1.0, 2.0, 0.4]), torch.tensor(0.8)]
    results = []
    for function in (robust_loss, compiled):
        inputs = [leaf.clone().requires_grad_(i in learned) for i, leaf in enumerate(leaves)]
        loss = function(*inputs)
        results.append([loss, *torch.autograd.grad(loss.sum(), [inputs[i] for i in learned])])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=1e-5, atol=1e-6)


def test_exported_program_equals_eager() -> None:
    class Cauchy(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return robust_loss(x, 0.0, 0.5)

    x = torch.randn(4, 3)
    program = torch.export.export(Cauchy(), (x,))
    torch.testing.assert_close(program.module()(x), robust_loss(x, 0.0, 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [-INF, -2.0, 0.0, 1.0, 2.0])
def test_half_precision_is_float32_inside(dtype: torch.dtype, alpha: float) -> None:
    x = torch.linspace(-300, 300, 31).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    loss, expected = robust_loss(x, alpha, 2.0), robust_loss(wide, alpha, 2.0)
    assert loss.dtype == dtype
    assert torch.equal(loss, expected.to(dtype))
    slope, wanted = torch.autograd.grad(loss.sum(), x)[0], torch.autograd.grad(expected.sum(), wide)[0]
    torch.testing.assert_close(slope, wanted.to(dtype))


@pytest.mark.parametrize("alpha", [*ALPHAS, -1e30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_inputs_give_no_nan(alpha: float, dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.0, 1e-30, 1e-20, 1.0, 1e20, 1e30], dtype=dtype)
    for c in (1e-20, 1.0, 1e20):
        leaves = [sizes.clone(), torch.full((6,), alpha, dtype=dtype), torch.full((6,), c, dtype=dtype)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss = robust_loss(*leaves)
        for item in (loss, *torch.autograd.grad(loss.sum(), leaves)):
            assert not item.isnan().any()
            if alpha <= 0.0 and c == 1.0:
                assert item.isfinite().all()


def test_residual_that_overflows_the_ratio_keeps_its_logarithm() -> None:
    loss = robust_loss(torch.tensor(1e30), 0.0, 1e-30)
    assert loss.item() == pytest.approx(2 * math.log(1e60) - math.log(2), rel=1e-6)


def test_nan_stays_in_its_element() -> None:
    x = torch.tensor([math.nan, 1.0], requires_grad=True)
    loss = robust_loss(x, 1.0, 1.0)
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isnan().tolist() == slope.isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((torch.ones(2), 1.0, 0.0), ValueError, "`c` must be > 0 and finite, got 0.0"),
        ((torch.ones(2), 1.0, -1.0), ValueError, "`c` must be > 0 and finite, got -1.0"),
        ((torch.ones(2), 1.0, math.nan), ValueError, "`c` must be a number"),
        ((torch.ones(2), 1.0, torch.tensor([1.0, -2.0])), ValueError, "`c` must be > 0 and finite everywhere"),
        ((torch.ones(2), 1.0, torch.tensor([1.0, math.inf])), ValueError, "`c` must be > 0 and finite everywhere"),
        ((torch.ones(2), 1.0, torch.tensor([math.nan, 1.0])), ValueError, "`c` must be > 0 and finite everywhere"),
        (
            (torch.ones(2), torch.ones(3), 1.0),
            ValueError,
            r"`x`, `alpha` and `c` must broadcast .* \(2,\), \(3,\), \(\)",
        ),
        ((torch.ones(2), math.nan, 1.0), ValueError, "`alpha` must be a number"),
        ((torch.ones(2), "cauchy", 1.0), TypeError, "`alpha` must be a number or a tensor"),
        ((torch.ones(2), torch.tensor(1), 1.0), TypeError, "`alpha` must be a floating-point tensor"),
        ((torch.ones(2, dtype=torch.int64), 1.0, 1.0), TypeError, "`x` must be a floating-point tensor"),
        ((1.0, 1.0, 1.0), TypeError, "`x` must be a floating-point tensor"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: tuple[object, ...], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        robust_loss(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("alpha", ALPHAS)
def test_cuda_equals_cpu(alpha: float) -> None:
    results = []
    for device in ("cpu", "cuda"):
        leaves = [torch.linspace(-6, 6, 40, device=device), torch.tensor(alpha, device=device)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        loss = robust_loss(*leaves, 0.9)
        results.append([loss.cpu(), *(gradient.cpu() for gradient in torch.autograd.grad(loss.sum(), leaves))])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda, cpu, rtol=1e-4, atol=1e-6)
