"""The problem min_u f(x, u) subject to h(x, u) = 0 and G(x, u) <= 0, with u laid out as rows.

The batch shape is the shape of f's value and must begin the shape of u; everything after it is one
element's variables. Solvers see u as [N, n]: one row per element.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from hyperball.implicit.derivatives import gradient

SIZES = re.compile(r"size of tensor|must match|shape|cannot be multiplied|doesn't match")

Inputs = Tensor | tuple[Tensor, ...] | list[Tensor] | dict[str, Tensor]
Function = Callable[[Any, Tensor], Tensor]  # (x, u) -> Tensor


@dataclass(frozen=True)
class Problem:
    """One batch of problems; `inputs` are the x handed to the three functions."""

    objective: Function
    inputs: Inputs
    equality: Function | None
    inequality: Function | None
    shape: torch.Size
    batch: int  # leading dimensions of `shape` that count elements

    @property
    def elements(self) -> torch.Size:
        """The batch shape."""
        return self.shape[: self.batch]

    @property
    def constrained(self) -> bool:
        """Whether there is any constraint."""
        return self.equality is not None or self.inequality is not None

    @property
    def variables(self) -> int:
        """Numbers in one element's u."""
        return math.prod(self.shape[self.batch :])

    def rows(self, u: Tensor) -> Tensor:
        """[*batch, *event] -> [N, n]."""
        return u.reshape(math.prod(self.elements), self.variables)

    def value(self, u: Tensor) -> Tensor:
        """f(x, u) per row."""
        value = self.objective(self.inputs, u.reshape(self.shape))
        return value.reshape(u.shape[0]).to(u.dtype)

    def equalities(self, u: Tensor) -> Tensor:
        """h(x, u) as [N, m]."""
        return self._constraint("equality", self.equality, u)

    def inequalities(self, u: Tensor) -> Tensor:
        """G(x, u) as [N, m]."""
        return self._constraint("inequality", self.inequality, u)

    def _constraint(self, name: str, function: Function | None, u: Tensor) -> Tensor:
        if function is None:
            return u.new_zeros(u.shape[0], 0)
        value = function(self.inputs, u.reshape(self.shape))
        if not isinstance(value, Tensor) or value.shape[: self.batch] != self.elements:
            raise ValueError(
                f"`{name}` must return a Tensor whose shape begins with the batch shape "
                f"{tuple(self.elements)}, got {describe(value)}"
            )
        return value.reshape(u.shape[0], math.prod(value.shape[self.batch :])).to(u.dtype)

    def detached(self) -> "Problem":
        """The same problem whose inputs carry no gradient."""
        return replace(self, inputs=map_tensors(self.inputs, torch.Tensor.detach))

    def requires_grad(self, u: Tensor) -> bool:
        """Whether inputs, or parameters inside the functions, want a gradient or carry a tangent."""
        parts = [part(u.detach()) for part in (self.value, self.equalities, self.inequalities)]
        return any(p.requires_grad or unpack_dual(p).tangent is not None for p in parts)


def describe(value: Any) -> str:
    """A shape, or a type where there is no shape."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def tensors_of(inputs: Any) -> list[Any]:
    """The leaves of `inputs`."""
    if isinstance(inputs, dict):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]


def map_tensors(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    """`inputs` with function applied to every tensor, in the same structure."""
    if isinstance(inputs, dict):
        return {name: function(x) for name, x in inputs.items()}
    if isinstance(inputs, list):
        return [function(x) for x in inputs]
    if isinstance(inputs, tuple):
        return tuple(function(x) for x in inputs)
    return function(inputs)


def result_dtype(inputs: Inputs, init: Tensor) -> torch.dtype:
    """torch's promotion of `init` and the floating-point inputs."""
    dtype = init.dtype
    for x in tensors_of(inputs):
        dtype = torch.promote_types(dtype, x.dtype) if x.is_floating_point() and x.dim() else dtype
    return dtype


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def pose(
    objective: Function,
    inputs: Inputs,
    init: Tensor,
    equality: Function | None,
    inequality: Function | None,
    look: bool = True,
) -> tuple[Problem, Tensor]:
    """The checked problem and its start [N, n], both in the working precision; `look`: whether values can be read."""
    dtype = working_dtype(result_dtype(inputs, init))

    def working(x: Tensor) -> Tensor:
        x = x.clone() if look and x.is_inference() else x
        return x.to(dtype) if x.is_floating_point() else x

    inputs, start = map_tensors(inputs, working), working(init).detach()
    value = objective(inputs, start) if not look else first_value(objective, inputs, start)
    if not isinstance(value, Tensor) or value.shape != init.shape[: value.dim()]:
        raise ValueError(
            "`objective` must return one value per element: a Tensor whose shape begins the shape "
            f"{tuple(init.shape)} of `init`, got {describe(value)}"
        )
    if not value.is_floating_point():
        raise TypeError(f"`objective` must return real floating-point values, got {value.dtype}")
    problem = Problem(objective, inputs, equality, inequality, init.shape, value.dim())
    if not problem.variables:
        raise ValueError(f"`init` must have at least one variable per element, got shape {tuple(init.shape)}")
    if look:
        check_elements(problem, problem.rows(start))
    return problem, problem.rows(start)


def first_value(objective: Function, inputs: Inputs, start: Tensor) -> Any:
    """objective(inputs, start), whose complaint about sizes is about `init`."""
    try:
        return objective(inputs, start)
    except RuntimeError as error:
        if not SIZES.search(str(error)):
            raise
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors_of(inputs))
        raise ValueError(
            f"`init` must be a start for the whole batch that `objective` can take, got shape {tuple(start.shape)} "
            f"beside inputs of shape {shapes}: {error}"
        ) from error


def check_elements(problem: Problem, start: Tensor) -> None:
    """Refuse an objective that ignores u, or whose elements read each other's u.

    Values weighted 1, 2, 1, 2, ... must give gradients weighted the same; the weights are powers of two,
    so that independent elements agree exactly.
    """
    weight = (1 + torch.arange(start.shape[0], device=start.device) % 2).to(start.dtype)
    with torch.enable_grad():
        # Beside the start: at a minimizer gradients are rounding, which no weight scales.
        variable = (start + 1e-3 * (1 + start.abs())).detach().requires_grad_()
        value = problem.detached().value(variable)
        plain = None
        if value.requires_grad:
            (plain,) = torch.autograd.grad(value.sum(), variable, retain_graph=True, allow_unused=True)
        if plain is None:
            raise ValueError("`objective` must depend on `u` by differentiable operations, got a constant")
        weighted = gradient(value * weight, variable, attach=False)
    expected = (plain * weight[:, None]).nan_to_num()
    gap = (weighted.nan_to_num() - expected).abs()
    if start.numel() and gap.max() > 0.01 * expected.abs().max():
        raise ValueError(
            "`objective` must give each element a value that depends on that element of `u` alone, got one "
            "that mixes elements (a mean, norm or batch normalization across the batch?)"
        )
