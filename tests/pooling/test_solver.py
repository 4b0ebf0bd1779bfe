"""The solvers of robust pooling: trip counts, the reduction they sum by, the compiled kernel and its operator."""

import platform
import subprocess
import sys

import pytest
import torch
from pooling_reference import CONVEX, NONCONVEX, rows

from hyperball import radial
from hyperball.functional.pooling import robust_pool
from hyperball.kernels import native as builds
from hyperball.kernels.pooling import native
from hyperball.kernels.pooling import operation as kernel
from hyperball.kernels.pooling import rows as pooling_rows
from hyperball.kernels.pooling.rows import pool_rows
from hyperball.kernels.pooling.solver import Reduction, row_sum, solve

D = torch.float64
HAS_COMPILER = native.library(torch.float32).pool is not None
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")


def penalty(text: str):
    return radial.parse(text, "penalty")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("text", ["truncated_quadratic", "welsch"])
def test_blocks_of_rows_bound_what_is_held_at_once_and_change_no_row(text, weighted, monkeypatch):
    x = rows(23, 70, 0.25, distance=8.0)
    weights = torch.rand(x.shape, dtype=D, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    held = penalty(text).with_parameters(rho=torch.linspace(0.3, 2.0, len(x), dtype=D).unsqueeze(-1))
    given = (x, weights if weighted else None, held)
    whole, _ = pool_rows(*given, fixed=True)
    handled = []
    for name in ("_sweep", "_global_minimum"):
        monkeypatch.setattr(pooling_rows, name, spied(getattr(pooling_rows, name), handled))
    monkeypatch.setattr(pooling_rows, "BLOCK", 5 * x.shape[1] * (1 if text == "truncated_quadratic" else 64))
    blocks, _ = pool_rows(*given, fixed=True)
    assert handled == [5, 5, 5, 5, 3]
    assert torch.equal(blocks, whole)


def spied(function, handled: list[int]):
    """The function, noting how many rows each call is given."""
    return lambda x, *rest: (handled.append(len(x)), function(x, *rest))[1]


@pytest.mark.parametrize("outliers", [0.0, 0.25, 0.45])
@pytest.mark.parametrize("n", [9, 49, 300])
@pytest.mark.parametrize("text", [*CONVEX, *NONCONVEX, "huber(c=0.1)", "pseudo_huber(c=0.05)", "welsch(c=0.3)"])
def test_the_fixed_trip_count_reaches_what_iterating_reaches(text, n, outliers):
    x = rows(40 if n < 300 else 12, n, outliers, distance=8.0)
    exact, _ = pool_rows(x, None, penalty(text), fixed=False)
    fixed, _ = pool_rows(x, None, penalty(text), fixed=True)
    torch.testing.assert_close(fixed, exact, rtol=1e-7, atol=1e-7)
    rounded, _ = pool_rows(x.float(), None, penalty(text), fixed=True)
    same_minimum = (rounded.to(D) - exact).abs() < 0.1  # float32 may tell two equal minima apart the other way
    assert same_minimum.float().mean() > 0.97
    torch.testing.assert_close(rounded.to(D)[same_minimum], exact[same_minimum], rtol=1e-5, atol=1e-5)


def test_half_the_trip_count_would_not_do(monkeypatch):
    x = rows(200, 49, 0.45, distance=8.0)
    exact, _ = pool_rows(x, None, penalty("barron(shape=1.5)"), fixed=False)
    monkeypatch.setattr(pooling_rows, "CONVEX_STEPS", 3)
    short, _ = pool_rows(x, None, penalty("barron(shape=1.5)"), fixed=True)
    assert (short - exact).abs().max() > 1e-7


@pytest.mark.parametrize("text", [*CONVEX, *NONCONVEX])
def test_float64_settles_at_rounding_within_a_few_steps(text):
    x = rows(30, 60, 0.45)
    y, steps = pool_rows(x, None, penalty(text), fixed=False)
    z = y[:, None] - x
    psi = radial.gain(penalty(text), z.abs()) * z
    assert (psi.sum(-1).abs() <= 1e-14 * psi.abs().sum(-1).clamp(min=1.0)).all()
    assert steps.max() <= 25


def test_rows_may_be_summed_by_any_reduction():
    x = rows(4, 6 * 10, 0.25).reshape(4, 6, 10).movedim(0, 1)  # [6, 4, 10]: four channels over dims 0 and 2
    calls = []

    def total(values):
        calls.append(len(values))
        return tuple(value.sum((0, 2)) for value in values)

    channels = Reduction(total=total, spread=lambda row: row[None, :, None])
    c = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=D)
    value = radial.pseudo_huber(c=c[None, :, None])
    start = torch.zeros(4, dtype=D)
    found = solve(x, value, start=start, lower=x.amin((0, 2)), upper=x.amax((0, 2)), reduction=channels)
    expected = robust_pool(x, (0, 2), penalty=radial.pseudo_huber(c=c))
    torch.testing.assert_close(found.y, expected, rtol=1e-12, atol=1e-12)
    assert (found.gradient < 1e-12).all()
    assert set(calls) == {4}  # one message a step


