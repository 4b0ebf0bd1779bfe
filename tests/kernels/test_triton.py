"""Triton kernels of decoupled layers: their rows, how they are chosen, and their cases, interpreted and on a GPU."""

import sys
from types import SimpleNamespace

import case_files
import pytest
import torch
from places import SUPPORT
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.decoupled import operation as decoupled
from hyperball.kernels.dispatch import Facts, choose
from hyperball.kernels.triton.decoupled import layer, ops
from hyperball.nn import learned
from hyperball.nn.decoupled import kept_window
from hyperball.training.process.distributed import synchronize

NAMES = ("triton_cases.py", "triton_layer_cases.py", "triton_direct_cases.py")
CASES = [SUPPORT / name for name in NAMES]
FACTS = Facts("cuda", torch.bfloat16, torch.bfloat16, outputs=64)


def choice(magnitude="tanh", angular="cosine", weighting="none", **facts):
    return choose(hb.radial.parse(magnitude), hb.angular.parse(angular), weighting, FACTS._replace(**facts))


def test_every_row_of_both_tables_has_a_triton_function():
    rows = pytest.importorskip("hyperball.kernels.triton.rows", exc_type=ImportError)
    assert set(rows.RADIAL) == set(dispatch.BUILT_IN["radial"]) == set(hb.radial.names("magnitude"))
    assert set(rows.ANGULAR) == set(dispatch.BUILT_IN["angular"]) == set(hb.angular.TABLE.rows)


def test_the_floor_of_a_relative_radius_is_one_number():
    maps = pytest.importorskip("hyperball.kernels.triton.maps", exc_type=ImportError)
    from hyperball.kernels.triton.decoupled import twin

    assert maps.FLOOR.value == twin.FLOOR == learned.FLOOR


@pytest.mark.parametrize("magnitude", hb.radial.names("magnitude"))
@pytest.mark.parametrize("angular", list(hb.angular.TABLE.rows))
def test_built_in_rows_run_on_triton_on_a_gpu(magnitude, angular):
    assert choice(magnitude, angular) == dispatch.Choice("triton", "cuda, bfloat16, channels last")


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"device": "cpu"}, "eager: cpu"),
        ({"device": "mps"}, "eager: mps"),
        ({"triton": False}, "eager: triton is not installed"),
        ({"rocm": True}, "eager: ROCm"),
        ({"exporting": True}, "eager: exported graphs hold torch's own operators"),
        ({"forward_mode": True}, "eager: needs forward-mode AD"),
        ({"transformed": True}, "eager: inside torch.func transforms"),
        ({"dtype": torch.float64}, "eager: float64"),
        ({"weight_dtype": torch.float32}, "eager: input and weight differ in dtype"),
        ({"weight_dtype": torch.float32, "autocast": True}, "triton: cuda, bfloat16, channels last"),
        ({"transposed": True}, "eager: transposed convolution"),
        ({"empty": True}, "eager: an empty input"),
        ({"groups": 32}, "eager: groups of fewer than 8 channels"),
        ({"outputs": 8192}, "eager: groups of more than 4096 channels"),
    ],
)
def test_what_speaks_against_triton_is_said(facts, reason):
    assert str(choice(**facts)) == reason


def test_operators_without_a_triton_kernel_say_why():
    assert choice("linear + tanh").reason == "a sum of magnitudes"
    assert choice(weighting="split").reason == "split weighting"
    hb.radial.register("own", gain=lambda n: 1 / (1 + n))
    try:
        assert choice("own").reason == "own is user-defined"
    finally:
        hb.radial.TABLE.rows.pop("own")


def test_explain_gives_the_gpus_kernel_and_its_reason():
    kernel_of = sys.modules["hyperball.explain"].kernel_of
    tanh, cosine = hb.radial.parse("tanh"), hb.angular.parse("cosine")
    assert kernel_of(tanh, cosine, "none", FACTS).startswith("triton: cuda, bfloat16, channels last")
    assert kernel_of(tanh, cosine, "split", FACTS).startswith("eager (split weighting), hand-written backward")
    assert "hand-written backward" in kernel_of(tanh, cosine, "none", FACTS._replace(device="cpu"))


