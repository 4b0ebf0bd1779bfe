"""Constrained least squares: which materials is a pixel made of, and how strong is the lamp?

u(s, k) = argmin_u |k E u - s|^2 / 2 subject to sum u = 1 and u >= 0: the shares u of known spectra E in a
measured spectrum s. The gain k of the lamp is unknown too, and is found by gradient descent through the
layer on how well the shares explain the measurement.
"""

import torch
from torch import Tensor

from hyperball.implicit import Solution, argmin


def unmix(spectra: Tensor, measured: Tensor, gain: Tensor) -> Solution:
    """The Solution for each row of `measured` [B, F], spectra [F, M]."""
    return argmin(
        lambda s, u: (gain * u @ spectra.mT - s).square().sum(-1) / 2,
        measured,
        init=torch.full((len(measured), spectra.shape[1]), 1 / spectra.shape[1]),
        equality=lambda _, u: u.sum(-1) - 1,
        inequality=lambda _, u: -u,
        full=True,
    )


def main() -> dict[str, float]:
    torch.manual_seed(0)
    spectra = torch.rand(30, 5)
    shares = torch.zeros(64, 5)
    shares[:, :3] = torch.rand(64, 3).softmax(-1)  # two of the five materials are absent
    measured = 1.7 * shares @ spectra.mT + 0.002 * torch.randn(64, 30)

    gain = torch.tensor(1.0, requires_grad=True)
    optimizer = torch.optim.Adam([gain], lr=0.05)
    for step in range(60):
        solution = unmix(spectra, measured, gain)
        misfit = (gain * solution.value @ spectra.mT - measured).square().mean()
        optimizer.zero_grad()
        misfit.backward()
        optimizer.step()
        if step % 12 == 0:
            print(f"step {step:2d}  gain {gain.item():.3f}  misfit {misfit.item():.2e}")

    error = (solution.value - shares).abs().max().item()
    assert solution.inequality_multipliers is not None
    active = solution.inequality_multipliers.gt(0).float().mean(0)
    print(f"gain {gain.item():.3f}, largest error of a share {error:.4f}")
    print("u_i >= 0 binds in " + " ".join(f"{share:.0%}" for share in active))
    return {"gain": gain.item(), "error": error, "total": solution.value.sum(-1).sub(1).abs().max().item()}


if __name__ == "__main__":
    main()
