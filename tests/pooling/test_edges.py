"""Robust pooling at its edges: a radius below an ulp, numbers near the largest, layouts, and changes in place."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from hyperball import radial
from hyperball.functional.pooling import robust_pool, robust_pool2d, robust_pool_vectors, segment_robust_pool
from hyperball.kernels.pooling import native
from hyperball.nn.pooling import RobustPool1d, RobustPool2d

INF = float("inf")


@pytest.fixture(params=["native", "eager"])
def solver(request, monkeypatch):
    """Both kernels in turn: the compiled one where there is a compiler, and its eager twin."""
    if request.param == "eager":
        monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "switched off by a test"))
    elif native.library(torch.float32).pool is None:
        pytest.skip("no C compiler")
    return request.param


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("name", ["huber", "pseudo_huber"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e4, 1e6])
def test_a_radius_far_below_the_samples_gives_the_median(solver, name, dtype, offset):
    for n in (1, 3, 9, 49, 127, 129, 513, 1025):
        x = normal(6, n, dtype=dtype) + offset
        x[5] = (2 * x[5]).round() / 2
        middle = x.median(-1).values
        for c in (1e-40, 1e-20, 1e-10, 1e-17 * max(offset, 1)):
            y = robust_pool(x, penalty=f"{name}(c={c})")
            assert ((y - middle).abs() <= 8 * torch.finfo(dtype).eps * (1 + middle.abs()) + 4 * c).all(), (n, c)


@pytest.mark.parametrize("form", ["masked", "segments", "layer", "row alone"])
def test_every_form_gives_the_median_under_a_small_radius(form):
    x, text = normal(4, 49), "huber(c=1e-10)"
    found = {
        "masked": lambda: robust_pool(x, penalty=text, mask=torch.ones_like(x, dtype=torch.bool)),
        "segments": lambda: segment_robust_pool(x.flatten(), torch.arange(0, 197, 49), penalty=text),
        "layer": lambda: RobustPool1d(penalty=text)(x.unsqueeze(0))[0, :, 0],
        "row alone": lambda: robust_pool(x[2], penalty=text).expand(4),
    }[form]()
    expected = x.median(-1).values
    torch.testing.assert_close(found, expected[2].expand(4) if form == "row alone" else expected)


def test_ties_at_a_coarse_offset_do_not_stop_a_long_row():
    x = (normal(4, 1024) + 1e6).round()  # ulp 0.06, so many samples are equal
    for name in ("huber", "pseudo_huber"):
        y = robust_pool(x, penalty=f"{name}(c=1e-4)")
        assert ((y - x.double().quantile(0.5, -1)).abs() <= 0.5).all()


def test_barron_between_one_and_two_leaves_a_sample_that_is_its_own_inlier(solver):
    x = normal(5, 33, dtype=torch.float64)
    status = robust_pool(x, penalty="barron(c=1e-30, shape=1.5)", return_status=True)[1]
    assert (status.gradient <= 1e-10 * 33 * 1e-15).all()  # |psi| is about c·sqrt(z/c) = 1e-15


SCALABLE = ("quadratic", "huber", "pseudo_huber", "welsch", "truncated_quadratic", "barron(shape=1.5)")


@pytest.mark.parametrize("text", SCALABLE)
@pytest.mark.parametrize("dtype, power", [(torch.float32, 116), (torch.float64, 1010)])
@pytest.mark.parametrize("n", [5, 49, 1024])
def test_very_large_rows_are_small_ones_in_other_units(solver, text, dtype, power, n):
    base = 2 * normal(3, n, dtype=dtype)
    base[:, :5] = torch.tensor([1.0, 2.0, 3.0, 10.0, -4.0], dtype=dtype)
    unit, value = 2.0**power, radial.parse(text, "penalty")
    small, large = base.clone().requires_grad_(), (base * unit).requires_grad_()
    y = robust_pool(small, penalty=value.with_parameters(rho=1.25))
    y_large = robust_pool(large, penalty=value.with_parameters(rho=1.25 * unit))
    y.sum().backward()
    y_large.sum().backward()
    torch.testing.assert_close(y_large / unit, y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(large.grad, small.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("text", [*SCALABLE, "absolute"])
def test_finite_rows_have_finite_gradients_up_to_the_largest_number(solver, text):
    largest = torch.finfo(torch.float32).max
    value = radial.parse(text, "penalty")
    for c in (1.0, largest / 4):
        x = torch.tensor([[1.0, 0.9, 0.8, -0.5, 0.1], [1.0] * 5, [1e-3, 1e-4, 1.0, 1.0, -1.0]]) * largest
        x.requires_grad_()
        y = robust_pool(x, penalty=value.with_parameters(rho=c))
        assert not y.isnan().any()
        y.sum().backward()
        assert x.grad.isfinite().all()


def test_the_mean_of_finite_samples_is_finite():
    x = torch.full((2, 1024), 1e38)
    torch.testing.assert_close(robust_pool(x, penalty="quadratic"), torch.full((2,), 1e38))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 4, 7, 8, 9, 49, 1023])
def test_the_mean_loses_no_digits_a_long_way_from_zero(solver, dtype, n):
    x = (normal(5, n, dtype=torch.float64) + 1e5).to(dtype)
    w = normal(5, n, seed=1).abs().to(dtype)
    exact = [math.fsum(row) / n for row in x.tolist()]
    weighted = [
        math.fsum(a * b for a, b in zip(row, held, strict=True)) / math.fsum(held)
        for row, held in zip(x.tolist(), w.tolist(), strict=True)
    ]
    close = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    torch.testing.assert_close(robust_pool(x, penalty="quadratic"), torch.tensor(exact, dtype=dtype), **close)
    found = robust_pool(x, penalty="quadratic", weights=w)
    torch.testing.assert_close(found, torch.tensor(weighted, dtype=dtype), **close)


@pytest.mark.parametrize("text", ["quadratic", "huber", "welsch"])
def test_a_row_has_the_same_bits_wherever_its_samples_lie(text):
    x = normal(6, 131)
    expected = robust_pool(x, penalty=text)
    apart = torch.stack([x, x + 1], -1)[..., 0]
    for held in (x.t().contiguous().t(), apart, x.flip(0).flip(0)):
        assert torch.equal(robust_pool(held, penalty=text), expected)
    assert torch.equal(robust_pool(x[3], penalty=text), expected[3])


PENALTIES = ("quadratic", "huber", "pseudo_huber", "welsch", "truncated_quadratic", "absolute", "barron(shape=1.5)")
LAYOUTS = {
    "transposed taps": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "taps in front": lambda x: x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "every other": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "all taps of a line the same": lambda x: x[..., :1].expand_as(x),
    "a line of taps for all": lambda x: x[:, :, :1].expand_as(x),
    "rows for all": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("shape", [(2, 3, 4, 6), (2, 3, 2, 100), (2, 17, 2, 2)])
@pytest.mark.parametrize("dims", [(-2, -1), (1, 3), (1, 2, 3), (0, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", PENALTIES)
def test_values_and_gradients_do_not_depend_on_how_samples_lie_in_memory(text, layout, dims, shape):
    laid = LAYOUTS[layout](normal(*shape))
    plain = laid.clone(memory_format=torch.contiguous_format)
    mask, weights = normal(*shape, seed=1) > -0.5, normal(*shape, seed=2).abs()
    for options in ({}, {"mask": mask}, {"weights": weights}):
        found = []
        for x in (plain, laid):
            x = x.detach().requires_grad_()
            y = robust_pool(x, dims, penalty=text, **options)
            found.append((y.detach(), *torch.autograd.grad(y, x, normal(*y.shape, seed=3))))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("text", PENALTIES)
def test_gradients_in_c_are_those_of_the_eager_solver_for_rows_of_any_length(text, monkeypatch):
    if native.library(torch.float64).pool is None:
        pytest.skip("no C compiler")
    found = {}
    for name in ("native", "eager"):
        if name == "eager":
            monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "switched off by a test"))
        found[name] = []
        for n in (1, 8, 9, 49, 127, 128, 131):
            x = normal(37, n, dtype=torch.float64)
            x[3], x[5, 0], x[7] = 2.0, 1e6, 1e200  # rows of equal, far and very large samples
            x = x.requires_grad_()
            for weights in (None, normal(37, n, dtype=torch.float64, seed=1).abs()):
                y = robust_pool(x, penalty=text, weights=weights)
                found[name].append(torch.autograd.grad(y, x, normal(37, dtype=torch.float64, seed=2))[0])
    torch.testing.assert_close(found["native"], found["eager"], rtol=1e-9, atol=1e-11, equal_nan=True)


def test_a_gradient_does_not_depend_on_the_rows_beside_it():
    x = normal(40, 9)
    v = normal(40, seed=1)
    for text in PENALTIES:
        whole = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(robust_pool(whole, penalty=text), whole, v)
        beside = x.clone()
        beside[::3] = float("nan")
        beside = beside.requires_grad_()
        (found,) = torch.autograd.grad(robust_pool(beside, penalty=text), beside, v)
        kept = torch.arange(40) % 3 != 0
        assert torch.equal(found[kept], expected[kept]), text
        for at in (1, 17, 39):
            alone = x[at : at + 1].clone().requires_grad_()
            (found,) = torch.autograd.grad(robust_pool(alone, penalty=text), alone, v[at : at + 1])
            assert torch.equal(found[0], expected[at]), text


@pytest.mark.parametrize("text", ["quadratic", "huber", "welsch", "absolute"])
def test_very_large_weights_of_float64_count_by_their_ratio(solver, text):
    x, large = torch.tensor([1.0, 2.0, 9.0]).double(), torch.full((3,), 1e300, dtype=torch.float64)
    plain = robust_pool(x, penalty=text, weights=torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(robust_pool(x, penalty=text, weights=large), plain)


def test_an_infinite_sample_of_next_to_no_weight_keeps_its_say(solver):
    x, w = torch.tensor([INF, 1.0]).double(), torch.tensor([1e-300, 1e100], dtype=torch.float64)
    assert robust_pool(x, penalty="quadratic", weights=w) == INF


def test_a_weighted_mean_of_the_largest_numbers_is_finite():
    x = torch.finfo(torch.float64).max * normal(2000, 7, dtype=torch.float64).sign()
    w = normal(2000, 7, dtype=torch.float64, seed=1).abs()
    assert robust_pool(x, penalty="quadratic", weights=w).isfinite().all()


@pytest.mark.parametrize("text", ["quadratic", "huber", "welsch", "absolute"])
def test_weights_whose_sum_is_no_number_count_by_their_ratio(text):
    x, w = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([1.0, 3e38, 3e38], requires_grad=True)
    y = robust_pool(x, weights=w, penalty=text)
    torch.testing.assert_close(y, robust_pool(x, weights=torch.tensor([0.0, 1.0, 1.0]), penalty=text))
    if text != "absolute":
        y.backward()
        assert w.grad.isfinite().all()
    points = torch.stack((x, x), -1)
    if text != "absolute":
        assert robust_pool_vectors(points, weights=w, penalty=text).isfinite().all()


@pytest.mark.parametrize("bad", [INF, -INF, float("nan"), -1.0])
def test_weights_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="`weights` must be >= 0 everywhere, and finite"):
        robust_pool(torch.ones(3), weights=torch.tensor([1.0, bad, 1.0]))


def test_an_infinite_radius_is_refused_as_number_and_as_tensor():
    for c in (INF, torch.tensor(INF)):
        with pytest.raises(ValueError, match=r"`c`.*finite"):
            robust_pool(torch.ones(3), penalty=radial.huber(c=c))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: RobustPool2d(3.0), TypeError, "`kernel_size` must be an integer"),
        (lambda: RobustPool2d(3, padding=0.5), TypeError, "`padding` must be an integer"),
        (lambda: robust_pool(torch.ones(3), penalty="huber(d=2)"), ValueError, "known: c, learn_c, per"),
    ],
)
def test_an_argument_is_refused_by_the_name_people_gave_it(call, error, text):
    with pytest.raises(error, match=text):
        call()


IN_PLACE = {
    "global": lambda x: robust_pool(x, (2, 3)),
    "windows": lambda x: robust_pool2d(x, 3, 2, 1),
    "median": lambda x: robust_pool2d(x, 3, penalty="absolute"),
    "mad": lambda x: robust_pool(x, (2, 3), scale="mad"),
    "vectors": lambda x: robust_pool_vectors(x),
    "segments": lambda x: segment_robust_pool(x, torch.tensor([0, 1, 3])),
    "channels last": lambda x: robust_pool2d(x.to(memory_format=torch.channels_last), None),
}


@pytest.mark.parametrize("pool", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_the_output_may_be_changed_in_place(pool):
    x = normal(3, 4, 5, 6).requires_grad_()
    changed = torch.autograd.grad(nn.functional.relu(pool(x), inplace=True).square().sum(), x)[0]
    kept = torch.autograd.grad(nn.functional.relu(pool(x)).square().sum(), x)[0]
    assert torch.equal(changed, kept)
    assert kept.any()


@pytest.mark.parametrize("form", ["segments", "vectors"])
def test_compiled_code_takes_any_layout(form):
    if form == "segments":
        x, pool = normal(2, 12).t(), lambda x: segment_robust_pool(x, torch.tensor([0, 3, 4, 9, 12]))
    else:
        x, pool = normal(4, 3, 6).permute(2, 0, 1), lambda x: robust_pool_vectors(x)
    x.requires_grad_()
    y, compiled = pool(x), torch.compile(pool, fullgraph=True)(x)
    torch.testing.assert_close(compiled, y)
    expected, found = (torch.autograd.grad(out.square().sum(), x)[0] for out in (y, compiled))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["huber", "absolute"])
def test_a_global_pooling_is_exported_for_any_size(text):
    dims = {2: torch.export.Dim("h", min=2, max=128), 3: torch.export.Dim("w", min=2, max=128)}
    layer = RobustPool2d(penalty=text)
    graph = torch.export.export(layer, (normal(2, 3, 7, 9),), dynamic_shapes=(dims,)).module()
    for size in ((7, 9), (20, 5), (80, 90)):
        x = normal(2, 3, *size)
        torch.testing.assert_close(graph(x), layer(x), rtol=1e-5, atol=1e-5)


def test_weights_and_masks_reach_windows_and_layers():
    x, w = normal(2, 3, 7, 7), normal(2, 3, 7, 7, seed=1).abs()
    average = nn.AvgPool2d(3, 2, 1)
    found = RobustPool2d(3, 2, 1, penalty="quadratic")(x, weights=w)
    torch.testing.assert_close(found, average(x * w) / average(w), rtol=1e-4, atol=1e-5)
    mask = x > 0
    expected = robust_pool(x, (2, 3), mask=mask, weights=w, keepdim=True)
    assert torch.equal(RobustPool2d()(x, weights=w, mask=mask), expected)


@pytest.mark.parametrize("text", ["quadratic", "huber", "pseudo_huber", "welsch", "absolute"])
def test_a_weighted_or_masked_segment_is_pooled_as_a_row_is(solver, text):
    x, w, bounds = (
        normal(300, 2, dtype=torch.float64),
        normal(300, 2, dtype=torch.float64, seed=1).abs(),
        [0, 3, 150, 300],
    )
    offsets, mask = torch.tensor(bounds), torch.arange(300) % 3 != 0
    found = segment_robust_pool(x, offsets, penalty=text, weights=w, mask=mask)
    for s, (begin, end) in enumerate(pairwise(bounds)):
        part = slice(begin, end)
        row = robust_pool(x[part], 0, penalty=text, weights=w[part], mask=mask[part, None])
        torch.testing.assert_close(found[s], row, rtol=1e-9, atol=1e-9)


def test_weighted_segments_have_exact_gradients():
    x, w = (
        normal(9, 2, dtype=torch.float64).requires_grad_(),
        normal(9, dtype=torch.float64, seed=1).exp().requires_grad_(),
    )
    c = torch.tensor([[0.7], [1.1]], dtype=torch.float64, requires_grad=True)

    def pool(x, w, c):
        return segment_robust_pool(x, torch.tensor([0, 4, 9]), weights=w, penalty=radial.pseudo_huber(c=c))

    assert torch.autograd.gradcheck(pool, (x, w, c), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(pool, (x, w, c))
    batch = torch.stack((x, 2 * x)).detach()
    together = torch.func.vmap(lambda one: pool(one, w, c))(batch)
    torch.testing.assert_close(together, torch.stack([pool(one, w, c) for one in batch]))


class Head(nn.Module):
    """A module that predicts what it was given."""

    def __init__(self, predicted):
        super().__init__()
        self.predicted = predicted

    def forward(self, x):
        return self.predicted


@pytest.mark.parametrize("kernel_size", [None, 3])
@pytest.mark.parametrize("shape", [(5, 5), (5, 1), (1, 5), (5, 5, 1, 1), (1,), ()])
def test_a_prediction_of_one_value_a_sample_or_channel_is_read_as_that(kernel_size, shape):
    x, log_c = normal(5, 5, 5, 5), normal(*shape)
    c = log_c.exp().reshape(*shape, *[1] * (4 - len(shape))) if len(shape) == 2 else log_c.exp()
    found = RobustPool2d(kernel_size, predict_c=Head(log_c))(x)
    torch.testing.assert_close(found, robust_pool2d(x, kernel_size, penalty=radial.huber(c=c)))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (5, 3), (5, 1, 1)])
def test_a_prediction_that_could_be_misread_is_refused(shape):
    with pytest.raises(ValueError, match=r"`predict_c` must give \(N, C\), or \(N, 1\)"):
        RobustPool2d(predict_c=Head(normal(*shape)))(normal(5, 5, 5, 5))


def test_a_given_parameter_is_the_layers_own_and_learns():
    c = nn.Parameter(torch.full((4,), 0.7))
    layer, x = RobustPool2d(penalty=radial.huber(c=c)), normal(2, 4, 5, 5)
    assert dict(layer.named_parameters()) == {"c": c}
    assert layer.c is c
    layer(x).square().sum().backward()
    assert c.grad.all()
    with torch.no_grad():
        c.fill_(1e3)
    torch.testing.assert_close(layer(x), x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize(
    "penalty",
    [
        lambda: radial.huber(c=torch.ones(4, requires_grad=True)),
        lambda: radial.huber(c=nn.Parameter(torch.ones(4)), learn_c=True),
    ],
    ids=["a tensor that requires a gradient", "a parameter and learn_c"],
)
def test_what_would_be_frozen_silently_is_refused_naming_learn_c(penalty):
    with pytest.raises(ValueError, match="`c` is learned by learn_c=True"):
        RobustPool2d(penalty=penalty())


def test_a_learned_radius_that_runs_away_stays_a_number():
    layer, x = RobustPool2d(penalty="huber(learn_c=True)"), normal(2, 3, 5, 5)
    with torch.no_grad():
        layer.log_c.fill_(200.0)
    torch.testing.assert_close(layer(x), x.mean((2, 3), keepdim=True))
