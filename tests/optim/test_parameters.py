"""Parameter groups: weight decay for plain weights alone."""

import pytest
import torch
from optim_cases import small_model, train
from torch import nn
from torch.nn.utils import parametrizations

import hyperball as hb


class MixedModel(nn.Module):
    """One of everything that a rule speaks of, a shared weight and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = hb.nn.DecoupledConv2d(3, 4, 3, bias=True, magnitude="barron(shape=1, learn_shape=True)")
        self.weighted = hb.nn.DecoupledConv2d(4, 4, 3, weighting="joint", magnitude="seg(per='layer')")
        self.plain = nn.Conv2d(4, 4, 3)
        self.norm = nn.LayerNorm((4, 2, 2))
        self.batch_norm = nn.BatchNorm2d(4)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.softmax = hb.nn.NormalizedLinear(4, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(()))


class TestParameterGroups:
    @pytest.mark.parametrize("radius_lr", [None, 1e-4])
    def test_every_trainable_parameter_is_in_exactly_one_group(self, radius_lr):
        model = MixedModel()
        groups = hb.optim.parameter_groups(model, weight_decay=0.1, radius_lr=radius_lr)
        listed = [id(parameter) for group in groups for parameter in group["params"]]
        assert len(listed) == len(set(listed))
        assert set(listed) == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def test_weight_decay_is_for_plain_weights_alone(self):
        groups = hb.optim.parameter_groups(MixedModel(), weight_decay=0.1)
        decay = {name for group in groups if group["weight_decay"] > 0 for name in group["param_names"]}
        assert decay == {"plain.weight", "embedding.weight"}

    def test_names_belong_to_the_parameters_beside_them(self):
        model = MixedModel()
        for group in hb.optim.parameter_groups(model, weight_decay=0.1, radius_lr=1e-4):
            assert len(group["params"]) == len(group["param_names"])
            assert all(model.get_parameter(name) is p for name, p in zip(group["param_names"], group["params"]))

    def test_what_operators_learn_may_have_a_learning_rate_of_its_own(self):
        model = MixedModel()
        groups = hb.optim.parameter_groups(model, weight_decay=0.1, radius_lr=1e-4)
        radius = {group["name"]: group for group in groups}["radius"]
        assert set(radius["param_names"]) == {name for name, _ in model.named_parameters() if ".magnitude." in name}
        assert len(radius["params"]) == 3  # two radii and one shape
        optimizer = torch.optim.SGD(groups, lr=0.5)
        assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
            "decay": 0.5, "no_decay": 0.5, "radius": 1e-4,
        }  # fmt: skip

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
    def test_without_gradients_a_step_shrinks_plain_weights_and_nothing_else(self, make):
        model = small_model()
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = make(hb.optim.parameter_groups(model, weight_decay=0.5), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
        assert changed == {"5.weight"}
        torch.testing.assert_close(model[5].weight.detach(), before["5.weight"] * 0.95)

    def test_an_optimizers_state_makes_the_round_trip(self):
        model = small_model()
        first = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=0.1), lr=0.01)
        train(model, first, 2)
        second = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=0.1), lr=0.01)
        second.load_state_dict(first.state_dict())
        assert second.param_groups[0]["param_names"] == first.param_groups[0]["param_names"]
        torch.testing.assert_close(second.state_dict()["state"], first.state_dict()["state"])

    def test_adamw_with_these_groups_trains(self):
        model = small_model()
        optimizer = torch.optim.AdamW(hb.optim.parameter_groups(model, weight_decay=0.05), lr=0.01)
        x, y = torch.randn(32, 3, 5, 5), torch.arange(32) % 4
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    def test_empty_groups_are_left_out_and_bare_layers_accepted(self):
        layer = hb.nn.DecoupledLinear(3, 2)
        assert [group["name"] for group in hb.optim.parameter_groups(layer, weight_decay=0.1)] == ["no_decay"]
        plain = nn.Linear(3, 2, bias=False)
        assert [group["name"] for group in hb.optim.parameter_groups(plain, weight_decay=0.1)] == ["decay"]

    def test_a_parametrized_decoupled_weight_is_kept_out_too(self):
        layer = parametrizations.weight_norm(hb.nn.DecoupledLinear(3, 2))
        assert [group["name"] for group in hb.optim.parameter_groups(layer, weight_decay=0.1)] == ["no_decay"]
