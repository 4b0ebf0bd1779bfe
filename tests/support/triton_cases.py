"""The Triton operators against their eager twins in float64: run by kernels/test_triton.py, on a GPU or interpreted.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import os

import pytest
import torch
import triton
import triton.language as tl

import hyperball as hb
from hyperball.kernels.triton import rows
from hyperball.kernels.triton.decoupled import block, ops, twin
from hyperball.kernels.triton.decoupled.code import Code

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
WINDOW = ([1, 1], [1, 1], [1, 1], 1)
BOUNDS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if NATIVE else [])]
RELATIVE = Code("tanh", "cosine", alpha=1.0, unit="batch", unit_eps=1e-4)


torch.backends.cudnn.allow_tf32 = False  # in a process of its own, as said above


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape, seed=0, dtype=torch.float32):
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return ops.dense(drawn)


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm().clamp(min=1e-20))


def wide(t):
    return None if t is None else t.double()


def compare(run, truth, inputs, bound):
    """Outputs and gradients of `run` and of `truth` in float64, for the same random cotangents."""
    results = []
    for function, lift in ((run, lambda t: t), (truth, wide)):
        leaves = [None if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        outputs = function(*(lift(t) for t in leaves))
        seeds = [random(*out.shape, seed=7 + k, dtype=out.dtype) for k, out in enumerate(outputs)]
        grads = torch.autograd.grad(outputs, [t for t in leaves if t is not None], seeds, allow_unused=True)
        results.append([*outputs, *grads])
    for place, (a, b) in enumerate(zip(*results, strict=True)):
        if b is not None:
            assert a is not None, place
            assert error(a, b) < bound, (place, error(a, b))


def check(
    code, parameters, *, inputs=5, outputs=6, size=(5, 4), kernel=(3, 3), window=WINDOW, batch=3, dtype=torch.float32
):
    x = random(batch, inputs, *size, seed=1, dtype=dtype)
    w = random(outputs, inputs // window[3], *kernel, seed=2, dtype=dtype)
    unit = torch.tensor(1.7, device=DEVICE)

    def ours(x, w, *held):
        return (ops.decoupled_conv(x, w, *held, unit, code.text(), *window)[0],)

    def truth(x, w, *held):
        return (twin.decoupled_conv(x, w, held, unit, code.text(), *window),)

    compare(ours, truth, [x, w, *parameters], BOUNDS[dtype])


def module_gradients(module, x, dtype=None):
    x = x.detach().clone().to(dtype or x.dtype).requires_grad_()
    out = module(x)
    grads = torch.autograd.grad(out, [x, *module.parameters()], random(*out.shape, seed=9).to(out.dtype))
    return [out, *grads]


def radius(outputs=6, seed=3):
    return random(outputs, seed=seed).abs() + 0.7


def with_rho(rho=None, factor=None, stretch=None):
    return [None, None, radius() if rho is None else rho, None, None, factor, stretch, None, None]


def radial_case(name):
    row = hb.radial.TABLE[name]
    keys = ("alpha", "beta", "rho", "shape")
    held = [radius(seed=k) if key in row.parameters else None for k, key in enumerate(keys)]
    slopes = random(8, seed=9).abs() + 0.2 if "slopes" in row.parameters else None
    return Code(name, "cosine", eps=1e-2), [*held, None, None, None, slopes, None]


def angular_case(name):
    row = hb.angular.TABLE[name]
    held = with_rho()
    if "k" in row.parameters or "b" in row.parameters:
        held[4] = radius(seed=5) + 0.5
    if "slopes" in row.parameters:
        held[8] = random(8, seed=9).abs() + 0.2
    return Code("tanh", name, alpha=1.5, angular_eps=1e-4), held


@pytest.mark.parametrize("name", hb.radial.names("magnitude"))
def test_a_radial_row_and_its_parameter_gradients_equal_the_twins(name):
    check(*radial_case(name))


@pytest.mark.parametrize("name", list(hb.angular.TABLE.rows))
def test_an_angular_row_and_its_parameter_gradients_equal_the_twins(name):
    check(*angular_case(name))


@triton.jit
def fast_tanh_kernel(n, over, gain, slope, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    s, h1 = rows.radial("tanh", tl.load(n + at), 1.0, 1.0, 1.0, tl.load(over), 1.0, n, 1, 0.0, True)
    tl.store(gain + at, s)
    tl.store(slope + at, h1)


@triton.jit
def tanh_to_eleven_bits(z):
    return rows.tanh_of(z) * (1.0 - 0.00048828125)


def test_the_tanh_of_sixteen_bits_keeps_its_gain_and_its_slope_to_the_end_of_the_tail(monkeypatch):
    if not NATIVE:  # which has no such instruction
        monkeypatch.setattr(rows, "fast_tanh", tanh_to_eleven_bits)
    n = torch.logspace(-4, 1.5, 256, device=DEVICE)
    gain, slope = torch.empty_like(n), torch.empty_like(n)
    fast_tanh_kernel[(1,)](n, torch.full((1,), 0.8, device=DEVICE), gain, slope, 256)
    z = 0.8 * n.double()
    torch.testing.assert_close(gain.double(), z.tanh() / n.double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(slope.double(), 0.8 / z.cosh().square(), rtol=1.5e-3, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_relative_radius_of_the_batch_equals_the_twins_in_every_dtype(dtype):
    check(RELATIVE, with_rho(), dtype=dtype)


@pytest.mark.parametrize(
    "case",
    [
        {"window": ([2, 1], [1, 1], [1, 1], 1)},
        {"window": ([1, 1], [1, 2], [2, 1], 1), "size": (7, 6)},
        {"window": ([2, 3], [0, 2], [1, 1], 1)},
        {"window": ([2, 2], [1, 1], [1, 1], 2), "inputs": 6},
        {"window": ([1, 1], [0, 0], [1, 1], 1), "kernel": (1, 1)},
        {"window": ([], [], [], 1), "size": (), "kernel": ()},
        {"window": ([1, 2, 1], [1, 0, 0], [1, 1, 1], 1), "size": (3, 4, 5), "kernel": (2, 3, 1)},
    ],
)
def test_every_geometry_equals_the_twin(case):
    check(RELATIVE, with_rho(factor=radius(seed=11), stretch=radius(seed=12)), **case)


@pytest.mark.parametrize("inputs, outputs, size", [(160, 96, (9, 11)), (3, 256, (3, 3))])
def test_rows_in_several_parts_and_programs_of_several_tiles_equal_the_twin(inputs, outputs, size):
    check(RELATIVE, with_rho(radius(outputs)), inputs=inputs, outputs=outputs, size=size, batch=7)


def test_a_block_of_rows_in_several_parts_equals_its_modules():
    block_case("relu", True, True, batch=True, c=96, size=(9, 11), images=7)


@pytest.mark.parametrize("unit", ["none", "running"])
def test_a_radius_per_layer_and_a_given_unit_equal_the_twin(unit):
    check(Code("tanh", "square_cosine", alpha=2.0, unit=unit), with_rho(torch.tensor(1.3, device=DEVICE)))


def test_a_number_as_relative_radius_equals_the_twin():
    check(Code("ball", "cosine", alpha=1.0, rho=0.8, unit="batch", unit_eps=1e-4), [None] * 9)


def block_case(
    activation, residual, carry, batch, dtype=torch.float32, affine=True, groups=1, c=6, size=(5, 4), images=3
):
    inputs = [
        random(images, c, *size, seed=1, dtype=dtype), random(c, c // groups, 3, 3, seed=2, dtype=dtype),
        *with_rho(radius(c)), None,
        *((radius(c, seed=4), random(c, seed=5)) if affine else (None, None)),
        radius(c, seed=6) * 0.3 if activation == "prelu" else None,
        random(images, c, *size, seed=7, dtype=dtype) if residual else None,
    ]  # fmt: skip
    unit = torch.tensor(1.7, device=DEVICE)
    running = (None, None) if batch else (random(c, seed=8) * 0.1, radius(c, seed=9))
    code = Code("tanh", "cosine", alpha=1.0, unit="batch" if batch else "running", unit_eps=1e-4).text()
    settings = (code, activation, 1e-5, carry, [1, 1], [1, 1], [1, 1], groups)

    def lengths(x):
        return torch.linalg.vector_norm(x if x.dtype == torch.float64 else x.float(), dim=1).flatten()

    def ours(x, w, *rest):
        given = (x, w, *rest[:9], lengths(x) if carry and groups == 1 else None, *rest[10:])
        return block.decoupled_block(*given, unit, *running, *settings)[: 2 if carry else 1]

    def truth(*given):
        made = twin.decoupled_block([*given, unit, *(wide(t) for t in running)], *settings)
        return made[: 2 if carry else 1]

    compare(ours, truth, inputs, BOUNDS[dtype])


@pytest.mark.parametrize("activation", ["relu", "prelu", "none"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("carry", [False, True])
def test_a_fused_block_equals_its_modules_in_turn(activation, residual, carry):
    block_case(activation, residual, carry, batch=True)


@pytest.mark.parametrize("residual", [False, True])
def test_a_fused_block_with_running_statistics_equals_its_modules(residual):
    block_case("relu", residual, True, batch=False)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_fused_block_in_half_precision_equals_its_modules(dtype):
    block_case("relu", True, True, batch=True, dtype=dtype)


def test_a_fused_block_without_affine_or_with_groups_equals_its_modules():
    block_case("relu", False, True, batch=True, affine=False)
    block_case("relu", False, True, batch=True, groups=2)


def test_lengths_and_norms_neither_overflow_nor_vanish():
    for scale in (1e-25, 1e25):
        x = random(2, 5, 4, 4, seed=1) * scale
        out = ops.decoupled_conv(
            x, random(6, 5, 3, 3, seed=2), *[None] * 9, None, Code("tanh", "cosine", alpha=1.0, rho=1.0).text(), *WINDOW
        )
        truth = torch.nn.functional.conv2d(
            x.double().square(), torch.ones(1, 5, 3, 3, device=DEVICE).double(), padding=1
        )
        assert error(out[2], truth.sqrt().flatten()) < 1e-6
        assert out[0].isfinite().all()


@pytest.mark.parametrize(
    "code, scale",
    [
        (Code("tanh", "cosine", alpha=1.0), 9.0),
        (Code("barron", "cosine", alpha=1.0, shape=1.5), 1e25),
        (Code("barron", "cosine", alpha=1.0, shape=1.5), 0.9e38),
    ],
)
def test_the_radius_keeps_its_gradient_however_long_the_vector(code, scale):
    x = torch.tensor([[1.0, -2.0, 2.0]], device=DEVICE) / 3 * scale
    w, window = torch.tensor([[1.0, 0.5, 1.0], [0.2, 1.0, -0.1]], device=DEVICE), ([], [], [], 1)
    found = []
    for dtype, function in ((torch.float32, ops.decoupled_conv), (torch.float64, twin.decoupled_conv)):
        rho = torch.full((2,), 1e-2 if scale > 1e30 else 1.0, device=DEVICE, dtype=dtype, requires_grad=True)
        held = [None, None, rho, *[None] * 6]
        given = (x.to(dtype), w.to(dtype))
        f = (
            function(*given, *held, None, code.text(), *window)[0]
            if dtype == torch.float32
            else function(*given, held, None, code.text(), *window)
        )
        found.append((f, *torch.autograd.grad(f.sum(), rho)))
    for ours, truth in zip(*found, strict=True):
        assert error(ours, truth) < 1e-4


def test_patches_longer_than_float16_holds_give_finite_outputs_and_gradients():
    x = (random(2, 5, 4, 4, seed=1) * 3e4).clamp(-6e4, 6e4).half()
    code = Code("tanh", "cosine", alpha=1.0, rho=1e5)

    def ours(x, w):
        return (ops.decoupled_conv(x, w, *[None] * 9, None, code.text(), *WINDOW)[0],)

    def truth(x, w):
        return (twin.decoupled_conv(x, w, [None] * 9, None, code.text(), *WINDOW),)

    compare(ours, truth, [x, random(6, 5, 3, 3, seed=2, dtype=torch.float16)], 1e-2)


def test_all_zero_patches_and_zero_filters_give_zero_outputs_and_gradients():
    x = random(2, 5, 4, 4, seed=1)
    x[0] = 0
    w = random(6, 5, 3, 3, seed=2)
    w[3] = 0
    x, w = x.requires_grad_(), w.requires_grad_()
    f = ops.decoupled_conv(x, w, *with_rho(), None, RELATIVE.text(), *WINDOW)[0]
    dx, dw = torch.autograd.grad(f.sum(), (x, w))
    assert (f[0] == 0).all()
    assert (f[:, 3] == 0).all()
    assert dx.isfinite().all()
    assert (dw[3] == 0).all()


def test_the_second_derivative_is_the_twins():
    x, w = (t.requires_grad_() for t in (random(1, 3, 4, 4, seed=1), random(6, 3, 3, 3, seed=2)))

    def penalty(f):
        (dx,) = torch.autograd.grad(f.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), w)[0]

    held = with_rho()
    ours = penalty(ops.decoupled_conv(x, w, *held, None, RELATIVE.text(), *WINDOW)[0])
    truth = penalty(twin.decoupled_conv(x, w, held, None, RELATIVE.text(), *WINDOW))
    assert error(ours, truth) < 1e-4


def test_the_operators_pass_opcheck():
    x, w, rho = random(1, 3, 4, 4, seed=1), random(6, 3, 3, 3, seed=2), radius()
    arguments = (x.requires_grad_(), w.requires_grad_(), *with_rho(rho.requires_grad_()), None)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.decoupled_conv, (*arguments, RELATIVE.text(), *WINDOW), test_utils=checks)
    rest = (None, None, None, None, None, None, None)
    settings = (RELATIVE.text(), "relu", 1e-5, True, *WINDOW)
    torch.library.opcheck(block.decoupled_block, (*arguments[:-1], None, *rest, *settings), test_utils=checks)


def test_a_batch_moves_the_running_means_as_torch_does():
    running, batches = torch.tensor(3.0, device=DEVICE), torch.tensor(1, device=DEVICE)
    norm = torch.nn.BatchNorm2d(6, momentum=None).to(DEVICE)
    norm.num_batches_tracked += 2
    f = random(4, 6, 3, 3, seed=1) * 2 + 1
    truth = torch.nn.BatchNorm2d(6, momentum=None).to(DEVICE)
    truth.num_batches_tracked += 2
    truth(f)
    stats = torch.stack([f.mean((0, 2, 3)), f.var((0, 2, 3), correction=0)])
    count = f.numel() // 6
    block.track_block(
        running, batches, torch.tensor(5.0, device=DEVICE), norm.running_mean, norm.running_var,
        norm.num_batches_tracked, stats, -1.0, count / (count - 1),
    )  # fmt: skip
    assert (float(running), int(batches)) == (4.0, 2)
    assert int(norm.num_batches_tracked) == 3
    torch.testing.assert_close(norm.running_mean, truth.running_mean)
    torch.testing.assert_close(norm.running_var, truth.running_var)
    ops.track(running, batches, torch.tensor(float("nan"), device=DEVICE))
    assert (float(running), int(batches)) == (4.0, 2)
