"""The row kernels against their eager twins in float64: run by kernels/test_triton_rows.py, on a GPU or interpreted.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import math
import os

import numpy as np
import pytest
import torch
from pooling_reference import TWIN_MINIMA, least_total, name_and_shape, phi, rows, total

from hyperball import functional as F
from hyperball import radial
from hyperball.kernels import dispatch
from hyperball.kernels.pooling import operation as kernel
from hyperball.kernels.projection import operation as projection

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if NATIVE else [])]
PENALTIES = ["quadratic", "huber", "pseudo_huber", "welsch", "absolute", "barron(shape=1.5)", "barron(shape=0.5)"]
SMOOTH = ["pseudo_huber", "welsch", "barron(shape=1.5)", "barron(shape=-1)"]


@pytest.fixture(autouse=True)
def _kernels_of_rows_run_on_this_device(monkeypatch):
    """Tensors of float64 run eagerly; memory that a kernel leaves unwritten is NaN."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def outlying(*shape, share=0.25, seed=0, dtype=torch.float32):
    """Normal samples, a share of them moved to about 20."""
    away = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < share
    return random(*shape, seed=seed, dtype=dtype) + 20 * away.to(DEVICE, dtype)


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-6))


def both(function, inputs, bound):
    """Outputs and gradients of a function of tensors, by Triton as they are and eagerly in float64."""
    results = []
    for lift in (lambda t: t, lambda t: t.double()):
        leaves = [lift(t.detach().clone()).requires_grad_() for t in inputs]
        y = function(*leaves)
        v = random(*y.shape, seed=9, dtype=y.dtype)
        results.append([y, *torch.autograd.grad(y, leaves, v, allow_unused=True)])
    for place, (a, b) in enumerate(zip(*results, strict=True)):
        if b is not None:
            assert a is not None, place
            assert a.shape == b.shape
            assert error(a, b) < bound, (place, error(a, b))


def with_parameters(text, **tensors):
    value = radial.parse(text, "penalty")
    return value.with_parameters(**{key: held for key, held in tensors.items() if key in value.parameters})


@pytest.mark.parametrize(
    "text, n", [*[(text, n) for text in PENALTIES for n in (1, 49)], ("huber", 2), ("huber", 130), ("welsch", 7)]
)
def test_rows_of_any_length_equal_the_twin(text, n):
    both(lambda x: F.robust_pool(x, penalty=text), [random(5, n, seed=n)], BOUNDS[torch.float32])


@pytest.mark.parametrize("n", [5, 16] if NATIVE else [5])
@pytest.mark.parametrize("text", ["pseudo_huber", "welsch", "barron(shape=0.5)"])
def test_lanes_that_hold_one_sample_each_leave_the_loop_together(text, n):
    x = outlying(3000 if NATIVE else 5, n, seed=n)
    y, status = F.robust_pool(x, penalty=text, return_status=True)
    name, shape = name_and_shape(text)
    ours, exact = (
        phi(name, (held.double().unsqueeze(-1) - x.double()).cpu().numpy(), 1.0, shape).sum(-1)
        for held in (y, F.robust_pool(x.double(), penalty=text))
    )
    assert ours == pytest.approx(exact, rel=1e-5, abs=1e-5)  # of two equal minima either is right
    assert int(status.iterations.max()) < 30


def test_of_two_minima_close_together_the_deeper_is_found():
    x = torch.tensor([TWIN_MINIMA, [-a for a in TWIN_MINIMA]], device=DEVICE)
    y = F.robust_pool(x, penalty="welsch")
    assert y.tolist() == pytest.approx([-0.224753, 0.224753], abs=1e-4)  # and not 1.00043, by 2e-4 of it worse


def check_deepest(x, w=None):
    """No point of a row has more of Σ w·exp(-z²/2) than welsch's center."""
    y = F.robust_pool(x, penalty="welsch", weights=w)
    for k in range(len(x)):
        row, at = x[k].double().cpu().numpy(), y[k : k + 1].double().cpu().numpy()
        weights = np.ones_like(row) if w is None else w[k].double().cpu().numpy()
        ours = weights.sum() - total("welsch", at, row, 1.0, w=weights)[0]
        assert ours >= (weights.sum() - least_total("welsch", row, w=weights)) * (1 - 4e-6), (k, at, row)


