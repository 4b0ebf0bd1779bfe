"""Schedules, optimizers, averages, metrics and statistics, each alone."""

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperball as hb
from hyperball.training import NonFiniteError, OptimizerConfig, ProcessLost, Recipe, RecipeError, ScheduleConfig
from hyperball.training.measures.metrics import average_precisions, calibration_error, measure, top_k
from hyperball.training.process.engine import decide_capture, decide_compile, process_counts
from hyperball.training.process.interrupts import together
from hyperball.training.statistics import begin_at_first_batch
from hyperball.training.storage.record import encoded
from hyperball.training.update import optimizers as optimizing
from hyperball.training.update.average import Average, averaging_weight
from hyperball.training.update.offender import first_offender
from hyperball.training.update.schedule import Schedule


def test_metrics_that_are_not_finite_are_null_in_json() -> None:
    found = measure(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 0])).as_dict()
    assert found["loss"] is None
    assert found["nonfinite"] == 4
    json.dumps(found, allow_nan=False)


def test_a_peer_that_is_gone_is_one_line_with_the_resume_command() -> None:
    trace = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234\nframe #0"
    with pytest.raises(ProcessLost) as caught, together("hyperball resume a", 2):
        raise RuntimeError(trace)
    expected = "another process of this run has ended (connection closed by peer); resume with: hyperball resume a"
    assert str(caught.value) == expected
    for processes, text in ((1, trace), (2, "something else")):
        with pytest.raises(RuntimeError) as kept, together("hyperball resume a", processes):
            raise RuntimeError(text)
        assert not isinstance(kept.value, ProcessLost)


def factors(config: ScheduleConfig, total: int = 20, per_epoch: int = 4) -> list[float]:
    schedule = Schedule(config, total, per_epoch)
    return [schedule.factor(step) for step in range(total)]


@pytest.mark.parametrize(
    "config, torch_schedule",
    [
        (ScheduleConfig(name="constant"), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        (
            ScheduleConfig(name="step", milestones=(1, 3)),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 12], 0.1),
        ),
        (
            ScheduleConfig(name="step", unit="steps", milestones=(5, 6)),
            lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [5, 6], 0.1),
        ),
        (
            ScheduleConfig(name="step", every=2, gamma=0.5),
            lambda o: torch.optim.lr_scheduler.StepLR(o, 8, 0.5),
        ),
        (
            ScheduleConfig(name="cosine", floor=0.1),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, 0.1),
        ),
    ],
    ids=lambda item: getattr(item, "name", ""),
)  # fmt: skip
def test_a_schedule_is_torchs(config: ScheduleConfig, torch_schedule: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch_schedule(optimizer)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert factors(config) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_warmup_is_linear_and_then_the_schedule() -> None:
    warm = factors(ScheduleConfig(name="cosine", warmup=1))
    assert warm[:4] == [0.25, 0.5, 0.75, 1.0]
    assert warm[4] == 1.0
    assert warm[-1] == pytest.approx(0.5 * (1 + math.cos(math.pi * 15 / 16)))


def test_a_plateau_lowers_the_rate_after_waiting_and_remembers() -> None:
    config = ScheduleConfig(name="plateau", patience=1, floor=0.02)
    schedule = Schedule(config, 100, 10)
    seen = []
    for loss in (1.0, 0.5, 0.5, 0.5, 0.4, 0.4, 0.4, 0.4, 0.4):
        schedule.observe(loss)
        seen.append(schedule.factor(0))
    assert seen == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.02, 0.02, 0.02])
    other = Schedule(config, 100, 10)
    other.load_state_dict(schedule.state_dict())
    assert other.state_dict() == schedule.state_dict()


def test_a_warmup_longer_than_the_run_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"`schedule\.warmup` must be shorter than the run of 20 steps, got 20"):
        Schedule(ScheduleConfig(warmup=5), 20, 4)


def model() -> nn.Module:
    return nn.Sequential(
        hb.nn.DecoupledConv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten(),
        hb.nn.Projection(p=2), nn.LazyLinear(3),
    )  # fmt: skip


def names_by_group(config: OptimizerConfig) -> dict[str, set[str]]:
    built = model()
    built(torch.randn(2, 1, 5, 5))
    return {group["name"]: set(group["param_names"]) for group in optimizing.groups(built, config)}


