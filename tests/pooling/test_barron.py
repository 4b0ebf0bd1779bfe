"""Robust pooling by Barron's loss below shape 1, compiled: the global minimum, in every form, row by row."""

import math

import numpy as np
import pytest
import torch
from pooling_reference import least_total, rows, total

from hyperball import radial
from hyperball.functional.pooling import robust_pool, robust_pool2d, segment_robust_pool
from hyperball.kernels.pooling import native
from hyperball.kernels.pooling import operation as kernel
from hyperball.kernels.pooling import rows as pooling_rows
from hyperball.kernels.pooling.rows import pool_rows

D = torch.float64
SHAPES = [-math.inf, -1e6, -10.0, -2.0, -1.0, -1e-3, 0.0, 1e-3, 0.3, 0.7, 0.95, 0.999]
pytestmark = pytest.mark.skipif(native.library(torch.float64).pool is None, reason="no C compiler")


def clusters(x):
    return 0.3 * x + 2.0 * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)


KINDS = {
    "a crowd": lambda x: x,
    "a crowd far from 0": lambda x: x + 1000,
    "two crowds": clusters,
    "ties": lambda x: (2 * x).round(),
    "outliers": lambda x: torch.where(torch.rand_like(x) < 0.3, x + 20, x),
    "outliers a long way off": lambda x: torch.where(torch.rand_like(x) < 0.3, 1e5 * x, x),
    "hardly two together": lambda x: 100 * x,
    "constant": lambda x: x[:, :1].expand_as(x).clone(),
}


def draw(kind, count, n, dtype=D):
    return KINDS[kind](torch.randn(count, n, dtype=D)).to(dtype)


def some_weights(x):
    w = torch.rand_like(x) * (torch.rand(x.shape) < 0.7)
    w[:, 0] = 0.5
    return w


def pooled(x, shape, c=1.0, weights=None):
    return native.pool(x, weights, "barron", c, shape, tap_dims=1)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_no_point_costs_less_than_the_answer(kind, dtype):
    for shape in SHAPES:
        for n, c in ((1, 1.0), (2, 0.2), (3, 1.0), (5, 0.4), (9, 0.05), (20, 1.5)):
            x = draw(kind, 3, n, dtype)
            w = some_weights(x) if n % 2 else None
            for i, y in enumerate(pooled(x, shape, c, w).double()):
                row, held = x[i].double().numpy(), None if w is None else w[i].double().numpy()
                least = least_total("barron", row, c, shape, held)
                found = total("barron", np.array([float(y)]), row, c, shape, held)[0]
                slack = 4e-6 * c * c * n + (1e-12 if dtype == D else 2e-6) * abs(least)
                assert found <= least + slack, (shape, n, c, i)


