"""The rows of both tables: their derivatives, limits, texts and errors."""

import math
import pickle

import pytest
import reference
import torch

import hyperball as hb
from hyperball import angular, radial, rows

MAGNITUDES = ["sphere", "ball", "tanh", "linear", "seg", "log", "mix", "barron"]
PENALTIES = ["quadratic", "pseudo_huber", "huber", "welsch", "truncated_quadratic", "barron", "absolute"]
ANGULARS = ["linear", "cosine", "sigmoid", "square_cosine", "power", "rectified_cosine"]
EVERY_RADIAL = radial.names()


def value_of(name: str) -> rows.Value:
    return rows.fill(radial.TABLE[name](), eps=1e-4)


def test_names_list_every_function_of_the_papers():
    assert set(MAGNITUDES) <= set(radial.names("magnitude"))
    assert set(PENALTIES) <= set(radial.names("penalty"))
    assert set(ANGULARS) <= set(angular.names())
    assert set(radial.names("magnitude")) | set(radial.names("penalty")) == set(radial.names())


@pytest.mark.parametrize("name", EVERY_RADIAL)
def test_curvature_is_the_derivative_of_the_magnitude(name):
    n = (torch.rand(200, dtype=torch.float64) * 5).requires_grad_()
    value = value_of(name)
    (derivative,) = torch.autograd.grad((n * radial.gain(value, n)).sum(), n)
    ((_, curvature),) = radial.gains_and_curvatures(value, n.detach())
    torch.testing.assert_close(curvature, derivative, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", radial.names("penalty"))
def test_influence_is_the_derivative_of_the_penalty(name):
    z = (torch.randn(200, dtype=torch.float64) * 3).requires_grad_()
    value = value_of(name)
    (derivative,) = torch.autograd.grad(value.row.phi(z, **value.parameters).sum(), z)
    torch.testing.assert_close(derivative, z * radial.gain(value, z.abs()), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_gain_times_length_is_the_printed_magnitude(name):
    n = torch.linspace(0.01, 6, 300, dtype=torch.float64)
    torch.testing.assert_close(n * radial.gain(value_of(name), n), reference.magnitude(name, n), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ANGULARS)
def test_angular_functions_equal_the_printed_forms(name):
    c = torch.linspace(-0.999, 0.999, 301, dtype=torch.float64, requires_grad=True)
    value = rows.fill(angular.parse(name), eps=1e-12)
    g = angular.g(value, c)
    torch.testing.assert_close(g, reference.angular(name, c), rtol=1e-12, atol=1e-12)
    (derivative,) = torch.autograd.grad(g.sum(), c)
    torch.testing.assert_close(angular.slope(value, c, g), derivative, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [1e-3, 0.01, 0.3, 1.0, 50.0])
def test_sigmoid_runs_from_minus_one_to_one_for_any_k(k):
    g = angular.g(rows.fill(hb.angular.sigmoid(k=k), eps=1e-4), torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(g, torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EVERY_RADIAL)
def test_flags_agree_with_the_functions(name):
    row, value = radial.TABLE[name], value_of(name)
    n = torch.logspace(-3, 6, 400, dtype=torch.float64)
    h = n * radial.gain(value, n)
    if row.bounded:
        assert h.max() <= 1.0 + 1e-9
    if row.convex:
        assert (h.diff() >= -1e-12).all()


def test_infinite_shapes_are_welsch_and_its_opposite():
    n = torch.linspace(0, 3, 50, dtype=torch.float64)
    welsch = radial.gain(hb.radial.welsch(c=1.5), n)
    torch.testing.assert_close(radial.gain(hb.radial.barron(rho=1.5, shape=-math.inf), n), welsch, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        radial.gain(hb.radial.barron(rho=1.5, shape=math.inf), n), 1 / welsch, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("shape", [2.0, 1.0, 0.0, -2.0])
def test_barron_passes_through_the_named_functions(shape):
    n = torch.linspace(0, 4, 50, dtype=torch.float64)
    named = {2.0: torch.ones_like(n), 1.0: (1 + n**2) ** -0.5, 0.0: 1 / (1 + n**2 / 2), -2.0: (1 + n**2 / 4) ** -2}
    torch.testing.assert_close(radial.gain(hb.radial.barron(shape=shape), n), named[shape], rtol=1e-12, atol=0)


@pytest.mark.parametrize("text", ["tanh", "tanh(rho=2, relative=False)", "linear + tanh(rho=2)", "barron(shape=-inf)"])
def test_texts_survive_a_round_trip(text):
    assert str(radial.parse(text)) == text
    assert str(radial.parse(str(radial.parse(text)))) == text


def test_a_text_a_row_and_a_value_mean_the_same():
    n = torch.rand(5)
    for given in ("ball", hb.radial.ball, hb.radial.ball(rho=1.0), hb.radial.ball(c=1.0)):
        torch.testing.assert_close(radial.gain(radial.parse(given), n), radial.gain(value_of("ball"), n))


def test_add_sums_the_magnitudes():
    n = torch.rand(7, dtype=torch.float64) * 4
    both = hb.radial.add("linear(alpha=0.5)", hb.radial.tanh(rho=2.0))
    expected = 0.5 * n + torch.tanh(n / 2)
    torch.testing.assert_close(n * radial.gain(both, n), expected)
    assert str(both) == "linear(alpha=0.5) + tanh(rho=2)"


@pytest.mark.parametrize(
    "text, message",
    [
        ("tanhh", "did you mean 'tanh'"),
        ("tanh(rho=-1)", "`rho` must be > 0, got -1.0"),
        ("huber(c=0)", "`c` must be > 0, got 0.0"),
        ("tanh(rh=1)", "did you mean 'rho'"),
        ("tanh(2)", "by name"),
        ("tanh(rho=__import__('os'))", "literals"),
        ("tanh(rho=nan)", "literals"),
        ("sphere(relative=True)", "has no radius"),
        ("tanh(per='row')", "`per`"),
        ("tanh(", "is not a radial text"),
        ("1 + 2", "is not a radial text"),
        ("", "is not a radial text"),
    ],
)
def test_wrong_radial_texts_are_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        radial.TABLE.parse(text)


@pytest.mark.parametrize(
    "text, message",
    [("cosin", "did you mean 'cosine'"), ("sigmoid(k=0)", "`k` must be > 0"), ("power(b=0.5)", "`b` must be >= 1")],
)
def test_wrong_angular_texts_are_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        angular.parse(text)


def test_a_function_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match="'huber' is not a magnitude"):
        radial.parse("huber", "magnitude")
    with pytest.raises(ValueError, match="'tanh' is not a penalty"):
        radial.parse("tanh", "penalty")
    with pytest.raises(ValueError, match="kind"):
        radial.names("magnitudes")
    with pytest.raises(TypeError, match="`angular`"):
        angular.parse(hb.radial.tanh())
    with pytest.raises(ValueError, match="not a sum"):
        angular.parse("cosine + cosine")


@pytest.mark.parametrize("table", [radial, angular])
def test_rows_pickle_to_themselves(table):
    for row in table.TABLE.rows.values():
        assert pickle.loads(pickle.dumps(row)) is row


def test_a_registered_row_is_known_to_texts_and_by_attribute():
    try:
        hb.radial.register("root", magnitude=lambda n, rho: rho * (n / rho).sqrt(), parameters={"rho": 1.0})
        n = torch.tensor([4.0, 9.0])
        torch.testing.assert_close(n * radial.gain(radial.parse("root(rho=4)"), n), torch.tensor([4.0, 6.0]))
        assert hb.radial.root.composed
        assert "root" in hb.radial.names("magnitude")
        with pytest.raises(ValueError, match="already"):
            hb.radial.register("root", gain=lambda n: n)
    finally:
        radial.TABLE.rows.pop("root", None)
    with pytest.raises(ValueError, match="either `gain` or `magnitude`"):
        hb.radial.register("nothing")
    with pytest.raises(AttributeError, match="root"):
        _ = hb.radial.root


def test_piecewise_rows_start_as_linear_and_cosine_and_are_monotone():
    n, c = torch.linspace(0, 5, 60, dtype=torch.float64), torch.linspace(-1, 1, 61, dtype=torch.float64)
    torch.testing.assert_close(radial.gain(hb.radial.piecewise(), n), torch.ones_like(n))
    torch.testing.assert_close(angular.g(hb.angular.piecewise(), c), c)
    slopes = [0.0, 2.0, 0.3, 0.7]
    assert ((n * radial.gain(hb.radial.piecewise(slopes=slopes), n)).diff() >= -1e-12).all()
    learned = angular.g(hb.angular.piecewise(slopes=slopes), c)
    assert (learned.diff() >= -1e-12).all()
    assert angular.g(hb.angular.piecewise(slopes=slopes), torch.zeros(())) == 0
