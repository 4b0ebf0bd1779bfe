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
from hyperball.attacks.battery import Battery
from hyperball.attacks.bench import Outcome, make_bench
from hyperball.attacks.masking import masking_checks
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
    x, y = sample(COUNT)
    bench = make_bench(Detached(trained()).eval(), x, y, epsilon=EPSILON)
    found = masking_checks(bench, bench.clean())
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


def verdicts(**broken: int) -> dict:
    held = battery()
    marks = {name: held.clean.correct.clone() for name in broken}
    for name, count in broken.items():
        marks[name][held.index[:count]] = False
    return {name: masking.sampled(correct) for name, correct in marks.items()}


def test_a_search_that_beats_one_step_is_no_doubt():
    assert masking.requested(battery(), verdicts(fgsm=5, square=40)) is None


def test_a_search_is_compared_with_all_attacks_by_gradients_together():
    assert battery().run(masking.PGD(steps=20)).accuracy < 0.5
    found = masking.requested(battery(), verdicts(pgd=5, square=20))  # far weaker than the checks' own PGD
    assert found.doubt is None
    hidden = battery("Quantized")
    beaten = masking.requested(hidden, verdicts(bim=0, square=40))
    assert "black box should not be stronger" in beaten.doubt


@pytest.mark.parametrize("count, doubted", [(7, False), (100, True)])
def test_restarts_are_doubted_beyond_the_error_of_the_sample(count, doubted):
    shares = [1.0, 1 - (1 / 7 if count == 7 else 0.3)]

    class Fixed:
        def __len__(self):
            return count

        def run(self, attack):
            return Outcome(None, [{"accuracy": share} for share in shares], 0.0)

    assert (masking.restarts(Fixed()).doubt is not None) == doubted


@pytest.mark.parametrize("count", [1, 8])
def test_a_small_sample_is_said_to_be_small(count):
    held = battery()
    found = masking.size(Battery(held.bench, held.clean, count))
    assert f"saw {count} image" in found.doubt
    assert masking.size(held) is None


class Standardized(nn.Module):
    """Logits over their standard deviation in the batch: not a number for one image."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        logits = self.base(x)
        return logits / logits.std(0) if len(logits) > 1 else logits * torch.nan


def test_a_batch_of_one_that_gives_no_number_depends_on_its_batch():
    held = battery()
    bench = make_bench(Standardized(trained()).eval(), held.bench.inputs, held.bench.labels, epsilon=EPSILON)
    found = masking.function(Battery(bench, bench.clean(), 40))
    assert "not finite with the rest of its batch" in found.doubt
    assert found.to_dict()["numbers"]["batch"] is None


@pytest.mark.parametrize("epsilon", [1e-300, 1e-6, 1 / 255, 0.1, 1.0])
def test_the_ladder_of_budgets_is_short(epsilon):
    steps = masking.ladder(battery().bench.at(epsilon))
    assert len(steps) <= masking.RUNGS + 1
    assert steps[-1] == 1.0
    assert steps[0] == epsilon


def test_square_in_l2_without_its_package_is_left_out_with_a_word(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    x, y = sample(12)
    bench = make_bench(trained(), x, y, epsilon=0.5, norm="l2")
    held = Battery(bench, bench.clean(), 8)
    assert "needs pyautoattack" in masking.square_against_apgd(held).doubt
    assert "square(queries=500)" not in masking.black_box(held).numbers
