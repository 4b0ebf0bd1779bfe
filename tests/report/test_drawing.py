"""The report's pictures: axes, lines, colors, and functions that are those of the library."""

import itertools
import re

import numpy as np
import pytest
import torch
from report_cases import make_run, words_of, write

import hyperball as hb
from hyperball.report import Chart, Series, read_folder
from hyperball.report.charts import HEIGHT, WIDTH, apart, draw, edges, picture
from hyperball.report.drawing.axes import log_ticks, short, ticks
from hyperball.report.drawing.svg import element
from hyperball.report.files import natural
from hyperball.report.functions import ANGULARS, MAGNITUDES, PENALTIES, POWER
from hyperball.report.pictures import Curves, Features
from hyperball.report.sections.lines import colors, mean_and_band

pytest.importorskip("jinja2")


def test_numbers_in_names_are_sorted_as_numbers():
    assert sorted(["seed-10", "seed-2", "a", "seed-1"], key=natural) == ["a", "seed-1", "seed-2", "seed-10"]


@pytest.mark.parametrize(
    "values",
    [[0, 1], [0.5, 0.5], [0.0], [-3.0, 1e6], [1e-9, 3e-9], [95.1, 99.9], [1e12, 1e12 + 1], []],
)
def test_ticks_are_round_and_enclose_the_values(values):
    marks = ticks(values)
    assert 2 <= len(marks) <= 9
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)
    if values:
        assert marks[0] <= min(values) + 1e-9 * abs(min(values))
        assert marks[-1] >= max(values) - 1e-9 * abs(max(values))


@pytest.mark.parametrize("values", [[0.019, 1.5], [1.0, 1.0], [1e-8, 1e4], [0.2, 0.21], [1e-80, 1e80]])
def test_logarithmic_ticks_enclose_the_values(values):
    marks = log_ticks(values)
    assert marks[0] <= min(values)
    assert marks[-1] >= max(values)
    assert marks[0] < marks[-1]
    assert len(marks) <= 12


@pytest.mark.parametrize("log", [False, True])
def test_lines_stay_inside_of_the_picture_and_bad_points_are_dropped(log):
    points = ((1.0, 2.0), (2.0, float("nan")), (3.0, float("inf")), (4.0, 5.0))
    chart = Chart("title", "epoch", "", (Series("a", points), Series("b", ())), log=log)
    assert [line.name for line in draw(chart).series] == ["a"]
    (path,) = re.findall(r'class="line" d="([^"]*)"', picture(chart).svg)
    numbers = [float(x) for x in re.findall(r"[\d.]+", path)]
    assert len(numbers) == 4
    assert all(0 <= x <= WIDTH for x in numbers[::2])
    assert all(0 <= y <= HEIGHT for y in numbers[1::2])
    assert numbers[1] > numbers[3]


@pytest.mark.parametrize(
    "heights, log_x, log",
    [
        ((2.4, 1.6), False, False),  # less than ten times apart
        ((2.4, 0.2), False, True),
        ((2.4, 1.6), True, True),  # straight lines are what two logarithmic axes are for
        ((2.4, 0.0), False, False),
        ((2.4, -1.0), False, False),
        ((2.4, 5e-324), False, False),  # below the least power of ten
        ((2.4, 5e-324), True, False),
    ],
)
def test_an_axis_is_logarithmic_where_that_shows_more_and_says_so(heights, log_x, log):
    points = tuple(zip((1.0, 8.0), heights, strict=True))
    chart = Chart("title", "epoch", "", (Series("a", points),), note="a note", log=True, log_x=log_x)
    assert draw(chart).up.log is log
    assert picture(chart).note == ("a note; logarithmic scale" if log else "a note")


@pytest.mark.parametrize(
    "heights, longest", [((0.0, 4.0), "4"), ((1e6, 1e6), "1.05e6"), ((2e5, 7.5e5), "800,000"), ((0.0, 3e-8), "3e−8")]
)
def test_the_numbers_beside_an_axis_have_room(heights, longest):
    chart = Chart("title", "epoch", "", (Series("a", tuple(enumerate(heights))),))
    drawing = draw(chart)
    assert longest in drawing.y_texts
    assert drawing.across.start - 7 >= 8.5 * max(map(len, drawing.y_texts))  # of letters of 15 px, as on a phone


@pytest.mark.parametrize(
    "value, text", [(5000.0, "5,000"), (0.02, "0.02"), (1.25e6, "1.25e6"), (2e-5, "2e−5"), (-1e-12, "−1e−12"), (0, "0")]
)
def test_numbers_of_an_axis_are_short(value, text):
    assert short(value) == text


def test_long_curves_are_thinned_and_keep_their_end():
    points = tuple((float(x), float(x)) for x in range(10_001))
    drawn = picture(Chart("title", "epoch", "", (Series("a", points, band=(1.0,) * len(points)),))).svg
    (held,) = re.findall(r'data-p="([^"]*)"', drawn)
    assert len(held.split()) <= 102
    assert held.split()[-1] == "10000,10000,1"


def test_a_band_is_the_standard_deviation_at_shared_steps():
    mean, band = mean_and_band([((1, 1.0), (2, 2.0), (3, 9.0)), ((1, 3.0), (2, 2.0))])
    assert mean == ((1, 2.0), (2, 2.0))
    assert band == pytest.approx((2**0.5, 0.0))
    assert mean_and_band([((1, 1.0),)])[1] == ()


