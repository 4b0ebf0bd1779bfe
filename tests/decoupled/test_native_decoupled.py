"""The compiled CPU path of decoupled layers against its eager twin in float64."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import hyperball as hb
from hyperball.kernels import native as builds
from hyperball.kernels.decoupled import native

HAS_COMPILER = native.library().epilogue is not None
NEEDS_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
LEARNED = {
    "sphere": "sphere(learn_alpha=True)",
    "ball": "ball(learn_alpha=True)",
    "tanh": "tanh(learn_alpha=True)",
    "linear": "linear(learn_alpha=True)",
    "seg": "seg(learn_alpha=True, learn_beta=True)",
    "log": "log(learn_alpha=True)",
    "mix": "mix(learn_alpha=True, learn_beta=True)",
    "barron": "barron(learn_alpha=True, learn_shape=True)",
}
ANGLES = {"sigmoid": "sigmoid(learn_k=True)", "power": "power(b=2.5, learn_b=True)"}


@pytest.fixture
def calls(monkeypatch):
    """How often the compiled epilogue has run."""
    seen, plain = [], native._epilogue
    monkeypatch.setattr(native, "_epilogue", lambda *a, **k: seen.append("v" in k) or plain(*a, **k))
    return seen


@pytest.fixture
def eager(monkeypatch):
    """Switches the compiled path off from here on."""

    def switch():
        monkeypatch.setattr(native, "library", lambda: native.Library(None, None, "switched off by a test"))

    return switch


def outcome(layer, x, seed=0):
    """f, and the gradients of x and of all parameters for a fixed incoming gradient."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    f = layer(x)
    v = torch.randn(f.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(f.dtype)
    f.backward(v)
    return {"f": f.detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}


def compare(layer, x, tolerance=2e-5):
    """The compiled float32 layer against the eager float64 one."""
    exact = outcome(copy.deepcopy(layer).double(), x.double())
    found = outcome(layer, x)
    assert found.keys() == exact.keys()
    for name, value in found.items():
        scale = float(exact[name].abs().max()) + 1e-6 if exact[name].numel() else 1.0
        torch.testing.assert_close(value.double() / scale, exact[name] / scale, rtol=0, atol=tolerance, msg=name)


def input_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_layout(x, layout):
    if layout == "channels last":
        return x.to(memory_format=torch.channels_last)
    return x.transpose(2, 3).contiguous().transpose(2, 3) if layout == "strange" else x


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("angular", native.ANGULARS)
@pytest.mark.parametrize("magnitude", native.MAGNITUDES)
def test_every_row_equals_its_eager_twin_in_float64(magnitude, angular, layout, calls):
    torch.manual_seed(0)
    options = {"magnitude": LEARNED[magnitude], "angular": ANGLES.get(angular, angular)}
    layer = hb.nn.DecoupledConv2d(5, 19, 3, padding=1, **options)
    with torch.no_grad():
        for parameter in layer.magnitude.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    compare(layer, in_layout(input_of(3, 5, 7, 6), layout))
    assert calls == ([] if (magnitude, angular) == ("linear", "cosine") else [False, True])


@NEEDS_COMPILER
@pytest.mark.parametrize("weighting", ["linear", "joint", "split"])
@pytest.mark.parametrize("angular", ["cosine", "square_cosine"])
@pytest.mark.parametrize("magnitude", ["tanh", "sphere", "barron"])
def test_every_weighting_equals_its_eager_twin(magnitude, angular, weighting, calls):
    torch.manual_seed(0)
    options = {"magnitude": LEARNED[magnitude], "angular": angular, "weighting": weighting}
    layer = hb.nn.DecoupledConv2d(4, 16, 3, groups=2, **options)
    for layout in ("contiguous", "channels last"):
        compare(layer, in_layout(input_of(2, 4, 6, 6), layout))
    assert calls == [False, True] * 2


GEOMETRIES = [
    {"kernel_size": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 3), "padding": (2, 1), "dilation": (2, 1)},
    {"kernel_size": 3, "padding": "same", "dilation": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "groups": 3},
    {"kernel_size": 3, "stride": 3, "padding": 3, "groups": 6, "bias": True},
]


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "strange"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_geometry_equals_its_eager_twin(geometry, layout):
    torch.manual_seed(0)
    layer = hb.nn.DecoupledConv2d(6, 12, **geometry)
    compare(layer, in_layout(input_of(2, 6, 9, 8), layout))


