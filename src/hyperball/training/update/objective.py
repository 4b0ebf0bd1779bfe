"""The loss of a recipe: cross entropy, clean or adversarial, and what is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hyperball.attacks import fast_fgsm, fgsm, pgd, trades_loss
from hyperball.optim import orthogonality
from hyperball.training.recipe import Recipe
from hyperball.training.update.smoothing import cross_entropy

Forward = Callable[[Tensor], Tensor]


@contextmanager
def fixed_parameters(module: nn.Module) -> Iterator[None]:
    """Parameters that ask for no gradient while the block lasts.

    A layer with a backward pass of its own cannot see which gradients are wanted, only which inputs ask for one.
    """
    asking = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def rounded_products(are: bool) -> Iterator[None]:
    """float32 matrix products in TF32 while the block lasts, if they `are`."""
    before = torch.get_float32_matmul_precision()
    if are:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Objective:
    """loss = cross entropy (smoothed) + orthogonality; adversarial training puts attacked inputs in.

    An attack sees the network as it trains, in training mode, and asks for the gradient of its inputs alone: FGSM on
    all inputs then costs a pass forward and one backward without weights more, 5/3 of natural training by counting
    passes and 1.9 to 2.0 measured on a GPU. Where `forward` is wrapped for several processes, whose gradients it would
    wait for, `attack_through` is the network.
    """

    def __init__(self, recipe: Recipe, bare: nn.Module, attack_through: nn.Module | None = None) -> None:
        self.attack_through = attack_through
        self.regularizers = recipe.regularizers
        self.is_rounded = recipe.precision != "fp32"
        self.adversarial = recipe.adversarial
        self.bare = bare

    def __call__(self, forward: Forward, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the logits that the training accuracy counts (those of the clean inputs, if any were used)."""
        loss, logits = self._classification(forward, x, y)
        weight = self.regularizers.orthogonality
        if weight:
            kind, unit = self.regularizers.orthogonality_kind, self.regularizers.orthogonality_unit
            with rounded_products(self.is_rounded):  # its gradient is computed here as well
                loss = loss + weight * orthogonality(self.bare, kind, unit=unit)
        return loss, logits

    def _classification(self, forward: Forward, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        config = self.adversarial
        if config.method == "none":
            logits = forward(x)
            return self.cross_entropy(logits, y), logits
        if config.method == "trades":
            return trades_loss(
                forward, x, y, config.budget,
                step=config.step_size, iterations=config.iterations, beta=config.beta, loss=self.cross_entropy,
                attacked=self.inputs_alone(forward),
            )  # fmt: skip
        logits = forward(self.attacked(forward, x, y))
        loss = self.cross_entropy(logits, y)
        if config.share < 1:
            clean = forward(x)
            return config.share * loss + (1 - config.share) * self.cross_entropy(clean, y), clean
        return loss, logits

    def attacked(self, forward: Forward, x: Tensor, y: Tensor) -> Tensor:
        """The inputs after the attack of the recipe."""
        config = self.adversarial
        forward = self.inputs_alone(forward)
        if config.method == "fgsm":
            return fgsm(forward, x, y, config.budget)
        if config.method == "fast":
            return fast_fgsm(forward, x, y, config.budget, step=config.step_size)
        return pgd(forward, x, y, config.budget, step=config.step_size, iterations=config.iterations)

    def inputs_alone(self, forward: Forward) -> Forward:
        """The network for an attack, whose outputs depend on its inputs and on no parameter."""
        through = self.attack_through or forward

        def run(x: Tensor) -> Tensor:
            with fixed_parameters(self.bare):
                return through(x)

        return run

    def cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        """−Σ q log p with q = (1 − s)·onehot + s/K, in float32 at least."""
        return cross_entropy(logits, y, self.regularizers.label_smoothing)
