"""What the report's tables and curves say of their seeds: which are missing or far apart, and where curves begin."""

import json

import pytest
from report_cases import (
    bench_tree,
    make_robust,
    make_run,
    number,
    page_of,
    robust_cell_tree,
    section_of,
    table_tree,
    write,
)

from hyperball.experiments.results.comparison import Comparison
from hyperball.experiments.results.details import attack_cell
from hyperball.experiments.text import part_of
from hyperball.report import read_folder
from hyperball.report.kinds import Published, RobustCell
from hyperball.report.sections.join import Joined
from hyperball.report.tables import Cell, ending, group

pytest.importorskip("jinja2")


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


@pytest.mark.parametrize(
    "values, lost, networks, text",
    [
        ([24.0, 24.4], 0, 2, "24.20 ± 0.28"),
        ([0.0, 0.0, 38.0], 0, 3, "12.67 ± 21.94 {0.0, 0.0, 38.0}"),
        ([38.11], 0, 3, "38.11 [1 of 3]"),
        ([10.0, 30.0], 1, 4, "20.00 ± 14.14 {10.0, 30.0} (1 N/C) [3 of 4]"),
        ([], 2, 3, "N/C [2 of 3]"),
        ([], 0, 3, "–"),
    ],
)
def test_a_number_over_seeds_is_told_as_the_markdown_tells_it(values, lost, networks, text):
    assert ending(values, lost, networks) == text
    line = Comparison(row="a", column="b", published=None, values=tuple(values), best=(), diverged=tuple(range(lost)))
    if values or lost:
        assert attack_cell(line, networks) == text


@pytest.mark.parametrize(
    "text, parts",
    [
        ("24.20 ± 0.28", ("24.20 ± 0.28", "")),
        ("38.11 [1 of 3]", ("38.11", "[1 of 3]")),
        ("1.00 ± 9.00 {0.0, 2.0} [2 of 3]", ("1.00 ± 9.00", "{0.0, 2.0} [2 of 3]")),
        ("[x]", ("[x]", "")),
    ],
)
def test_what_is_told_of_seeds_stands_below_their_number(text, parts):
    assert Cell(text).parts == parts


def scattered(folder):
    """A table under attack with three seeds of tanh, far apart under FGSM, of which one was attacked with `auto`."""
    make_robust(folder, rows=("baseline", "tanh"), seeds=3)
    for seed, share in enumerate((0.0, 0.02, 0.4)):
        tree = robust_cell_tree("tanh", "natural", seed)
        fgsm, _, auto = tree["attacks"]
        tree["attacks"] = [{**fgsm, "accuracy": share}, *([] if seed else [auto])]
        write(folder / "tanh--natural" / f"seed-{seed}" / "robustness.json", tree)


def test_a_published_table_tells_missing_seeds_and_those_far_apart(tmp_path):
    scattered(tmp_path)
    matrix, detail = section_of(tmp_path, table="synthetic-attacks").tables
    assert column(matrix, "fgsm")[1].text == "14.00 ± 22.54 {0.0, 2.0, 40.0}"
    assert column(matrix, "auto")[1].text == "2.00 [1 of 3]"
    assert [cell.text for cell in column(matrix, "test set")] == ["86.00 ± 1.00"] * 2
    assert {"14.00 ± 22.54 {0.0, 2.0, 40.0}", "2.00 [1 of 3]"} <= {cell.text for cell in column(detail, "ours")}
    page = page_of(tmp_path)
    assert '<small class="seeds">{0.0, 2.0, 40.0}</small>' in page
    assert '<small class="seeds">[1 of 3]</small>' in page
    assert matrix.told.startswith(
        f"{matrix.caption} {{…}}: each seed, where their standard deviation is above 5; [1 of 3]"
    )


def test_a_table_of_attacks_tells_missing_seeds_and_those_far_apart(tmp_path):
    scattered(tmp_path)
    many, few = section_of(tmp_path, part="robustness").tables[:2]
    assert column(many, "fgsm")[1].text == "14.00 ± 22.54 {0.0, 2.0, 40.0}"
    assert column(few, "auto")[1].text == "2.00 [1 of 3]"
    assert [cell.text for cell in (*column(many, "seeds"), *column(few, "seeds"))] == ["3"] * 4
    assert column(many, "bim")[1].text == "–"