OTHERS = [
    (hb.nn.DecoupledLinear, (7, 21), (5, 7)),
    (hb.nn.DecoupledLinear, (33, 5), (2, 3, 33)),
    (hb.nn.DecoupledConv1d, (4, 8, 3, 2, 1), (3, 4, 11)),
    (hb.nn.DecoupledConv3d, (2, 6, 3, 2, 1), (2, 2, 5, 6, 7)),
    (hb.nn.DecoupledConv2d, (3, 4, 3), (3, 6, 6)),
    (hb.nn.DecoupledConvTranspose1d, (4, 6, 3, 2), (2, 4, 5)),
    (hb.nn.DecoupledConvTranspose2d, (4, 6, 3, 2, 1, 1, 2), (2, 4, 5, 4)),
    (hb.nn.DecoupledConvTranspose3d, (2, 3, 2, 3, 1), (1, 2, 3, 4, 3)),
]


@NEEDS_COMPILER
@pytest.mark.parametrize("kind, arguments, shape", OTHERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_every_kind_of_layer_equals_its_eager_twin(kind, arguments, shape, calls):
    torch.manual_seed(0)
    compare(kind(*arguments, magnitude="seg"), input_of(*shape))
    assert calls == [False, True]


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("channels", [1, 15, 16, 17, 1100])
def test_any_number_of_channels_and_positions_equals_the_eager_twin(channels, layout):
    torch.manual_seed(0)
    layer = hb.nn.DecoupledConv2d(2, channels, 3, padding=1)
    compare(layer, in_layout(input_of(1, 2, 37, 31), layout))


@NEEDS_COMPILER
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients():
    found = outcome(hb.nn.DecoupledConv2d(3, 4, 3), torch.zeros(0, 3, 5, 5))
    assert found["f"].shape == (0, 4, 3, 3)
    assert found["weight"].abs().max() == 0


@NEEDS_COMPILER
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-6, 1e15])
@pytest.mark.parametrize("text", ["tanh", "ball", "seg", "log", "sphere", "barron"])
def test_any_scale_gives_finite_numbers_close_to_the_eager_ones(text, scale, eager):
    torch.manual_seed(0)
    layer, x = hb.nn.DecoupledConv2d(3, 8, 3, padding=1, magnitude=text), scale * input_of(2, 3, 6, 6)
    found = outcome(layer, x)
    eager()
    for name, value in outcome(layer, x).items():
        assert value.isfinite().all() == found[name].isfinite().all()
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5 * float(value.abs().max()))


@NEEDS_COMPILER
@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
@pytest.mark.parametrize("angular", native.ANGULARS)
@pytest.mark.parametrize("magnitude", native.MAGNITUDES)
def test_what_is_not_finite_spreads_as_in_the_eager_twin(magnitude, angular, spoiled, eager):
    torch.manual_seed(0)
    fixed = "" if magnitude in ("sphere", "linear", "log", "mix") else "(relative=False)"
    for text in {magnitude, magnitude + fixed}:
        for layout in ("contiguous", "channels last"):
            layer = hb.nn.DecoupledConv2d(3, 5, 3, padding=1, magnitude=text, angular=angular)
            x = in_layout(input_of(2, 3, 6, 6), layout)
            x[1, 2, 3, 4] = spoiled
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(native, "library", lambda: native.Library(None, None, "off"))
                expected = outcome(layer, x)
            found = outcome(layer, x)
            for name in expected:
                assert torch.equal(found[name].isnan(), expected[name].isnan()), name


