"""Weight projection, and what all of `hyperball.optim` refuses."""

import copy

import pytest
import torch
from optim_cases import (
    DECOUPLED,
    DTYPES,
    LAYERS,
    OPTIMIZERS,
    backward,
    decoupled_weights,
    filters_of,
    inputs_for,
    small_model,
    train,
)
from torch import nn
from torch.nn.utils import parametrizations

import hyperball as hb

layers = pytest.mark.parametrize("kind", LAYERS)


class TestWeightProjection:
    @layers
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_filter_has_the_length_asked_for_and_its_direction(self, kind, dtype, tolerance):
        layer = LAYERS[kind]().to(dtype)
        before = filters_of(layer)
        hb.optim.WeightProjection(layer, scale=2.5).project()
        after = filters_of(layer)
        torch.testing.assert_close(after.norm(dim=1), torch.full((len(after),), 2.5).double(), **tolerance(dtype))
        cos = nn.functional.cosine_similarity(before, after)
        torch.testing.assert_close(cos, torch.ones_like(cos), **tolerance(dtype))

    @layers
    def test_what_an_unweighted_layer_computes_is_unchanged(self, kind):
        layer = LAYERS[kind]().eval()
        x = inputs_for(layer)
        before = layer(x)
        hb.optim.WeightProjection(layer).project()
        torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-6)

    def test_zero_filters_stay_zero_and_far_lengths_become_one(self):
        layer = hb.nn.DecoupledLinear(3, 4)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[0.0, 0, 0], [1e30, 0, 0], [0, 1e-30, 0], [0, 3e-38, 4e-38]]))
        hb.optim.WeightProjection(layer, scale=1e3).project()
        expected = torch.tensor([[0.0, 0, 0], [1e3, 0, 0], [0, 1e3, 0], [0, 600, 800]])
        torch.testing.assert_close(layer.weight.detach(), expected)

    def test_parameters_keep_their_identity_memory_format_and_dtype(self):
        layer = hb.nn.DecoupledConv2d(4, 6, 3, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weight, address = layer.weight, layer.weight.data_ptr()
        hb.optim.WeightProjection(layer).project()
        assert layer.weight is weight
        assert weight.data_ptr() == address
        assert weight.dtype == torch.bfloat16
        assert weight.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_attached_it_projects_every_third_step_and_leaves_optimizer_state_alone(self, kind):
        model = small_model()
        twin = copy.deepcopy(model)
        optimizer, plain = (OPTIMIZERS[kind](m.parameters()) for m in (model, twin))
        hb.optim.WeightProjection(model, every=3).attach(optimizer)
        others = [index for index, (name, _) in enumerate(model.named_parameters()) if name not in DECOUPLED]
        for step in range(1, 8):
            for parameter, other in zip(model.parameters(), twin.parameters()):
                other.data.copy_(parameter.data)
            backward(twin)
            for parameter, other in zip(model.parameters(), twin.parameters()):
                parameter.grad = other.grad.clone()
            optimizer.step()
            plain.step()
            for weight, free, layer in zip(decoupled_weights(model), decoupled_weights(twin), (model[0], model[3])):
                lengths = filters_of(layer).norm(dim=1)
                unit = torch.allclose(lengths, torch.ones_like(lengths), atol=1e-6)
                assert unit == (step % 3 == 0)
                if step % 3:
                    assert torch.equal(weight, free)
            mine, its = list(model.parameters()), list(twin.parameters())
            assert all(torch.equal(mine[index], its[index]) for index in others)
            torch.testing.assert_close(optimizer.state_dict()["state"], plain.state_dict()["state"], rtol=0, atol=0)

    def test_step_counts_by_hand_and_the_count_survives_a_checkpoint(self):
        layer = hb.nn.DecoupledLinear(3, 2)
        first = hb.optim.WeightProjection(layer, every=4)
        for _ in range(3):
            first.step()
        second = hb.optim.WeightProjection(layer, every=4)
        second.load_state_dict(first.state_dict())
        raw = layer.weight.detach().clone()
        second.step()
        assert not torch.equal(layer.weight, raw)
        assert second.state_dict() == {"steps": 4}

    def test_a_removed_hook_projects_no_more(self):
        model = small_model()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        projection = hb.optim.WeightProjection(model, every=1)
        with projection.attach(optimizer):
            train(model, optimizer, 2)
        train(model, optimizer, 2)
        assert projection.steps == 2

    def test_steps_that_a_grad_scaler_skips_are_not_counted(self):
        model = small_model()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        projection = hb.optim.WeightProjection(model, every=2)
        projection.attach(optimizer)
        for overflow in (False, True, False):
            backward(model, scaler)
            if overflow:
                model[5].weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        assert projection.steps == 2
        lengths = filters_of(model[0]).norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))

    def test_weighted_layers_are_refused_by_name_or_passed_over(self):
        weighted = hb.nn.DecoupledConv2d(3, 4, 3, weighting="joint")
        model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), weighted), "b": hb.nn.DecoupledLinear(3, 2)})
        with pytest.raises(ValueError, match=r"`model`.*a\.1 \(weighting 'joint'\)") as refused:
            hb.optim.WeightProjection(model)
        assert "b (" not in str(refused.value)
        before = weighted.weight.detach().clone()
        hb.optim.WeightProjection(model, skip_weighted=True).project()
        assert torch.equal(weighted.weight, before)
        lengths = filters_of(model["b"]).norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))

    def test_a_layer_that_becomes_weighted_is_refused_at_the_next_projection(self):
        layer = hb.nn.DecoupledLinear(3, 2)
        projection = hb.optim.WeightProjection(layer)
        layer.weighting = "linear"
        with pytest.raises(ValueError, match="DecoupledLinear \\(weighting 'linear'\\)"):
            projection.project()

    def test_a_compiled_model_is_projected_like_its_original(self):
        model = small_model()
        wrapped = torch.compile(model, backend="eager")
        optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
        hb.optim.WeightProjection(wrapped, every=1).attach(optimizer)
        train(wrapped, optimizer, 1)
        lengths = filters_of(model[3]).norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_hooks_on_a_compiled_step_act_each_time_and_do_not_compile_it_anew():
    model = small_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    projection = hb.optim.WeightProjection(model, every=2)
    hb.optim.WeightedGradients(model, where="update").attach(optimizer)
    projection.attach(optimizer)
    graphs = []
    step = torch.compile(lambda: optimizer.step(), backend=lambda graph, _: graphs.append(graph) or graph)
    for _ in range(12):
        backward(model)
        step()
    assert projection.steps == 12
    assert 1 <= len(graphs) <= 2
    lengths = filters_of(model[0]).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def decoupled() -> nn.Module:
    return hb.nn.DecoupledLinear(3, 2)


