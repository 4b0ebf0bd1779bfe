"""Diagnosis: numbers against the reference geometry, dead radii against autograd, and a model left untouched."""

import copy
import importlib
import json
from types import MappingProxyType

import numpy as np
import pytest
import reference
import torch
from torch import nn

import hyperball as hb
from hyperball import nn as C
from hyperball.diagnose import Diagnosis, LayerDiagnosis, diagnose
from hyperball.freeze import freeze

module = importlib.import_module("hyperball.diagnose")  # as an attribute, the name is the function
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


def only(diagnosis: Diagnosis) -> LayerDiagnosis:
    (layer,) = diagnosis.layers
    return layer


def same_distribution(got, values):
    values = values.detach().double().flatten().numpy()
    assert got.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-12)
    for key, q in QUANTILES.items():
        assert getattr(got, key) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-12)


def geometry(layer, x, output_size=None):
    """n per group and cos per channel, by the reference."""
    weight = layer.weight
    if weight.dim() == 2:
        taken = x.reshape(-1, x.shape[-1], 1)
        return reference.patch_norm(taken), reference.geometry(taken, weight)[2]
    size = tuple(weight.shape[2:])
    if isinstance(layer, C.DecoupledConvTranspose2d):
        extra = (0, 0) if output_size is None else tuple(output_size[i] - (2 * x.shape[2 + i] + 1) for i in (0, 1))
        taken = reference.transpose_patches(x, size, layer.stride, layer.padding, extra, layer.dilation)
        weight = reference.transpose_filters(weight, layer.groups)
    else:
        taken = reference.patches(x, size, layer.stride, layer.padding, layer.dilation, layer.padding_mode)
    return reference.patch_norm(taken, layer.groups), reference.geometry(taken, weight, layer.groups)[2]


LAYERS = [
    (C.DecoupledConv2d(4, 6, 3, 2, 1, groups=2, dtype=torch.float64), (3, 4, 7, 8)),
    (C.DecoupledConv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=True, dtype=torch.float64), (3, 4, 6, 6)),
    (C.DecoupledConv1d(4, 6, 4, padding="same", dilation=2, dtype=torch.float64), (3, 4, 9)),
    (C.DecoupledConv3d(2, 4, 2, dtype=torch.float64), (2, 2, 3, 3, 4)),
    (C.DecoupledConvTranspose2d(4, 6, 3, 2, groups=2, dtype=torch.float64), (3, 4, 5, 5)),
    (C.DecoupledLinear(4, 6, dtype=torch.float64), (2, 5, 4)),
]


