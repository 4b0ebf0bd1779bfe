"""A row whose y is NaN spoils no gradient but its own: with it, unused, everything is as without it."""

import pytest
import torch
from pooling_reference import ALL

import hyperball as hb
from hyperball import radial
from hyperball.functional.pooling import (
    robust_pool,
    robust_pool1d,
    robust_pool2d,
    robust_pool_vectors,
    segment_robust_pool,
)
from hyperball.kernels.pooling import native

BREAKS = ["masked", "nan"]
WEIGHTED = [True, False]


@pytest.fixture(params=["native", "eager"])
def solver(request, monkeypatch):
    """Both kernels in turn: the compiled one where there is a compiler, and its eager twin."""
    if request.param == "eager":
        monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "switched off by a test"))
    elif native.library(torch.float32).pool is None:
        pytest.skip("no C compiler")
    return request.param


def segments(x, w, mask, penalty):
    """Every row of x as a segment."""
    rows, n = x.shape
    given = None if w is None else w.expand(rows, n).flatten()
    offsets = torch.arange(0, rows * n + 1, n)
    return segment_robust_pool(x.flatten(), offsets, penalty=penalty, weights=given, mask=mask.flatten())


def images(x, w, mask, penalty):
    """Every row of x as an image of one channel."""
    given = None if w is None else w.reshape(2, 3)
    y = robust_pool2d(x.reshape(-1, 1, 2, 3), None, penalty=penalty, weights=given, mask=mask.reshape(-1, 1, 2, 3))
    return y.reshape(-1)


FORMS = {
    "rows": lambda x, w, mask, penalty: robust_pool(x, penalty=penalty, weights=w, mask=mask),
    "images": images,
    "segments": segments,
    "vectors": lambda x, w, mask, penalty: robust_pool_vectors(
        torch.stack((x, x.flip(-1)), -1), penalty=penalty, weights=w, mask=mask
    ),
    "units of the deviation": lambda x, w, mask, penalty: robust_pool(
        x, penalty=penalty, weights=w, mask=mask, scale="mad"
    ),
    "pooling weights": lambda x, w, mask, penalty: robust_pool(
        x, penalty=penalty, weights=w, mask=mask, return_weights=True
    )[1].square(),
}
CASES = [
    (form, text)
    for form in FORMS for text in ALL
    if not (form == "vectors" and text in ("absolute", "truncated_quadratic"))
    and not (form == "pooling weights" and text in ("quadratic", "truncated_quadratic"))  # which are constants
]  # fmt: skip


def leaves(dtype, kind):
    """x [3, 6] whose row 0 is broken, one weight a column, a radius for all rows, and the mask."""
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 6, generator=draw).to(dtype), (torch.rand(6, generator=draw) + 0.2).to(dtype)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4] = False
    if kind == "nan":
        x[0, 2] = torch.nan
    else:
        mask[0] = False
    return [x.requires_grad_(), w.requires_grad_(), torch.tensor(0.7, dtype=dtype, requires_grad=True)], mask


def with_radius(text, c):
    return radial.parse(text, "penalty").with_parameters(rho=c)


def gradients(y, inputs, **options):
    found = torch.autograd.grad(y.sum(), inputs, allow_unused=True, **options)
    return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, inputs, strict=True)]


@pytest.mark.parametrize("weighted", WEIGHTED)
@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("form, text", CASES)
def test_a_broken_row_that_is_not_used_changes_no_gradient(solver, form, text, kind, weighted):
    found = []
    for first in (0, 1):
        inputs, mask = leaves(torch.float32, kind)
        x, w, c = inputs
        y = FORMS[form](x[first:], w if weighted else None, mask[first:], with_radius(text, c))
        assert y[: 1 - first].isnan().all()
        found.append(gradients(y[1 - first :], inputs))
    for with_it, without in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form, text", [case for case in CASES if case[0] != "pooling weights"])
def test_an_empty_row_moves_with_nothing_even_where_it_is_used(solver, form, text):
    found = []
    for first in (0, 1):
        inputs, mask = leaves(torch.float32, "masked")
        x, w, c = inputs
        found.append(gradients(FORMS[form](x[first:], w, mask[first:], with_radius(text, c)), inputs))
    for with_it, without in zip(*found, strict=True):
        torch.testing.assert_close(with_it, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["rows", "images", "segments", "vectors"])
