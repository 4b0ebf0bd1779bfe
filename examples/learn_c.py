"""Learn the radius of a robust mean: the outer loss is the error of an inner minimizer.

Inner problem: y(c) = argmin_u sum_i phi((x_i - u) / c) with the pseudo-Huber penalty phi, a row at a time.
Outer problem: min_c mean (y(c) - truth)^2, by gradient descent through the inner one.
"""

import torch
from torch import Tensor, nn

from hyperball.nn.declarative import Declarative


class PseudoHuber(nn.Module):
    """f(x, u) = sum_i c^2 (sqrt(1 + (x_i - u)^2 / c^2) - 1)."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(c).log())

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        c = self.log_c.exp()
        z = (x - u[:, None]) / c
        return c**2 * (z**2 / (1 + torch.sqrt(1 + z**2))).sum(-1)


def main() -> dict[str, float]:
    torch.manual_seed(0)
    truth = torch.randn(256)
    x = truth[:, None] + 0.3 * torch.randn(256, 40)
    x[:, :8] += 6 + torch.randn(256, 8)  # a fifth of every row is wrong, to one side

    penalty = PseudoHuber(c=20.0)
    pool = Declarative(penalty, init=lambda x: x.median(-1).values)
    optimizer = torch.optim.Adam(pool.parameters(), lr=0.3)
    errors = []
    for step in range(40):
        loss = (pool(x) - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item() ** 0.5)
        if step % 8 == 0:
            print(f"step {step:2d}  c = {penalty.log_c.exp().item():7.3f}  rms error = {errors[-1]:.4f}")

    mean_error = (x.mean(-1) - truth).square().mean().sqrt().item()
    clean_error = (x[:, 8:].mean(-1) - truth).square().mean().sqrt().item()
    print(f"mean {mean_error:.4f}, learned c {errors[-1]:.4f}, mean without the outliers {clean_error:.4f}")
    return {"mean": mean_error, "start": errors[0], "learned": errors[-1], "clean": clean_error}


if __name__ == "__main__":
    main()
