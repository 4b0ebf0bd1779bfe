"""Models of other dtypes, models that write into their input or give no numbers, and arguments that are wrong."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attack_models import EPSILON, Around, sample, trained
from torch import Tensor, nn

from hyperball.attacks import (
    MissingExtra,
    evaluate_robustness,
    fast_fgsm,
    fgsm,
    parse,
    parse_epsilon,
    pgd,
    robustness_curve,
    trades_loss,
)
from hyperball.attacks.methods.auto import seeded
from hyperball.attacks.surrogate import surrogate
from hyperball.nn import Projection

FEW = {"epsilon": EPSILON, "checks": False, "batch_size": 16}
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


def of_dtype(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval().to(dtype)


@pytest.mark.parametrize("norm, epsilon", [("linf", 8 / 255), ("l2", 0.5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_models_of_every_dtype_are_attacked_within_the_budget(dtype, norm, epsilon):
    model, x = of_dtype(dtype), sample(24)[0]
    labels = model(x.to(dtype)).argmax(1)
    texts = ["fgsm", "pgd(steps=3)", "square(queries=5)", "apgd(steps=3)", "noise"]
    for images in (x, x.to(dtype)):
        found = evaluate_robustness(model, images, labels, epsilon=epsilon, norm=norm, attacks=texts, checks=False)
        assert found.clean_accuracy == 1
        for text in texts:
            assert float(found.verdict(text).distance.max()) <= epsilon * 1.00001


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checks_run_on_models_of_every_dtype(dtype):
    model, x = of_dtype(dtype), sample(8)[0]
    labels = model(x.to(dtype)).argmax(1)
    assert evaluate_robustness(model, x, labels, epsilon=0.05, attacks="fgsm").record["checks"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_attacks_in_l2_work_in_every_dtype(dtype):
    x, y = sample(8)
    moved = pgd(of_dtype(dtype), x.to(dtype), y, 0.5, step=0.2, iterations=3, norm="l2")
    assert moved.dtype == dtype
    assert moved.isfinite().all()
    assert 0.3 < float((moved - x.to(dtype)).float().flatten(1).norm(dim=1).max()) < 0.51


class InPlace(Around):
    def before(self, x: Tensor) -> Tensor:
        return x.sub_(0.5).add(0.5)


def test_a_model_that_writes_into_its_input_leaves_the_images_alone():
    x, y = sample(20)
    given = x.clone()
    found = evaluate_robustness(InPlace(trained()).eval(), given, y, attacks="fgsm,noise", **FEW)
    assert torch.equal(given, x)
    plain = evaluate_robustness(trained(), x, y, attacks="fgsm,noise", **FEW)
    assert [found.accuracy(name) for name in ("fgsm", "noise")] == [plain.accuracy(name) for name in ("fgsm", "noise")]
    assert float(found.verdict("fgsm").distance.max()) == pytest.approx(EPSILON, rel=1e-4)


class SameInPlace(Around):
    """Writes into its input what stands there already."""

    def before(self, x: Tensor) -> Tensor:
        return x.mul_(1.0)


@pytest.mark.parametrize("argument", ["model", "source"])
def test_a_model_that_writes_what_is_there_already_is_attacked_on_a_copy(argument):
    (x, y), plain = sample(20), trained(seed=1)
    text = "fgsm" if argument == "model" else "transfer(attack='fgsm')"
    found, expected = (
        evaluate_robustness(
            model if argument == "model" else trained(), x, y, attacks=text, source=model, **FEW
        ).verdict(text)
        for model in (SameInPlace(plain).eval(), plain)
    )
    assert torch.equal(found.correct, expected.correct)
    assert torch.equal(found.loss, expected.loss)


def test_inputs_that_ask_for_a_gradient_are_taken_without_a_warning():
    (x, y), clouds = sample(8), torch.rand(8, 5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluate_robustness(trained(), x.clone().requires_grad_(), y, attacks="fgsm,noise", **FEW)
        robustness_curve(lambda z: z.flatten(1)[:, :2], clouds.requires_grad_(), y % 2, "outliers", [0, 0.5])
    assert found.record["attacks"][0]["correct"]


def test_a_model_that_counts_votes_is_attacked_without_gradients():
    votes = evaluate_robustness(lambda x: trained()(x).round().long(), *sample(10), attacks="noise", **FEW)
    assert votes.clean_accuracy > 0.5


class BatchStatistics(Around):
    def before(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.flatten(1), None, None, training=True).view(x.shape)


def test_a_model_that_needs_a_batch_is_refused_at_the_door():
    with pytest.raises(ValueError, match="must take a batch of one image, and takes 2 but not one"):
        evaluate_robustness(BatchStatistics(trained()).eval(), *sample(8), attacks="fgsm", **FEW)


class Undefined(Around):
    """Not a number where a pixel is no whole byte."""

    def forward(self, x: Tensor) -> Tensor:
        moved = ((255 * x) - (255 * x).round()).abs().amax((1, 2, 3)) > 1e-3
        return torch.where(moved[:, None], torch.nan, self.base(x))


def test_logits_that_are_not_finite_are_a_doubt_and_the_record_is_written(tmp_path):
    path = tmp_path / "attack.json"
    found = evaluate_robustness(
        Undefined(trained()).eval(), *sample(40), epsilon=EPSILON, attacks="fgsm", check_images=8, path=path
    )
    assert any("logits are not finite" in doubt and "under fgsm" in doubt for doubt in found.doubts)
    assert json.loads(path.read_text())["doubts"] == found.doubts


class Masked(Around):
    def after(self, logits: Tensor) -> Tensor:
        return torch.cat([logits, torch.full_like(logits[:, :1], -torch.inf)], 1)


def test_a_logit_of_minus_infinity_is_the_reason_that_is_given():
    found = evaluate_robustness(Masked(trained()).eval(), *sample(10), attacks="noise", **FEW)
    assert found.clean_accuracy == 0
    assert any("100.0 % of the images under clean" in doubt for doubt in found.doubts)


def test_square_in_l2_names_its_extra_at_the_door(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(MissingExtra, match=r"hyperball\[attack\]"):
        evaluate_robustness(trained(), *sample(4), attacks="fgsm,square", norm="l2", **FEW)
    found = evaluate_robustness(trained(), *sample(40), epsilon=0.5, norm="l2", attacks="fgsm", check_images=8)
    assert any("Square in L2 needs pyautoattack" in doubt for doubt in found.doubts)


def test_seeding_for_the_cpu_touches_no_gpu(monkeypatch):
    seen: list[int] = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seen.append)
    before = torch.get_rng_state()
    with seeded(3, torch.device("cpu")):
        drawn = torch.rand(3)
    assert not seen
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_a_surrogate_inside_a_surrogate_ends_with_the_outer_one():
    model = nn.Sequential(Projection(2.0, radius=1.0, learn=False, dim=1)).eval()
    x = torch.randn(4, 6, requires_grad=True)

    def slope() -> Tensor:
        return torch.autograd.grad((model(x) ** 3).sum(), x)[0]

    own = slope()
    with surrogate(model):
        outer = slope()
        with surrogate(model):
            pass
        assert torch.equal(slope(), outer)
    assert torch.equal(slope(), own)
    assert not torch.equal(own, outer)


@pytest.mark.parametrize("value", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25), torch.tensor([0.25])])
def test_numbers_of_other_libraries_are_budgets(value):
    assert parse_epsilon(value) == 0.25


@pytest.mark.parametrize("value", [10**400, -(10**400), True, torch.ones(2), 1j, None])
def test_numbers_that_are_no_budget_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="`epsilon` must be"):
        parse_epsilon(value)


ATTACKS = {
    "fgsm": fgsm,
    "fast_fgsm": fast_fgsm,
    "pgd": lambda *given: pgd(*given, step=0.1, iterations=1),
    "trades": lambda *given: trades_loss(*given, step=0.1, iterations=1),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_training_attacks_take_texts_and_refuse_what_is_no_batch(name):
    attack, (x, y) = ATTACKS[name], sample(4)
    attack(trained(), x, y, "8/255")
    for wrong in ((255 * x).to(torch.uint8), x[:0]):
        with pytest.raises(ValueError, match="`x` must be at least one image in floating point"):
            attack(trained(), wrong, y[: len(wrong)], 0.1)
    for epsilon in ("x", 0, -1):
        with pytest.raises(ValueError, match="`epsilon` must be"):
            attack(trained(), x, y, epsilon)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("wrong", [-1, 10])
def test_training_attacks_name_a_label_outside_the_classes(name, wrong):
    x, y = sample(4)
    labels = y.clone()
    labels[2] = wrong
    with pytest.raises(ValueError, match=rf"`labels` must be in 0\.\.9, the model's 10 classes, got {wrong}"):
        ATTACKS[name](trained(), x, labels, 0.1)


STEPPED = {"pgd": pgd, "trades": trades_loss}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_and_iterations_are_checked_in_one_way(name):
    attack, (x, y) = STEPPED[name], sample(4)

    def run(**options):
        found = attack(trained(), x, y, "8/255", generator=torch.Generator().manual_seed(0), **options)
        return found if name == "pgd" else found[0]

    assert torch.equal(run(step="2/255", iterations=2), run(step=2 / 255, iterations=2))
    for step in (0, "0", -1, "x", float("inf")):
        with pytest.raises(ValueError, match="`step` must be"):
            run(step=step, iterations=2)
    for count in (2.5, 0, True, "3"):
        with pytest.raises(ValueError, match="`iterations` must be a whole number >= 1"):
            run(step=0.1, iterations=count)


@pytest.mark.parametrize("step", [0, "0/255", -1, "x"])
@pytest.mark.parametrize("name", ["bim", "pgd", "surrogate"])
def test_steps_of_texts_are_checked_in_the_same_way(name, step):
    with pytest.raises(ValueError, match="`step` must be"):
        parse(f"{name}(step={step!r})")
    with pytest.raises(ValueError, match="`step` must be"):
        fast_fgsm(trained(), *sample(4), 0.1, step=step)


@pytest.mark.parametrize("beta", [0, -1, "6", None])
def test_the_weight_of_trades_is_a_number_above_zero(beta):
    with pytest.raises(ValueError, match="`beta` must be finite and > 0"):
        trades_loss(trained(), *sample(4), 0.1, step=0.1, iterations=1, beta=beta)


def test_inference_mode_is_named_and_not_the_model():
    x, y = sample(4)
    with torch.inference_mode():
        held = x.clone()
        with pytest.raises(RuntimeError, match="inference_mode"):
            fgsm(trained(), x, y, 0.1)
        with pytest.raises(RuntimeError, match="inference_mode"):
            evaluate_robustness(trained(), x, y, attacks="fgsm", **FEW)
    assert torch.equal(fgsm(trained(), held, y, 0.1), fgsm(trained(), x, y, 0.1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float32])
def test_labels_are_integers(dtype):
    with pytest.raises(ValueError, match="`labels` must be 4 integers"):
        evaluate_robustness(trained(), sample(4)[0], torch.ones(4, dtype=dtype), attacks="fgsm", **FEW)


@pytest.mark.parametrize("text", ["square(share='x')", "square(share=True)", "square(share=None)", "square(share=2)"])
def test_the_share_of_a_square_is_a_number(text):
    with pytest.raises(ValueError, match=r"`share` must be in \(0, 1\]"):
        parse(text)
