"""The orthogonality penalties of many layers at once: launches, batches, and float64 as the reference."""

from typing import Any

import pytest
import reference
import torch
from launches import launches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hyperball as hb
from hyperball.optim import regularizers

kinds = pytest.mark.parametrize("kind", ["orthonormal", "orthogonal"])
units = pytest.mark.parametrize("unit", [False, True])

BATCHES: dict[str, dict[str, int]] = {
    "one batch": {},
    "a batch a layer": {"CELLS": 1},
    "a few batches": {"CELLS": 4000},
    "smaller matrices for tall layers": {"FEW_FILTERS": 0},
}


def operations(model: nn.Module, kind: str = "orthonormal", unit: bool = True) -> int:
    """Those of the penalty and its backward pass, onto gradients that are there."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return launches(lambda: hb.optim.orthogonality(model, kind, unit=unit).backward())


def network(name: str) -> nn.Module:
    model: nn.Module = hb.models.create(name, num_classes=100, magnitude="tanh", angular="cosine")
    return model


def mixed(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Wide and tall layers, of one shape, of one filter length, of neither, in groups, transposed, channels last."""
    model = nn.Sequential(
        hb.nn.DecoupledConv2d(3, 16, 3),
        hb.nn.DecoupledConv2d(16, 16, 3),
        hb.nn.DecoupledConv2d(16, 16, 3, groups=2),
        hb.nn.DecoupledConv2d(16, 16, 3),
        hb.nn.DecoupledConv2d(16, 24, 3),
        hb.nn.DecoupledConv2d(24, 24, 3, groups=24),
        hb.nn.DecoupledConvTranspose2d(24, 8, 3, groups=2),
        hb.nn.DecoupledLinear(8, 30),
        hb.nn.DecoupledLinear(30, 1),
        hb.nn.DecoupledLinear(27, 5),
        hb.nn.DecoupledLinear(8, 12),
    ).to(dtype)
    model[1].to(memory_format=torch.channels_last)
    return model


def expected(model: nn.Module, kind: str, unit: bool) -> tuple[Tensor, list[Tensor]]:
    """The value and the gradients of the weights by the reference, layer by layer in float64."""
    total, weights = torch.zeros((), dtype=torch.float64), []
    for layer in model.children():
        weight = layer.weight.detach().double().requires_grad_()
        groups = getattr(layer, "groups", 1)
        is_transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
        rows = (reference.transpose_filters(weight, groups) if is_transposed else weight).flatten(1)
        if unit:
            rows = rows / rows.detach().abs().amax(1, keepdim=True)
            rows = rows / rows.norm(dim=1, keepdim=True)
        total = total + reference.orthogonality(rows, groups, kind)
        weights.append(weight)
    return total.detach(), list(torch.autograd.grad(total, weights))


def own(model: nn.Module, kind: str, unit: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    value = hb.optim.orthogonality(model, kind, unit=unit)
    return value.detach(), torch.autograd.grad(value, [layer.weight for layer in model.children()])


def mixed_from(model: nn.Module) -> nn.Sequential:
    """The same weights in float32."""
    wide = mixed()
    wide.load_state_dict(model.state_dict())
    return wide


def rows_in(model: nn.Module) -> list[Tensor]:
    return [regularizers.rows_of(layer).detach().double() for layer in model.children()]


def rest(rows: Tensor, kind: str, unit: bool) -> Tensor:
    """WWᵀ without the identity or without its diagonal; a zero filter stays zero."""
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp(1e-30) if unit else rows
    gram = rows @ rows.mT
    identity = torch.eye(gram.shape[-1]).to(gram)
    return gram - (identity if kind == "orthonormal" else gram * identity)


def assert_right(model: nn.Module, kind: str, unit: bool, rounding: float) -> None:
    """The value and each layer's gradient, relative to its largest entry; a filter alone has exactly none."""
    value, gradients = own(model, kind, unit)
    right_value, right_gradients = expected(model, kind, unit)
    torch.testing.assert_close(value.double().cpu(), right_value.cpu(), rtol=10 * rounding, atol=0)
    for gradient, right, layer in zip(gradients, right_gradients, model.children(), strict=True):
        least = 1 / layer.weight.detach().double().abs().max()
        largest = torch.maximum(right.abs().max(), least)
        assert (gradient.double() - right).abs().max() <= rounding * largest


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(part.numel() for part in tree_leaves(result) if isinstance(part, Tensor))]
        )
        return result


