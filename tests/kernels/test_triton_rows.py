"""Triton kernels of robust pooling and projections: how they are chosen, and their cases, interpreted and on a GPU."""

import ast
from pathlib import Path

import case_files
import offline_ptx
import pytest
import torch
from places import SUPPORT
from torch.utils._python_dispatch import TorchDispatchMode

import hyperball as hb
from hyperball import functional as F
from hyperball import radial
from hyperball.kernels import dispatch
from hyperball.kernels.pooling import operation as pooling
from hyperball.kernels.pooling.choice import TRITON
from hyperball.kernels.projection import operation as projection

CASES = SUPPORT / "triton_row_cases.py"
CUDA = torch.device("cuda")
KERNELS = Path(hb.__file__).parent / "kernels" / "triton"


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(dispatch, "HAS_ROCM", False)


def penalty(text):
    return radial.parse(text, "penalty")


def test_every_penalty_that_is_sent_to_triton_has_a_function_there():
    terms = pytest.importorskip("hyperball.kernels.triton.pooling.terms", exc_type=ImportError)
    row_access = pytest.importorskip("hyperball.kernels.triton.row_access", exc_type=ImportError)
    kinds = pytest.importorskip("hyperball.kernels.triton.projection.kernels", exc_type=ImportError).KINDS
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
    case_files.check_without_triton(
        "x = torch.randn(3, 9, requires_grad=True);"
        "hb.functional.robust_pool(x).sum().backward(); hb.functional.project(x, 1.0, p=1).sum().backward()"
    )


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


def test_tiles_and_layouts_are_those_of_any_number_of_rows():
    row_access = pytest.importorskip("hyperball.kernels.triton.row_access", exc_type=ImportError)
    views = [torch.empty(8, 49), torch.empty(1, 49), torch.empty(49)]
    layouts = [row_access.layout([x], [], x.dim() - 1) for x in views]
    assert {level.rows[-1].strides for level in layouts} == {(49,)}
    assert 1 not in {level.rows[-1].size for level in layouts}


def renamed_in_loops(function):
    """(loop, target, source) of every plain `target = source` inside a loop of a kernel."""
    for loop in ast.walk(function):
        if isinstance(loop, ast.For | ast.While):
            for node in ast.walk(loop):
                if isinstance(node, ast.Assign):
                    yield from ((loop, *pair) for pair in renames(node))


def renames(node):
    """(target, source) of an assignment of names to names, each of a tuple's by itself."""
    target, value = node.targets[0], node.value
    pairs = zip(target.elts, value.elts, strict=True) if both_tuples(target, value) else [(target, value)]
    return [(a.id, b.id) for a, b in pairs if isinstance(a, ast.Name) and isinstance(b, ast.Name)]


def both_tuples(target, value):
    return isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)


def aliases(function, loop):
    """Names that begin as the same value before a loop."""
    before = [node for node in ast.walk(function) if isinstance(node, ast.Assign) and node.lineno < loop.lineno]
    pairs = [pair for node in before for pair in renames(node)]
    return {frozenset(pair) for pair in pairs} | {
        frozenset((a, b)) for a, source in pairs for b, other in pairs if source == other and a != b
    }


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda path: "-".join(path.relative_to(KERNELS).with_suffix("").parts)
)
def test_names_that_trade_values_in_a_loop_do_not_begin_as_one(path):
    """Triton takes a name whose value after the loop's body is the one it began with for a constant of the loop."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            for loop, target, source in renamed_in_loops(function):
                assert frozenset((target, source)) not in aliases(function, loop), (function.name, target, source)


def test_a_name_that_a_loop_would_lose_is_found():
    function = ast.parse("def f():\n a = g()\n b = a\n while c:\n  b, a = a, h(b)").body[0]
    ((loop, target, source),) = renamed_in_loops(function)
    assert frozenset((target, source)) in aliases(function, loop)


@pytest.mark.parametrize("name", ["pooling/launch", "projection/launch"])
def test_no_launch_of_rows_fuses_products_into_sums(name):
    text = (KERNELS / f"{name}.py").read_text()
    launches = text.count("_kernel[")
    assert launches == text.count("enable_fp_fusion=False") + text.count("**settings(")
    assert '"enable_fp_fusion": False' in text or "**settings(" not in text


class Recorded(TorchDispatchMode):
    """The operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_box_of_numbers_is_one_pass_with_and_without_gradients():
    x = torch.randn(3, 4)
    for given in (x, x.clone().requires_grad_()):
        with Recorded() as recorded:
            F.project_box(given, 0.0, 1.0)
        assert recorded.names == ["aten.clamp.default"]


def test_the_kernels_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)


def test_a_kernel_compiles_to_so_few_lines_that_its_first_use_takes_seconds():
    offline_ptx.check("rows", 3)


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
