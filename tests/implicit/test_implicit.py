"""argmin: the minimizer is right, and implicit = unrolled = finite-difference gradients."""

import pytest
import torch
from implicit_problems import CASES, PAIRS, SOLVERS, Case, D, quartic, ridge, robust_mean
from torch import Tensor
from torch.autograd import forward_ad

from hyperball.implicit import LBFGS, ConjugateGradient, Dense, Implicit, Newton, Solution, Unrolled, argmin
from hyperball.implicit.solvers import positive_shift

ADJOINTS = {
    "dense": Implicit(Dense()),
    "cg": Implicit(ConjugateGradient()),
    "second order": Implicit(order=2),
    "unrolled": Unrolled(),
}
EXACT = Newton(tolerance=1e-15)


def pulled(case: Case, x: tuple[Tensor, ...], weight: Tensor, **settings: object) -> tuple[Tensor, ...]:
    """d <weight, y(x)> / dx."""
    x = tuple(t.clone().requires_grad_() for t in x)
    y = argmin(case.objective, x, case.init, **settings)
    return torch.autograd.grad((y * weight).sum(), x)


def differenced(case: Case, x: tuple[Tensor, ...], weight: Tensor, way: tuple[Tensor, ...]) -> Tensor:
    """The central difference of <weight, y(x)> along `way`, step 1e-5."""
    moved = (tuple(t + h * w for t, w in zip(x, way, strict=True)) for h in (1e-5, -1e-5))
    ahead, behind = (argmin(case.objective, x, case.init, solver=EXACT) for x in moved)
    return ((ahead - behind) * weight).sum() / 2e-5


# A thousand steps of a fixed rate: "robust mean" stands for them among the fast tests.
MARKED_PAIRS = [
    pytest.param(*pair, marks=pytest.mark.slow) if pair == ("logistic", "GradientDescent(rate)") else pair
    for pair in PAIRS
]


