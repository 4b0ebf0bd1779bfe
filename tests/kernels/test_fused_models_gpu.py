"""Fused blocks in our models and in converted ones on a GPU: the numbers are those of the modules in turn."""

import copy
from statistics import median

import case_files
import pytest
import torch
from foreign_models import FAMILIES
from places import SUPPORT
from torch import nn

import hyperball as hb
from hyperball.nn import fused

CASES = SUPPORT / "fused_cases.py"


@pytest.mark.gpu
def test_networks_pass_their_cases_on_the_gpu():
    case_files.check_on_the_gpu(CASES)


GPU = {"cnn9": {"width": 32}, "resnet32": {"width": 32}}


def on_gpu(name, **options):
    """A network in fused blocks, the same with hooks that keep its modules apart, images and labels.

    PReLU's slopes are 1 here: a network without a kink, over which rounding could move samples.
    """
    model = hb.models.create(name, 10, magnitude="tanh", **GPU[name], **options).cuda()
    for part in model.modules():
        if isinstance(part, nn.PReLU):
            nn.init.ones_(part.weight)
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
    hb.convert.calibrate(model, [images])
    return model, modules_apart(model), images, torch.randint(10, (32,), device="cuda")


def modules_apart(model):
    apart = copy.deepcopy(model)
    for part in apart.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.register_forward_hook(lambda *_: None)
    return apart


def step(model, images, labels):
    """The loss and its gradients by images and parameters."""
    images = images.detach().requires_grad_()
    loss = nn.functional.cross_entropy(model(images).float(), labels)
    return [loss.detach(), *torch.autograd.grad(loss, [images, *model.parameters()])]


def distance(ours, truth):
    """‖a − b‖ / ‖b‖ over all tensors together but the loss."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours[1:], truth[1:], strict=True)]
    return (
        sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)
    ) ** 0.5


def check_as_near_as(apart, ours, turned, images, labels, slack=3.0, smooth=False):
    """Ours and the modules in turn lie as near to the gradients of float64.

    Without a kink that holds of every parameter. ReLU's kink and max pooling's ties turn rounding into jumps, which
    fall on other parameters in either: then the middle parameters are compared, and the worst ones.
    """
    wide = copy.deepcopy(apart).double()
    truth = step(wide, images.double(), labels)
    assert abs(float(ours[0] - truth[0])) < 1e-3 + slack * abs(float(turned[0] - truth[0]))
    assert distance(ours, truth) < 1e-4 + slack * distance(turned, truth)
    near, far = (
        [distance([None, a], [None, c]) for a, c in zip(held[1:], truth[1:], strict=True)] for held in (ours, turned)
    )
    if smooth:
        for key, a, b in zip(["images", *dict(apart.named_parameters())], near, far, strict=True):
            assert a < 5e-4 + slack * b, (key, a, b)
    assert median(near) < 1e-4 + slack * median(far)
    assert max(near) < 1e-2 + slack * max(far)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "prelu"])
@pytest.mark.parametrize("name", GPU)
def test_a_network_on_the_gpu_equals_its_modules_in_turn(name, activation, training, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, apart, images, labels = on_gpu(name, activation=activation)
    blocks, run = [], fused._fused
    monkeypatch.setattr(fused, "_fused", lambda *given: (blocks.append(given), run(*given))[1])
    ours = step(model.train(training), images, labels)
    assert len(blocks) == {"cnn9": 9, "resnet32": 31}[name]
    before = copy.deepcopy(apart.train(training))
    turned = step(apart, images, labels)
    assert len(blocks) == {"cnn9": 9, "resnet32": 31}[name]
    check_as_near_as(before, ours, turned, images, labels, smooth=(name, activation) == ("resnet32", "prelu"))
    for key, value in apart.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key].double(), value.double(), rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_autocast_gives_the_gradients_of_the_modules_in_turn(name):
    model, apart, images, labels = on_gpu(name)
    before = copy.deepcopy(apart)
    with torch.autocast("cuda", torch.bfloat16):
        ours, turned = step(model, images, labels), step(apart, images, labels)
    truth = step(before, images, labels)
    assert abs(float(ours[0] - truth[0])) < 2e-2
    assert distance(ours, truth) < 1.2 * distance(turned, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_a_step_of_a_network_is_captured_in_a_graph_and_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, _, images, labels = on_gpu(name)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, images, labels)
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = step(model, images, labels)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(model, images, labels)
    graph.replay()
    torch.cuda.synchronize()
    assert distance(captured, first) < 2e-2  # cuDNN may choose other algorithms


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn9"])
def test_a_compiled_network_on_the_gpu_is_one_graph_and_gives_the_same(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, apart, images, labels = on_gpu(name)
    before = copy.deepcopy(apart)
    ours = step(torch.compile(model, fullgraph=True), images, labels)
    check_as_near_as(before, ours, step(apart, images, labels), images, labels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torchvision basic", "torchvision bottleneck", "torchvision vgg"])
def test_a_converted_model_on_the_gpu_equals_its_modules_in_turn(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, _ = hb.convert_model(FAMILIES[name]().cuda(), magnitude="tanh", fuse=True)
    apart = modules_apart(model)
    images, labels = torch.randn(8, 3, 64, 64, device="cuda"), torch.randint(5, (8,), device="cuda")
    before = copy.deepcopy(apart)
    ours, turned = step(model, images, labels), step(apart, images, labels)
    kept = [place for place, held in enumerate(turned) if float(held.abs().max()) > 1e-6]  # no bias that a mean removes
    truth = step(before.double(), images.double(), labels)
    ours, turned, truth = ([held[place] for place in kept] for held in (ours, turned, truth))
    assert distance(ours, truth) < 1e-4 + 3 * distance(turned, truth)
