"""What counts as an answer: minima only, and with the right derivative from any start."""

import pytest
import torch
from implicit_problems import CASES, D, logistic
from torch import Tensor

from hyperball.implicit import (
    LBFGS,
    BracketedScalar,
    ConvergenceError,
    ConvergenceWarning,
    GradientDescent,
    Newton,
    Unrolled,
    argmin,
)

SOLVERS = [Newton(), LBFGS(), GradientDescent(), Newton(steps=8)]


def saddle(x: Tensor, u: Tensor) -> Tensor:
    """u_1^2 - u_2^2 + u_2^4: a saddle at 0, minima at u_2 = +-sqrt(1/2)."""
    return u[..., 0].square() - u[..., 1].square() + u[..., 1].pow(4) + 0 * x


def hill(x: Tensor, u: Tensor) -> Tensor:
    return torch.cos(u - x).sum(-1)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("objective, init", [(saddle, [0.0, 0.0]), (hill, [0.0, 0.0]), (saddle, [0.5, 0.0])])
def test_a_maximum_or_saddle_is_no_answer(objective, init, solver):
    x, start = torch.zeros(2, 1, dtype=D)[:, 0], torch.tensor([init, [0.1, 0.7]], dtype=D)
    x = x[:, None] if objective is hill else x
    found = argmin(objective, x, start, solver=solver, on_failure="ignore", full=True)
    assert found.converged.tolist() == [False, True]
    assert found.curvature[0] < 0 < found.curvature[1]
    with pytest.raises(ConvergenceError, match=r"maximum or saddle of `objective` for 1 of 2 .*another `init`"):
        argmin(objective, x, start, solver=solver)
    with pytest.warns(ConvergenceWarning, match="maximum or saddle"):
        argmin(objective, x, start, solver=solver, on_failure="warn")


def test_a_maximum_inside_a_bracket_is_no_answer():
    settings = {"solver": BracketedScalar(-7.0, 7.0), "on_failure": "ignore", "full": True}
    found = argmin(
        lambda x, u: torch.cos(u) + 0.01 * u.square() * x, torch.ones(1, dtype=D), torch.zeros(1, dtype=D), **settings
    )
    assert not found.converged.any()


@pytest.mark.parametrize("solver", [LBFGS(), GradientDescent()])
def test_a_saddle_of_many_variables_is_found_by_products_alone(solver):
    scale = torch.linspace(1, 3, 200, dtype=D)
    scale[77] = -2.0

    def objective(x: Tensor, u: Tensor) -> Tensor:
        return (scale * u.square() + u.pow(4)).sum(-1) + 0 * x

    init = torch.zeros(2, 200, dtype=D)
    init[1, 77] = 0.5
    found = argmin(objective, torch.zeros(2, dtype=D), init, solver=solver, on_failure="ignore", full=True)
    assert found.converged.tolist() == [False, True]
    assert found.curvature[0].item() == pytest.approx(-4.0, rel=0.05)


def test_a_flat_direction_is_an_answer():
    found = argmin(lambda x, u: (u.sum(-1) - x).square(), torch.ones(3, dtype=D), torch.zeros(3, 2, dtype=D), full=True)
    assert found.converged.all()


def test_curvature_is_the_least_eigenvalue_of_the_second_derivative():
    x = CASES["logistic"].make()
    found = argmin(logistic, x, torch.zeros(4, 3, dtype=D), full=True)
    for i in range(4):
        wanted = torch.func.hessian(lambda u, i=i: logistic((x[0][i], x[1][i]), u))(found.value[i])
        assert found.curvature[i].item() == pytest.approx(torch.linalg.eigvalsh(wanted)[0].item(), rel=1e-6)


@pytest.mark.parametrize("name", ["robust mean", "ridge", "logistic", "quartic"])
@pytest.mark.parametrize("solver", [Newton(), LBFGS(), GradientDescent()])
@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-3])
def test_unrolled_gradient_from_a_warm_start_is_the_implicit_one(distance, solver, name):
    case = CASES[name]
    x = tuple(part.requires_grad_() for part in case.make())
    exact = argmin(case.objective, x, case.init, solver=Newton(1e-13))
    wanted = torch.autograd.grad(exact.square().sum(), x)
    warm = exact.detach() + distance
    y = argmin(case.objective, x, warm, solver=solver, adjoint=Unrolled())
    for got, right in zip(torch.autograd.grad(y.square().sum(), x), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


def test_unrolled_refuses_what_its_closing_steps_cannot_hold():
    x = torch.randn(2, 600, dtype=D, requires_grad=True)
    with pytest.raises(ValueError, match=r"`adjoint` Unrolled closes .* 512 .* got 600; use Implicit\(\)"):
        argmin(
            lambda x, u: (u - x).square().sum(-1), x, torch.zeros(2, 600, dtype=D), solver=LBFGS(), adjoint=Unrolled()
        )


@pytest.mark.parametrize("dtype, error", [(D, 1e-5), (torch.float32, 0.2)])
@pytest.mark.parametrize("condition", [1e2, 1e3])
def test_lbfgs_solves_ill_conditioned_quadratics(condition, dtype, error):
    x = torch.randn(3, 100, dtype=dtype)
    scale = torch.logspace(0, torch.tensor(condition).log10().item(), 100, dtype=dtype)
    found = argmin(lambda x, u: (scale * (u - x).square()).sum(-1), x, torch.zeros_like(x), solver=LBFGS(), full=True)
    assert (found.value - x).abs().max() < error