class TestLaunches:
    @pytest.mark.parametrize("name, bound", [("cnn9", 52), ("resnet32", 70)])
    def test_a_network_takes_few(self, name, bound):
        assert operations(network(name).to("meta")) <= bound

    @kinds
    @units
    def test_a_layer_of_a_known_shape_adds_its_gradient_and_nothing_else(self, kind, unit):
        model = mixed()
        before = operations(model, kind, unit)
        model.append(hb.nn.DecoupledConv2d(16, 16, 3)).append(hb.nn.DecoupledLinear(8, 30))
        assert operations(model, kind, unit) == before + 2

    @kinds
    @units
    def test_a_layer_of_another_shape_adds_at_most_five(self, kind, unit):
        model = mixed()
        before = operations(model, kind, unit)
        model.append(hb.nn.DecoupledLinear(50, 20))
        assert operations(model, kind, unit) <= before + 5

    def test_weights_in_channels_last_take_no_copies(self):
        model = network("digits")
        before = operations(model)
        assert operations(model.to(memory_format=torch.channels_last)) == before

    def test_half_precision_takes_one_cast_each_way(self):
        model = mixed()
        before = operations(model)
        assert operations(model.bfloat16()) == before + 2


class TestBatches:
    @kinds
    @units
    @pytest.mark.parametrize("limits", BATCHES)
    @pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
    def test_many_layers_agree_with_the_reference(self, kind, unit, limits, dtype, rounding, monkeypatch):
        for name, limit in BATCHES[limits].items():
            monkeypatch.setattr(regularizers, name, limit)
        assert_right(mixed(dtype), kind, unit, rounding)

    @pytest.mark.parametrize("limits, count", [("one batch", 1), ("a few batches", 4), ("a batch a layer", 11)])
    def test_limits_split_the_layers(self, limits, count, monkeypatch):
        for name, limit in BATCHES[limits].items():
            monkeypatch.setattr(regularizers, name, limit)
        found = regularizers.batches([regularizers.rows_of(layer) for layer in mixed()])
        assert len(found) == count
        assert sorted(index for batch in found for index in batch) == list(range(11))

    @kinds
    @units
    def test_half_precision_computes_in_float32(self, kind, unit):
        model = mixed(torch.bfloat16)
        value, gradients = own(model, kind, unit)
        assert value.dtype == torch.float32
        wide_value, wide_gradients = own(mixed_from(model), kind, unit)
        assert torch.equal(value, wide_value)
        for gradient, wide in zip(gradients, wide_gradients, strict=True):
            assert torch.equal(gradient, wide.bfloat16())

    def test_layers_of_several_dtypes_add_up(self):
        model = mixed()
        model[1].double()
        model[4].half()
        assert_right(model, "orthonormal", True, 1e-3)

    def test_small_matrices_do_not_pay_for_large_ones(self):
        small, large = torch.empty(1, 64, 576, device="meta"), torch.empty(1, 4096, 4096, device="meta")
        *rest, last = regularizers.batches([*[small] * 1000, large])
        assert last == [1000]
        assert len(rest) == 2
        assert max(map(len, rest)) * small.numel() <= regularizers.CELLS

    def test_tall_layers_share_a_batch_of_their_own(self):
        tall, wide = torch.empty(1, 5000, 300, device="meta"), torch.empty(1, 300, 5000, device="meta")
        assert regularizers.batches([tall, wide] * 12) == [list(range(1, 24, 2)), list(range(0, 24, 2))]

    def test_a_tall_layer_of_many_filters_has_no_matrix_of_all_of_them(self):
        with Largest() as seen:
            hb.optim.orthogonality(hb.nn.DecoupledLinear(16, 5000), unit=True).backward()
        assert seen.elements <= 5000 * 16