def modes(count, n, distances, spread, seed=0):
    """Rows of modes of equal mass: the first at 0, the others behind it at distances drawn between these bounds."""
    generator = torch.Generator().manual_seed(seed)
    gaps = [low + (high - low) * torch.rand(count, 1, generator=generator) for low, high in distances]
    places = torch.cat([torch.zeros(count, 1), *gaps], 1).cumsum(1)
    x = places[:, torch.arange(n) % places.shape[1]] + spread * torch.randn(count, n, generator=generator)
    return x.to(DEVICE)


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("distances", [[(0.5, 2.2)], [(2.0, 2.6)], [(2.2, 6.0)], [(2.2, 6.0)] * 2, [(2.0, 2.6)] * 3])
def test_of_modes_of_nearly_equal_mass_welsch_takes_the_deepest(distances, spread):
    check_deepest(modes(24, 12, distances, spread))


def test_of_twins_of_nearly_equal_weight_welsch_takes_the_deeper():
    x = modes(60, 8, [(1.95, 2.3)], 0.05)
    even = torch.arange(8, device=DEVICE) % 2 == 0
    check_deepest(x, torch.where(even, 1.0, 1.0 + 0.002 * random(60, 1, seed=3)))


def test_a_narrow_mode_is_found_wherever_it_lies_between_the_points_of_a_grid():
    x = 10 * torch.rand(16, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:, :6] = torch.linspace(0.2, 9.8, 16, device=DEVICE)[:, None]
    check_deepest(x)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_mode_at_the_end_of_a_row_is_found(sign):
    x = 1.5 + 12 * torch.rand(12, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x[:, :9] = 0.0
    x[6:, 9] = 60.0  # many runs of points lie between the mode and the other end
    check_deepest(sign * x)


def test_a_pair_among_scattered_samples_is_found():
    x = 400 * random(12, 13, seed=2)
    x[:, 5] = x[:, 7] + torch.linspace(0.1, 2.1, 12, device=DEVICE)
    check_deepest(x)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_weights_count_as_shares_whatever_their_size(scale):
    x, w = random(4, 21), random(4, 21, seed=2).abs() + 0.1
    scaled = F.robust_pool(x, penalty="welsch", weights=scale * w)
    assert error(scaled, F.robust_pool(x, penalty="welsch", weights=w)) < 1e-5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("text", PENALTIES)
def test_one_row_is_pooled_to_a_number_with_its_gradients_and_its_status(text, weighted):
    x, w, c = outlying(21), random(21, seed=2).abs() + 0.1, torch.tensor(0.9, device=DEVICE)

    def pooled(x, w, c):
        penalty = with_parameters(text, rho=c) if text in SMOOTH else text
        return F.robust_pool(x, penalty=penalty, weights=w if weighted else None)

    both(pooled, [x, w, c], 1e-4)
    y, share, status = F.robust_pool(x, penalty=text, return_weights=True, return_status=True)
    assert [y.shape, share.shape, status.iterations.shape] == [(), (21,), ()]
    assert float(share.sum()) == pytest.approx(1, abs=1e-5)


def test_a_step_that_would_cycle_is_halved():
    x = rows(37, 49, 0.25, distance=5.0)[25:26].float().to(DEVICE)
    y, status = F.robust_pool(x, penalty="huber(c=1.1)", return_status=True)
    assert error(y, F.robust_pool(x.double(), penalty="huber(c=1.1)")) < 1e-5
    assert int(status.iterations) < 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "welsch"])
def test_half_precision_is_solved_in_float32(text, dtype):
    both(lambda x: F.robust_pool(x, penalty=text), [outlying(4, 37, dtype=dtype)], BOUNDS[dtype])


@pytest.mark.parametrize("share", [0.25, 0.45])
@pytest.mark.parametrize("text", ["huber", "welsch", "barron(shape=0.5)", "huber(c=0.01)", "welsch(c=0.2)"])
def test_rows_with_outliers_equal_the_twin(text, share):
    x = outlying(2, 61, share=share, seed=3)
    bound = 1e-4 if "0." in text else BOUNDS[torch.float32]
    both(lambda x: F.robust_pool(x, penalty=text), [x], bound)