def test_decay_acts_on_what_the_recipe_says() -> None:
    weights, norms, radii = {"2.weight", "5.weight"}, {"1.weight", "1.bias"}, {"0.magnitude.ratio", "4.log_radius"}
    rest = {"0.weight", "2.bias", "5.bias"}
    groups = names_by_group(OptimizerConfig(weight_decay=0.1))
    assert groups == {"decay": weights, "no_decay": norms | radii | rest}
    groups = names_by_group(OptimizerConfig(weight_decay=0.1, decay="weights+norms", radius_lr=0.01))
    assert groups == {"decay": weights | norms, "no_decay": rest, "radius": radii}
    groups = names_by_group(OptimizerConfig(weight_decay=0.1, decay="classifier+norms", radius_lr=0.01))
    assert groups == {"decay": {"5.weight"} | norms, "no_decay": rest | {"2.weight"}, "radius": radii}
    groups = names_by_group(OptimizerConfig(weight_decay=0.1, decay="all", radius_lr=0.01))
    assert groups == {"decay": weights | norms | rest, "radius": radii}


def decayed(config: OptimizerConfig, **options: Any) -> set[str]:
    built = hb.models.create("cnn9", 10, width=4, features=8, **options)
    found = {group["name"]: set(group["param_names"]) for group in optimizing.groups(built, config)}
    return found["decay"]


@pytest.mark.parametrize("options", [{}, {"projection": "l2_ball"}, {"classifier_bias": True}])
def test_a_plain_network_can_be_decayed_where_a_decoupled_one_is(options: dict[str, Any]) -> None:
    spared = OptimizerConfig(weight_decay=0.1, decay="classifier+norms")
    usual = OptimizerConfig(weight_decay=0.1, decay="weights+norms")
    assert decayed(spared, **options) == decayed(usual, magnitude="tanh", **options)
    assert decayed(spared, **options) == decayed(spared, magnitude="tanh", **options)
    assert decayed(usual, **options) - decayed(spared, **options) >= {"stages.0.0.weight", "fc.weight"}


def test_a_normalized_classifier_is_spared_by_every_decay_but_all() -> None:
    config = OptimizerConfig(weight_decay=0.1, decay="classifier+norms")
    assert "classifier.weight" not in decayed(config, classifier_normalized=True)


def test_a_decay_of_the_classifier_needs_one() -> None:
    config = OptimizerConfig(weight_decay=0.1, decay="classifier+norms")
    with pytest.raises(RecipeError, match="needs a network with a linear classifier, got Sequential"):
        optimizing.groups(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), config)


