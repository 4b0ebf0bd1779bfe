"""`DecoupledConvBNAct`: the fused block is its three modules in turn."""

import copy

import pytest
import torch
from torch import nn

import hyperball as hb
from hyperball.nn import fused


def modules_of(block):
    """The same modules in a plain nn.Sequential, with the same state."""
    return nn.Sequential(*(copy.deepcopy(module) for module in block))


@pytest.mark.parametrize("activation", ["relu", "prelu", None])
@pytest.mark.parametrize("training", [True, False])
def test_a_block_is_its_modules_in_turn(activation, training):
    block = hb.nn.DecoupledConvBNAct(3, 6, 3, 2, 1, activation=activation).train(training)
    twin, x = modules_of(block), torch.randn(4, 3, 7, 7)
    torch.testing.assert_close(block(x), twin(x))
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(block.state_dict()[key], value)


def test_a_blocks_state_is_that_of_the_sequence():
    block = hb.nn.DecoupledConvBNAct(3, 6, 3, activation="prelu", magnitude="ball", angular="sigmoid(learn_k=True)")
    twin = nn.Sequential(
        hb.nn.DecoupledConv2d(3, 6, 3, magnitude="ball", angular="sigmoid(learn_k=True)"),
        nn.BatchNorm2d(6),
        nn.PReLU(6),
    )
    twin.load_state_dict(block.state_dict())
    block.load_state_dict(twin.state_dict())


def test_a_block_takes_a_plain_sequences_state():
    plain = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    block = hb.nn.DecoupledConvBNAct(3, 6, 3)
    block.load_state_dict(plain.state_dict())
    assert torch.equal(block[0].weight, plain[0].weight)


def test_the_residual_is_added_before_the_activation():
    block = hb.nn.DecoupledConvBNAct(6, 6, 3, padding=1)
    x, added = torch.randn(2, 6, 5, 5), torch.randn(2, 6, 5, 5)
    twin = modules_of(block)
    torch.testing.assert_close(block(x, added), torch.relu(twin[1](twin[0](x)) + added))


def test_a_carried_pair_holds_the_lengths_of_the_activation():
    block = hb.nn.DecoupledConvBNAct(3, 6, 3, padding=1, carry=True)
    out, lengths = block(torch.randn(2, 3, 5, 5))
    assert lengths.shape == (2, 1, 5, 5)
    torch.testing.assert_close(lengths, out.norm(dim=1, keepdim=True))


def test_a_chain_of_carrying_blocks_gives_the_gradients_of_the_modules():
    blocks = nn.Sequential(*(hb.nn.DecoupledConvBNAct(c, 6, 3, padding=1, carry=c == 3) for c in (3, 6))).double()
    twin = nn.Sequential(*(modules_of(block) for block in blocks))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    ours, truth = (torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]) for model in (blocks, twin))
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pair_as_residual_gives_its_activation():
    block = hb.nn.DecoupledConvBNAct(6, 6, 3, padding=1).eval()
    x, added = torch.randn(2, 6, 5, 5), torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(block(x, (added, added.norm(dim=1, keepdim=True))), block(x, added))


def test_a_block_of_modules_that_exist_shares_their_parameters():
    conv, norm, act = hb.nn.DecoupledConv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
    block = hb.nn.DecoupledConvBNAct.of(conv, norm, act)
    assert block[0].weight is conv.weight
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(block.eval()(x), act(norm(conv(x))))
    torch.testing.assert_close(hb.nn.DecoupledConvBNAct.of(conv, norm)(x), norm(conv(x)))
    with pytest.raises(TypeError, match="`conv`"):
        hb.nn.DecoupledConvBNAct.of(nn.Conv2d(3, 6, 3), norm)
    with pytest.raises(TypeError, match="`activation`"):
        hb.nn.DecoupledConvBNAct.of(conv, norm, nn.GELU())


def test_lengths_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="lengths of shape"):
        hb.nn.DecoupledConvBNAct(3, 6, 3)((torch.randn(2, 3, 5, 5), torch.randn(2, 5, 5)))


def test_a_residual_that_must_be_expanded_runs_in_turn():
    block = hb.nn.DecoupledConvBNAct(3, 6, 3, 2, "valid", dilation=2)
    x = torch.randn(2, 3, 9, 9)
    assert fused.shape_of(block[0], x) == block(x).shape
    assert block.choice(x, torch.randn(1, 6, 1, 1)).reason == "a residual to expand"


def test_modules_of_any_type_run_in_turn():
    x = torch.randn(2, 3, 5, 5)
    conv, norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
    torch.testing.assert_close(fused.conv_norm_act(conv, norm, nn.GELU(), x), nn.functional.gelu(norm(conv(x))))
    assert fused.choice_of((conv, norm, None), x).reason == "modules of other types"
    decoupled = hb.nn.DecoupledConv2d(3, 6, 3)
    assert fused.choice_of((decoupled, norm, nn.GELU()), x).reason == "the activation GELU"
    assert fused.choice_of((decoupled, norm, nn.Identity()), x).reason == "cpu"


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="`activation` must be one of"):
        hb.nn.DecoupledConvBNAct(3, 6, 3, activation="gelu")