def test_a_table_without_its_runs_tells_missing_seeds_too(tmp_path):
    numbers = [
        number("tanh", "natural", 85.0, [85.0, 86.0, 87.0]),
        number("tanh", "natural, auto", None, [2.0, 4.0]),
        number("ball", "natural", 85.0, [85.0]),
        number("ball", "natural, auto", None, [2.0]),
    ]
    write(tmp_path / "table.json", table_tree("t", numbers, "top1"))
    found = read_folder(tmp_path)
    lines = Joined(found.of(Published)[0], found.runs, found.of(RobustCell)).lines
    assert [line.text for line in lines] == ["86.00 ± 1.00", "3.00 ± 1.41 [2 of 3]", "85.00", "2.00"]
    (table, _) = section_of(tmp_path, table="t").tables
    assert table.told == f"{table.caption} [1 of 3]: so many of the networks have a number."


@pytest.mark.parametrize("with_zero", [False, True])
def test_curves_over_outliers_begin_at_the_clean_test(with_zero, tmp_path):
    shares = (0, 10, 50) if with_zero else (10, 50)
    numbers = [number("max", "trained clean", 86.0, [85.0, 87.0])]
    numbers += [number("max", f"trained clean, {share} %", 84.0 - share, [80.0 - share] * 2) for share in shares]
    write(tmp_path / "table.json", table_tree("t", numbers, "top1"))
    (gallery,) = section_of(tmp_path, table="t").galleries
    ours, theirs = (chart.series[0].points for chart in gallery.charts)
    clean = (80.0, 84.0) if with_zero else (86.0, 86.0)
    assert [x for x, _ in ours] == [x for x, _ in theirs] == [0.0, 10.0, 50.0]
    assert (ours[0][1], theirs[0][1]) == clean


def test_a_table_tested_once_shows_its_training_and_its_radii_layer_by_layer(tmp_path):
    place = make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.75, epochs=1)
    trained = [{"kind": "train", "step": step, "loss": 5.0 / step, "accuracy": step / 20} for step in (2, 4, 6)]
    with (place / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in trained)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 20.0, [25.0])], scale="quick"))
    convergence, radii = section_of(tmp_path, table="t").galleries
    assert {chart.title for chart in convergence.charts} == {"Training error, %: cosine", "Training loss: cosine"}
    (chart,) = radii.charts
    (line,) = chart.series
    assert chart.x_label == "layer"
    assert line.points == ((1.0, 2.0), (2.0, 0.7))
    assert "after 10 steps, from conv to conv2" in chart.note


def test_a_baseline_has_its_color_whatever_its_pooling(tmp_path):
    make_run(tmp_path / "t/baseline--cosine/seed-0", top1=0.75, model__magnitude=None, model__pool="mean")
    write(tmp_path / "t/table.json", table_tree("t", [number("baseline", "cosine", 20.0, [25.0])]))
    (gallery,) = [entry for entry in section_of(tmp_path, table="t").galleries if entry.title == "Convergence"]
    assert {(line.operator, line.color) for chart in gallery.charts for line in chart.series} == {("baseline", 0)}


@pytest.mark.parametrize(
    "days, badge",
    [
        (("2026-11-16T03:04:51+00:00",), "2026-11-16"),
        (("2026-11-16T03:04:51+00:00", "2026-11-14T23:00:00+00:00"), "2026-11-14 to 2026-11-16"),
        ((None,), "undated"),
    ],
)
def test_a_benchmark_tells_when_and_under_what_it_was_measured(days, badge, tmp_path):
    tree = bench_tree()
    part = tree["sections"].pop("conv")
    for index, day in enumerate(days):
        held = {**part["conditions"], "busy": True, "threads": 4 + index} | ({"date": day} if day else {})
        tree["sections"][f"part {index}"] = {**part, "conditions": held}
    write(tmp_path / "bench/gpu.json", tree)
    section = section_of(tmp_path, part="benchmarks")
    assert section.badges == ("Synthetic GPU", "torch 2.8.0", badge)
    assert "busy: yes" in section.facts
    assert ("threads: 4" in section.facts) == (len(days) == 1)
    assert [fact for fact in section.facts if fact.startswith("part 1: threads 5")] == [
        f"part 1: threads 5, date {day}" for day in days[1:]
    ]


UNDER = {"half": {"last": {"top1": 0.38, "loss": 2.0}, "best": {"top1": 0.52, "loss": 1.8}}}


