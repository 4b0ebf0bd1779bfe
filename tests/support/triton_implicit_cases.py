"""Convolutions as implicit GEMMs against torch's and the eager twins: run by kernels/test_triton_implicit.py.

On the CPU this file needs TRITON_INTERPRET=1 before Triton is imported, so it is collected in a process of its own.
"""

import copy
import ctypes
import functools
import math

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_cases import (
    BOUNDS,
    DEVICE,
    NATIVE,
    RELATIVE,
    WINDOW,
    angular_case,
    block_case,
    check,
    compare,
    error,
    module_gradients,
    radial_case,
    radius,
    random,
    with_rho,
)

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.kernels.triton import call
from hyperball.kernels.triton.decoupled import direct, launch, ops, passes, plan, twin
from hyperball.kernels.triton.decoupled.code import Code
from hyperball.kernels.triton.implicit import choice as implicit_choice
from hyperball.kernels.triton.implicit import kernels as implicit
from hyperball.kernels.triton.implicit.choice import Tile

SMALL = Tile(64, 64, 1, 16, 4, 2) if NATIVE else Tile(64, 16, 1, 16, 4, 2)
BLOCKS = SMALL._replace(NB=2)
DTYPES = [torch.bfloat16, torch.float16] if NATIVE else [torch.float32, torch.float16]
FIRST = DTYPES[0]


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(name="used", autouse=True, params=[SMALL])
def _used(request, monkeypatch):
    """All convolutions of stride 1 with such a tile; the kernels that ran."""
    ran = []

    def chosen(conv, dtype, device):
        plain = conv.groups != 1 or len(conv.taps) != 2 or set(conv.stride) != {1}
        return None if plain else request.param

    def run(self, *tensors):
        ran.append(self.kernel)
        launched(self, *tensors)

    launched = implicit.Described.__call__
    monkeypatch.setattr(implicit_choice, "chosen", chosen)
    monkeypatch.setattr(implicit.Described, "__call__", run)
    monkeypatch.setattr(dispatch, "DEVICES", (DEVICE,))
    forget()
    yield ran
    forget()


def forget():
    plan.plan_for.cache_clear()
    direct.plan_of_module.cache_clear()
    direct.LATEST.clear()


def both(ran):
    return {*ran} == {implicit.implicit_forward_kernel, implicit.implicit_backward_kernel}


def eight(code, parameters):
    """A case of six channels as one of eight."""
    return code, [radius(8, seed=k) if t is not None and t.shape == (6,) else t for k, t in enumerate(parameters)]


@pytest.mark.parametrize("name", hb.radial.names("magnitude") if not NATIVE else ["seg"])
def test_a_radial_row_in_the_convolutions_epilogue_equals_the_twins(name, used):
    check(*eight(*radial_case(name)), inputs=8, outputs=8, size=(3, 4), batch=2, dtype=FIRST)
    assert both(used)


@pytest.mark.parametrize("name", list(hb.angular.TABLE.rows) if not NATIVE else ["sigmoid"])
def test_an_angular_row_in_the_convolutions_epilogue_equals_the_twins(name, used):
    check(*eight(*angular_case(name)), inputs=8, outputs=8, size=(3, 4), batch=2, dtype=FIRST)
    assert both(used)


