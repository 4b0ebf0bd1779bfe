"""Robust linear regression as a layer, and what one sample can do to it.

w(A, b) = argmin_w sum_i c^2 (sqrt(1 + r_i^2 / c^2) - 1) with r = A w - b. Its derivative dw/db_i, one linear
solve in backward, is the influence of sample i: least squares gives every sample the same say, this does not.
"""

import torch
from torch import Tensor

from hyperball.implicit import argmin

C = 0.5


def robust(x: tuple[Tensor, Tensor], w: Tensor) -> Tensor:
    design, target = x
    z = ((design @ w[..., None])[..., 0] - target) / C
    return C**2 * (z**2 / (1 + torch.sqrt(1 + z**2))).sum(-1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    truth = torch.randn(32, 4)  # 32 regressions of 4 unknowns from 60 samples
    design = torch.randn(32, 60, 4)
    target = (design @ truth[..., None])[..., 0] + 0.1 * torch.randn(32, 60)
    target[:, :15] += 8 + 4 * torch.rand(32, 15)  # a quarter of the samples is wrong
    target.requires_grad_()

    least_squares = torch.linalg.lstsq(design, target.detach()[..., None]).solution[..., 0]
    solution = argmin(robust, (design, target), init=least_squares, full=True)
    error = (solution.value - truth).norm(dim=-1).mean().item()
    plain_error = (least_squares - truth).norm(dim=-1).mean().item()
    print(f"mean error of w: least squares {plain_error:.3f}, robust {error:.3f}")
    print(f"Newton steps per regression: {solution.steps.min()} to {solution.steps.max()}")

    (influence,) = torch.autograd.grad(solution.value.sum(), target)
    outlier, inlier = influence[:, :15].abs().mean().item(), influence[:, 15:].abs().mean().item()
    print(f"influence of a sample on the sum of w: outlier {outlier:.6f}, inlier {inlier:.6f}")
    return {"plain": plain_error, "robust": error, "outlier": outlier, "inlier": inlier}


if __name__ == "__main__":
    main()
