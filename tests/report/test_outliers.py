"""Accuracy against the share of outliers: ours, the paper's, and at the best epoch of each share."""

import pytest
from report_cases import number, table_tree, write

from hyperball.report import read_folder
from hyperball.report.kinds import Published
from hyperball.report.sections.join import Joined
from hyperball.report.sections.table_curves import outliers

pytest.importorskip("jinja2")


def drawn(folder, numbers):
    write(folder / "t/table.json", table_tree("t", numbers, metric="top1"))
    gallery = outliers(Joined(read_folder(folder).of(Published)[0], ()))
    return {chart.title: {line.name: (line.points, line.band) for line in chart.series} for chart in gallery.charts}


def test_the_best_epochs_of_each_share_have_a_chart_of_their_own(tmp_path):
    found = drawn(tmp_path, [
        number("welsch", "clean", 86.6, [83.0, 85.0], [84.0, 86.0]),
        number("welsch", "clean, 50 %", 58.6, [37.0], [58.0, 60.0]),
        number("welsch", "clean, 10 %", 86.0, [83.0], [84.0]),
        number("max", "clean", None, [88.0], [89.0]),
        number("max", "clean, 10 %", None, [5.0]),
    ])  # fmt: skip
    spread = pytest.approx(2**0.5)
    assert found == {
        "Under outliers: ours": {
            "welsch": (((0.0, 84.0), (10.0, 83.0), (50.0, 37.0)), (spread, 0.0, 0.0)),
            "max": (((0.0, 88.0), (10.0, 5.0)), ()),
        },
        "Under outliers: the paper": {"welsch": (((0.0, 86.6), (10.0, 86.0), (50.0, 58.6)), ())},
        "Under outliers: ours, the best epoch for each share": {
            "welsch": (((0.0, 85.0), (10.0, 84.0), (50.0, 59.0)), (spread, 0.0, spread)),
        },
    }


def test_best_epochs_of_a_row_that_has_nothing_else_are_drawn(tmp_path):
    found = drawn(tmp_path, [
        number("welsch", "clean", None, [85.0]), number("welsch", "clean, 50 %", None, [37.0]),
        number("odd", "clean", None, [], [84.0]), number("odd", "clean, 50 %", None, [], [58.0]),
    ])  # fmt: skip
    assert set(found["Under outliers: ours, the best epoch for each share"]) == {"odd"}


@pytest.mark.parametrize("values", [[], [37.0]])
def test_without_two_shares_of_ours_there_is_no_chart(values, tmp_path):
    numbers = [number("welsch", "clean", 86.6, []), number("welsch", "clean, 50 %", 58.6, values)]
    assert drawn(tmp_path, numbers) == {}
