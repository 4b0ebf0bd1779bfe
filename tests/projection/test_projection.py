"""Projections as mathematics: references, relations, degenerate points, derivatives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from hyperball.functional.projection import project, project_simplex
from hyperball.kernels.projection import operation as kernel
from hyperball.kernels.projection import solver

SURFACES = [(p, surface) for p in (1, 2, math.inf) for surface in ("ball", "sphere")]
BALLS = [(p, "ball") for p in (1, 2, math.inf)]
each_surface = pytest.mark.parametrize("p, surface", SURFACES, ids=[f"l{p}_{s}" for p, s in SURFACES])


def norm(x: Tensor, p: float) -> Tensor:
    return torch.linalg.vector_norm(x.double(), p, dim=-1, keepdim=True)


def simplex_reference(a: np.ndarray, r: float) -> np.ndarray:
    """Sort and prefix sums, for one nonnegative or signed row, in float64 relative to the maximum."""
    shifted = a - a.max()
    ordered = np.sort(shifted)[::-1]
    thresholds = (np.cumsum(ordered) - r) / np.arange(1, a.size + 1)
    return np.maximum(shifted - thresholds[np.flatnonzero(ordered > thresholds)[-1]], 0)


def row_reference(x: np.ndarray, r: float, p: float, surface: str) -> np.ndarray:
    """One row in float64, by the definition of each case."""
    sign = np.where(x < 0, -1.0, 1.0)
    size = np.abs(x)
    length = {1: size.sum(), 2: np.hypot.reduce(x), math.inf: size.max()}[p]
    if surface == "ball" and length <= r:
        return x
    if p == 1:
        return sign * simplex_reference(size, r)
    if p == 2:
        return r * (x / length if length else np.full(x.size, x.size**-0.5))
    y = np.clip(x, -r, r)
    y[size.argmax()] = r * sign[size.argmax()]
    return y


def reference(x: Tensor, radius: float | Tensor, p: float, surface: str) -> Tensor:
    radii = np.broadcast_to(np.asarray(radius, dtype=np.float64), (*x.shape[:-1], 1)).reshape(-1)
    rows = x.detach().double().numpy().reshape(-1, x.shape[-1])
    y = np.stack([row_reference(row, r, p, surface) for row, r in zip(rows, radii, strict=True)])
    return torch.from_numpy(y.reshape(x.shape))


def mixed_rows(rows: int, n: int, seed: int = 0) -> Tensor:
    """Rows far inside to far outside a unit ball, in float64."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 2, rows, dtype=torch.float64).unsqueeze(1)
    return scale * torch.randn(rows, n, dtype=torch.float64, generator=generator)


def hostile_row(n: int, keep: float = 0.65) -> Tensor:
    """A row for radius 1 on which Newton is as slow as it can be: each round drops elements it has only just passed."""
    theta, excess, count, parts = 1.0, 0.2 * n, n, []
    while (left := int(count * keep)) >= 3:
        step = excess / count
        parts.append(torch.full((count - left,), 0.01 * step - theta, dtype=torch.float64))
        theta, excess, count = theta - step, excess * (1 - left / count), left
    last = [(1 - theta) / (count - 1) - theta] * (count - 1) + [0.0]
    return 3 + torch.cat((*parts, torch.tensor(last, dtype=torch.float64)))