@pytest.mark.parametrize("text", PENALTIES)
def test_weights_and_absent_samples_equal_the_twin(text):
    w = random(5, 37, seed=2).relu() + 0.1
    mask = random(5, 37, seed=4) > -0.5
    mask[:, 3] = True

    def pooled(x, w):
        return F.robust_pool(x, penalty=text, weights=w, mask=mask)

    both(pooled, [outlying(5, 37), w], BOUNDS[torch.float32])


@pytest.mark.parametrize("text", SMOOTH)
def test_gradients_of_the_radius_and_of_the_shape_equal_the_twins(text):
    c, shape = random(5, seed=6).abs() + 0.5, random(5, seed=7) * 0.3 + 0.8

    def pooled(x, c, shape):
        return F.robust_pool(x, penalty=with_parameters(text, rho=c, shape=shape))

    both(pooled, [random(5, 37), c, shape], 1e-4)


@pytest.mark.parametrize(
    "view, dims",
    [
        (lambda x: x, (-1, -2)),
        (lambda x: x.contiguous(memory_format=torch.channels_last), (-1, -2)),
        (lambda x: x.transpose(1, 3), (1,)),
        (lambda x: x[:, ::2, 1:, :], (-1,)),
        (lambda x: x.permute(3, 1, 0, 2), (0, 2)),
    ],
)
def test_rows_of_any_strides_equal_the_twin_and_their_gradients_lie_as_they_do(view, dims):
    c = random(1, seed=8).abs() + 0.7
    x = view(random(2, 9, 4, 5))

    def pooled(x, c):
        return F.robust_pool(x, dims, penalty=radial.huber(c=c))

    both(pooled, [x, c], 1e-3)
    leaf = view(random(2, 9, 4, 5)).detach().requires_grad_()
    (grad,) = torch.autograd.grad(pooled(leaf, c).sum(), leaf)
    assert grad.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 1, 1), (3, 2, 1), ((2, 3), (2, 3), 0)])
@pytest.mark.parametrize("text", ["huber(c=0.5)"])
def test_windows_equal_the_twin(text, window):
    x = random(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    c = random(3, seed=5).abs() + 0.4
    penalty = radial.parse(text, "penalty")
    both(lambda x, c: F.robust_pool2d(x, *window, penalty=penalty.with_parameters(rho=c)), [x, c], 1e-5)


@pytest.mark.parametrize("text, columns", [("huber", 1), ("welsch", 3), ("absolute", 17), ("barron(shape=0.5)", 9)])
def test_segments_equal_the_twin(text, columns):
    offsets = torch.tensor([0, 1, 70, 75, 140], device=DEVICE)
    w = random(140, columns, seed=2).abs() + 0.1

    def pooled(x, w):
        return F.segment_robust_pool(x, offsets, penalty=text, weights=w)

    both(pooled, [random(140, columns), w], BOUNDS[torch.float32])


def test_an_empty_segment_is_nan_and_moves_nothing():
    x = random(4, 2).requires_grad_()
    y = F.segment_robust_pool(x, torch.tensor([0, 2, 2, 4], device=DEVICE))
    assert y.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    (grad,) = torch.autograd.grad(y[::2].sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("text", ["quadratic", "huber", "welsch", "absolute"])
def test_rows_that_do_not_fit_registers_are_read_again(text, monkeypatch):
    from hyperball.kernels.triton import row_access

    monkeypatch.setattr(row_access, "LONGEST", 64)
    both(lambda x: F.robust_pool(x, penalty=text), [outlying(2, 4200)], BOUNDS[torch.float32])


def test_huber_without_an_inlier_takes_the_middle_of_both_samples():
    x = torch.tensor([[0.0, 1.0, 9.0, 10.0], [0.0, 0.0, 0.0, 7.0]], device=DEVICE).requires_grad_()
    y = F.robust_pool(x, penalty="huber(c=0.1)")
    assert y.tolist() == pytest.approx([5.0, 0.1 / 3], abs=1e-6)
    (grad,) = torch.autograd.grad(y[0], x)
    assert grad[0].tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "welsch", "quadratic", "barron(shape=3)"])
