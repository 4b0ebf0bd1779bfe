"""argmin with a fixed number of steps: compiled, exported and mapped like any other layer."""

import pytest
import torch
from implicit_problems import CASES, D
from torch import Tensor, nn

from hyperball.implicit import (
    LBFGS,
    BracketedScalar,
    ConjugateGradient,
    ConvergenceError,
    GradientDescent,
    Implicit,
    Newton,
    Unrolled,
    argmin,
)
from hyperball.nn.declarative import Declarative

QUIET = {"on_failure": "ignore"}


class PseudoHuber(nn.Module):
    """sum_i c^2 sqrt(1 + (x_i - u)^2 / c^2) with a parameter log c."""

    def __init__(self) -> None:
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(-0.4, dtype=D))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        c = self.log_c.exp()
        return (c**2 * torch.sqrt(1 + ((x - u[..., None]) / c) ** 2)).sum(-1)


def bowl(x: Tensor, u: Tensor) -> Tensor:
    return ((u - x).square() + 0.1 * u.pow(4) + 0.05 * u * u.roll(1, -1)).sum(-1)


def gradients(function, leaves: list[Tensor]) -> list[Tensor]:
    y = function()
    weight = torch.linspace(0.5, 1.5, y.numel(), dtype=D).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((weight * y.square()).sum(), leaves)]


@pytest.mark.parametrize("name", ["robust mean", "ridge", "logistic", "quartic", "valley", "one problem"])
def test_fixed_steps_equal_steps_to_convergence_in_value_and_gradient(name):
    case = CASES[name]
    x = tuple(part.requires_grad_() for part in case.make())
    found = [
        gradients(lambda solver=solver: argmin(case.objective, x, case.init, solver=solver), list(x))
        for solver in (Newton(1e-13), Newton(1e-11, steps=12))
    ]
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order, derivative", [(1, torch.autograd.gradcheck), (2, torch.autograd.gradgradcheck)])
def test_derivatives_of_fixed_steps_pass_gradcheck(order, derivative):
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    settings = {"solver": Newton(steps=12), "adjoint": Implicit(order=order)}
    assert derivative(lambda x: argmin(bowl, x, torch.zeros(3, 4, dtype=D), **settings), x)