def make_tested(folder, seeds=2, under=UNDER):
    """A row tested with outliers: of its networks the last alone after every epoch."""
    numbers = [number("huber", "clean", 86.0, [85.0] * seeds), number("huber", "clean, half", 52.4, [38.0] * seeds)]
    for seed in range(seeds):
        held = {"log__conditions": {"half": {"outliers": 0.5}}} if seed == seeds - 1 else {"log__every": 7}
        place = make_run(folder / "huber--clean" / f"seed-{seed}", top1=0.85, seed=seed, data__name="clouds", **held)
        write(place / "conditions.json", {"half": {"top1": 0.38, "loss": 2.0}})
        if seed == seeds - 1:
            tree = json.loads((place / "record.json").read_text())
            tree["results"]["conditions"] = under
            write(place / "record.json", tree)
    return write(folder / "table.json", table_tree("pools", numbers, "top1"))


def test_the_best_epoch_under_a_condition_stands_beside_the_last_of_all_seeds(tmp_path):
    make_tested(tmp_path)
    found = read_folder(tmp_path)
    assert not found.left_out
    (table,) = found.of(Published)
    clean, half = Joined(table, found.runs).lines
    assert (half.values, half.best) == (pytest.approx([38.0, 38.0]), pytest.approx([52.0]))
    assert (half.seeds, half.doubts, half.variant) == (2, (), "")
    assert len(clean.best) == 2
    details = section_of(tmp_path, table="pools").tables[-1]
    assert [cell.text for cell in column(details, "best epoch")][-1] == "52.00 [1 of 2]"


def test_runs_that_differ_in_what_they_log_are_averaged(tmp_path):
    for seed, every in enumerate((10, 50)):
        make_run(tmp_path / f"run-{seed}", seed=seed, log__every=every)
    found = read_folder(tmp_path)
    (one,) = group(found.runs)
    assert len(one.runs) == 2


ODD = [
    3, [], "x", False, {"half": None}, {"half": 3}, {"half": {"best": 3}}, {"half": {"last": [1]}},
    {"half": {"best": {"top1": "0.5"}}}, {"half": {"best": {"top1": True}}}, {"half": {"best": {"top1": 52.0}}},
    {"half": {"last": {"top1": -1.0}}}, {"half": {"best": {"loss": 1e400}}}, {"half": {"best": {"deep": {}}}},
]  # fmt: skip


@pytest.mark.parametrize("under", ODD, ids=str)
def test_a_record_with_odd_conditions_is_named_and_left_out(under, tmp_path):
    make_tested(tmp_path, under=under)
    (left,) = read_folder(tmp_path).left_out
    assert "seed-1" in left.path
    assert "conditions" in left.reason


@pytest.mark.parametrize("under", [None, {}, {"half": {}}, {"half": {"best": {"top1": None}}}], ids=str)
def test_a_record_may_have_no_best_epoch_under_a_condition(under, tmp_path):
    make_tested(tmp_path, under=under)
    found = read_folder(tmp_path)
    assert not found.left_out
    (table,) = found.of(Published)
    assert Joined(table, found.runs).lines[1].best == ()


def test_a_best_epoch_of_fewer_seeds_says_so(tmp_path):
    make_tested(tmp_path, seeds=3)
    details = section_of(tmp_path, table="pools").tables[-1]
    assert [cell.text for cell in column(details, "best epoch")][-1] == "52.00 [1 of 3]"
    assert part_of((52.0,), 3) == "52.00 [1 of 3]"
    assert part_of((52.0, 54.0), 2) == "53.00"
    assert part_of((), 2) == "–"


def test_of_copies_the_run_that_was_tested_most_is_kept(tmp_path):
    plain, tested = make_run(tmp_path / "a"), make_run(tmp_path / "b", log__conditions={"half": {"outliers": 0.5}})
    tree = json.loads((tested / "record.json").read_text())
    tree["results"]["conditions"] = UNDER
    write(tested / "record.json", tree)
    found = read_folder(tmp_path)
    assert [run.folder for run in found.runs] == [tested]
    (left,) = found.left_out
    assert (left.path, left.reason.partition(" (")[0]) == (plain.name, "a copy of b")


def test_runs_that_choose_among_other_epochs_are_not_averaged(tmp_path):
    for seed, every in enumerate((1, 5)):
        make_run(tmp_path / f"run-{seed}", seed=seed, log__evaluate_every=every)
    assert len(group(read_folder(tmp_path).runs)) == 2
