"""Frozen networks on a GPU: their cases, interpreted and on a GPU, CUDA graphs, and launches that wait for nothing."""

import case_files
import pytest
import torch
from places import SUPPORT
from torch import nn

import hyperball as hb
from hyperball.nn.frozen import Frozen
from hyperball.nn.frozen_chain import frozen_class

CASES = SUPPORT / "frozen_cases.py"


def test_frozen_layers_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)


@pytest.mark.gpu
def test_frozen_layers_pass_their_cases_on_the_gpu():
    case_files.check_on_the_gpu(CASES)


def test_modules_that_do_not_run_others_in_turn_keep_their_class():
    assert frozen_class(nn.Conv2d) is None
    assert frozen_class(nn.ModuleList) is None

    class Twice(nn.Sequential):
        def forward(self, input):
            return super().forward(super().forward(input))

    assert frozen_class(Twice) is None
    assert frozen_class(nn.Sequential).__name__ == "Sequential"
    assert issubclass(frozen_class(nn.Sequential), nn.Sequential)


def test_explain_says_why_a_frozen_layer_runs_in_torchs_operators():
    frozen = hb.freeze(nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8)))
    assert hb.explain(frozen)["0"].startswith("frozen, eager: cpu")
    plain = hb.freeze(nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear")))
    assert "needs no patch norm" in hb.explain(plain)["0"]


def test_a_frozen_block_is_folded_and_takes_a_pair_and_a_residual():
    block = hb.nn.DecoupledConvBNAct(8, 8, 3, padding=1, carry=True).eval()
    block[1].running_mean.normal_()
    frozen, x = hb.freeze(block), torch.randn(2, 8, 5, 5)
    assert frozen.freeze_report.layers[0].folded == "1"
    for given in (x, (x, x.norm(dim=1, keepdim=True))):
        for ours, truth in zip(frozen(given, x), block(given, x), strict=True):
            torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)
    assert "frozen, eager: cpu" in str(hb.explain(nn.Sequential(frozen)))


def on_gpu(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = hb.models.create("resnet18", magnitude="tanh", num_classes=5, width=16).cuda()
    x = torch.rand(4, 3, 64, 64, device="cuda")
    with torch.no_grad():
        model.train()(x)
    frozen = hb.freeze(model).to(dtype).to(memory_format=torch.channels_last)
    return model.eval(), frozen, x.contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
def test_a_frozen_network_gives_the_unfrozen_ones_outputs_in_half_precision_and_in_a_graph():
    model, frozen, x = on_gpu()
    with torch.inference_mode():
        truth, out = model(x), frozen(x.bfloat16())
        bound = 3e-2 * float(truth.abs().max())
        torch.testing.assert_close(out.float(), truth, rtol=0, atol=bound)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = frozen(x.bfloat16())
        graph.replay()
        torch.testing.assert_close(captured.float(), truth, rtol=0, atol=bound)
    assert sum(isinstance(part, Frozen) for part in frozen.modules()) == 17


@pytest.mark.gpu
def test_no_frozen_launch_waits_for_the_gpu():
    _, frozen, x = on_gpu()
    x = x.bfloat16()
    with torch.inference_mode():
        frozen(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            frozen(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
