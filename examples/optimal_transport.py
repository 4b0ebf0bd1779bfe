"""Entropy-regularized optimal transport as a layer, and the cost that explains an observed plan.

P(C) = argmin_P <C, P> + eps sum P (log P - 1) subject to P 1 = a and P^T 1 = b. The constraints are one too
many (both sum to the total mass), so the last column sum is left out. The same plan by Sinkhorn's iteration
is the check; then gradient descent through the layer finds a cost whose plan is a given one.
"""

import torch
from torch import Tensor

from hyperball.implicit import argmin

EPS = 0.2


def objective(cost: Tensor, plan: Tensor) -> Tensor:
    return (cost * plan + EPS * plan * (plan.log() - 1)).sum((-2, -1))


def transport(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    def marginals(_: Tensor, plan: Tensor) -> Tensor:
        return torch.cat((plan.sum(-1) - a, plan.sum(-2)[..., :-1] - b[..., :-1]), -1)

    return argmin(objective, cost, init=a[..., :, None] * b[..., None, :], equality=marginals)


def sinkhorn(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    kernel, v = torch.exp(-cost / EPS), torch.ones_like(b)
    for _ in range(2000):
        u = a / (kernel @ v)
        v = b / (kernel.mT @ u)
    return u[:, None] * kernel * v


def main() -> dict[str, float]:
    torch.manual_seed(0)
    a, b = torch.rand(4, dtype=torch.float64).softmax(0), torch.rand(5, dtype=torch.float64).softmax(0)
    hidden = torch.rand(4, 5, dtype=torch.float64)
    observed = sinkhorn(hidden, a, b)
    gap = (transport(hidden, a, b) - observed).abs().max().item()
    print(f"largest difference from Sinkhorn's plan: {gap:.1e}")

    cost = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([cost], lr=0.1)
    for step in range(40):
        divergence = (observed * (observed / transport(cost, a, b)).log()).sum()
        optimizer.zero_grad()
        divergence.backward()
        optimizer.step()
        if step % 8 == 0:
            print(f"step {step:2d}  divergence of the plans {divergence.item():.6f}")
    return {"gap": gap, "divergence": divergence.item()}


if __name__ == "__main__":
    main()