@pytest.mark.parametrize("unit, height, most", [(" %", 98.0, 100.0), (" %", 104.0, 109.0), ("", 98.0, 103.0)])
def test_the_band_of_a_share_does_not_lie_above_all(unit, height, most):
    low, high = edges(Series("a", ((0.0, height), (1.0, 60.0)), band=(5.0, 5.0)), unit)
    assert [y for _, y in high] == [most, 65.0]
    assert [y for _, y in low] == [height - 5, 55.0]


def test_the_band_of_an_error_does_not_lie_below_zero():
    drawing = draw(Chart("t", "x", "", (Series("a", ((0.0, 1.0), (1.0, 2.0)), band=(5.0, 5.0)),)))
    assert drawing.up.low == 0


def test_an_operator_keeps_its_color_and_its_variants_differ_in_dashes():
    names = ["baseline", "tanh", "tanh, relu", "seg(beta=0.5)", "unknown", "tanh, no relu", "other"]
    found = colors(names)
    assert [found[k] for k in (0, 1, 2, 3, 5)] == [0, 1, 1, 5, 1]
    assert len({*found}) == 5
    lines = apart([Series(name, ((0.0, 1.0),), color) for name, color in zip(names, found, strict=True)])
    assert [line.color for line in lines] == found
    assert [line.dash for line in lines] == [0, 0, 1, 0, 0, 2, 0]


def test_no_two_of_many_lines_have_one_color_and_dashes():
    series = [Series(str(k), ((0.0, float(k)), (1.0, 1.0)), color) for k, color in enumerate([1] * 24 + [0] * 8)]
    keys = picture(Chart("t", "x", "", tuple(series))).legend
    assert len({(key.color, key.dash) for key in keys}) == len(series)
    assert [key.color for key in keys[:6]] == [1] * 6


def test_what_is_not_markup_is_escaped():
    assert element("a", "<b>", element("i"), x='"<') == '<a x="&quot;&lt;">&lt;b&gt;<i/></a>'


def test_first_filters_come_from_a_checkpoint(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    place = make_run(tmp_path / "a") / "checkpoints"
    place.mkdir()
    weights = {"model/head.weight": np.ones((4, 4)), "model/conv.weight": np.random.default_rng(0).random((8, 3, 3, 3))}
    safetensors.save_file(
        {key: value.astype(np.float32) for key, value in weights.items()}, place / "step-1.safetensors"
    )
    (place / "step-2.safetensors").write_bytes(b"half")
    assert "8 filters of 3×3" in words_of(tmp_path)


LENGTHS = torch.tensor([0.0, 0.1, 0.5, 0.999, 1.0, 1.5, 3.0, 40.0], dtype=torch.float64)


@pytest.mark.parametrize("name", MAGNITUDES)
def test_drawn_magnitudes_are_those_of_the_library(name):
    value = hb.radial.parse("sphere(eps=1e-12)" if name == "sphere" else name)
    expected = hb.radial.gain(value, LENGTHS[1:]) * LENGTHS[1:]
    np.testing.assert_allclose(MAGNITUDES[name][1](LENGTHS[1:].numpy()), expected.numpy(), rtol=1e-9)


@pytest.mark.parametrize("name", ANGULARS)
def test_drawn_angular_functions_are_those_of_the_library(name):
    cosines = torch.linspace(-1, 1, 21, dtype=torch.float64)
    value = hb.angular.parse(f"power(b={POWER})" if name == "power" else name)
    np.testing.assert_allclose(ANGULARS[name][1](cosines.numpy()), hb.angular.g(value, cosines).numpy(), atol=1e-9)


@pytest.mark.parametrize("name", PENALTIES)
def test_drawn_penalties_and_influences_are_those_of_the_library(name):
    z = torch.linspace(-3, 3, 25, dtype=torch.float64)
    row = hb.radial.TABLE[name]
    phi = row.phi(z.abs(), rho=torch.tensor(1.0, dtype=torch.float64))
    psi = hb.radial.gain(hb.radial.parse(name, "penalty"), z.abs()) * z
    np.testing.assert_allclose(PENALTIES[name][1](z.numpy()), phi.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(PENALTIES[name][2](z.numpy()), psi.numpy(), rtol=1e-9, atol=1e-12)


def test_every_magnitude_with_a_formula_is_drawn():
    assert set(hb.radial.names("magnitude")) - set(MAGNITUDES) == {"piecewise"}
    assert set(hb.angular.names()) - set(ANGULARS) == {"piecewise"}
    assert set(hb.radial.names("penalty")) - set(PENALTIES) == {"barron", "absolute"}


def test_gaps_in_curves_and_features_are_no_damage(tmp_path):
    write(tmp_path / "c.json", {"kind": "curves", "series": [{"x": [0, 1, 2], "y": [1, float("nan"), None]}]})
    write(tmp_path / "f.json", {"kind": "features2d", "points": [[0, 1], [float("inf"), 1]], "labels": [0, 1]})
    found = read_folder(tmp_path)
    assert found.left_out == []
    assert [line.points for record in found.of(Curves) for line in record.lines] == [((0.0, 1.0),)]
    assert [record.labels for record in found.of(Features)] == [("0",)]