REFUSED = {
    "every=0": (lambda: hb.optim.WeightProjection(decoupled(), every=0), r"`every`.*0"),
    "every=2.5": (lambda: hb.optim.WeightProjection(decoupled(), every=2.5), r"`every`.*2\.5"),
    "scale=0": (lambda: hb.optim.WeightProjection(decoupled(), scale=0.0), r"`scale`.*0\.0"),
    "scale=inf": (lambda: hb.optim.WeightProjection(decoupled(), scale=float("inf")), r"`scale`.*inf"),
    "scale text": (lambda: hb.optim.WeightProjection(decoupled(), scale="1"), r"`scale`.*'1'"),
    "projection, plain": (lambda: hb.optim.WeightProjection(nn.Linear(3, 2)), r"`model`.*decoupled.*Linear"),
    "gradients, plain": (lambda: hb.optim.WeightedGradients(nn.Linear(3, 2)), r"`model`.*decoupled.*Linear"),
    "orthogonality, plain": (lambda: hb.optim.orthogonality(nn.Linear(3, 2)), r"`model`.*decoupled.*Linear"),
    "all weighted": (
        lambda: hb.optim.WeightedGradients(hb.nn.DecoupledLinear(3, 2, weighting="linear")),
        r"`model`.*DecoupledLinear \(weighting 'linear'\)",
    ),
    "parametrized": (
        lambda: hb.optim.WeightProjection(parametrizations.weight_norm(decoupled())),
        r"`model`.*parametrized",
    ),
    "where": (lambda: hb.optim.WeightedGradients(decoupled(), where="grads"), r"`where`.*'grads'.*mean 'grad'"),
    "kind": (lambda: hb.optim.orthogonality(decoupled(), "orthonormel"), r"`kind`.*mean 'orthonormal'"),
    "weight_decay": (lambda: hb.optim.parameter_groups(decoupled(), weight_decay=-0.1), r"`weight_decay`.*-0\.1"),
    "weight_decay nan": (lambda: hb.optim.parameter_groups(decoupled(), weight_decay=float("nan")), r"`weight_decay`"),
    "radius_lr": (lambda: hb.optim.parameter_groups(decoupled(), 0.1, radius_lr=-1.0), r"`radius_lr`.*-1\.0"),
    "state": (lambda: hb.optim.WeightProjection(decoupled()).load_state_dict({"every": 3}), r"`state_dict`.*'every'"),
    "foreign optimizer": (
        lambda: hb.optim.WeightProjection(decoupled()).attach(torch.optim.SGD(nn.Linear(2, 2).parameters())),
        r"`optimizer`.*DecoupledLinear",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_by_name(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call", [hb.optim.WeightProjection, hb.optim.WeightedGradients, hb.optim.orthogonality, hb.optim.parameter_groups]
)
def test_a_model_that_is_no_module_is_refused(call):
    arguments = {"weight_decay": 0.1} if call is hb.optim.parameter_groups else {}
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got list"):
        call([], **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["grad", "update"])
def test_steps_on_a_gpu_wait_for_nothing(where):
    model = small_model().cuda()
    optimizer = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=0.1), lr=0.01, fused=True)
    hb.optim.WeightedGradients(model, where=where).attach(optimizer)
    hb.optim.WeightProjection(model, every=1).attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        hb.optim.orthogonality(model).backward()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lengths = filters_of(model[0]).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