def test_one_derivative_too_many_is_refused_with_fixed_steps():
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    y = argmin(bowl, x, torch.zeros(3, 4, dtype=D), solver=Newton(steps=12))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"Implicit\(order=2\)"):
        torch.autograd.grad(slope.sum(), x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_layer_compiles_without_graph_breaks_with_the_same_gradients(backend):
    layer = Declarative(PseudoHuber(), torch.zeros((), dtype=D), solver=Newton(steps=2), **QUIET)
    x = torch.randn(5, 9, dtype=D, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    leaves = [x, layer.objective.log_c]
    for got, wanted in zip(gradients(lambda: compiled(x), leaves), gradients(lambda: layer(x), leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_several_variables_compile_without_graph_breaks():
    def layer(x: Tensor) -> Tensor:
        return 2 * argmin(bowl, 3 * x, torch.zeros_like(x), solver=Newton(steps=1), **QUIET)

    x = torch.randn(4, 5, dtype=D, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(gradients(lambda: compiled(x), [x]), gradients(lambda: layer(x), [x]), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_traced_layer_exports_with_a_free_batch_size():
    layer = Declarative(PseudoHuber(), torch.zeros((), dtype=D), solver=Newton(steps=5))
    example, x = torch.randn(4, 9, dtype=D), torch.randn(7, 9, dtype=D)
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(layer.traced(example), (example,), dynamic_shapes=shapes)
    exact = Declarative(layer.objective, torch.zeros((), dtype=D), solver=Newton(1e-13))
    torch.testing.assert_close(program.module()(x), exact(x).detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.slow
def test_traced_layer_of_one_variable_runs_in_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer = Declarative(PseudoHuber().float(), torch.zeros(()), solver=Newton(steps=6))
    x = torch.randn(4, 9)
    torch.onnx.export(layer.traced(x), (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(tmp_path / "layer.onnx"))
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), layer(x).detach(), rtol=1e-4, atol=1e-5)


def one(x: Tensor) -> Tensor:
    return argmin(bowl, x, torch.zeros(5, dtype=D), **QUIET)


def test_vmap_equals_a_batch():
    x = torch.randn(6, 5, dtype=D)
    torch.testing.assert_close(torch.func.vmap(one)(x), argmin(bowl, x, torch.zeros_like(x)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_of_torch_func_equal_autograds(transform):
    x = torch.randn(5, dtype=D)
    wanted = torch.autograd.functional.jacobian(lambda x: argmin(bowl, x, torch.zeros(5, dtype=D)), x)
    torch.testing.assert_close(transform(one)(x), wanted, rtol=1e-8, atol=1e-8)
    several = torch.stack((x, 2 * x))
    torch.testing.assert_close(torch.func.vmap(transform(one))(several)[0], wanted, rtol=1e-8, atol=1e-8)


def test_second_derivative_of_torch_func_is_right_or_refused():
    def total(x: Tensor, order: int) -> Tensor:
        return argmin(bowl, x, torch.zeros(5, dtype=D), adjoint=Implicit(order=order), **QUIET).pow(3).sum()

    x = torch.randn(5, dtype=D)
    wanted = torch.autograd.functional.hessian(
        lambda x: argmin(bowl, x, torch.zeros(5, dtype=D), adjoint=Implicit(order=2)).pow(3).sum(), x
    )
    func = torch.func
    for outer, inner in ((func.jacrev, func.jacrev), (func.jacrev, func.jacfwd), (func.jacfwd, func.grad)):
        torch.testing.assert_close(outer(inner(lambda x: total(x, 2)))(x), wanted, rtol=1e-7, atol=1e-7)
        with pytest.raises(RuntimeError, match=r"Implicit\(order=2\)"):
            outer(inner(lambda x: total(x, 1)))(x)
    with pytest.raises(RuntimeError, match="`argmin` has no forward-mode derivative of a forward-mode"):
        func.jacfwd(func.jacfwd(lambda x: total(x, 2)))(x)


def test_status_of_fixed_steps_is_honest():
    x = torch.randn(4, 5, dtype=D) * torch.logspace(0, 6, 4, dtype=D)[:, None]
    hurried = argmin(bowl, x, torch.zeros_like(x), solver=Newton(steps=2), full=True, **QUIET)
    patient = argmin(bowl, x, torch.zeros_like(x), solver=Newton(steps=40), full=True)
    assert hurried.converged.tolist()[-1] is False
    assert patient.converged.all()
    assert (hurried.steps == 2).all()
    with pytest.raises(ConvergenceError, match="did not converge"):
        argmin(bowl, x, torch.zeros_like(x), solver=Newton(steps=2))


def test_a_nan_row_is_nan_alone_with_fixed_steps():
    x = torch.randn(4, 5, dtype=D)
    x[2, 1] = torch.nan
    y = argmin(bowl, x, torch.zeros_like(x), solver=Newton(steps=8), full=True, **QUIET)
    assert y.value.isnan().any(-1).tolist() == y.converged.logical_not().tolist() == [False, False, True, False]


REFUSED = [
    ({"on_failure": "raise"}, "`on_failure` must be 'ignore'.*`converged`"),
    ({"on_failure": "warn"}, "`on_failure` must be 'ignore'"),
    ({"solver": LBFGS()}, r"`solver` must be Newton\(steps=…\).*got LBFGS"),
    ({"solver": GradientDescent()}, "`solver` must be Newton.*got GradientDescent"),
    ({"solver": BracketedScalar(-1.0, 1.0)}, "`solver` must be Newton.*got BracketedScalar"),
    ({"adjoint": Unrolled()}, r"`adjoint` must be Implicit\(\).*got Unrolled"),
    ({"adjoint": Implicit(ConjugateGradient())}, r"`adjoint` must be Implicit\(\) or Implicit\(Dense\(\)\)"),
    ({"equality": lambda x, u: u.sum(-1)}, "`equality` and `inequality` are not available"),
]


@pytest.mark.parametrize("change, match", REFUSED)
def test_what_depends_on_values_is_refused_by_name_inside_a_transform(change, match):
    def solve(x: Tensor) -> Tensor:
        return argmin(bowl, x, torch.zeros(5, dtype=D), **(QUIET | change))

    with pytest.raises(RuntimeError, match=match):
        torch.func.vmap(solve)(torch.randn(3, 5, dtype=D))


def test_many_variables_need_a_solver_by_name_inside_a_transform():
    with pytest.raises(RuntimeError, match=r"got LBFGS .the default beyond 64 variables"):
        torch.func.vmap(lambda x: argmin(bowl, x, torch.zeros(70, dtype=D), **QUIET))(torch.randn(2, 70, dtype=D))


def test_export_without_tracing_is_refused_by_name():
    layer = Declarative(bowl, torch.zeros(5, dtype=D), **QUIET)
    with pytest.raises(RuntimeError, match=r"torch.export does not trace derivatives.*Declarative\.traced"):
        torch.export.export(layer, (torch.randn(3, 5, dtype=D),), strict=False)


def test_a_compiled_graph_that_needs_a_refused_setting_names_it():
    compiled = torch.compile(lambda x: argmin(bowl, x, torch.zeros_like(x)), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="on_failure"):
        compiled(torch.randn(3, 5, dtype=D))
