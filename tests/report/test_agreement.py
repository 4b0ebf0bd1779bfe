"""Records that are not their folder's, and networks that end at chance, on the page."""

import json

import pytest
from report_cases import make_run, number, recipe_of, table_tree, words_of, write

from hyperball.report import read_folder
from hyperball.report.kinds import Published
from hyperball.report.results import results_page
from hyperball.report.sections.join import Joined
from hyperball.report.sections.published import tone

pytest.importorskip("jinja2")


def with_recipe(place, **changes):
    """A run whose record says that it is of another recipe."""
    path = place / "record.json"
    write(path, json.loads(path.read_text()) | {"recipe": recipe_of(changes)})
    return place


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model__magnitude": "ball"}, '`model.magnitude` is "ball" there and "tanh" here'),
        ({"data__name": "mnist"}, '`data.name` is "mnist" there and "digits" here'),
        ({"seed": 3}, "`seed` is 3 there and 0 here"),
        ({"model__options__width": 4}, "`model.options.width` is 4 there and null here"),
    ],
)
def test_a_record_of_another_recipe_than_beside_it_is_named_and_left_out(changes, said, tmp_path):
    with_recipe(make_run(tmp_path / "t/tanh--cosine/seed-0"), **changes)
    make_run(tmp_path / "t/tanh--cosine/seed-1", seed=1)
    found = read_folder(tmp_path)
    assert [run.name for run in found.runs] == ["t/tanh--cosine/seed-1"]
    (left,) = found.left_out
    assert left.path == "t/tanh--cosine/seed-0"
    assert left.reason == f"record.json is of another recipe than recipe.json beside it: {said}"
    assert "is of another recipe" in words_of(tmp_path)


@pytest.mark.parametrize("changes", [{"log__every": 7}, {"engine__compile": True}, {"added_later": 1}])
def test_a_record_may_differ_in_what_does_not_determine_numbers(changes, tmp_path):
    with_recipe(make_run(tmp_path / "a", log={"every": 1}, engine={"compile": False}), **changes)
    assert [run.name for run in read_folder(tmp_path).runs] == ["a"]


def test_networks_that_end_at_chance_did_not_converge_on_the_page(tmp_path):
    for row, errors in {"tanh": [99.0, 98.8], "ball": [99.1, 30.0], "seg": [30.0, 31.0]}.items():
        for seed, error in enumerate(errors):
            place = tmp_path / f"t/{row}--cosine/seed-{seed}"
            make_run(place, top1=1 - error / 100, seed=seed, data__name="cifar100", model__magnitude=row)
    numbers = [number("tanh", "cosine", "N/C", []), number("ball", "cosine", 30.0, []), number("seg", "cosine", 31, [])]
    write(tmp_path / "t/table.json", table_tree("t", numbers))
    found = read_folder(tmp_path)
    (table,) = found.of(Published)
    lines = Joined(table, found.runs).lines
    assert [line.text for line in lines] == ["N/C", "30.00 (1 N/C)", "30.50 ± 0.71"]
    assert [line.lost for line in lines] == [("0", "1"), ("0",), ()]
    assert [tone(table, line) for line in lines] == ["better", "worse", "better"]
    text = words_of(tmp_path)
    assert "2 of 3 are within 1.5 points of the paper or better" in text
    assert "did not converge: 1.00 % at the end is chance among 100 classes" in str(found.runs)


def test_networks_at_chance_have_no_number_in_tables_of_runs(tmp_path):
    make_run(tmp_path / "a", top1=0.1, data__name="cifar10")
    runs, every = (
        next(section.tables[0] for section in results_page(read_folder(tmp_path)).sections if section.title == title)
        for title in ("Runs on cifar10", "Every run")
    )
    assert runs.rows[0][runs.columns.index("accuracy, %")].text == "N/C"
    assert every.rows[0][every.columns.index("accuracy, %")].text == "N/C"
