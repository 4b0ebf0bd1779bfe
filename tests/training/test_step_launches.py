"""How many operations a training step launches beside its network, and that few of them do the same."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launches import Launches, launches
from torch import Tensor, nn
from training_cases import BATCH, noise, small

from hyperball import models
from hyperball.kernels import dispatch
from hyperball.training import NonFiniteError
from hyperball.training.assembly import assemble
from hyperball.training.process.engine import build_engine, settings
from hyperball.training.statistics import Counts
from hyperball.training.update.ledger import Ledger
from hyperball.training.update.smoothing import cross_entropy
from hyperball.training.update.step import Step

HUGE = torch.finfo(torch.float32).max


@pytest.fixture
def step() -> Iterator[Step]:
    """A step that watches its losses as it does on a GPU, with an optimizer that heeds the flag as there."""
    recipe = small({"regularizers.label_smoothing": 0.1, "data.train_size": 64, "deterministic": False})
    with settings(recipe):
        made = assemble(recipe, build_engine(recipe, "cpu"), noise()).step
        made.on_gpu = True
        inner: Any = made.parts.inner
        inner.grad_scale, inner.found_inf = None, made.ledger.broken
        for group in inner.param_groups:
            group["fused"] = True
        yield made


def test_watching_and_counting_take_six_operations(step: Step) -> None:
    loss, logits, labels = torch.tensor(1.5), torch.randn(BATCH, 10), torch.arange(BATCH) % 10
    assert launches(lambda: step.guard(loss)) <= 2
    assert launches(lambda: step.ledger.add(loss, logits, labels)) <= 4


def test_a_cpu_reads_the_loss_and_does_nothing_else(step: Step) -> None:
    step.on_gpu = False
    assert launches(lambda: step.guard(torch.tensor(1.5))) == 1


@pytest.mark.parametrize("dtype, forward, backward", [(torch.float32, 5, 2), (torch.bfloat16, 6, 2)])
def test_smoothed_cross_entropy_takes_few_operations(dtype: torch.dtype, forward: int, backward: int) -> None:
    logits, y, one = torch.randn(8, 10, dtype=dtype, requires_grad=True), torch.arange(8), torch.ones(())
    made: list[Tensor] = []
    assert launches(lambda: made.append(cross_entropy(logits, y, 0.1))) <= forward
    assert launches(lambda: made[0].backward(one)) <= backward


def test_a_step_fills_no_gradient_of_its_loss(step: Step) -> None:
    step(0, 0, 0)
    step.place(0, 1, 1)
    with Launches() as counted:
        step.body()
    assert counted.found["ones_like"] == 0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_ledger_counts_the_steps_from_the_first_loss_that_is_not_finite(wrong: float) -> None:
    ledger = Ledger(3, torch.device("cpu"))
    flags = []
    for loss in (1.0, 0.0, -HUGE, HUGE, wrong, 2.0, wrong, -1.0):
        ledger.watch(torch.tensor(loss))
        ledger.add(torch.tensor(loss), torch.eye(3), torch.arange(3))
        flags.append(float(ledger.broken))
    assert flags == [0.0] * 4 + [1.0] * 4
    assert ledger.late == 4


def test_a_ledger_adds_losses_and_hits_in_double_precision() -> None:
    torch.manual_seed(0)
    ledger = Ledger(50, torch.device("cpu"))
    losses = torch.rand(40)
    hits = 0
    for loss in losses:
        logits, labels = torch.randn(50, 4).bfloat16(), torch.randint(4, (50,))
        hits += int((logits.argmax(1) == labels).sum())
        ledger.watch(loss)
        ledger.add(loss, logits, labels)
    assert ledger.totals().tolist() == [float(losses.double().sum()), hits]
    kept = ledger.state()
    ledger.begin(2.5, 7)
    assert ledger.totals().tolist() == [2.5, 7.0]
    ledger.restore(kept)
    assert ledger.totals()[1] == hits


def spoil(step: Step, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of one step NaN."""
    plain = step.parts.objective.cross_entropy

    def spoiled(logits: Tensor, y: Tensor) -> Tensor:
        return plain(logits, y) * (math.nan if step.done == at else 1.0)

    monkeypatch.setattr(step.parts.objective, "cross_entropy", spoiled)