def test_a_broken_row_that_is_used_says_so_in_every_gradient_it_has_a_part_in(solver, form):
    for weighted in WEIGHTED:
        inputs, mask = leaves(torch.float32, "nan")
        x, w, c = inputs
        y = FORMS[form](x, w if weighted else None, mask, with_radius("pseudo_huber", c))
        grad_x, grad_w, grad_c = gradients(y, inputs)
        assert grad_c.isnan()
        assert grad_x.isnan().any(-1).tolist() == [True, False, False]
        assert bool(grad_w.isnan().any()) == weighted


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("form", ["rows", "segments", "vectors"])
@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "welsch", "quadratic", "barron(shape=0.5)"])
def test_second_derivatives_and_forward_mode_know_nothing_of_a_broken_row(form, text, kind):
    second, forward = [], []
    for first in (0, 1):
        inputs, mask = leaves(torch.float64, kind)

        def used(x, w, c, first=first, mask=mask):
            return FORMS[form](x[first:], w, mask[first:], with_radius(text, c))[1 - first :]

        grads = gradients(used(*inputs).square(), inputs, create_graph=True)
        second.append(gradients(sum(grad.square().sum() for grad in grads), inputs))
        steps = tuple(torch.ones_like(held) for held in inputs)
        forward.append(torch.func.jvp(used, tuple(held.detach() for held in inputs), steps)[1])
    for with_it, without in zip(*second, strict=True):
        torch.testing.assert_close(with_it, without)
    torch.testing.assert_close(*forward)


@pytest.mark.parametrize("text", ["huber(learn=True)", "pseudo_huber(learn=True)", "welsch(learn=True)"])
@pytest.mark.parametrize("kind", BREAKS)
def test_a_layer_learns_its_radius_beside_a_broken_image(solver, text, kind):
    layer = hb.nn.RobustPool2d(penalty=text)
    x, mask = torch.randn(3, 2, 4, 4), torch.ones(3, 1, 4, 4, dtype=torch.bool)
    if kind == "nan":
        x[0, :, 0, 0] = torch.nan
    else:
        mask[0] = False
    layer(x, mask=mask)[1:].sum().backward()
    assert layer.log_c.grad.isfinite().all()
    assert layer.log_c.grad.abs().max() > 0


@pytest.mark.parametrize("text", ["huber", "pseudo_huber", "quadratic", "barron(shape=0.5)"])
def test_a_broken_window_that_is_not_used_spoils_no_sample_it_shares(solver, text):
    x = torch.randn(1, 1, 9)
    x[..., 0] = torch.nan
    x.requires_grad_()
    y = robust_pool1d(x, 3, 1, penalty=text)
    assert y.isnan().flatten().tolist() == [True] + [False] * 6
    (grad,) = torch.autograd.grad(y[..., 1:].sum(), x)
    (alone,) = torch.autograd.grad(robust_pool1d(x[..., 1:], 3, 1, penalty=text).sum(), x)
    torch.testing.assert_close(grad, alone)


def test_compiled_code_gives_the_same_gradients_beside_a_broken_row():
    for kind in BREAKS:
        found = []
        for compiled in (True, False):
            inputs, mask = leaves(torch.float32, kind)

            def loss(x, w, c, mask=mask):
                return sum(
                    FORMS[form](x, w, mask, with_radius("pseudo_huber", c))[1:].sum() for form in ("rows", "vectors")
                )

            loss = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
            found.append(gradients(loss(*inputs), inputs))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_the_status_of_a_broken_row_is_nan(solver):
    x = torch.randn(3, 5)
    x[1, 0] = torch.nan
    _, status = robust_pool(x, return_status=True)
    assert status.gradient.isnan().tolist() == [False, True, False]
    _, status = segment_robust_pool(x.flatten(), torch.tensor([0, 5, 10, 10, 15]), return_status=True)
    assert status.gradient.isnan().tolist() == [False, True, True, False]
