"""Triton kernels of robust batch normalization: how they are chosen, and their cases, interpreted and on a GPU."""

import copy

import case_files
import offline_ptx
import pytest
import torch
from places import SUPPORT

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.batch_norm import choice as batch_norm_choice
from hyperball.kernels.batch_norm.operation import Estimator

CASES = SUPPORT / "batch_norm_cases.py"
CUDA = torch.device("cuda")


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "HAS_ROCM", False)


def test_every_penalty_that_is_sent_to_triton_has_a_function_there():
    terms = pytest.importorskip("hyperball.kernels.triton.batch_norm.terms", exc_type=ImportError)
    assert set(terms.PENALTIES) == set(batch_norm_choice.TRITON)


@pytest.mark.parametrize("dtype", dispatch.DTYPES)
@pytest.mark.parametrize("e", [Estimator("huber"), Estimator("pseudo_huber"), Estimator("barron", 1.5)])
def test_training_on_a_gpu_is_triton_s(e, dtype, with_triton):
    assert batch_norm_choice.choose(e, CUDA, dtype).kernel == "triton"


@pytest.mark.parametrize(
    "e, dtype, attribute, reason",
    [
        (Estimator("welsch"), torch.float32, None, "welsch is not convex"),
        (Estimator("barron", 0.5), torch.float32, None, "barron is not convex"),
        (Estimator("huber", group=object()), torch.float32, None, "several processes"),
        (Estimator("huber"), torch.float64, None, "float64"),
        (Estimator("huber"), torch.float32, ("HAS_TRITON", False), "triton is not installed"),
        (Estimator("huber"), torch.float32, ("HAS_ROCM", True), "ROCm"),
    ],
)
def test_what_speaks_against_triton_is_said(e, dtype, attribute, reason, with_triton, monkeypatch):
    if attribute:
        monkeypatch.setattr(dispatch, *attribute)
    choice = batch_norm_choice.choose(e, CUDA, dtype)
    assert choice.kernel == "eager"
    assert reason in choice.reason


class Marked(torch.nn.Module):
    """x + 1 where normalizing x would be Triton's, else x - 1."""

    def forward(self, x):
        return x + 1.0 if batch_norm_choice.is_triton(Estimator("huber"), x) else x - 1.0


def test_a_compiled_graph_is_triton_s_and_an_exported_one_is_not(with_triton, monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    x = torch.zeros(3, 2)
    assert torch.compile(Marked(), fullgraph=True, backend="eager")(x).eq(1.0).all()
    for strict in (False, True):
        assert torch.export.export(Marked(), (x,), strict=strict).module()(x).eq(-1.0).all()
    assert torch.jit.trace(Marked(), (x,), check_trace=False)(x).eq(-1.0).all()


def test_explain_says_the_kernel_of_the_layer_s_device(with_triton, monkeypatch):
    layer = hb.nn.RobustBatchNorm2d(4)
    assert hb.explain(layer)["kernel"].startswith("eager: torch's own operators")
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    assert hb.explain(layer)["kernel"].startswith("triton: Newton steps on a sample")
    assert "not convex" in hb.explain(hb.nn.RobustBatchNorm2d(4, penalty="welsch"))["kernel"]


def test_the_kernels_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)


def test_a_kernel_compiles_to_so_few_lines_that_its_first_use_takes_seconds():
    """A tile whose samples every lane holds again is 35,000 lines and more, which take ptxas minutes."""
    offline_ptx.check("batch_norm", 4)


def channels_last(*shape):
    x = torch.randn(shape, device="cuda") + 5.0 * (torch.rand(shape, device="cuda") < 0.1)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def training_step(layer, x):
    """y and the gradients of a step."""
    y = layer(x)
    return [y, *torch.autograd.grad(y.pow(3).sum(), [x, *layer.parameters()])]


@pytest.mark.gpu
def test_a_captured_step_replays_to_the_same_bits_and_nothing_waits():
    layer, x = hb.nn.RobustBatchNorm2d(32).cuda(), channels_last(16, 32, 24, 24)
    assert hb.explain(layer)["kernel"].startswith("triton")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first = [item.detach().clone() for item in training_step(layer, x)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training_step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training_step(layer, x)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))
    mean, deviation = layer.running_mean, layer.running_var.sqrt()
    assert mean.isfinite().all()
    assert deviation.isfinite().all()


@pytest.mark.gpu
def test_a_compiled_step_is_one_graph_and_gives_the_same():
    layer, x = hb.nn.RobustBatchNorm2d(32).cuda(), channels_last(16, 32, 24, 24)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True)
    wanted, y = training_step(layer, x), compiled(x)
    got = [y, *torch.autograd.grad(y.pow(3).sum(), [x, *twin.parameters()])]
    for a, b in zip([*got, twin.running_mean, twin.running_var], [*wanted, layer.running_mean, layer.running_var]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_gpu_is_solved_in_float32(dtype):
    layer, x = hb.nn.RobustBatchNorm2d(32, penalty="pseudo_huber").cuda(), channels_last(4, 32, 8, 8)
    ours = training_step(layer, x.detach().to(dtype).requires_grad_())
    truth = training_step(copy.deepcopy(layer).double(), x.detach().to(dtype).double().requires_grad_())
    for a, b in zip(ours, truth, strict=True):
        assert (a.double() - b).norm() < 3e-2 * b.norm()


def test_normalizing_on_the_cpu_imports_no_triton():
    case_files.check_without_triton(
        "hb.nn.RobustBatchNorm1d(3)(torch.randn(9, 3, requires_grad=True)).sum().backward()"
    )
