"""Where doubts begin: each check on samples just inside and just outside its threshold, and what an attack keeps."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from attack_models import Scaled
from torch import Tensor

from hyperball.attacks import masking, robustness_curve
from hyperball.attacks.battery import Battery, sampled
from hyperball.attacks.bench import Outcome, make_bench
from hyperball.attacks.methods.task import Attack, Verdict

EPSILON = 0.1


class Scripted(Battery):
    """A sample on which an attack breaks so many images: the first, or for a black box those after `skipped`."""

    def __init__(self, count: int, broken: dict[str, int], skipped: int = 0) -> None:
        images, labels = torch.full((count, 1, 2, 2), 0.5), torch.zeros(count, dtype=torch.int64)
        bench = make_bench(
            lambda x: x.flatten(1)[:, :2] * 0 + x.new_tensor([1.0, 0.0]), images, labels, epsilon=EPSILON
        )
        super().__init__(bench, bench.clean(), count)
        self.broken, self.skipped = broken, skipped

    def run(self, attack: Attack, epsilon: float | None = None) -> Outcome:
        correct = torch.ones(len(self), dtype=torch.bool)
        first = 0 if attack.white_box else self.skipped
        correct[first : first + self.broken[attack.name]] = False
        left = 1 - self.broken.get("one start", 0) / len(self)
        stages = [{"accuracy": left}, {"accuracy": float(correct.double().mean())}]
        return Outcome(sampled(correct), stages, 0.0)


@pytest.mark.parametrize(
    "check, count, broken, doubted",
    [
        # chance is 1/2: of 100 images 2 standard deviations are 10, of 40,000 the tolerance of 1 % is more
        (masking.growth, 100, {"bim": 40}, False),
        (masking.growth, 100, {"bim": 39}, True),
        (masking.growth, 40_000, {"bim": 19_600}, False),
        (masking.growth, 40_000, {"bim": 19_599}, True),
        (masking.iterative, 1000, {"fgsm": 10, "pgd": 0}, False),
        (masking.iterative, 1000, {"fgsm": 11, "pgd": 0}, True),
        (masking.iterative, 100, {"fgsm": 4, "pgd": 0}, False),
        (masking.iterative, 100, {"fgsm": 5, "pgd": 0}, True),
        (masking.black_box, 1000, {"noise": 10, "square": 10, "pgd": 0}, False),
        (masking.black_box, 1000, {"noise": 11, "square": 10, "pgd": 0}, True),
        (masking.black_box, 1000, {"noise": 10, "square": 11, "pgd": 0}, True),
        # a gain of 10 points, and 2 standard deviations of it: 10.19 of 100 for 100,000 images
        (masking.restarts, 100_000, {"one start": 0, "pgd": 10_150}, False),
        (masking.restarts, 100_000, {"one start": 0, "pgd": 10_250}, True),
        (masking.square_against_apgd, 1000, {"square": 20, "apgd": 0}, False),
        (masking.square_against_apgd, 1000, {"square": 21, "apgd": 0}, True),
        (masking.square_against_apgd, 10, {"square": 1, "apgd": 0}, False),
        (masking.square_against_apgd, 10, {"square": 2, "apgd": 0}, True),
    ],
)
def test_a_doubt_begins_at_its_threshold(check, count, broken, doubted):
    found = check(Scripted(count, broken))
    assert (found.doubt is not None) == doubted


@pytest.mark.parametrize("apgd, doubted", [(200, True), (79, True), (80, False)])
def test_square_counts_the_images_that_it_alone_breaks(apgd, doubted):
    broken = {"square": 100, "apgd": apgd}
    skipped = 200 if apgd == 200 else 0  # other images, however many: none of Square's
    found = masking.square_against_apgd(Scripted(1000, broken, skipped))
    assert (found.doubt is not None) == doubted


@pytest.mark.parametrize("count, doubted", [(30, False), (29, True)])
def test_thirty_images_are_enough(count, doubted):
    assert (masking.size(Scripted(count, {})) is not None) == doubted


@dataclass
class Marked:
    """Right on images that are brighter than 1/4; the gradient of those with a dark first pixel has another factor."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        marked = x[:, 0, 0, 0].detach() < 0.25
        seen = Scaled.apply(x, torch.where(marked, self.factor, 1.0))
        place = seen.flatten(1)[:, 1:].mean(1)
        return torch.stack([place - 0.25, 0.25 - place], 1)


def marked_battery(factor: float, marked: int, count: int = 100) -> Battery:
    images, labels = torch.full((count, 1, 4, 4), 0.5), torch.zeros(count, dtype=torch.int64)
    images[:marked, 0, 0, 0] = 0.0
    bench = make_bench(Marked(factor), images, labels, epsilon=EPSILON)
    return Battery(bench, bench.clean(), count)


