"""Convolutions as implicit GEMMs with the decoupled epilogue: when they run, their tiles, and their cases."""

import copy
import sys

import case_files
import pytest
import torch
from places import SUPPORT

import hyperball as hb
from hyperball.kernels.triton.implicit import choice as implicit_choice
from hyperball.kernels.triton.implicit.choice import Conv, box, chosen, filled, objection, padded

CASES = SUPPORT / "triton_implicit_cases.py"
CUDA = torch.device("cuda", 0)
CONV = Conv(64, 64, 512 * 32 * 32, (3, 3), (1, 1), 1)


@pytest.fixture(name="card", autouse=True)
def _card(monkeypatch):
    monkeypatch.setattr(implicit_choice, "card", lambda index: ((9, 0), 132, True))


@pytest.mark.parametrize(
    "changed, runs",
    [
        ({}, True),
        ({"backward": True}, True),
        ({"inputs": 192, "outputs": 192}, True),
        ({"inputs": 384, "outputs": 384}, True),
        ({"inputs": 96, "outputs": 96}, False),
        ({"inputs": 96, "outputs": 96, "backward": True}, True),
        ({"inputs": 3}, False),
        ({"inputs": 1024, "outputs": 64}, False),
        ({"stride": (2, 2)}, False),
        ({"groups": 2}, False),
        ({"taps": (3, 3, 3), "stride": (1, 1, 1)}, False),
        ({"taps": (1, 3)}, False),
        ({"taps": (1, 1)}, False),
        ({"taps": (), "stride": ()}, False),
        ({"positions": 128 * 64}, False),
        ({"positions": 2**31}, False),
    ],
)
def test_the_implicit_gemm_runs_where_it_was_faster(changed, runs):
    assert (chosen(CONV._replace(**changed), torch.bfloat16, CUDA) is not None) == runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_and_devices_are_left_to_torch(dtype):
    assert chosen(CONV, dtype, CUDA) is None
    assert chosen(CONV, torch.bfloat16, torch.device("cpu")) is None


@pytest.mark.parametrize("facts", [((8, 0), 108, True), ((10, 0), 148, True), ((9, 0), 132, False)])
def test_other_cards_and_older_tritons_are_left_to_torch(facts, monkeypatch):
    monkeypatch.setattr(implicit_choice, "card", lambda index: facts)
    assert chosen(CONV, torch.bfloat16, CUDA) is None


def test_what_speaks_against_it_is_said():
    assert objection(CONV) == ""
    assert "stride" in objection(CONV._replace(stride=(2, 2)))
    assert "96 to 96 channels" in objection(CONV._replace(inputs=96, outputs=96))


@pytest.mark.parametrize(
    "channels, dtype, text",
    [
        ((64, 64), torch.bfloat16, "an implicit GEMM with the epilogue inside, forward and backward"),
        ((96, 96), torch.float16, "an implicit GEMM with the epilogue inside, backward"),
        ((3, 64), torch.bfloat16, "cuDNN's: 3 to 64 channels"),
        ((64, 64), torch.float32, "cuDNN's: float32"),
    ],
)
def test_explain_says_what_convolves_and_why(channels, dtype, text, monkeypatch):
    monkeypatch.setattr(sys.modules["hyperball.explain"], "kernel_of", lambda *_: "triton: here")
    layer = hb.nn.DecoupledConv2d(*channels, 3, padding=1).to(dtype)
    assert hb.explain(layer)["convolution"].startswith(text)


@pytest.mark.parametrize(
    "programs, full", [(132, True), (133, False), (128, True), (100, False), (264, True), (1000, True)]
)
def test_programs_fill_the_card_or_not(programs, full):
    assert filled(programs, 132) == full


@pytest.mark.parametrize(
    "positions, sizes, best",
    [
        (128, (512, 32, 32), (1, 4, 32)),
        (256, (512, 16, 16), (1, 16, 16)),
        (256, (512, 8, 8), (4, 8, 8)),
        (128, (128, 56, 56), (2, 8, 8)),
        (256, (128, 28, 28), (16, 4, 4)),
        (128, (1, 1, 401408), (1, 1, 128)),
    ],
)
def test_the_box_of_a_tile_wastes_nothing_of_common_maps(positions, sizes, best):
    assert box(positions, *sizes) == best
    volume = 1
    for size, block in zip(sizes, best, strict=True):
        volume *= padded(size, block)
    assert volume == sizes[0] * sizes[1] * sizes[2]


def test_the_kernels_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)


@pytest.mark.gpu
def test_the_kernels_pass_their_cases_on_the_gpu():
    case_files.check_on_the_gpu(CASES)


def test_maps_of_any_size_fit_a_grid():
    implicit = pytest.importorskip("hyperball.kernels.triton.implicit.kernels", exc_type=ImportError)
    shape, weight, window = (2**9 - 1, 64, 2**11, 2**11), (64, 64, 3, 3), ((1, 1), (1, 1), (1, 1), 1)
    for tile in (implicit_choice.NARROW, implicit_choice.TRIPLE, implicit_choice.WIDE, implicit_choice.ODD):
        grid = implicit.backward_launch(shape, shape, weight, window, tile, CUDA, True).grid
        assert grid[0] * tile.BM * tile.BO * tile.NB >= shape[0] * shape[1] * shape[2] * shape[3]
        assert grid[0] < 2**31
        assert grid[1:] == (1, 1)  # of which CUDA allows 65,535


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("images, channels, size", [(64, 64, 32), (64, 96, 32), (128, 192, 16), (512, 384, 8)])
def test_a_captured_step_by_its_chosen_tile_equals_the_convolution_and_the_passes(images, channels, size, monkeypatch):
    monkeypatch.undo()
    if torch.cuda.get_device_capability() != implicit_choice.CAPABILITY:
        pytest.skip("no tiles for this card")
    from hyperball.kernels.triton.decoupled import direct, plan
    from hyperball.kernels.triton.implicit import kernels as implicit

    launched, ran = implicit.Described.__call__, set()
    monkeypatch.setattr(implicit.Described, "__call__", lambda self, *t: ran.add(self.kernel) or launched(self, *t))
    torch.manual_seed(0)
    conv = hb.nn.DecoupledConv2d(channels, channels, 3, padding=1).to("cuda", torch.bfloat16)
    x, v = torch.randn(2, images, channels, size, size, device="cuda", dtype=torch.bfloat16).unbind()
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()

    def step(conv, x, v):
        out = conv(x)
        return out, *torch.autograd.grad(out, [x, *conv.parameters()], v)

    def captured():
        plan.plan_for.cache_clear()
        direct.plan_of_module.cache_clear()
        direct.LATEST.clear()
        step(conv, x, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step(conv, x, v)
        graph.replay()
        first = [t.clone() for t in made]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made[0], first[0])
        return first

    ours = captured()
    assert len(ran) == (1 if channels == 96 else 2)  # of 96 channels only the backward is an implicit GEMM
    monkeypatch.setattr(implicit_choice, "chosen", lambda *_: None)
    wide = x.detach().double().requires_grad_()
    truth = step(copy.deepcopy(conv).double(), wide, v.double())
    for a, b, exact in zip(ours, captured(), truth, strict=True):
        # Rounding makes 3e-3 of either, and 1e-4 between them, where sums that differ in their last bits are rounded.
        assert error(a, b) < 2e-3
        assert error(a, exact) < 1.1 * error(b, exact) + 1e-3