def test_neither_the_library_nor_a_layer_on_the_cpu_imports_triton():
    case_files.check_without_triton("hb.nn.DecoupledConv2d(3, 4, 3)(torch.randn(1, 3, 5, 5)).sum().backward()")


def test_a_radius_in_units_of_all_processes_is_resolved_by_its_module(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    conv, x = hb.nn.DecoupledConv2d(8, 8, 3), torch.randn(1, 8, 5, 5)
    assert decoupled.chosen(x, conv.weight, conv.operator).kernel == "triton"
    synchronize(conv, torch.device("cpu"))
    assert decoupled.chosen(x, conv.weight, conv.operator) == ("eager", "a mean length over all processes")


def test_an_unresolved_radius_is_the_layers_own():
    conv = hb.nn.DecoupledConv2d(3, 4, 3, magnitude="tanh(rho=2)")
    code, parameters, relative = layer.operator_inputs(conv.operator, conv.weight)
    assert (code.unit, code.rho, code.alpha) == ("batch", None, 1.0)
    assert parameters[2] is conv.magnitude.ratio
    assert relative.running is conv.magnitude.running_length
    assert layer.operator_inputs(conv.eval().operator, conv.weight)[0].unit == "running"
    fixed = hb.nn.DecoupledConv2d(3, 4, 3, magnitude="tanh(rho=2, relative=False, learn=False)", weighting="joint")
    code, parameters, relative = layer.operator_inputs(fixed.operator, fixed.weight)
    assert (code.unit, code.rho, relative) == ("none", 2.0, None)
    torch.testing.assert_close(parameters[5], fixed.weight.flatten(1).norm(dim=1))
    assert parameters[6] is parameters[5]


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_pass_their_cases_in_the_interpreter(cases):
    case_files.check_in_the_interpreter(cases)


@pytest.mark.gpu
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_the_kernels_pass_their_cases_on_the_gpu(cases):
    case_files.check_on_the_gpu(cases)


def on_gpu(module, dtype=torch.bfloat16):
    return module.to("cuda", dtype).to(memory_format=torch.channels_last)


def sample(channels=32, dtype=torch.bfloat16, size=16):
    x = torch.randn(8, channels, size, size, device="cuda", dtype=dtype)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.gpu
@pytest.mark.parametrize("weighting", ["none", "linear", "joint"])
@pytest.mark.parametrize("magnitude", ["tanh", "ball(relative=False)", "seg(learn_alpha=True, per='layer')"])
def test_a_layer_on_the_gpu_equals_itself_on_the_cpu_in_float64(magnitude, weighting, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    conv = on_gpu(hb.nn.DecoupledConv2d(32, 24, 3, 2, 1, magnitude=magnitude, weighting=weighting), torch.float32)
    assert conv(sample(dtype=torch.float32)).grad_fn is not None
    twin = hb.nn.DecoupledConv2d(32, 24, 3, 2, 1, magnitude=magnitude, weighting=weighting).double()
    twin.load_state_dict({key: value.cpu().double() for key, value in conv.state_dict().items()})
    x = sample(dtype=torch.float32)
    grad = torch.randn(8, 24, 8, 8, device="cuda")
    ours = torch.autograd.grad(conv(x), [x, *conv.parameters()], grad)
    wide = x.detach().cpu().double().requires_grad_()
    truth = torch.autograd.grad(twin(wide), [wide, *twin.parameters()], grad.cpu().double())
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=2e-4, atol=2e-4 * float(b.abs().max()))
    if conv.magnitude.is_relative:
        torch.testing.assert_close(
            conv.magnitude.running_length.cpu().double(), twin.magnitude.running_length, rtol=1e-5, atol=0
        )


@pytest.mark.gpu
def test_compiled_layers_and_blocks_are_one_graph_and_give_the_same():
    for module in (hb.nn.DecoupledConv2d(32, 32, 3, padding=1), hb.nn.DecoupledConvBNAct(32, 32, 3, padding=1)):
        module, x = on_gpu(module), sample()
        eager = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
        compiled = torch.compile(module, fullgraph=True)
        ours = torch.autograd.grad(compiled(x).sum(), [x, *module.parameters()])
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.float().abs().max()))


