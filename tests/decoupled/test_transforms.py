"""compile, export, ONNX, vmap and torch.func over decoupled layers."""

import copy
import itertools

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import hyperball as hb
from hyperball import functional as F

OPERATORS = [
    ("tanh", "cosine", "none"),
    ("ball(per='layer')", "sigmoid(learn_k=True)", "joint"),
    ("barron(learn_shape=True)", "linear", "linear"),
    ("linear + log", "square_cosine", "none"),
    ("sphere", "power(learn_b=True)", "split"),
    ("piecewise", "piecewise", "none"),
    ("seg(relative=False)", "rectified_cosine", "none"),
]


def layer_of(operator, **options) -> hb.nn.DecoupledConv2d:
    magnitude, angular, weighting = operator
    return hb.nn.DecoupledConv2d(
        4, 6, 3, padding=1, bias=True, magnitude=magnitude, angular=angular, weighting=weighting, **options
    )


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_in_one_graph_equals_eager_forward_and_backward(operator):
    layer, x = layer_of(operator, groups=2), torch.randn(2, 4, 6, 6, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        out = call(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("magnitude", ["piecewise", "tanh + log"])
def test_a_layer_that_trains_compiles_for_any_shape_in_one_graph(magnitude):
    layer = hb.nn.DecoupledConv2d(3, 8, 3, magnitude=magnitude)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (6, 9):
        x = torch.randn(2, 3, size, size, requires_grad=True)
        traced, eager = (
            torch.autograd.grad(call(x).square().sum(), [x, *layer.parameters()]) for call in (compiled, layer)
        )
        for ours, want in zip(traced, eager, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def test_a_function_with_texts_and_values_compiles_in_one_graph():
    x, w, rho = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3), torch.rand(6) + 1

    def function(x, w, rho):
        first = F.decoupled_conv2d(x, w, magnitude="linear + tanh(rho=2)", angular="sigmoid(k=0.5)")
        return first + F.decoupled_conv2d(x, w, magnitude=hb.radial.ball(rho=rho), angular=hb.angular.power(b=1.5))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w, rho), function(x, w, rho))


