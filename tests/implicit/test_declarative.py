"""Declarative as an ordinary module, and the executed examples."""

import copy
import io
import pickle
import runpy

import pytest
import torch
from places import EXAMPLES
from torch import Tensor, nn

from hyperball.implicit import LBFGS, ConvergenceError, GradientDescent, Implicit, Newton, Unrolled, argmin
from hyperball.nn.declarative import Declarative


class PseudoHuber(nn.Module):
    """sum_i c^2 (sqrt(1 + (x_i - u)^2 / c^2) - 1) with a parameter log c."""

    def __init__(self, c: float = 1.0) -> None:
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(c, dtype=torch.float64).log())

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        c = self.log_c.exp()
        return (c**2 * torch.sqrt(1 + ((x - u[..., None]) / c) ** 2)).sum(-1)


def weighted(x: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
    """sum_i w_i (x_i - u)^2."""
    return (x[1] * (x[0] - u[..., None]).square()).sum(-1)


def middle(x: Tensor) -> Tensor:
    return x.median(-1).values


@pytest.fixture
def layer() -> Declarative:
    return Declarative(PseudoHuber(0.7), init=torch.zeros((), dtype=torch.float64), solver=Newton(1e-12))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 9, dtype=torch.float64)


def test_forward_is_argmin(layer, x):
    expected = argmin(layer.objective, x, torch.zeros(6, dtype=torch.float64), solver=Newton(1e-12))
    assert torch.equal(layer(x), expected)


def test_parameters_of_the_objective_are_the_layers(layer):
    assert dict(layer.named_parameters()).keys() == {"objective.log_c"}
    assert layer.state_dict().keys() == {"objective.log_c", "init"}


def test_state_dict_carries_the_result_to_another_layer(layer, x):
    other = Declarative(PseudoHuber(5.0), init=torch.ones((), dtype=torch.float64), solver=Newton(1e-12))
    assert not torch.allclose(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_deepcopy_has_its_own_parameters(layer, x):
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    with torch.no_grad():
        layer.objective.log_c += 1
    assert not torch.allclose(twin(x), layer(x))


def test_layer_of_module_level_functions_pickles(x):
    layer = Declarative(weighted, torch.zeros((), dtype=torch.float64), solver=LBFGS(), adjoint=Unrolled())
    stream = io.BytesIO(pickle.dumps(layer))
    again = pickle.load(stream)
    assert torch.equal(again(x, torch.ones_like(x)), layer(x, torch.ones_like(x)))


@pytest.mark.parametrize("adjoint", [None, Implicit(order=2), Unrolled()])
def test_gradient_in_the_parameter_equals_a_finite_difference(x, adjoint):
    init = torch.zeros((), dtype=torch.float64)
    layer = Declarative(PseudoHuber(0.7), init, solver=Newton(1e-14), adjoint=adjoint)
    layer(x).square().sum().backward()
    values = []
    for step in (1e-5, -1e-5):
        moved = copy.deepcopy(layer)
        with torch.no_grad():
            moved.objective.log_c += step
        values.append(moved(x).square().sum().item())
    assert layer.objective.log_c.grad.item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_several_inputs_reach_the_objective_as_a_tuple(x):
    layer = Declarative(weighted, init=torch.zeros((), dtype=torch.float64))
    weight = torch.rand_like(x)
    torch.testing.assert_close(layer(x, weight), (weight * x).sum(-1) / weight.sum(-1))


def test_init_may_be_a_function_of_the_input(layer, x):
    other = Declarative(layer.objective, init=middle, solver=Newton(1e-12))
    torch.testing.assert_close(other(x), layer(x))
    assert other.solve(x).steps.sum() <= layer.solve(x).steps.sum()


def test_batch_dims_says_how_far_init_is_repeated():
    x = torch.randn(2, 3, 7)
    layer = Declarative(lambda x, u: (x - u[..., None]).square().sum(-1), init=torch.zeros(()), batch_dims=2)
    torch.testing.assert_close(layer(x), x.mean(-1))


def test_constraints_and_failures_reach_argmin():
    def distance(x: Tensor, u: Tensor) -> Tensor:
        return (u - x).square().sum(-1)

    layer = Declarative(distance, init=torch.zeros(3), equality=lambda _, u: u.sum(-1) - 1)
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x).sum(-1), torch.ones(5))
    hurried = Declarative(distance, torch.zeros(3), solver=GradientDescent(1e-4, max_steps=2))
    with pytest.raises(ConvergenceError):
        hurried(x)


