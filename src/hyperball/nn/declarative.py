"""A layer defined by an objective: y(x) = argmin_u f(x, u)."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyperball.implicit import AugmentedLagrangian, Implicit, Solution, Unrolled, argmin, checks
from hyperball.implicit.argmin import ADJOINTS, SOLVERS, by_name, check_settings
from hyperball.implicit.fixed import BLIND, STEPS
from hyperball.implicit.problem import Function, tensors_of
from hyperball.implicit.solution import OnFailure
from hyperball.implicit.solvers import Newton, Solver


class Declarative(nn.Module):
    """y(x) = argmin_u f(x, u) subject to h(x, u) = 0 and G(x, u) <= 0; see `hb.implicit.argmin`.

    Args:
        objective: f(x, u); a module's parameters are this module's. x is the input, or the tuple of them.
        init: the start of one element as a tensor, repeated over the first `batch_dims` dimensions of the
            first input and kept as a buffer; or a callable that makes the whole start from x.
        equality, inequality, solver, adjoint, on_failure: as for `argmin`.
        batch_dims: leading dimensions of the input that count elements; for a tensor `init` only.

    >>> import torch
    >>> mean = Declarative(lambda x, u: (x - u[:, None]).pow(2).sum(-1), torch.zeros(()))
    >>> mean(torch.tensor([[1.0, 2.0, 9.0]])).item()
    4.0
    """

    init: Tensor | Callable[[Any], Tensor]

    def __init__(
        self,
        objective: Function,
        init: Tensor | Callable[[Any], Tensor],
        *,
        equality: Function | None = None,
        inequality: Function | None = None,
        solver: Solver | AugmentedLagrangian | str | None = None,
        adjoint: Implicit | Unrolled | str | None = None,
        on_failure: OnFailure = "raise",
        batch_dims: int = 1,
    ) -> None:
        super().__init__()
        solver, adjoint = by_name("solver", solver, SOLVERS), by_name("adjoint", adjoint, ADJOINTS)
        check_settings(objective, equality, inequality, solver, adjoint, on_failure)
        checks.count("batch_dims", batch_dims, least=0)
        self.objective, self.equality, self.inequality = objective, equality, inequality
        self.solver, self.adjoint, self.on_failure, self.batch_dims = solver, adjoint, on_failure, batch_dims
        if isinstance(init, Tensor):
            checks.start(init)
            self.register_buffer("init", init.detach().clone())
        else:
            checks.function("init", init)
            self.init = init

    def forward(self, *inputs: Any) -> Tensor:
        return self.solve(*inputs).value

    def solve(self, *inputs: Any) -> Solution:
        """The whole Solution: value, converged, steps and residual of each element."""
        x = inputs[0] if len(inputs) == 1 else inputs
        return argmin(
            self.objective,
            x,
            self.start(x),
            equality=self.equality,
            inequality=self.inequality,
            solver=self.solver,
            adjoint=self.adjoint,
            on_failure=self.on_failure,
            full=True,
        )

    def traced(self, *inputs: Tensor) -> nn.Module:
        """This layer as a graph of plain operations on inputs of any batch size, for torch.export and ONNX.

        The solver must be Newton and the number of its steps is fixed. The graph has the parameters' present values
        and no gradient.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        quiet = copy.copy(self)
        quiet.on_failure = "ignore"
        if not isinstance(self.solver, Newton | None):
            raise ValueError(f"`solver` must be Newton(steps=…) for a graph, got {self.solver}")
        if self.solver is None or self.solver.steps is None:
            quiet.solver = Newton(steps=STEPS)
        blind = BLIND.set(True)
        try:
            with torch.no_grad():
                return make_fx(lambda *x: quiet(*x), tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
        finally:
            BLIND.reset(blind)

    def start(self, x: Any) -> Tensor:
        """Where the search begins, shaped as the result."""
        if not isinstance(self.init, Tensor):
            return self.init(x)
        tensors = tensors_of(x)
        checks.tensors(tensors, self.init)
        if self.batch_dims and (not tensors or tensors[0].dim() < self.batch_dims):
            raise ValueError(f"the first input must have at least `batch_dims`={self.batch_dims} dimensions")
        batch = tensors[0].shape[: self.batch_dims] if self.batch_dims else ()
        return self.init.expand((*batch, *self.init.shape))

    def extra_repr(self) -> str:
        return f"solver={self.solver}, adjoint={self.adjoint}, on_failure={self.on_failure!r}"