@pytest.mark.parametrize("begin", [0, 5])
def test_the_weights_stay_those_of_the_step_whose_loss_was_not_finite(
    begin: int, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(step, begin + 2, monkeypatch)
    step.start_from(begin)
    moved, weights = [], [parameter.detach().clone() for parameter in step.parts.network.parameters()]
    for number in range(begin, begin + 5):
        step(number // 2, number % 2, number)
        present = [parameter.detach().clone() for parameter in step.parts.network.parameters()]
        moved.append(not all(torch.equal(a, b) for a, b in zip(weights, present, strict=True)))
        weights = present
    assert moved == [True, True, False, False, False]
    with pytest.raises(NonFiniteError, match=f"at step {begin + 2}; first in the loss itself"):
        step.tally()


def test_a_cpu_stops_at_the_step_itself(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    step.on_gpu = False
    spoil(step, 1, monkeypatch)
    step(0, 0, 0)
    with pytest.raises(NonFiniteError, match="at step 1;"):
        step(0, 1, 1)


def test_an_interval_that_is_loaded_goes_on_as_if_it_had_not_ended(step: Step) -> None:
    step(0, 0, 0)
    held = step.interval()
    assert held[2:] == [BATCH, 1]
    first = step.tally()
    assert first == (held[0], held[1] / BATCH)
    assert step.tally() == (0.0, 0.0)
    step(0, 1, 1)
    second = step.interval()
    step.load_interval([held[0], held[1], held[2], held[3]])
    step.ledger.sums += torch.tensor([0.0, second[0], second[1], *[0.0] * (BATCH - 1)])
    step.steps, step.samples = step.steps + 1, step.samples + BATCH
    loss, accuracy = step.tally()
    assert loss == pytest.approx((held[0] + second[0]) / 2)
    assert accuracy == (held[1] + second[1]) / (2 * BATCH)


def test_an_interval_of_two_processes_is_continued_by_one(step: Step) -> None:
    step.load_interval([12.0, 24.0, 3.0 * BATCH, 6])  # three steps of two processes, each half a batch
    assert step.interval() == [6.0, 24.0, 3.0 * BATCH, 3]
    step(0, 0, 0)
    loss, accuracy = float(step.ledger.loss), float(step.ledger.hits.sum())
    assert step.tally() == (pytest.approx((6.0 + loss) / 4), (24 + accuracy) / (4 * BATCH))


TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}


@pytest.mark.parametrize("smoothing", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_smoothed_cross_entropy_is_torchs(dtype: torch.dtype, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, y = (5.0 * torch.randn(16, 7, dtype=torch.float64)).to(dtype), torch.randint(7, (16,))
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ours = cross_entropy(found, y, smoothing)
    wide = expected if dtype == torch.float64 else expected.float()
    theirs = F.cross_entropy(wide, y, label_smoothing=smoothing)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    (3.0 * ours).backward()
    (3.0 * theirs).backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad, expected.grad, rtol=2 * torch.finfo(dtype).eps, atol=TOLERANCES[dtype] / 10)


@pytest.mark.parametrize("scale", [0.0, 1e4, 1e30])
def test_smoothed_cross_entropy_of_extreme_logits_is_torchs(scale: float) -> None:
    logits, y = scale * torch.eye(4), torch.tensor([0, 1, 3, 2])
    ours, theirs = cross_entropy(logits, y, 0.1), F.cross_entropy(logits, y, label_smoothing=0.1)
    torch.testing.assert_close(ours, theirs)
    assert cross_entropy(torch.tensor([[math.inf, 0.0]]), torch.tensor([0]), 0.1).isnan()


def test_smoothed_cross_entropy_has_first_and_second_derivatives() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, 1])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, y, 0.2), logits)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy(x, y, 0.2), logits)


