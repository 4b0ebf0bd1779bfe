"""Freezing: equal outputs, what is folded, and what is not and why."""

import copy

import pytest
import torch
from frozen_models import Branching, Residual, Tapped, batch, folded, scrambled, small
from torch import nn
from torch.nn.utils import parametrizations

import hyperball as hb
from hyperball import nn as C
from hyperball.freeze import FreezeReport, freeze
from hyperball.nn.frozen import Frozen

PROPORTIONAL = {"sphere", "ball", "tanh", "linear", "log", "barron"}
OPERATORS = [
    (magnitude, angular, weighting)
    for magnitude in hb.radial.names("magnitude")
    for angular in hb.angular.names()
    for weighting in ("none", "linear", "joint", "split")
    if weighting != "split" or magnitude in PROPORTIONAL
]


@pytest.mark.parametrize("magnitude, angular, weighting", OPERATORS)
def test_every_operator_with_batch_norm_equals_the_unfrozen_model(magnitude, angular, weighting, tolerance):
    layer = C.DecoupledConv2d(4, 6, 3, 1, 1, magnitude=magnitude, angular=angular, weighting=weighting)
    model = scrambled(nn.Sequential(layer, nn.BatchNorm2d(6)))
    x = batch(2, 4, 5, 5)
    frozen = freeze(model)
    assert folded(frozen) == {"0": "1"}
    assert isinstance(frozen[1], nn.Identity)
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))
    torch.testing.assert_close(freeze(model.float())(x.float()), model(x.float()), **tolerance(torch.float32))


LAYERS = [
    (C.DecoupledConv1d(4, 6, 3, bias=True), nn.BatchNorm1d(6), (3, 4, 9)),
    (C.DecoupledConv1d(4, 6, 4, padding="same", dilation=2, magnitude="ball"), nn.BatchNorm1d(6), (3, 4, 9)),
    (C.DecoupledConv2d(4, 6, (3, 2), (2, 1), (1, 0), groups=2), nn.BatchNorm2d(6, affine=False), (3, 4, 7, 8)),
    (C.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect", magnitude="log"), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    (C.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="circular"), nn.SyncBatchNorm(6), (3, 4, 6, 6)),
    (C.DecoupledConv2d(4, 4, 3, padding=2, padding_mode="replicate", groups=4), nn.BatchNorm2d(4), (3, 4, 6, 6)),
    (C.DecoupledConv2d(4, 6, 1, magnitude="linear(alpha=2, learn_alpha=True)"), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    (C.DecoupledConv3d(2, 4, 3, padding=1, angular="sigmoid(learn_k=True)"), nn.BatchNorm3d(4), (2, 2, 4, 4, 4)),
    (C.DecoupledConvTranspose1d(4, 6, 3, 2, magnitude="seg"), nn.BatchNorm1d(6), (3, 4, 5)),
    (C.DecoupledConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, weighting="joint"), nn.BatchNorm2d(6), (3, 4, 5, 5)),
    (C.DecoupledConvTranspose3d(2, 4, 2, weighting="linear", angular="linear"), nn.BatchNorm3d(4), (2, 2, 3, 3, 3)),
    (C.DecoupledLinear(4, 6, bias=True), nn.BatchNorm1d(6), (5, 4)),
    (C.DecoupledLinear(4, 6, magnitude="piecewise", angular="piecewise"), nn.BatchNorm1d(6), (5, 4)),
    (C.DecoupledConv2d(4, 6, 3, magnitude="linear + tanh(rho=2) + ball", bias=True), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    (C.DecoupledConv2d(4, 6, 3, magnitude="linear(alpha=2) + linear"), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    (C.DecoupledConv2d(4, 6, 3, magnitude="barron(relative=False, per='layer')"), nn.BatchNorm2d(6), (3, 4, 6, 6)),
    (C.NormalizedLinear(4, 6), nn.BatchNorm1d(6), (5, 4)),
]  # fmt: skip


@pytest.mark.parametrize("layer, batch_norm, shape", LAYERS, ids=lambda item: type(item).__name__)
def test_every_layer_equals_the_unfrozen_one(layer, batch_norm, shape, tolerance):
    model = scrambled(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(batch_norm)))
    frozen, alone = freeze(model), freeze(model[0])
    assert folded(frozen) == {"0": "1"}
    assert folded(alone) == {"": None}
    x = batch(*shape)
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))
    torch.testing.assert_close(alone(x), model[0](x), **tolerance(torch.float64))
    torch.testing.assert_close(alone(x[0]), model[0](x[0]), **tolerance(torch.float64))


