"""Captures that fail: torch's generator, allocator and streams go on as if there had been none."""

import contextlib

import pytest
import torch

from hyperball import graphs


class Device:
    """What torch up to 2.11 keeps of captures, and when it lets go of it."""

    def __init__(self):
        self.capturing, self.recording, self.used, self.valid = False, [], {}, True
        self.offset_pending = False

    def synchronize(self):
        self.offset_pending = False

    def begin(self, pool):
        assert pool not in self.recording, "already recording"
        self.offset_pending = True  # the generator sets a graph's offset to 0 on the stream of the capture
        self.capturing, self.valid = True, True
        self.recording.append(pool)
        self.used[pool] = self.used.get(pool, 0) + 1

    def end(self, pool):
        if not self.valid or pool not in self.recording:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.recording.remove(pool)
        self.capturing = False

    def end_allocation(self, _, pool):
        if pool not in self.recording:
            raise RuntimeError("not currently recording")
        self.recording.remove(pool)

    def release(self, _, pool):
        self.used[pool] -= 1


class Graph:
    device: Device
    ended = False

    def capture_begin(self, pool=(0, 0), capture_error_mode="global"):
        assert capture_error_mode == "thread_local"
        self.own = pool
        self.device.begin(pool)

    def capture_end(self):
        self.device.end(self.own)
        self.ended = True

    def reset(self):
        if self.ended:
            self.device.release(0, self.own)


@pytest.fixture(name="device")
def _stands_in_for_cuda(monkeypatch):
    made, device = iter(range(1, 99)), Device()
    kind = type("Graph", (Graph,), {"device": device})
    zeros = torch.zeros(1)
    for name, held in {
        "CUDAGraph": kind, "Stream": object, "stream": lambda _: contextlib.nullcontext(),
        "synchronize": device.synchronize, "current_device": lambda: 0, "graph_pool_handle": lambda: (0, next(made)),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, held)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", device.release, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: zeros)
    monkeypatch.setattr(graphs, "_STREAMS", {})
    monkeypatch.setattr(graphs, "_FAILED", [])
    return device


def test_work_that_is_captured_gives_its_graph(device):
    graph = graphs.capture(lambda: None)
    assert device.used[graph.own] == 1
    assert not device.capturing
    assert not device.offset_pending  # a replay on another stream sets it too
    assert not graphs._FAILED


@pytest.mark.parametrize("invalid", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyboardInterrupt])
def test_an_error_comes_out_and_the_capture_is_ended(device, error, invalid):
    def work():
        device.valid = not invalid
        raise error("by the work")

    with pytest.raises(error, match="by the work"):
        graphs.capture(work)
    assert not device.capturing
    assert not device.recording
    assert not device.offset_pending
    assert device.used[0, 1] == 0  # whether the graph releases its pool or does not know of it
    assert len(graphs._FAILED) == invalid
    graphs.capture(lambda: None)
    assert not device.recording


def test_work_that_torch_refuses_only_at_the_end_is_an_error_too(device):
    def work():
        device.valid = False

    with pytest.raises(RuntimeError, match="during capture"):
        graphs.capture(work)
    assert not device.capturing
    assert not device.recording


def read_back():
    """Draws, and reads from the device, which no graph can."""
    assert float(torch.randn(3, device="cuda").sum()) < 1e9


def stop():
    raise ValueError("stop")


FAILURES = {"read back": (read_back, RuntimeError), "python": (stop, ValueError)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILURES)
def test_random_numbers_go_on_where_they_were(name):
    work, error = FAILURES[name]
    torch.cuda.manual_seed(3)
    expected = [torch.randn(5, device="cuda") for _ in range(3)]
    torch.cuda.manual_seed(3)
    found = [torch.randn(5, device="cuda")]
    for _ in range(2):
        with pytest.raises(error):
            graphs.capture(work)
        found.append(torch.randn(5, device="cuda"))
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILURES)
def test_graphs_before_and_after_a_failure_draw_from_the_same_numbers(name):
    work, error = FAILURES[name]
    out = torch.empty(5, device="cuda")
    before = graphs.capture(lambda: out.normal_())
    torch.cuda.manual_seed(3)
    expected = [torch.randn(5, device="cuda") for _ in range(3)]
    torch.cuda.manual_seed(3)
    before.replay()
    found = [out.clone()]
    with pytest.raises(error):
        graphs.capture(work)
    after = graphs.capture(lambda: out.normal_(), pool=before.pool())
    for graph in (before, after):
        graph.replay()
        found.append(out.clone())
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAILURES)
def test_stream_and_allocator_are_as_before(name):
    work, error = FAILURES[name]
    stream, other = torch.cuda.current_stream(), torch.cuda.Stream()
    with pytest.raises(error):
        graphs.capture(work)
    assert torch.cuda.current_stream() == stream
    before = torch.cuda.memory_allocated()
    held = torch.empty(2**20, device="cuda")
    held.record_stream(other)
    del held
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # an allocation is when memory that other streams have used is taken back
    assert torch.cuda.memory_allocated() <= before + 512