@pytest.mark.parametrize("scale", [1e-20, 1e37])
def test_tiny_and_huge_rows_keep_their_digits(text, scale):
    x = random(4, 33, seed=1)
    penalty = radial.parse(text, "penalty")
    scaled = F.robust_pool(x * scale, penalty=penalty.with_parameters(rho=scale))
    assert error(scaled / scale, F.robust_pool(x, penalty=text)) < 1e-5


def test_nan_stays_in_its_row_and_inf_counts_as_far_away():
    x = random(4, 9)
    x[0, 3], x[1, 2], x[2, 1] = math.nan, math.inf, -math.inf
    y, twin = F.robust_pool(x), F.robust_pool(x.double())
    assert y.isnan().tolist() == [True, False, False, False]
    assert error(y[1:], twin[1:]) < 1e-5


def pooled_as(form, x, w, mask, penalty):
    """The rows of x as rows, or as segments."""
    if form == "rows":
        return F.robust_pool(x, penalty=penalty, weights=w, mask=mask)
    offsets = torch.arange(0, x.numel() + 1, x.shape[1], device=DEVICE)
    given = None if w is None else w.expand_as(x).flatten()
    return F.segment_robust_pool(x.flatten(), offsets, penalty=penalty, weights=given, mask=mask.flatten())


@pytest.mark.parametrize("kind", ["masked", "nan"])
@pytest.mark.parametrize("form", ["rows", "segments"])
@pytest.mark.parametrize("text", PENALTIES)
def test_a_broken_row_that_is_not_used_changes_no_gradient(text, form, kind):
    mask = torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    mask[1, 2] = False
    x, w, numbers = random(3, 9), random(9, seed=1).abs() + 0.2, {"rho": torch.tensor(0.7), "shape": torch.tensor(1.3)}
    if kind == "nan":
        x[0, 4] = math.nan
    else:
        mask[0] = False
    for weighted in (True, False):
        found = []
        for first in (0, 1):
            held = [t.to(DEVICE).clone().requires_grad_() for t in (x, w, *numbers.values())]
            penalty = with_parameters(text, rho=held[2], shape=held[3])
            y = pooled_as(form, held[0][first:], held[1] if weighted else None, mask[first:], penalty)
            used = y if kind == "masked" and weighted else y[1 - first :]  # an empty row moves with nothing
            found.append(torch.autograd.grad(used.sum(), held, allow_unused=True))
        for with_it, without in zip(*found, strict=True):
            if without is not None:
                torch.testing.assert_close(with_it, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["pseudo_huber", "welsch", "barron(shape=1.5)"])
def test_a_broken_row_that_is_used_says_so_in_its_gradients(text):
    x, w, c = random(3, 9) + 100, random(9, seed=1).abs() + 0.2, torch.tensor(0.7, device=DEVICE)
    x[0, 4] = math.nan
    held = [t.clone().requires_grad_() for t in (x, w, c)]
    y = F.robust_pool(held[0], penalty=with_parameters(text, rho=held[2]), weights=held[1])
    grads = torch.autograd.grad(y.sum(), held)
    assert grads[0].isnan().all(-1).tolist() == [True, False, False]
    assert all(grad.isnan().all() for grad in grads[1:])


@pytest.mark.parametrize("kind", list(projection.SURFACES))
@pytest.mark.parametrize("dtype, n", [(torch.float32, 1), *((dtype, 67) for dtype in DTYPES)])
def test_projections_equal_the_twin(kind, dtype, n):
    r = random(4, seed=3).abs() + 0.4

    def projected(x, r):
        return projection.project(x, r.reshape(4, 1), kind, (-1,))

    both(projected, [random(4, n, dtype=dtype), r], BOUNDS[dtype])


@pytest.mark.parametrize("kind", list(projection.SURFACES))
def test_projections_along_any_dimensions_equal_the_twin_in_xs_layout(kind):
    x = random(3, 6, 4, 5).contiguous(memory_format=torch.channels_last)
    r = random(1, seed=3).abs().reshape(1, 1, 1, 1) + 0.4
    for dims in ((-3,), (-2, -1), (-4, -2)):
        both(lambda x, r, dims=dims: projection.project(x, r, kind, dims), [x, r], BOUNDS[torch.float32])
        assert projection.project(x, r, kind, dims).stride() == x.stride()


