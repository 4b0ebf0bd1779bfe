"""Surrogates of declarative layers: the same outputs, gradients that an inner problem cannot hide, no trace left."""

import copy
import math

import pytest
import torch
from attack_models import sample, trained
from torch import Tensor, nn

import hyperball as hb
from hyperball.attacks import declarative_layers, evaluate_robustness, surrogate
from hyperball.attacks.surrogate import pool_steps
from hyperball.models.layers import PoolPoints
from hyperball.nn import Declarative, Projection, RobustBatchNorm2d, RobustPool1d, RobustPool2d

PENALTIES = ["huber(c=0.5)", "pseudo_huber(c=0.5)", "welsch(c=2)", "truncated_quadratic(c=1)", "quadratic", "absolute"]
LAYERS = {
    **{f"global {text}": (lambda text=text: RobustPool2d(penalty=text)) for text in PENALTIES},
    "windows": lambda: RobustPool2d(3, 2, 1, penalty="pseudo_huber(c=0.5)"),
    "per channel": lambda: RobustPool2d(2, penalty="pseudo_huber(c=0.5, learn_c=True)", channels=4),
    "mad": lambda: RobustPool2d(2, penalty="welsch(c=2)", scale="mad"),
    "barron": lambda: RobustPool2d(2, penalty="barron(c=1, shape=0.5)"),
    **{
        f"{surface} {p:g}": (lambda p=p, surface=surface: Projection(p, surface, radius=0.7, dim=1))
        for p in (1, 2, math.inf)
        for surface in ("ball", "sphere")
    },
    "batch statistics": lambda: RobustBatchNorm2d(4, track_running_stats=False),
    "median": lambda: PoolPoints("median"),
    "argmin": lambda: Declarative(squares, torch.zeros(4)),
}


def squares(x: Tensor, u: Tensor) -> Tensor:
    return ((u - x.mean((2, 3))) ** 2).sum(-1) + 0.1 * (u**4).sum(-1)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name]().eval()


def slope(model: nn.Module, x: Tensor) -> Tensor:
    probe = x.clone().requires_grad_()
    y = model(probe)
    torch.manual_seed(1)
    (found,) = torch.autograd.grad((y * torch.randn(y.shape)).sum(), probe)
    return found


@pytest.mark.parametrize("kind", ["smooth", "unrolled"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_the_same_to_the_bit_and_gradients_finite(name, kind):
    layer, x = make(name), torch.randn(3, 4, 6, 6)
    y, own = layer(x), slope(layer, x)
    with surrogate(layer, kind):
        if name == "argmin":
            torch.testing.assert_close(layer(x), y, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(layer(x), y)
        found = slope(layer, x)
    assert found.isfinite().all()
    assert float(found.abs().amax()) > 0
    assert torch.equal(layer(x), y)
    assert torch.equal(slope(layer, x), own)


CONVEX = ["global huber(c=0.5)", "global pseudo_huber(c=0.5)", "windows", "per channel", "argmin"]


@pytest.mark.parametrize("name", CONVEX)
def test_unrolled_gradients_approach_those_of_the_implicit_function_theorem(name):
    layer, x = make(name).double(), torch.randn(3, 4, 6, 6, dtype=torch.float64)
    own = slope(layer, x)
    if name == "argmin":
        with surrogate(layer, "unrolled"):
            torch.testing.assert_close(slope(layer, x), own, rtol=1e-4, atol=1e-6)
        return

    class Steps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return pool_steps(layer, x, smooth=False, steps=300)

    torch.testing.assert_close(Steps()(x), layer(x), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(slope(Steps(), x), own, rtol=1e-4, atol=1e-6)


def test_an_outlier_beyond_the_radius_has_a_gradient_in_the_smooth_surrogate_alone():
    layer = RobustPool1d(penalty="truncated_quadratic(c=1)").eval()
    x = torch.tensor([[[0.0, 0.1, -0.1, 0.2, 30.0]]])
    assert float(slope(layer, x)[0, 0, -1]) == 0
    with surrogate(layer, "smooth"):
        assert abs(float(slope(layer, x)[0, 0, -1])) > 1e-3


def test_a_clipped_coordinate_has_a_gradient_in_the_smooth_surrogate_alone():
    layer = Projection(math.inf, radius=1.0, learn=False)
    x = torch.tensor([[5.0, 0.2]])
    assert float(slope(layer, x)[0, 0]) == 0
    with surrogate(layer):
        assert abs(float(slope(layer, x)[0, 0])) > 0


def test_an_exception_inside_leaves_the_model_as_it_was():
    model = trained(pool="huber(c=0.1)")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="stop"), surrogate(model):
        raise RuntimeError("stop")
    assert all("forward" not in vars(part) for part in model.modules())
    assert all(torch.equal(held, before[key]) for key, held in model.state_dict().items())


def test_layers_that_solve_an_inner_problem_are_found():
    model = hb.models.create("digits", pool="huber", projection="l2_ball(radius=1)", norm="robust")
    assert declarative_layers(model) == ["pool", "classifier.projection"]
    assert declarative_layers(nn.Linear(2, 2)) == []
    assert declarative_layers(lambda x: x) == []
    with pytest.raises(ValueError, match="must have a declarative layer"), surrogate(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match="`kind` must be one of"), surrogate(model, "exact"):
        pass


def test_the_attack_through_a_surrogate_is_judged_by_the_model_itself():
    model, (x, y) = trained(pool="huber(c=0.1)"), sample(60)
    texts = ["pgd(steps=10)", "surrogate(steps=10)", "surrogate(kind='unrolled', steps=10)"]
    result = evaluate_robustness(model, x, y, epsilon=0.1, attacks=texts, checks=False)
    own, smooth, unrolled = (result.accuracy(text) for text in texts)
    assert max(smooth, unrolled) < result.clean_accuracy - 0.2
    assert abs(smooth - own) < 0.2
