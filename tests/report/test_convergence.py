"""Convergence on the page: the error in training stands beside that of tests, and a lag is told."""

import json

import pytest
from report_cases import make_run, number, table_tree, write

from hyperball.report import read_folder
from hyperball.report.kinds import Published
from hyperball.report.sections.join import Joined
from hyperball.report.sections.table_curves import convergence


def gallery(folder, metric="error", accuracies=(0.2, 0.6), **changes):
    """The convergence of a table of one cell with two seeds, whose training is better by 0.1 in the second."""
    values = [10.0, 10.0] if metric == "error" else [90.0, 90.0]
    for seed in range(2):
        place = make_run(folder / "tanh--cosine" / f"seed-{seed}", seed=seed, **changes)
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        trained = [line for line in lines if line["kind"] == "train"]
        for line, share in zip(trained, accuracies):
            line["accuracy"] = share + 0.1 * seed
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(folder / "table.json", table_tree("one", [number("tanh", "cosine", 20.0, values)], metric))
    found = read_folder(folder)
    return convergence(Joined(found.of(Published)[0], found.runs))


@pytest.mark.parametrize(
    "metric, titles, points",
    [
        ("error", ["Test error, %: cosine", "Training error, %: cosine"], [75.0, 35.0]),
        ("top1", ["Test accuracy, %: cosine", "Training accuracy, %: cosine"], [25.0, 65.0]),
    ],
)
def test_the_training_stands_beside_the_test(tmp_path, metric, titles, points):
    charts = gallery(tmp_path, metric).charts
    assert [chart.title for chart in charts] == [*titles, "Test loss: cosine", "Training loss: cosine"]
    (line,) = charts[1].series
    assert [x for x, _ in line.points] == [10, 20]
    assert [y for _, y in line.points] == pytest.approx(points)
    assert line.band == pytest.approx((100 * 0.1 / 2**0.5,) * 2)


def test_a_run_without_accuracies_of_its_training_has_no_such_chart(tmp_path):
    charts = gallery(tmp_path, accuracies=()).charts
    assert [chart.title for chart in charts] == ["Test error, %: cosine", "Test loss: cosine", "Training loss: cosine"]


@pytest.mark.parametrize("momentum, told", [(0.001, "about 1,000 steps old"), (0.1, ""), (None, ""), ("fast", "")])
def test_a_lag_of_tests_is_told_where_statistics_follow_slowly(tmp_path, momentum, told):
    lead = gallery(tmp_path, model__options={"norm_momentum": momentum}).lead
    assert told in lead if told else lead == ""
