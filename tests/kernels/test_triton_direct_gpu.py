"""Launches by address on a GPU, among what else a program does there: streams, graphs, threads, devices, compilers."""

import copy
import threading

import pytest
import torch

import hyperball as hb

pytestmark = pytest.mark.gpu
CALLS = 5  # after which a layer runs by addresses, forward and backward


def gradients(layer, x, v):
    x = x.detach().requires_grad_()
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], v)]


def error(ours, truth):
    ours, truth = ours.detach().double(), truth.detach().double()
    return float((ours - truth).norm() / truth.norm())


def drawn(*shape, seed=0, device="cuda"):
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last)


def warmed(device="cuda", magnitude="tanh", images=16):
    """A layer of 64 channels, evaluated, after so many calls that it runs by addresses; an input and a gradient."""
    torch.manual_seed(0)
    layer = hb.nn.DecoupledConv2d(64, 64, 3, padding=1, magnitude=magnitude).to(device, torch.bfloat16)
    x, v = (drawn(images, 64, 32, 32, seed=seed, device=device) for seed in (1, 2))
    for _ in range(CALLS):
        gradients(layer, x, v)
    layer.eval()
    for _ in range(CALLS):
        gradients(layer, x, v)
    return layer, x, v


@pytest.mark.parametrize("magnitude", ["tanh", "linear"])
def test_streams_that_run_beside_each_other_give_what_each_gives_alone(magnitude):
    layer, x, v = warmed(magnitude=magnitude)
    scales = (1, 2, 3, 4)
    truth = [gradients(layer, k * x, v) for k in scales]
    streams = [torch.cuda.Stream() for _ in scales]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for k, stream in zip(scales, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(gradients(layer, k * x, v))
    torch.cuda.synchronize()
    for place, made in enumerate(found):
        wanted = truth[place % len(scales)]
        assert torch.equal(made[0], wanted[0])
        assert all(error(a, b) < 1e-3 for a, b in zip(made, wanted, strict=True))


def test_threads_give_what_each_gives_alone():
    layer, x, v = warmed()
    truth = [gradients(layer, k * x, v) for k in range(1, 5)]
    torch.cuda.synchronize()
    found, errors = {}, []

    def work(k):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[k] = [gradients(layer, k * x, v) for _ in range(5)]
        except Exception as problem:
            errors.append(problem)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    for k, runs in found.items():
        assert all(error(a, b) < 1e-3 for made in runs for a, b in zip(made, truth[k - 1], strict=True))


def test_a_captured_step_by_addresses_reads_what_its_input_holds_when_it_is_replayed():
    layer, x, v = warmed()
    held = x.clone(memory_format=torch.preserve_format).requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(held)
        made = [out.detach(), *torch.autograd.grad(out, [held, *layer.parameters()], v)]
    for k in (1, 3, 2):
        wanted = gradients(layer, k * x, v)
        with torch.no_grad():
            held.copy_(k * x)
        graph.replay()
        assert torch.equal(made[0], wanted[0])
        assert all(error(a, b) < 1e-3 for a, b in zip(made, wanted, strict=True))
        del wanted


def test_a_graph_of_evaluation_by_addresses_replays():
    layer, x, _ = warmed()
    held = x.clone(memory_format=torch.preserve_format)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            out = layer(held)
        held.copy_(-2 * x)
        graph.replay()
        assert torch.equal(out, layer(-2 * x))


def test_compiled_and_exported_layers_do_not_see_the_plan():
    layer, x, v = warmed()
    wanted = gradients(layer, x, v)
    compiled = gradients(torch.compile(layer, fullgraph=True), x, v)
    assert all(error(a, b) < 2e-2 for a, b in zip(compiled, wanted, strict=True))
    exported = torch.export.export(layer, (x,)).module()
    assert error(exported(x), wanted[0]) < 2e-2
    again = gradients(layer, x, v)
    assert torch.equal(again[0], wanted[0])


def test_a_running_mean_on_the_cpu_is_refused():
    layer, x, _ = warmed()
    layer.magnitude.running_length = layer.magnitude.running_length.cpu()
    with pytest.raises(RuntimeError, match="running means must be on the device of the input"):
        layer(x)
    torch.cuda.synchronize()


def test_a_layer_on_another_device_than_the_current_one_gives_the_same():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    layer, x, v = warmed()
    there = copy.deepcopy(layer).to("cuda:1")
    for _ in range(CALLS):
        moved = gradients(there, x.to("cuda:1"), v.to("cuda:1"))
    assert all(error(a.to("cuda:0"), b) < 1e-3 for a, b in zip(moved, gradients(layer, x, v), strict=True))


def test_a_map_of_more_than_two_to_the_31_numbers_is_read_and_written_to_its_end():
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB")
    layer, _, _ = warmed()
    images = 2**31 // (64 * 128 * 128) + 4
    x, v = (torch.zeros(images, 64, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x, v = (t.contiguous(memory_format=torch.channels_last) for t in (x, v))
    for t, seed in ((x, 1), (v, 2)):
        t[[0, -1]] = drawn(2, 64, 128, 128, seed=seed)
    assert x.numel() > 2**31
    for _ in range(CALLS):
        gradients(layer, x, v)
    for place in (slice(0, 1), slice(-1, None)):
        part = torch.zeros_like(v)
        part[place] = v[place]
        made = gradients(layer, x, part)
        alone = gradients(layer, x[place], v[place])
        assert error(made[0][place], alone[0]) < 5e-3
        assert error(made[1][place], alone[1]) < 5e-3
        assert not made[1][1:-1].any()
        assert all(error(a, b) < 2e-2 for a, b in zip(made[2:], alone[2:], strict=True))
        del made, part
