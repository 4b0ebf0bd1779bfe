"""Fused blocks in our models and in converted ones: on the CPU nothing changes."""

import copy
import pickle

import case_files
import pytest
import torch
from foreign_models import FAMILIES
from places import SUPPORT
from torch import nn

import hyperball as hb
from hyperball.kernels import dispatch
from hyperball.models.chain import Chain
from hyperball.nn import fused, fused_chain

CASES = SUPPORT / "fused_cases.py"
OURS = {
    "cnn9": ({"width": 4, "features": 8, "image_size": 8}, (3, 8, 8)),
    "cnn9_adv": ({"features": 8, "image_size": 8}, (3, 8, 8)),
    "cnn9_features": ({}, (1, 28, 28)),
    "resnet32": ({"width": 4}, (3, 8, 8)),
    "resnet18": ({"width": 4}, (3, 32, 32)),
    "resnet18_modified": ({"width": 4}, (3, 32, 32)),
    "digits": ({"width": 4}, (1, 8, 8)),
}


def create(name, **options):
    given, shape = OURS[name]
    return hb.models.create(name, 5, **{"magnitude": "tanh", **given, **options}), torch.randn(3, *shape)


def in_turn(model, x):
    """The network's forward, written out with calls of its modules."""
    if isinstance(model, Chain):
        return model.classifier(model.after(model.fc(model.stages(x).flatten(1))))
    if hasattr(model, "pool"):
        return model.classifier(model.pool(model.stages(x)).flatten(1))
    x = model.maxpool(model.relu(model.bn1(model.conv1(x))))
    for part in (part for index in range(1, model.stages + 1) for part in getattr(model, f"layer{index}")):
        if hasattr(part, "conv2"):
            shortcut = x if part.downsample is None else part.downsample(x)
            x = part.relu2(part.bn2(part.conv2(part.relu(part.bn1(part.conv1(x))))) + shortcut)
        else:
            x = part(x)
    return model.fc(model.avgpool(x).flatten(1))


def gradients(run, model, x):
    torch.manual_seed(0)  # of dropout
    x = x.clone().requires_grad_()
    loss = run(x).square().sum()
    return [loss, *torch.autograd.grad(loss, [x, *model.parameters()])]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_a_network_on_the_cpu_is_its_modules_in_turn_to_the_last_bit(name, training):
    model, x = create(name)
    twin = copy.deepcopy(model.train(training))
    ours, truth = gradients(model, model, x), gradients(lambda x: in_turn(twin, x), twin, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in twin.state_dict().items())


@pytest.mark.parametrize("name", ["cnn9", "resnet32"])
def test_no_lengths_are_computed_on_the_cpu(name, monkeypatch):
    def refuse(*_):
        raise AssertionError("lengths were computed")

    for function in ("norm", "_fused", "unfit"):
        monkeypatch.setattr(fused, function, refuse)
    model, x = create(name)
    model(x).sum().backward()


@pytest.mark.parametrize(
    "name, keys",
    [
        ("cnn9", {"stages.0.0.weight", "stages.0.1.running_mean", "stages.4.7.bias", "fc.weight", "after.0.bias"}),
        ("resnet32", {"conv1.weight", "layer1.0.conv1.weight", "layer3.4.bn2.bias", "layer2.0.downsample.1.bias"}),
        ("resnet18_modified", {"layer1.0.weight", "layer1.3.conv2.magnitude.ratio", "layer1.3.relu.weight"}),
    ],
)  # fmt: skip
def test_names_and_containers_are_those_of_the_modules(name, keys):
    model, _ = create(name)
    assert keys <= set(model.state_dict())
    containers = [part for part in model.modules() if isinstance(part, nn.Sequential)]
    assert {type(part) for part in containers} == {nn.Sequential}
    assert "Fused" not in repr(model)


def test_a_chain_hands_lengths_on_until_something_pools():
    model, _ = create("cnn9")
    steps = fused_chain.steps(model.chained())
    blocks = [isinstance(step, tuple) for step in steps]
    assert blocks == [True, True, True, False] * 3
    handed = [fused_chain.reads_lengths(step) for step in steps[1:]]
    assert handed == [True, True, False, True] * 2 + [True, True, False]


