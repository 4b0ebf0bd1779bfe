"""argmin under h(x, u) = 0 and G(x, u) <= 0, against closed forms, enumeration and scipy."""

import itertools

import pytest
import torch
from implicit_problems import D, simplex
from torch import Tensor

from hyperball.implicit import (
    LBFGS,
    AugmentedLagrangian,
    ConjugateGradient,
    ConvergenceError,
    Dense,
    GradientDescent,
    Implicit,
    Newton,
    Solution,
    Unrolled,
    argmin,
)


def distance(x: Tensor, u: Tensor) -> Tensor:
    """|u - x|^2 / 2: the minimizer is a projection."""
    return (u - x).square().sum(-1) / 2


def total(_: Tensor, u: Tensor) -> Tensor:
    return u.sum(-1) - 1


def nonnegative(_: Tensor, u: Tensor) -> Tensor:
    return -u


def unit(_: Tensor, u: Tensor) -> Tensor:
    return u.square().sum(-1) - 1


def box(_: Tensor, u: Tensor) -> Tensor:
    return torch.cat((u - 1, -1 - u), -1)


# name: (constraints, the projection in closed form)
SETS = {
    "plane": ({"equality": total}, lambda x: x - (x.sum(-1, keepdim=True) - 1) / x.shape[-1]),
    "simplex": ({"equality": total, "inequality": nonnegative}, simplex),
    "sphere": ({"equality": unit}, lambda x: x / x.norm(dim=-1, keepdim=True)),
    "ball": ({"inequality": unit}, lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1)),
    "box": ({"inequality": box}, lambda x: x.clamp(-1, 1)),
}
SOLVERS = {"Newton": Newton(), "LBFGS": LBFGS(), "GradientDescent": GradientDescent()}
ADJOINTS = {
    "dense": Implicit(Dense()),
    "cg": Implicit(ConjugateGradient()),
    "second order": Implicit(order=2),
    "unrolled": Unrolled(),
}
TIGHT = AugmentedLagrangian(tolerance=1e-14)