@pytest.mark.parametrize("output_size", [None, [9, 10], [3, 5, 10, 9]])
def test_transposed_layers_take_an_output_size(output_size, tolerance):
    layer = scrambled(C.DecoupledConvTranspose2d(4, 5, 3, 2, 1))
    x = batch(3, 4, 5, 5)
    expected = layer(x, output_size)
    torch.testing.assert_close(freeze(layer)(x, output_size), expected, **tolerance(torch.float64))


def test_user_defined_rows_are_frozen(tolerance):
    hb.radial.register(
        "halfway", magnitude=lambda n, rho: rho * (n / rho).sqrt(), parameters={"rho": 1.0}, replace=True
    )
    hb.angular.register("cubed", g=lambda c, k: k * c**3, parameters={"k": 1.5}, replace=True)
    layer = C.DecoupledConv2d(3, 4, 3, magnitude="halfway(rho=2)", angular="cubed(learn_k=True)")
    model = scrambled(nn.Sequential(layer, nn.BatchNorm2d(4)))
    x = batch(2, 3, 6, 6)
    frozen = freeze(model)
    assert folded(frozen) == {"0": "1"}
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


@pytest.mark.parametrize("arguments", [{}, {"double": True}, {"mask": torch.tensor(0.5)}], ids=str)
def test_pairs_are_found_by_what_forward_does(arguments, tolerance):
    model, x = scrambled(nn.ModuleList([Residual()]))[0], batch(2, 4, 6, 6)
    frozen = freeze(model)
    assert folded(frozen) == {"conv1": "bn1", "conv2": "bn2"}
    assert frozen.freeze_report.untraced == ()
    torch.testing.assert_close(frozen(x, **arguments), model(x, **arguments), **tolerance(torch.float64))


def test_a_model_that_cannot_be_traced_is_searched_part_by_part_and_says_so(tolerance):
    model, x = scrambled(Branching()), batch(2, 3, 6, 6)
    frozen = freeze(model)
    found = folded(frozen)
    assert found == {
        "stem.0": None, "last": None,
        **{f"blocks.{i}.conv{j}": f"blocks.{i}.bn{j}" for i in (0, 1) for j in (1, 2)},
    }  # fmt: skip
    (untraced,) = frozen.freeze_report.untraced
    assert "the model (TraceError" in untraced
    assert "not traced" in str(frozen.freeze_report)
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


class Repeated(Tapped):
    def forward(self, x):
        return self.bn(self.conv(x)) + self.conv(2 * x)


class TwoIntoOne(Tapped):
    def __init__(self):
        super().__init__()
        self.other = C.DecoupledConv2d(3, 4, 3)

    def forward(self, x):
        return self.bn(self.conv(x)) + self.bn(self.other(x))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


