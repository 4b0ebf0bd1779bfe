"""The kernels of robust batch normalization against the eager twin in float64: on a GPU, or interpreted on the CPU.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import math
import os

import pytest
import torch

from hyperball import radial
from hyperball.functional.batch_norm import robust_batch_norm
from hyperball.kernels import dispatch
from hyperball.kernels.batch_norm import fused
from hyperball.kernels.triton.batch_norm import launch as launches
from hyperball.kernels.triton.batch_norm import solve

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CONVEX = ["quadratic", "huber", "pseudo_huber", "barron(shape=1.5)"]
LAYOUTS = {
    "rows": (lambda: normal(37, 3)),
    "contiguous": (lambda: normal(6, 3, 5, 5)),
    "channels last": (lambda: normal(6, 3, 5, 5).contiguous(memory_format=torch.channels_last)),
    "strided": (lambda: normal(6, 6, 5, 10)[:, ::2, :, ::2]),
    "channels first of three": (lambda: normal(5, 3, 9)),
    "two positions": (lambda: normal(21, 3, 2)),
}


@pytest.fixture(autouse=True)
def _kernels_of_batch_norm_run_on_this_device(monkeypatch):
    """Tensors of float64 run eagerly; memory that a kernel leaves unwritten is NaN."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    monkeypatch.setattr(dispatch, "HAS_ROCM", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    launches.forward_plan.cache_clear()


@pytest.fixture
def in_passes(monkeypatch):
    """No channel counts as whole: it takes a sample, passes over all samples and the end of those that are left."""
    monkeypatch.setattr(launches, "WHOLE", 0)
    launches.forward_plan.cache_clear()


def normal(*shape, seed=0, dtype=torch.float32):
    """Normal samples, channels of different scales, some samples of the first rows moved away."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[: shape[0] // 5] += 7.0
    return (x * torch.logspace(-1, 1, shape[1]).reshape(-1, *(1,) * (len(shape) - 2)) + 0.3).to(DEVICE, dtype)


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-6))


def step(x, text, c, upstream):
    """y, running statistics and the gradients of x, weight, bias and c, in x's dtype or wider."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = x.shape[1]
    weight, bias = (torch.linspace(low, 2.0, channels, device=DEVICE, dtype=kind) for low in (0.5, -1.0))
    mean, var = torch.zeros_like(weight), torch.ones_like(weight)
    leaves = [x, weight, bias, torch.full((channels,), c, device=DEVICE, dtype=kind)]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = radial.parse(text, "penalty").with_parameters(rho=leaves[3])
    y = robust_batch_norm(leaves[0], mean, var, leaves[1], leaves[2], True, 0.3, penalty=value)
    return [y, mean, var, *torch.autograd.grad(y, leaves, upstream.to(y.dtype), allow_unused=True)]


def agree(x, text, c=1.3, bound=1e-5):
    upstream = normal(*x.shape, seed=9)
    ours, truth = step(x, text, c, upstream), step(x.double(), text, c, upstream)
    assert [a is None for a in ours] == [b is None for b in truth]  # a quadratic's c has no gradient
    for place, (a, b) in enumerate(zip(ours, truth, strict=True)):
        if b is not None:
            assert error(a, b) < bound, (place, error(a, b))
    return ours


@pytest.mark.parametrize("text, layout", [*((text, "rows") for text in CONVEX), ("pseudo_huber", "contiguous")])
def test_channels_in_registers_equal_the_twin(text, layout):
    agree(LAYOUTS[layout](), text)


@pytest.mark.parametrize("text, layout", [*((text, "rows") for text in CONVEX), ("huber", "contiguous")])
def test_channels_in_passes_equal_the_twin(text, layout, in_passes):
    agree(LAYOUTS[layout](), text)


def hubers_own_iteration(x, c):
    """m <- m + s·mean psi, s² <- s²·mean psi²/E psi(Z)², for every channel of rows in float64."""
    tail = math.erfc(c / math.sqrt(2))
    beta = 1 - tail - c * math.sqrt(2 / math.pi) * math.exp(-c * c / 2) + c * c * tail
    m, s = x.median(0).values, x.std(0)
    for _ in range(2000):
        psi = ((x - m) / s).clamp(-c, c)
        m, s = m + s * psi.mean(0), s * (psi.square().mean(0) / beta).sqrt()
    return m, s