@pytest.mark.parametrize("operator", OPERATORS)
def test_compiled_without_gradients_equals_eager(operator):
    layer, x = layer_of(operator, groups=2).eval(), torch.randn(2, 4, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_inductor_compiles_a_training_step():
    layer, x = layer_of(OPERATORS[0]), torch.randn(2, 4, 6, 6, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    compiled = torch.compile(layer, fullgraph=True)
    got = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
    for ours, want in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)


def test_compiled_training_updates_the_running_mean():
    layer, x = layer_of(OPERATORS[0]), torch.randn(2, 4, 6, 6)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    running = layer.magnitude.running_length.clone()
    assert layer.magnitude.batches == 1
    layer.magnitude.batches.zero_()
    layer(x)
    torch.testing.assert_close(running, layer.magnitude.running_length)


@pytest.mark.parametrize("operator", OPERATORS)
def test_exported_equals_eager_with_a_dynamic_batch(operator):
    layer, x = layer_of(operator, groups=2).eval(), torch.randn(2, 4, 6, 6)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    more = torch.randn(5, 4, 6, 6)
    torch.testing.assert_close(program.module()(more), layer(more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_make_fx_records_a_layer_without_looking_at_its_input(dtype, tolerance):
    layer, x, more = layer_of(OPERATORS[0]).to(dtype).eval(), *torch.randn(2, 2, 4, 6, 6, dtype=dtype)
    torch.testing.assert_close(make_fx(layer)(x)(1e3 * more), layer(1e3 * more), **tolerance(dtype))


@pytest.mark.parametrize("operator", OPERATORS)
def test_onnx_runs_and_equals_eager(operator, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = layer_of(operator, stride=2).eval(), torch.randn(2, 4, 7, 7)
    torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(tmp_path / "layer.onnx"))
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), layer(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_vmap_over_inputs_equals_a_loop(operator):
    layer, xs = layer_of(operator, groups=2).eval(), torch.randn(3, 2, 4, 6, 6)
    torch.testing.assert_close(vmap(layer)(xs), torch.stack([layer(x) for x in xs]))


@pytest.mark.parametrize("transformed", [vmap, jacrev, jacfwd, lambda f: lambda x: jvp(f, (x,), (x,))])
@pytest.mark.parametrize(
    "layer, shape",
    [
        (hb.nn.DecoupledConv2d(3, 4, 3), (2, 1, 3, 5, 5)),
        (hb.nn.DecoupledConvTranspose1d(3, 4, 3, magnitude="linear + tanh"), (2, 1, 3, 5)),
        (hb.nn.DecoupledLinear(3, 4), (2, 5, 3)),
    ],
)
def test_a_relative_radius_that_trains_says_what_to_do_inside_a_transform(transformed, layer, shape):
    xs, layer = torch.randn(shape), copy.deepcopy(layer)
    x = xs if transformed is vmap else xs[0]
    with pytest.raises(RuntimeError, match=rf"{type(layer).__name__} got .*training mode.*eval.*relative=False"):
        transformed(layer)(x)
    assert layer.magnitude.batches == 0
    transformed(layer.eval())(x)


def test_a_relative_radius_trains_inside_a_transform_that_is_given_its_buffers():
    layer, xs = layer_of(OPERATORS[0]), torch.randn(3, 2, 4, 6, 6)
    twins = [copy.deepcopy(layer) for _ in xs]
    state, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    many = {name: torch.stack([held] * 3) for name, held in buffers.items()}
    out = vmap(lambda buffers, x: functional_call(layer, (state, buffers), (x,)))(many, xs)
    torch.testing.assert_close(out, torch.stack([twin(x) for twin, x in zip(twins, xs, strict=True)]))
    for index, twin in enumerate(twins):
        torch.testing.assert_close(many["magnitude.running_length"][index], twin.magnitude.running_length)


def test_vmap_over_weights_equals_a_loop():
    x, ws = torch.randn(2, 4, 6, 6), torch.randn(5, 3, 4, 3, 3)
    for magnitude, angular in itertools.product(("tanh", "log"), ("cosine", "square_cosine")):
        call = lambda w, m=magnitude, g=angular: F.decoupled_conv2d(x, w, magnitude=m, angular=g)  # noqa: E731
        torch.testing.assert_close(vmap(call)(ws), torch.stack([call(w) for w in ws]))


@pytest.mark.parametrize("operator", OPERATORS)
def test_per_sample_gradients_equal_a_loop(operator):
    layer, xs = layer_of(operator).eval(), torch.randn(3, 4, 6, 6)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x[None],)).square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(parameters, xs)
    for index, x in enumerate(xs):
        for name, value in grad(loss)(parameters, x).items():
            torch.testing.assert_close(together[name][index], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_forward_mode_equals_finite_differences(operator):
    layer = layer_of(operator).double().eval()
    x, v = torch.randn(2, 2, 4, 5, 5, dtype=torch.float64)
    _, tangent = jvp(layer, (x,), (v,))
    difference = (layer(x + 1e-6 * v) - layer(x - 1e-6 * v)) / 2e-6
    torch.testing.assert_close(tangent, difference, rtol=1e-5, atol=1e-5)
    assert tangent.abs().max() > 0


def test_hessians_by_forward_over_reverse_are_symmetric():
    layer, x = layer_of(OPERATORS[0]).double().eval(), torch.randn(4, 3, 3, dtype=torch.float64)
    matrix = hessian(lambda x: layer(x[None]).square().sum())(x).reshape(36, 36)
    torch.testing.assert_close(matrix, matrix.T)
    assert matrix.abs().max() > 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "layer, shape",
    [
        (hb.nn.DecoupledConv2d(3, 4, 3), (2, 3, 5, 5)),
        (hb.nn.DecoupledConvTranspose2d(3, 4, 3), (2, 3, 5, 5)),
        (hb.nn.DecoupledLinear(3, 4), (2, 3)),
        (hb.nn.NormalizedLinear(3, 4), (2, 3)),
    ],
)
def test_torch_fx_records_a_layer_as_one_call_like_torchs_own(layer, shape, frozen):
    norm = torch.nn.BatchNorm2d(4) if len(shape) == 4 else torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(copy.deepcopy(layer), norm).eval()
    model = hb.freeze(model) if frozen else model
    traced, x = torch.fx.symbolic_trace(model), torch.randn(shape)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize(
    "layer",
    [
        hb.nn.RobustPool2d(2, penalty="welsch(learn_c=True)"),
        hb.nn.RobustPool2d(penalty="huber"),
        hb.nn.Projection(2, radius=1.0),
        hb.nn.RobustBatchNorm2d(3),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_torch_fx_records_layers_with_a_radius_as_one_call(layer, training):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), copy.deepcopy(layer)).train(training)
    twin, x = copy.deepcopy(model), torch.randn(4, 3, 8, 8)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(traced(x), twin(x))


def test_torch_fx_records_weights_and_mask_of_a_pooling():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = hb.nn.RobustPool1d()

        def forward(self, x, mask):
            return self.pool(x, mask=mask)

    model, x, mask = Masked(), torch.randn(2, 3, 6), torch.rand(2, 1, 6) > 0.3
    mask[..., 0] = True
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x, mask), model(x, mask))


class Doubled(hb.nn.DecoupledLinear):
    def forward(self, input):
        return 2 * super().forward(input)


class Named(hb.nn.DecoupledLinear):
    """The same layer under another name."""


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, m, name):
        return isinstance(m, Doubled) or super().is_leaf_module(m, name)


def test_torch_fx_does_not_call_a_forward_of_ones_own_twice():
    x = torch.randn(2, 3)
    model = torch.nn.Sequential(Named(3, 4)).eval()
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    model = torch.nn.Sequential(Doubled(3, 4)).eval()
    with pytest.raises(TypeError, match=r"must have no Doubled that torch\.fx looks into"):
        torch.fx.symbolic_trace(model)
    traced = torch.fx.GraphModule(model, Leaves().trace(model))
    torch.testing.assert_close(traced(x), model(x))


def test_torch_fx_is_told_that_a_layer_alone_is_nothing_to_trace():
    with pytest.raises(ValueError, match=r"`root` must be a model.*got DecoupledConv2d"):
        torch.fx.symbolic_trace(hb.nn.DecoupledConv2d(3, 4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_equals_cpu(operator, dtype):
    layer, x = layer_of(operator, groups=2), torch.randn(4, 4, 9, 9)
    expected = layer.double()(x.double()).float()
    out = layer.to("cuda", dtype)(x.to("cuda", dtype))
    factor = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}[dtype]
    torch.testing.assert_close(out.float().cpu(), expected, rtol=factor, atol=factor)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
