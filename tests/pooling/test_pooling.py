"""Robust pooling: its values against a reference, its limits, and how it moves when its input moves."""

import numpy as np
import pooling_reference as reference
import pytest
import torch
from pooling_reference import ALL, CONVEX, NONCONVEX, name_and_shape, rows

from hyperball import radial
from hyperball.functional.pooling import robust_pool, robust_pool1d, robust_pool2d
from hyperball.kernels.pooling import native
from hyperball.kernels.pooling import operation as kernel

D = torch.float64


@pytest.fixture(params=["native", "eager"])
def solver(request, monkeypatch):
    """Both kernels in turn: the compiled one where there is a compiler, and its eager twin."""
    if request.param == "eager":
        monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "switched off by a test"))
    elif native.library(torch.float64).pool is None:
        pytest.skip("no C compiler")
    return request.param


def with_radius(text: str, c: float) -> str:
    return text.replace(")", f", c={c})") if "(" in text else f"{text}(c={c})"


@pytest.mark.parametrize("outliers", [0.0, 0.25, 0.45])
@pytest.mark.parametrize("c", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("text", CONVEX)
def test_convex_pooling_finds_the_root_that_bisection_finds(text, c, outliers, solver):
    x = rows(6, 21, outliers)
    name, shape = name_and_shape(text)
    expected = [reference.minimize_convex(name, row, c, shape) for row in x.numpy()]
    y = robust_pool(x, penalty=with_radius(text, c))
    torch.testing.assert_close(y, torch.tensor(expected, dtype=D), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", [8, 40, 200])
@pytest.mark.parametrize("c", [0.3, 1.0])
@pytest.mark.parametrize("text", NONCONVEX)
def test_no_point_of_a_dense_grid_is_better(text, c, n, solver):
    x = rows(4, n, 0.25, distance=6.0)
    name, shape = name_and_shape(text)
    y = robust_pool(x, penalty=with_radius(text, c))
    for row, found in zip(x.numpy(), y.numpy(), strict=True):
        ours = reference.total(name, np.array([found]), row, c, shape)[0]
        assert ours <= reference.least_total(name, row, c, shape) + 1e-9


@pytest.mark.parametrize("n", [3, 8, 25])
def test_truncated_quadratic_equals_brute_force(n, solver):
    x = rows(20, n, 0.25, distance=3.0)
    y = robust_pool(x, penalty="truncated_quadratic(c=0.7)")
    for row, found in zip(x.numpy(), y.numpy(), strict=True):
        ours = reference.total("truncated_quadratic", np.array([found]), row, 0.7)[0]
        assert ours == pytest.approx(reference.truncated_by_brute_force(row, 0.7), abs=1e-12)


def test_of_two_minima_of_welsch_close_together_the_deeper_is_found(solver):
    x = torch.tensor([reference.TWIN_MINIMA, [-a for a in reference.TWIN_MINIMA]], dtype=D)
    expected = [reference.least_total("welsch", row, 1.0) for row in x.numpy()]
    y = robust_pool(x, penalty="welsch")
    found = [reference.total("welsch", y[k : k + 1].numpy(), row, 1.0)[0] for k, row in enumerate(x.numpy())]
    assert found == pytest.approx(expected, abs=1e-9)


def test_welsch_is_never_worse_than_the_best_of_a_thousand_starts(solver):
    x = torch.cat((rows(4, 30, 0.4, distance=4.0), 50 * rows(4, 30), rows(4, 30)), 0)
    value = radial.parse("welsch(c=0.5)", "penalty")
    starts = x.amin(-1, keepdim=True) + (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) * torch.rand(
        12, 1000, dtype=D
    )
    for _ in range(60):  # mean shift, which descends
        gains = radial.gain(value, (starts[..., None] - x[:, None]).abs())
        starts = (gains * x[:, None]).sum(-1) / gains.sum(-1).clamp(min=1e-300)
    for row, ends, found in zip(x.numpy(), starts.numpy(), robust_pool(x, penalty=value).numpy(), strict=True):
        best = reference.total("welsch", ends, row, 0.5).min()
        assert reference.total("welsch", np.array([found]), row, 0.5)[0] <= best + 1e-5 * 0.25


@pytest.mark.parametrize("n", [1, 2, 9, 10])
def test_absolute_is_the_median_and_the_mean_of_two_middle_samples(n, solver):
    x = rows(7, n)
    torch.testing.assert_close(robust_pool(x, penalty="absolute"), torch.from_numpy(np.median(x.numpy(), -1)))


def test_huber_without_an_inlier_is_the_mean_of_the_two_middle_samples(solver):
    x = torch.tensor([[-9.0, -4.0, 5.0, 30.0], [0.0, 1.0, 8.0, 9.0]], dtype=D)
    torch.testing.assert_close(robust_pool(x, penalty="huber(c=1)"), torch.tensor([0.5, 4.5], dtype=D))


@pytest.mark.parametrize("text", ALL)
def test_a_large_radius_gives_the_mean(text, solver):
    if text == "absolute":
        pytest.skip("has no radius")
    x = rows(5, 17, 0.25)
    torch.testing.assert_close(robust_pool(x, penalty=with_radius(text, 1e9)), x.mean(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [9, 10])
@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "barron(shape=1)"])
def test_a_small_radius_gives_a_point_between_the_middle_samples(text, n, solver):
    x = rows(5, n)
    ordered = x.sort(-1).values
    y = robust_pool(x, penalty=with_radius(text, 1e-7))
    assert (y >= ordered[:, (n - 1) // 2] - 1e-6).all()
    assert (y <= ordered[:, n // 2] + 1e-6).all()


@pytest.mark.parametrize("text", ALL)
def test_pooling_moves_and_scales_with_its_input(text, solver):
    x = rows(5, 16, 0.25)
    y = robust_pool(x, penalty=text)
    torch.testing.assert_close(robust_pool(x + 3.0, penalty=text), y + 3.0, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(robust_pool(4.0 * x, penalty=with_radius(text, 4.0)), 4.0 * y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(robust_pool(-x, penalty=text), -y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("text", ALL)
def test_the_order_of_samples_does_not_matter(text, solver):
    x = rows(5, 33, 0.25)
    shuffled = x[:, torch.randperm(33)]
    torch.testing.assert_close(
        robust_pool(shuffled, penalty=text), robust_pool(x, penalty=text), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [5, 49, 130, 1024, 5000])
@pytest.mark.parametrize(
    "text", ["quadratic", "huber", "pseudo_huber", "barron(shape=1.5)", "welsch", "truncated_quadratic", "absolute"]
)
def test_a_row_does_not_depend_on_its_batch_bit_for_bit(text, n, dtype, solver):
    if solver == "eager" and n > 1024 and text not in ("quadratic", "huber"):
        pytest.skip("long, and the same code as for 1024")
    count = 35 if n < 1000 else 5
    x = rows(count, n, 0.25).to(dtype)
    together = robust_pool(x, penalty=text)
    assert torch.equal(together[3:], robust_pool(x[3:], penalty=text))
    assert torch.equal(together[2], robust_pool(x[2], penalty=text))
    assert torch.equal(together[1::2], robust_pool(x[1::2], penalty=text))


def test_threads_do_not_change_a_bit():
    x = rows(700, 60).float()
    alone = robust_pool(x, penalty="welsch")
    torch.set_num_threads(2)
    try:
        assert torch.equal(robust_pool(x, penalty="welsch"), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("text", ALL)
def test_weights_act_as_repetitions(text, solver):
    x = rows(4, 9, 0.25)
    counts = torch.tensor([1, 2, 1, 3, 1, 1, 2, 1, 1])
    repeated = x.repeat_interleave(counts, dim=-1)
    pooled = robust_pool(x, penalty=text, weights=counts.to(D))
    torch.testing.assert_close(pooled, robust_pool(repeated, penalty=text), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [9, 200])
@pytest.mark.parametrize("text", ALL)
def test_a_masked_sample_does_not_exist_even_if_it_is_nan(text, n, solver):
    x = rows(4, n, 0.25)
    mask = torch.ones(n, dtype=torch.bool)
    mask[[1, n - 2]] = False
    spoiled = x.clone()
    spoiled[:, 1], spoiled[:, n - 2] = torch.nan, 1e9
    pooled = robust_pool(spoiled, penalty=text, mask=mask)
    torch.testing.assert_close(pooled, robust_pool(x[:, mask], penalty=text), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("text", ALL)
def test_nan_and_emptiness_stay_in_their_row(text, solver):
    x = rows(6, 12)
    clean = robust_pool(x, penalty=text)
    x[2, 5] = torch.nan
    spoiled = robust_pool(x, penalty=text)
    assert spoiled[2].isnan()
    assert torch.equal(spoiled[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    mask = torch.ones(6, 12, dtype=torch.bool)
    mask[4] = False
    assert robust_pool(x, penalty=text, mask=mask).isnan().tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize("n", [9, 1024])
@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "welsch", "truncated_quadratic", "absolute"])
def test_an_infinite_sample_is_a_far_one(text, n, solver):
    x = rows(3, n)
    far = x.clone()
    x[:, 0], far[:, 0] = torch.inf, 1e9
    torch.testing.assert_close(robust_pool(x, penalty=text), robust_pool(far, penalty=text), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", ALL)
def test_very_small_and_very_large_inputs(text, dtype, scale, solver):
    x = rows(4, 12, 0.25)
    expected = robust_pool(x, penalty=text)
    y = robust_pool((x * scale).to(dtype), penalty=with_radius(text, scale))
    torch.testing.assert_close(y.to(D) / scale, expected, rtol=1e-5, atol=1e-5)
    for other in (1e-20, 1.0, 1e20):  # a radius that has nothing to do with the input
        free = robust_pool((x * scale).to(dtype), penalty=with_radius(text, other)).to(D) / scale
        assert ((free >= x.amin(-1) - 1e-5) & (free <= x.amax(-1) + 1e-5)).all()


@pytest.mark.parametrize("text", ALL)
def test_rows_of_equal_samples(text, solver):
    for number in (0.0, -3.5):
        x = torch.full((2, 7), number, dtype=D, requires_grad=True)
        y = robust_pool(x, penalty=text)
        torch.testing.assert_close(y, torch.full((2,), number, dtype=D))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full((2, 7), 1 / 7, dtype=D))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", ALL)
def test_lower_precision_agrees_with_float64(text, dtype, tolerance, solver):
    x = (rows(6, 33) / 2).to(dtype)
    y = robust_pool(x, penalty=text)
    assert y.dtype == dtype
    torch.testing.assert_close(y.to(D), robust_pool(x.to(D), penalty=text), **tolerance(dtype))


def test_any_dimensions_in_any_order_and_any_strides(solver):
    x = rows(2 * 3 * 4, 5).reshape(2, 3, 4, 5)
    expected = robust_pool(x.permute(0, 2, 1, 3).reshape(2, 4, 15), penalty="huber")
    torch.testing.assert_close(robust_pool(x, (1, 3), penalty="huber"), expected)
    torch.testing.assert_close(robust_pool(x, (-1, -3), penalty="huber", keepdim=True), expected[:, None, :, None])
    torch.testing.assert_close(robust_pool(x.transpose(1, 3), (1, 3), penalty="huber"), expected)
    torch.testing.assert_close(robust_pool(x, (0, 1, 2, 3), penalty="huber"), robust_pool(x.flatten(), penalty="huber"))
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(robust_pool(last, (2, 3), penalty="huber"), robust_pool(x, (2, 3), penalty="huber"))
    windows = robust_pool2d(last, 2, 1, penalty="huber")
    assert windows.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(windows, robust_pool2d(x, 2, 1, penalty="huber"))


def test_the_mean_of_an_infinite_row_is_that_of_torch(solver):
    x = torch.tensor([[1.0, torch.inf, 2.0], [-torch.inf, 0.0, torch.inf], [1.0, -torch.inf, 2.0]])
    torch.testing.assert_close(robust_pool(x, penalty="quadratic"), x.mean(-1), equal_nan=True)


@pytest.mark.parametrize(
    "kernel_size, stride, padding, ceil_mode",
    [(3, 2, 1, False), ((3, 2), (2, 1), (1, 0), True), (2, None, 0, True)],
)
def test_windows_of_the_quadratic_are_average_pooling_without_padding(kernel_size, stride, padding, ceil_mode, solver):
    x = rows(2 * 3, 7 * 8).reshape(2, 3, 7, 8)
    expected = torch.nn.functional.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad=False)
    pooled = robust_pool2d(x, kernel_size, stride, padding, penalty="quadratic", ceil_mode=ceil_mode)
    torch.testing.assert_close(pooled, expected)
    torch.testing.assert_close(
        robust_pool2d(x[0], kernel_size, stride, padding, penalty="quadratic", ceil_mode=ceil_mode), expected[0]
    )


@pytest.mark.parametrize("text", ["huber", "welsch", "absolute"])
def test_a_window_is_the_pool_of_its_samples(text, solver):
    x = rows(3, 11).reshape(1, 3, 11)
    y = robust_pool1d(x, 4, 3, 2, penalty=text)
    for i, (begin, end) in enumerate([(0, 2), (1, 5), (4, 8), (7, 11)]):
        torch.testing.assert_close(y[..., i], robust_pool(x[..., begin:end], penalty=text), rtol=1e-11, atol=1e-11)
    assert robust_pool1d(x, None, penalty=text).shape == (1, 3, 1)
    torch.testing.assert_close(robust_pool1d(x, None, penalty=text)[..., 0], robust_pool(x, penalty=text))


def test_parameters_broadcast_to_rows_and_channels(solver):
    x = rows(2 * 3, 16, 0.25).reshape(2, 3, 4, 4)
    c = torch.tensor([0.2, 1.0, 5.0], dtype=D)
    each = torch.stack([robust_pool(x[:, i], (1, 2), penalty=f"huber(c={c[i]})") for i in range(3)], 1)
    torch.testing.assert_close(robust_pool(x, (2, 3), penalty=radial.huber(c=c)), each)
    torch.testing.assert_close(robust_pool(x, (2, 3), penalty=radial.huber(c=c.reshape(3, 1, 1))), each)
    torch.testing.assert_close(robust_pool2d(x, None, penalty=radial.huber(c=c))[..., 0, 0], each)
    torch.testing.assert_close(robust_pool2d(x, 4, penalty=radial.huber(c=c))[..., 0, 0], each)


def test_barron_runs_through_its_family(solver):
    x = rows(5, 15, 0.25)
    for shape, text in ((2.0, "quadratic"), (1.0, "pseudo_huber")):
        torch.testing.assert_close(
            robust_pool(x, penalty=f"barron(shape={shape})"), robust_pool(x, penalty=text), rtol=1e-6, atol=1e-6
        )
    lowest = robust_pool(x, penalty=radial.barron(shape=-torch.inf))
    torch.testing.assert_close(lowest, robust_pool(x, penalty="welsch"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", ALL)
def test_pooling_weights_give_the_pool_back(text, solver):
    x = rows(4, 2 * 15, 0.25).reshape(4, 2, 15)
    mask = torch.ones(15, dtype=torch.bool)
    mask[3] = False
    y, p = robust_pool(x, (0, 2), penalty=text, mask=mask, return_weights=True)
    assert p.shape == x.shape
    assert (p[..., 3] == 0).all()
    torch.testing.assert_close(p.sum((0, 2)), torch.ones(2, dtype=D))
    torch.testing.assert_close((p * x).sum((0, 2)), y, rtol=1e-7, atol=1e-7)
    pooled, p = robust_pool2d(x[None], (2, 3), 1, penalty=text, return_weights=True)
    assert p.shape == (*pooled.shape, 2, 3)


def test_status_tells_steps_gradient_and_damping(solver):
    x = torch.tensor([[0.0, 100.0], [0.0, 0.1]], dtype=D)
    y, status = robust_pool(x, penalty="pseudo_huber(c=1)", return_status=True)
    assert status.damped.tolist() == [True, False]
    assert (status.gradient <= 1e-14).all()
    assert status.iterations.shape == y.shape
    assert (status.iterations <= 60).all()


def test_scale_mad_makes_the_radius_follow_the_row(solver):
    x = rows(5, 31, 0.25)
    mad = (x - x.median(-1, keepdim=True).values).abs().median(-1).values
    fixed = robust_pool(x, penalty=radial.huber(c=1.5 * mad))
    torch.testing.assert_close(robust_pool(x, penalty="huber(c=1.5)", scale="mad"), fixed)
    torch.testing.assert_close(robust_pool(7 * x, penalty="huber(c=1.5)", scale="mad"), 7 * fixed)
    still = torch.tensor([[1.0, 1.0, 1.0, 5.0]], dtype=D)
    torch.testing.assert_close(
        robust_pool(still, penalty="huber", scale="mad"), torch.ones(1, dtype=D), rtol=1e-5, atol=1e-5
    )
    windows = robust_pool2d(x.reshape(1, 5, 1, 31), (1, 31), penalty="huber(c=1.5)", scale="mad")
    torch.testing.assert_close(windows.flatten(), fixed)


def test_a_registered_penalty_pools_and_learns(monkeypatch):
    monkeypatch.setattr(radial.TABLE, "rows", dict(radial.TABLE.rows))
    radial.register(
        "fair",
        gain=lambda n, rho: 1.0 / (1.0 + n / rho),
        penalty=lambda z, rho: rho * rho * (z.abs() / rho - torch.log1p(z.abs() / rho)),
        parameters={"rho": 1.0},
    )
    x = rows(4, 15, 0.25).requires_grad_()
    c = torch.tensor(0.7, dtype=D, requires_grad=True)
    y = robust_pool(x, penalty=radial.TABLE["fair"](rho=c))
    z = y.detach()[:, None] - x.detach()
    assert (z / (1 + z.abs() / 0.7)).sum(-1).abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda x, c: robust_pool(x, penalty=radial.TABLE["fair"](rho=c)), (x, c))


def test_choose_gives_its_reason(monkeypatch):
    huber = radial.parse("huber", "penalty")
    cpu = torch.device("cpu")
    monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "no C compiler found"))
    assert kernel.choose(huber, cpu, torch.float32) == ("eager", "no C compiler found")
    assert "no C compiler found" in kernel.explain_pooling(huber)
    assert "CPU" in kernel.choose(huber, torch.device("meta"), torch.float32)[1]
    assert "no C compiler found" in kernel.choose(radial.parse("quadratic", "penalty"), cpu, torch.float32)[1]
    assert "up to 4" in kernel.choose(radial.parse("barron(shape=5)", "penalty"), cpu, torch.float32)[1]
