"""RobustPool1d and RobustPool2d as modules: parameters, state, copies, graphs, exports and bad arguments."""

import copy
import pickle

import pytest
import torch
from pooling_reference import ALL, rows
from torch import nn

from hyperball import radial
from hyperball.functional.pooling import (
    robust_pool,
    robust_pool1d,
    robust_pool2d,
    robust_pool_vectors,
    segment_robust_pool,
)
from hyperball.nn.pooling import RobustPool1d, RobustPool2d

X = rows(2 * 3, 56, 0.2).reshape(2, 3, 7, 8).float()
LAYERS = {
    "global": lambda: RobustPool2d(),
    "windows, c learned": lambda: RobustPool2d(3, 2, 1, penalty="pseudo_huber(c=0.7, learn_c=True)"),
    "per channel": lambda: RobustPool2d(2, penalty="barron(learn_c=True, learn_shape=True)", channels=3),
    "welsch": lambda: RobustPool2d(3, 1, 1, penalty="welsch(c=4)"),
    "truncated": lambda: RobustPool2d(penalty="truncated_quadratic(c=1.5)"),
    "median": lambda: RobustPool2d(3, 2, 1, penalty="absolute"),
    "scaled": lambda: RobustPool2d(3, 2, 1, penalty="huber(c=1.5)", scale="mad"),
    "predicted": lambda: RobustPool2d(predict_c=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1))),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
SLOW_TO_TRACE = ("scaled", "predicted")
traced_layers = pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[pytest.mark.slow] * (name in SLOW_TO_TRACE), id=name) for name, make in LAYERS.items()],
)


@pytest.mark.parametrize("text", ALL)
def test_a_module_is_one_call_of_its_function(text):
    assert torch.equal(RobustPool2d(3, 2, 1, penalty=text)(X), robust_pool2d(X, 3, 2, 1, penalty=text))
    assert torch.equal(RobustPool2d(penalty=text)(X), robust_pool(X, (2, 3), penalty=text, keepdim=True))
    line = X.flatten(2)
    assert torch.equal(RobustPool1d(4, penalty=text)(line), robust_pool1d(line, 4, penalty=text))
    assert RobustPool1d(penalty=text)(line).shape == (2, 3, 1)


def test_what_is_learned_is_a_parameter_and_what_is_not_is_none():
    assert dict(RobustPool2d().state_dict()) == {}
    learned = RobustPool2d(penalty="barron(c=2, shape=1.5, learn_c=True, learn_shape=True)")
    assert {name: tuple(p.shape) for name, p in learned.named_parameters()} == {"log_c": (), "logit_shape": ()}
    held = learned.penalty().parameters
    assert held["rho"].item() == pytest.approx(2.0)
    assert held["shape"].item() == pytest.approx(1.5)
    channels = RobustPool2d(penalty="huber(learn_c=True)", channels=5)
    assert tuple(channels.log_c.shape) == (5,)
    assert tuple(RobustPool2d(penalty='huber(learn_c=True, per="layer")', channels=5).log_c.shape) == ()
    fixed = RobustPool2d(penalty=radial.huber(c=torch.tensor([1.0, 2.0, 3.0])))
    assert list(fixed.state_dict()) == ["fixed_c"]
    assert list(fixed.parameters()) == []


def test_a_learned_shape_stays_between_zero_and_three_and_c_above_zero():
    layer = RobustPool2d(penalty="barron(learn_c=True, learn_shape=True)")
    with torch.no_grad():
        for raw in (-50.0, 50.0):
            layer.logit_shape.fill_(raw)
            layer.log_c.fill_(raw / 5)
            held = layer.penalty().parameters
            assert 0 <= held["shape"] <= 3
            assert held["rho"] > 0
            assert layer(X).isfinite().all()


def test_learning_finds_the_radius_that_ignores_outliers():
    torch.manual_seed(0)
    layer = RobustPool1d(penalty="huber(c=20, learn_c=True)")
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.2)
    losses = []
    for step in range(40):
        x = rows(64, 25, 0.25, seed=step).float()[:, None]
        loss = layer(x).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
    assert layer.penalty().parameters["rho"] < 5


@layers
def test_state_copies_and_pickles_keep_the_output(make):
    layer = make()
    y = layer(X)
    other = make()
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(X), y)
        assert repr(twin) == repr(layer)


