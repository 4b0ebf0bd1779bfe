"""What argmin promises around the mathematics: independent elements, precision, failures, refusals."""

import gc
import warnings
import weakref

import pytest
import torch
from implicit_problems import CASES, SOLVERS, D, quartic, robust_mean
from torch import Tensor

from hyperball.implicit import (
    LBFGS,
    BracketedScalar,
    ConjugateGradient,
    ConvergenceError,
    ConvergenceWarning,
    Dense,
    GradientDescent,
    Implicit,
    Newton,
    Unrolled,
    argmin,
)


def bowl(x: Tensor, u: Tensor) -> Tensor:
    """|u - x|^2 + sum u^4 / 10, by elementwise operations."""
    return ((u - x).square() + 0.1 * u.pow(4) + 0.05 * u * u.roll(1, -1)).sum(-1)


def rows(dtype: torch.dtype = D) -> Tensor:
    """Elements from easy to hard."""
    return torch.randn(9, 5, dtype=dtype) * torch.logspace(-2, 2, 9, dtype=dtype)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("solver", [Newton(), LBFGS(), GradientDescent()])
def test_an_element_does_not_depend_on_the_rest_of_the_batch_bit_for_bit(solver, constrained, dtype):
    x = rows(dtype)
    settings = {"solver": solver, "full": True}
    if constrained:
        settings["inequality"] = lambda _, u: torch.cat((u - 1, -1 - u), -1)
    together = argmin(bowl, x, torch.zeros_like(x), **settings)
    assert together.steps.unique().numel() > 1
    for i in range(len(x)):
        alone = argmin(bowl, x[i : i + 1], torch.zeros_like(x[:1]), **settings)
        assert torch.equal(alone.value[0], together.value[i])
        assert alone.steps[0] == together.steps[i]


def test_gradient_of_an_element_does_not_depend_on_the_rest_of_the_batch():
    x = rows().requires_grad_()
    (together,) = torch.autograd.grad(argmin(bowl, x, torch.zeros_like(x)).square().sum(), x)
    for i in range(len(x)):
        y = argmin(bowl, x[i : i + 1], torch.zeros_like(x[:1]))
        (alone,) = torch.autograd.grad(y.square().sum(), x)
        torch.testing.assert_close(alone[i], together[i], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [Newton, LBFGS, GradientDescent])
def test_an_element_stops_at_its_own_tolerance(kind):
    x = rows()
    loose = argmin(bowl, x, torch.zeros_like(x), solver=kind(tolerance=1e-1), full=True)
    tight = argmin(bowl, x, torch.zeros_like(x), solver=kind(tolerance=1e-9), full=True)
    first = 2 * x.abs().amax(-1)
    assert (loose.residual <= 1e-1 * first).all()
    assert (loose.steps < tight.steps).all()
    assert (tight.residual < loose.residual).all()