def newton_rounds(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    calls: list[Tensor] = []
    mass = solver.mass
    with monkeypatch.context() as patch:
        patch.setattr(solver, "mass", lambda rows, *rest: calls.append(rows) or mass(rows, *rest))
        project(x, 1.0, p=1)
    return len(calls)


@each_surface
@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_equals_the_reference(p: float, surface: str, n: int) -> None:
    x = mixed_rows(40, n)
    for radius in (0.05, 1.0, 30.0):
        torch.testing.assert_close(project(x, radius, p=p, surface=surface), reference(x, radius, p, surface))


@each_surface
@pytest.mark.parametrize("place", [0, 511, 515])
def test_one_large_element_of_a_long_row_is_found_wherever_it_is(p: float, surface: str, place: int) -> None:
    x = torch.full((2, 516), 1e-3, dtype=torch.float64)
    x[0, place], x[1, place] = 5.0, -1e8
    torch.testing.assert_close(project(x, 1.0, p=p, surface=surface), reference(x, 1.0, p, surface))


@each_surface
def test_result_is_feasible(p: float, surface: str) -> None:
    y = project(mixed_rows(60, 33).float(), 1.5, p=p, surface=surface)
    excess = norm(y, p) - 1.5
    assert bool((excess.abs() if surface == "sphere" else excess).max() < 2e-6)


@each_surface
def test_projecting_twice_changes_nothing(p: float, surface: str) -> None:
    y = project(mixed_rows(60, 33), 1.5, p=p, surface=surface)
    torch.testing.assert_close(project(y, 1.5, p=p, surface=surface), y, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("p, surface", BALLS)
def test_balls_are_non_expansive(p: float, surface: str) -> None:
    a, b = mixed_rows(300, 6, seed=1), mixed_rows(300, 6, seed=2)
    before = norm(a - b, 2)
    after = norm(project(a, 1.0, p=p, surface=surface) - project(b, 1.0, p=p, surface=surface), 2)
    assert bool((after <= before * (1 + 1e-12)).all())


@each_surface
def test_no_random_feasible_point_is_nearer(p: float, surface: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = mixed_rows(30, 4)
    y = project(x, 1.0, p=p, surface=surface)
    noise = torch.randn(500, 30, 4, dtype=torch.float64, generator=generator)
    spread = torch.logspace(-4, 2, 500, dtype=torch.float64)[:, None, None]
    rivals = y + spread * noise
    length = norm(rivals, p)
    rivals = rivals / (length if surface == "sphere" else length.clamp_min(1))
    assert bool((norm(rivals - x, 2) >= norm(y - x, 2) - 1e-12).all())


@pytest.mark.parametrize("p, surface", BALLS)
def test_a_ball_is_the_sphere_outside_and_the_identity_inside(p: float, surface: str) -> None:
    x = mixed_rows(60, 9)
    inside = (norm(x, p) <= 1).squeeze(-1)
    assert 5 < int(inside.sum()) < 55
    y = project(x, 1.0, p=p, surface=surface)
    torch.testing.assert_close(y[~inside], project(x[~inside], 1.0, p=p, surface="sphere"))
    assert torch.equal(y[inside], x[inside])


@each_surface
def test_scaling_input_and_radius_scales_the_result(p: float, surface: str) -> None:
    x = mixed_rows(20, 9)
    y = project(x, 1.0, p=p, surface=surface)
    torch.testing.assert_close(project(8 * x, 8.0, p=p, surface=surface), 8 * y)


@each_surface
def test_permuting_the_coordinates_permutes_the_result(p: float, surface: str) -> None:
    x = mixed_rows(20, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    y = project(x, 1.0, p=p, surface=surface)
    torch.testing.assert_close(project(x[:, order], 1.0, p=p, surface=surface), y[:, order], rtol=1e-13, atol=1e-14)


@each_surface
@pytest.mark.parametrize("n", [1, 5, 33, 1000, 9000])
def test_a_row_does_not_depend_on_its_batch_bit_for_bit(
    p: float, surface: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 5000)
    x = mixed_rows(23, n).float().requires_grad_()
    y = project(x, 1.0, p=p, surface=surface)
    v = torch.randn(23, n, generator=torch.Generator().manual_seed(4))
    (grad,) = torch.autograd.grad(y, x, v)
    for i in (0, 11, 22):
        alone = x[i : i + 1].detach().requires_grad_()
        y_alone = project(alone, 1.0, p=p, surface=surface)
        assert torch.equal(y_alone[0], y[i])
        assert torch.equal(torch.autograd.grad(y_alone, alone, v[i : i + 1])[0][0], grad[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [300, 16_000])
def test_l1_is_exact_on_hostile_rows(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([hostile_row(n, keep) for keep in (0.6, 0.65, 0.75)]).to(dtype)
    assert newton_rounds(x, monkeypatch) > 8
    y = project(x, 1.0, p=1).double()
    torch.testing.assert_close(y, reference(x, 1.0, 1, "ball"), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bisection_alone_reaches_the_answer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "ROUNDS", {torch.float32: (1, 40), torch.float64: (1, 75)})
    x = torch.cat((mixed_rows(30, 500), hostile_row(500).unsqueeze(0))).to(dtype)
    y = project(x, 1.0, p=1, surface="sphere").double()
    torch.testing.assert_close(y, reference(x, 1.0, 1, "sphere"), rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leaving_early_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat((mixed_rows(30, 3000), hostile_row(3000).unsqueeze(0))).to(dtype)
    early = project(x, 1.0, p=1, surface="sphere")
    monkeypatch.setattr(solver, "can_look", lambda tensor: False)
    assert torch.equal(project(x, 1.0, p=1, surface="sphere"), early)


@each_surface
@pytest.mark.parametrize(
    "dim, shape",
    [(-1, None), (2, (2, 1, 1)), (-1, (2, 3)), (1, (4,)), (0, (3, 1)), ((0, -1), (1, 3, 1)), ((0, 1, 2), ())],
)
def test_gradients_are_those_of_finite_differences(
    p: float, surface: str, dim: int | tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    radius: float | Tensor = 1.3
    if shape is not None:
        radius = (0.5 + 2 * torch.rand(shape, dtype=torch.float64, generator=generator)).requires_grad_()

    def run(x: Tensor, radius: float | Tensor) -> Tensor:
        return project(x, radius, p=p, surface=surface, dim=dim)

    assert gradcheck(run, (x, radius), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(run, (x, radius))


@each_surface
def test_eulers_identity_ties_the_radius_gradient_to_the_rest(p: float, surface: str) -> None:
    x = mixed_rows(50, 12).requires_grad_()
    radius = torch.linspace(0.5, 3, 50, dtype=torch.float64).unsqueeze(1).requires_grad_()
    y = project(x, radius, p=p, surface=surface)
    v = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(6))
    grad_x, grad_radius = torch.autograd.grad(y, (x, radius), v)
    euler = ((v * y).sum(-1, keepdim=True) - (grad_x * x).sum(-1, keepdim=True)) / radius
    torch.testing.assert_close(grad_radius, euler, rtol=1e-10, atol=1e-11)


def test_an_adaptive_linf_radius_is_learned() -> None:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(7))
    target = project(x, 0.8, p=math.inf)
    log_radius = torch.tensor(0.5, requires_grad=True)
    optimizer = torch.optim.SGD([log_radius], lr=2.0)
    for _ in range(200):
        optimizer.zero_grad()
        (project(x, log_radius.exp(), p=math.inf) - target).square().mean().backward()
        optimizer.step()
    assert log_radius.exp().item() == pytest.approx(0.8, rel=1e-3)


@pytest.mark.parametrize(
    "p, surface, expected",
    [
        (1, "ball", [0, 0, 0, 0]),
        (2, "ball", [0, 0, 0, 0]),
        (math.inf, "ball", [0, 0, 0, 0]),
        (1, "sphere", [0.5, 0.5, 0.5, 0.5]),
        (2, "sphere", [1, 1, 1, 1]),
        (math.inf, "sphere", [2, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_zero_vector_has_one_answer_and_finite_gradients(
    p: float, surface: str, expected: list[float], zero: float
) -> None:
    x = torch.full((4,), zero, requires_grad=True)
    radius = torch.tensor(2.0, requires_grad=True)
    y = project(x, radius, p=p, surface=surface)
    torch.testing.assert_close(y, torch.tensor(expected, dtype=torch.float32))
    y.dot(torch.arange(1.0, 5)).backward()
    assert x.grad is not None
    assert radius.grad is not None
    assert bool(x.grad.isfinite().all())
    assert bool(radius.grad.isfinite())
    if (p, surface) == (2, "sphere"):
        assert torch.equal(x.grad, torch.zeros(4))


@pytest.mark.parametrize("p, surface", BALLS)
def test_a_point_on_the_boundary_counts_as_inside_a_ball(p: float, surface: str) -> None:
    x = torch.tensor({1: [1.0, -0.5, 0.5], 2: [0.0, -2.0, 0.0], math.inf: [2.0, -2.0, 1.0]}[p], requires_grad=True)
    radius = torch.tensor(2.0, requires_grad=True)
    y = project(x, radius, p=p, surface=surface)
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    assert radius.grad is not None
    assert radius.grad.item() == 0


def test_the_first_of_tied_coordinates_moves_inside_an_linf_sphere() -> None:
    x = torch.tensor([[0.5, -1.0, 1.0, -1.0]], requires_grad=True)
    y = project(x, 3.0, p=math.inf, surface="sphere")
    y.sum().backward()
    assert torch.equal(y, torch.tensor([[0.5, -3.0, 1.0, -1.0]]))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([[1.0, 0.0, 1.0, 1.0]]))


def test_tied_coordinates_share_an_l1_projection() -> None:
    x = torch.tensor([2.0, -2.0, 2.0, 0.5], requires_grad=True)
    y = project(x, 1.0, p=1)
    torch.testing.assert_close(y, torch.tensor([1 / 3, -1 / 3, 1 / 3, 0]))
    (grad,) = torch.autograd.grad(y, x, torch.tensor([1.0, 0, 0, 5]))
    torch.testing.assert_close(grad, torch.tensor([2 / 3, 1 / 3, -1 / 3, 0]))


@each_surface
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_in_their_row(p: float, surface: str, value: float) -> None:
    x = mixed_rows(5, 6)
    clean = project(x, 1.0, p=p, surface=surface)
    x[2, 3] = value
    x.requires_grad_()
    y = project(x, 1.0, p=p, surface=surface)
    y.sum().backward()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])
    assert x.grad is not None
    assert bool(x.grad[others].isfinite().all())
    if p != math.inf:
        assert bool(y[2].isnan().all())
    elif math.isnan(value):
        assert bool(y[2, 3].isnan())
        assert bool(y[2, [0, 1, 2, 4, 5]].isfinite().all())
    else:
        assert y[2, 3].item() == math.copysign(1.0, value)


magnitudes = st.one_of(st.just(0.0), *(st.floats(-(2.0**power), 2.0**power, width=32) for power in (-67, 2, 67, 120)))


@settings(max_examples=200)
@given(
    row=st.lists(magnitudes, min_size=1, max_size=12),
    radius=st.sampled_from([1e-20, 1e-3, 1.0, 250.0, 1e20, 1e37]),
    case=st.sampled_from(SURFACES),
)
def test_extreme_rows_are_right_to_rounding(row: list[float], radius: float, case: tuple[float, str]) -> None:
    p, surface = case
    x = torch.tensor(row, dtype=torch.float32, requires_grad=True)
    r = torch.tensor(radius, dtype=torch.float32, requires_grad=True)
    y = project(x, r, p=p, surface=surface)
    want = reference(x, r.item(), p, surface)
    scale = min(radius, x.detach().abs().max().item() or radius)
    torch.testing.assert_close(y.double(), want, rtol=3e-6, atol=1e-6 * scale)
    y.sum().backward()
    assert r.grad is not None
    assert bool(r.grad.isfinite())
    if p != 2 or surface == "ball" or radius / max(x.detach().norm().item(), 1e-45) < 1e30:
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("scale", [1e20, 1e-20])
@each_surface
def test_large_and_small_rows_do_not_overflow(p: float, surface: str, scale: float) -> None:
    x = (mixed_rows(9, 64) * scale).float()
    for radius in (1.0, scale):
        y = project(x, radius, p=p, surface=surface).double()
        torch.testing.assert_close(y, reference(x, radius, p, surface), rtol=1e-5, atol=1e-6 * radius)


@each_surface
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3), (torch.float32, 1e-6)])
def test_lower_precision_is_the_rounded_float64_answer(
    p: float, surface: str, dtype: torch.dtype, tolerance: float
) -> None:
    x = (100 * mixed_rows(40, 300)).clamp(-6e4, 6e4).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, want = project(x, 15.0, p=p, surface=surface), project(exact, 15.0, p=p, surface=surface)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=15 * 2e-7)
    v = torch.linspace(-1, 1, 300).to(dtype)
    (grad,) = torch.autograd.grad(y, x, v.expand_as(y))
    (want_grad,) = torch.autograd.grad(want, exact, v.double().expand_as(want))
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), want_grad, rtol=tolerance, atol=tolerance * float(want_grad.abs().max()))


def test_simplex_equals_the_reference_and_is_feasible() -> None:
    x = mixed_rows(40, 20)
    for radius in (0.1, 1.0, 50.0):
        y = project_simplex(x, radius)
        want = np.stack([simplex_reference(row, radius) for row in x.numpy()])
        torch.testing.assert_close(y, torch.from_numpy(want))
        assert bool((y >= 0).all())
        torch.testing.assert_close(y.sum(-1), torch.full((40,), radius, dtype=torch.float64))


def test_simplex_gradients_are_those_of_finite_differences() -> None:
    x = mixed_rows(6, 5, seed=8).requires_grad_()
    radius = torch.linspace(0.5, 2, 6, dtype=torch.float64).unsqueeze(1).requires_grad_()
    assert gradcheck(project_simplex, (x, radius), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(project_simplex, (x, radius))


def test_simplex_gives_nothing_to_minus_infinity() -> None:
    y = project_simplex(torch.tensor([[0.5, -math.inf, 0.5], [1.0, 1.0, 1.0]]))
    torch.testing.assert_close(y, torch.tensor([[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]]))
