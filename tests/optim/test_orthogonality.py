"""The orthogonality penalties against their reference."""

import pytest
import reference
import torch
from optim_cases import DTYPES, LAYERS, filters_of, small_model
from torch import Tensor, nn

import hyperball as hb

layers = pytest.mark.parametrize("kind", LAYERS)


class TestOrthogonality:
    @layers
    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    @pytest.mark.parametrize("unit", [False, True])
    def test_it_is_what_the_reference_computes(self, kind, penalty, unit):
        layer = LAYERS[kind](dtype=torch.float64)
        rows = filters_of(layer)
        if unit:
            rows = rows / rows.norm(dim=1, keepdim=True)
        expected = reference.orthogonality(rows, getattr(layer, "groups", 1), penalty)
        torch.testing.assert_close(hb.optim.orthogonality(layer, penalty, unit=unit), expected)

    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    @pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 40])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_wide_and_tall_weights_agree_with_the_reference(self, penalty, outputs, dtype, tolerance):
        layer = hb.nn.DecoupledLinear(8, outputs, dtype=dtype)
        penalty_value = hb.optim.orthogonality(layer, penalty)
        expected = reference.orthogonality(layer.weight.detach(), 1, penalty)
        float_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        assert penalty_value.dtype == float_dtype
        torch.testing.assert_close(penalty_value.double(), expected, **tolerance(float_dtype))

    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    @pytest.mark.parametrize("outputs", [3, 12])
    @pytest.mark.parametrize("unit", [False, True])
    def test_first_and_second_derivatives_are_right(self, penalty, outputs, unit):
        layer = hb.nn.DecoupledLinear(5, outputs, dtype=torch.float64)

        def penalty_of(weight: Tensor) -> Tensor:
            return torch.func.functional_call(Penalty(layer, penalty, unit), {"layer.weight": weight})

        assert torch.autograd.gradcheck(penalty_of, layer.weight)
        assert torch.autograd.gradgradcheck(penalty_of, layer.weight)

    def test_descent_on_the_penalty_makes_each_groups_filters_orthonormal(self):
        layer = hb.nn.DecoupledConv2d(4, 6, 3, groups=2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(200):
            optimizer.zero_grad()
            hb.optim.orthogonality(layer).backward()
            optimizer.step()
        for block in filters_of(layer).chunk(2):
            torch.testing.assert_close(block @ block.T, torch.eye(3).double(), rtol=0, atol=1e-5)

    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    @pytest.mark.parametrize("outputs", [24, 64])
    def test_orthonormal_filters_have_no_penalty_to_rounding_squared(self, penalty, outputs):
        layer = hb.nn.DecoupledLinear(64, outputs)
        nn.init.orthogonal_(layer.weight)
        assert 0 <= hb.optim.orthogonality(layer, penalty) < 1e-9

    def test_it_sums_over_layers_and_counts_a_shared_weight_once(self):
        model = small_model()
        alone = hb.optim.orthogonality(model[0]) + hb.optim.orthogonality(model[3])
        torch.testing.assert_close(hb.optim.orthogonality(model), alone)
        model.append(hb.nn.DecoupledConv2d(3, 6, 3)).get_submodule("6").weight = model[0].weight
        torch.testing.assert_close(hb.optim.orthogonality(model), alone)

    def test_autocast_does_not_narrow_it(self):
        layer = hb.nn.DecoupledLinear(64, 32)
        expected = hb.optim.orthogonality(layer)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(hb.optim.orthogonality(layer), expected)

    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    def test_it_compiles_in_one_graph(self, penalty):
        model = small_model()
        compiled = torch.compile(
            lambda: hb.optim.orthogonality(model, penalty, unit=True), backend="aot_eager", fullgraph=True
        )
        expected = torch.autograd.grad(hb.optim.orthogonality(model, penalty, unit=True), model[0].weight)
        torch.testing.assert_close(torch.autograd.grad(compiled(), model[0].weight), expected)

    @layers
    @pytest.mark.parametrize("penalty", ["orthonormal", "orthogonal"])
    @pytest.mark.parametrize("unit", [False, True])
    def test_its_own_gradient_is_that_of_torch(self, kind, penalty, unit):
        layer = LAYERS[kind](dtype=torch.float64)
        own = torch.autograd.grad(hb.optim.orthogonality(layer, penalty, unit=unit), layer.weight)
        rows = layer.filters().flatten(1)
        if unit:
            rows = rows / rows.norm(dim=1, keepdim=True)
        blocks = rows.unflatten(0, (getattr(layer, "groups", 1), -1))
        gram = blocks @ blocks.mT
        target = torch.eye(gram.shape[-1]).double() if penalty == "orthonormal" else gram * torch.eye(gram.shape[-1])
        torch.testing.assert_close(own, torch.autograd.grad((gram - target).square().sum(), layer.weight))

    def test_second_derivatives_pass_by_weights_that_ask_for_none(self):
        model = small_model()
        model[0].weight.requires_grad_(False)
        value = hb.optim.orthogonality(model, unit=True)
        (first,) = torch.autograd.grad(value, model[3].weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), model[3].weight)
        alone = hb.optim.orthogonality(model[3], unit=True)
        (expected,) = torch.autograd.grad(alone, model[3].weight, create_graph=True)
        torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), model[3].weight)[0])

    @pytest.mark.parametrize("size", [1e-30, 1e30])
    def test_unit_filters_of_any_length_have_the_same_penalty(self, size):
        layer = hb.nn.DecoupledLinear(6, 4)
        expected = hb.optim.orthogonality(layer, unit=True)
        layer.weight.data.mul_(size)
        torch.testing.assert_close(hb.optim.orthogonality(layer, unit=True), expected)

    def test_zero_filters_have_finite_gradients(self):
        layer = hb.nn.DecoupledLinear(4, 3)
        layer.weight.data[1] = 0.0
        hb.optim.orthogonality(layer, unit=True).backward()
        assert torch.isfinite(layer.weight.grad).all()


class Penalty(nn.Module):
    def __init__(self, layer: nn.Module, kind: str, unit: bool) -> None:
        super().__init__()
        self.layer, self.kind, self.unit = layer, kind, unit

    def forward(self) -> Tensor:
        return hb.optim.orthogonality(self.layer, self.kind, unit=self.unit)
