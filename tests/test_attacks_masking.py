"""Masking checks: each speaks up for a model built to trigger it, and is silent about honest ones."""

import functools

import pytest
import torch
from attack_models import (
    EPSILON,
    Centered,
    Detached,
    Gated,
    Noisy,
    Probabilities,
    Quantized,
    Reversed,
    Roots,
    Saturated,
    sample,
    trained,
)
from torch import Tensor, nn

from hyperball.attacks import masking
from hyperball.attacks.bench import make_bench
from hyperball.attacks.masking import Battery, masking_checks
from hyperball.nn import Projection

COUNT = 80


class Clipped(nn.Module):
    """Pixels pushed against a norm ball before the base, black or white: a projection that hides gradients."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.projection = Projection(float("inf"), radius=1.0, learn=False, dim=(1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.base((self.projection(200 * (x - 0.45)) + 1) / 2)


@functools.cache
def battery(name: str = "honest", source: bool = False) -> Battery:
    kinds = (Centered, Clipped, Gated, Noisy, Probabilities, Quantized, Reversed, Roots, Saturated)
    table = {kind.__name__: kind for kind in kinds}
    if name in ("honest", "adversarial"):
        model = trained(adversarial=name == "adversarial")
    else:
        model = table[name](trained()).eval()
    x, y = sample(COUNT)
    epsilon = 0.3 if name == "Clipped" else EPSILON
    bench = make_bench(model, x, y, epsilon=epsilon, source=trained(seed=1) if source else None)
    return Battery(bench, bench.clean(), COUNT)


TRIGGERS = {
    "gradients: zero": (masking.gradients, "Quantized", "a gradient of exactly zero"),
    "gradients: saturated": (masking.gradients, "Saturated", "a gradient of exactly zero"),
    "gradients: not finite": (masking.gradients, "Roots", "not finite"),
    "surface": (masking.surface, "Quantized", "random direction harms more"),
    "growth": (masking.growth, "Quantized", "at most chance, 10.0 %"),
    "iterative": (masking.iterative, "Reversed", "many steps should be at least as strong as one"),
    "restarts": (masking.restarts, "Gated", "5 random starts"),
    "black box": (masking.black_box, "Quantized", "white box should not be weaker"),
    "square": (masking.square_against_apgd, "Saturated", "images that APGD does not"),
    "function: random": (masking.function, "Noisy", "attacks need eot > 1"),
    "function: batch": (masking.function, "Centered", "with the rest of its batch"),
    "function: probabilities": (masking.function, "Probabilities", "outputs are probabilities"),
    "declarative": (masking.declarative, "Clipped", "the inner problem hides gradients"),
}


@pytest.mark.parametrize("case", TRIGGERS)
def test_a_check_doubts_the_model_built_to_trigger_it(case):
    check, name, words = TRIGGERS[case]
    found = check(battery(name))
    assert words in found.doubt
    assert any(character.isdigit() for character in found.doubt) or case == "function: probabilities"
    assert found.to_dict()["passed"] is False


def test_transfer_from_an_undefended_copy_beats_hidden_gradients():
    found = masking.transfer(battery("Quantized", source=True))
    assert "transfer should not be stronger" in found.doubt
    assert found.numbers["transfer"] < found.numbers["pgd"]


@pytest.mark.parametrize("name", ["honest", "adversarial"])
def test_no_check_doubts_an_honest_model(name):
    held = battery(name, source=True)
    found = masking_checks(held.bench, held.clean, COUNT)
    assert [check.doubt for check in found] == [None] * len(found)
    assert len(found) == 10


def test_a_model_at_chance_is_said_to_be_there():
    x, y = sample(COUNT)
    bench = make_bench(trained(), x, (y + 1) % 10, epsilon=EPSILON)
    (found, *_) = masking_checks(bench, bench.clean(), 8)
    assert "no better than chance (10.0 %)" in found.doubt


def test_a_model_without_gradients_gets_a_doubt_instead_of_checks():
    x, y = sample(20)
    bench = make_bench(Detached(trained()).eval(), x, y, epsilon=EPSILON)
    found = masking_checks(bench, bench.clean(), 8)
    assert [check.doubt for check in found if check.doubt] == [
        "the model has no gradient with respect to its input: no white-box attack or check could run"
    ]


def test_the_sample_is_spread_over_images_that_are_right():
    held = battery()
    few = Battery(held.bench, held.clean, 7)
    assert len(few) == 7
    assert held.clean.correct[few.index].all()
    assert int(few.index[-1]) == int(held.clean.correct.nonzero()[-1])
    assert torch.equal(few.index, few.index.unique())


def test_a_few_images_more_are_not_called_stronger():
    from hyperball.attacks.methods.task import Verdict

    def verdict(broken: int) -> Verdict:
        correct = torch.ones(100, dtype=torch.bool)
        correct[:broken] = False
        return Verdict(correct, torch.zeros(100), torch.zeros(100))

    assert not masking.stronger(verdict(12), verdict(10))
    assert masking.stronger(verdict(20), verdict(10))
    assert not masking.stronger(verdict(10), verdict(20))