@pytest.mark.parametrize("solver", [Newton(), LBFGS(), GradientDescent()])
@pytest.mark.parametrize("inequality", [None, lambda _, u: u - 1])
def test_a_nan_row_is_nan_alone(solver, inequality):
    x = rows()
    x[2, 1] = torch.nan
    settings = {"solver": solver, "inequality": inequality}
    solution = argmin(bowl, x, torch.zeros_like(x), on_failure="ignore", full=True, **settings)
    assert solution.value.isnan().any(-1).tolist() == [i == 2 for i in range(9)]
    assert solution.converged.tolist() == [i != 2 for i in range(9)]
    with pytest.raises(ConvergenceError, match=r"`objective` is not finite at `init` for 1 of 9 .*first: 2"):
        argmin(bowl, x, torch.zeros_like(x), **settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32_and_returns_half(dtype):
    seen = set()

    def objective(x: Tensor, u: Tensor) -> Tensor:
        seen.update((x.dtype, u.dtype))
        return bowl(x, u)

    x = torch.randn(4, 5).to(dtype).requires_grad_()
    y = argmin(objective, x, torch.zeros(4, 5, dtype=dtype))
    y.sum().backward()
    assert seen == {torch.float32}
    assert y.dtype == x.grad.dtype == dtype
    exact = argmin(bowl, x.detach().double(), torch.zeros(4, 5, dtype=D))
    torch.testing.assert_close(y, exact.to(dtype), rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_result_has_torchs_promotion_of_init_and_inputs():
    x = torch.randn(4, 5, dtype=D)
    assert argmin(bowl, x, torch.zeros(4, 5)).dtype == D
    assert argmin(bowl, x.half(), torch.zeros(4, 5)).dtype == torch.float32


def test_autocast_does_not_reach_the_objective():
    design, target = CASES["ridge"].make()

    def objective(x: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
        return ((x[0] @ u[..., None])[..., 0] - x[1]).square().sum(-1)

    x, init = (design.float(), target.float()), torch.zeros(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = argmin(objective, x, init)
    assert torch.equal(y, argmin(objective, x, init))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_give_the_same_value_without_graph(mode):
    x = rows()
    with mode():
        y = argmin(bowl, x + 0, torch.zeros_like(x))
    assert not y.requires_grad
    assert torch.equal(y, argmin(bowl, x, torch.zeros_like(x)))


def test_result_requires_grad_only_if_something_asks():
    x = rows()
    assert not argmin(bowl, x, torch.zeros_like(x)).requires_grad
    assert argmin(bowl, x.requires_grad_(), torch.zeros(9, 5, dtype=D)).requires_grad


def test_init_gets_no_gradient():
    x, init = rows(), torch.zeros(9, 5, dtype=D, requires_grad=True)
    assert not argmin(bowl, x, init, adjoint=Unrolled()).requires_grad


def test_graph_is_freed_with_the_result():
    x = rows().requires_grad_()
    y = argmin(bowl, x, torch.zeros(9, 5, dtype=D))
    y.sum().backward()
    graph = weakref.ref(y)
    del y
    gc.collect()
    assert graph() is None


@pytest.mark.slow
def test_compiled_code_around_argmin_gives_the_same_gradients():
    def layer(x: Tensor) -> Tensor:
        return 2 * argmin(bowl, 3 * x, torch.zeros_like(x))

    x = rows().requires_grad_()
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))
    slopes = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, layer)]
    torch.testing.assert_close(*slopes)


def test_objective_that_vmap_cannot_vectorize_still_has_a_hessian():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u):
            ctx.save_for_backward(u)
            return u * u

        @staticmethod
        def backward(ctx, v):
            (u,) = ctx.saved_tensors
            return 2 * u * v if v.sum().item() == v.sum().item() else v  # reads a value

    x = torch.randn(3, 6, dtype=D, requires_grad=True)
    y = argmin(lambda x, u: Square.apply(u - x).sum(-1), x, torch.zeros(3, 6, dtype=D))
    torch.testing.assert_close(y, x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.ones_like(x))


def unbounded(x: Tensor, u: Tensor) -> Tensor:
    return (x * u).sum(-1)


def too_few() -> dict[str, object]:
    return {"solver": GradientDescent(rate=1e-3, max_steps=3)}


def test_failure_raises_by_default_and_names_the_elements():
    with pytest.raises(ConvergenceError, match=r"9 of 9 elements \(first: 0, 1, 2.*up to 3 steps"):
        argmin(bowl, rows(), torch.zeros(9, 5, dtype=D), **too_few())


def test_failure_warns_on_request_and_points_at_the_caller():
    with pytest.warns(ConvergenceWarning, match="did not converge") as record:
        y = argmin(bowl, rows(), torch.zeros(9, 5, dtype=D), on_failure="warn", **too_few())
    assert record[0].filename == __file__
    assert y.isfinite().all()


def test_failure_is_silent_on_request_and_told_by_the_solution():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = {"on_failure": "ignore", "full": True, **too_few()}
        solution = argmin(bowl, rows(), torch.zeros(9, 5, dtype=D), **settings)
    assert not solution.converged.any()
    assert (solution.steps == 3).all()
    assert (solution.residual > 0).all()