@pytest.mark.parametrize("used", [SMALL, BLOCKS], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_in_several_blocks_and_parts_equal_the_twin_in_every_dtype(dtype, used):
    check(RELATIVE, with_rho(radius(40)), inputs=24, outputs=40, size=(7, 5), batch=2, dtype=dtype)
    assert both(used)


@pytest.mark.parametrize(
    "case",
    [
        {"window": ([1, 1], [1, 2], [2, 1], 1), "size": (7, 6)},
        {"window": ([1, 1], [0, 0], [1, 1], 1), "kernel": (2, 3)},
        {"window": ([1, 1], [3, 2], [1, 1], 1), "kernel": (3, 2)},
        {"window": ([1, 1], [0, 0], [1, 1], 1), "kernel": (1, 1), "size": (5, 9)},
        {"window": ([1, 1], [1, 0], [1, 1], 1), "kernel": (1, 1)},
        {"window": ([1, 1], [0, 4], [1, 1], 1), "kernel": (1, 9), "size": (1, 13)},
    ],
)
def test_every_padding_dilation_and_odd_size_equals_the_twin(case, used):
    parameters = with_rho(radius(16), radius(16, seed=11), radius(16, seed=12))
    check(RELATIVE, parameters, inputs=8, outputs=16, batch=2, dtype=FIRST, **case)
    assert both(used)


def test_patches_longer_than_float16_holds_are_lowered_before_the_products_and_lifted_behind_them(used):
    x = (random(2, 8, 4, 4, seed=1) * 3e4).clamp(-6e4, 6e4).half()
    code = Code("tanh", "cosine", alpha=1.0, rho=1e5).text()

    def ours(x, w):
        return (ops.decoupled_conv(x, w, *[None] * 9, None, code, *WINDOW)[0],)

    def truth(x, w):
        return (twin.decoupled_conv(x, w, [None] * 9, None, code, *WINDOW),)

    compare(ours, truth, [x, random(16, 8, 3, 3, seed=2, dtype=torch.float16)], 1e-2)
    assert both(used)


def within_margins(shape, dtype=FIRST, margin=16384):
    """Memory for a map with its channels last, and all of what it lies in: 4096 before and behind it, NaN inside."""
    whole = torch.full((math.prod(shape) + 2 * margin,), 4096.0, device=DEVICE, dtype=dtype)
    whole[margin:-margin] = float("nan")
    images, channels, *size = shape
    return whole[margin:-margin].view(images, *size, channels).permute(0, 3, 1, 2), whole


@pytest.mark.parametrize("used", [SMALL, BLOCKS], indirect=True)
@pytest.mark.parametrize("size", [(7, 5), (3, 4)])
def test_nothing_is_written_beside_the_maps_and_all_of_them_is(size, used):
    x, w, held = (
        random(3, 24, *size, seed=1, dtype=FIRST),
        random(40, 24, 3, 3, seed=2, dtype=FIRST),
        with_rho(radius(40)),
    )
    made = ops.plan_of(x, w, held, RELATIVE.text(), ops.frozen(*WINDOW))
    n, filters, _, p, scalars = ops.prepare(x, None, w, held, None, None, made, False)
    (f, around_f), (y, around_y), (dx, around_dx) = (
        within_margins(shape) for shape in (made.output, made.output, x.shape)
    )
    made.implicit(x, filters, f, *passes.pointers(y, n, p, scalars, held))
    rows = random(2, x.shape[0] * size[0] * size[1], seed=3)
    dy, pulls = random(*made.output, seed=4, dtype=FIRST), random(40, seed=5)
    made.for_needs((True, True, *[False] * 9)).implicit(dy, filters, dx, x, *rows, pulls)
    assert both(used)
    for inside, whole in ((f, around_f), (y, around_y), (dx, around_dx)):
        assert inside.isfinite().all()
        assert int((whole == 4096.0).sum()) == 2 * 16384


def test_the_response_is_torchs_and_every_run_gives_the_same_bits():
    x, w = random(2, 16, 5, 6, seed=1, dtype=FIRST), random(24, 16, 3, 3, seed=2, dtype=FIRST)
    held = with_rho(radius(24))
    made = [ops.decoupled_conv(x, w, *held, None, RELATIVE.text(), [1, 1], [1, 1], [1, 1], 1) for _ in range(2)]
    for a, b in zip(*[outputs[:4] for outputs in made], strict=True):
        assert torch.equal(a, b)
    _, y, _, filters = made[0][:4]
    truth = torch.nn.functional.conv2d(x.double(), filters.double(), padding=1)
    assert error(y, truth) < BOUNDS[FIRST] / 4


def test_an_input_that_begins_anywhere_in_memory_is_read_right():
    held = random(1 + 2 * 8 * 5 * 5, seed=1, dtype=FIRST)
    x = held[1:].view(2, 5, 5, 8).permute(0, 3, 1, 2)
    w = random(16, 8, 3, 3, seed=2, dtype=FIRST)
    outputs = [
        ops.decoupled_conv(t, w, *with_rho(radius(16)), None, RELATIVE.text(), [1, 1], [1, 1], [1, 1], 1)[0]
        for t in (x, ops.dense(x.clone()))
    ]
    assert x.data_ptr() % 16
    assert torch.equal(*outputs)


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_only_the_gradients_that_are_asked_are_formed(needed, used):
    x, w = random(2, 8, 5, 4, seed=1, dtype=FIRST), random(16, 8, 3, 3, seed=2, dtype=FIRST)
    x.requires_grad_(needed[0]), w.requires_grad_(needed[1])
    out = ops.decoupled_conv(x, w, *with_rho(radius(16)), None, RELATIVE.text(), [1, 1], [1, 1], [1, 1], 1)[0]
    out.float().square().sum().backward()
    assert (x.grad is not None, w.grad is not None) == needed
    assert (implicit.implicit_backward_kernel in used) == needed[0]


def test_the_operator_passes_torchs_checks_with_the_convolution_inside(used):
    x, w = random(2, 8, 3, 4, seed=1, dtype=FIRST), random(8, 8, 3, 3, seed=2, dtype=FIRST)
    leaves = (x.requires_grad_(), w.requires_grad_(), *with_rho(radius(8).requires_grad_()))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        ops.decoupled_conv, (*leaves, None, RELATIVE.text(), [1, 1], [1, 1], [1, 1], 1), test_utils=checks
    )
    assert implicit.implicit_forward_kernel in used


@pytest.fixture(name="small_tiles")
def _small_tiles(monkeypatch):
    """Tiles of few rows, others for every kernel, of which several are on the way."""
    small = {"alone": (32, 4, 1, 2), "backward": (64, 4, 2, 3), "statistics": (64, 4, 1, 2), "reduce": (32, 4, 1, 3)}
    kept = (launch.tiles_for, passes.backward_launch, passes._statistics, passes._reduce)
    monkeypatch.setattr(launch, "TUNING", {**launch.TUNING, **small})
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("small_tiles")
def test_backwards_of_layers_and_of_blocks_may_be_cut_differently():
    check(RELATIVE, with_rho(radius(8)), inputs=8, outputs=8, size=(3, 4), batch=2, dtype=FIRST)
    block_case("none", True, False, batch=True, c=8, dtype=FIRST)
    block_case("prelu", False, True, batch=True, c=8, dtype=FIRST)


