"""Launches by address against those by tensor: run by kernels/test_triton.py, on a GPU or interpreted.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy
import ctypes
import os

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.triton import call
from hyperball.kernels.triton.decoupled import direct, ops
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


def test_a_checkpoint_computes_again_what_it_computed():
    layer, x = small_layer(padding=1).eval(), sample()
    truth = gradients(layer, x)
    for _ in range(CALLS + 1):
        x = x.detach().requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False)
        seed = random(*out.shape, seed=9)
        assert is_same([out, *torch.autograd.grad(out, [x, *layer.parameters()], seed)], truth)
        gradients(layer, x)


def part_of(t, first):
    """t as a view of a larger memory, in which it begins so many numbers behind the start."""
    held = torch.empty(t.numel() + first, device=DEVICE, dtype=t.dtype)
    return held.as_strided(t.shape, t.stride(), first).copy_(t)


@pytest.mark.parametrize("first", [4, 1])  # a multiple of 16 bytes, and none
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_weights_and_inputs_may_be_parts_of_larger_tensors(first, layout):
    layer, x = small_layer(padding=1).to(memory_format=layout), sample()
    truth = gradients(warmed(layer, x), x)
    for name, held in list(layer.named_parameters()):
        owner, _, own = name.rpartition(".")
        setattr(layer.get_submodule(owner), own, torch.nn.Parameter(part_of(held.detach(), first)))
    layer.magnitude.running_length = part_of(layer.magnitude.running_length, first)
    for _ in range(CALLS):
        for ours, wanted in zip(gradients(layer, part_of(x, first)), truth, strict=True):
            assert float((ours - wanted).norm() / wanted.norm()) < 1e-6  # cuDNN looks at addresses
    assert layer.weight.storage_offset() == first


def test_inputs_of_any_layout_and_gradients_of_any_layout_give_the_same():
    layer, x = small_layer(padding=1), sample()
    warmed(layer, x)
    for held in (x.contiguous(), x.expand(3, *x.shape)[1], x.flip(0).flip(0), torch.cat([x, x], 1)[:, :3]):
        assert is_same(gradients(layer, held), gradients(layer, x))
    leaf = x.detach().requires_grad_()
    expanded = torch.autograd.grad(layer(leaf).sum(), [leaf, *layer.parameters()])
    ones = torch.ones_like(layer(x)).contiguous()
    assert is_same(expanded, torch.autograd.grad(layer(leaf), [leaf, *layer.parameters()], ones))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_and_running_means_are_the_same(mode):
    layer, x = small_layer(padding=1), sample()
    other = warmed(copy.deepcopy(layer), x)
    for each in range(CALLS + 1):
        with mode():
            out = layer((1 + each) * x)
        assert torch.equal(out, gradients(other, (1 + each) * x)[0])
        assert out.is_inference() == (mode is torch.inference_mode)
    assert int(layer.magnitude.batches) == CALLS + 1
    assert is_same(gradients(layer, x), gradients(other, x))


def test_memory_that_is_freed_and_used_again_changes_no_gradient():
    layer, x = small_layer(padding=1), sample()
    truth = gradients(warmed(layer, x), x)
    leaf = x.detach().requires_grad_()
    outputs = [layer(leaf.clone(memory_format=torch.preserve_format)) for _ in range(3)]
    _garbage = [torch.full_like(outputs[0], 7.0) for _ in range(20)]
    for out in outputs:
        seed = random(*out.shape, seed=9)
        assert is_same([out, *torch.autograd.grad(out, [leaf, *layer.parameters()], seed, retain_graph=True)], truth)
        assert is_same(torch.autograd.grad(out, [leaf, *layer.parameters()], seed), truth[1:])


@pytest.mark.parametrize("changed", ["input", "weight"])
def test_what_a_backward_needs_must_not_change_before_it(changed):
    layer, x = small_layer(padding=1), sample()
    warmed(layer, x)
    held = x.clone(memory_format=torch.preserve_format)
    out = layer(held)
    with torch.no_grad():
        (held if changed == "input" else layer.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_layers_that_share_a_plan_share_nothing_else():
    torch.manual_seed(0)
    layers, x = [small_layer(padding=1) for _ in range(2)], sample()
    with torch.no_grad():
        layers[1].weight.add_(0.1)
    truth = [gradients(layer, (1 + k) * x) for k, layer in enumerate(layers)]
    for layer in layers:
        warmed(layer, x)
    assert plan_of(layers[0], x) is plan_of(layers[1], x)
    leaves = [((1 + k) * x).detach().requires_grad_() for k in range(2)]
    outputs = [layer(leaf) for layer, leaf in zip(layers, leaves, strict=True)]
    for k in (1, 0):
        found = torch.autograd.grad(outputs[k], [leaves[k], *layers[k].parameters()], random(*outputs[k].shape, seed=9))
        assert is_same([outputs[k], *found], truth[k])


def test_shapes_that_take_turns_give_what_each_gives_alone():
    layer, x = small_layer(padding=1).eval(), sample()
    inputs = [x, x[:1], x[:, :, :3], random(4, 3, 4, 5, seed=1)]
    truth = [gradients(layer, held) for held in inputs]
    for _ in range(CALLS + 1):
        for held, wanted in zip(inputs, truth, strict=True):
            assert is_same(gradients(layer, held), wanted)
    assert all(plan_of(layer, held).at is not None for held in inputs)


def test_an_empty_batch_and_an_image_alone_run_as_before():
    layer, x = warmed(small_layer(padding=1).eval(), sample().clone()), sample()
    empty = x[:0].detach().requires_grad_()
    out = layer(empty)
    assert out.shape == (0, 4, 4, 5)
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), [empty, layer.weight]))
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


def test_parameters_that_are_replaced_are_read_where_they_are():
    layer, x = warmed(small_layer(padding=1).eval(), sample()), sample()
    other = small_layer(padding=1).eval()
    layer.load_state_dict(other.state_dict())
    assert is_same(gradients(layer, x), gradients(other, x))
    layer.weight = torch.nn.Parameter(2 * other.weight.detach())
    other.weight.data = 2 * other.weight.data
    assert is_same(gradients(layer, x), gradients(other, x))
    swapped = {"weight": 3 * other.weight.detach(), "magnitude.ratio": other.magnitude.ratio.detach() + 0.5}
    with torch.no_grad():
        made = torch.func.functional_call(layer, swapped, (x,))
        other.weight.mul_(1.5), other.magnitude.ratio.add_(0.5)
    torch.testing.assert_close(made, other(x))


def test_transforms_autocast_and_other_dtypes_go_their_own_way_past_a_warm_plan():
    layer, x = warmed(small_layer(padding=1).eval(), sample()), sample()
    exact = copy.deepcopy(layer).double()
    wanted = exact(x.double())
    one_by_one = torch.func.vmap(layer)(x.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(one_by_one.double(), wanted, rtol=1e-4, atol=1e-5)
    slope = torch.func.grad(lambda held: layer(held).square().sum())(x)
    leaf = x.double().requires_grad_()
    (truth,) = torch.autograd.grad(exact(leaf).square().sum(), leaf)
    torch.testing.assert_close(slope.double(), truth, rtol=1e-4, atol=1e-4)
    with pytest.raises((RuntimeError, TypeError)):
        layer(x.half())
    with torch.autocast(DEVICE, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_tensors_of_other_devices_are_refused_and_not_read():
    layer, x = warmed(small_layer(padding=1), sample()), sample()
    layer.weight = torch.nn.Parameter(layer.weight.detach().to("meta"))
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        layer(x)


def test_a_running_mean_elsewhere_is_not_read_by_its_address():
    layer, x = small_layer(padding=1).eval(), sample()
    at = plan_of(warmed(layer, x), x).at
    running = layer.magnitude.running_length
    assert at.serves(running)
    assert not at.serves(running.to("meta"))
    assert not at.serves(running.half())
    layer.magnitude.running_length = running.to("meta")
    with pytest.raises(RuntimeError, match="running means must be on the device of the input"):
        layer(x)
