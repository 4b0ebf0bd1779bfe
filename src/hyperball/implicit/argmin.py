"""The entry point: check, solve, report, attach the derivative."""

from contextlib import nullcontext
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.adjoint import Implicit, Unrolled, attach
from hyperball.implicit.bracketed import BracketedScalar
from hyperball.implicit.constrained import KKT, AugmentedLagrangian, attached_steps
from hyperball.implicit.curvature import least_curvature
from hyperball.implicit.descent import Minimum
from hyperball.implicit.fixed import attach_fixed, check_fixed, is_traced, leaves_graph, solve_fixed
from hyperball.implicit.problem import Function, Inputs, Problem, pose, result_dtype, tensors_of
from hyperball.implicit.solution import ON_FAILURE, OnFailure, Solution, first_of, report
from hyperball.implicit.solvers import LBFGS, GradientDescent, Newton, Solver

SOLVERS: dict[str, Any] = {
    "newton": Newton,
    "lbfgs": LBFGS,
    "gradient_descent": GradientDescent,
    "augmented_lagrangian": AugmentedLagrangian,
}
ADJOINTS: dict[str, Any] = {"implicit": Implicit, "unrolled": Unrolled}


@overload
def argmin(
    objective: Function,
    inputs: Inputs,
    init: Tensor,
    *,
    equality: Function | None = ...,
    inequality: Function | None = ...,
    solver: Solver | AugmentedLagrangian | str | None = ...,
    adjoint: Implicit | Unrolled | str | None = ...,
    on_failure: OnFailure = ...,
    full: Literal[False] = ...,
) -> Tensor: ...


@overload
def argmin(
    objective: Function,
    inputs: Inputs,
    init: Tensor,
    *,
    equality: Function | None = ...,
    inequality: Function | None = ...,
    solver: Solver | AugmentedLagrangian | str | None = ...,
    adjoint: Implicit | Unrolled | str | None = ...,
    on_failure: OnFailure = ...,
    full: Literal[True],
) -> Solution: ...


def argmin(
    objective: Function,
    inputs: Inputs,
    init: Tensor,
    *,
    equality: Function | None = None,
    inequality: Function | None = None,
    solver: Solver | AugmentedLagrangian | str | None = None,
    adjoint: Implicit | Unrolled | str | None = None,
    on_failure: OnFailure = "raise",
    full: bool = False,
) -> Tensor | Solution:
    """y(x) = argmin_u f(x, u), subject to h(x, u) = 0 and G(x, u) <= 0, as a differentiable function of x.

    Args:
        objective: f(x, u) with x structured as `inputs` and u shaped as `init`, in plain torch. It returns
            one value per element: its shape is the batch shape and begins the shape of u, `()` for a single
            problem. An element's value depends on that element of u alone. Parameters inside f get gradients.
        inputs: x, a tensor or a tuple, list or dict of tensors; `()` where there are none.
        init: where the search starts; no gradient flows to it.
        equality: h(x, u), [*batch, m] or [*batch].
        inequality: G(x, u), the same.
        solver: Newton up to 64 variables per element and LBFGS beyond, unless given; with constraints it
            becomes the inner solver of an AugmentedLagrangian. A text ("newton", "lbfgs", "gradient_descent",
            "augmented_lagrangian") stands for the solver with its defaults.
        adjoint: Implicit() unless given; "implicit" and "unrolled" stand for those.
        on_failure: what to do about elements that do not converge: "raise", "warn" or "ignore".
        full: return the Solution instead of its value.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0, 9.0]], requires_grad=True)
    >>> argmin(lambda x, u: (x - u[:, None]).pow(2).sum(-1), x, torch.zeros(1)).item()
    4.0
    """
    chosen: Any = by_name("solver", solver, SOLVERS)
    derivative: Any = by_name("adjoint", adjoint, ADJOINTS)
    check_settings(objective, equality, inequality, chosen, derivative, on_failure)
    look = not is_traced() or leaves_graph(on_failure)
    checks.start(init, look)
    checks.tensors(tensors_of(inputs), init)
    derivative, dtype = derivative or Implicit(), result_dtype(inputs, init)
    kind = init.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        if not look or (isinstance(chosen, Newton) and chosen.steps):
            problem, start = pose(objective, inputs, init, equality, inequality, look)
            kkt, u = fixed(problem, start, chosen, derivative, on_failure)
        else:
            problem, kkt, u = searched(objective, inputs, init, equality, inequality, chosen, derivative, on_failure)
        return finish(problem, kkt, u, dtype) if full else shaped(problem, kkt, u, dtype)


def searched(
    objective: Function,
    inputs: Inputs,
    init: Tensor,
    equality: Function | None,
    inequality: Function | None,
    solver: Solver | AugmentedLagrangian | None,
    adjoint: Implicit | Unrolled,
    on_failure: OnFailure,
) -> tuple[Problem, KKT, Tensor]:
    """The problem, the answer after as many steps as it needs, and its value with derivative."""
    wanted = torch.is_grad_enabled()
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        problem, start = pose(objective, inputs, init, equality, inequality)
        wanted = wanted and problem.requires_grad(start)
        kkt = find(problem, start, choose(problem, solver), adjoint if wanted else None)
        failures(problem, start, kkt.minimum, on_failure)
        u = kkt.minimum.u
        if wanted and isinstance(adjoint, Implicit):
            u = attach(problem, kkt, adjoint, on_failure)
    return problem, kkt, u


