"""Gradients of robust pooling: exact, to second order, damped where they must be, and lean."""

import pytest
import torch
from pooling_reference import ALL, name_and_shape, rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyperball import radial
from hyperball.functional.pooling import (
    robust_pool,
    robust_pool1d,
    robust_pool2d,
    robust_pool_vectors,
    segment_robust_pool,
)
from hyperball.kernels.pooling import native
from hyperball.kernels.pooling import operation as kernel
from hyperball.kernels.pooling.geometry import Along
from hyperball.rows import Value

D = torch.float64
SMOOTH = [text for text in ALL if text not in ("huber", "truncated_quadratic", "absolute")]


def value(text: str, c: Tensor, shape: Tensor | None = None) -> Value:
    """The penalty with tensors for its parameters."""
    name, fixed = name_and_shape(text)
    held: dict = {"rho": c}
    if name == "barron":
        held["shape"] = torch.tensor(fixed, dtype=D) if shape is None else shape
    return Value(radial.TABLE[name], held)


@pytest.mark.parametrize("text", ALL)
def test_gradients_of_samples_radius_and_weights_are_those_of_finite_differences(text):
    x = rows(3, 7, 0.25, distance=3.0).requires_grad_()
    c = torch.tensor([0.8, 1.1, 1.7], dtype=D, requires_grad=True)
    w = (torch.rand(3, 7, dtype=D) + 0.2).requires_grad_()

    def pooled(x, c, w):
        return robust_pool(x, penalty=value(text, c), weights=w)

    assert torch.autograd.gradcheck(pooled, (x, c, w), check_batched_grad=True)
    assert torch.autograd.gradcheck(pooled, (x, c, None))
    assert torch.autograd.gradcheck(pooled, (x, c, w), check_forward_ad=True, check_backward_ad=False)
    assert torch.autograd.gradgradcheck(pooled, (x, c, w), atol=1e-4)


@pytest.mark.parametrize("shape", [-2.0, 0.0, 0.5, 1.0, 1.3, 1.9, 2.5])
def test_the_gradient_of_the_shape_is_that_of_finite_differences(shape):
    x = rows(3, 9, 0.25, distance=3.0).requires_grad_()
    c = torch.tensor(1.2, dtype=D, requires_grad=True)
    a = torch.tensor(shape, dtype=D, requires_grad=True)

    def pooled(x, c, a):
        return robust_pool(x, penalty=radial.barron(c=c, shape=a))

    assert torch.autograd.gradcheck(pooled, (x, c, a))
    assert torch.autograd.gradcheck(pooled, (x, c, a), check_forward_ad=True, check_backward_ad=False)
    assert torch.autograd.gradgradcheck(pooled, (x, c, a), atol=1e-4)


def test_the_gradient_of_the_shape_at_two_is_finite_and_as_derived():
    x = rows(4, 11)
    a = torch.tensor(2.0, dtype=D, requires_grad=True)
    y = robust_pool(x, penalty=radial.barron(shape=a))
    z = x.mean(-1, keepdim=True) - x
    expected = -(z * z.square().log()).sum(-1) / (2 * 11)
    found = torch.stack([torch.autograd.grad(item, a, retain_graph=True)[0] for item in y])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ALL)
