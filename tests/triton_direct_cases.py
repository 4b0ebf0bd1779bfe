"""Launches by address against those by tensor: run by test_triton.py, on a GPU or interpreted, as triton_cases.py.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy
import ctypes
import os

import pytest
import torch

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.triton import call, direct, ops
from hyperball.nn.decoupled import kept_window

NATIVE = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if NATIVE else "cpu"
CALLS = 3  # after which a layer runs by addresses, forward and backward
torch.backends.cudnn.allow_tf32 = False  # in a process of its own, as said above


@pytest.fixture(autouse=True)
def _launches_of_addresses(monkeypatch):
    """Layers run on Triton, and what it compiles on a GPU is interpreted here: later launches are given addresses."""
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    monkeypatch.setattr(direct, "TRIES", (2,))
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not NATIVE:
        monkeypatch.setattr(call.Launch, "first", first)
    yield
    torch.use_deterministic_algorithms(False)


def first(self, kinds, tensors):
    """Stands for the launch that compiles: what it keeps runs the same kernel on the numbers at given addresses."""
    self.kernel[self.grid](*tensors, *self.rest, num_warps=self.warps)

    def pointer(address, dtype):
        return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)

    def run(*arguments):
        grid, given = arguments[:3], arguments[9:]
        pointers = [pointer(address, kind) for address, kind in zip(given, kinds[: len(tensors)], strict=False)]
        self.kernel[grid](*pointers, *given[len(tensors) :], num_warps=self.warps)

    self.compiled[kinds] = (run, 0, None, lambda index: 0, None)


def random(*shape, seed=0, dtype=torch.float32):
    return ops.dense(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype))


def plan_of(layer, x):
    magnitude = layer.magnitude
    ratio, relative = magnitude._parameters.get("ratio"), magnitude.is_relative
    return direct.latest_plan(layer, x, layer.weight, ratio, relative, magnitude.training, kept_window)


def small_layer(**options):
    return hb.nn.DecoupledConv2d(3, 4, 3, **options).to(DEVICE, memory_format=torch.channels_last)


def sample(dtype=torch.float32):
    return random(2, 3, 4, 5, seed=1, dtype=dtype)


def gradients(layer, x, of_input=True):
    """The output, and the gradients of the input and of all parameters that are learned."""
    x = x.detach().requires_grad_(of_input)
    out = layer(x)
    leaves = [*([x] if of_input else []), *(p for p in layer.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out, leaves, random(*out.shape, seed=9, dtype=out.dtype))]


def is_same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def warmed(layer, x, of_input=True):
    """The layer after so many calls that it runs by addresses."""
    for _ in range(CALLS):
        gradients(layer, x, of_input)
    assert plan_of(layer, x).at is not None
    return layer


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.float32),
        ({"stride": 2, "angular": "square_cosine", "magnitude": "ball"}, torch.float32),
        ({"bias": True}, torch.float16),
        ({"magnitude": "linear", "angular": "square_cosine"}, torch.float32),
        ({"magnitude": "log", "stride": 2}, torch.float16),
        ({"magnitude": "tanh(learn=False)"}, torch.float32),
    ],
)
def test_launches_by_address_equal_those_by_tensor(options, dtype):
    layer, x = small_layer(padding=1, **options).to(dtype), sample(dtype)
    first_time = gradients(layer, x)
    assert plan_of(layer, x).at is None
    for _ in range(CALLS):
        assert is_same(gradients(layer, x), first_time)
    assert plan_of(layer, x).at is not None
    learned = len(list(layer.magnitude.parameters()))
    assert plan_of(layer, x).for_given((True,) * (2 + learned)).at is not None
    if layer.magnitude.is_relative:
        assert int(layer.magnitude.batches) == CALLS + 1
    layer.eval()
    outputs = [layer(x) for _ in range(3)]
    assert plan_of(layer, x).at is not None
    assert is_same(outputs[1:], outputs[:1] * 2)


@pytest.mark.parametrize(
    "options",
    [
        {"magnitude": "linear", "angular": "square_cosine"},
        {"magnitude": "tanh(learn=False)"},
        {"magnitude": "piecewise(learn_slopes=False, slopes=[0.5, 1.0])"},
        {"angular": "piecewise(learn_slopes=False, slopes=[0.5, 1.0])"},
    ],
)
def test_a_layer_of_numbers_equals_itself_in_float64_however_it_is_launched(options):
    layer, x = small_layer(padding=1, **options), sample()
    truth = gradients(copy.deepcopy(layer).double(), x.double())
    for _ in range(CALLS):
        for ours, exact in zip(gradients(layer, x), truth, strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.detach().abs().max()))


def test_a_layer_in_other_surroundings_gets_another_plan():
    layer, x = small_layer(padding=1), sample()
    plan = plan_of(warmed(layer, x), x)
    assert plan_of(layer, x) is plan
    others = [plan_of(layer, x[:1]), plan_of(layer.eval(), x), plan_of(layer.train().half(), x.half())]
    layer.stride = (2, 2)
    assert len({id(found) for found in (plan, *others, plan_of(layer, x.half()))}) == 5


@pytest.mark.parametrize("of_input, learned", [(False, True), (True, False)])
def test_gradients_that_are_not_needed_are_left_out(of_input, learned):
    layer, x = small_layer(), sample()
    layer.weight.requires_grad_(learned)
    first_time = gradients(layer, x, of_input)
    assert is_same(gradients(warmed(layer, x, of_input), x, of_input), first_time)


def test_saved_tensors_may_come_back_in_another_layout():
    layer, x = small_layer(), sample()
    truth = gradients(layer, x)
    for _ in range(CALLS):
        with torch.autograd.graph.save_on_cpu():
            again = gradients(layer, x)
        assert is_same(again, truth)


def test_an_input_at_an_odd_address_gives_the_same():
    layer, x = small_layer(), sample()
    odd = torch.empty(x.numel() + 1, device=DEVICE)[1:].as_strided(x.shape, x.stride(), 1).copy_(x)
    assert odd.data_ptr() % 16
    assert is_same(gradients(warmed(layer, x), odd), gradients(layer, x))


def test_a_second_derivative_is_that_of_the_layer_in_float64():
    layer, x = small_layer(), sample()
    truth = copy.deepcopy(layer).double()

    def penalty(layer, x):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), layer.weight)[0].double()

    exact = penalty(truth, x.double())
    ours = penalty(warmed(layer, x), x)
    assert float((ours - exact).norm() / exact.norm()) < 1e-4


def test_a_batch_moves_the_running_mean_by_address_too():
    layer, x = small_layer(), sample()
    other = copy.deepcopy(layer)
    before = warmed(layer, x).magnitude.running_length.clone()
    version = layer.magnitude.running_length._version
    gradients(layer, 3 * x)
    gradients(other, 3 * x)
    count = int(layer.magnitude.batches)
    moved = before + (other.magnitude.running_length - before) / count
    torch.testing.assert_close(layer.magnitude.running_length, moved)
    assert layer.magnitude.running_length._version > version
    assert count == CALLS + 1