def test_solve_gives_the_solution(layer, x):
    solution = layer.solve(x)
    assert torch.equal(solution.value, layer(x))
    assert solution.converged.all()


def test_moving_the_layer_moves_its_start(layer, x):
    assert layer.float()(x.float()).dtype == torch.float32


def test_repr_shows_the_settings(layer):
    assert "solver=Newton(tolerance=1e-12, max_steps=100" in repr(layer)
    assert "on_failure='raise'" in repr(layer)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"objective": None}, TypeError, "`objective` must be a callable"),
        ({"init": 0.0}, TypeError, "`init` must be a callable"),
        ({"init": torch.tensor(torch.nan)}, ValueError, "`init` must be finite"),
        ({"solver": "quick"}, ValueError, "`solver` must be one of"),
        ({"adjoint": "quick"}, ValueError, "`adjoint` must be one of"),
        ({"on_failure": "stop"}, ValueError, "`on_failure` must be one of"),
        ({"batch_dims": -1}, ValueError, "`batch_dims` must be >= 0"),
    ],
)
def test_bad_argument_is_refused_by_name(change, error, match):
    with pytest.raises(error, match=match):
        Declarative(**({"objective": weighted, "init": torch.zeros(())} | change))


def test_a_layer_on_the_meta_device_says_that_it_has_no_values(layer):
    with pytest.raises(ValueError, match=r"`init` must have values, got .* meta device.*to_empty"):
        layer.to("meta")(torch.zeros(6, 9, dtype=torch.float64, device="meta"))


def test_input_with_too_few_dimensions_is_refused(layer):
    with pytest.raises(ValueError, match="`batch_dims`=1"):
        layer(torch.tensor(1.0, dtype=torch.float64))


# example: what its result must satisfy
EXPECTED = {
    "learn_c": lambda r: r["learned"] < 0.15 * r["mean"] and r["learned"] < 0.15 * r["start"],
    "robust_regression": lambda r: r["robust"] < 0.15 * r["plain"] and r["outlier"] < 0.01 * r["inlier"],
    "optimal_transport": lambda r: r["gap"] < 1e-9 and r["divergence"] < 0.005,
    "constrained_least_squares": lambda r: abs(r["gain"] - 1.7) < 0.05 and r["error"] + r["total"] < 0.05,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_example_reaches_its_result_in_under_60_lines(name, capsys):
    path = EXAMPLES / f"{name}.py"
    result = runpy.run_path(str(path))["main"]()
    assert EXPECTED[name](result), result
    assert capsys.readouterr().out
    assert len(path.read_text().splitlines()) < 60


def test_a_single_problem_has_no_batch_dimensions() -> None:
    x = torch.randn(5)
    layer = Declarative(lambda x, u: (x - u).square().sum(), torch.zeros(()), batch_dims=0)
    torch.testing.assert_close(layer(x), x.mean())


@pytest.mark.parametrize("solver", ["newton", "LBFGS", "gradient_descent", "augmented_lagrangian"])
@pytest.mark.parametrize("adjoint", ["implicit", "unrolled"])
def test_texts_stand_for_solvers_and_adjoints(solver: str, adjoint: str) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    layer = Declarative(lambda x, u: (x - u[:, None]).square().sum(-1), torch.zeros(()), solver=solver, adjoint=adjoint)
    y = layer(x)
    torch.testing.assert_close(y, x.mean(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((3, 5), 0.2), rtol=1e-3, atol=1e-4)
