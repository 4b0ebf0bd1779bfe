"""`hb.explain`: the kernel and its reason."""

import pytest
import torch
from torch import nn

import hyperball as hb
from hyperball.kernels.pooling import native


def test_a_layer_is_explained_with_its_operator_radius_and_kernel():
    explanation = hb.explain(hb.nn.DecoupledConv2d(3, 8, 3, magnitude="tanh(rho=2)", angular="square_cosine"))
    assert "α·tanh(n/ρ)" in explanation["operator"]
    assert "c·|c|" in explanation["operator"]
    assert "× the mean patch norm" in explanation["radius"]
    assert "hand-written backward" in explanation["kernel"]
    assert all(topic in str(explanation) for topic in ("operator", "radius", "kernel"))


def test_an_explanation_is_a_mapping_from_topics_to_texts():
    explanation = hb.explain(hb.nn.DecoupledConv2d(3, 8, 3))
    assert list(explanation) == list(explanation.keys()) == ["operator", "radius", "kernel"]
    assert "kernel" in explanation
    assert "kernels" not in explanation
    assert explanation.get("kernels") is None
    assert dict(explanation) == {topic: explanation[topic] for topic in explanation}
    assert len(explanation) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_a_layer_says_that_it_runs_eagerly_as_it_does(dtype):
    layer, x, w = hb.nn.DecoupledConv2d(3, 8, 3), torch.empty(0, 3, 8, 8), torch.empty(4, 3, 3, 3)
    with torch.autocast("cpu", dtype=dtype):
        told = hb.explain(layer)["kernel"], hb.explain(hb.functional.decoupled_conv2d, x, w, magnitude="log")["kernel"]
        assert layer(torch.randn(1, 3, 5, 5)).dtype == dtype
    for text in told:
        assert text.startswith(f"eager (decoupled.c computes in float32, not {str(dtype).removeprefix('torch.')})")


def test_a_linear_cosine_layer_runs_as_torchs_own():
    assert "torch's own layer" in hb.explain(hb.nn.DecoupledLinear(3, 4, magnitude="linear"))["kernel"]


def test_a_user_defined_row_says_that_it_runs_eagerly():
    hb.radial.register("own", gain=lambda n: 1 / (1 + n))
    try:
        assert "eager, autograd's backward: own is user-defined" in hb.explain(
            hb.nn.DecoupledLinear(3, 4, magnitude="own")
        )["kernel"]  # fmt: skip
    finally:
        hb.radial.TABLE.rows.pop("own")


def test_a_model_is_explained_layer_by_layer():
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 4, 3), nn.ReLU(), hb.nn.DecoupledLinear(4, 2, magnitude="linear"))
    explanation = hb.explain(model)
    assert "hand-written" in explanation["0"]
    assert "torch's own" in explanation["2"]


def test_a_call_is_explained_without_running_it():
    x, w = torch.empty(0, 3, 8, 8), torch.empty(4, 3, 3, 3)
    explanation = hb.explain(hb.functional.decoupled_conv2d, x, w, magnitude="log", angular="linear")
    assert "α·log(1+n)" in explanation["operator"]
    assert "hand-written" in explanation["kernel"]


def test_a_pool_says_which_kernel_runs_and_why(monkeypatch):
    monkeypatch.setattr(native, "library", lambda dtype: native.Library(lambda job: 0, "pooling.c compiled by cc"))
    explanation = hb.explain(hb.nn.RobustPool2d(None))
    assert "argmin" in explanation["problem"]
    assert "Newton" in explanation["solver"]
    assert explanation["kernel"] == "native, float32: pooling.c compiled by cc"
    assert "eager" in hb.explain(hb.nn.RobustPool2d(penalty="barron(shape=5)"))["kernel"]
    assert "on meta" in hb.explain(hb.nn.RobustPool2d(penalty="huber(learn_c=True)", device="meta"))["kernel"]
    model = nn.Sequential(hb.nn.DecoupledConv2d(3, 4, 3), hb.nn.RobustPool2d(3))
    assert hb.explain(model)["1"] == explanation["kernel"]
    monkeypatch.setattr(native, "library", lambda dtype: native.Library(None, "no C compiler found"))
    assert hb.explain(hb.nn.RobustPool2d(None))["kernel"] == "eager, float32: no C compiler found"


def test_a_call_of_a_pool_is_explained_without_running_it():
    x = torch.empty(0, 3, dtype=torch.float64)
    explanation = hb.explain(hb.functional.robust_pool, x, penalty="truncated_quadratic")
    assert "min(z², c²)" in explanation["problem"]
    assert "float64" in explanation["kernel"]
    assert "eager" in hb.explain(hb.functional.robust_pool_vectors)["kernel"]
    with pytest.raises(ValueError, match="huber"):
        hb.explain(hb.functional.robust_pool, x, penalty="hubert")


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(TypeError, match="`module_or_call`"):
        hb.explain(torch.relu)
    with pytest.raises(ValueError, match="no hyperball layer"):
        hb.explain(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="`magnitude`"):
        hb.explain(hb.functional.decoupled_linear)


@pytest.mark.parametrize(
    "make, problem, solver, kernel",
    [
        (lambda: hb.nn.RobustBatchNorm2d(4), "argmin Σ s·φ((x − m)/s)", "Newton in (m, s)", "no C path"),
        (lambda: hb.nn.RobustBatchNorm1d(4, penalty="welsch"), "from huber's location", "Newton", "eager"),
        (lambda: hb.nn.Projection(1, "ball"), "‖u‖_1 ≤ r, r learned", "without a sort", "hand-written backward"),
        (lambda: hb.nn.Projection(float("inf"), "sphere", learn=False), "‖u‖_∞ = r, r fixed", "closed form", "eager"),
        (
            lambda: hb.nn.Declarative(lambda x, u: (x - u).square().sum(-1), torch.zeros(2)),
            "argmin_u f(x, u), f",
            "Newton up to 64 variables",
            "the objective is the user's",
        ),
        (
            lambda: hb.nn.Declarative(
                lambda x, u: (x - u).square().sum(-1), torch.zeros(2), equality=lambda x, u: u.sum(-1) - 1
            ),
            "subject to h(x, u) = 0",
            "augmented Lagrangian",
            "eager",
        ),
    ],
)
def test_a_declared_layer_says_its_problem_solver_and_kernel(make, problem, solver, kernel):
    layer = make()
    explanation = hb.explain(layer)
    assert problem in explanation["problem"]
    assert solver in explanation["solver"]
    assert kernel in explanation["kernel"]
    assert hb.explain(nn.Sequential(layer))["0"] == explanation["kernel"]