@layers
def test_meta_device_half_precision_and_autocast(make):
    layer = make()
    y = layer(X)
    assert copy.deepcopy(layer).to("meta")(X.to("meta")).shape == y.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(X).dtype == torch.float32
        low = layer(X.bfloat16())
    assert low.dtype == torch.bfloat16
    wide = copy.deepcopy(layer).double()(X.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), y, rtol=1e-4, atol=1e-4)


def test_factory_arguments_and_to_empty():
    layer = RobustPool2d(penalty="huber(c=3, learn_c=True)", channels=3, device="meta", dtype=torch.float64)
    assert layer.log_c.device.type == "meta"
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    torch.testing.assert_close(layer.log_c.exp(), torch.full((3,), 3.0, dtype=torch.float64))


@layers
def test_vmap_and_forward_mode(make):
    layer = make().double()
    x = X.double()
    assert torch.equal(torch.func.vmap(lambda x: layer(x))(torch.stack([x, x + 1]))[1], layer(x + 1))
    dx = torch.randn_like(x)
    _, moved = torch.func.jvp(lambda x: layer(x), (x,), (dx,))
    _, pull = torch.func.vjp(lambda x: layer(x), x)
    v = torch.randn_like(moved)
    torch.testing.assert_close((moved * v).sum(), (pull(v)[0] * dx).sum())


def compare_compiled(layer, backend):
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), layer(X))
    x = X.clone().requires_grad_()
    held = [x, *layer.parameters()]
    found = torch.autograd.grad(compiled(x).square().sum(), held)
    expected = torch.autograd.grad(layer(x).square().sum(), held)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@traced_layers
def test_compiled_without_a_break_it_gives_the_same_values_and_gradients(make):
    compare_compiled(make(), "aot_eager")


def test_inductor_gives_the_same_values_and_gradients():
    compare_compiled(LAYERS["global"](), "inductor")


@pytest.mark.slow
@layers
def test_inductor_gives_the_same_values_and_gradients_for_all(make):
    compare_compiled(make(), "inductor")


@traced_layers
def test_exported_it_gives_the_same_values(make):
    layer = make()
    exported = torch.export.export(layer, (X,), strict=False)
    assert not any("hyperball" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(X + 0.1), layer(X + 0.1), rtol=1e-4, atol=1e-5)