@pytest.mark.gpu
def test_a_captured_step_replays_and_every_run_gives_the_same_bits():
    block, x = on_gpu(hb.nn.DecoupledConvBNAct(32, 32, 3, padding=1)), sample()

    def step():
        return torch.autograd.grad(block(x).float().square().sum(), [x, *block.parameters()])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = [grad.clone() for grad in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    conv_gradients = [0, 1]  # those of x and of the weight also depend on cuDNN's choice of algorithm
    for place, (a, b) in enumerate(zip(captured, first, strict=True)):
        if place in conv_gradients:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2 * float(b.float().abs().max()))
        else:
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_forward_mode_and_vmap_run_eagerly_on_the_gpu():
    conv, x = on_gpu(hb.nn.DecoupledConv2d(8, 8, 3, padding=1), torch.float32).eval(), sample(8, torch.float32)
    _, tangent = torch.func.jvp(conv, (x.detach(),), (torch.ones_like(x),))
    assert float(tangent.abs().max()) > 0
    mapped = torch.func.vmap(conv)(x.detach().unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(mapped, conv(x), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_autocast_gives_the_dtype_that_a_plain_convolution_gives():
    conv, plain = (on_gpu(make(8, 8, 3), torch.float32) for make in (hb.nn.DecoupledConv2d, nn.Conv2d))
    x = sample(8, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        assert conv(x).dtype == plain(x).dtype == torch.bfloat16
    assert torch.autograd.grad(conv(x).sum(), conv.weight)[0].dtype == torch.float32


@pytest.mark.gpu
def test_no_launch_waits_for_the_gpu():
    block, x = on_gpu(hb.nn.DecoupledConvBNAct(32, 32, 3, padding=1)), sample()
    block(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Compiled:
    """Stands for what Triton returns from a launch: its launcher takes nine arguments before the kernel's own."""

    def __init__(self, names, refuses=False):
        self.src = SimpleNamespace(fn=SimpleNamespace(arg_names=names))
        self.function, self.packed_metadata, self.refuses, self.ran = 7, (4, 1), refuses, []

    def run(self, *arguments):
        if self.refuses:
            raise TypeError("function takes exactly 3 arguments")
        self.ran.append(arguments)


class Kernel:
    """Stands for a Triton kernel: it counts the launches that go Triton's own way."""

    def __init__(self, refuses=False):
        self.compiled, self.launches = Compiled(["x", "out", "rows", "C"], refuses), 0

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launches += 1
            return self.compiled

        return launch


@pytest.fixture(name="prepared")
def _a_launch_without_a_gpu(monkeypatch):
    call = pytest.importorskip("hyperball.kernels.triton.call", exc_type=ImportError)
    active = SimpleNamespace(get_current_stream=lambda index: 99)
    monkeypatch.setattr(call.triton.runtime, "driver", SimpleNamespace(active=active))
    return lambda kernel: call.Launch(kernel, (3, 2), (5, 64), 4, torch.device("cpu"))


def test_a_launch_goes_tritons_way_once_and_then_straight_to_its_launcher(prepared):
    kernel, x, out = Kernel(), torch.zeros(64), torch.zeros(64)
    launch = prepared(kernel)
    for _ in range(3):
        launch(x, out)
    assert kernel.launches == 1
    direct = (3, 2, 1, 99, 7, (4, 1), None, None, None, x.data_ptr(), out.data_ptr(), 5, 64)
    assert kernel.compiled.ran == [direct, direct]


def test_other_dtypes_and_other_alignments_are_compiled_for_themselves(prepared):
    kernel, x, out = Kernel(), torch.zeros(64), torch.zeros(64)
    launch = prepared(kernel)
    for first in (x, x[1:], x.half()):
        launch(first, out)
        launch(first, out)
    assert kernel.launches == len(kernel.compiled.ran) == 3


def test_a_launcher_that_takes_other_arguments_is_left_to_triton(prepared):
    kernel, x = Kernel(refuses=True), torch.zeros(64)
    launch = prepared(kernel)
    for _ in range(3):
        launch(x, x)
    assert kernel.launches == 3


class Launcher:
    """Stands for a launcher of Triton: it calls what was compiled with more arguments than it is given."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, **changes):
        self.launched = []
        self.launch = lambda *arguments: self.launched.append(arguments)
        vars(self).update(changes)

    def __call__(self, x, y, z, stream, function, packed, *rest):
        self.launch(x, y, z, stream, function, False, None, packed, *rest)


class NestingLauncher(Launcher):
    def __call__(self, x, y, z, stream, function, packed, *rest):
        self.launch(x, y, z, stream, function, packed, rest)


def test_what_a_launcher_calls_is_called_with_what_it_passes_on():
    call = pytest.importorskip("hyperball.kernels.triton.call", exc_type=ImportError)
    launcher = Launcher()
    run, middle = call.below(launcher, 7, (4, 1))
    assert launcher.launched == []
    run(3, 2, 1, 99, *middle, "address", 64)
    launcher(3, 2, 1, 99, 7, (4, 1), None, None, None, "address", 64)
    assert launcher.launched[0] == launcher.launched[1]
    assert run is launcher.launch


@pytest.mark.parametrize("launcher", [NestingLauncher(), Launcher(global_scratch_size=8), Launcher(launch=None), print])
def test_a_launcher_that_does_more_is_called_itself(launcher):
    call = pytest.importorskip("hyperball.kernels.triton.call", exc_type=ImportError)
    assert call.below(launcher, 7, (4, 1)) == (launcher, (7, (4, 1), None, None, None))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        return function(*arguments, **(settings or {}))


@pytest.fixture(name="planned")
def _a_layer_that_runs_on_triton_here(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(ops.DecoupledConv, "apply", lambda *inputs: "launched")
    from hyperball.kernels.triton.decoupled import direct

    return lambda conv, x=None: direct.convolve(conv, torch.randn(2, 8, 5, 5) if x is None else x, kept_window)


def test_the_direct_way_is_left_where_something_else_has_a_say(planned):
    conv = hb.nn.DecoupledConv2d(8, 8, 3)
    assert planned(conv) == "launched"
    with torch.autocast("cpu", torch.bfloat16):
        assert planned(conv) is None
    with Watching():
        assert planned(conv) is None
    assert planned(conv, torch.randn(8, 5, 5)) is None
    assert planned(conv, torch.randn(2, 8, 5, 5, dtype=torch.float64)) is None
    assert planned(conv.to("meta")) is None
    assert planned(hb.nn.DecoupledConv2d(8, 8, 2, padding="same")) is None
    with pytest.raises(ValueError, match="8 channels"):
        planned(hb.nn.DecoupledConv2d(8, 8, 3), torch.randn(2, 7, 5, 5))


def test_a_kernel_is_chosen_anew_after_a_row_has_been_replaced():
    tanh, cosine = hb.radial.parse("tanh"), hb.angular.parse("cosine")
    assert dispatch.choose_again(tanh, cosine, "none", FACTS).kernel == "triton"
    own, row = hb.radial.parse("ball").row, hb.radial.TABLE.rows["tanh"]
    hb.radial.TABLE.rows["tanh"] = own
    try:
        assert dispatch.choose_again(tanh, cosine, "none", FACTS).reason == "a row that is not the table's"
    finally:
        hb.radial.TABLE.rows["tanh"] = row
    assert dispatch.choose_again(tanh, cosine, "none", FACTS).kernel == "triton"


@pytest.mark.parametrize(
    "text, plain",
    [("tanh", True), ("tanh(learn=False)", False), ("tanh(relative=False)", False), ("seg(learn_alpha=True)", False)],
)
def test_an_operator_is_plain_if_its_only_tensor_is_a_relative_radius(text, plain):
    assert hb.nn.DecoupledConv2d(3, 4, 3, magnitude=text).operator.plain is plain
    assert not hb.nn.DecoupledConv2d(3, 4, 3, magnitude=text, angular="sigmoid(learn_k=True)").operator.plain


def test_dense_inputs_keep_their_memory():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert ops.dense(x).data_ptr() == x.data_ptr()
    assert ops.dense(torch.randn(2, 3, 4, 5)).stride(1) == 1
