"""Gradient attacks as pure functions of tensors: FGSM, FGSM from a random start, PGD, and the TRADES loss.

Goodfellow et al. 2015 (FGSM), Kurakin et al. 2017 (BIM), Madry et al. 2018 (PGD), Wong et al. 2020 (fast), Zhang et al.
2019 (TRADES). Inputs lie in `bounds`, the range of pixels; a model maps them to logits and holds its own normalization.
Shapes are static and nothing waits for the device, so every function here can be part of a captured CUDA graph; for
that reason pixels are not compared with the bounds, at which results are cut off. In half precision a pixel moves by
epsilon up to its own rounding; `evaluate_robustness` attacks in float32 whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.attacks.arguments import check_count, check_labels, check_mode, check_positive, parse_epsilon, parse_step
from hyperball.attacks.captured import repeat
from hyperball.attacks.norms import LINF, Norm, find_norm

Model = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Bounds = tuple[float, float]
PIXELS: Bounds = (0.0, 1.0)
TRADES_NOISE = 1e-3
INSTEAD = {
    "model": 'white-box attacks need one: use a black-box attack ("square", "transfer", "noise")',
    "source": "the attack on it needs one: use one that needs none, \"transfer(attack='square')\"",
}


class NoGradient(ValueError):
    """A model's logits do not depend differentiably on its input."""


def gradient(model: Model, x: Tensor, objective: Callable[[Tensor], Tensor], name: str = "model") -> Tensor:
    """d objective(model(x)) / dx, and nothing of the parameters' gradients; `name` is what an error calls the model."""
    check_mode()
    with torch.enable_grad():
        probe = (x.clone() if x.is_inference() else x.detach()).requires_grad_()
        value = objective(model(probe))
        slope = torch.autograd.grad(value, probe, allow_unused=True)[0] if value.requires_grad else None
    if slope is None:
        raise NoGradient(
            f"`{name}` gives no gradient with respect to its input; {INSTEAD[name]}, or a {name} without no_grad, "
            "detach or integer operations on the way"
        )
    return slope


def labeled(loss: Loss, y: Tensor) -> Callable[[Tensor], Tensor]:
    """loss(·, y); a label outside the classes is named where torch notices it, which on a GPU it does not."""

    def objective(logits: Tensor) -> Tensor:
        try:
            return loss(logits, y)
        except IndexError:
            check_labels(y, logits.shape[1])
            raise

    return objective


def within(x: Tensor, center: Tensor, epsilon: float, bounds: Bounds = PIXELS, norm: Norm = LINF) -> Tensor:
    """center + projection(x − center) onto the ball of radius epsilon, cut off at the bounds."""
    return torch.clamp(center + norm.project(x - center, epsilon), *bounds)


def random_start(
    x: Tensor, epsilon: float, bounds: Bounds = PIXELS, generator: torch.Generator | None = None
) -> Tensor:
    """x + U(−epsilon, epsilon), cut off at the bounds."""
    noise = torch.empty_like(x).uniform_(-epsilon, epsilon, generator=generator)
    return torch.clamp(x + noise, *bounds)


def ascend(
    model: Model,
    x: Tensor,
    objective: Callable[[Tensor], Tensor],
    epsilon: float,
    *,
    step: float,
    iterations: int,
    norm: Norm = LINF,
    start: Tensor | None = None,
    bounds: Bounds = PIXELS,
    eot: int = 1,
    replay: bool = False,
) -> Tensor:
    """x' ← ball(x' + step·direction(∂objective(model(x'))/∂x')), `iterations` times, from `start` or from x.

    `eot` averages the gradient over so many calls of a model that draws random numbers (Athalye et al. 2018). The
    order of operations is foolbox's, so that results are equal to the bit where the gradients are. `replay` captures
    a step on a GPU and repeats it; what is itself captured must leave it off.
    """

    def one(current: Tensor) -> Tensor:
        slope = gradient(model, current, objective)
        for _ in range(eot - 1):
            slope = slope + gradient(model, current, objective)
        return within(current + step * norm.direction(slope), x, epsilon, bounds, norm).detach()

    current = (x if start is None else start).detach()
    if replay and eot == 1:
        return repeat(one, current, iterations)
    for _ in range(iterations):
        current = one(current)
    return current