def test_shares_sum_to_one_and_euler_ties_the_radius_to_the_samples(text):
    x = rows(5, 13, 0.25, distance=3.0).requires_grad_()
    c = torch.full((5,), 1.3, dtype=D, requires_grad=True)
    y = robust_pool(x, penalty=value(text, c))
    grad_x, grad_c = torch.autograd.grad(y.sum(), (x, c))
    torch.testing.assert_close(grad_x.sum(-1), torch.ones(5, dtype=D))
    torch.testing.assert_close((grad_x * x).sum(-1) + grad_c * c, y.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", ["1d", "2d", "overlapping dims"])
@pytest.mark.parametrize("text", ["pseudo_huber", "welsch", "huber"])
def test_windows_carry_gradients_back_to_every_sample(text, pool):
    x = rows(2, 30).reshape(1, 2, 5, 6).requires_grad_()
    c = torch.tensor([0.7, 1.4], dtype=D, requires_grad=True)

    def pooled(x, c):
        if pool == "1d":
            return robust_pool1d(x.flatten(2), 4, 3, 1, penalty=value(text, c), ceil_mode=True)
        if pool == "2d":
            return robust_pool2d(x, 3, (2, 1), 1, penalty=value(text, c))
        return robust_pool(x, (0, 2), penalty=value(text, c[:, None]))

    assert torch.autograd.gradcheck(pooled, (x, c))
    assert torch.autograd.gradgradcheck(pooled, (x, c), atol=1e-4)
    assert torch.autograd.gradcheck(pooled, (x, c), check_forward_ad=True, check_backward_ad=False)


def test_gradients_flow_through_the_scale():
    x = rows(3, 9, 0.25).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: robust_pool(x, penalty="pseudo_huber(c=1.5)", scale="mad"), (x,))
    grad = torch.autograd.grad(robust_pool(x, penalty="huber(c=1.5)", scale="mad").sum(), x)[0]
    torch.testing.assert_close((grad * x).sum(-1), robust_pool(x, penalty="huber(c=1.5)", scale="mad"))


@pytest.mark.parametrize("text, expected", [("huber(c=1)", [0.0, 0.5, 0.5, 0.0]), ("absolute", [0.0, 0.5, 0.5, 0.0])])
def test_a_row_without_an_inlier_moves_with_its_two_middle_samples(text, expected):
    x = torch.tensor([-9.0, -4.0, 5.0, 30.0], dtype=D, requires_grad=True)
    c = torch.tensor(1.0, dtype=D, requires_grad=True)
    y = robust_pool(x, penalty=text if text == "absolute" else radial.huber(c=c))
    assert torch.autograd.grad(y, x, retain_graph=True)[0].tolist() == expected
    if text != "absolute":
        assert torch.autograd.grad(y, c)[0] == 0


def test_ties_at_the_median_share_its_gradient():
    x = torch.tensor([1.0, 2.0, 2.0, 2.0, 9.0], dtype=D, requires_grad=True)
    grad = torch.autograd.grad(robust_pool(x, penalty="absolute"), x)[0]
    torch.testing.assert_close(grad, torch.tensor([0, 1 / 3, 1 / 3, 1 / 3, 0], dtype=D))


def test_a_degenerate_row_is_damped_and_keeps_its_direction():
    x = torch.tensor([0.0, 100.0, 101.0, -1.0], dtype=D, requires_grad=True)
    y, status = robust_pool(x, penalty="pseudo_huber(c=1)", return_status=True)
    grad = torch.autograd.grad(y, x)[0]
    z = y.detach() - x.detach()
    bend = (1 + z.square()) ** -1.5
    assert status.damped
    assert 0 < grad.sum() < 1
    torch.testing.assert_close(grad / grad.sum(), bend / bend.sum())


@pytest.mark.parametrize("text", ALL)
def test_a_broken_row_spoils_no_other_gradient(text):
    x = rows(4, 8)
    x[1, 3] = torch.nan
    x.requires_grad_()
    grad = torch.autograd.grad(robust_pool(x, penalty=text).nan_to_num().sum(), x)[0]
    assert grad[[0, 2, 3]].isfinite().all()
    mask = torch.ones(4, 8, dtype=torch.bool)
    mask[1] = False
    grad = torch.autograd.grad(robust_pool(x, penalty=text, mask=mask).sum(), x)[0]
    assert (grad[1] == 0).all()
    assert grad[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ALL)
def test_the_backward_keeps_x_and_y_only(text, dtype):
    x = rows(64, 49).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = robust_pool(x, penalty=text)
    assert y.requires_grad
    assert sum(t.numel() * t.element_size() for t in kept) <= x.numel() * x.element_size() + 64 * 4
    assert any(t.data_ptr() == x.data_ptr() for t in kept)


def test_windows_keep_no_unfolded_copy():
    x = rows(2, 400).reshape(1, 2, 20, 20).float().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = robust_pool2d(x, 3, 1, 1, penalty="huber")
    assert sum(t.numel() for t in kept) == x.numel() + y.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("text", SMOOTH)
