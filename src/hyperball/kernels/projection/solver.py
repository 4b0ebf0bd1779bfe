"""The threshold of a simplex or L1 projection, without sorting: theta with sum_i max(c_i + theta, 0) = 1.

Rows are [..., n], contiguous, with maximum 0. The mass on the left is convex and increasing in theta, so Newton's
method from the right falls monotonically onto the answer; bisection ends what it leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyperball.kernels.reading import can_look as can_look
from hyperball.kernels.reading import export_records, row_sum

# Newton rounds, then bisection rounds. With h the mass above 1 and k the size of the support, each Newton round
# divides h k <= n^2 by at least 4 and each bisection round halves h, so these reach the last bit of theta >= 1/k in
# every row of up to LONG elements, however hostile; usual rows take 2 to 9 Newton rounds.
ROUNDS = {torch.float32: (16, 20), torch.float64: (24, 34)}
LONG = 16_384


def refuse_nested_forward(name: str) -> None:
    """Refuse jvp inside jvp, where torch drops the outer tangents of a custom function without a word."""
    if torch.compiler.is_compiling():
        return
    stack = getattr(getattr(torch._C, "_functorch", None), "get_interpreter_stack", lambda: None)()
    if sum(level.key().name == "Jvp" for level in stack or ()) > 1:
        raise RuntimeError(
            f"`{name}` has no forward-mode derivative of a forward-mode derivative (jvp of jvp, jacfwd of jacfwd); "
            "use torch.func.hessian or jacrev for one of them"
        )


def mass(rows: Tensor, theta: Tensor, work: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum_i max(c_i + theta, 0), number of positive terms) per row; `work` is memory to compute in."""
    active = torch.add(rows, theta, out=work).relu_()
    total = row_sum(active, keepdim=True)
    return total, row_sum(torch.sign(active.detach(), out=work), keepdim=True)


def threshold(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(theta, *mass(rows, theta)) with mass 1: sum_i max(c_i + theta, 0) = 1, for rows whose maximum is 0.

    Newton from the right, then bisection. theta <= 1 always, since the largest element alone has mass theta. The
    number of positive terms falls every round until the answer is reached; a row where it no longer falls is left
    alone, so leaving early changes no row.
    """
    theta = first_bound(rows)
    previous = torch.full_like(theta, torch.inf)
    look = can_look(rows)
    work = torch.empty_like(rows) if look else None
    for _ in range(ROUNDS[rows.dtype][0]):
        total, count = mass(rows, theta, work)
        moving = count < previous
        if look and not bool(moving.any()):
            return theta, total, count
        theta = torch.where(moving, torch.addcdiv(theta, total - 1, count, value=-1), theta)
        previous = count
    theta = torch.where(moving, bisect(rows, theta), theta)
    return theta, *mass(rows, theta)


def first_bound(rows: Tensor) -> Tensor:
    """A theta right of the answer: of long rows Newton's bound from one maximum out of every 16 elements, else 1.

    Fewer elements have less mass and so need a larger theta.
    """
    theta, parts = torch.ones_like(rows[..., :1]), rows.shape[-1] // 16
    if parts < 16:
        return theta
    maxima = rows[..., : 16 * parts].unflatten(-1, (16, parts)).amax(-2)
    for _ in range(5):
        total, count = mass(maxima, theta)
        theta = torch.addcdiv(theta, total - 1, count, value=-1).clamp(max=1.0)
    return theta


def bisection_rounds(rows: Tensor) -> int:
    """The tabled number, and two more for every doubling of the row's length beyond LONG."""
    rounds, length = ROUNDS[rows.dtype][1], rows.shape[-1]
    while length > LONG:
        rounds, length = rounds + 2, length // 2
    return rounds


def bisect(rows: Tensor, high: Tensor) -> Tensor:
    """`threshold` from an upper bound: halve the bracket, and take Newton's bound from each midpoint as well."""
    total, _ = mass(rows, high)
    low = high - (total - 1)  # the mass grows at least as fast as theta
    for _ in range(bisection_rounds(rows)):
        middle = (low + high) / 2
        total, count = mass(rows, middle)
        newton = middle - (total - 1) / count  # never left of the answer: the mass is convex in theta
        low = torch.where(total < 1, middle, low)
        high = torch.maximum(torch.minimum(high, newton), low)
    return high


def solver_for(rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """`threshold` itself where it runs or is exported, else one opaque operation.

    Inductor is very slow to compile the unrolled rounds for a CPU; torch.func unwraps what the operation gets, so
    that it may leave early. On CUDA the unrolled rounds become one kernel.
    """
    compiling = torch.compiler.is_compiling()
    unrolled = export_records() or (compiling and rows.device.type != "cpu")
    return threshold if unrolled or can_look(rows) else opaque_threshold


@torch.library.custom_op("hyperball::threshold", mutates_args=(), schema="(Tensor rows) -> (Tensor, Tensor, Tensor)")
def opaque_threshold(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`threshold` as an operation."""
    return threshold(rows)


@opaque_threshold.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    column = rows.new_empty(*rows.shape[:-1], 1)
    return column, torch.empty_like(column), torch.empty_like(column)


@opaque_threshold.register_vmap
def _(info: Any, in_dims: tuple[int], rows: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
    return opaque_threshold(rows.movedim(in_dims[0], 0).contiguous()), (0, 0, 0)