@NEEDS_COMPILER
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_the_bits_are_the_same_in_every_run_and_with_any_number_of_threads(layout):
    torch.manual_seed(0)
    layer, x = hb.nn.DecoupledConv2d(8, 24, 3, padding=1), in_layout(input_of(6, 8, 40, 40), layout)
    window, threads = layer.padded(x)[1], torch.get_num_threads()
    y, v = in_layout(input_of(6, 24, 40, 40), layout), in_layout(input_of(6, 24, 40, 40, seed=2), layout)
    rho = torch.rand(24) + 5
    call = native.Call("tanh", "cosine", 1, {"alpha": 1.0}, ("rho",), None)
    results = []
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            n = native.measured(x, window)
            f, dy, dn, dx = torch.empty_like(y), torch.empty_like(y), torch.empty_like(n), torch.ones_like(x)
            sums = torch.zeros(len(native.SUMS), 24, dtype=torch.float64)
            native._epilogue(call, y, n, [rho], f=f)
            native._epilogue(call, y, n, [rho], need=2, v=v, sums=sums, dy=dy, dn=dn)
            native._lengths(x, window, n=n, v=dn, dx=dx)
            results.append((n, f, dy, dn, dx, sums))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@NEEDS_COMPILER
def test_the_function_calls_are_accurate_to_a_few_units_in_the_last_place():
    n = torch.cat((torch.logspace(-12, 4, 40_000), torch.linspace(0.3, 3.0, 40_000))).reshape(-1, 1)
    y = torch.ones_like(n)
    exact = {
        "tanh": torch.tanh(n.double() / 1.7) / n.double(),
        "log": torch.log1p(n.double()) / n.double(),
        "sphere": 1 / (n.double().square() + 1e-4).sqrt(),
        "barron": (1 + (n.double() / 1.7).square() / 1.5).pow(-0.75),
    }
    for name, value in exact.items():
        call = native.Call(name, "cosine", 1, {"alpha": 1.0, "rho": 1.7, "shape": 0.5, "eps": 1e-4}, (), None)
        f = torch.empty_like(y)
        native._epilogue(call, y, n, [], f=f)
        assert float(((f - value) / value).abs().max()) < (2e-6 if name == "barron" else 4e-7), name


@NEEDS_COMPILER
def test_the_angles_are_accurate_to_a_few_units_in_the_last_place():
    y = torch.cat((torch.linspace(-1, 1, 40_001), torch.logspace(-10, 0, 9999))).reshape(-1, 1)
    n, c = torch.ones_like(y), y.double()
    sharp = torch.tanh(torch.asin(c) / 0.6) / torch.tanh(torch.tensor(torch.pi / 1.2, dtype=torch.float64))
    for name, value in {"linear": torch.asin(c) * 2 / torch.pi, "sigmoid": sharp, "power": c * c.abs()}.items():
        parameter = 0.3 if name == "sigmoid" else 2.0
        call = native.Call("linear", name, 1, {"alpha": 1.0, "angle": parameter, "angular_eps": 1e-4}, (), None)
        f = torch.empty_like(y)
        native._epilogue(call, y, n, [], f=f)
        relative = ((f - value) / value.abs().clamp(min=1e-30)).abs()[value.abs() > 1e-12]
        assert float(relative.max()) < (4e-6 if name == "power" else 6e-7), name