@pytest.mark.parametrize("way", ["whole", "passes"])
def test_huber_agrees_with_hubers_own_iteration(way, request):
    if way == "passes":
        request.getfixturevalue("in_passes")
    x = normal(90, 3)
    m, s = hubers_own_iteration(x.double(), 1.2)
    y = robust_batch_norm(x, None, None, training=True, eps=1e-12, penalty="huber(c=1.2)")
    torch.testing.assert_close(y.double(), (x.double() - m) / s, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_twin_s_numbers_in_its_own_layout(layout):
    x = LAYOUTS[layout]()
    y, *_ = agree(x, "huber")
    if layout != "strided":
        assert y.stride() == x.stride()


@pytest.mark.parametrize("layout", ["channels last", "two positions"])
def test_any_layout_in_passes_gives_the_twin_s_numbers(layout, in_passes):
    agree(LAYOUTS[layout](), "huber")


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if NATIVE else [])])
@pytest.mark.parametrize("text", ["huber", "pseudo_huber"])
def test_half_precision_is_solved_in_float32(text, dtype):
    x = normal(8, 3, 5, 5, dtype=dtype)
    y, *_, dx, _, _, _ = agree(x, text, bound=BOUNDS[dtype])
    assert y.dtype == dx.dtype == dtype


def test_rows_that_are_many_tiles_equal_the_twin(in_passes):
    agree(normal(700, 2), "huber")


def test_positions_that_are_many_tiles_equal_the_twin():
    agree(normal(9001, 1).t().reshape(1, 1, 9001), "huber")


@pytest.mark.parametrize("c", [0.3, 5.0, 1e6])
def test_any_radius_gives_the_twin_s_numbers(c):
    """But for the derivative in a large c, which is what rounding leaves of a difference of ones."""
    x, upstream = normal(61, 3), normal(61, 3, seed=9)
    results = [step(t, "huber", c, upstream)[: 7 if c < 3 else 6] for t in (x, x.double())]
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 3e-5


def test_a_radius_that_is_one_number_or_of_one_value_is_that_of_every_channel():
    x = normal(40, 3)
    wanted = step(x, "huber", 1.7, x)[0]
    bare = robust_batch_norm(x, None, None, training=True, penalty="huber(c=1.7)")
    c = torch.tensor(1.7, device=DEVICE, requires_grad=True)
    one = robust_batch_norm(x, None, None, training=True, penalty=radial.huber(c=c))
    assert torch.equal(bare, one)
    weight, bias = (torch.linspace(low, 2.0, 3, device=DEVICE) for low in (0.5, -1.0))
    torch.testing.assert_close(bare * weight + bias, wanted, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(one.square().sum(), c)
    assert grad.shape == c.shape
    assert grad.isfinite()


def hostile():
    """Channels whose start is far from the answer, or that tie: each takes many steps, or brackets."""
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(3))
    for channel, (share, far) in enumerate([(0.45, 1e3), (0.45, 1e6), (0.4, 1e10), (0.48, 30.0), (0.3, -1e4), (0, 0)]):
        x[: int(share * 400), channel] = far
    return x.to(DEVICE)


@pytest.mark.parametrize("way", ["whole", "passes"])
@pytest.mark.parametrize("text, c", [("huber", 0.3), ("pseudo_huber", 0.3)])
def test_far_outliers_near_half_of_the_samples_do_not_stop_the_solver_short(text, c, way, request):
    if way == "passes":
        request.getfixturevalue("in_passes")
    x = hostile()
    value = radial.parse(text, "penalty").with_parameters(rho=c)
    ours, truth = (robust_batch_norm(t, None, None, training=True, penalty=value) for t in (x, x.double()))
    near = x.abs() < 25.0
    assert ((ours.double() - truth).abs()[near] < 5e-3).all()


@pytest.mark.skipif(NATIVE, reason="a compiled kernel keeps the number of its steps")
def test_brackets_find_the_minimum_where_no_joint_steps_are_taken(in_passes, monkeypatch):
    monkeypatch.setattr(launches, "PASSES", 1)
    monkeypatch.setattr(solve, "STEPS", solve.tl.constexpr(-1))
    x = hostile()
    ours, truth = (robust_batch_norm(t, None, None, training=True, penalty="huber(c=0.5)") for t in (x, x.double()))
    near = x.abs() < 25.0
    assert ((ours.double() - truth).abs()[near] < 5e-3).all()