def test_residual_units_take_lengths_through_their_first_convolution():
    model, _ = create("resnet32")
    steps = fused_chain.steps(model.chained())
    assert isinstance(steps[0], tuple)
    assert steps[0][2] is None  # nothing follows the normalization of the root
    assert len(steps) == 16
    assert all(fused_chain.reads_lengths(step) for step in steps)
    steps[3].register_forward_hook(lambda *_: None)
    assert [fused_chain.reads_lengths(step) for step in steps].count(False) == 1


@pytest.mark.parametrize(
    "options",
    [{"magnitude": None}, {"norm": None}, {"norm": "robust"}, {"magnitude": "linear", "weighting": "linear"}],
)
def test_what_has_no_block_is_called_module_by_module(options):
    model, _ = create("digits", **options)
    steps = fused_chain.steps(model.chained())
    assert not any(isinstance(step, tuple) for step in steps)


@pytest.mark.parametrize("change", ["hook", "forward", "bias", "class"])
def test_altered_modules_are_not_taken_into_a_block(change):
    conv, norm = hb.nn.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8)
    parts = (conv, norm, nn.ReLU())
    assert fused.unfit(parts) == ""
    if change == "hook":
        conv.register_full_backward_pre_hook(lambda *_: None)
        assert fused.unfit(parts) == "a module inside has hooks"
    elif change == "forward":
        norm.forward = lambda x: x
        assert fused.unfit(parts) == "a module inside has hooks"
    elif change == "bias":
        norm.bias = None
        assert fused.unfit(parts) == "a BatchNorm with one of weight and bias"
    else:
        nn.utils.parametrizations.weight_norm(conv)
        assert fused.unfit(parts) == "modules of other types"


def test_a_frozen_network_is_folded_and_gives_the_same():
    model, x = create("resnet32")
    model.eval()
    frozen = hb.freeze(model)
    assert all(layer.folded for layer in frozen.freeze_report.layers)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)


def test_bounds_and_a_trace_go_through_the_networks():
    model, x = create("digits")
    assert hb.bounds(model.eval()) is not None
    block = hb.nn.DecoupledConvBNAct(3, 8, 3).eval()

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m, name):
            return isinstance(m, hb.nn.DecoupledConv2d) or super().is_leaf_module(m, name)

    graph = torch.fx.GraphModule(block, Leaves().trace(block, concrete_args={"residual": None}))
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(graph(x, None), block(x))


def test_explain_says_which_layers_run_in_a_block():
    model, _ = create("resnet32")
    lines = dict(hb.explain(model).lines)
    assert lines["conv1"].endswith("on a GPU in one fused block with bn1")
    assert lines["layer1.0.conv2"].endswith("on a GPU in one fused block with layer1.0.bn2 and layer1.0.relu2")
    model, _ = create("digits", weighting="split")
    assert all("block" not in text for _, text in hb.explain(model).lines)
    sequence = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8))
    assert "block" not in hb.explain(sequence)["0"]
    hb.convert.fuse_blocks(sequence)
    assert "on a GPU in one fused block with 1" in hb.explain(sequence)["0"]