def directional(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def many_gradients(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    weights = torch.eye(3, dtype=x.dtype)
    return torch.autograd.grad(f(x) * torch.arange(3.0, dtype=x.dtype), x, weights, is_grads_batched=True)[0]


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "vectorized hessian": lambda f, x: torch.autograd.functional.hessian(f, x, vectorize=True),
    "jvp": directional,
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])),
    "many gradients": many_gradients,
    "compile": lambda f, x: torch.compile(f, backend="eager", fullgraph=True)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_smoothed_cross_entropy_goes_through_every_transform(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.tensor([0, 3, 1])
    found = TRANSFORMS[name](lambda z: cross_entropy(z, y, 0.2), x)
    torch.testing.assert_close(found, TRANSFORMS[name](lambda z: F.cross_entropy(z, y, label_smoothing=0.2), x))


def test_a_step_is_seeded_as_torch_would(step: Step) -> None:
    step.seed(7)
    found = torch.rand(3)
    torch.manual_seed(step.recipe.seed * 0x9E3779B1 + 7)
    assert torch.equal(found, torch.rand(3))


def stack_of_norms() -> nn.Sequential:
    """Layers that count one batch, one that counts two, one that counts none, and one that reads its count."""
    twice = nn.BatchNorm1d(4)
    reading = nn.BatchNorm1d(4, momentum=None)
    asleep = nn.BatchNorm1d(4).eval()
    return nn.Sequential(nn.BatchNorm1d(4), twice, nn.BatchNorm1d(4), twice, reading, asleep)


def test_batches_are_counted_together_as_every_layer_would_alone() -> None:
    torch.manual_seed(0)
    ours, theirs = stack_of_norms(), stack_of_norms()
    x = torch.randn(8, 4)
    counts = Counts(ours, lambda: ours(x))
    theirs(x)
    assert counts.layers == [ours[0], ours[2]]
    for _ in range(3):
        with Launches() as counted, counts.together():
            ours(x)
        theirs(x)
    assert counted.found["_foreach_add_"] == 1
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value), key


def test_layers_count_again_for_themselves_after_an_error() -> None:
    norm = nn.BatchNorm1d(4)
    counts = Counts(norm, lambda: norm(torch.randn(8, 4)))
    with pytest.raises(ZeroDivisionError), counts.together():
        raise ZeroDivisionError
    assert norm.state_dict()["num_batches_tracked"] == 1


@pytest.mark.parametrize("magnitude, together", [(None, True), ("linear", True), ("tanh", False)])
def test_a_prepared_step_counts_every_batch_once(
    magnitude: str | None, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    recipe = small({"model.magnitude": magnitude, "data.train_size": 64, "engine.compile": True})
    with settings(recipe):
        step = assemble(recipe, build_engine(recipe, "cpu"), noise()).step
        for number in range(3):
            step(number // 2, number % 2, number)
    assert step.compiled.on, step.compiled.reason
    norms = [part for part in step.parts.network.modules() if isinstance(part, nn.BatchNorm2d)]
    assert norms
    assert (step.counts is not None and len(step.counts.layers) >= len(norms)) == together
    assert all(torch.equal(norm.state_dict()["num_batches_tracked"], torch.tensor(3)) for norm in norms)


@pytest.mark.parametrize("weighting", ["none", "linear"])
def test_a_linear_magnitude_with_cosine_compiles_as_a_whole_as_on_a_gpu(
    weighting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    options: dict[str, Any] = {"magnitude": "linear", "weighting": weighting, "num_classes": 10}
    torch.manual_seed(0)
    plain = models.create("digits", **options).train()
    compiled = models.create("digits", **options).train()
    compiled.load_state_dict(plain.state_dict())
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
    forwards: tuple[Any, Any] = (plain, torch.compile(compiled, backend="aot_eager", fullgraph=True, dynamic=False))
    curves = []
    for network, forward in zip((plain, compiled), forwards, strict=True):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        curve = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
            curve.append(float(loss.detach()))
        curves.append(curve)
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][-1] < curves[0][0]
