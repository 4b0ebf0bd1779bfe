"""Bad arguments of argmin and of its settings are refused at the door, by name."""

import pytest
import torch
from implicit_problems import CASES, robust_mean
from torch import Tensor

from hyperball.implicit import (
    LBFGS,
    AugmentedLagrangian,
    BracketedScalar,
    ConjugateGradient,
    GradientDescent,
    Implicit,
    Newton,
    Unrolled,
    argmin,
)


def bowl(x: Tensor, u: Tensor) -> Tensor:
    return ((u - x).square() + 0.1 * u.pow(4)).sum(-1)


OK = {"objective": bowl, "inputs": torch.zeros(4, 5), "init": torch.zeros(4, 5)}
REFUSALS = [
    ({"objective": 3}, TypeError, "`objective` must be a callable"),
    ({"objective": lambda x, u: 1.0}, ValueError, "`objective` must return one value per element.*got float"),
    (
        {"objective": lambda x, u: u.sum(0)},
        ValueError,
        r"\(4, 5\) of `init`, got shape \(5,\)",
    ),
    ({"objective": lambda x, u: x.sum(-1)}, ValueError, "`objective` must depend on `u`"),
    (
        {"objective": lambda x, u: u.sum(-1).long()},
        TypeError,
        "`objective` must return real floating",
    ),
    (
        {"objective": lambda x, u: (u - u.mean(0) - 1).square().sum(-1)},
        ValueError,
        "mixes elements",
    ),
    ({"objective": lambda x, u: (u - 1).pow(2).mean().expand(4)}, ValueError, "mixes elements"),
    ({"inputs": "x"}, TypeError, "`inputs` must be a Tensor or a tuple, list or dict of Tensors, got a str"),
    ({"inputs": (torch.zeros(4, 5), 2.0)}, TypeError, "`inputs` must be .* got a float"),
    ({"inputs": torch.zeros(4, 5, dtype=torch.complex64)}, TypeError, "`inputs` must be real"),
    ({"inputs": torch.zeros(4, 5, device="meta")}, ValueError, "`inputs` must be on the device of `init`"),
    ({"init": [0.0]}, TypeError, "`init` must be a Tensor, got list"),
    (
        {"init": torch.zeros(4, 5, dtype=torch.int64)},
        TypeError,
        "`init` must be a real floating",
    ),
    ({"init": torch.full((4, 5), torch.nan)}, ValueError, "`init` must be finite"),
    (
        {"init": torch.zeros(4, 0), "inputs": torch.zeros(4, 0)},
        ValueError,
        "`init` must have at least one variable",
    ),
    ({"equality": 1}, TypeError, "`equality` must be a callable"),
    ({"equality": lambda x, u: u[0]}, ValueError, r"`equality` must return .* \(4,\), got shape \(5,\)"),
    ({"inequality": lambda x, u: 1.0}, ValueError, "`inequality` must return .* got float"),
    ({"solver": "quick"}, ValueError, r"`solver` must be one of 'newton', 'lbfgs'.*Newton\(\), LBFGS\(\)"),
    ({"adjoint": "quick"}, ValueError, r"`adjoint` must be one of 'implicit', 'unrolled'.*Implicit\(\)"),
    ({"solver": 3}, TypeError, r"`solver` must be one of hb.implicit.Newton\(…\), hb.implicit.LBFGS.*got int"),
    ({"init": torch.zeros(4, 3)}, ValueError, r"`init` must be .*got shape \(4, 3\) beside inputs of shape \(4, 5\)"),
    ({"solver": Newton}, TypeError, r"`solver` must be .* got Newton \(a class: call it\)"),
    (
        {"solver": BracketedScalar(-1.0, 1.0)},
        ValueError,
        "needs one variable per element, got 5",
    ),
    (
        {"adjoint": Newton()},
        TypeError,
        r"`adjoint` must be one of hb.implicit.Implicit\(…\), hb.implicit.Unrolled\(…\), got Newton",
    ),
    (
        {"on_failure": "explode"},
        ValueError,
        "`on_failure` must be one of 'raise', .*got 'explode'",
    ),
]


@pytest.mark.parametrize("change, error, match", REFUSALS)
def test_bad_argument_is_refused_by_name(change, error, match):
    with pytest.raises(error, match=match):
        argmin(**(OK | change))


SETTINGS = [
    (lambda: Newton(tolerance=0.0), ValueError, "`tolerance` must be > 0 and finite, got 0.0"),
    (lambda: LBFGS(tolerance=-1e-3), ValueError, "`tolerance` must be > 0"),
    (lambda: GradientDescent(tolerance=float("nan")), ValueError, "`tolerance` must be > 0"),
    (lambda: GradientDescent(rate=0.0), ValueError, "`rate` must be > 0"),
    (lambda: Newton(max_steps=0), ValueError, "`max_steps` must be >= 1, got 0"),
    (lambda: Newton(max_steps=1.5), TypeError, "`max_steps` must be an integer, got float"),
    (lambda: Newton(tolerance="small"), TypeError, "`tolerance` must be a number, got str"),
    (lambda: Newton(steps=0), ValueError, "`steps` must be >= 1"),
    (lambda: LBFGS(history=0), ValueError, "`history` must be >= 1"),
    (lambda: BracketedScalar(1.0, 1.0), ValueError, "`lo` must be < `hi`, got 1.0 and 1.0"),
    (lambda: BracketedScalar(0.0, float("inf")), ValueError, "`lo` and `hi` must be finite"),
    (lambda: BracketedScalar(0.0, 1.0, tolerance=0.0), ValueError, "`tolerance` must be > 0"),
    (lambda: ConjugateGradient(tolerance=0.0), ValueError, "`tolerance` must be > 0"),
    (lambda: ConjugateGradient(max_steps=0), ValueError, "`max_steps` must be >= 1"),
    (
        lambda: AugmentedLagrangian(inner="LBFGS"),
        TypeError,
        r"`inner` must be one of hb.implicit.Newton\(…\), .*got str",
    ),
    (lambda: AugmentedLagrangian(penalty=0.0), ValueError, "`penalty` must be > 0"),
    (lambda: Implicit(linear="dense"), TypeError, r"`linear` must be one of hb.implicit.Dense\(…\), .*got str"),
    (lambda: Implicit(order=0), ValueError, "`order` must be >= 1"),
    (lambda: Unrolled(extra=-1), ValueError, "`extra` must be >= 0"),
]


@pytest.mark.parametrize("make, error, match", SETTINGS)
def test_bad_setting_is_refused_by_name(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_bracket_ends_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"`lo` must be a number or have one entry per element \(5\)"):
        argmin(
            robust_mean,
            CASES["robust mean"].make(),
            torch.zeros(5),
            solver=BracketedScalar(torch.zeros(3), 9.0),
        )