@pytest.mark.parametrize("layer, shape", LAYERS, ids=lambda item: type(item).__name__)
def test_norms_and_cosines_are_those_of_the_patches(layer, shape):
    layer, x = copy.deepcopy(layer), torch.randn(*shape, dtype=torch.float64)
    found = only(diagnose(layer, x))
    n, c = geometry(layer, x)
    same_distribution(found.norm, n)
    same_distribution(found.cosine, c)
    groups = getattr(layer, "groups", 1)
    assert found.patches == n.numel() // groups
    assert found.calls == 1
    inside = n.repeat_interleave(6 // groups, 1) if groups > 1 else n.reshape(n.shape[0], 1, -1)
    shares = [(inside[:, i if groups > 1 else 0] < rho).double().mean().item() for i, rho in enumerate(layer.radius)]
    assert found.radii[0].inside == pytest.approx(np.mean(shares), rel=1e-9)


def test_a_transposed_layer_is_seen_with_its_output_size():
    layer, x = C.DecoupledConvTranspose2d(4, 6, 3, 2, dtype=torch.float64), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    n, c = geometry(layer, x, (12, 11))
    found = only(diagnose(layer, (x, [12, 11])))
    assert n.shape[2:] == (12, 11)
    same_distribution(found.norm, n)
    same_distribution(found.cosine, c[(n > 0).expand_as(c)])  # no input reaches the last row


def test_zero_vectors_have_no_direction():
    layer, x = C.DecoupledLinear(4, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    x[:3] = 0
    with torch.no_grad():
        layer.weight[1] = 0
    found = only(diagnose(layer, x))
    n, c = geometry(layer, x)
    same_distribution(found.norm, n)
    same_distribution(found.cosine, c[3:, [0, 2]])
    assert found.zero_filters == (1,)
    assert found.filter_norm.minimum == 0


@pytest.mark.parametrize("text", ["ball(rho=2)", "tanh(rho=2, relative=False)", "seg(per='layer')", "piecewise"])
def test_the_radius_is_the_one_evaluation_uses(text):
    layer = C.DecoupledConv2d(3, 5, 3, magnitude=text)
    with torch.no_grad():
        for parameter in layer.magnitude.parameters():
            parameter.add_(torch.rand_like(parameter))
    (radius,) = only(diagnose(layer, torch.randn(2, 3, 6, 6))).radii
    rho = layer.radius
    assert radius.count == rho.numel()
    expected = (rho.min().item(), rho.mean().item(), rho.max().item())
    assert (radius.value.minimum, radius.value.mean, radius.value.maximum) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("text", ["sphere", "linear", "log", "mix"])
def test_magnitudes_without_a_radius_report_none(text):
    assert only(diagnose(C.DecoupledConv2d(3, 4, 3, magnitude=text), torch.randn(2, 3, 6, 6))).radii == ()


RADII = {"rho": torch.logspace(-3, 3, 7, dtype=torch.float64), "relative": False}
PIECES = {"slopes": [1, 0.5, 0.2], "learn_slopes": False}
PROPORTIONAL = {
    "ball": hb.radial.ball(**RADII),
    "tanh": hb.radial.tanh(**RADII),
    "barron": hb.radial.barron(**RADII),
}
RADIAL = {
    **PROPORTIONAL,
    "seg": hb.radial.seg(**RADII),
    "piecewise": hb.radial.piecewise(**RADII, **PIECES),
    "linear + ball": hb.radial.add("linear", hb.radial.ball(**RADII)),
}


@pytest.mark.parametrize(
    "name, weighting",
    [(name, weighting) for name in RADIAL for weighting in ("none", "linear", "joint")]
    + [(name, "split") for name in PROPORTIONAL],
)
def test_a_dead_radius_is_one_that_gets_no_gradient(name, weighting):
    magnitude = RADIAL[name]
    layer = C.DecoupledConv2d(2, 7, 3, magnitude=magnitude, weighting=weighting, dtype=torch.float64)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    x[0] = 0
    out = layer(x)
    (log_rho,) = layer.magnitude.parameters()
    (grad,) = torch.autograd.grad(out.abs().sum(), log_rho)
    scale = out.abs().sum((0, 2, 3))
    unfelt = (grad.abs() <= 1e-7 * scale).nonzero().flatten().tolist()
    (radius,) = only(diagnose(layer, x)).radii
    assert list(radius.dead) == unfelt
    if name in ("ball", "seg") and weighting == "none":
        assert 0 < len(unfelt) < 7


@pytest.mark.parametrize(
    "text, length, dead",
    [
        ("ball", 0.1, 0),
        ("ball", 10.0, 1),
        ("ball", 0.0, 1),
        ("seg", 0.1, 1),
        ("seg", 10.0, 0),
        ("tanh", 0.1, 0),
        ("tanh", 30.0, 1),
    ],
)
def test_a_radius_is_dead_on_the_side_where_its_magnitude_ignores_it(text, length, dead):
    layer = C.DecoupledLinear(3, 2, magnitude=f"{text}(relative=False, per='layer')")
    x = nn.functional.normalize(torch.randn(8, 3)) * length
    (radius,) = only(diagnose(layer, x)).radii
    assert radius.count == 1
    assert len(radius.dead) == dead
    assert radius.inside == (1.0 if length < 1 else 0.0)


def test_a_user_defined_radius_can_be_dead_too():
    hb.radial.register("capped", gain=lambda n, rho: rho / n.clamp(min=rho), parameters={"rho": 1.0}, replace=True)
    hb.radial.register("deaf", gain=lambda n, rho: torch.ones_like(n), parameters={"rho": 1.0}, replace=True)
    x = torch.nn.functional.normalize(torch.randn(8, 3)) * 0.5
    for text, dead in (("capped", 2), ("capped(rho=0.1)", 0), ("deaf", 2)):
        magnitude = hb.radial.parse(text)
        magnitude = magnitude.row(**magnitude.parameters, relative=False)
        (radius,) = only(diagnose(C.DecoupledLinear(3, 2, magnitude=magnitude), x)).radii
        assert len(radius.dead) == dead


class Recurrent(nn.Module):
    """One layer called twice, one never, one with keyword arguments."""

    def __init__(self):
        super().__init__()
        self.cell = C.DecoupledLinear(4, 4, magnitude="ball")
        self.spare = C.DecoupledLinear(4, 4, magnitude="tanh + ball")
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, first, second):
        return self.dropout(self.norm(self.cell(input=first))), nn.functional.dropout(self.cell(second))


def test_calls_are_added_up_and_layers_that_were_not_called_are_listed():
    model, first, second = Recurrent().double(), torch.randn(6, 4).double(), torch.randn(9, 4).double()
    diagnosis = diagnose(model, (first, second))
    together = only(diagnose(model.cell, torch.cat([first, second])))
    cell, spare = diagnosis["cell"], diagnosis["spare"]
    assert (cell.calls, cell.patches) == (2, 15)
    assert cell.norm == together.norm
    assert cell.cosine == together.cosine
    assert (spare.calls, spare.norm, spare.cosine) == (0, None, None)
    assert [(radius.term, radius.inside, radius.dead) for radius in spare.radii] == [
        ("tanh", None, None),
        ("ball", None, None),
    ]
    assert "not called" in str(diagnosis)
    with pytest.raises(KeyError, match="known: cell, spare"):
        diagnosis["other"]


def test_a_batch_is_one_argument_a_tuple_or_a_mapping():
    model, x = Recurrent(), torch.randn(6, 4)
    expected = diagnose(model, (x, 2 * x))
    assert diagnose(model, {"first": x, "second": 2 * x}) == expected
    assert diagnose(model, MappingProxyType({"first": x, "second": 2 * x})) == expected
    assert only(diagnose(nn.Sequential(model.cell), x)) == only(diagnose(nn.Sequential(model.cell), (x,)))


def snapshot(model):
    return (
        copy.deepcopy(model.state_dict()), [part.training for part in model.modules()], torch.get_rng_state(),
        [len(part._forward_hooks) for part in model.modules()], [p.grad for p in model.parameters()],
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model, x = Recurrent().train(), torch.randn(6, 4)
    model.norm.eval()
    model.norm.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    if fails:
        with pytest.raises(ValueError, match="`input` must end in 4 features"):
            diagnose(model, (x, x[:, :3]))
    else:
        diagnose(model, (x, x))
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)
    assert model.norm.num_batches_tracked == 0


def test_outputs_that_are_not_finite_are_counted_and_left_out():
    layer, x = C.DecoupledLinear(4, 3, magnitude="tanh"), torch.randn(5, 4)
    clean = only(diagnose(layer, x[1:]))
    x[0, 0] = torch.nan
    diagnosis = diagnose(layer, x)
    found = only(diagnosis)
    assert (clean.nonfinite, found.nonfinite) == (0, 3)
    assert (found.norm, found.cosine) == (clean.norm, clean.cosine)
    assert "3 outputs not finite" in str(diagnosis)
    ruined = only(diagnose(layer, torch.full((5, 4), torch.inf)))
    assert (ruined.norm, ruined.cosine, ruined.nonfinite > 0) == (None, None, True)


def test_an_empty_batch_is_described_without_numbers():
    found = only(diagnose(C.DecoupledConv2d(3, 4, 3), torch.randn(0, 3, 6, 6)))
    assert (found.calls, found.patches, found.norm) == (1, 0, None)


@pytest.mark.parametrize("calls", [1, 3])
def test_many_patches_are_thinned_out_the_same_way_every_time(calls, monkeypatch):
    layer, x = C.DecoupledConv2d(3, 8, 3, padding=1, magnitude="ball"), torch.randn(8, 3, 32, 32)
    model = nn.Sequential(nn.Identity())
    model.forward = lambda x: [layer(part) for part in x.chunk(calls)]
    model.layer = layer
    full = only(diagnose(model, x))
    monkeypatch.setattr(module, "LIMIT", 16_000)
    sizes, kept = [], module.distribution

    def noted(values):
        sizes.append(len(values))
        return kept(values)

    monkeypatch.setattr(module, "distribution", noted)
    thin = only(diagnose(model, x))
    assert thin == only(diagnose(model, x))
    assert thin.patches == full.patches == 8 * 32 * 32
    assert all(500 < size <= 16_100 for size in sizes)
    for got, expected in ((thin.norm, full.norm), (thin.cosine, full.cosine)):
        for key in ("mean", *QUANTILES):
            assert getattr(got, key) == pytest.approx(getattr(expected, key), rel=0.05, abs=0.02)
    assert thin.radii[0].inside == pytest.approx(full.radii[0].inside, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_described_in_float32(dtype):
    layer, x = C.DecoupledConv2d(3, 4, 3, magnitude="ball"), 300 * torch.randn(2, 3, 6, 6)
    wide, narrow = only(diagnose(layer, x)), only(diagnose(layer.to(dtype), x.to(dtype)))
    assert narrow.norm.q50 == pytest.approx(wide.norm.q50, rel=1e-2)
    assert narrow.cosine.q95 == pytest.approx(wide.cosine.q95, rel=3e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert only(diagnose(layer.float(), x.to(dtype).float())).norm.q50 == pytest.approx(wide.norm.q50, rel=1e-2)


def test_inference_mode_is_no_hindrance():
    layer = C.DecoupledConv2d(3, 4, 3, magnitude="ball")
    with torch.inference_mode():
        x = torch.randn(2, 3, 6, 6)
        inside = diagnose(layer, x)
    assert inside == diagnose(layer, x.clone())


def test_compiled_models_are_diagnosed_eagerly():
    model, x = nn.Sequential(C.DecoupledConv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 6, 6)
    expected = diagnose(model, x)
    wrapped = torch.compile(model, backend="eager")
    wrapped(x)
    assert diagnose(wrapped, x).layers[0].calls == 1
    model.eval()
    model.compile(backend="eager")
    model(x)
    assert diagnose(model, x).layers[0].cosine == expected.layers[0].cosine


def test_the_result_is_plain_data():
    model = nn.Sequential(C.DecoupledConv2d(3, 4, 3, magnitude="ball"), nn.ReLU(), C.DecoupledConv2d(4, 2, 3))
    diagnosis = diagnose(model, torch.full((2, 3, 6, 6), torch.nan))
    data = diagnosis.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [layer["name"] for layer in data["layers"]] == ["0", "2"]
    assert data["layers"][0]["radii"][0]["term"] == "ball"
    with pytest.raises(AttributeError):
        diagnosis.layers = ()


def test_the_table_is_aligned_with_one_line_for_every_radius():
    first = C.DecoupledConv2d(3, 4, 3, magnitude="linear + tanh + ball(rho=3)", weighting="joint")
    model = nn.Sequential(first, nn.ReLU(), C.DecoupledConv2d(4, 2, 3, magnitude="log", angular="square_cosine"))
    text = str(diagnose(model, torch.randn(2, 3, 8, 8)))
    header, *rows = text.splitlines()
    assert len(rows) == 3
    for title, cells in (("operator", ("linear +", "", "log × square_cosine")), ("dead", ("0/4", "0/4", "-"))):
        at = header.index(title)
        assert all(row[at - 2 : at] == "  " for row in rows)
        assert all(row[at:].startswith(cell) for row, cell in zip(rows, cells, strict=True))
    assert "joint" in rows[0]


def test_models_without_decoupled_layers_are_refused():
    with pytest.raises(ValueError, match=r"no decoupled layer to diagnose, got Sequential$"):
        diagnose(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2))
    with pytest.raises(ValueError, match="it is frozen: diagnose the model it was made from"):
        diagnose(freeze(nn.Sequential(C.DecoupledLinear(2, 2))), torch.randn(1, 2))
    with pytest.raises(TypeError, match="`model` must be"):
        diagnose(None, torch.randn(1, 2))