def test_tiles_are_on_the_way_where_none_needs_a_mask():
    device = torch.device(DEVICE, 0) if NATIVE else torch.device(DEVICE)
    assert launch.tiles_for("alone", 512, 64, device).ahead == launch.TUNING["alone"][3] > 1
    assert launch.tiles_for("alone", 511, 64, device).ahead == 1


@pytest.fixture(name="by_description")
def _launches_of_descriptions(monkeypatch):
    """What Triton compiles on a GPU, interpreted: after its first time a launch is given addresses and descriptions."""
    if NATIVE:
        return

    def pointer(address, dtype):
        return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)

    def interpreted(views):
        def first(self, kinds, tensors):
            count = 2 if views else 0
            read = [TensorDescriptor(t, *view) for t, view in zip(tensors[:count], getattr(self, "views", ()))]
            self.kernel[self.grid](*read, *tensors[count:], *self.rest)
            self.compiled[kinds] = (functools.partial(run, self.kernel, kinds, count), 0, None, lambda index: 0, None)

        return first

    def run(kernel, kinds, count, *arguments):
        held, rest = arguments[9 : 9 + count], arguments[9 + len(kinds) :]
        read = [
            TensorDescriptor(pointer(d.base.data_ptr(), kind), d.shape, d.strides, d.block_shape, d.padding)
            for d, kind in zip(held, kinds)
        ]
        given = [pointer(address, kind) for address, kind in zip(arguments[9 + count :], kinds[count:], strict=False)]
        kernel[arguments[:3]](*read, *given, *rest)

    monkeypatch.setattr(call.Launch, "first", interpreted(False))
    monkeypatch.setattr(implicit.Described, "first", interpreted(True))


def test_a_layer_by_addresses_equals_itself_by_tensors_and_in_float64(used, by_description, monkeypatch):
    plans, implicit_of = [], plan.implicit_of
    monkeypatch.setattr(plan, "implicit_of", lambda held, *rest: plans.append(held) or implicit_of(held, *rest))
    layer, x = hb.nn.DecoupledConv2d(8, 8, 3, padding=1).to(DEVICE, FIRST), random(2, 8, 5, 4, seed=1, dtype=FIRST)
    wanted = module_gradients(copy.deepcopy(layer).double(), x, torch.float64)
    runs = [module_gradients(layer, x) for _ in range(6)]
    made = plans[-1]
    assert both(used)
    assert made.at is not None
    assert made.for_given((True, True, True)).at is not None
    for ours in runs:
        assert torch.equal(ours[0], runs[0][0])
        assert torch.equal(ours[1], runs[0][1])
        assert all(error(a, b) < BOUNDS[FIRST] for a, b in zip(ours, wanted, strict=True))


def launcher_of_descriptions(launcher, expansions):
    """As Triton 3.6 writes it: what is beneath gets every description in pieces, which take time to make."""

    def inner(*arguments):
        passed = list(arguments[:COUNT])
        for argument in arguments[COUNT:]:
            if isinstance(argument, implicit.Description):
                expansions.append(argument.address)
                passed += ["map", argument.base.data_ptr(), *argument.shape]
            else:
                passed.append(argument)
        return launcher(*passed)

    return inner


COUNT = 13  # arguments before a kernel's own


class Launcher:
    """What a compiled kernel of Triton 3.6 runs by."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, *given):
        self.launch(*given[:5], False, False, None, None, *given[5:])


@pytest.mark.parametrize("wrapped", [True, False])
def test_descriptions_are_made_once_for_each_pair_of_addresses(wrapped):
    made, expansions = [], []

    def keep(*arguments):
        made.append(arguments)

    def plain(*arguments):
        keep(*arguments)

    views = (([4, 4], [4, 1], [2, 2]), ([8], [1], [2]))
    launch = implicit.Described(None, (5, 1), ("rest",), SMALL, views, torch.device("cpu"))
    run = Launcher(launcher_of_descriptions(keep, expansions) if wrapped else plain)
    ready = implicit.DirectDescribed(launch, (run, "function", "packed", lambda index: 0, None))
    for pair in ((16, 32), (16, 48), (16, 32), (16, 32)):
        ready(7, *pair, 64, 80)
    before = (5, 1, 1, 7, "function", False, False, None, None, "packed", None, None, None)
    assert [call[:COUNT] for call in made] == [before] * 4
    assert [call[-3:] for call in made] == [(64, 80, "rest")] * 4
    if wrapped:
        assert [call[COUNT:-3] for call in made] == [("map", 16, 4, 4, "map", at, 8) for at in (32, 48, 32, 32)]
        assert expansions == [16, 32, 16, 48]
    else:
        found = [tuple(read.address for read in call[COUNT:-3]) for call in made]
        assert found == [(16, at) for at in (32, 48, 32, 32)]
