"""Small classifiers of digits: an honest one, and others built to hide their gradients in one known way each."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperball import data, models
from hyperball.attacks import pgd

EPSILON = 0.1


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs in [0, 1] and labels, test inputs and labels."""
    train, test = data.load("digits").in_memory()
    return train.inputs.float() / 255, train.labels, test.inputs.float() / 255, test.labels


@functools.cache
def trained(adversarial: bool = False, seed: int = 0, **options: Any) -> nn.Module:
    """A network of a few thousand parameters, trained for a second or, against PGD, a few."""
    inputs, labels, _, _ = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = models.create("digits", width=8, **options)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(5 if adversarial else 6):
            for part in torch.randperm(len(inputs)).split(64):
                x, y = inputs[part], labels[part]
                if adversarial:
                    model.eval()
                    x = pgd(model, x, y, EPSILON, step=EPSILON / 2, iterations=3)
                    model.train()
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    model.zero_grad()
    return model.eval().requires_grad_(False)


def sample(count: int) -> tuple[Tensor, Tensor]:
    """The first test images and their labels."""
    _, _, inputs, labels = digits()
    return inputs[:count], labels[:count]


class Around(nn.Module):
    """A base model with something before and something after it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, logits: Tensor) -> Tensor:
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.base(self.before(x)))


class Quantized(Around):
    """Pixels rounded to 32 steps: no gradient, and nearly the same function."""

    def before(self, x: Tensor) -> Tensor:
        return (32 * x).round() / 32


class Saturated(Around):
    """Logits so large that the softmax is exactly one-hot."""

    def after(self, logits: Tensor) -> Tensor:
        return 1e4 * logits


class Roots(Around):
    """sqrt(x)², whose gradient is not finite in black pixels."""

    def before(self, x: Tensor) -> Tensor:
        return x.sqrt().square()


class Noisy(Around):
    """Draws noise at every call."""

    def before(self, x: Tensor) -> Tensor:
        return x + 0.05 * torch.randn_like(x)


class Centered(Around):
    """Logits less their mean over the batch."""

    def after(self, logits: Tensor) -> Tensor:
        return logits - logits.mean(0)


class Probabilities(Around):
    def after(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)


class Reversed(Around):
    """The right gradient where pixels are whole bytes, as in clean images, and its negative elsewhere."""

    def before(self, x: Tensor) -> Tensor:
        return Scaled.apply(x, torch.where(((255 * x) - (255 * x).round()).abs().amax((1, 2, 3)) < 1e-3, 1.0, -1.0))


class Gated(Around):
    """A gradient only where the first pixel, which the base does not see, is above a bound: a fifth of all starts."""

    def before(self, x: Tensor) -> Tensor:
        seen = torch.ones_like(x[:1])
        seen[:, :, 0, 0] = 0
        return Scaled.apply(x, (x[:, 0, 0, 0] > 0.6 * EPSILON).to(x.dtype)) * seen


class Scaled(torch.autograd.Function):
    """x, with its gradient times a factor an image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0].view(-1, 1, 1, 1), None


class Detached(Around):
    """No graph from the input to the logits."""

    def before(self, x: Tensor) -> Tensor:
        return x.detach()