def test_gradients_in_lower_precision_agree_with_float64(text, dtype, tolerance):
    x = (rows(4, 17) / 2).to(dtype).requires_grad_()
    wide = x.detach().to(D).requires_grad_()
    low = torch.autograd.grad(robust_pool(x, penalty=text).sum(), x)[0]
    high = torch.autograd.grad(robust_pool(wide, penalty=text).sum(), wide)[0]
    assert low.dtype == dtype
    torch.testing.assert_close(low.to(D), high, **tolerance(dtype, 4))


@pytest.mark.parametrize("text", SMOOTH)
def test_transforms_compose(text):
    x = rows(3, 6)
    pool = lambda row: robust_pool(row, penalty=text)  # noqa: E731
    single = torch.func.grad(pool)(x[1])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(pool))(x)[1], single)
    torch.testing.assert_close(torch.func.jacfwd(pool)(x[1]), single)
    torch.testing.assert_close(torch.func.jacrev(lambda x: pool(x))(x)[1, 1], single)
    forward_over_reverse = torch.func.hessian(pool)(x[1])
    reverse_over_reverse = torch.func.jacrev(torch.func.jacrev(pool))(x[1])
    torch.testing.assert_close(forward_over_reverse, reverse_over_reverse)
    torch.testing.assert_close(forward_over_reverse.sum(-1), torch.zeros(6, dtype=D), rtol=0, atol=1e-9)


def test_vmap_takes_batches_of_samples_weights_and_parameters():
    x, c, w = rows(5, 8).reshape(5, 1, 8), torch.rand(5, dtype=D) + 0.3, torch.rand(5, 8, dtype=D)

    def pooled(x, c, w):
        return robust_pool(x, penalty=radial.huber(c=c), weights=w)

    together = torch.func.vmap(pooled)(x, c, w)
    one_by_one = torch.stack([pooled(*items) for items in zip(x, c, w, strict=True)])
    assert torch.equal(together, one_by_one)
    torch.testing.assert_close(torch.func.vmap(pooled, (None, 0, None))(x[0], c, w[0])[2], pooled(x[0], c[2], w[0]))