def points() -> Tensor:
    """Rows inside and outside of every set, away from its kinks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.randn(6, 4, dtype=D) * torch.tensor([0.3, 0.5, 1.0, 2.0, 3.0, 5.0], dtype=D)[:, None]


def start(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.2)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", SETS)
def test_projection_equals_its_closed_form(name, solver):
    constraints, project = SETS[name]
    x = points()
    y = argmin(distance, x, start(x), solver=SOLVERS[solver], **constraints)
    torch.testing.assert_close(y, project(x), rtol=0, atol=1e-8)


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", SETS)
def test_gradient_equals_that_of_the_closed_form(name, solver, adjoint):
    constraints, project = SETS[name]
    x = points().requires_grad_()
    weight = torch.randn_like(x)
    y = argmin(distance, x, start(x), solver=SOLVERS[solver], adjoint=ADJOINTS[adjoint], **constraints)
    (slope,) = torch.autograd.grad((y * weight).sum(), x)
    (exact,) = torch.autograd.grad((project(x) * weight).sum(), x)
    torch.testing.assert_close(slope, exact, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", SETS)
def test_gradient_equals_finite_differences(name):
    constraints, _ = SETS[name]
    x = points().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: argmin(distance, x, start(x), solver=TIGHT, **constraints),
        x,
        atol=1e-6,
        fast_mode=True,
    )


@pytest.mark.parametrize("linear", [Dense(), pytest.param(ConjugateGradient(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sphere", "ball"])
def test_second_derivatives_pass_gradgradcheck(name, linear):
    constraints, _ = SETS[name]
    x = points().requires_grad_()
    adjoint = Implicit(linear, order=2)
    assert torch.autograd.gradgradcheck(
        lambda x: argmin(distance, x, start(x), solver=TIGHT, adjoint=adjoint, **constraints),
        x,
        fast_mode=True,
    )


def best_of_supports(design: Tensor, target: Tensor) -> Tensor:
    """Nonnegative least squares by trying every support."""
    n, best, value = design.shape[1], None, torch.inf
    for size in range(1, n + 1):
        for support in itertools.combinations(range(n), size):
            u = torch.zeros(n, dtype=D)
            u[list(support)] = torch.linalg.lstsq(design[:, list(support)], target[:, None]).solution[:, 0]
            loss = (design @ u - target).square().sum()
            if (u >= 0).all() and loss < value:
                best, value = u, loss
    return best


def test_nonnegative_least_squares_equals_enumeration_of_supports():
    design, target = torch.randn(8, 10, 4, dtype=D), torch.randn(8, 10, dtype=D)
    y = argmin(
        lambda x, u: ((x[0] @ u[..., None])[..., 0] - x[1]).square().sum(-1),
        (design, target),
        torch.ones(8, 4, dtype=D),
        inequality=lambda _, u: -u,
    )
    expected = torch.stack([best_of_supports(a, b) for a, b in zip(design, target, strict=True)])
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", SOLVERS)
def test_nonconvex_program_is_as_good_as_scipy_slsqp(solver):
    optimize = pytest.importorskip("scipy.optimize")
    x = torch.rand(5, 2, dtype=D)

    def objective(x: Tensor, u: Tensor) -> Tensor:
        return -u[..., 0] * u[..., 1] + 0.2 * (u - x).square().sum(-1)

    def disk(_: Tensor, u: Tensor) -> Tensor:
        return u.square().sum(-1) - 2

    solution = argmin(
        objective, x, torch.full((5, 2), 0.5, dtype=D), inequality=disk, solver=SOLVERS[solver], full=True
    )
    assert solution.converged.all()
    for row, u in zip(x, solution.value, strict=True):
        reference = optimize.minimize(
            lambda u, row=row: objective(row, torch.as_tensor(u)).item(),
            [0.5, 0.5],
            method="SLSQP",
            constraints={"type": "ineq", "fun": lambda u: 2 - (u**2).sum()},
            options={"ftol": 1e-14},
        )
        assert disk(row, u) < 1e-8
        assert objective(row, u) <= reference.fun + 1e-7


def test_kkt_conditions_hold_with_the_returned_multipliers():
    x = points()
    solution = argmin(distance, x, start(x), equality=total, inequality=nonnegative, full=True)
    u, mu = solution.value, solution.inequality_multipliers
    assert isinstance(solution, Solution)
    stationarity = (u - x) + solution.equality_multipliers - mu
    for condition in (stationarity, total(x, u), u * mu, u.clamp_max(0), mu.clamp_max(0)):
        assert condition.abs().max() < 1e-8
    assert (mu > 1e-3).any()
    assert (u > 1e-3).any()


def test_parameter_of_a_constraint_gets_its_gradient():
    x = points()
    radius = torch.tensor(0.8, dtype=D, requires_grad=True)
    y = argmin(distance, x, start(x), inequality=lambda _, u: u.square().sum(-1) - radius**2)
    weight = torch.randn_like(x)
    (slope,) = torch.autograd.grad((y * weight).sum(), radius)
    norm = x.norm(dim=-1, keepdim=True)
    assert slope.item() == pytest.approx(((norm > 0.8) * x / norm * weight).sum().item(), rel=1e-7)


def test_inactive_constraints_change_nothing():
    x = points() / 10
    free = argmin(distance, x, start(x))
    bounded = argmin(distance, x, start(x), inequality=lambda _, u: u.abs() - 9)
    torch.testing.assert_close(bounded, free, rtol=0, atol=1e-9)


def redundant(_: Tensor, u: Tensor) -> Tensor:
    return torch.stack((u.sum(-1) - 1, 2 * u.sum(-1) - 2), -1)


def test_redundant_constraints_solve_and_say_what_to_do_about_the_gradient():
    x = points().requires_grad_()
    y = argmin(distance, x, start(x), equality=redundant)
    torch.testing.assert_close(y, SETS["plane"][1](x), rtol=0, atol=1e-8)
    with pytest.raises(ConvergenceError, match=r"redundant constraints.*pseudo_inverse=True"):
        y.sum().backward()
    adjoint = Implicit(Dense(pseudo_inverse=True))
    weight = torch.randn_like(x)
    y = argmin(distance, x, start(x), equality=redundant, adjoint=adjoint)
    (slope,) = torch.autograd.grad((y * weight).sum(), x)
    torch.testing.assert_close(slope, weight - weight.mean(-1, keepdim=True), rtol=0, atol=1e-8)


def test_infeasible_elements_are_reported_and_feasible_ones_solved():
    x = torch.tensor([[1.0, 2.0], [1.0, -2.0]], dtype=D)

    def circle(x: Tensor, u: Tensor) -> Tensor:
        return u.square().sum(-1) - torch.tensor([1.0, -1.0], dtype=D)

    solver = AugmentedLagrangian(max_steps=8)
    settings = {"equality": circle, "solver": solver}
    solution = argmin(distance, x, x.clone(), on_failure="ignore", full=True, **settings)
    assert solution.converged.tolist() == [True, False]
    torch.testing.assert_close(solution.value[0], x[0] / x[0].norm(), rtol=0, atol=1e-8)
    with pytest.raises(ConvergenceError, match=r"1 of 2 elements \(first: 1\)"):
        argmin(distance, x, x.clone(), **settings)


def test_maximum_of_the_constrained_function_is_not_taken_for_a_minimum():
    x = torch.zeros(1, 2, dtype=D)
    y = argmin(
        lambda _, u: u[..., 0] + 0 * u[..., 1],
        x,
        torch.tensor([[0.9, 0.1]], dtype=D),  # close to the maximum (1, 0)
        equality=unit,
    )
    torch.testing.assert_close(y, torch.tensor([[-1.0, 0.0]], dtype=D), rtol=0, atol=1e-7)


def test_many_variables_need_no_dense_matrix():
    n = 600
    x = torch.randn(2, n, dtype=D, requires_grad=True)
    solver = AugmentedLagrangian(LBFGS(), tolerance=1e-7)
    y = argmin(distance, x, torch.zeros(2, n, dtype=D), equality=total, solver=solver)
    torch.testing.assert_close(y, SETS["plane"][1](x), rtol=0, atol=1e-5)
    weight = torch.randn_like(x)
    (slope,) = torch.autograd.grad((y * weight).sum(), x)
    torch.testing.assert_close(slope, weight - weight.mean(-1, keepdim=True), rtol=0, atol=1e-7)


def test_augmented_lagrangian_without_constraints_is_its_inner_solver():
    x = points()
    y = argmin(distance, x, start(x), solver=AugmentedLagrangian(Newton()))
    assert torch.equal(y, argmin(distance, x, start(x), solver=Newton()))
