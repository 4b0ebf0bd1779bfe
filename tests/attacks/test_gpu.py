"""Attacks on a GPU: captured in graphs, without waiting at every step, and equal to the CPU's."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperball.attacks import captured, evaluate_robustness, fast_fgsm, fgsm, parse, pgd, trades_loss
from hyperball.attacks.bench import make_bench
from hyperball.attacks.gradient import ascend
from hyperball.data.corruptions import corrupt, names

pytestmark = pytest.mark.gpu
EPSILON = 0.1
TRAINING = {
    "fgsm": lambda model, x, y: fgsm(model, x, y, EPSILON),
    "fast": lambda model, x, y: fast_fgsm(model, x, y, EPSILON),
    "pgd": lambda model, x, y: pgd(model, x, y, EPSILON, step=EPSILON / 4, iterations=5),
    "pgd in L2": lambda model, x, y: pgd(model, x, y, 0.5, step=0.1, iterations=5, norm="l2"),
}


@pytest.fixture(name="model")
def _model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    return net.eval()


@pytest.fixture(name="batch")
def _batch(model):
    x = torch.rand(64, 1, 8, 8)
    return x, model(x).argmax(1)


@pytest.mark.parametrize("name", [*TRAINING, "trades"])
def test_attacks_for_training_are_captured_in_a_graph(model, batch, name):
    model = model.cuda()
    x, y = (held.cuda() for held in batch)

    def body():
        if name == "trades":
            return trades_loss(model, x, y, EPSILON, step=EPSILON / 4, iterations=2)[0]
        return F.cross_entropy(model(TRAINING[name](model, x, y)), y)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            expected = body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body()
    graph.replay()
    torch.testing.assert_close(found, expected, rtol=0.2, atol=0)  # random starts differ
    assert float(found.detach()) > float(F.cross_entropy(model(x), y).detach())


@pytest.mark.parametrize("text", ["fgsm", "bim", "pgd", "pgd(target='runner_up')", "noise(k=5)", "square(queries=40)"])
def test_steps_never_wait_for_the_gpu(model, batch, text):
    x, y = (held.cuda() for held in batch)
    task = make_bench(model.cuda(), x, y, epsilon=EPSILON).task(torch.arange(len(y)))
    ((_, stage),) = parse(text).stages(task)
    stage(task)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            stage(task)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(item.message) for item in caught if "synchronizing CUDA" in str(item.message)]
    assert len(waits) <= (3 if text.startswith("square") else 0)  # one look at what is broken in 50 queries


@pytest.mark.parametrize("text", ["fgsm", "pgd(restarts=2)", "square(queries=60)", "noise(k=3)"])
def test_a_gpu_breaks_the_images_that_the_cpu_breaks(model, batch, text):
    x, y = batch
    options = {"epsilon": EPSILON, "attacks": text, "checks": False, "batch_size": 16}
    torch.backends.cudnn.allow_tf32 = False
    expected = evaluate_robustness(model.double(), x.double(), y, **options).verdict(text)
    found = evaluate_robustness(model.cuda(), x.double(), y, **options).verdict(text)
    assert torch.equal(found.correct, expected.correct)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-4)


def test_generators_of_the_gpu_are_left_alone(model, batch):
    x, y = (held.cuda() for held in batch)
    before = torch.cuda.get_rng_state()
    evaluate_robustness(model.cuda(), x, y, epsilon=EPSILON, attacks="pgd(steps=3)", check_images=16)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("name", names())
def test_corruptions_are_the_same_on_a_gpu(name):
    images = torch.rand(6, 3, 32, 32)
    torch.testing.assert_close(corrupt(images.cuda(), name, 4).cpu(), corrupt(images, name, 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [5, 20])
def test_replayed_steps_end_where_a_plain_loop_ends(model, batch, steps):
    x, y = (held.cuda() for held in batch)
    net = model.cuda()
    torch.backends.cudnn.deterministic = True

    def climbed(replay):
        objective = lambda logits: F.cross_entropy(logits, y, reduction="sum")  # noqa: E731
        return ascend(net, x, objective, EPSILON, step=EPSILON / 8, iterations=steps, replay=replay)

    torch.testing.assert_close(climbed(True), climbed(False), rtol=0, atol=0)


def test_graph_after_graph_takes_no_more_memory(model, batch):
    x, y = (held.cuda() for held in batch)
    net = model.cuda()

    def climb(count):
        objective = lambda logits: F.cross_entropy(logits, y[:count], reduction="sum")  # noqa: E731
        ascend(net, x[:count], objective, EPSILON, step=EPSILON / 8, iterations=12, replay=True)
        return torch.cuda.memory_reserved()

    taken = [climb(len(y) - round) for round in range(10)]
    captured.release()
    assert max(taken[2:]) <= taken[1] + 20 * 2**20, taken  # a block of the allocator's; a graph of its own takes more


def test_a_step_that_cannot_be_captured_goes_on_as_it_began(model, batch):
    x, y = (held.cuda() for held in batch)
    net = model.cuda()

    def waits(images):
        assert float(images.detach().sum()) > 0  # reads back from the device, which no graph can
        return net(images)

    objective = lambda logits: F.cross_entropy(logits, y, reduction="sum")  # noqa: E731
    options = {"step": EPSILON / 8, "iterations": 12}
    expected = ascend(net, x, objective, EPSILON, **options)
    for model in (net, waits, net, waits, waits, waits, net):  # after one that can, and more often than is tried
        found = ascend(model, x, objective, EPSILON, replay=True, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert captured._FAILURES[x.device] == captured.TRIES
    captured.release()
    assert captured._FAILURES[x.device] == 0