@pytest.mark.parametrize("kind", list(projection.SURFACES))
def test_zeros_ties_and_broken_vectors_are_projected_as_by_the_twin(kind):
    x = torch.zeros(7, 4, device=DEVICE)
    x[1], x[2, 1], x[3, 0], x[4, 2], x[5] = 1.0, math.nan, math.inf, -math.inf, 1e20
    x[6] = torch.tensor([0.25, -0.25, 0.25, 0.25], device=DEVICE)
    r = torch.ones(1, 1, device=DEVICE)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = x.to(dtype).requires_grad_()
        y = projection.project(leaf, r.to(dtype), kind, (-1,))
        (grad,) = torch.autograd.grad(y, leaf, torch.arange(28, device=DEVICE, dtype=dtype).reshape(7, 4))
        results.append((y.detach(), grad))
    torch.testing.assert_close(results[0][0].double(), results[1][0], rtol=1e-6, atol=1e-6, equal_nan=True)
    kept = [0, 1, 5, 6]
    torch.testing.assert_close(results[0][1][kept].double(), results[1][1][kept], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "view, low, high",
    [
        (lambda x: x, None, None),
        (lambda x: x.contiguous(memory_format=torch.channels_last), (1, 6, 1, 1), (5,)),
        (lambda x: x.permute(3, 0, 2, 1)[::2], (), (3, 1, 1, 1)),
        (lambda x: x.transpose(0, 3), None, (6, 4, 1)),
        (lambda x: x[..., 1:], (4, 1), None),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_box_equal_the_twins(view, low, high, dtype):
    x = view(random(3, 6, 4, 5, dtype=dtype))
    bounds = {
        name: sign * random(*shape, seed=8, dtype=dtype).abs()
        for name, shape, sign in (("low", low, -1), ("high", high, 1)) if shape is not None
    }  # fmt: skip

    def boxed(x, *given):
        return F.project_box(x, **{"low": -0.3, "high": 0.7, **dict(zip(bounds, given, strict=True))})

    both(boxed, [x, *bounds.values()], BOUNDS[dtype])


def test_a_gradient_on_the_bound_of_a_box_is_x_s_and_nan_is_nobody_s():
    x = torch.tensor([-1.0, 0.1, 0.5, 0.7, 2.0, math.nan], device=DEVICE, dtype=torch.float16).requires_grad_()
    low = torch.full((6,), 0.1, device=DEVICE, dtype=torch.float16).requires_grad_()
    y = F.project_box(x, 0.1, 0.7)
    assert y[:-1].tolist() == torch.tensor([0.1, 0.1, 0.5, 0.7, 0.7], dtype=torch.float16).tolist()
    assert torch.autograd.grad(y, x, torch.ones_like(y))[0].tolist() == [0, 1, 1, 1, 0, 1]
    grads = torch.autograd.grad(F.project_box(x, low, math.inf), (x, low), torch.ones_like(y))
    assert [grad.tolist() for grad in grads] == [[0, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0]]


def test_a_hostile_vector_is_projected_to_the_last_digits():
    x = (1.5 ** torch.arange(60.0)).flip(0).reshape(1, 60).to(DEVICE)
    for kind in ("simplex", "l1_ball"):
        r = torch.ones(1, 1, device=DEVICE)
        found, truth = (projection.project(x.to(d), r.to(d), kind, (-1,)) for d in (torch.float32, torch.float64))
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)


def test_the_operators_pass_torchs_own_checks():
    x, c, shape = random(3, 5), random(3).abs() + 0.5, random(3).abs()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernel.robust_pool_op, (x, None, c, shape, "huber", 1), test_utils=tests)
    y, _ = kernel.robust_pool_op(x, None, c, shape, "barron", 1)
    pulled = (random(3), y, x, x.abs() + 0.1, c, shape, "barron", 1, True)
    torch.library.opcheck(kernel.robust_pull_op, pulled, test_utils=tests)
    r = torch.ones(3, 1, device=DEVICE)
    torch.library.opcheck(projection.project_op, (x, r, "simplex", [-1]), test_utils=tests)
    y, cut = projection.project_op(x, r, "simplex", [-1])
    torch.library.opcheck(projection.project_backward_op, (y, x, r, cut, "simplex", [-1]), test_utils=tests)