@pytest.mark.skipif(native.library(torch.float64).pool is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 9, 49, 130, 1024])
@pytest.mark.parametrize("text", [text for text in ALL if text != "quadratic"])
def test_the_compiled_backward_agrees_with_its_eager_twin(text, n, dtype, tolerance):
    x = rows(12, n, 0.25).to(dtype)
    x[1, 0] = torch.nan
    if n > 2:
        x[2, n // 2] = torch.inf if radial.parse(text, "penalty").row.bounded else 1e3
    x[3] = 20 * torch.arange(n)  # no inlier
    w = torch.rand(12, n, dtype=dtype) * (torch.rand(12, n) < 0.8)
    held = radial.parse(text, "penalty").with_parameters(rho=torch.rand(12, dtype=dtype) + 0.3)
    name, shape = name_and_shape(text)
    for weights in (None, w):
        y, _ = kernel.solve_rows(x, weights, held, 1)
        v = torch.randn(12, dtype=dtype)
        grad_x, _, parameters = kernel.pull_back(v, y, x, weights, held, Along((-1,)))
        share, radius = native.pull(v, y, x, weights, name, held.parameters["rho"], shape, tap_dims=1)
        torch.testing.assert_close(share, grad_x, equal_nan=True, **tolerance(dtype, 10))
        size = 1 + ((y[:, None] - x) * share).nan_to_num(0.0, 0.0, 0.0).abs().sum(-1)  # of what is added up
        torch.testing.assert_close(radius / size, parameters[0] / size, equal_nan=True, **tolerance(dtype, 100))


def test_the_compiled_backward_is_used_where_it_may_be_and_only_there(monkeypatch):
    if native.library(torch.float64).pool is None:
        pytest.skip("no C compiler")
    calls = []
    plain = native.pull
    monkeypatch.setattr(native, "pull", lambda *a, **k: calls.append(1) or plain(*a, **k))
    x = rows(3, 9).requires_grad_()
    w = torch.rand(9, dtype=D, requires_grad=True)
    torch.autograd.grad(robust_pool(x).sum(), x)
    assert len(calls) == 1
    torch.autograd.grad(robust_pool(x).sum(), x, create_graph=True)
    torch.autograd.grad(robust_pool(x, weights=w).sum(), (x, w))
    torch.autograd.grad(robust_pool(x, penalty="barron(shape=5)").sum(), x)
    assert len(calls) == 1
    torch.autograd.grad(robust_pool(x, penalty="barron(shape=0.5)").sum(), x)
    assert len(calls) == 2


def test_forward_mode_in_compiled_code_is_refused_or_right_but_never_zero():
    x, dx = rows(2, 6), rows(2, 6, seed=1)

    def moved(x, dx):
        return torch.func.jvp(lambda x: robust_pool(x, penalty="huber"), (x,), (dx,))[1]

    torch.testing.assert_close(torch.compile(moved, backend="eager")(x, dx), moved(x, dx))
    torch.compiler.reset()
    with pytest.raises(Exception, match="forward-mode"):
        torch.compile(moved, backend="eager", fullgraph=True)(x, dx)


def test_dual_numbers_give_the_derivative_and_never_zeros():
    x, dx = rows(3, 9), rows(3, 9, seed=1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, dx)
        moved = torch.autograd.forward_ad.unpack_dual(robust_pool(dual, penalty="huber")).tangent
    step = 1e-6
    slope = (robust_pool(x + step * dx, penalty="huber") - robust_pool(x - step * dx, penalty="huber")) / (2 * step)
    torch.testing.assert_close(moved, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("text", ALL)
def test_cuda_agrees_with_the_cpu(text, dtype, tolerance):
    x = rows(37, 49, 0.25, distance=5.0).to(dtype).requires_grad_()
    c = torch.tensor(1.1, dtype=dtype, requires_grad=True)
    near, far = (
        robust_pool(x.to(device), penalty=value(text, c.to(device)), weights=torch.ones(49, dtype=dtype, device=device))
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(far.cpu(), near, **tolerance(dtype, 10))
    held = (x,) if text in ("quadratic", "absolute") else (x, c)
    found, expected = (torch.autograd.grad(y.square().sum(), held) for y in (far, near))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance(dtype, 1000))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [9, 49, 130, 1024, 5000])
@pytest.mark.parametrize("text", ["quadratic", "huber", "welsch", "truncated_quadratic", "absolute"])
def test_on_cuda_a_row_does_not_depend_on_its_batch_bit_for_bit(text, n):
    x = rows(67, n, 0.25).float().cuda()
    together = robust_pool(x, penalty=text)
    assert torch.equal(together[3:], robust_pool(x[3:], penalty=text))
    assert torch.equal(together[2], robust_pool(x[2], penalty=text))


@pytest.mark.gpu
def test_windows_segments_and_centers_run_on_cuda():
    x = rows(2 * 3, 64).reshape(2, 3, 8, 8).float()
    torch.testing.assert_close(robust_pool2d(x.cuda(), 3, 2, 1).cpu(), robust_pool2d(x, 3, 2, 1))
    compiled = torch.compile(lambda x: robust_pool2d(x, 3, 2, 1), fullgraph=True)
    torch.testing.assert_close(compiled(x.cuda()).cpu(), robust_pool2d(x, 3, 2, 1))
    offsets = torch.tensor([0, 1, 1, 2])
    near, far = (segment_robust_pool(x.to(device), offsets) for device in ("cpu", "cuda"))
    torch.testing.assert_close(far.cpu(), near, equal_nan=True)
    torch.testing.assert_close(robust_pool_vectors(x.cuda()).cpu(), robust_pool_vectors(x))


def test_half_precision_rows_are_not_copied_in_float32_to_ask_what_is_padding():
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            made.append(out)
            return out

    x = torch.randn(6, 40, dtype=torch.bfloat16)
    with Watch():
        assert kernel._view_weights(x, None, Along((-1,)), torch.float32) is None
    assert not made
