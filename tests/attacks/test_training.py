"""Attacks in training: which loss a recipe asks for, and what passes of an attack do to statistics and gradients."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperball.attacks import fast_fgsm, fgsm, pgd, trades_loss
from hyperball.training import Recipe
from hyperball.training.recipe.fields import RecipeError
from hyperball.training.update.objective import Objective


def recipe_of(method: str, **fields: object) -> Recipe:
    """A recipe of adversarial training; those that iterate do so three times."""
    fields |= {"iterations": 3} if method in ("pgd", "trades") else {}
    return Recipe().override({f"adversarial.{name}": value for name, value in {"method": method, **fields}.items()})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm2d(1, momentum=None), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("method, passes", [("none", 1), ("fgsm", 2), ("fast", 2), ("pgd", 4), ("trades", 6)])
def test_every_pass_of_an_attack_in_training_moves_running_statistics(method, passes):
    trained = network().train()
    Objective(recipe_of(method), trained)(trained, torch.rand(4, 1, 8, 8), torch.arange(4) % 3)
    assert int(trained[0].num_batches_tracked) == passes


def test_after_fgsm_running_statistics_are_those_of_clean_and_attacked_images_alike():
    trained, x = network().train(), 0.5 + 0.4 * torch.rand(4, 1, 8, 8)
    seen = []
    trained[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach().mean()))
    Objective(recipe_of("fgsm", epsilon="8/255"), trained)(trained, x, torch.arange(4) % 3)
    assert seen[0] == x.mean()
    assert seen[1] != x.mean()
    torch.testing.assert_close(trained[0].running_mean[0], torch.stack(seen).mean())


class Scaled(torch.autograd.Function):
    """w·x, with a backward pass that tells which gradients it was asked for."""

    asked: ClassVar[list[tuple[bool, ...]]] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Scaled.asked.append(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 2, 3), keepdim=True)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 10, 1, 1))

    def forward(self, x):
        return Scaled.apply(x, self.weight)


@pytest.mark.parametrize("method, attacks", [("fgsm", 1), ("fast", 1), ("pgd", 3), ("trades", 3)])
def test_an_attack_in_training_asks_for_no_gradient_of_weights(method, attacks):
    Scaled.asked.clear()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 10, 3), Scale(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    loss, _ = Objective(recipe_of(method), network)(network, torch.rand(4, 1, 8, 8), torch.arange(4))
    assert Scaled.asked == [(True, False)] * attacks
    loss.backward()
    assert all(parameter.requires_grad and parameter.grad is not None for parameter in network.parameters())
    assert Scaled.asked[attacks:] == [(True, True)] * (2 if method == "trades" else 1)


def drawn(function, *arguments, **options):
    """What a function gives from one state of torch's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return function(*arguments, **options)


ATTACKS = {
    "fgsm": lambda net, x, y: fgsm(net, x, y, 0.1),
    "fast": lambda net, x, y: fast_fgsm(net, x, y, 0.1),
    "pgd": lambda net, x, y: pgd(net, x, y, 0.1, step=0.025, iterations=3),
}


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("method", ATTACKS)
def test_share_is_the_weight_of_the_attacked_images(method, share):
    net, x, y = network().eval(), torch.rand(4, 1, 8, 8), torch.arange(4) % 3
    loss, logits = drawn(Objective(recipe_of(method, epsilon=0.1, share=share), net), net, x, y)
    moved = net(drawn(ATTACKS[method], net, x, y))
    expected = share * F.cross_entropy(moved, y) + (1 - share) * F.cross_entropy(net(x), y)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(logits, moved if share == 1 else net(x))


def test_trades_in_training_is_the_function_with_the_fields_of_the_recipe():
    net, x, y = network().eval(), torch.rand(4, 1, 8, 8), torch.arange(4) % 3
    loss, _ = drawn(Objective(recipe_of("trades", epsilon=0.1, step="1/50", beta=2.0), net), net, x, y)
    expected, _ = drawn(trades_loss, net, x, y, 0.1, step=0.02, iterations=3, beta=2.0)
    torch.testing.assert_close(loss, expected)


def test_texts_of_fractions_are_numbers_in_a_recipe():
    found = recipe_of("pgd", epsilon="8/255", step="2/255").adversarial
    assert (found.epsilon, found.step) == (8 / 255, 2 / 255)
    assert recipe_of("pgd", epsilon=8 / 255, step=2 / 255).adversarial == found


UNUSED = [
    ("none", "epsilon", 0.1, "without an `adversarial.method`"),
    ("none", "share", 0.3, "must be 1 without an `adversarial.method`, got 0.3"),
    ("none", "beta", 1.0, "without an `adversarial.method`"),
    ("none", "step", "1/255", "must be null without an `adversarial.method`"),
    ("none", "iterations", 3, "must be 10 without an `adversarial.method`"),
    ("fgsm", "step", 0.1, "must be null for fgsm, which takes epsilon, share"),
    ("fgsm", "iterations", 3, "must be 10 for fgsm"),
    ("fgsm", "beta", 1.0, "must be 6 for fgsm"),
    ("fast", "iterations", 3, "must be 10 for fast"),
    ("pgd", "beta", 1.0, "must be 6 for pgd"),
    ("trades", "share", 0.5, "must be 1 for trades, which takes epsilon, step, iterations, beta, got 0.5"),
]


@pytest.mark.parametrize("method, field, value, message", UNUSED)
def test_a_field_that_would_play_no_part_is_refused(method, field, value, message):
    with pytest.raises(RecipeError, match=rf"`adversarial\.{field}` {'' if 'must' in message else '.*'}{message}"):
        Recipe().override({"adversarial.method": method, f"adversarial.{field}": value})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("epsilon", "8/x", "`adversarial.epsilon` must be a number or a fraction such as \"8/255\", got '8/x'"),
        ("epsilon", "-1/255", "`adversarial.epsilon` must be finite and >= 0"),
        ("epsilon", "256/255", r"`adversarial.epsilon` must be in \(0, 1\]"),
        ("step", "0/255", "`adversarial.step` must be > 0 or null"),
        ("method", "fast_fgsm", "got 'fast_fgsm'; did you mean 'fast'?"),
        ("method", "trades_loss", "got 'trades_loss'; did you mean 'trades'?"),
    ],
)
def test_mistakes_in_a_recipe_are_named(field, value, message):
    with pytest.raises(RecipeError, match=message):
        recipe_of("pgd").override({f"adversarial.{field}": value})