def watched():
    model = nn.Sequential(C.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def aliased():
    model = Tapped()
    model.also = model.conv
    return nn.Sequential(model, nn.ReLU())


NOT_FOLDED = [
    (Tapped, "its output goes to 2 places"),
    (Repeated, "it is called 2 times"),
    (TwoIntoOne, "bn is called 2 times"),
    (watched, "the BatchNorm has hooks"),
    (aliased, "its output goes to 2 places"),
    (lambda: nn.Sequential(C.DecoupledConv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), "no BatchNorm follows"),
    (lambda: nn.Sequential(C.DecoupledConv2d(3, 4, 3), OwnNorm(4)), "OwnNorm follows"),
    (
        lambda: nn.Sequential(C.DecoupledConv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
        "no running statistics",
    ),
]


@pytest.mark.parametrize("make, reason", NOT_FOLDED)
def test_batch_norm_stays_where_folding_would_be_wrong(make, reason, tolerance):
    model, x = scrambled(make()), batch(2, 3, 6, 6)
    frozen = freeze(model)
    entry = frozen.freeze_report.layers[0]
    assert entry.frozen
    assert entry.folded is None
    assert reason in entry.reason
    assert reason in str(frozen.freeze_report)
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


def test_a_shared_pair_is_frozen_once_and_not_folded(tolerance):
    block = nn.Sequential(C.DecoupledConv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))
    model, x = scrambled(nn.Sequential(block, nn.ReLU(), block)), batch(2, 3, 6, 6)
    frozen = freeze(model)
    assert folded(frozen) == {"0.0": None}
    assert frozen[0][0] is frozen[2][0]
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


def test_a_pair_under_two_names_is_not_folded(tolerance):
    class Alias(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(C.DecoupledConv2d(3, 3, 3), nn.BatchNorm2d(3))
            self.first = self.body[0]

        def forward(self, x):
            return self.body(x)

    model, x = scrambled(Alias()), batch(2, 3, 6, 6)
    frozen = freeze(model)
    assert frozen.freeze_report.layers[0].reason == "one of the two goes by several names"
    assert frozen.first is frozen.body[0]
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


class Scaled(C.DecoupledConv2d):
    def forward(self, input):
        return 2 * super().forward(input)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = C.DecoupledLinear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.body(x), self.body.weight)


def hooked():
    layer = C.DecoupledConv2d(3, 4, 3)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return nn.Sequential(layer, nn.BatchNorm2d(4))


@pytest.mark.parametrize(
    "make, shape, reason",
    [
        (lambda: nn.Sequential(Scaled(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6), "forward of its own"),
        (Tied, (5, 4), "read outside"),
        (hooked, (2, 3, 6, 6), "has hooks"),
    ],
)
def test_a_layer_that_others_look_into_is_kept(make, shape, reason, tolerance):
    model, x = scrambled(make()), batch(*shape)
    frozen = freeze(model).train()
    (entry,) = frozen.freeze_report.layers
    assert not entry.frozen
    assert reason in entry.reason
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


def test_parametrized_weights_are_resolved(tolerance):
    layer = parametrizations.weight_norm(C.DecoupledConv2d(3, 4, 3, weighting="linear"))
    model, x = scrambled(nn.Sequential(layer, nn.BatchNorm2d(4))), batch(2, 3, 6, 6)
    frozen = freeze(model)
    assert folded(frozen) == {"0": "1"}
    torch.testing.assert_close(frozen(x), model(x), **tolerance(torch.float64))


def test_the_original_is_left_alone():
    model = scrambled(Branching()).train()
    model.blocks[0].eval()
    modes, state = [part.training for part in model.modules()], copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    freeze(model)
    assert torch.equal(generator, torch.get_rng_state())
    assert modes == [part.training for part in model.modules()]
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(part, Frozen) for part in model.modules())
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)


def test_what_forward_leaves_behind_in_a_trace_does_not_reach_the_result():
    class Remembering(Tapped):
        seen = None

        def forward(self, x):
            self.seen = self.bn(self.conv(x))
            return self.seen

    frozen = freeze(scrambled(Remembering()))
    assert folded(frozen) == {"conv": "bn"}
    assert frozen.seen is None


@pytest.mark.parametrize(
    "layer, batch_norm, shape",
    [
        (C.DecoupledLinear(4, 6), nn.BatchNorm1d(6), (2, 6, 4)),
        (C.DecoupledConv1d(4, 6, 1), nn.BatchNorm1d(6), (4, 6)),
    ],
)
def test_an_input_whose_batch_norm_ran_along_another_dimension_is_refused(layer, batch_norm, shape):
    frozen = freeze(nn.Sequential(layer, batch_norm))
    with pytest.raises(ValueError, match="`input` must have"):
        frozen(torch.randn(*shape))


def test_a_model_without_decoupled_layers_is_refused_with_what_it_holds():
    with pytest.raises(ValueError, match="no decoupled layer to freeze; Sequential holds 2 Linear, 1 ReLU"):
        freeze(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="got str"):
        freeze("model")


def test_the_report_names_every_layer():
    report = freeze(small()).freeze_report
    assert isinstance(report, FreezeReport)
    assert str(report).splitlines() == [
        "0 (DecoupledConv2d): frozen, 1 folded in",
        "5 (NormalizedLinear): frozen, nothing folded: no BatchNorm follows",
    ]
    assert "folded='1'" in repr(freeze(small()))