@NEEDS_COMPILER
def test_second_derivatives_are_those_of_the_eager_twin(eager):
    torch.manual_seed(0)
    layer, x = hb.nn.DecoupledConv2d(3, 6, 3, padding=1), input_of(2, 3, 5, 5).requires_grad_()

    def second():
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])

    layer(x)
    found = second()
    eager()
    for a, b in zip(found, second(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@NEEDS_COMPILER
def test_transforms_and_batched_gradients_see_torchs_own_operators(calls):
    torch.manual_seed(0)
    layer, x = hb.nn.DecoupledConv2d(3, 4, 3).eval(), input_of(2, 3, 5, 5)
    expected = layer(x)
    assert len(calls) == 1
    torch.testing.assert_close(torch.func.vmap(layer)(x.unsqueeze(1)).squeeze(1), expected)
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    near = (layer(x + 1e-2) - layer(x - 1e-2)) / 2e-2
    torch.testing.assert_close(tangent, near, rtol=1e-2, atol=1e-2)
    held = x.clone().requires_grad_()
    f = layer(held).sum((1, 2, 3))
    (batched,) = torch.autograd.grad(f, held, torch.eye(2), is_grads_batched=True, retain_graph=True)
    for row, seen in zip(batched, torch.eye(2), strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(f, held, seen, retain_graph=True)[0])


@NEEDS_COMPILER
def test_a_graph_used_twice_gives_the_same_gradients_twice_and_keeps_the_incoming_one():
    torch.manual_seed(0)
    layer, x = hb.nn.DecoupledConv2d(3, 4, 3), input_of(2, 3, 5, 5).requires_grad_()
    f = nn.ReLU(inplace=True)(layer(x))
    v = torch.ones_like(f)
    first = torch.autograd.grad(f, [x, *layer.parameters()], v, retain_graph=True)
    second = torch.autograd.grad(f, [x, *layer.parameters()], v)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(v, torch.ones_like(v))


@NEEDS_COMPILER
def test_an_input_that_several_layers_share_gets_the_sum_of_their_gradients(eager):
    torch.manual_seed(0)
    layers = nn.ModuleList(hb.nn.DecoupledConv2d(4, 4, 3, padding=1) for _ in range(2))
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Identity())
    x = input_of(2, 4, 6, 6)

    def gradient():
        held = x.clone().requires_grad_()
        hidden = model(held)
        (layers[0](hidden) + layers[1](hidden) + hidden).square().sum().backward()
        return held.grad

    found = gradient()
    eager()
    torch.testing.assert_close(found, gradient(), rtol=1e-4, atol=1e-3)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_and_autocast_run_eagerly(dtype, calls):
    layer = hb.nn.DecoupledConv2d(3, 4, 3)
    if dtype != torch.float64:
        with torch.autocast("cpu", dtype=dtype):
            assert layer(input_of(1, 3, 5, 5)).dtype == dtype
    copy.deepcopy(layer).to(dtype)(input_of(1, 3, 5, 5).to(dtype))
    assert calls == []


@NEEDS_COMPILER
def test_a_sum_of_magnitudes_and_a_users_row_run_eagerly(calls):
    hb.nn.DecoupledConv2d(3, 4, 3, magnitude="linear + tanh")(input_of(1, 3, 5, 5))
    assert calls == []
    choice = native.choose(hb.radial.parse("linear + tanh"), hb.angular.parse("cosine"), torch.float32)
    assert str(choice) == "eager: a sum of magnitudes"


def test_without_a_compiler_the_eager_twin_runs_and_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("HYPERBALL_CACHE", str(tmp_path))
    monkeypatch.setattr(builds, "find_compiler", lambda: None)
    native.library.cache_clear()
    try:
        layer = hb.nn.DecoupledConv2d(3, 4, 3)
        assert "no C compiler" in hb.explain(layer)["kernel"]
        compare(layer, input_of(2, 3, 5, 5))
        assert list(tmp_path.iterdir()) == []
    finally:
        native.library.cache_clear()


@NEEDS_COMPILER
def test_a_layer_says_that_it_runs_in_c():
    assert hb.explain(hb.nn.DecoupledConv2d(3, 4, 3))["kernel"].startswith("native: decoupled.c compiled by ")
    assert hb.explain(hb.nn.DecoupledConv2d(3, 4, 3).double())["kernel"].startswith("eager")


@NEEDS_COMPILER
@pytest.mark.slow
def test_processes_that_build_at_once_all_get_a_whole_library(tmp_path):
    code = (
        "from hyperball.kernels.decoupled import native as n; "
        "assert n.library().epilogue is not None, n.library().reason"
    )
    environment = {"HYPERBALL_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(600) for process in started] == [0, 0, 0]
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("tuning", [("-march=x86-64",), ("-march=haswell",)])
def test_a_plainer_processor_gets_the_same_answers(tuning, monkeypatch, tmp_path):
    if builds.platform.machine() != "x86_64":
        pytest.skip("names processors of one family")
    monkeypatch.setenv("HYPERBALL_CACHE", str(tmp_path))
    monkeypatch.setattr(builds, "TUNING", (tuning,))
    native.library.cache_clear()
    try:
        for magnitude in native.MAGNITUDES:
            for angular in native.ANGULARS:
                layer = hb.nn.DecoupledConv2d(3, 11, 3, magnitude=LEARNED[magnitude], angular=angular)
                compare(layer, input_of(2, 3, 6, 6))
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        native.library.cache_clear()
