"""Weighted gradients: the gradient or the update of a filter times its length."""

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
    small_model,
    train,
)
from torch import Tensor, nn

import hyperball as hb

layers = pytest.mark.parametrize("kind", LAYERS)


class TestWeightedGradients:
    @layers
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_filters_gradient_is_multiplied_by_its_length(self, kind, dtype, tolerance):
        layer = LAYERS[kind]().to(dtype)
        layer.weight.grad = torch.randn_like(layer.weight)
        expected = filters_of(layer, layer.weight.grad) * filters_of(layer).norm(dim=1, keepdim=True)
        hb.optim.WeightedGradients(layer).scale_gradients()
        assert layer.weight.grad.dtype == dtype
        torch.testing.assert_close(filters_of(layer, layer.weight.grad), expected, **tolerance(dtype))

    @pytest.mark.parametrize("angular", ["cosine", "square_cosine"])
    def test_weighted_gradients_do_not_depend_on_the_length_of_filters(self, angular):
        gradients = []
        x = torch.randn(2, 3, 6, 6)
        weight = torch.randn(4, 3, 3, 3)
        for length in (1.0, 37.0):
            layer = hb.nn.DecoupledConv2d(3, 4, 3, angular=angular)
            layer.weight.data.copy_(weight * length)
            layer(x).square().sum().backward()
            hb.optim.WeightedGradients(layer).scale_gradients()
            gradients.append(layer.weight.grad)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("where", ["grad", "update"])
    def test_both_forms_are_the_same_for_plain_gradient_descent(self, where):
        model = small_model()
        before = [weight.detach().clone() for weight in decoupled_weights(model)]
        linear = model[5].weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hb.optim.WeightedGradients(model, where=where).attach(optimizer)
        backward(model)
        raw = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        for name, weight, old in zip(DECOUPLED, decoupled_weights(model), before):
            length = old.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
            torch.testing.assert_close(weight.detach(), old - 0.1 * length * raw[name])
        torch.testing.assert_close(model[5].weight.detach(), linear - 0.1 * raw["5.weight"])

    def test_for_adam_the_gradient_form_is_almost_nothing_and_the_update_form_acts(self):
        moves = {}
        for where in ("none", "grad", "update"):
            torch.manual_seed(1)
            layer = hb.nn.DecoupledLinear(6, 5, dtype=torch.float64)
            layer.weight.data.mul_(7.0)
            old = layer.weight.detach().clone()
            optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
            if where != "none":
                hb.optim.WeightedGradients(layer, where=where).attach(optimizer)
            layer(torch.randn(8, 6, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            moves[where] = layer.weight.detach() - old
        torch.testing.assert_close(moves["grad"], moves["none"], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(moves["update"], moves["none"] * old.norm(dim=1, keepdim=True))

    def test_unit_filters_are_stepped_exactly_as_without_it(self):
        model = small_model()
        hb.optim.WeightProjection(model).project()
        for weight in decoupled_weights(model):
            weight.data.zero_().view(weight.shape[0], -1)[:, 1] = 1.0
        twin = copy.deepcopy(model)
        for m in (model, twin):
            torch.manual_seed(2)
            optimizer = OPTIMIZERS["adamw"](m.parameters())
            if m is model:
                hb.optim.WeightedGradients(m, where="update").attach(optimizer)
            train(m, optimizer, 1)
        assert all(torch.equal(a, b) for a, b in zip(decoupled_weights(model), decoupled_weights(twin)))

    @pytest.mark.parametrize("where", ["grad", "update"])
    @pytest.mark.parametrize("as_keyword", [False, True])
    def test_gradients_that_a_closure_computes_are_scaled_too(self, where, as_keyword):
        plain, hooked = (hb.nn.DecoupledLinear(3, 2) for _ in range(2))
        hooked.load_state_dict(plain.state_dict())
        x = torch.randn(5, 3)
        scale = hb.optim.WeightedGradients(plain)
        plain(x).square().sum().backward()
        scale.scale_gradients()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        optimizer = torch.optim.SGD(hooked.parameters(), lr=0.1)
        hb.optim.WeightedGradients(hooked, where=where).attach(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = hooked(x).square().sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        assert loss.item() > 0
        torch.testing.assert_close(hooked.weight, plain.weight)

    @pytest.mark.parametrize("where", ["grad", "update"])
    def test_two_optimizers_of_one_model_each_scale_their_own_weights_once(self, where):
        model = nn.Sequential(hb.nn.DecoupledLinear(3, 3), hb.nn.DecoupledLinear(3, 3))
        scale = hb.optim.WeightedGradients(model, where=where)
        both = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        for optimizer in both:
            scale.attach(optimizer)
        old = [layer.weight.detach().clone() for layer in model]
        model(torch.randn(4, 3)).square().sum().backward()
        raw = [layer.weight.grad.clone() for layer in model]
        for optimizer in both:
            optimizer.step()
        for layer, start, grad in zip(model, old, raw):
            expected = start - 0.1 * start.norm(dim=1, keepdim=True) * grad
            torch.testing.assert_close(layer.weight.detach(), expected)

    def test_a_weight_that_two_layers_share_is_scaled_once(self):
        model = nn.Sequential(hb.nn.DecoupledLinear(3, 3), hb.nn.DecoupledLinear(3, 3))
        model[1].weight = model[0].weight
        weight = model[0].weight
        weight.grad = torch.ones_like(weight)
        hb.optim.WeightedGradients(model).scale_gradients()
        torch.testing.assert_close(weight.grad, weight.detach().norm(dim=1, keepdim=True).expand(3, 3))

    def test_weighted_layers_and_frozen_weights_are_left_alone(self):
        model = nn.Sequential(hb.nn.DecoupledLinear(3, 3, weighting="linear"), hb.nn.DecoupledLinear(3, 3))
        frozen = hb.nn.DecoupledLinear(3, 3).requires_grad_(False)
        scale = hb.optim.WeightedGradients(model.append(frozen))
        for layer in model:
            layer.weight.grad = torch.ones_like(layer.weight)
        scale.scale_gradients()
        assert torch.equal(model[0].weight.grad, torch.ones(3, 3))
        assert torch.equal(frozen.weight.grad, torch.ones(3, 3))
        assert not torch.equal(model[1].weight.grad, torch.ones(3, 3))

    def test_attached_first_it_leaves_projection_the_last_word(self):
        model = small_model()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        hb.optim.WeightedGradients(model, where="update").attach(optimizer)
        hb.optim.WeightProjection(model, every=1).attach(optimizer)
        train(model, optimizer, 2)
        lengths = filters_of(model[0]).norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths))

    @pytest.mark.parametrize("kind", ["sgd", "adam, fused"])
    def test_a_step_that_a_grad_scaler_skips_moves_nothing(self, kind):
        model = small_model()
        old = [weight.detach().clone() for weight in decoupled_weights(model)]
        optimizer = OPTIMIZERS[kind](model.parameters())
        hb.optim.WeightedGradients(model, where="update").attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        backward(model, scaler)
        model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        assert all(torch.equal(weight, start) for weight, start in zip(decoupled_weights(model), old))

    @pytest.mark.parametrize("where", ["grad", "update"])
    def test_a_grad_scaler_changes_nothing_else(self, where):
        weights = []
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
            torch.manual_seed(3)
            model = small_model()
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            hb.optim.WeightedGradients(model, where=where).attach(optimizer)
            backward(model, scaler)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            weights.append(model[0].weight.detach())
        torch.testing.assert_close(weights[1], weights[0])