def test_explain_gives_the_kernel_of_a_block_or_what_speaks_against_it(monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", ("cpu",))
    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    model, _ = create("digits")
    model.stages[0][1].register_forward_hook(lambda *_: None)
    lines = dict(hb.explain(model).lines)
    assert lines["stages.0.0"].endswith("not in one block with stages.0.1 and stages.0.2: a module inside has hooks")
    assert lines["stages.1.0"].startswith("fused block with stages.1.1 and stages.1.2: triton: ")


FUSED = {
    "torchvision basic": (9, 9),
    "torchvision bottleneck": (13, 13),
    "torchvision vgg": (2, 2),
    "torchvision mobilenet": (35, 52),  # depthwise convolutions have groups of one channel
    "timm resnet": (11, 11),
    "timm seresnet": (1, 33),  # squeeze and excitation come between the blocks and the sum
}


@pytest.mark.parametrize("name", FUSED)
def test_a_converted_model_with_fused_blocks_keeps_its_keys_and_on_the_cpu_its_numbers(name):
    plain = FAMILIES[name]().eval()
    apart, _ = hb.convert_model(plain, magnitude="tanh")
    together, report = hb.convert_model(plain, magnitude="tanh", fuse=True)
    expected = "{} of {} decoupled convolutions run in fused blocks on a GPU".format(*FUSED[name])
    assert any(note.startswith(expected) for note in report.notes), report.notes
    assert report.model == type(plain).__name__
    assert list(together.state_dict()) == list(apart.state_dict())
    x = torch.randn(2, 3, 32, 32)
    for model in (together, copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        assert torch.equal(model(x), apart(x))
        assert type(model) is type(together)
    together.train(), apart.train()
    ours, truth = (gradients(model, model, x) for model in (together, apart))
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


def test_a_model_with_fused_blocks_can_be_frozen_converted_again_and_exported():
    model, _ = hb.convert_model(FAMILIES["torchvision bottleneck"](), magnitude="tanh", fuse=True)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    frozen = hb.freeze(model)
    assert sum(layer.folded is not None for layer in frozen.freeze_report.layers) == 13
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-3, atol=1e-3)
    again, _ = hb.convert_model(model, magnitude="ball", fuse=True)
    assert torch.equal(again(x), model(x))
    unit = model.layer1
    x = torch.randn(2, 64, 4, 4)
    program = hb.convert.export_program(unit, x)
    torch.testing.assert_close(program.module()(x), unit(x), rtol=1e-3, atol=1e-3)


def test_checkpoints_of_timm_still_run():
    model, _ = hb.convert_model(FAMILIES["timm resnet"](), magnitude="tanh", fuse=True)
    x = torch.randn(2, 3, 32, 32)
    model.eval()
    before = model(x)
    model.set_grad_checkpointing(True)
    torch.testing.assert_close(model(x), before)


def test_what_is_not_recognized_is_left_alone():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = hb.nn.DecoupledConv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.rest = nn.Sequential(nn.ReLU(), hb.nn.DecoupledConv2d(8, 8, 3))

        def forward(self, x):
            return self.rest(self.norm(self.conv(x)))

    model = Own()
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match="no block to fuse in Own: none is recognized"):
        hb.convert.fuse_blocks(model)
    assert [type(part) for part in model.modules()] == kinds
    linear = nn.Sequential(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="linear"), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="1: a linear magnitude with cosine needs no patch norm"):
        hb.convert.fuse_blocks(linear)
    assert type(linear) is nn.Sequential
    with pytest.raises(TypeError, match="`model` must be a"):
        hb.convert.fuse_blocks("resnet18")
    with pytest.raises(TypeError, match="`fuse` must be True or False, got 1"):
        hb.convert_model(linear, magnitude="tanh", fuse=1)


def test_a_conversion_that_fails_puts_the_classes_back():
    model = FAMILIES["torchvision vgg"]()
    before = [type(part) for part in model.modules()]
    with pytest.raises(RuntimeError):
        hb.convert_model(model, magnitude="tanh", fuse=True, inplace=True, batch=torch.randn(1, 4, 32, 32))
    assert [type(part) for part in model.modules()] == before


def test_models_of_other_libraries_come_with_fused_blocks_unless_asked_not_to():
    pytest.importorskip("torchvision")
    fused_one = hb.models.create("torchvision/resnet18", 5, magnitude="tanh")
    assert type(fused_one).__name__ == "FusedResNet"
    assert isinstance(fused_one, pytest.importorskip("torchvision.models").ResNet)
    apart = hb.models.create("torchvision/resnet18", 5, magnitude="tanh", fuse=False)
    assert type(apart).__name__ == "ResNet"


def test_networks_pass_their_cases_in_the_interpreter():
    case_files.check_in_the_interpreter(CASES)