def budget(x: Tensor, epsilon: float | str) -> float:
    """The budget as a number > 0, for a batch of at least one image in floating point."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"`x` must be at least one image in floating point, bytes divided by 255, got {got}")
    number = parse_epsilon(epsilon)
    check_positive(epsilon=number)
    return number


def fgsm(
    model: Model, x: Tensor, y: Tensor, epsilon: float | str, *, loss: Loss = F.cross_entropy, bounds: Bounds = PIXELS
) -> Tensor:
    """x + epsilon·sign(∂loss/∂x), cut off at the bounds."""
    epsilon = budget(x, epsilon)
    return ascend(model, x, labeled(loss, y), epsilon, step=epsilon, iterations=1, bounds=bounds)


def fast_fgsm(
    model: Model,
    x: Tensor,
    y: Tensor,
    epsilon: float | str,
    *,
    step: float | str | None = None,
    loss: Loss = F.cross_entropy,
    bounds: Bounds = PIXELS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One step of 1.25 epsilon (or `step`) from a random start, back into the box: PGD of one iteration."""
    epsilon = budget(x, epsilon)
    step = 1.25 * epsilon if step is None else step
    return pgd(model, x, y, epsilon, step=step, iterations=1, loss=loss, bounds=bounds, generator=generator)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    epsilon: float | str,
    *,
    step: float | str,
    iterations: int,
    start: bool = True,
    norm: str = "linf",
    loss: Loss = F.cross_entropy,
    bounds: Bounds = PIXELS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x ← ball(x + step·direction(∂loss/∂x)), `iterations` times, from a random point or (start=False) from x.

    The direction is the sign for "linf" and the unit gradient for "l2", which starts from x plus noise of norm epsilon.
    """
    epsilon = budget(x, epsilon)
    check_count("iterations", iterations)
    kind = find_norm(norm)
    first = None
    if start and kind is LINF:
        first = random_start(x, epsilon, bounds, generator)
    elif start:
        noise = torch.empty_like(x).normal_(generator=generator)
        first = torch.clamp(x + epsilon * kind.direction(noise), *bounds)
    return ascend(
        model, x, labeled(loss, y), epsilon,
        step=parse_step(step), iterations=iterations, norm=kind, start=first, bounds=bounds,
    )  # fmt: skip


def trades_loss(
    model: Model,
    x: Tensor,
    y: Tensor,
    epsilon: float | str,
    *,
    step: float | str,
    iterations: int,
    beta: float = 6.0,
    loss: Loss = F.cross_entropy,
    bounds: Bounds = PIXELS,
    generator: torch.Generator | None = None,
    attacked: Model | None = None,
) -> tuple[Tensor, Tensor]:
    """loss(f(x), y) + beta·KL(p(x) ‖ p(x')), x' the point of the box where that divergence is largest; and f(x).

    `attacked` is the model through which x' is sought, where that is another form of it.
    """
    epsilon = budget(x, epsilon)
    check_count("iterations", iterations)
    check_positive(beta=beta)
    with torch.no_grad():
        target = model(x).float().softmax(1)
        noise = torch.empty_like(x).normal_(generator=generator)
        start = torch.clamp(x + TRADES_NOISE * noise, *bounds)
    worst = ascend(
        attacked or model, x, lambda logits: divergence(target, logits), epsilon,
        step=parse_step(step), iterations=iterations, start=start, bounds=bounds,
    )  # fmt: skip
    logits = model(x)
    return labeled(loss, y)(logits) + beta * divergence(logits.float().softmax(1), model(worst)), logits


def divergence(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p ‖ softmax(logits)), the mean over the batch."""
    return F.kl_div(F.log_softmax(logits.float(), dim=1), p, reduction="batchmean")