@pytest.mark.parametrize("name, solver", MARKED_PAIRS)
def test_every_solver_finds_the_same_stationary_point(name, solver):
    case = CASES[name]
    solution = argmin(case.objective, case.make(), case.init, solver=SOLVERS[solver], full=True)
    u = solution.value.clone().requires_grad_()
    (slope,) = torch.autograd.grad(case.objective(case.make(), u).sum(), u)
    assert solution.converged.all()
    assert slope.abs().max() < 1e-8
    expected = argmin(case.objective, case.make(), case.init)
    torch.testing.assert_close(solution.value, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("adjoint", ADJOINTS)
@pytest.mark.parametrize("name, solver", MARKED_PAIRS)
def test_implicit_equals_unrolled_equals_finite_differences(name, solver, adjoint):
    case, x = CASES[name], CASES[name].make()
    weight, way = torch.randn_like(case.init), tuple(torch.randn_like(t) for t in x)
    slopes = pulled(case, x, weight, solver=SOLVERS[solver], adjoint=ADJOINTS[adjoint])
    along = sum((slope * w).sum() for slope, w in zip(slopes, way, strict=True))
    # Descent at lengths chosen from the gradients differentiates its valley floor slowly.
    loose = adjoint == "unrolled" and name == "valley" and solver == "GradientDescent"
    rtol = 1e-2 if loose else 1e-6
    torch.testing.assert_close(along, differenced(case, x, weight, way), rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_dense_implicit_gradients_pass_gradcheck(name):
    case = CASES[name]
    x = tuple(t.requires_grad_() for t in case.make())

    def minimizer(*x: Tensor) -> Tensor:
        return argmin(case.objective, x, case.init, solver=EXACT)

    assert torch.autograd.gradcheck(minimizer, x, fast_mode=True)


@pytest.mark.parametrize("adjoint", [Implicit(order=2), Implicit(ConjugateGradient(), order=2), Unrolled(3)])
@pytest.mark.parametrize("name", ["robust mean", "quartic", "valley", "one problem"])
def test_second_derivatives_pass_gradgradcheck(name, adjoint):
    case = CASES[name]
    x = tuple(t.requires_grad_() for t in case.make())

    def minimizer(*x: Tensor) -> Tensor:
        return argmin(case.objective, x, case.init, solver=EXACT, adjoint=adjoint)

    assert torch.autograd.gradgradcheck(minimizer, x, fast_mode=True)


def nested(order: int, times: int, adjoint: Implicit | Unrolled | None = None) -> list[float]:
    """The first derivatives of the pseudo-Huber mean of (1, 2, 7) in log c, c captured by the objective."""
    log_c, x = torch.tensor(0.3, dtype=D, requires_grad=True), torch.tensor([1.0, 2.0, 7.0], dtype=D)
    c = log_c.exp()
    value = argmin(
        lambda _, u: (c**2 * torch.sqrt(1 + ((x - u) / c) ** 2)).sum(),
        (),
        torch.tensor(2.0, dtype=D),
        solver=EXACT,
        adjoint=adjoint or Implicit(order=order),
    )
    found = []
    for _ in range(times):
        (value,) = torch.autograd.grad(value, log_c, create_graph=True)
        found.append(value.item())
    return found


def test_order_k_has_k_right_derivatives_of_a_captured_tensor():
    truth = nested(1, 3, Unrolled(extra=5))
    for order in (1, 2, 3):
        assert nested(order, order) == pytest.approx(truth[:order], rel=1e-10)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_one_derivative_more_than_order_is_refused(order):
    with pytest.raises(RuntimeError, match=r"differentiated more often.*Implicit\(order=2\)"):
        nested(order, order + 1)


def test_second_derivative_of_a_linear_loss_is_refused_not_wrong():
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    y = argmin(robust_mean, (x,), torch.zeros(3, dtype=D))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated more often"):
        slope.sum().backward()


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_forward_mode_equals_reverse_mode(adjoint):
    case, (x,) = CASES["quartic"], CASES["quartic"].make()
    way, weight = torch.randn_like(x), torch.randn_like(x)
    with forward_ad.dual_level():
        dual = (forward_ad.make_dual(x, way),)
        tangent = forward_ad.unpack_dual(
            argmin(case.objective, dual, case.init, solver=EXACT, adjoint=ADJOINTS[adjoint])
        ).tangent
    (slope,) = pulled(case, (x,), weight, solver=EXACT)
    torch.testing.assert_close((tangent * weight).sum(), (slope * way).sum())


class Counting(Dense):
    """Dense that counts its factorizations and its solves."""

    counts: dict[str, int]

    def prepare(self, system):
        self.counts["factorizations"] += 1
        solve = super().prepare(system)

        def counted(v: Tensor) -> Tensor:
            self.counts["solves"] += 1
            return solve(v)

        return counted


def test_backward_is_one_factorization_and_one_solve_each():
    linear = Counting()
    object.__setattr__(linear, "counts", {"factorizations": 0, "solves": 0})
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    y = argmin(robust_mean, (x,), torch.zeros(3, dtype=D), adjoint=Implicit(linear))
    assert linear.counts == {"factorizations": 0, "solves": 0}
    y.sum().backward(retain_graph=True)
    assert linear.counts == {"factorizations": 1, "solves": 1}
    y.square().sum().backward()
    assert linear.counts == {"factorizations": 1, "solves": 2}


def test_ridge_equals_the_normal_equations():
    design, target = CASES["ridge"].make()
    gram = design.mT @ design + 0.1 * torch.eye(3, dtype=D)
    exact = torch.linalg.solve(gram, (design.mT @ target[..., None]))[..., 0]
    torch.testing.assert_close(argmin(ridge, (design, target), torch.zeros(4, 3, dtype=D)), exact)


def test_robust_mean_is_not_beaten_by_a_dense_grid():
    (x,) = CASES["robust mean"].make()
    y = argmin(robust_mean, (x,), x.mean(-1))
    grid = torch.linspace(-12, 12, 20001, dtype=D)
    values = torch.stack([robust_mean((row,), grid) for row in x])
    assert (robust_mean((x,), y) <= values.min(-1).values + 1e-12).all()


def test_beyond_64_variables_lbfgs_and_conjugate_gradients_take_over():
    n = 120
    matrix = torch.randn(2, n, n, dtype=D) / n**0.5
    matrix = matrix @ matrix.mT + torch.eye(n, dtype=D)
    b = torch.randn(2, n, dtype=D, requires_grad=True)

    def objective(x: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
        return (u * (x[0] @ u[..., None])[..., 0]).sum(-1) / 2 - (x[1] * u).sum(-1)

    y = argmin(objective, (matrix, b), torch.zeros_like(b))
    weight = torch.randn_like(b)
    torch.testing.assert_close(y, torch.linalg.solve(matrix, b), rtol=0, atol=1e-8)
    (slope,) = torch.autograd.grad((y * weight).sum(), b)
    torch.testing.assert_close(slope, torch.linalg.solve(matrix, weight), rtol=0, atol=1e-9)


def test_saddle_start_still_reaches_a_minimum():
    def well(x: Tensor, u: Tensor) -> Tensor:
        return ((u.square() - 1).square() + 0.1 * x * u).sum(-1)

    x = torch.tensor([[0.5, -0.5], [1.0, 0.3]], dtype=D)
    y = argmin(well, x, torch.full((2, 2), 1e-3, dtype=D))
    assert (12 * y.square() - 4 > 0).all()


def test_newton_shift_makes_every_symmetric_matrix_positive_definite_and_leaves_those_that_are():
    matrix = torch.randn(20, 4, 4, dtype=D)
    definite, indefinite = matrix @ matrix.mT + torch.eye(4, dtype=D), matrix + matrix.mT
    assert (positive_shift(definite) == 0).all()
    shift = positive_shift(indefinite)
    lowest = torch.linalg.eigvalsh(indefinite)[:, 0]
    assert (lowest + shift > 0).all()
    assert (shift <= 10 * lowest.abs()).all()
    assert (positive_shift(torch.zeros(1, 4, 4, dtype=D)) >= 0).all()


@pytest.mark.parametrize("structure", [tuple, list, dict])
def test_objective_gets_x_in_the_structure_of_inputs(structure):
    design, target = (t.requires_grad_() for t in CASES["ridge"].make())
    named = {"design": design, "target": target}
    inputs = named if structure is dict else structure((design, target))

    def objective(x, u):
        assert type(x) is structure
        return ridge(tuple(x.values()) if structure is dict else x, u)

    y = argmin(objective, inputs, torch.zeros(4, 3, dtype=D))
    torch.testing.assert_close(y, argmin(ridge, (design, target), torch.zeros(4, 3, dtype=D)))
    assert all(slope is not None for slope in torch.autograd.grad(y.sum(), (design, target)))


@pytest.mark.parametrize("adjoint", ADJOINTS)
def test_parameters_in_closures_and_modules_get_gradients(adjoint):
    layer = torch.nn.Linear(3, 3, dtype=D)
    scale = torch.tensor(0.7, dtype=D, requires_grad=True)
    x = torch.randn(5, 3, dtype=D)
    twice = 2 * scale  # captured, and not a leaf

    y = argmin(
        lambda x, u: (layer(x) - twice * u).square().sum(-1),
        x,
        torch.zeros(5, 3, dtype=D),
        solver=Newton(tolerance=1e-14),
        adjoint=ADJOINTS[adjoint],
    )
    closed = layer(x) / twice
    torch.testing.assert_close(y, closed)
    weight, parameters = torch.randn_like(y), (*layer.parameters(), scale)
    got = torch.autograd.grad((y * weight).sum(), parameters, retain_graph=True)
    for slope, exact in zip(got, torch.autograd.grad((closed * weight).sum(), parameters), strict=True):
        torch.testing.assert_close(slope, exact)


@pytest.mark.parametrize("solver", [Newton(), LBFGS()])
def test_warm_start_from_the_solution_is_converged(solver):
    x = (100 * torch.randn(8, 49, dtype=torch.float32),)
    first = argmin(robust_mean, x, torch.zeros(8), solver=solver)
    again = argmin(robust_mean, x, first, solver=solver, full=True)
    assert again.converged.all()
    torch.testing.assert_close(again.value, first, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
@pytest.mark.parametrize("solver", ["Newton", "LBFGS", "GradientDescent", "BracketedScalar"])
def test_scaling_the_objective_does_not_move_the_minimizer(solver, scale):
    case = CASES["robust mean"]
    y = argmin(lambda x, u: scale * robust_mean(x, u), case.make(), case.init, solver=SOLVERS[solver])
    torch.testing.assert_close(y, argmin(robust_mean, case.make(), case.init), rtol=0, atol=1e-8)


def test_solution_has_the_batch_shape_and_no_gradient_outside_value():
    case = CASES["quartic"]
    x = tuple(t.requires_grad_() for t in case.make())
    solution = argmin(quartic, x, case.init, full=True)
    assert isinstance(solution, Solution)
    assert solution.value.shape == case.init.shape
    for field in (solution.converged, solution.steps, solution.residual):
        assert field.shape == (2, 3)
        assert not field.requires_grad
    assert solution.value.requires_grad
    assert solution.equality_multipliers is None
    assert solution.inequality_multipliers is None
