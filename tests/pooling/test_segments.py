"""Robust pooling of ragged segments and of sets of vectors."""

import itertools

import pytest
import torch
from pooling_reference import ALL, rows

from hyperball import radial
from hyperball.functional.pooling import robust_pool, robust_pool_vectors, segment_robust_pool
from hyperball.kernels.pooling import native, vectors
from hyperball.kernels.pooling import segments as kernel

D = torch.float64
OFFSETS = torch.tensor([0, 3, 4, 4, 24, 224])
VECTOR_PENALTIES = [text for text in ALL if text != "absolute"]


@pytest.fixture(params=["native", "eager"])
def solver(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "switched off by a test"))
    elif native.library(torch.float64).pool is None:
        pytest.skip("no C compiler")
    return request.param


@pytest.mark.parametrize("text", ALL)
def test_a_segment_is_the_pool_of_its_samples_and_an_empty_one_is_nan(text, solver):
    x = rows(224, 6, 0.2).reshape(224, 2, 3)
    y = segment_robust_pool(x, OFFSETS, penalty=text)
    assert y.shape == (5, 2, 3)
    for s, (begin, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        if begin == end:
            assert y[s].isnan().all()
        else:
            expected = robust_pool(x[begin:end], 0, penalty=text)
            torch.testing.assert_close(y[s], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", ["huber", "welsch", "truncated_quadratic", "absolute"])
def test_a_segment_does_not_depend_on_the_others_bit_for_bit(text, dtype, solver):
    x = rows(224, 2).to(dtype)
    together = segment_robust_pool(x, OFFSETS, penalty=text)
    for s, (begin, end) in enumerate(itertools.pairwise(OFFSETS.tolist())):
        if begin < end:
            alone = segment_robust_pool(x[begin:end], torch.tensor([0, end - begin]), penalty=text)
            assert torch.equal(together[s], alone[0])


@pytest.mark.parametrize("text", ["pseudo_huber", "huber", "welsch", "barron(shape=1.3)", "absolute"])
def test_segments_have_exact_gradients(text):
    offsets = torch.tensor([0, 3, 12, 20])
    x = rows(20, 2).requires_grad_()
    c = torch.tensor([[0.8, 1.2]], dtype=D, requires_grad=True)
    row = radial.parse(text, "penalty")

    def pooled(x, c):
        return segment_robust_pool(x, offsets, penalty=row.with_parameters(rho=c))

    assert torch.autograd.gradcheck(pooled, (x, c))
    assert torch.autograd.gradgradcheck(pooled, (x, c), atol=1e-4)
    assert torch.autograd.gradcheck(pooled, (x, c), check_forward_ad=True, check_backward_ad=False)


def test_segments_under_vmap_and_their_status():
    x = rows(12, 2)
    offsets = torch.tensor([0, 5, 12])
    batch = torch.stack([x, 2 * x, x + 1])
    together = torch.func.vmap(lambda x: segment_robust_pool(x, offsets))(batch)
    assert torch.equal(together[1], segment_robust_pool(2 * x, offsets))
    _, status = segment_robust_pool(x, offsets, return_status=True)
    assert (status.gradient < 1e-13).all()
    assert not status.damped.any()


def test_compiled_segments_give_the_same_values_and_gradients():
    x = rows(20, 2).float().requires_grad_()
    c = torch.tensor(0.9, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 12, 20])

    def pooled(x, c):
        return segment_robust_pool(x, offsets, penalty=radial.huber(c=c)).nan_to_num()

    compiled = torch.compile(pooled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, c), pooled(x, c))
    found = torch.autograd.grad(compiled(x, c).square().sum(), (x, c))
    expected = torch.autograd.grad(pooled(x, c).square().sum(), (x, c))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_segment_operators_pass_opcheck():
    x = rows(9, 2).requires_grad_()
    c, shape = (torch.full((2, 2), item, dtype=D, requires_grad=True) for item in (0.9, 1.4))
    for weights in (None, torch.rand_like(x)):
        torch.library.opcheck(kernel.segment_op, (x, weights, torch.tensor([0, 4, 9]), c, shape, "barron"))


class Center(torch.nn.Module):
    def forward(self, x):
        return robust_pool_vectors(x, penalty="huber")


def weighted_total(value, y, x, w):
    n = torch.linalg.vector_norm(y.unsqueeze(-2) - x, dim=-1)
    return (value.row.phi(n, **value.parameters) * w).sum(-1)


@pytest.mark.parametrize("text", VECTOR_PENALTIES)
def test_no_neighbor_of_a_robust_center_is_better(text):
    x = rows(5, 40, 0.25, distance=4.0).reshape(5, 20, 2)
    w = torch.rand(5, 20, dtype=D) + 0.1
    value = radial.parse(text, "penalty")
    y, status = robust_pool_vectors(x, penalty=value, weights=w, return_status=True)
    best = weighted_total(value, y, x, w)
    for step in (1e-3, 0.1, 1.0):
        for angle in torch.linspace(0, 6.28, 9):
            moved = y + step * torch.stack((angle.cos(), angle.sin())).to(D)
            assert (weighted_total(value, moved, x, w) >= best - 1e-12).all()
    assert (status.gradient < 1e-12).all()
    for i in range(20):  # nor is any sample
        assert (weighted_total(value, x[:, i], x, w) >= best - 1e-12).all()