@pytest.mark.parametrize(
    "check, factor, marked, doubted",
    [
        (masking.gradients, 0.0, 1, False),
        (masking.gradients, 0.0, 2, True),
        (masking.gradients, torch.inf, 0, False),
        (masking.gradients, torch.inf, 1, True),
        (masking.surface, -1.0, 10, False),
        (masking.surface, -1.0, 11, True),
    ],
)
def test_a_doubt_begins_at_so_many_images_of_a_hundred(check, factor, marked, doubted):
    found = check(marked_battery(factor, marked))
    assert (found.doubt is not None) == doubted


@dataclass
class Shifted:
    """Logits that a second call, or a single image, shifts by so much of the largest one."""

    again: float = 0.0
    alone: float = 0.0
    calls: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += len(x) > 1
        shift = self.again * (self.calls % 2) + self.alone * (len(x) == 1)
        return x.flatten(1)[:, :2] * 0 + x.new_tensor([1.0, 0.5]) * (1 + shift)


@pytest.mark.parametrize(
    "given, doubted",
    [
        ({"again": 0.5e-4}, False),
        ({"again": 2e-4}, True),
        ({"alone": 0.5e-2}, False),
        ({"alone": 2e-2}, True),
    ],
)
def test_a_model_may_differ_from_itself_by_rounding(given, doubted):
    images, labels = torch.full((40, 1, 2, 2), 0.5), torch.zeros(40, dtype=torch.int64)
    bench = make_bench(Shifted(**given), images, labels, epsilon=EPSILON)
    assert (masking.function(Battery(bench, bench.clean(), 40)).doubt is not None) == doubted


@dataclass
class FragileToLittle:
    """Wrong about marked images where the budget is small, and about none where it is large."""

    def __call__(self, x: Tensor) -> Tensor:
        moved = (x[:, 0, 0, 1] - 0.5).abs()
        wrong = ((x[:, 0, 0, 0] < 0.4) & (moved > 0.01) & (moved < 0.1)).float()
        return torch.stack([1 - wrong, wrong], 1)


@pytest.mark.parametrize("count, marked, doubted", [(2000, 20, False), (2000, 21, True), (50, 4, False), (50, 5, True)])
def test_accuracy_may_rise_by_a_hundredth_and_by_two_standard_deviations(count, marked, doubted):
    images = torch.full((count, 1, 2, 2), 0.5)
    images[:marked, 0, 0, 0] = 0.2
    labels = torch.zeros(count, dtype=torch.int64)
    curve = robustness_curve(FragileToLittle(), images, labels, values=[0.05, 0.2], attack="noise")
    assert curve.accuracies == [1 - marked / count, 1.0]
    assert bool(curve.doubts) == doubted


@dataclass(frozen=True)
class Staged(Attack):
    """Brightens all images by a few amounts, one a stage."""

    name = "staged"
    shifts: tuple[float, ...] = ()

    def stages(self, task: Any) -> list:
        return [(str(shift), lambda task, shift=shift: task.x + shift) for shift in self.shifts]


def test_loss_and_distance_are_those_of_the_worst_point_that_did_not_break_an_image():
    def model(x: Tensor) -> Tensor:
        place = x.flatten(1).mean(1)
        return torch.stack([0.9 - place, 0 * place], 1)  # wrong above 0.9, the nearer the larger the loss

    images, labels = torch.tensor([0.1, 0.5, 0.85])[:, None, None, None].expand(3, 1, 2, 2), torch.zeros(3).long()
    bench = make_bench(model, images, labels, epsilon=0.3)
    found = bench.run(Staged((0.1, 0.3, 0.2)), bench.clean()).verdict
    assert found.correct.tolist() == [True, True, False]
    torch.testing.assert_close(found.distance, torch.tensor([0.3, 0.3, 0.1]))
    expected = torch.nn.functional.cross_entropy(
        model(images + found.distance.view(-1, 1, 1, 1)), labels, reduction="none"
    )
    torch.testing.assert_close(found.loss, expected)


def test_a_stage_that_lowers_the_loss_changes_nothing():
    from hyperball.attacks.bench import merge

    result = Verdict(torch.tensor([True, True]), torch.tensor([1.0, 1.0]), torch.tensor([0.1, 0.1]))
    merge(result, torch.tensor([1]), Verdict(torch.tensor([True]), torch.tensor([0.5]), torch.tensor([0.3])))
    assert result.loss.tolist() == [1.0, 1.0]
    torch.testing.assert_close(result.distance, torch.tensor([0.1, 0.1]))
