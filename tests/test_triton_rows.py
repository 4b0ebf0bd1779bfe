"""Triton kernels of robust pooling and projections: how they are chosen, and their cases, interpreted and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import case_files
import pytest
import torch

import hyperball as hb
from hyperball import functional as F
from hyperball import radial
from hyperball.kernels import dispatch, pooling, projection
from hyperball.kernels.pooling_choice import TRITON

CASES = Path(__file__).parent / "triton_row_cases.py"
CUDA = torch.device("cuda")


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "HAS_ROCM", False)


def penalty(text):
    return radial.parse(text, "penalty")


def test_every_penalty_that_is_sent_to_triton_has_a_function_there():
    terms = pytest.importorskip("hyperball.kernels.triton.pooling_terms", exc_type=ImportError)
    row_access = pytest.importorskip("hyperball.kernels.triton.row_access", exc_type=ImportError)
    kinds = pytest.importorskip("hyperball.kernels.triton.projection", exc_type=ImportError).KINDS
    assert set(terms.PENALTIES) == set(TRITON)
    assert set(kinds) == set(projection.SURFACES)
    assert row_access.LONGEST == projection.LONGEST


@pytest.mark.parametrize("text", ["quadratic", "huber", "pseudo_huber", "welsch", "absolute", "barron(shape=0.5)"])
def test_pooling_on_a_gpu_is_triton_s(text, with_triton):
    assert pooling.choose(penalty(text), CUDA, torch.bfloat16)[0] == "triton"


@pytest.mark.parametrize(
    "text, dtype, attribute, reason",
    [
        ("truncated_quadratic", torch.float32, None, "by sorting"),
        ("huber", torch.float64, None, "float64"),
        ("huber", torch.float32, ("HAS_TRITON", False), "triton is not installed"),
        ("huber", torch.float32, ("HAS_ROCM", True), "ROCm"),
    ],
)
def test_what_speaks_against_triton_is_said(text, dtype, attribute, reason, with_triton, monkeypatch):
    if attribute:
        monkeypatch.setattr(dispatch, *attribute)
    kernel, why = pooling.choose(penalty(text), CUDA, dtype)
    assert kernel == "eager"
    assert reason in why


@pytest.mark.parametrize(
    "dtype, length, reason",
    [
        (torch.float32, 512, "triton: a program keeps its vectors in registers"),
        (torch.float64, 512, "eager: float64"),
        (torch.float32, 8193, "eager: vectors of more than 8192 elements"),
        (torch.float32, 0, "eager: an empty input"),
    ],
)
def test_a_projection_says_its_kernel_and_why(dtype, length, reason, with_triton):
    assert str(projection.choose_kernel(CUDA, dtype, length)).startswith(reason)
    assert "torch's own operators" in projection.choose_kernel(torch.device("cpu"), dtype, length).reason


def test_pooling_and_projecting_on_the_cpu_import_no_triton():
    code = (
        "import sys, torch, hyperball as hb; x = torch.randn(3, 9, requires_grad=True);"
        "hb.functional.robust_pool(x).sum().backward(); hb.functional.project(x, 1.0, p=1).sum().backward();"
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    search = os.pathsep.join(path for path in sys.path if path)
    given = {**os.environ, "PYTHONPATH": search}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given, check=False)
    assert done.returncode == 0, done.stderr


def test_layouts_merge_dimensions_that_lie_behind_one_another():
    row_access = pytest.importorskip("hyperball.kernels.triton.row_access", exc_type=ImportError)
    x = torch.empty(2, 3, 4, 5)
    merged = row_access.layout([x], [], 2)
    assert [level.size for level in merged.rows] == [1, 1, 1, 6]
    assert (merged.inner, merged.flat, merged.row_contiguous()) == (20, True, False)
    last = row_access.layout([x.contiguous(memory_format=torch.channels_last)], [torch.empty(3).expand(2, 3)], 2)
    assert [level.size for level in last.rows] == [1, 1, 2, 3]
    assert last.row_contiguous()
    assert row_access.layout([torch.empty(2, 2, 2, 2, 2, 2).permute(0, 4, 2, 1, 3, 5)], [], 5) is None


def test_the_kernels_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)


@pytest.mark.gpu
def test_the_kernels_pass_their_cases_on_the_gpu():
    case_files.check_on_the_gpu(CASES)


def pooled_and_projected(x, c):
    y = F.robust_pool(x, penalty=radial.pseudo_huber(c=c))
    return F.project(y, 0.5 * c.mean(), p=1) + F.robust_pool(x, penalty="welsch").sum()


def leaves():
    x, c = torch.randn(6, 5, 40, device="cuda"), torch.rand(5, device="cuda") + 0.5
    return x.requires_grad_(), c.requires_grad_()


@pytest.mark.gpu
def test_compiled_pooling_and_projecting_is_one_graph_and_gives_the_same():
    x, c = leaves()
    compiled = torch.compile(pooled_and_projected, fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(x, c).sum(), (x, c)),
        torch.autograd.grad(pooled_and_projected(x, c).sum(), (x, c)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_captured_step_replays_to_the_same_bits_and_nothing_waits():
    x, c = leaves()

    def step():
        return torch.autograd.grad(pooled_and_projected(x, c).sum(), (x, c))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first = [grad.clone() for grad in step()]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))


@pytest.mark.gpu
def test_second_derivatives_forward_mode_and_vmap_run_eagerly():
    x, _ = leaves()

    def total(x):
        return F.robust_pool(x, penalty="pseudo_huber").square().sum()

    (grad,) = torch.autograd.grad(total(x), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    wide = x.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(total(wide), wide, create_graph=True)
    torch.testing.assert_close(second.double(), torch.autograd.grad(grad.square().sum(), wide)[0], rtol=1e-3, atol=1e-4)
    moved = torch.func.jvp(total, (x.detach(),), (torch.ones_like(x),))[1]
    torch.testing.assert_close(moved, torch.autograd.grad(total(x), x)[0].sum(), rtol=1e-3, atol=1e-3)
    mapped = torch.func.vmap(lambda t: F.project(F.robust_pool(t), 1.0, p=1))(x.detach())
    torch.testing.assert_close(mapped, F.project(F.robust_pool(x), 1.0, p=1), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_explain_names_triton_for_layers_on_the_gpu():
    assert hb.explain(hb.nn.RobustPool2d(penalty="huber(learn_c=True)").cuda())["kernel"].startswith("triton, float32")
    assert hb.explain(hb.nn.Projection(1).cuda())["kernel"].startswith("triton")