def test_a_block_says_which_kernel_runs_it():
    block = hb.nn.DecoupledConvBNAct(3, 6, 3)
    assert str(block.choice(torch.randn(1, 3, 5, 5))) == "eager: cpu"
    assert block.choice(torch.randn(3, 5, 5)).reason == "an input without a batch"
    handle = block[1].register_forward_hook(lambda *_: None)
    assert block.choice(torch.randn(1, 3, 5, 5)).reason == "a module inside has hooks"
    handle.remove()
    assert hb.explain(nn.Sequential(block))["0"] == "in turn: fused on a GPU only"
    split = hb.nn.DecoupledConvBNAct(3, 6, 3, weighting="split")
    assert hb.explain(nn.Sequential(split))["0"] == "in turn: split weighting"


@pytest.mark.parametrize("part", ["magnitude", "angular"])
def test_hooks_on_an_operators_parameters_keep_a_block_from_being_fused(part):
    block = hb.nn.DecoupledConvBNAct(3, 6, 3)
    getattr(block[0], part).register_forward_hook(lambda *_: None)
    assert block.choice(torch.randn(1, 3, 5, 5)).reason == "a module inside has hooks"


MIXTURES = [
    ("norm", torch.float64, torch.float32, True),
    ("norm", torch.float16, torch.float32, True),
    ("norm", torch.float32, torch.bfloat16, False),
    ("activation", torch.float64, torch.float32, True),
    ("activation", torch.float16, torch.float32, True),
    ("activation", torch.float32, torch.bfloat16, True),
    ("running mean", torch.float64, torch.float32, True),
]


@pytest.mark.parametrize("part, dtype, rest, refused", MIXTURES)
def test_what_the_modules_in_turn_refuse_is_not_fused(part, dtype, rest, refused):
    block, x = hb.nn.DecoupledConvBNAct(3, 6, 3, activation="prelu").to(rest), torch.randn(2, 3, 5, 5, dtype=rest)
    if part == "running mean":
        block[1].running_mean = block[1].running_mean.to(dtype)
    else:
        block[1 if part == "norm" else 2].to(dtype)
    assert (block.choice(x).reason == "modules of different dtypes") == refused
    if refused:
        with pytest.raises(RuntimeError):
            modules_of(block)(x)
    else:
        assert modules_of(block)(x).dtype == rest


def test_under_autocast_a_blocks_parameters_may_stay_in_float32():
    block, x = hb.nn.DecoupledConvBNAct(3, 6, 3, activation="prelu"), torch.randn(2, 3, 5, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert block.choice(x).reason == "cpu"
        block[2].double()
        assert block.choice(x).reason == "modules of different dtypes"


def test_a_block_survives_copies_pickles_and_compilation(tmp_path):
    block = hb.nn.DecoupledConvBNAct(3, 6, 3, carry=True).eval()
    x = torch.randn(2, 3, 5, 5)
    torch.save(block, tmp_path / "block.pt")
    loaded = torch.load(tmp_path / "block.pt", weights_only=False)
    for other in (copy.deepcopy(block), loaded):
        torch.testing.assert_close(other(x), block(x))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "prelu", None])
def test_a_chain_on_the_gpu_equals_its_modules_on_the_cpu(activation, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    options = {"padding": 1, "activation": activation}
    blocks = [
        hb.nn.DecoupledConvBNAct(16, 24, 3, carry=True, **options),
        hb.nn.DecoupledConvBNAct(24, 24, 3, **options),
    ]
    twins = [modules_of(block).double() for block in blocks]
    x = torch.randn(4, 16, 9, 9)
    wide = x.double().requires_grad_()
    middle = twins[0](wide)
    last = twins[1][1](twins[1][0](middle)) + middle
    truth_out = last if activation is None else twins[1][2](last)
    x = x.cuda().contiguous(memory_format=torch.channels_last).requires_grad_()
    first, second = (block.cuda() for block in blocks)
    assert first.choice(x).kernel == "triton"
    pair = first(x)
    out = second(pair, pair)
    grad = torch.randn(out.shape)
    ours = torch.autograd.grad(out, [x, *first.parameters(), *second.parameters()], grad.cuda())
    truth = torch.autograd.grad(truth_out, [wide, *twins[0].parameters(), *twins[1].parameters()], grad.double())
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
    for block, twin in zip((first, second), twins, strict=True):
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(block.state_dict()[key].cpu().double(), value.double(), rtol=1e-4, atol=1e-5)


def test_a_block_keeps_to_its_parts():
    block = hb.nn.DecoupledConvBNAct(3, 8, 3)
    for change in (
        lambda: block.append(nn.ReLU()),
        lambda: block.insert(0, nn.ReLU()),
        lambda: block.extend([nn.ReLU()]),
    ):
        with pytest.raises(TypeError, match="put it and what follows"):
            change()
    assert type(block[:2]) is nn.Sequential
    assert block[:2][0] is block[0]