@pytest.mark.parametrize("n, c", [(33, 0.3), (130, 1.0), (500, 0.05)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_costs_no_more_than_that_of_the_eager_twin(kind, n, c):
    for shape in (-math.inf, -1.0, 0.0, 0.7):
        x = draw(kind, 5, n)
        value = radial.barron(c=c, shape=shape)
        for weights in (None, some_weights(x)):
            eager, _ = pool_rows(x, weights, value, fixed=False)
            mass = n if weights is None else weights.sum(-1)
            costs = [
                pooling_rows.objective(u.double()[:, None], x, weights, value)[:, 0]
                for u in (pooled(x, shape, c, weights), pooled(x.float(), shape, c, weights), eager)
            ]
            assert (costs[0] <= costs[2] * (1 + 1e-12) + 4e-6 * mass).all(), shape
            assert (costs[1] <= costs[2] * (1 + 2e-6) + 1e-5 * mass).all(), shape


def test_many_samples_that_are_far_apart_are_searched_by_crowding_and_by_halves():
    x = 1e5 * torch.rand(3, 1500, dtype=D)
    x[:, 700:704] = x[:, 700:701] + 0.1 * torch.rand(3, 4, dtype=D)  # the one crowd
    torch.testing.assert_close(pooled(x, -2.0), x[:, 700:704].mean(-1), rtol=0, atol=0.1)
    level = pooled(x, 0.999, 0.01)  # about the median
    cost, middle = (pooling_rows.objective(u[:, None], x, None, radial.barron(c=0.01, shape=0.999)) for u in (
        level, x.median(-1).values
    ))  # fmt: skip
    assert (cost <= middle * (1 + 1e-9)).all()


@pytest.mark.parametrize("n", [7, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_row_has_the_same_bits_in_any_company(n, dtype):
    x = torch.cat([draw(kind, 6, n, dtype) for kind in KINDS])
    shape = torch.tensor([*SHAPES, 1.0, 1.5, 2.0, 3.0]).to(dtype).repeat(3)[: len(x)]
    c = torch.rand(len(x), dtype=dtype) + 0.1
    x[5, 0], x[9, :2] = math.nan, math.inf
    together = pooled(x, shape, c)
    alone = torch.cat([pooled(x[i : i + 1], float(shape[i]), float(c[i])) for i in range(len(x))])
    assert torch.equal(together.nan_to_num(7.0), alone.nan_to_num(7.0))
    assert together.isnan().nonzero().flatten().tolist() == [5]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    many = pooled(x.repeat(40, 1), shape.repeat(40), c.repeat(40))
    torch.set_num_threads(threads)
    assert torch.equal(many.nan_to_num(7.0), together.repeat(40).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("n", [9, 150])
def test_the_family_passes_through_its_named_members(n, dtype):
    x = rows(40, n, 0.25).to(dtype)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-7}
    welsch = native.pool(x, None, "welsch", 0.7, 1.0, tap_dims=1)[0]
    torch.testing.assert_close(pooled(x, -math.inf, 0.7), welsch, **close)
    pseudo = native.pool(x, None, "pseudo_huber", 0.7, 1.0, tap_dims=1)[0]
    one = torch.ones(40, dtype=dtype)
    torch.testing.assert_close(pooled(x, one, 0.7 * one), pseudo, **close)
    below = torch.full_like(one, 1 - 1e-6)
    torch.testing.assert_close(pooled(x, below, 0.7 * one), pseudo, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pooled(x, 2.0, 0.7), x.mean(-1), rtol=1e-5, atol=1e-5)
    for shape in SHAPES:
        torch.testing.assert_close(pooled(x, shape, 1e9), x.mean(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, scales", [(torch.float32, (1e-25, 1e25)), (D, (1e-200, 1e200))])
@pytest.mark.parametrize("shape", [-math.inf, -2.0, 0.0, 0.9])
def test_units_do_not_matter(shape, dtype, scales):
    x = rows(20, 31, 0.25).to(dtype)
    y = pooled(x, shape, 0.5)
    for scale in scales:
        scaled = pooled(x * scale, shape, 0.5 * scale)
        torch.testing.assert_close(scaled / scale, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [-math.inf, -2.0, 0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_tiny_radius_gives_a_sample_to_rounding_and_infinite_samples_are_a_long_way_off(shape, dtype):
    x = draw("hardly two together", 20, 21, dtype)
    c = 1e-25 if dtype == torch.float32 else 1e-200
    off = (pooled(x, shape, c)[:, None] - x).abs() / x.abs()
    assert (off.amin(-1) <= 16 * torch.finfo(dtype).eps).all()
    far = draw("a crowd", 20, 21, dtype)
    far[:, 3], far[:, 5] = math.inf, -math.inf
    without = far[:, [i for i in range(21) if i not in (3, 5)]]
    torch.testing.assert_close(pooled(far, shape), pooled(without, shape), rtol=1e-2, atol=1e-2)
    weights = torch.zeros_like(far)
    assert pooled(far, shape, weights=weights).isnan().all()


def test_windows_masks_and_segments_are_their_rows():
    x = draw("outliers", 6, 12).reshape(2, 3, 3, 4)
    shape, c = torch.tensor([-1.0, 0.5, 1.5], dtype=D), torch.tensor([0.3, 1.0, 2.0], dtype=D)
    mask = torch.rand(2, 3, 3, 4) < 0.8
    mask[..., 0, 0] = True
    whole = robust_pool(x, (2, 3), penalty=radial.barron(c=c, shape=shape), mask=mask)
    windows = robust_pool2d(x, 2, 1, penalty=radial.barron(c=c, shape=shape))
    for i in range(2):
        for j in range(3):
            value = radial.barron(c=float(c[j]), shape=float(shape[j]))
            one = robust_pool(x[i, j][mask[i, j]], penalty=value)
            torch.testing.assert_close(whole[i, j], one, rtol=1e-9, atol=1e-9)
            patch = robust_pool(x[i, j, 1:3, 2:4].flatten(), penalty=value)
            torch.testing.assert_close(windows[i, j, 1, 2], patch, rtol=1e-9, atol=1e-9)
    flat, offsets = draw("outliers", 1, 60)[0], torch.tensor([0, 4, 4, 33, 60])
    found = segment_robust_pool(flat, offsets, penalty="barron(shape=0.2)")
    assert found[1].isnan()
    for i in (0, 2, 3):
        one = robust_pool(flat[offsets[i] : offsets[i + 1]], penalty="barron(shape=0.2)")
        torch.testing.assert_close(found[i], one, rtol=1e-9, atol=1e-9)


def test_learned_shapes_of_every_sign_are_solved_in_c():
    cpu = torch.device("cpu")
    for shape in (-math.inf, 0.5, 4.0, torch.tensor([-3.0, 0.5, 1.7])):
        assert kernel.choose(radial.barron(shape=shape), cpu, torch.float32)[0] == "native"
    for shape in (4.5, torch.tensor([0.5, 4.5]), torch.tensor([0.5, math.nan])):
        assert kernel.choose(radial.barron(shape=shape), cpu, torch.float32)[0] == "eager"
