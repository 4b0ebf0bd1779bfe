"""Gradient attacks: equal to foolbox's to the bit, inside the ball, and what adversarial training is given."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attack_models import EPSILON, Noisy, Saturated, digits, sample, trained
from torch import nn

from hyperball.attacks import fast_fgsm, fgsm, perturb, pgd, trades_loss
from hyperball.attacks.gradient import ascend
from hyperball.attacks.methods.task import cross_entropy
from hyperball.attacks.methods.white_box import targets
from hyperball.attacks.norms import NORMS, euclidean

BUDGETS = {"linf": 0.1, "l2": 0.8}
FOOLBOX = {
    ("linf", "fgsm"): "LinfFastGradientAttack",
    ("l2", "fgsm"): "L2FastGradientAttack",
    ("linf", "bim"): "LinfBasicIterativeAttack",
    ("l2", "bim"): "L2BasicIterativeAttack",
    ("linf", "pgd"): "LinfProjectedGradientDescentAttack",
    ("l2", "pgd"): "L2ProjectedGradientDescentAttack",
}


def start_of(model, x, y, norm, seed):
    """The random start of our PGD: where it stands before its first step of (nearly) no length."""
    return perturb(model, x, y, BUDGETS[norm], f"pgd(steps=1, step={1e-30})", norm=norm, seed=seed)[0]


@pytest.fixture(name="foolbox")
def _foolbox():
    return pytest.importorskip("foolbox")


def foolbox_images(foolbox, model, x, criterion, norm, name, start=None, **options):
    attack = getattr(foolbox.attacks, FOOLBOX[norm, name])(**options)
    if start is not None:
        attack.get_random_start = lambda x0, epsilon: type(x0)(start)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1))
    return attack.run(bounded, x, criterion, epsilon=BUDGETS[norm])


@pytest.mark.parametrize("norm", BUDGETS)
@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd"])
def test_images_equal_those_of_foolbox_to_the_bit(foolbox, norm, name):
    model, (x, y) = trained(), sample(100)
    epsilon = BUDGETS[norm]
    text, options, start = "fgsm", {}, None
    if name == "bim":
        text, options = "bim(steps=10)", {"steps": 10, "abs_stepsize": epsilon / 4, "random_start": False}
    if name == "pgd":
        text, options = "pgd(steps=20)", {"steps": 20, "abs_stepsize": 2.5 * epsilon / 20, "random_start": True}
        start = start_of(model, x, y, norm, 3)
        assert not torch.equal(start, x)
    theirs = foolbox_images(foolbox, model, x, y, norm, name, start, **options)
    ours, verdict = perturb(model, x, y, epsilon, text, norm=norm, seed=3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert torch.equal(verdict.correct, model(theirs).argmax(1) == y)


@pytest.mark.parametrize("norm", BUDGETS)
def test_targeted_images_equal_those_of_foolbox_to_the_bit(foolbox, norm):
    model, (x, y) = trained(), sample(60)
    goal = (y + 3) % 10
    theirs = foolbox_images(
        foolbox, model, x, foolbox.criteria.TargetedMisclassification(goal), norm, "pgd",
        steps=15, abs_stepsize=0.02, random_start=False,
    )  # fmt: skip
    ours = ascend(
        model, x, lambda logits: cross_entropy(logits, goal).sum(), BUDGETS[norm],
        step=-0.02, iterations=15, norm=NORMS[norm],
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    gain = model(ours).gather(1, goal[:, None]) - model(x).gather(1, goal[:, None])
    assert float(gain.mean()) > 0


STEPS = ["fgsm", "bim", "pgd(restarts=2)", "pgd(loss='margin')", "pgd(target='random')"]
TEXTS = [*STEPS, "square(queries=60)", "noise(k=3)", "apgd(steps=10)", "apgd-dlr(steps=10)"]


@pytest.mark.parametrize("norm", BUDGETS)
@pytest.mark.parametrize("text", TEXTS)
def test_images_stay_in_the_ball_and_among_pixels(text, norm):
    model, (x, y) = trained(), sample(32)
    moved, verdict = perturb(model, x, y, BUDGETS[norm], text, norm=norm)
    distance = (moved - x).abs().amax((1, 2, 3)) if norm == "linf" else euclidean(moved - x)
    assert moved.shape == x.shape
    assert 0 < float(distance.max()) <= BUDGETS[norm] * (1 + 1e-5)
    torch.testing.assert_close(verdict.distance, distance)
    assert 0 <= float(moved.min()) <= float(moved.max()) <= 1


def test_more_restarts_break_at_least_as_many_images():
    model, (x, y) = trained(), sample(100)
    one, five = (perturb(model, x, y, EPSILON, f"pgd(restarts={count})")[1] for count in (1, 5))
    assert not (five.correct & ~one.correct).any()
    assert int(five.correct.sum()) < int(one.correct.sum())


@pytest.mark.parametrize("kind", ["runner_up", "least_likely", "random"])
def test_targets_are_never_the_label(kind):
    from hyperball.attacks.bench import make_bench

    model, (x, y) = trained(), sample(100)
    task = make_bench(model, x, y, epsilon=EPSILON).task(torch.arange(100))
    chosen = [targets(task, kind, number) for number in range(9)]
    assert all(not (goal == y).any() for goal in chosen)
    if kind != "random":
        assert torch.stack(chosen).sort(0).values.unique(dim=0).shape[0] == 9  # every wrong class has its turn
        own = model(x).scatter(1, y[:, None], -torch.inf if kind == "runner_up" else torch.inf)
        assert torch.equal(chosen[0], own.argmax(1) if kind == "runner_up" else own.argmin(1))


def test_the_margin_loss_has_a_gradient_where_cross_entropy_is_saturated():
    model, (x, y) = Saturated(trained()).eval(), sample(100)
    ce, margin = (perturb(model, x, y, EPSILON, f"pgd(loss={loss!r})")[1] for loss in ("ce", "margin"))
    assert float(margin.correct.float().mean()) < float(ce.correct.float().mean()) - 0.3


def test_averaged_gradients_are_nearer_to_the_mean_of_a_randomized_model():
    model, (x, y) = Noisy(trained()).eval(), sample(100)
    one, many = (perturb(model, x, y, EPSILON, f"pgd(steps=10, eot={eot})")[0] for eot in (1, 8))
    quiet = trained()
    loss = [float(F.cross_entropy(quiet(moved), y)) for moved in (one, many)]
    assert loss[1] > loss[0]


def test_l2_directions_are_unit_vectors_however_small_or_large_the_gradient():
    slope = torch.randn(4, 1, 3, 3) * torch.tensor([1e-30, 1.0, 1e30, 0.0]).view(-1, 1, 1, 1)
    lengths = euclidean(NORMS["l2"].direction(slope))
    torch.testing.assert_close(lengths, torch.tensor([1.0, 1.0, 1.0, 0.0]))


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_that_are_not_numbers_move_nothing(norm):
    slope = torch.tensor([[float("nan"), 2.0], [float("nan"), float("nan")]])[:, None, None]
    step = NORMS[norm].direction(slope)
    torch.testing.assert_close(step, torch.tensor([[0.0, 1.0], [0.0, 0.0]])[:, None, None])


TRAINING = {
    "fgsm": lambda model, x, y: fgsm(model, x, y, EPSILON),
    "fast": lambda model, x, y: fast_fgsm(model, x, y, EPSILON),
    "pgd": lambda model, x, y: pgd(model, x, y, EPSILON, step=EPSILON / 4, iterations=5),
    "pgd in L2": lambda model, x, y: pgd(model, x, y, 0.5, step=0.1, iterations=5, norm="l2"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_attacks_for_training_raise_the_loss_and_leave_parameters_alone(name):
    model = copy.deepcopy(trained()).requires_grad_(True)
    x, y = sample(64)
    moved = TRAINING[name](model, x, y)
    assert not moved.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        assert float(F.cross_entropy(model(moved), y)) > 1.5 * float(F.cross_entropy(model(x), y))


def test_fast_fgsm_is_one_step_of_five_quarters_of_the_budget_from_a_random_start():
    model, (x, y) = trained(), sample(64)
    seeds = (torch.Generator().manual_seed(5) for _ in range(3))
    found = fast_fgsm(model, x, y, EPSILON, generator=next(seeds))
    expected = pgd(model, x, y, EPSILON, step=1.25 * EPSILON, iterations=1, generator=next(seeds))
    shorter = pgd(model, x, y, EPSILON, step=EPSILON, iterations=1, generator=next(seeds))
    assert torch.equal(found, expected)
    assert not torch.equal(found, shorter)


def test_trades_is_the_formula_of_its_paper():
    """CE(f(x), y) + β·mean_i Σ_k p_k(x_i)·(log p_k(x_i) − log p_k(x'_i)), x' by signed steps on that divergence."""
    model, (x, y) = trained(), sample(16)
    beta, step, iterations = 3.0, EPSILON / 3, 4

    def kl(moved):
        p, q = model(x).softmax(1), model(moved).softmax(1)
        return (p * (p.log() - q.log())).sum(1).mean()

    noise = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(2))
    moved = (x + 1e-3 * noise).clamp(0, 1)
    for _ in range(iterations):
        (slope,) = torch.autograd.grad(kl(moved.requires_grad_()), moved)
        moved = (x + (moved.detach() + step * slope.sign() - x).clamp(-EPSILON, EPSILON)).clamp(0, 1)
    expected = F.cross_entropy(model(x), y) + beta * kl(moved)
    found, _ = trades_loss(
        model, x, y, EPSILON, step=step, iterations=iterations, beta=beta, generator=torch.Generator().manual_seed(2)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert float(beta * kl(moved)) > 0.1 * float(expected)


def test_trades_is_clean_loss_plus_a_divergence_that_training_can_lower():
    inputs, labels, _, _ = digits()
    x, y = inputs[:64], labels[:64]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    options = {"step": EPSILON / 4, "iterations": 3}
    loss, logits = trades_loss(model, x, y, EPSILON, beta=6.0, **options)
    clean = F.cross_entropy(model(x), y)
    assert torch.equal(logits, model(x))
    assert float(loss.detach()) > float(clean.detach())
    (slope,) = torch.autograd.grad(loss, model[1].weight)
    with torch.no_grad():
        model[1].weight -= 0.05 * slope
    assert float(trades_loss(model, x, y, EPSILON, beta=6.0, **options)[0].detach()) < float(loss.detach())
