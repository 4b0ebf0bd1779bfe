"""The least eigenvalue of f's second derivative at an answer: negative at a maximum or a saddle.

Up to `checks.DENSE_LIMIT` variables it is exact. Beyond, Lanczos' method gives an upper bound from products H p, so a
negative value proves a saddle, and a narrow negative direction may be missed.
"""

import torch
from torch import Tensor

from hyperball.implicit import checks
from hyperball.implicit.derivatives import Value, dot, gradient, hessian, largest, select

LANCZOS_STEPS = 24


def least_allowed(values: Tensor) -> Tensor:
    """The eigenvalue of each row that still counts as 0: minus the root of rounding times the largest."""
    return -(torch.finfo(values.dtype).eps ** 0.5) * largest(values)


def least_curvature(value_of: Value, u: Tensor) -> tuple[Tensor, Tensor]:
    """(the least eigenvalue of each row's Hessian, whether it is at least 0 to rounding); NaN where not finite."""
    values = ritz_values(value_of, u) if u.shape[1] > checks.DENSE_LIMIT else eigenvalues(value_of, u)
    least = values[:, 0]
    return least, ~(least < least_allowed(values))


def eigenvalues(value_of: Value, u: Tensor) -> Tensor:
    """All of them, ascending, [N, n]."""
    matrix = hessian(value_of, u)
    finite = matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(select(finite, matrix, torch.zeros_like(matrix)))
    return select(finite, values, torch.full_like(values, torch.nan))


def ritz_values(value_of: Value, u: Tensor) -> Tensor:
    """Eigenvalues of H on the span of q, H q, H² q, … for one fixed random q, ascending, [N, k]."""
    rows, n = u.shape
    with torch.enable_grad():
        variable = u.detach().requires_grad_()
        slope = gradient(value_of(variable), variable, attach=True)
    start = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = (start / start.norm()).to(u).expand(rows, n)
    basis, columns = [q], []
    for _ in range(min(LANCZOS_STEPS, n)):
        image = gradient((slope * basis[-1]).sum(-1), variable, attach=False, keep=True).detach()
        columns.append(image)
        for _ in range(2):  # once loses orthogonality
            for p in basis:
                image = image - dot(p, image)[:, None] * p
        size = dot(image, image).sqrt()
        alive = size > torch.finfo(u.dtype).eps ** 0.5 * largest(columns[-1])
        basis.append(select(alive, image / torch.where(alive, size, 1.0)[:, None], torch.zeros_like(image)))
    matrix = torch.stack([torch.stack([dot(p, image) for p in basis[:-1]], -1) for image in columns], -1)
    finite = matrix.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvalsh(select(finite, (matrix + matrix.mT) / 2, torch.zeros_like(matrix)))
    return select(finite, values, torch.full_like(values, torch.nan))