@pytest.mark.parametrize("solver", [Newton(max_steps=20), LBFGS(max_steps=50), GradientDescent(max_steps=50)])
def test_unbounded_objective_does_not_converge(solver):
    with pytest.raises(ConvergenceError):
        argmin(unbounded, rows() + 10, torch.zeros(9, 5, dtype=D), solver=solver)


@pytest.mark.parametrize("linear", [Dense(), ConjugateGradient()])
@pytest.mark.parametrize("on_failure, expected", [("raise", ConvergenceError), ("warn", ConvergenceWarning)])
def test_a_minimizer_that_is_not_isolated_has_its_missing_gradient_reported(linear, on_failure, expected):
    # For a loss that sees the free direction u_1 - u_2 conjugate gradients meet zero curvature.
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = argmin(
        lambda x, u: (u.sum(-1) - x).square(),
        x,
        torch.zeros(3, 2, dtype=D),
        adjoint=Implicit(linear),
        on_failure=on_failure,
    )
    if expected is ConvergenceError:
        with pytest.raises(expected, match=r"Implicit\(Dense\("):
            y[:, 0].sum().backward()
    else:
        with pytest.warns(expected):
            y[:, 0].sum().backward()


def test_pseudo_inverse_is_right_where_the_loss_ignores_the_free_direction():
    x = torch.randn(3, dtype=D, requires_grad=True)
    y = argmin(
        lambda x, u: (u.sum(-1) - x).square(),
        x,
        torch.zeros(3, 2, dtype=D),
        adjoint=Implicit(Dense(pseudo_inverse=True)),
    )
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.ones_like(x))


def test_bracket_without_a_minimum_inside_is_a_failure():
    x = torch.tensor([[0.0, 1.0], [8.0, 9.0]], dtype=D)
    solution = argmin(
        robust_mean,
        (x,),
        torch.zeros(2, dtype=D),
        solver=BracketedScalar(-2.0, 5.0),
        on_failure="ignore",
        full=True,
    )
    assert solution.converged.tolist() == [True, False]


def test_bracketing_breaks_the_cycle_of_newtons_method():
    # For f = sqrt(1 + u^2) Newton's step is u -> -u^3, which goes from 1 to -1 and back for ever.
    y = argmin(
        lambda _, u: torch.sqrt(1 + u.square()),
        (),
        torch.ones(1, dtype=D),
        solver=BracketedScalar(-20.0, 20.0, max_steps=30),
    )
    assert y.abs() < 1e-9


def test_bracket_ends_may_differ_by_element():
    def waves(x: Tensor, u: Tensor) -> Tensor:
        return -torch.cos(u - x)

    lo = torch.tensor([-3.0, 3.3, 9.6], dtype=D)
    x = torch.full((3,), 0.1, dtype=D)
    y = argmin(waves, x, torch.zeros(3, dtype=D), solver=BracketedScalar(lo, lo + 6.2))
    torch.testing.assert_close(y, 0.1 + 2 * torch.pi * torch.arange(3, dtype=D))


def test_empty_batch_gives_an_empty_result():
    for settings in ({}, {"solver": LBFGS()}, {"equality": lambda _, u: u.sum(-1) - 1}):
        x = torch.zeros(0, 5, dtype=D, requires_grad=True)
        y = argmin(bowl, x, torch.zeros(0, 5, dtype=D), **settings)
        assert y.shape == (0, 5)
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("solver", ["Newton", "LBFGS", "GradientDescent"])
def test_cuda_equals_cpu(solver):
    (x,) = CASES["quartic"].make()
    slopes, values = [], []
    for device in ("cpu", "cuda"):
        moved = x.to(device).requires_grad_()
        y = argmin(quartic, (moved,), torch.zeros_like(x, device=device), solver=SOLVERS[solver])
        slopes.append(torch.autograd.grad(y.square().sum(), moved)[0].cpu())
        values.append(y.detach().cpu())
    torch.testing.assert_close(*values, rtol=0, atol=1e-9)
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-8)