@pytest.mark.parametrize("text", VECTOR_PENALTIES)
def test_a_robust_center_turns_and_shifts_with_the_points(text):
    x = rows(4, 3 * 15, 0.25).reshape(4, 15, 3)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=D))
    y = robust_pool_vectors(x, penalty=text)
    torch.testing.assert_close(robust_pool_vectors(x @ turn + 2.0, penalty=text), y @ turn + 2.0, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("text", VECTOR_PENALTIES)
def test_in_one_dimension_vectors_are_numbers(text):
    x = rows(5, 12, 0.25, distance=5.0)
    torch.testing.assert_close(
        robust_pool_vectors(x[..., None], penalty=text)[..., 0], robust_pool(x, penalty=text), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("text", ["pseudo_huber", "huber", "barron(shape=1.5)", "welsch", "truncated_quadratic"])
def test_centers_have_exact_gradients(text):
    x = rows(1, 10, seed=3).reshape(1, 5, 2).requires_grad_()
    c = torch.tensor([1.4], dtype=D, requires_grad=True)
    w = (torch.rand(1, 5, dtype=D) + 0.3).requires_grad_()
    row = radial.parse(text, "penalty")

    def pooled(x, c, w):
        return robust_pool_vectors(x, penalty=row.with_parameters(rho=c), weights=w)

    assert torch.autograd.gradcheck(pooled, (x, c, w))
    assert torch.autograd.gradgradcheck(pooled, (x, c, w), atol=1e-4)
    assert torch.autograd.gradcheck(pooled, (x, c, w), check_forward_ad=True, check_backward_ad=False)


def test_the_shape_of_a_center_has_an_exact_gradient():
    x = rows(2, 12, seed=3).reshape(2, 6, 2)
    a = torch.tensor(1.3, dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: robust_pool_vectors(x, penalty=radial.barron(shape=a)), (a,))


def test_many_dimensions_use_conjugate_gradients_and_agree(monkeypatch):
    x = rows(2, 9 * 6, 0.2).reshape(2, 9, 6).requires_grad_()
    dense = torch.autograd.grad(robust_pool_vectors(x, penalty="pseudo_huber").square().sum(), x)[0]
    monkeypatch.setattr(vectors, "DENSE", 2)
    free = torch.autograd.grad(robust_pool_vectors(x, penalty="pseudo_huber").square().sum(), x)[0]
    torch.testing.assert_close(free, dense, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("outliers", [0.0, 0.25, 0.45])
def test_the_fixed_trip_count_of_vectors_is_enough(outliers):
    x = rows(10, 30 * 4, 0.0).reshape(10, 30, 4)
    x[:, : int(outliers * 30)] += 15
    for text in ("huber", "pseudo_huber", "welsch"):
        low, high = robust_pool_vectors(x.float(), penalty=text), robust_pool_vectors(x, penalty=text)
        torch.testing.assert_close(low.to(D), high, rtol=1e-5, atol=1e-5)


def test_masked_points_nan_sets_and_large_scales():
    x = rows(3, 10 * 2).reshape(3, 10, 2)
    mask = torch.ones(10, dtype=torch.bool)
    mask[4] = False
    spoiled = x.clone()
    spoiled[:, 4] = torch.nan
    expected = robust_pool_vectors(x[:, mask], penalty="huber")
    torch.testing.assert_close(robust_pool_vectors(spoiled, penalty="huber", mask=mask), expected)
    spoiled[1, 0] = torch.nan
    assert robust_pool_vectors(spoiled, mask=mask).isnan().all(-1).tolist() == [False, True, False]
    big = robust_pool_vectors((x * 1e20).float(), penalty="huber(c=1e20)")
    torch.testing.assert_close(big.to(D) / 1e20, robust_pool_vectors(x, penalty="huber(c=1)"), rtol=1e-5, atol=1e-5)


def test_centers_under_vmap_compile_and_autocast():
    x = rows(3, 8 * 2).reshape(3, 8, 2).float()
    c = torch.tensor(0.8, requires_grad=True)
    pooled = lambda x: robust_pool_vectors(x, penalty=radial.pseudo_huber(c=c))  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(pooled)(x), pooled(x))
    compiled = torch.compile(pooled, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), pooled(x))
    found, expected = (torch.autograd.grad(pool(x).square().sum(), c)[0] for pool in (compiled, pooled))
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = pooled(x)
        assert pooled(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(inside, pooled(x))


@pytest.mark.slow
def test_exported_centers_give_the_same_values():
    x = rows(3, 8 * 2).reshape(3, 8, 2).float()
    exported = torch.export.export(Center(), (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), Center()(x))