def export_to_onnx(layer, path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(layer.eval(), (X,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {session.get_inputs()[0].name: (X + 0.1).numpy()})
    torch.testing.assert_close(torch.from_numpy(y), layer(X + 0.1), rtol=1e-4, atol=1e-5)


def test_onnx_gives_the_same_values(tmp_path):
    export_to_onnx(LAYERS["global"](), str(tmp_path / "pool.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "global"])
def test_onnx_gives_the_same_values_for_the_rest(name, tmp_path):
    export_to_onnx(LAYERS[name](), str(tmp_path / "pool.onnx"))


def test_the_layer_says_what_it_is():
    assert repr(RobustPool2d()) == "RobustPool2d(penalty='huber')"
    shown = repr(RobustPool2d(3, 2, 1, penalty="welsch(c=0.5, learn_c=True)", ceil_mode=True, scale="mad", channels=4))
    for part in (
        "kernel_size=3",
        "stride=2",
        "padding=1",
        "welsch(c=0.5, learn_c=True)",
        "ceil_mode",
        "mad",
        "channels=4",
    ):
        assert part in shown


V = torch.zeros(4, 6)
REFUSED = [
    (lambda: robust_pool(V, penalty="hubert"), ValueError, "huber"),
    (lambda: robust_pool(V, penalty="tanh"), ValueError, "not a penalty"),
    (lambda: robust_pool(V, penalty="huber + welsch"), ValueError, "`penalty`"),
    (lambda: robust_pool(V, penalty="huber(c=0)"), ValueError, "`c` must be > 0"),
    (
        lambda: robust_pool(V, penalty=radial.huber(c=torch.tensor([1.0, -1.0, 1.0, 1.0]))),
        ValueError,
        "`c` must be > 0",
    ),
    (lambda: robust_pool(V, penalty=radial.huber(c=torch.ones(5))), ValueError, "`c` must broadcast"),
    (lambda: robust_pool(V.long()), TypeError, "`x`"),
    (lambda: robust_pool(torch.zeros(3, 0)), ValueError, "`dim` must not name an empty dimension"),
    (lambda: robust_pool(V, 2), ValueError, "`dim`"),
    (lambda: robust_pool(V, (0, 0)), ValueError, "`dim` must not repeat"),
    (lambda: robust_pool(V, ()), ValueError, "`dim`"),
    (lambda: robust_pool(V, weights=torch.ones(5)), ValueError, "`weights` must broadcast"),
    (lambda: robust_pool(V, weights=-torch.ones(6)), ValueError, "`weights` must be >= 0"),
    (lambda: robust_pool(V, mask=torch.ones(6)), TypeError, "`mask` must be a bool"),
    (lambda: robust_pool(V, mask=torch.ones(3, 6, dtype=torch.bool)), ValueError, "`mask` must broadcast"),
    (lambda: robust_pool(V, scale="std"), ValueError, "`scale`"),
    (lambda: robust_pool2d(V, 2), ValueError, "`x` must be"),
    (lambda: robust_pool2d(X, 0), ValueError, "`kernel_size`"),
    (lambda: robust_pool2d(X, 9), ValueError, "`kernel_size`"),
    (lambda: robust_pool2d(X, 2, 0), ValueError, "`stride`"),
    (lambda: robust_pool2d(X, 2, 1, 2), ValueError, "`padding` must be at most half"),
    (lambda: robust_pool2d(X, None, 2), ValueError, "`stride`"),
    (lambda: robust_pool2d(X, (2, 2, 2)), ValueError, "`kernel_size`"),
    (
        lambda: segment_robust_pool(V, torch.tensor([0, 3, 2, 4])),
        ValueError,
        "`offsets` must not decrease, got 3 before 2",
    ),
    (lambda: segment_robust_pool(V, torch.tensor([0, 3])), ValueError, "`offsets` must begin at 0 and end at 4"),
    (lambda: segment_robust_pool(V, torch.tensor([0.0, 4.0])), TypeError, "`offsets`"),
    (lambda: segment_robust_pool(V, torch.tensor([[0, 4]])), ValueError, "`offsets`"),
    (lambda: robust_pool_vectors(V, penalty="absolute"), ValueError, "pseudo_huber"),
    (lambda: robust_pool_vectors(V[0]), ValueError, "`x` must be"),
    (lambda: RobustPool2d(None, 2), ValueError, "`kernel_size`"),
    (lambda: RobustPool2d(0), ValueError, "`kernel_size`"),
    (lambda: RobustPool2d(2, padding=2), ValueError, "`padding` must be at most half"),
    (lambda: RobustPool2d(penalty='huber(learn_c=True, per="channel")'), ValueError, "`channels`"),
    (lambda: RobustPool2d(penalty="huber(relative=True)"), ValueError, "scale='mad'"),
    (lambda: RobustPool2d(penalty="barron(learn_alpha=True)"), ValueError, "learn_alpha"),
    (lambda: RobustPool2d(penalty="barron(shape=3, learn_shape=True)"), ValueError, "`shape`"),
    (lambda: RobustPool2d(penalty="huber(learn_c=True)", predict_c=nn.Identity()), ValueError, "`c`"),
    (lambda: RobustPool2d(channels=0), ValueError, "`channels`"),
]


@pytest.mark.parametrize("call, error, message", REFUSED)
def test_a_wrong_argument_is_refused_by_name(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_no_rows_are_no_rows():
    assert robust_pool(torch.zeros(0, 5)).shape == (0,)
    assert robust_pool2d(torch.zeros(0, 3, 4, 4), 2).shape == (0, 3, 2, 2)
    assert segment_robust_pool(torch.zeros(0, 2), torch.tensor([0])).shape == (0, 2)
    assert segment_robust_pool(torch.zeros(0, 2), torch.tensor([0, 0])).isnan().all()
    assert robust_pool_vectors(torch.zeros(0, 3, 2)).shape == (0, 2)
    x = torch.zeros(3, 0, requires_grad=True)
    y = segment_robust_pool(x, torch.tensor([0, 2, 3]))
    assert y.shape == (2, 0)
    assert torch.autograd.grad(y.sum(), x)[0].shape == (3, 0)


@pytest.mark.parametrize("text", ALL)
def test_the_meta_device_gives_shapes(text):
    x = torch.empty(4, 3, 5, device="meta")
    assert robust_pool(x, (0, 2), penalty=text).shape == (3,)
    assert segment_robust_pool(x, torch.tensor([0, 3, 4]), penalty=text).shape == (2, 3, 5)
    if text != "absolute":
        assert robust_pool_vectors(x, penalty=text).shape == (4, 5)