def test_plain_newton_cycles_on_huber_where_the_safeguarded_one_settles():
    x = torch.tensor([[0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0]], dtype=D)
    value = penalty("huber(c=6)")
    found = solve(x, value, start=torch.tensor([19.9], dtype=D), lower=x.amin(-1), upper=x.amax(-1))
    torch.testing.assert_close(found.y, robust_pool(x, penalty=value))


def test_long_sums_have_one_order():
    x = rows(3, 10_000).float()
    assert torch.equal(row_sum(x)[1], row_sum(x[1]))
    torch.testing.assert_close(row_sum(x), x.sum(-1), rtol=1e-4, atol=1e-4)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 49, 127, 128, 129, 512, 1000, 1024, 4101])
@pytest.mark.parametrize(
    "text",
    ["huber", "pseudo_huber", "barron(shape=1.4)", "barron(shape=0)", "welsch", "truncated_quadratic", "absolute"],
)
def test_the_compiled_kernel_costs_no_more_than_its_eager_twin(text, n, dtype):
    value = penalty(text)
    count = 18 if n < 1000 else 4
    x = rows(count, n, 0.25).to(dtype)
    w = torch.rand(count, n, dtype=dtype) * (torch.rand(count, n) < 0.8)
    w[:, 0] = 0.5
    for weights in (None, w):
        parameters = {"rho": 0.8, "shape": value.parameters.get("shape", 1.0)}
        y, steps = native.pool(x, weights, value.name, 0.8, parameters["shape"], tap_dims=1)
        wide = None if weights is None else weights.to(D)
        held = value.with_parameters(rho=0.8)
        eager, _ = pool_rows(x.to(D), wide, held, fixed=False)
        cost, least = (pooling_rows.objective(u.to(D)[:, None], x.to(D), wide, held) for u in (y, eager))
        assert (cost <= least + (1e-5 if dtype == torch.float32 else 1e-10)).all()
        assert (steps <= 60).all()