class TestExtremes:
    @pytest.mark.parametrize("size", [1e-36, 1e-30, 1e30, 1e35])
    def test_long_and_short_filters_have_exact_gradients(self, size):
        model = mixed()
        for layer in model[:5]:
            layer.weight.data.mul_(size)
        assert_right(model, "orthonormal", True, 2e-6)

    def test_parallel_filters_next_to_underflow_have_finite_gradients(self):
        layer = hb.nn.DecoupledLinear(40, 200)
        layer.weight.data = 1e-37 * (torch.randn(1, 40) + 0.1 * torch.randn(200, 40))
        assert_right(nn.Sequential(layer), "orthonormal", True, 1e-4)

    def test_filters_longer_than_the_largest_number_have_the_penalty_of_their_direction(self):
        layer = hb.nn.DecoupledLinear(64, 8)
        layer.weight.data = 3e38 * torch.rand(8, 64)
        value, _ = expected(nn.Sequential(layer), "orthonormal", True)
        torch.testing.assert_close(hb.optim.orthogonality(layer, unit=True).double(), value, rtol=1e-5, atol=0)

    @kinds
    @units
    @pytest.mark.parametrize("limits", ["one batch", "smaller matrices for tall layers"])
    def test_a_zero_filter_has_no_gradient_and_its_row_of_the_identity(self, kind, unit, limits, monkeypatch):
        for name, limit in BATCHES[limits].items():
            monkeypatch.setattr(regularizers, name, limit)
        model = mixed()
        for layer in model[:6]:
            layer.weight.data[1] = 0.0
        value, gradients = own(model, kind, unit)
        assert all(not gradient[1].any() for gradient in gradients[:6])
        assert all(gradient.isfinite().all() for gradient in gradients)
        right = sum(rest(rows, kind, unit).square().sum() for rows in rows_in(model))
        torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=0)

    def test_a_filter_that_is_not_a_number_makes_the_penalty_none(self):
        model = mixed()
        model[3].weight.data[0, 0, 0, 0] = torch.nan
        assert hb.optim.orthogonality(model, unit=True).isnan()


class TestGradients:
    def test_they_are_kept_for_a_second_backward_pass(self):
        model = mixed()
        value = hb.optim.orthogonality(model, unit=True)
        value.backward(retain_graph=True)
        once = [layer.weight.grad.clone() for layer in model]
        value.backward()
        assert all(torch.equal(layer.weight.grad, 2 * grad) for layer, grad in zip(model, once, strict=True))

    def test_they_have_the_memory_format_of_the_weights_and_may_be_changed_in_place(self):
        model = mixed().to(memory_format=torch.channels_last)
        hb.optim.orthogonality(model).backward()
        grads = [layer.weight.grad for layer in model]
        others = [grad.clone() for grad in grads[1:]]
        assert all(grad.stride() == layer.weight.stride() for grad, layer in zip(grads, model[:5], strict=False))
        grads[0].mul_(2)
        assert all(torch.equal(grad, other) for grad, other in zip(grads[1:], others, strict=True))

    def test_a_frozen_weight_counts_and_gets_none(self):
        model = mixed()
        value, gradients = own(model, "orthonormal", True)
        model[1].weight.requires_grad_(False)
        frozen = hb.optim.orthogonality(model, unit=True)
        frozen.backward()
        assert torch.equal(frozen, value)
        assert model[1].weight.grad is None
        assert torch.equal(model[2].weight.grad, gradients[2])

    @kinds
    @units
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_those_asked_for_with_a_graph_are_the_same(self, kind, unit, dtype, tolerance):
        model = mixed(dtype)
        weights = [layer.weight for layer in model]
        plain = torch.autograd.grad(hb.optim.orthogonality(model, kind, unit=unit), weights)
        value = hb.optim.orthogonality(model, kind, unit=unit)
        torch.testing.assert_close(torch.autograd.grad(value, weights, create_graph=True), plain, **tolerance(dtype, 4))


@pytest.mark.gpu
class TestOnTheGPU:
    @kinds
    @units
    @pytest.mark.parametrize("limits", BATCHES)
    def test_it_agrees_with_the_reference(self, kind, unit, limits, monkeypatch):
        for name, limit in BATCHES[limits].items():
            monkeypatch.setattr(regularizers, name, limit)
        assert_right(mixed().cuda(), kind, unit, 1e-5)

    def test_captured_in_a_graph_it_follows_the_weights(self):
        model = network("cnn9").cuda().to(memory_format=torch.channels_last)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            hb.optim.orthogonality(model, unit=True).backward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        model.zero_grad()
        with torch.cuda.graph(graph):
            value = hb.optim.orthogonality(model, unit=True)
            value.backward()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.01)
        graph.replay()
        weights = [parameter for parameter in model.parameters() if parameter.grad is not None]
        right = hb.optim.orthogonality(model, unit=True)
        torch.testing.assert_close(value.detach(), right.detach())
        torch.testing.assert_close([weight.grad for weight in weights], list(torch.autograd.grad(right, weights)))
