"""Projections in use: layouts, memory, transforms, compilation, export, devices; the box."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

import hyperball.functional.projection as functional
import hyperball.nn.projection as module
from hyperball.functional.projection import project, project_box, project_simplex
from hyperball.kernels.projection import operation as kernel
from hyperball.kernels.projection import solver
from hyperball.kernels.projection.surfaces import excess
from hyperball.nn.projection import Projection

SURFACES = [(p, surface) for p in (1, 2, math.inf) for surface in ("ball", "sphere")]
each_surface = pytest.mark.parametrize("p, surface", SURFACES, ids=[f"l{p}_{s}" for p, s in SURFACES])


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return 2 * torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


class SeveralProjections(nn.Module):
    """Several surfaces, the simplex and the box in one module: one compilation, one export."""

    def __init__(self, surfaces: list[tuple[float, str]], simplex: bool = True) -> None:
        super().__init__()
        self.simplex = simplex
        self.layers = nn.ModuleList(Projection(p, surface, 1.5, dim=(1, -1)) for p, surface in surfaces)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = [layer(x) for layer in self.layers] + [project_box(x, -0.5, 0.7)]
        return (*y, project_simplex(x, 0.7, dim=(1, 2))) if self.simplex else tuple(y)


@each_surface
@pytest.mark.parametrize("dims", [(0, 2), (2, 0), (-1, -3)])
def test_several_dims_form_one_vector(p: float, surface: str, dims: tuple[int, int]) -> None:
    x = inputs(3, 4, 5)
    flat = project(x.movedim(1, 0).reshape(4, 15), 1.5, p=p, surface=surface)
    y = project(x, 1.5, p=p, surface=surface, dim=dims)
    assert torch.equal(y, flat.reshape(4, 3, 5).movedim(0, 1))


def test_a_radius_broadcasts_with_or_without_the_reduced_dims() -> None:
    x = inputs(3, 4, 5)
    radius = torch.linspace(0.5, 2, 12).reshape(3, 4)
    row_by_row = torch.stack([project(row, r) for row, r in zip(x.flatten(0, 1), radius.flatten(), strict=True)])
    assert torch.equal(project(x, radius), row_by_row.reshape(3, 4, 5))
    assert torch.equal(project(x, radius.unsqueeze(-1)), row_by_row.reshape(3, 4, 5))
    per_column = torch.linspace(0.5, 2, 5)
    assert torch.equal(project(x, per_column, dim=(0, 1)), project(x, per_column.reshape(1, 1, 5), dim=(0, 1)))
    square = inputs(4, 4, 5)
    assert torch.equal(project(square, radius[0].unsqueeze(1)), project(square, radius[0].reshape(1, 4, 1)))


@pytest.mark.parametrize("dim", [1, (2, 3), (1, 2, 3)])
def test_the_memory_layout_is_kept(dim: int | tuple[int, ...]) -> None:
    x = inputs(2, 3, 4, 5)
    last = x.to(memory_format=torch.channels_last)
    y, y_last = project(x, 1.0, dim=dim), project(last, 1.0, dim=dim)
    assert y.is_contiguous()
    assert y_last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, y_last)


@each_surface
def test_strided_and_expanded_inputs_give_the_same_bits(p: float, surface: str) -> None:
    x = inputs(6, 40)
    y = project(x, 1.5, p=p, surface=surface)
    assert torch.equal(project(x.t().contiguous().t(), 1.5, p=p, surface=surface), y)
    assert torch.equal(project(x[:1].expand(6, 40), 1.5, p=p, surface=surface), y[:1].expand(6, 40))


@each_surface
def test_an_empty_batch_stays_empty(p: float, surface: str) -> None:
    x = torch.empty(0, 7, requires_grad=True)
    y = project(x, 1.5, p=p, surface=surface)
    y.sum().backward()
    assert y.shape == (0, 7)
    assert x.grad is not None
    assert x.grad.shape == (0, 7)


@each_surface
def test_the_backward_keeps_the_input_the_radius_and_two_numbers_a_row(p: float, surface: str) -> None:
    x, radius = inputs(8, 100).requires_grad_(), torch.tensor(1.5, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = project(x, radius, p=p, surface=surface)
    assert y.requires_grad
    large = [t for t in saved if t.numel() > 2 * 8]
    assert len(large) == 1
    assert large[0].data_ptr() == x.data_ptr()


@each_surface
def test_the_result_may_be_overwritten_in_place(p: float, surface: str) -> None:
    x = inputs(8, 10).requires_grad_()
    (plain,) = torch.autograd.grad(project(x, 1.5, p=p, surface=surface).relu().sum(), x)
    (in_place,) = torch.autograd.grad(project(x, 1.5, p=p, surface=surface).relu_().sum(), x)
    assert torch.equal(plain, in_place)


@each_surface
def test_the_traced_form_has_the_same_derivatives_as_the_lean_one(
    p: float, surface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = torch.tensor([[0.0] * 9, [2.0, -2.0, 2.0] * 3, [2.0] + [0.0] * 8], dtype=torch.float64)
    x = torch.cat((special, inputs(6, 9, dtype=torch.float64))).requires_grad_()
    radius = torch.tensor([[1.0, 2, 2, 0.5, 1, 2, 4, 10, 40]], dtype=torch.float64).t().clone().requires_grad_()
    v = inputs(9, 9, dtype=torch.float64)
    lean = project(x, radius, p=p, surface=surface)
    monkeypatch.setattr(solver, "can_look", lambda tensor: False)
    traced, _ = kernel._evaluate(x, radius, f"{functional.check_norm(p)}_{surface}", (-1,))
    torch.testing.assert_close(traced, lean)
    for got, want in zip(
        torch.autograd.grad(traced, (x, radius), v), torch.autograd.grad(lean, (x, radius), v), strict=True
    ):
        torch.testing.assert_close(got, want)


@each_surface
def test_vmap_over_input_radius_or_both_equals_the_batch(p: float, surface: str) -> None:
    x, radius = inputs(5, 6, 7), torch.linspace(0.5, 9, 5)

    def one(x: Tensor, radius: Tensor) -> Tensor:
        return project(x, radius, p=p, surface=surface)

    assert torch.equal(torch.func.vmap(one)(x, radius), project(x, radius.reshape(5, 1, 1), p=p, surface=surface))
    assert torch.equal(torch.func.vmap(one, (1, None), 1)(x, radius[3]), one(x, radius[3]))
    by_radius = torch.stack([one(x[0], r) for r in radius])
    assert torch.equal(torch.func.vmap(one, (None, 0))(x[0], radius), by_radius)
    nested = torch.func.vmap(torch.func.vmap(one, (None, 0)), (0, None))(x, radius)
    assert torch.equal(nested[0], by_radius)


@each_surface
def test_per_sample_gradients_equal_the_batch_gradients(p: float, surface: str) -> None:
    x, radius = inputs(5, 7, dtype=torch.float64), torch.linspace(0.5, 9, 5, dtype=torch.float64)

    def loss(x: Tensor, radius: Tensor) -> Tensor:
        return project(x, radius, p=p, surface=surface).pow(3).sum()

    grads = torch.func.vmap(torch.func.grad(loss, (0, 1)))(x, radius)
    leaves = (x.clone().requires_grad_(), radius.clone().requires_grad_())
    batch = torch.autograd.grad(loss(leaves[0], leaves[1].unsqueeze(1)), leaves)
    torch.testing.assert_close(grads, batch)


@each_surface
def test_second_derivatives_agree_in_every_order_of_modes(p: float, surface: str) -> None:
    x, radius = inputs(6, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return project(x, radius * x.square().sum() / 10, p=p, surface=surface).pow(3).sum()

    want = torch.autograd.functional.hessian(loss, x)
    assert bool(want.abs().sum() > 0)
    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            torch.testing.assert_close(outer(inner(loss))(x), want)


@pytest.mark.parametrize("grad", [True, False])
@each_surface
def test_dual_numbers_carry_their_tangent_with_and_without_grad_mode(p: float, surface: str, grad: bool) -> None:
    x, radius, dx = inputs(2, 7), torch.tensor(1.5), inputs(2, 7).flip(0)
    _, want = torch.func.jvp(lambda x, r: project(x, r, p=p, surface=surface), (x, radius), (dx, torch.tensor(0.5)))
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = torch.autograd.forward_ad.make_dual(x, dx)
        dual_radius = torch.autograd.forward_ad.make_dual(radius, torch.tensor(0.5))
        y = project(dual, dual_radius, p=p, surface=surface)
        got = torch.autograd.forward_ad.unpack_dual(y).tangent
    torch.testing.assert_close(got, want)


def test_what_a_transform_does_not_touch_stays_lean() -> None:
    x = inputs(3, 4).requires_grad_()
    y = torch.func.vmap(lambda t: t * project(x, 1.0, p=1))(torch.ones(2))
    assert torch.equal(y[1], project(x, 1.0, p=1))


@each_surface
def test_forward_mode_is_the_transpose_of_reverse_mode(p: float, surface: str) -> None:
    x, radius = inputs(7, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)

    def run(x: Tensor, radius: Tensor) -> Tensor:
        return project(x, radius, p=p, surface=surface)

    forward = torch.func.jacfwd(run, (0, 1))(x, radius)
    reverse = torch.func.jacrev(run, (0, 1))(x, radius)
    assert any(bool(j.abs().sum() > 0) for j in forward)
    torch.testing.assert_close(forward, reverse)


@each_surface
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(p: float, surface: str, dtype: torch.dtype) -> None:
    x = inputs(5, 40)
    half = x.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, y_half = project(x, 1.5, p=p, surface=surface), project(half, 1.5, p=p, surface=surface)
    assert y.dtype == torch.float32
    assert torch.equal(y, project(x, 1.5, p=p, surface=surface))
    assert y_half.dtype == dtype
    assert torch.equal(y_half, project(half, 1.5, p=p, surface=surface))


def test_compiled_values_and_gradients_equal_eager_ones() -> None:
    model = SeveralProjections(SURFACES)
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for run in (model, compiled):
        x = inputs(4, 3, 6).requires_grad_()
        model.zero_grad()
        y = run(x)
        sum(out.pow(3).sum() for out in y).backward()
        results.append((*y, x.grad, *(p.grad.clone() for p in model.parameters())))
    torch.testing.assert_close(results[1], results[0])


def test_vmap_compiles() -> None:
    x = inputs(4, 6)
    run = torch.func.vmap(lambda row: project(row, 1.5, p=1))
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))


def test_the_opaque_solver_is_a_well_behaved_operation() -> None:
    rows = excess(inputs(5, 9).abs(), torch.ones(5, 1))
    torch.library.opcheck(solver.opaque_threshold, (rows,))


@pytest.fixture(scope="module")
def exported() -> tuple[SeveralProjections, Any]:
    model = SeveralProjections(SURFACES[:1] + SURFACES[2:], simplex=False)
    batch = torch.export.Dim("batch", min=2, max=64)
    return model, torch.export.export(model, (inputs(4, 3, 6),), dynamic_shapes=({0: batch},))


@pytest.mark.parametrize("batch", [4, 7])
def test_the_exported_program_equals_eager_with_any_batch(exported: tuple[SeveralProjections, Any], batch: int) -> None:
    model, program = exported
    x = inputs(batch, 3, 6)
    torch.testing.assert_close(program.module()(x), model(x))


def test_the_exported_program_has_the_same_gradients(exported: tuple[SeveralProjections, Any]) -> None:
    model, program = exported
    results = []
    for run in (model, program.module()):
        x = inputs(4, 3, 6).requires_grad_()
        results.append(torch.autograd.grad(sum(out.pow(3).sum() for out in run(x)), x)[0])
    torch.testing.assert_close(results[1], results[0])


def test_onnx_runtime_gives_the_same_numbers(exported: tuple[SeveralProjections, Any], tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, program = exported
    file = tmp_path / "projection.onnx"
    torch.onnx.export(program, (), dynamo=True, verbose=False).save(file)
    session = runtime.InferenceSession(file)
    x = inputs(5, 3, 6)
    outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for got, want in zip(outputs, model(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), want.detach())


def test_a_radius_that_cannot_be_looked_at_gives_nan_when_it_is_not_positive() -> None:
    x = inputs(3, 4)
    radius = torch.tensor([[1.0], [-1.0], [0.0]])
    for p, surface in SURFACES:
        run = torch.compile(project, fullgraph=True, backend="eager")
        y = run(x, radius, p=p, surface=surface)
        assert bool(y[0].isfinite().all())
        assert bool(y[1:].isnan().all())
        assert bool(torch.func.vmap(project)(x, radius.squeeze(1))[1:].isnan().all())


@each_surface
def test_shapes_are_inferred_on_the_meta_device(p: float, surface: str) -> None:
    y = Projection(p, surface, device="meta")(torch.empty(3, 4, device="meta"))
    assert y.is_meta
    assert y.shape == (3, 4)


def test_an_linf_ball_is_a_box() -> None:
    x = inputs(20, 5)
    assert torch.equal(project_box(x, -1.5, 1.5), project(x, 1.5, p=math.inf))


def test_box_bounds_get_gradients_where_they_are_active() -> None:
    x = torch.tensor([-3.0, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
    low, high = torch.tensor(0.0, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y = project_box(x, low, high)
    grads = torch.autograd.grad(y, (x, low, high), torch.tensor([1.0, 2, 4, 8, 16]))
    assert torch.equal(y, torch.tensor([0.0, 0, 0.5, 1, 1]))
    assert [g.tolist() for g in grads] == [[0, 2, 4, 8, 0], 1, 16]


def test_box_gradients_are_those_of_finite_differences() -> None:
    x = inputs(6, 5, dtype=torch.float64).requires_grad_()
    low = torch.linspace(-2, -1, 5, dtype=torch.float64, requires_grad=True)
    high = torch.linspace(0.5, 3, 6, dtype=torch.float64).unsqueeze(1).requires_grad_()
    assert gradcheck(project_box, (x, low, high), check_forward_ad=True)
    assert gradgradcheck(project_box, (x, low, high))


@pytest.mark.parametrize("source", [functional, module], ids=lambda m: m.__name__)
def test_the_examples_in_the_documentation_run(source: Any) -> None:
    result = doctest.testmod(source)
    assert result.attempted > 1
    assert result.failed == 0


@pytest.mark.gpu
@each_surface
def test_cuda_equals_the_cpu_and_keeps_batch_independence(p: float, surface: str) -> None:
    x = inputs(300, 1111)
    v = inputs(300, 1111).flip(0)
    on_cpu, on_gpu = x.clone().requires_grad_(), x.cuda().requires_grad_()
    y, y_gpu = project(on_cpu, 4.0, p=p, surface=surface), project(on_gpu, 4.0, p=p, surface=surface)
    torch.testing.assert_close(y_gpu.cpu(), y, rtol=1e-5, atol=1e-5)
    (g,), (g_gpu,) = torch.autograd.grad(y, on_cpu, v), torch.autograd.grad(y_gpu, on_gpu, v.cuda())
    torch.testing.assert_close(g_gpu.cpu(), g, rtol=1e-4, atol=1e-5)
    for i in (0, 150, 299):
        assert torch.equal(project(on_gpu[i : i + 1], 4.0, p=p, surface=surface)[0], y_gpu[i])


@pytest.mark.gpu
@each_surface
def test_cuda_graphs_capture_a_projection(p: float, surface: str) -> None:
    x = inputs(64, 200).cuda()
    want = project(x, 4.0, p=p, surface=surface)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = project(x, 4.0, p=p, surface=surface)
    graph.replay()
    torch.testing.assert_close(y, want)


@each_surface
def test_gradients_of_rows_that_are_not_finite_are_the_same_in_every_mode(p: float, surface: str) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1.0, 2, -3], [nan, 1, 2], [inf, 1, 2], [-inf, 1, 2], [nan, inf, 0], [0.1, 0.2, 0.3]])
    v = torch.tensor([1.0, 2.0, 3.0])
    found = []
    for call in (
        lambda x, r: project(x, r, p=p, surface=surface),
        lambda x, r: kernel._evaluate(x, r, f"{functional.check_norm(p)}_{surface}", (-1,))[0],
        torch.compile(lambda x, r: project(x, r, p=p, surface=surface), backend="aot_eager", fullgraph=True),
    ):
        leaf, radius = x.clone().requires_grad_(), torch.full((6, 1), 1.5, requires_grad=True)
        y = call(leaf, radius)
        found.append((y.detach(), *torch.autograd.grad((y * v).sum(), (leaf, radius))))
    for other in found[1:]:
        for wanted, got in zip(found[0], other, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
