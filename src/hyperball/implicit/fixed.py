"""The argmin with a fixed number of steps: nothing depends on values, so it compiles, exports and maps.

Newton's steps by torch.func alone; the best of a few step lengths replaces the line search, and a row whose
objective would not decrease stays put. The derivative is that of `hyperball.implicit.adjoint`: chord steps
z - K^-1 (R(z; x) - R(z_0; x_0)) from the answer, k of them for k right derivatives.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.adjoint import Implicit, Unrolled
from hyperball.implicit.constrained import KKT, AugmentedLagrangian
from hyperball.implicit.curvature import least_allowed
from hyperball.implicit.derivatives import FEW_COLUMNS, Value, default_tolerance, dot, largest, select
from hyperball.implicit.descent import Minimum
from hyperball.implicit.linear import Dense, apply
from hyperball.implicit.problem import Problem
from hyperball.implicit.solvers import Newton, Solver
from hyperball.kernels.projection.solver import refuse_nested_forward
from hyperball.kernels.reading import export_records

STEPS = 16
BLIND: ContextVar[bool] = ContextVar("BLIND", default=False)  # set while a graph is made by make_fx
LENGTHS = (1.0, 0.25, 0.0625)

Slope = Callable[[Tensor], Tensor]


def is_traced() -> bool:
    """Whether values cannot be read: torch.compile, torch.export, or a transform of torch.func."""
    if torch.compiler.is_compiling() or export_records() or BLIND.get():
        return True
    stack = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return stack is not None and stack() is not None


def leaves_graph(on_failure: str) -> bool:
    """Whether torch.compile may break its graph here, so that a failure can be told; with fullgraph=True it refuses."""
    if on_failure == "ignore" or not torch.compiler.is_dynamo_compiling() or export_records():
        return False
    torch._dynamo.graph_break(
        msg="`on_failure` must be 'ignore' inside torch.compile(fullgraph=True): a failure cannot be told without "
        "reading values; look at `converged` of the Solution (full=True) instead"
    )
    return True


def check_fixed(
    solver: Solver | AugmentedLagrangian | None, adjoint: Any, constrained: bool, variables: int, on_failure: str
) -> Newton:
    """The Newton that runs where the number of steps is fixed; refuses by name what cannot."""
    where = "inside torch.compile(fullgraph=True) and torch.func"
    if export_records():
        raise RuntimeError(
            "`argmin` cannot be exported as it is: torch.export does not trace derivatives; export the graph that "
            "hb.nn.Declarative.traced(x) makes"
        )
    refuse_nested_forward("argmin")
    if constrained:
        raise RuntimeError(f"`equality` and `inequality` are not available {where}: the active set depends on the data")
    if solver is None and variables <= checks.DENSE_LIMIT:
        solver = Newton()
    if not isinstance(solver, Newton):
        kind = "LBFGS (the default beyond 64 variables)" if solver is None else type(solver).__name__
        raise RuntimeError(f"`solver` must be Newton(steps=…) {where}, got {kind}: its steps depend on the data")
    if isinstance(adjoint, Unrolled):
        raise RuntimeError(f"`adjoint` must be Implicit() {where}, got Unrolled")
    if adjoint.linear is not None and not isinstance(adjoint.linear, Dense):
        raise RuntimeError(f"`adjoint` must be Implicit() or Implicit(Dense()) {where}, got {adjoint.linear}")
    if on_failure != "ignore" and is_traced():
        raise RuntimeError(
            f"`on_failure` must be 'ignore' {where}, got {on_failure!r}: a failure cannot be told without reading "
            "values; look at `converged` of the Solution (full=True) instead"
        )
    return solver


def slope_of(value_of: Value) -> Slope:
    """u -> grad f(u), row by row."""
    return torch.func.grad(lambda u: value_of(u).sum())


def slope_and_hessian(slope: Slope, u: Tensor) -> tuple[Tensor, Tensor]:
    """grad f(u), and [N, n, n] of second derivatives, symmetrized."""
    n = u.shape[1]
    found: Any = torch.func.vjp(slope, u)
    gradient, pull = found
    units = torch.eye(n, dtype=u.dtype, device=u.device)[:, None, :].expand(n, *u.shape)
    if n <= FEW_COLUMNS:
        matrix = torch.stack([pull(units[i])[0] for i in range(n)], 1)
    else:
        matrix = torch.func.vmap(lambda unit: pull(unit)[0], out_dims=1)(units)
    return gradient, (matrix + matrix.mT) / 2


def spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(eigenvalues, eigenvectors) of each matrix; one variable needs no linear algebra, which ONNX has not."""
    finite = matrix.isfinite().all(-1).all(-1)
    if matrix.shape[-1] == 1:
        values = select(finite, matrix[..., 0], torch.ones_like(matrix[..., 0]))
        return values, torch.ones_like(matrix)
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(select(finite, matrix, eye.expand_as(matrix)))
    return values, vectors


def combined(vectors: Tensor, gains: Tensor, v: Tensor) -> Tensor:
    """V diag(gains) V^T v."""
    return apply(vectors, gains * apply(vectors.mT, v))