def test_constant_and_nearly_constant_channels_stay_finite():
    x = torch.zeros(40, 3, device=DEVICE)
    x[:, 1], x[:10, 2] = 7.0, torch.randn(10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    leaf = x.requires_grad_()
    y = robust_batch_norm(leaf, None, None, training=True)
    (grad,) = torch.autograd.grad(y, leaf, normal(40, 3, seed=2))
    assert y.isfinite().all()
    assert grad.isfinite().all()
    torch.testing.assert_close(y[:, :2], torch.zeros(40, 2, device=DEVICE), rtol=0, atol=1e-3)


@pytest.mark.parametrize("way", ["whole", "passes"])
def test_nan_stays_in_its_channel_and_infinities_are_outliers(way, request):
    if way == "passes":
        request.getfixturevalue("in_passes")
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[5, 1], x[0, 0], x[1, 0] = math.nan, math.inf, -math.inf
    y = robust_batch_norm(x, None, None, training=True)
    assert y.isnan().any(0).tolist() == [False, True, False]
    assert y[2:, 0].isfinite().all()
    assert y[:2, 0].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize("factor", [1e-12, 1e34])
@pytest.mark.parametrize("text", CONVEX[:3])
def test_samples_at_extremes_give_the_output_of_usual_ones(text, factor):
    x = normal(60, 2)
    usual, scaled = (robust_batch_norm(t, None, None, training=True, eps=1e-37, penalty=text) for t in (x, x * factor))
    torch.testing.assert_close(scaled, usual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["whole", "passes"])
@pytest.mark.parametrize("shape", [(60, 11), (6, 11, 3, 3)])
def test_a_channel_does_not_depend_on_the_others_bit_for_bit(shape, way, request):
    if way == "passes":
        request.getfixturevalue("in_passes")
    x = normal(*shape)
    x[: shape[0] // 3, ::3] = 1e3  # channels that take many more steps
    together = robust_batch_norm(x, None, None, training=True)
    for part in (slice(4, 5), slice(2, 9)):
        alone = robust_batch_norm(x[:, part].contiguous(), None, None, training=True)
        assert torch.equal(together[:, part], alone)


def test_second_derivatives_are_the_twin_s():
    x = normal(12, 2)
    results = []
    for kind in (torch.float32, torch.float64):
        leaf = x.to(kind).requires_grad_()
        y = robust_batch_norm(leaf, None, None, training=True, penalty="pseudo_huber")
        (grad,) = torch.autograd.grad(y.square().sum() + y.pow(3).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
    assert error(*results) < 1e-3


def test_derivatives_with_a_graph_count_an_input_once_that_others_depend_on():
    found = []
    for kind in (torch.float32, torch.float64):
        leaf = normal(12, 2).to(kind).requires_grad_()
        y = robust_batch_norm(leaf, None, None, leaf[0].square() + 1, leaf[1], training=True, penalty="pseudo_huber")
        (grad,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
        found.append([grad, *torch.autograd.grad(grad.square().sum(), leaf)])
    for ours, exact in zip(*found, strict=True):
        assert error(ours, exact) < 1e-3


def test_running_statistics_follow_a_momentum_that_is_a_tensor_too():
    x = normal(50, 3)
    followed = []
    for momentum in (0.25, torch.tensor(0.25, device=DEVICE)):
        mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
        robust_batch_norm(x, mean, var, training=True, momentum=momentum)
        followed.append((mean, var))
    for a, b in zip(*followed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_compiled_step_holds_the_operators_and_gives_the_same():
    x, c = normal(30, 3), torch.full((3,), 1.4, device=DEVICE)
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
        leaves = [x.clone().requires_grad_(), c.clone().requires_grad_()]

        def normalized(x, c, mean=mean, var=var):
            return robust_batch_norm(x, mean, var, training=True, penalty=radial.huber(c=c))

        y = wrap(normalized)(*leaves)
        results.append([y, *torch.autograd.grad(y, leaves, normal(30, 3, seed=9)), mean, var])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_operators_pass_torchs_own_checks():
    x, c, weight = normal(20, 3), torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(fused.robust_batch_norm_op, (x, c, weight, None, "huber", 1.0, 1.0, 1e-5), test_utils=tests)
    _, stats = fused.robust_batch_norm_op(x, None, weight, None, "huber", 1.0, 1.0, 1e-5)
    pulled = (x, x, c, weight, stats, "huber", 1.0, 1.0, 1e-5)
    torch.library.opcheck(fused.robust_batch_norm_backward_op, pulled, test_utils=tests[:2])
