"""The projection module, and the arguments that are refused."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from hyperball.functional.projection import project, project_box, project_simplex
from hyperball.nn.projection import Projection

SURFACES = [(p, surface) for p in (1, 2, math.inf) for surface in ("ball", "sphere")]
each_surface = pytest.mark.parametrize("p, surface", SURFACES, ids=[f"l{p}_{s}" for p, s in SURFACES])


def inputs(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("p, radius", [(1, 250.0), (2, 15.0), (math.inf, 3.0)])
def test_the_module_starts_at_the_published_radius(p: float, radius: float) -> None:
    layer = Projection(p)
    assert isinstance(layer.log_radius, nn.Parameter)
    assert layer.radius.item() == pytest.approx(radius, rel=1e-6)


@each_surface
def test_the_module_is_the_function(p: float, surface: str) -> None:
    x = inputs(3, 4, 5)
    layer = Projection(p, surface, 1.5, dim=[0, 2])
    assert torch.equal(layer(x), project(x, layer.radius, p=p, surface=surface, dim=(0, 2)))


def test_state_dict_deepcopy_and_pickle_keep_the_radius() -> None:
    layer = Projection(1, "sphere", torch.tensor([[0.5], [2.0]]))
    other = Projection(1, "sphere", torch.ones(2, 1))
    other.load_state_dict(layer.state_dict())
    for twin in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(inputs(2, 5)), layer(inputs(2, 5)))
    assert list(layer.state_dict()) == ["log_radius"]


def test_a_fixed_radius_is_saved_but_not_trained() -> None:
    layer = Projection(2, radius=4.0, learn=False)
    assert not list(layer.parameters())
    assert list(layer.state_dict()) == ["log_radius"]
    assert not layer(inputs(2, 5)).requires_grad


def test_a_learned_radius_reaches_its_target() -> None:
    layer = Projection(1, "sphere", 10.0)
    x = inputs(16, 20)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        (layer(x).abs().sum(-1) - 3).square().mean().backward()
        optimizer.step()
    assert layer.radius.item() == pytest.approx(3, rel=1e-2)


def test_factory_arguments_and_half_are_honored() -> None:
    assert Projection(2, dtype=torch.float64).log_radius.dtype == torch.float64
    assert Projection(2, device="meta").log_radius.is_meta
    layer = Projection(2, "sphere", 2.0).half()
    y = layer(inputs(3, 5).half())
    assert y.dtype == torch.float16
    assert layer.radius.dtype == torch.float32
    torch.testing.assert_close(y.float().norm(dim=-1), torch.full((3,), 2.0), rtol=2e-3, atol=0)
    empty = Projection(2, "sphere", 2.0, device="meta").to_empty(device="cpu")
    empty.load_state_dict(Projection(2, "sphere", 2.0).state_dict())
    assert empty.radius.item() == pytest.approx(2)


def test_repr_says_what_the_layer_does() -> None:
    assert repr(Projection(math.inf)) == "Projection(p=inf, surface='ball', radius=3, learn=True, dim=-1)"
    assert "tensor of shape (2, 1)" in repr(Projection(2, radius=torch.ones(2, 1)))
    assert "tensor of shape ()" in repr(Projection(2, device="meta"))


X = torch.ones(3, 4)
BAD = {
    "radius zero": (lambda: project(X, 0.0), ValueError, "`radius` must be finite and > 0, got 0.0"),
    "radius negative": (lambda: project(X, -1), ValueError, "`radius` must be finite and > 0, got -1"),
    "radius nan": (lambda: project(X, math.nan), ValueError, "`radius`"),
    "radius inf": (lambda: project(X, math.inf), ValueError, "`radius`"),
    "radius tensor": (
        lambda: project(X, torch.tensor([[1.0], [2], [-3]])),
        ValueError,
        "`radius` .* got -3.0",
    ),
    "radius shape": (
        lambda: project(X, torch.ones(4)),
        ValueError,
        r"`radius` must broadcast to shape \(3, 1\)",
    ),
    "radius rank": (lambda: project(X, torch.ones(2, 3, 1)), ValueError, "`radius` must broadcast"),
    "radius integer": (lambda: project(X, torch.tensor(2)), TypeError, "`radius`.*torch.int64"),
    "radius text": (lambda: project(X, "2"), TypeError, "`radius`.*str"),
    "p": (lambda: project(X, 1.0, p=3), ValueError, "`p` must be 1, 2 or math.inf, got 3"),
    "p bool": (lambda: project(X, 1.0, p=True), ValueError, "`p` must be 1, 2 or math.inf, got True"),
    "dim bool": (lambda: project(X, 1.0, dim=True), TypeError, "`dim` must be an int or a sequence of ints, got True"),
    "dims bool": (lambda: project(X, 1.0, dim=(0, True)), TypeError, "`dim` must be an int or a sequence of ints"),
    "p text": (lambda: project(X, 1.0, p="inf"), ValueError, "`p` must be 1, 2 or math.inf, got 'inf'"),
    "surface": (lambda: project(X, 1.0, surface="spher"), ValueError, '`surface` .* did you mean "sphere"'),
    "surface none": (lambda: project(X, 1.0, surface=None), ValueError, "`surface`"),
    "no dims": (lambda: project(X, 1.0, dim=()), ValueError, "`dim` must name at least one dimension"),
    "dim out of range": (lambda: project(X, 1.0, dim=2), ValueError, r"`dim` must be in \[-2, 2\).*got 2"),
    "dim twice": (lambda: project(X, 1.0, dim=(1, -1)), ValueError, "`dim` must not repeat"),
    "dim text": (lambda: project(X, 1.0, dim="1"), TypeError, "`dim` must be an int"),
    "dim float": (lambda: project(X, 1.0, dim=1.0), TypeError, "`dim` must be an int"),
    "dim empty": (
        lambda: project(torch.ones(3, 0), 1.0),
        ValueError,
        "`dim` must not name an empty dimension",
    ),
    "x scalar": (lambda: project(torch.tensor(1.0), 1.0), ValueError, "`x` must have at least one dimension"),
    "x integer": (lambda: project(torch.ones(3, dtype=torch.int64), 1.0), TypeError, "`x`.*torch.int64"),
    "x list": (lambda: project([1.0], 1.0), TypeError, "`x` must be a tensor, got list"),
    "simplex radius": (lambda: project_simplex(X, -1.0), ValueError, "`radius`"),
    "box order": (lambda: project_box(X, 1.0, 0.0), ValueError, "`low` must be <= `high`"),
    "box order of tensors": (
        lambda: project_box(X, torch.ones(4), 0.5),
        ValueError,
        "`low` must be <= `high`",
    ),
    "box shape": (lambda: project_box(X, torch.ones(3), 2.0), ValueError, "`low` must broadcast"),
    "box nan": (lambda: project_box(X, math.nan, 2.0), ValueError, "`low` must not be NaN"),
    "box text": (lambda: project_box(X, 0.0, "1"), TypeError, "`high`"),
    "module p": (lambda: Projection(0), ValueError, "`p`"),
    "module surface": (lambda: Projection(2, "bal"), ValueError, '`surface` .* "ball"'),
    "module radius": (lambda: Projection(2, radius=-1.0), ValueError, "`radius`"),
    "module radius tensor": (lambda: Projection(2, radius=torch.tensor([1.0, 0.0])), ValueError, "`radius`"),
    "module radius text": (lambda: Projection(2, radius="15"), TypeError, "`radius`"),
    "module dim": (lambda: Projection(2, dim=()), ValueError, "`dim`"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_reset_parameters_brings_the_radius_back_after_to_empty():
    with torch.device("meta"):
        layer = Projection(1)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    torch.testing.assert_close(layer.radius, torch.tensor(250.0), rtol=1e-5, atol=0)


def test_a_nan_bound_gives_nan_with_and_without_gradients():
    x = torch.tensor([-1.0, 0.5, 2.0])
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert project_box(x, torch.tensor(float("nan")), 1.0).isnan().all()