@NEEDS_COMPILER
def test_the_compiled_kernel_reads_any_layout():
    x = rows(2 * 3, 4 * 5).reshape(2, 3, 4, 5)
    value = ("pseudo_huber", 0.7, 1.0)
    plain, _ = native.pool(x.flatten(2), None, *value, tap_dims=1)
    for view in (x, x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.equal(native.pool(view, None, *value, tap_dims=2)[0], plain)
    spread = torch.rand(4, 5, dtype=D)
    weighted, _ = native.pool(x, spread, *value, tap_dims=2)
    torch.testing.assert_close(weighted, robust_pool(x, (2, 3), penalty="pseudo_huber(c=0.7)", weights=spread))


@NEEDS_COMPILER
@pytest.mark.parametrize("n", [30, 127, 128, 640, 1024, 5120])
@pytest.mark.parametrize("text", ["huber(c=0.3)", "pseudo_huber(c=0.3)"])
def test_rows_that_need_a_bracket_leave_their_neighbors_bits_alone(text, n):
    x = rows(40, n, 0.3).float()
    x[3, 0], x[5, :2], x[9, ::4] = float("nan"), float("inf"), 1e30
    x[11] *= 1e25  # c is below its rounding
    x[13] *= 100  # hardly a sample lies within c
    x[17, : n // 2] += 50
    together = robust_pool(x, penalty=text)
    alone = torch.stack([robust_pool(row, penalty=text) for row in x])
    torch.testing.assert_close(together, alone, rtol=0.0, atol=0.0, equal_nan=True)
    assert together.isnan().nonzero().flatten().tolist() == [3]


@pytest.fixture
def rebuilt(monkeypatch, tmp_path):
    """An empty cache folder, and a library that is looked for afresh, during and after the test."""
    monkeypatch.setenv("HYPERBALL_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield tmp_path / "cache"
    native.library.cache_clear()


def test_without_a_compiler_the_eager_solver_runs(monkeypatch, rebuilt):
    monkeypatch.setattr(builds, "find_compiler", lambda: None)
    assert native.library(torch.float32).pool is None
    assert "no C compiler" in kernel.explain_pooling(penalty("huber"))
    x = rows(3, 9).float()
    torch.testing.assert_close(robust_pool(x), robust_pool(x.double()).float())


@NEEDS_COMPILER
def test_a_broken_compiler_is_a_reason_and_leaves_nothing_behind(monkeypatch, tmp_path, rebuilt):
    broken = tmp_path / "cc"
    broken.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo broken 1.0; exit 0; fi\necho no such luck >&2\nexit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr(builds, "find_compiler", lambda: (str(broken),))
    found = native.library(torch.float32)
    assert found.pool is None
    assert "no such luck" in found.reason
    assert list(rebuilt.iterdir()) == []


@NEEDS_COMPILER
@pytest.mark.parametrize("place", ["a file in place of the folder", "a folder open to all", "a homeless user"])
def test_a_cache_that_cannot_be_trusted_or_written_is_a_reason(place, monkeypatch, rebuilt):
    if place == "a file in place of the folder":
        rebuilt.write_text("")
    elif place == "a folder open to all":
        rebuilt.mkdir()
        rebuilt.chmod(0o777)
    else:
        monkeypatch.delenv("HYPERBALL_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(builds.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    found = native.library(torch.float32)
    assert found.pool is None
    assert found.reason.startswith("building pooling.c failed: ")
    torch.testing.assert_close(robust_pool(torch.tensor([1.0, 2.0, 9.0]), penalty="absolute"), torch.tensor(2.0))


@NEEDS_COMPILER
def test_the_name_of_the_library_tells_processors_compilers_and_sources_apart(monkeypatch, tmp_path):
    compiler, code = builds.find_compiler(), native.SOURCES[torch.float32]
    names = [builds.fingerprint(compiler, code), builds.fingerprint(compiler, native.SOURCES[D])]
    monkeypatch.setattr(builds, "features", lambda: ["flags: sse2"])
    names.append(builds.fingerprint(compiler, code))
    other = tmp_path / "cc"
    other.write_text("#!/bin/sh\necho other 2.0\n")
    other.chmod(0o755)
    names.append(builds.fingerprint((str(other),), code))
    header = tmp_path / "lanes.h"
    header.write_text("/* another */")
    names.append(builds.fingerprint(compiler, code._replace(headers=(header, *code.headers[1:]))))
    names.append(builds.fingerprint((*compiler, "-DOTHER"), code))
    assert len(set(names)) == 6


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("tuning", [("-march=x86-64",), ("-march=haswell",)])
def test_a_plainer_processor_gets_the_same_answers(tuning, monkeypatch, rebuilt):
    if platform.machine() != "x86_64":
        pytest.skip("names processors of one family")
    x = torch.cat((rows(10, 700, 0.3), rows(10, 700)))
    x[5:15, ::5] = 1e30
    cases = [(text, dtype, n) for text in native.PENALTIES for dtype in (D, torch.float32) for n in (9, 50, 640, 700)]
    tuned = [robust_pool(x[:, :n].to(dtype), penalty=text) for text, dtype, n in cases]
    monkeypatch.setattr(builds, "TUNING", (tuning,))
    native.library.cache_clear()
    plain = [robust_pool(x[:, :n].to(dtype), penalty=text) for text, dtype, n in cases]
    assert len(list(rebuilt.iterdir())) == 4
    for a, b in zip(tuned, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@NEEDS_COMPILER
@pytest.mark.slow
def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path):
    code = (
        "import torch; from hyperball.kernels.pooling import native as n; "
        "assert n.library(torch.float32).pool is not None, n.library(torch.float32).reason"
    )
    environment = {"HYPERBALL_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("text", ["huber", "barron", "welsch"])
def test_the_operator_passes_opcheck(text):
    x = rows(4, 12).requires_grad_()
    c, shape = torch.rand(4, dtype=D).add(0.5).requires_grad_(), torch.full((4,), 1.3, dtype=D, requires_grad=True)
    w = torch.rand(4, 12, dtype=D).requires_grad_()
    for weights in (None, w):
        torch.library.opcheck(kernel.robust_pool_op, (x, weights, c, shape, text, 1))
    y, _ = kernel.robust_pool_op(x, w, c, shape, text, 1)
    found = torch.autograd.grad(y.sum(), (x, w, c))
    value = radial.TABLE[text](rho=c, **({"shape": shape} if text == "barron" else {}))
    expected = torch.autograd.grad(robust_pool(x, penalty=value, weights=w).sum(), (x, w, c))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