@pytest.mark.parametrize("schedule, rate", [("same", 1e-3), ("constant", 1e-2)])
def test_radii_have_a_rate_of_their_own(schedule: Any, rate: float) -> None:
    config = OptimizerConfig(lr=1.0, radius_lr=1e-2, radius_schedule=schedule)
    built = model()
    built(torch.randn(2, 1, 5, 5))
    optimizer = optimizing.build(built, config, torch.device("cpu"))
    rates = optimizing.Rates(optimizer, config)
    rates.set(0.1)
    assert rates.by_group() == pytest.approx({"decay": 0.1, "no_decay": 0.1, "radius": rate})
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(rates.by_group())


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_an_optimizer_continues_from_its_named_state(name: Any) -> None:
    def steps(network: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            network(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    config = OptimizerConfig(name=name, lr=0.1, weight_decay=0.01)
    original = optimizing.build(first, config, torch.device("cpu"))
    steps(first, original, 3)
    second.load_state_dict(first.state_dict())
    copy = optimizing.build(second, config, torch.device("cpu"))
    optimizing.load_state_by_name(copy, *optimizing.state_by_name(original))
    steps(first, original, 3)
    steps(second, copy, 3)
    assert torch.equal(first.weight, second.weight)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_moments_come_back_with_the_strides_of_their_parameters(name: Any) -> None:
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = optimizing.build(network, OptimizerConfig(name=name, lr=0.1), torch.device("cpu"))
    network(torch.randn(2, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    tensors, values = optimizing.state_by_name(optimizer)
    moments = {key: held.clone() for key, held in tensors.items() if held.dim() == 4}
    assert moments
    optimizing.load_state_by_name(optimizer, {key: held.contiguous() for key, held in tensors.items()}, values)
    again, _ = optimizing.state_by_name(optimizer)
    for key, held in moments.items():
        assert again[key].stride() == network.weight.stride()
        assert torch.equal(again[key], held)


def test_an_average_follows_its_formula_and_leaves_the_model_alone() -> None:
    network = nn.Linear(2, 1, bias=False)
    average = Average(network, decay=0.99)
    expected = network.weight.detach().clone()
    for step in range(5):
        with torch.no_grad():
            network.weight.add_(1.0)
        average.before(step)
        average.update()
        expected += averaging_weight(step, 0.99) * (network.weight.detach() - expected)
    torch.testing.assert_close(average.shadows["weight"], expected)
    before = network.weight.detach().clone()
    with average.applied():
        assert torch.equal(network.weight, average.shadows["weight"])
    assert torch.equal(network.weight, before)
    assert averaging_weight(10**6, 0.99) == pytest.approx(0.01)


def predictions(ties: bool) -> tuple[Tensor, Tensor]:
    logits = torch.randn(200, 8)
    return (logits.mul(2).round() if ties else logits), torch.randint(8, (200,))


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_scikit_learns(ties: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, labels = predictions(ties)
    expected = [metrics.average_precision_score(labels == k, logits[:, k]) for k in range(8)]
    assert average_precisions(logits, labels)[0].tolist() == pytest.approx(expected, rel=1e-9)


def pascal_voc(scores: list[float], belongs: list[bool]) -> float:
    """The area below the envelope of precision over recall, sample by sample from the highest score."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    points, hits = [], 0
    for count, i in enumerate(order, 1):
        hits += belongs[i]
        points.append((hits / sum(belongs), hits / count))
    area, before = 0.0, 0.0
    for at, (recall, _) in enumerate(points):
        if recall > before:
            area += (recall - before) * max(precision for _, precision in points[at:])
            before = recall
    return area


@pytest.mark.parametrize("skill", [0.0, 1.0, 4.0])
def test_interpolated_average_precision_is_that_of_pascal_voc(skill: float) -> None:
    logits, labels = predictions(ties=False)
    logits = logits + skill * torch.nn.functional.one_hot(labels, 8)
    plain, interpolated = average_precisions(logits, labels)
    expected = [pascal_voc(logits[:, k].tolist(), (labels == k).tolist()) for k in range(8)]
    assert interpolated.tolist() == pytest.approx(expected, rel=1e-9)
    assert (interpolated >= plain).all()
    found = measure(logits, labels)
    assert found.voc6_raw == pytest.approx(sum(expected[:6]) / 6)
    likely = logits.double().softmax(1)
    first = [pascal_voc(likely[:, k].tolist(), (labels == k).tolist()) for k in range(6)]
    assert found.voc6_softmax == pytest.approx(sum(first) / 6)


def test_ties_are_no_better_interpolated_than_the_share_of_a_class() -> None:
    labels = torch.arange(100) % 10
    assert average_precisions(torch.zeros(100, 10), labels)[1].tolist() == pytest.approx([0.1] * 10)
    few = measure(torch.randn(20, 5), torch.arange(20) % 5)
    assert (few.map6_raw, few.voc6_raw, few.voc6_softmax) == (None, None, None)


@pytest.mark.parametrize("classes", [1, 3, 7])
def test_average_precision_of_a_few_classes_at_a_time_is_that_of_all(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = predictions(ties=True)
    together = torch.stack(average_precisions(logits, labels))
    monkeypatch.setattr("hyperball.training.measures.metrics.SCORES", classes * len(logits))
    torch.testing.assert_close(torch.stack(average_precisions(logits, labels)), together, rtol=1e-12, atol=0)


def test_metrics_are_torchmetrics() -> None:
    functional = pytest.importorskip("torchmetrics.functional.classification")
    logits, labels = predictions(ties=False)
    found = measure(logits, labels)
    options = {"num_classes": 8}
    probabilities = logits.softmax(1)
    for name, value in {
        "top1": functional.multiclass_accuracy(probabilities, labels, average="micro", **options),
        "top5": functional.multiclass_accuracy(probabilities, labels, top_k=5, average="micro", **options),
        "ece": functional.multiclass_calibration_error(probabilities, labels, n_bins=15, **options),
        "map_softmax": functional.multiclass_average_precision(probabilities, labels, **options),
    }.items():
        assert getattr(found, name) == pytest.approx(float(value), abs=1e-6), name
    first = average_precisions(logits.double(), labels)[0][:6].mean()
    assert found.map6_raw == pytest.approx(float(first))


def test_raw_average_precision_sees_what_softmax_hides() -> None:
    logits, labels = predictions(ties=False)
    shifted = logits + 10 * torch.randn(200, 1)
    assert measure(shifted, labels).map_softmax == pytest.approx(measure(logits, labels).map_softmax, abs=1e-6)
    assert measure(shifted, labels).map_raw != pytest.approx(measure(logits, labels).map_raw, abs=1e-3)


def test_ties_do_not_make_a_classifier_better() -> None:
    logits, labels = torch.zeros(100, 10), torch.arange(100) % 10
    assert top_k(logits, labels, 1) == pytest.approx(0.1)
    assert top_k(logits, labels, 5) == pytest.approx(0.5)
    assert calibration_error(logits.softmax(1), labels) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_never_right(bad: float) -> None:
    labels = torch.arange(40) % 8
    logits = torch.nn.functional.one_hot(labels, 8).float()
    logits[:10] = bad
    found = measure(logits, labels)
    assert found.nonfinite == 10
    assert found.top1 <= (30 + 2) / 40  # of ten ties, at most those of the first class
    everything = measure(torch.full((40, 8), math.nan), labels)
    assert (everything.top1, everything.nonfinite) == (0.0, 40)
    assert json.loads(encoded(everything.as_dict()))["loss"] is None


def test_statistics_begin_at_the_first_batch_and_nothing_else_moves() -> None:
    network = nn.Sequential(hb.nn.DecoupledLinear(4, 3), nn.BatchNorm1d(3, momentum=0.001), nn.Linear(3, 2))
    x = torch.randn(50, 4)
    assert begin_at_first_batch(network, lambda: network(x))
    features = network[0].eval()(x)
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.momentum == 0.001
    assert int(norm.num_batches_tracked) == 0
    assert int(network[0].magnitude.batches) == 0
    assert float(norm.running_var.max()) < 0.5
    assert norm.running_mean.shape == features.shape[1:]
    assert not begin_at_first_batch(nn.Linear(2, 2), lambda: None)


class Divided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


OFFENDERS = [
    (nn.Sequential(nn.Linear(2, 2), Divided(), nn.ReLU()), torch.ones(1, 2), "layer 1 (Divided)"),
    (nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, float("nan")]]), "the inputs"),
    (nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), "the loss itself: every layer's output is finite"),
]


@pytest.mark.parametrize("network, inputs, where", OFFENDERS)
def test_the_first_offender_is_named(network: nn.Module, inputs: Tensor, where: str) -> None:
    assert first_offender(network, inputs, lambda: network(inputs)) == where
    assert str(NonFiniteError(7, where)) == f"the loss is not finite at step 7; first in {where}"


def test_a_spoiled_parameter_is_the_first_offender() -> None:
    network = nn.Linear(2, 2)
    nn.init.constant_(network.bias, math.inf)
    assert first_offender(network, torch.ones(1, 2), lambda: None).startswith("the parameter bias")


@pytest.mark.parametrize(
    "changes, device, world, compiled, captured",
    [
        ({}, "cpu", 1, False, False),
        ({"steps": 42_500}, "cuda", 1, True, True),
        ({"steps": 100}, "cuda", 1, False, True),
        ({"steps": 42_500, "model.magnitude": "tanh"}, "cuda", 1, False, True),
        ({"steps": 42_500, "model.magnitude": "linear"}, "cuda", 1, True, True),
        ({"steps": 42_500, "model.magnitude": "linear", "model.weighting": "linear"}, "cuda", 1, True, True),
        ({"steps": 42_500, "model.magnitude": "linear", "model.angular": "sigmoid"}, "cuda", 1, False, True),
        ({"steps": 42_500, "model.magnitude": "tanh", "model.weighting": "split"}, "cuda", 1, True, True),
        ({"steps": 42_500, "model.magnitude": "tanh + ball"}, "cuda", 1, True, True),
        ({"steps": 100, "model.magnitude": "linear"}, "cuda", 1, False, True),
        ({"steps": 42_500, "model.magnitude": "linear"}, "cpu", 1, False, False),
        ({"steps": 42_500, "model.magnitude": "linear"}, "cuda", 2, False, False),
        ({}, "cuda", 2, False, False),
        ({"engine.compile": True}, "cpu", 1, True, False),
        ({"engine.compile": False}, "cuda", 1, False, True),
        ({"steps": 42_500, "engine.capture": False}, "cuda", 1, True, False),
        ({"engine.compile": True, "precision": "fp16"}, "cuda", 1, True, False),
    ],
)
def test_what_is_compiled_and_captured_has_a_reason(
    changes: dict[str, Any], device: str, world: int, compiled: bool, captured: bool
) -> None:
    recipe = Recipe().override(changes)
    first = decide_compile(recipe, device, world, recipe.total_steps(100))
    second = decide_capture(recipe, device, world, streamed=False)
    assert (first.on, second.on) == (compiled, captured)
    assert first.reason
    assert second.reason


def test_capture_that_is_impossible_is_refused_when_asked_for() -> None:
    with pytest.raises(RecipeError, match=r"`engine\.capture` must be false or null here: CUDA graphs need"):
        decide_capture(Recipe().override({"engine.capture": True}), "cpu", 1, streamed=False)


def test_processes_are_counted_as_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert process_counts("auto", "cpu") == (1, 1)
    assert process_counts(3, "cpu") == (3, 1)
    with pytest.raises(ValueError, match="`devices` must be"):
        process_counts(0, "cpu")
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    assert process_counts("auto", "cpu") == (2, 3)