def fixed(
    problem: Problem,
    start: Tensor,
    solver: Solver | AugmentedLagrangian | None,
    adjoint: Implicit | Unrolled,
    on_failure: OnFailure,
) -> tuple[KKT, Tensor]:
    """The answer after a fixed number of steps, and its value with derivative."""
    newton = check_fixed(solver, adjoint, problem.constrained, problem.variables, on_failure)
    assert isinstance(adjoint, Implicit)
    kkt, here = solve_fixed(problem, start, newton)
    if not is_traced():
        failures(problem, start, kkt.minimum, on_failure)
    wanted = torch.is_grad_enabled()
    return kkt, attach_fixed(problem, kkt.z, here, adjoint) if wanted else kkt.z


def by_name(argument: str, value: Any, table: dict[str, Any]) -> Any:
    """What a text stands for, with its defaults; anything else as it is."""
    if not isinstance(value, str):
        return value
    if value.lower() not in table:
        texts = ", ".join(repr(key) for key in table)
        calls = ", ".join(f"{kind.__name__}()" for kind in table.values())
        raise ValueError(f"`{argument}` must be one of {texts}, or of {calls} from hb.implicit, got {value!r}")
    return table[value.lower()]()


def check_settings(
    objective: Any,
    equality: Any,
    inequality: Any,
    solver: Any,
    adjoint: Any,
    on_failure: Any,
) -> None:
    """Everything that can be refused before there is data."""
    checks.function("objective", objective)
    checks.function("equality", equality, optional=True)
    checks.function("inequality", inequality, optional=True)
    if solver is not None:
        checks.instance("solver", solver, (Solver, AugmentedLagrangian), (*SOLVERS.values(), BracketedScalar))
    if adjoint is not None:
        checks.instance("adjoint", adjoint, (Implicit, Unrolled))
    checks.choice("on_failure", on_failure, ON_FAILURE)


def choose(problem: Problem, solver: Solver | AugmentedLagrangian | None) -> Solver | AugmentedLagrangian:
    """The solver that will run: by size where none is given, wrapped where there are constraints."""
    if solver is None:
        solver = Newton() if problem.variables <= checks.DENSE_LIMIT else LBFGS()
    if problem.constrained and isinstance(solver, Solver):
        return AugmentedLagrangian(solver)
    return solver.inner if isinstance(solver, AugmentedLagrangian) and not problem.constrained else solver


def find(
    problem: Problem, start: Tensor, solver: Solver | AugmentedLagrangian, adjoint: Implicit | Unrolled | None
) -> KKT:
    """Solve; the iterates keep their graph under Unrolled."""
    unrolled = adjoint if isinstance(adjoint, Unrolled) else None
    if isinstance(solver, AugmentedLagrangian):
        kkt = solver.solve(problem.detached(), start)
        if unrolled:
            z = attached_steps(problem, kkt, max(unrolled.extra, 2))
            kkt = kkt._replace(minimum=kkt.minimum._replace(u=z[:, : problem.variables]))
        return kkt
    if unrolled:
        minimum = solver.minimize(problem.value, start, attach=True, extra=unrolled.extra)
    else:
        minimum = solver.minimize(problem.detached().value, start)
    least, convex = least_curvature(problem.detached().value, minimum.u.detach())
    minimum = minimum._replace(converged=minimum.converged & convex, curvature=least)
    return KKT(minimum, minimum.u.detach(), start.new_zeros(start.shape[0], 0, dtype=torch.bool))


def failures(problem: Problem, start: Tensor, minimum: Minimum, on_failure: OnFailure) -> None:
    """Report the elements that did not converge, and why."""
    bad = ~minimum.converged
    if not bad.any():
        return
    outside = ~problem.detached().value(start).detach().isfinite()
    saddle = bad & saddles(minimum)
    if outside.any():
        why = f"`objective` is not finite at `init` for {first_of(outside)} (NaN in `inputs`?)"
    elif minimum.curvature is not None and saddle.any():
        why = (
            f"`argmin` ended at a maximum or saddle of `objective` for {first_of(saddle)}: curvature down to "
            f"{minimum.curvature[saddle].min():.3g}; start from another `init`"
        )
    else:
        why = (
            f"`argmin` did not converge for {first_of(bad)}: residual up to "
            f"{minimum.residual[bad].max():.3g} after up to {int(minimum.steps[bad].max())} steps; try "
            "another `init` or `solver`, more `max_steps` or a larger `tolerance`"
        )
    report(why, on_failure)


def saddles(minimum: Minimum) -> Tensor:
    """Rows that curve down where they stopped, as far as that was looked at."""
    if minimum.curvature is None:
        return torch.zeros_like(minimum.converged)
    return minimum.curvature < 0


def shaped(problem: Problem, kkt: KKT, u: Tensor, dtype: torch.dtype) -> Tensor:
    """u shaped as `init`, NaN where the objective could not be evaluated at all."""
    lost = ~kkt.minimum.residual.isfinite()
    return torch.where(lost[:, None], float("nan"), u).reshape(problem.shape).to(dtype)


def finish(problem: Problem, kkt: KKT, u: Tensor, dtype: torch.dtype) -> Solution:
    """The Solution in the caller's shapes."""
    inequalities = kkt.active.shape[1]
    n, end = problem.variables, kkt.z.shape[1] - inequalities
    shape = problem.elements
    return Solution(
        shaped(problem, kkt, u, dtype),
        kkt.minimum.converged.reshape(shape),
        kkt.minimum.steps.reshape(shape),
        kkt.minimum.residual.reshape(shape),
        kkt.z[:, n:end].reshape(*shape, end - n) if problem.equality else None,
        kkt.z[:, end:].reshape(*shape, inequalities) if problem.inequality else None,
        None if kkt.minimum.curvature is None else kkt.minimum.curvature.reshape(shape),
    )