def downhill(values: Tensor, vectors: Tensor, gradient: Tensor) -> Tensor:
    """-|H|^-1 g, with |eigenvalues| no smaller than rounding leaves them."""
    floor = torch.finfo(values.dtype).eps ** 0.5 * largest(values)[:, None]
    size = torch.maximum(values.abs(), floor).clamp_min(torch.finfo(values.dtype).tiny)
    return -combined(vectors, 1 / size, gradient)


class Here(NamedTuple):
    """A point with the direction of its Newton step."""

    value: Tensor
    gradient: Tensor
    values: Tensor  # of the second derivative's spectrum
    vectors: Tensor
    way: Tensor

    @staticmethod
    def at(value_of: Value, slope: Slope, u: Tensor) -> "Here":
        """f, its derivatives and -|H|^-1 g at u, without history."""
        gradient, matrix = (item.detach() for item in slope_and_hessian(slope, u))
        values, vectors = spectrum(matrix)
        return Here(value_of(u).detach(), gradient, values, vectors, downhill(values, vectors, gradient))

    def is_flat(self, u: Tensor) -> Tensor:
        """Rows whose promised decrease, or step, is rounding."""
        eps = torch.finfo(u.dtype).eps
        promised = dot(self.gradient, self.way).abs() <= 16 * eps * self.value.abs()
        return promised | (largest(self.way) <= 16 * eps * largest(u))


def newton_update(value_of: Value, here: Here, u: Tensor, reach: Tensor) -> tuple[Tensor, Tensor]:
    """u after the best of `LENGTHS` times reach, and the next reach: 4 times that length, or 1/64 where none is good.

    Where f is flat to rounding its values tell nothing, and the full step is taken.
    """
    best, lowest, after = u, here.value, reach / 64
    for length in LENGTHS:
        trial = u + (length * reach)[:, None] * here.way
        value = value_of(trial).detach()
        better = value < lowest
        best, lowest = select(better, trial, best), torch.where(better, value, lowest)
        after = torch.where(better, (4 * length * reach).clamp_max(1.0), after)
    flat = here.is_flat(u) & here.way.isfinite().all(-1)
    return select(flat, u + here.way, best), torch.where(flat, torch.ones_like(after), after)


def solve_fixed(problem: Problem, start: Tensor, solver: Newton) -> tuple[KKT, Here]:
    """The answer after `solver.steps` steps, without derivative, and what is known there."""
    value_of = problem.detached().value
    slope = slope_of(value_of)
    steps, u = solver.steps or STEPS, start
    here = Here.at(value_of, slope, u)
    first, reach = largest(here.gradient), torch.ones_like(here.value)
    for _ in range(steps):
        u, reach = newton_update(value_of, here, u, reach)
        here = Here.at(value_of, slope, u)
    residual = largest(here.gradient)
    small = residual <= (solver.tolerance or default_tolerance(u.dtype)) * first
    least = here.values[:, 0]
    converged = residual.isfinite() & (small | here.is_flat(u)) & (least >= least_allowed(here.values))
    count = torch.full_like(residual, steps, dtype=torch.int64)
    minimum = Minimum(u, converged, count, residual, least)
    return KKT(minimum, u, start.new_zeros(start.shape[0], 0, dtype=torch.bool)), here


class Limit(torch.autograd.Function):
    """Zero, with a graph to R that allows `left` further derivatives and refuses the next."""

    generate_vmap_rule = True

    @staticmethod
    def forward(residual: Tensor, left: int) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.left = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        checks.derivatives_left(ctx.left)
        return Limit.apply(ctx.saved_tensors[0], ctx.left - 1), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        checks.derivatives_left(ctx.left)
        return 0 * tangents[0]


class Chord(torch.autograd.Function):
    """-K^-1 (R - R.detach()) with K = V diag(1/gains) V^T: zero, with the derivative -K^-1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(residual: Tensor, vectors: Tensor, gains: Tensor, order: int) -> Tensor:
        return torch.zeros_like(residual)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.order = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        residual, vectors, gains = ctx.saved_tensors
        return Limit.apply(residual, ctx.order - 1) - combined(vectors, gains, grads[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        residual, vectors, gains = ctx.saved_tensors
        return Limit.apply(residual, ctx.order - 1) - combined(vectors, gains, tangents[0])


def attach_fixed(problem: Problem, u: Tensor, here: Here, adjoint: Implicit) -> Tensor:
    """u with `adjoint.order` derivatives; a singular second derivative has its pseudo-inverse."""
    values, vectors = here.values, here.vectors
    kept = values.abs() > 4 * values.shape[-1] * torch.finfo(values.dtype).eps * largest(values)[:, None]
    gains = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    slope = slope_of(problem.value)
    for _ in range(adjoint.order):
        residual = slope(u)
        if torch.compiler.is_compiling():  # a graph takes no autograd.Function with forward mode
            u = u - combined(vectors, gains, residual - residual.detach())
        else:
            u = u + Chord.apply(residual, vectors, gains, adjoint.order)
    return u
