"""The nine parameters of an operator, their kinds, and where their gradients lie in what a backward sums.

alpha, beta, rho, shape and bend are one number or one a channel, factor and stretch one a channel; slopes and turns
are vectors of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hyperball.kernels.triton.decoupled.code import Code

Parameters = list[Tensor | None]
Kind = tuple[Sequence[int], torch.dtype] | None  # of a parameter
Pick = tuple[int, int, int, bool, torch.dtype]  # parameter, first row, rows, whether channels are summed, dtype
PARAMETERS = 9  # alpha, beta, rho, shape, bend, factor, stretch, slopes, turns


def wanted(code: Code, needed: Sequence[bool]) -> tuple[bool, ...]:
    """Which parameters' gradients are summed: the needed ones, and a relative radius's where others hang on it."""
    relative = code.unit == "batch" and (needed[0] or needed[4])
    return (*needed[2:4], needed[4] or relative, *needed[5:])


def kinds_of(parameters: Sequence[Tensor | None]) -> tuple[Kind, ...]:
    """Shape and dtype of every parameter that is given."""
    return tuple([None if held is None else (held.shape, held.dtype) for held in parameters])


def sums_dtype(kinds: Sequence[Kind], needed: Sequence[bool], channels: int) -> torch.dtype:
    """In which dtype the gradients leave: the parameters' own where each is one number a channel, else float32."""
    held = [kind for kind, need in zip(kinds, needed[2:], strict=True) if need and kind is not None]
    dtypes = {dtype for _, dtype in held}
    own = len(dtypes) == 1 and all(len(shape) == 1 and shape[0] == channels for shape, _ in held)
    return dtypes.pop() if own and not any(needed[9:]) else torch.float32


def picks(kinds: Sequence[Kind], needed: Sequence[bool], taken: Sequence[bool]) -> list[Pick]:
    """Where in the gradients [rows, channels] those of each needed parameter lie."""
    found, row = [], 0
    for k, (kind, need, summed) in enumerate(zip(kinds, needed[2:], taken, strict=True)):
        size = (0 if kind is None else kind[0][0]) if k >= 7 else 1
        if need and kind is not None:
            found.append((k, row, size if k >= 7 else 0, k >= 7 or not kind[0], kind[1]))
        row += size if summed else 0
    return found


def picked(sums: Tensor, places: Sequence[Pick]) -> Parameters:
    """The gradients of the nine parameters, each in its parameter's shape and dtype; None where it is not needed."""
    grads: Parameters = [None] * PARAMETERS
    for k, row, size, over, dtype in places:
        grad = sums[row : row + size] if size else sums[row]
        if over:
            grad = grad.sum(-1)
        grads[k] = grad if grad.dtype == dtype else grad.to(dtype)
    return grads


def parameter_gradients(
    sums: Tensor, parameters: Sequence[Tensor | None], needed: Sequence[bool], code: Code
) -> Parameters:
    """The rows of the gradients, each in its parameter's shape and dtype; `needed` is for x, weight and the nine."""
    return picked(sums, picks(kinds_of(parameters), needed, wanted(code, needed)))
