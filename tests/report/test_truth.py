"""What the report's numbers, doubts, charts and sentences claim is what the records say."""

import json
import re
import shutil

import pytest
from report_cases import (
    attack_tree,
    bench_tree,
    curve_tree,
    features_tree,
    make_robust,
    make_run,
    number,
    page_of,
    recipe_of,
    robust_cell_tree,
    section_of,
    table_tree,
    words_of,
    write,
)

from hyperball.cli import main
from hyperball.report import Chart, Page, Section, Series, read_folder, render
from hyperball.report.kinds import Bench, Published, RobustCell
from hyperball.report.page import Bar
from hyperball.report.results import results_page
from hyperball.report.sections.join import Joined
from hyperball.report.sections.published import signed
from hyperball.report.tables import family, family_of, group
from hyperball.verdicts import NEAR

pytest.importorskip("jinja2")


def texts(table):
    return [[cell.text for cell in row] for row in table.rows]


def lines_of(folder):
    found = read_folder(folder)
    return Joined(found.of(Published)[0], found.runs, found.of(RobustCell)).lines


def test_a_copy_of_a_run_is_no_further_seed_and_is_named(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"a/seed-{seed}", top1=0.9 + 0.01 * seed, seed=seed)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    found = read_folder(tmp_path)
    assert [run.name for run in found.runs] == ["a/seed-0", "a/seed-1"]
    assert {entry.path for entry in found.left_out} == {"copy/seed-0", "copy/seed-1"}
    assert "a copy of a/seed-0" in words_of(tmp_path)
    assert texts(section_of(tmp_path, title="Runs on digits").tables[0])[0][1:3] == ["2", "90.50 ± 0.71"]


def test_two_runs_of_a_seed_that_differ_are_one_with_a_doubt(tmp_path):
    for name, top1 in (("seed-0", 0.70), ("seed-0-again", 0.60), ("seed-1", 0.72)):
        make_run(tmp_path / "t/tanh--cosine" / name, top1=top1, seed=int(name[5]))
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 25.0, [30.0, 28.0])]))
    (line,) = lines_of(tmp_path)
    assert line.values == pytest.approx((30.0, 28.0))
    (doubt,) = line.doubts
    assert doubt.seed == "0"
    assert "seed-0-again" in doubt.text
    (entry,) = group(run for run in read_folder(tmp_path).runs)
    assert (len(entry.runs), len(entry.doubts)) == (2, 1)


def test_attacks_of_copies_count_once_and_rivals_are_doubted(tmp_path):
    for name, seed, clean in (("a", 0, 0.8), ("b", 1, 0.9), ("again", 0, 0.7)):
        write(tmp_path / f"{name}.json", attack_tree(recipe_of({"seed": seed}), clean))
    shutil.copy(tmp_path / "a.json", tmp_path / "copy.json")
    section = section_of(tmp_path, part="robustness")
    assert texts(section.tables[0])[0][1:3] == ["2", "85.00 ± 7.07 {80.0, 90.0}"]
    assert section.doubt_count == 1
    assert "seed 0: clean: again.json says 70.00 % instead of 80.00 %, and is not counted" in section.doubts[0]
    assert [entry.path for entry in read_folder(tmp_path).left_out] == ["copy.json"]


def test_budgets_of_the_papers_numbers_are_means_over_the_seeds_that_have_one(tmp_path):
    make_robust(tmp_path)
    for index, path in enumerate(sorted(tmp_path.glob("*/*/robustness.json"))):  # two seeds of baseline, two of tanh
        tree = json.loads(path.read_text())
        tree["sweeps"][0]["located"] = None if index == 3 else (4 + index) / 255
        path.write_text(json.dumps(tree))
    (table,) = [table for table in section_of(tmp_path, part="robustness").tables if table.heading.startswith("ε")]
    assert table.columns == ("", "fgsm")
    assert texts(table) == [["baseline, natural", "4.50 ± 0.71"], ["tanh, natural", "6.00 [1 of 2]"]]
    assert [row[1].remark for row in table.rows] == ["paper 43.6 %", "paper 43.6 %"]


def test_curves_of_copies_count_once(tmp_path):
    for seed in (0, 1):
        place = make_run(tmp_path / f"seed-{seed}", seed=seed)
        write(place / "attacks/curve.json", curve_tree(10 + seed))
        shutil.copy(place / "attacks/curve.json", place / "attacks/curve-copy.json")
    write(tmp_path / "seed-0/attacks/other.json", curve_tree(3))
    section = section_of(tmp_path, part="robustness")
    (chart,) = section.galleries[0].charts
    assert chart.series[0].points[-1][1] == pytest.approx(100 * (0.9 - 10.5 * 16 / 255))
    assert section.doubt_count == 1
    assert len(read_folder(tmp_path).left_out) == 2


def test_notes_and_nested_numbers_of_a_benchmark_are_shown(tmp_path):
    row = {"network": "tanh + cosine", "ours": {"images_per_second": 72781, "start": 17.5}}
    row |= {"reference": {"images_per_second": 6139}, "ratio": 11.86, "aim": 10.0}
    write(tmp_path / "training.json", {"what": "a loop", "notes": ["stopped early"], "rows": [row]})
    section = section_of(tmp_path, part="benchmarks")
    assert section.remarks == ("stopped early",)
    assert {"ours, images per second", "reference, images per second"} <= set(section.tables[0].columns)
    assert {"72,781", "17.5", "6,139"} <= set(texts(section.tables[0])[0])
    (bars,) = section.charts
    assert "reference images_per_second 6139" in bars.bars[0].tip
    assert bars.bars[0].reached
    assert bars.bars[0].operator == "tanh"
    assert len(read_folder(tmp_path).of(Bench)) == 1


def test_a_speed_reaches_its_aim_from_above_and_a_time_from_below():
    assert Bar("b", 2.0, "", goal=1.5, is_speed=True).reached
    assert not Bar("b", 1.0, "", goal=1.5, is_speed=True).reached
    assert Bar("b", 1.0, "", goal=1.5).reached
    assert not Bar("b", 2.0, "", goal=1.5).reached


def doubted_table(folder):
    make_robust(folder, rows=("baseline", "tanh"))
    for path in folder.glob("baseline--natural/*/robustness.json"):
        write(path, json.loads(path.read_text()) | {"doubts": []})


def test_a_doubted_number_is_not_the_best(tmp_path):
    doubted_table(tmp_path)
    for path in tmp_path.glob("tanh--natural/*/robustness.json"):
        write(path, robust_cell_tree("tanh", "natural", 0, 0.3))
    section = section_of(tmp_path, table="synthetic-attacks")
    plain, tanh = (row[section.tables[0].columns.index("fgsm")] for row in section.tables[0].rows)
    assert (plain.best, plain.doubted) == (True, False)
    assert (tanh.best, tanh.doubted) == (False, True)
    assert '<b class="warn"' in page_of(tmp_path)


def test_a_doubt_names_its_seed_and_is_counted_once(tmp_path):
    doubted_table(tmp_path)
    page = results_page(read_folder(tmp_path))
    sections = {section.title: section for section in page.sections}
    table, attacks = sections["Table 0. Synthetic synthetic-attacks"], sections["Robustness"]
    sentence = "seeds 0, 1: an invented doubt about masked gradients (2 such doubts)"
    assert table.doubts == (f"tanh, natural, {sentence}",)
    assert attacks.doubts == (f"tanh + cosine, {sentence}",)
    assert table.doubt_count == attacks.doubt_count == 2
    assert texts(sections["At a glance"].tables[0])[0][-1] == "2"
    assert [row[-1].text for row in attacks.tables[0].rows] == ["–", "2"]
    assert "seed 1: an invented doubt" in attacks.tables[0].rows[1][-1].tip
    assert words_of(tmp_path).count("2 doubts") == 2


@pytest.mark.parametrize(
    "own, done, near, found",
    [
        ([20.0], "2 of 2", "1 of 2", "2 of 2 cells have numbers; 1 of 2 are within"),
        ([40.0], "2 of 2", "0 of 2", "2 of 2 cells have numbers; 0 of 2 are within"),
        ([33.0], "1 of 2", "0 of 1", "1 of 2 cells have numbers; 0 of 1 are within"),
        ([], "1 of 2", "0 of 1", "1 of 2 cells have numbers; 0 of 1 are within"),
    ],
    ids=["the first", "the second", "another", "none"],
)
def test_a_cell_of_several_recipes_counts_once_by_the_tables_own_number(own, done, near, found, tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8)
    make_run(tmp_path / "t/tanh--cosine/seed-0-other", top1=0.6, optimizer__lr=0.1)
    make_run(tmp_path / "t/ball--cosine/seed-0", top1=0.5, model__magnitude="ball")
    numbers = [number("tanh", "cosine", 20.0, own), number("ball", "cosine", 20.0, [50.0])]
    write(tmp_path / "t/table.json", table_tree("t", numbers))
    glance = section_of(tmp_path, title="At a glance").tables[0]
    (row,) = [dict(zip(glance.columns, cells)) for cells in texts(glance)]
    assert (row["cells done"], row[f"within {NEAR:g} points or better"]) == (done, near)
    assert section_of(tmp_path, table="t").finding.startswith(found)


@pytest.mark.parametrize("own, text", [([20.0], "20.00"), ([33.0], "–")], ids=["its own number", "another"])
def test_a_cell_of_several_recipes_leaves_the_table_as_the_paper_prints_it(own, text, tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8)
    make_run(tmp_path / "t/tanh--cosine/seed-0-other", top1=0.6, optimizer__lr=0.1)
    numbers = [number("tanh", "cosine", 20.0, own), number("tanh", "linear", 20.0, [21.0])]
    numbers += [number("ball", column, 20.0, [50.0]) for column in ("cosine", "linear")]
    write(tmp_path / "t/table.json", table_tree("t", numbers))
    matrix, detail = section_of(tmp_path, table="t").tables
    cells = {row[0].text: row[1:] for row in matrix.rows}
    assert [cell.text for cell in cells["tanh"]] == [text, "21.00"]
    assert [cell.doubted for cell in cells["tanh"]] == [True, False]
    assert "recipes" in cells["tanh"][0].tip
    assert [row[0].remark for row in detail.rows[:2]] == ["lr 0.001", "lr 0.1"]


def test_a_table_whose_cells_all_hold_several_recipes_but_its_own_says_so(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8)
    make_run(tmp_path / "t/tanh--cosine/seed-0-other", top1=0.6, optimizer__lr=0.1)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 20.0, [33.0])]))
    said = "Its cells hold runs of several recipes each, none with the table's own number."
    assert section_of(tmp_path, table="t").finding == said


def test_two_data_sets_never_share_a_table_or_chart_of_attacks(tmp_path):
    for name, share in (("mnist", 0.95), ("cifar10", 0.2)):
        place = make_run(tmp_path / name / "seed-0", data__name=name)
        tree = robust_cell_tree("tanh", "natural", 0)
        write(place / "robustness.json", tree | {"attacks": [{**tree["attacks"][0], "accuracy": share}]})
    section = section_of(tmp_path, part="robustness")
    assert [table.heading.partition(",")[0] for table in section.tables[:2]] == ["cifar10", "mnist"]
    assert [table.heading.rpartition(", ")[2] for table in section.tables[2:]] == ["cifar10", "mnist"]
    assert [chart.note.partition(",")[0] for chart in section.galleries[0].charts] == ["cifar10", "mnist"]
    assert [len(chart.series) for chart in section.galleries[0].charts] == [1, 1]


def test_charts_say_how_many_of_their_lines_they_draw(tmp_path):
    for index in range(16):
        place = make_run(tmp_path / f"run-{index}", optimizer__lr=0.1 + index)
        write(place / "attacks/curve.json", curve_tree(index))
    series = [{"name": str(index), "x": [0, 1], "y": [0, index]} for index in range(30)]
    write(tmp_path / "many.json", {"kind": "curves", "title": "many", "series": series})
    runs = section_of(tmp_path, title="Runs on digits")
    notes = [
        *(chart.note for chart in runs.charts),
        section_of(tmp_path, part="robustness").galleries[0].charts[0].note,
    ]
    assert len(notes) == 4
    assert all("12 of 16 lines" in note for note in notes)
    assert runs.galleries[0].lead == "12 of 16 pictures."
    assert "24 of 30 lines" in words_of(tmp_path)


def test_pictures_of_a_kind_are_counted_among_their_kind(tmp_path):
    for index in range(40):
        curve = {"kind": "curves", "title": f"c{index}", "series": [{"name": "a", "x": [1, 2], "y": [1, 2]}]}
        write(tmp_path / f"a{index:02}.json", curve)
    write(tmp_path / "z.json", features_tree(20))
    galleries = {entry.title: entry for entry in section_of(tmp_path, part="figures").galleries}
    assert len(galleries["Features in the plane"].charts) == 1
    assert len(galleries["Curves"].charts) == 36
    assert galleries["Curves"].lead == "36 of 40 pictures."


def test_an_unfinished_seed_does_not_cut_the_curves_of_the_others(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"seed-{seed}", seed=seed, epochs=20)
    make_run(tmp_path / "seed-2", finished=False, seed=2, epochs=2)
    charts = section_of(tmp_path, title="Runs on digits").charts
    assert [len(chart.series[0].points) for chart in charts] == [20, 20, 20]


def test_a_chart_without_a_line_has_no_frame(tmp_path):
    for seed in (0, 1):
        place = make_run(tmp_path / f"seed-{seed}", seed=seed)
        lines = f'{{"kind": "evaluation", "step": {seed + 1}, "top1": 0.5}}\n'
        (place / "metrics.jsonl").write_text(lines)
    assert section_of(tmp_path, title="Runs on digits").charts == ()
    hollow = Chart("hollow", "x", "", (Series("a", ((0.0, float("nan")),)),))
    assert "<figure" not in render(Page("t", "", (Section("s", charts=(hollow,)),)))


@pytest.mark.parametrize(
    "text, family",
    [("tanh + cosine", "tanh"), ("baseline", "baseline"), ("plain", "baseline"), ("nn.Conv2d", "baseline"),
     ("huber adaptive", "huber"), ("ball(rho=2)", "ball"), ("weighting=joint", ""), ("", "")],
)  # fmt: skip
def test_the_filter_knows_families_of_operators_alone(text, family):
    assert family_of(text) == family


def test_the_filter_offers_no_operator_twice(tmp_path):
    make_robust(tmp_path / "t")
    make_run(tmp_path / "own", model__magnitude=None)
    write(tmp_path / "bench/gpu.json", bench_tree())
    assert results_page(read_folder(tmp_path)).choices("operator") == ["baseline", "linear", "tanh"]


def test_runs_beside_a_table_are_called_so(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", finished=False)
    make_run(tmp_path / "own/seed-0")
    write(tmp_path / "t/table.json", table_tree("x", [number("tanh", "cosine", 25.0, [])]))
    beside = section_of(tmp_path, title="Runs on digits, beside x")
    assert "interrupted" in beside.lead
    assert (beside.table, beside.scale) == ("x", "paper")
    assert section_of(tmp_path, title="Runs on digits").lead.startswith("Runs of no published table.")


def test_another_number_of_seeds_than_the_tables_is_a_doubt(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.75)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 25.0, [25.0, 25.0])]))
    (line,) = lines_of(tmp_path)
    assert [doubt.text for doubt in line.doubts] == ["table.json says 25.00 over 2 seeds, the records have 1"]


def diverge(place):
    record = json.loads((place / "record.json").read_text())
    failure = {"message": "the loss is not finite"}
    write(place / "record.json", record | {"status": "diverged", "results": {}, "failure": failure})


@pytest.mark.parametrize(
    "values, diverged, said",
    [
        ([25.0, 26.0], [], "table.json says 25.50 over 2 seeds, the records have 1 and 1 that did not converge"),
        ([25.0], [], "table.json says 25.00 over 1 seed, the records have 1 and 1 that did not converge"),
        ([], ["0", "1"], "table.json says N/C over 2 seeds, the records have 1 and 1 that did not converge"),
        ([25.0], ["1"], ""),
        ([], [], ""),
    ],
)
def test_a_table_that_knows_of_other_lost_networks_is_doubted(values, diverged, said, tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.75)
    diverge(make_run(tmp_path / "t/tanh--cosine/seed-1", seed=1))
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 25.0, values, diverged=diverged)]))
    (line,) = lines_of(tmp_path)
    assert line.text == "25.00 (1 N/C)"
    assert [doubt.text for doubt in line.doubts] == ([said] if said else [])


def test_a_number_of_networks_that_were_all_lost_is_doubted(tmp_path):
    diverge(make_run(tmp_path / "t/tanh--cosine/seed-0"))
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 25.0, [25.0])]))
    (line,) = lines_of(tmp_path)
    said = "table.json says 25.00 over 1 seed, the records have 0 and 1 that did not converge"
    assert (line.text, [doubt.text for doubt in line.doubts]) == ("N/C", [said])


@pytest.mark.parametrize("share", [1.5, 90.0, -0.1])
def test_accuracies_that_are_none_are_left_out(share, tmp_path):
    make_run(tmp_path / "bad", top1=share)
    make_run(tmp_path / "good")
    write(tmp_path / "attack.json", attack_tree(recipe_of({}), clean=share))
    write(tmp_path / "curve.json", curve_tree(1.0) | {"accuracies": [share] * 5})
    write(tmp_path / "cell.d/robustness.json", robust_cell_tree("tanh", "natural", 0, shift=share))
    found = read_folder(tmp_path)
    assert [run.name for run in found.runs] == ["good"]
    reasons = {entry.path: entry.reason for entry in found.left_out}
    assert set(reasons) == {"bad", "attack.json", "curve.json", "cell.d/robustness.json"}
    assert all("must be an accuracy in [0, 1]" in reason for reason in reasons.values())


def test_broken_conditions_are_named_and_the_run_is_kept(tmp_path):
    (make_run(tmp_path / "a") / "conditions.json").write_text("{")
    found = read_folder(tmp_path)
    assert [run.name for run in found.runs] == ["a"]
    assert [entry.path for entry in found.left_out] == ["a/conditions.json"]


@pytest.mark.parametrize("name", ["record.json", "metrics.jsonl"])
def test_a_page_never_replaces_a_record(name, tmp_path, capsys):
    target = make_run(tmp_path / "a") / name
    before = target.read_text()
    assert main(["report", str(tmp_path), "-o", str(target)]) == 2
    assert "would be a record" in capsys.readouterr().err
    assert target.read_text() == before


def test_empty_rows_and_columns_are_counted_and_not_shown(tmp_path):
    numbers = [number("a", "x", 1.0, [2.0]), number("a", "y", 1.0, []), number("b", "x", 1.0, [])]
    numbers += [number("b", "y", 1.0, []), number("c", "x", 1.0, [3.0]), number("c", "z", 1.0, [3.0])]
    write(tmp_path / "table.json", table_tree("t", numbers))
    table = section_of(tmp_path, table="t").tables[0]
    assert table.columns == ("", "x", "z")
    assert [row[0].text for row in table.rows] == ["a", "c"]
    assert table.caption.endswith("3 numbers are missing; not shown: 1 empty row and 1 empty column.")


def test_words_fit_the_numbers(tmp_path):
    assert [signed(value) for value in (-0.001, 0.0, 0.004, -0.31)] == ["±0.00", "±0.00", "±0.00", "−0.31"]
    numbers = [number("a", "0 %", float("nan"), [2.0]), number("b", "0 %", None, [3.0])]
    write(tmp_path / "table.json", table_tree("t", numbers, scale="quick"))
    text = words_of(tmp_path)
    assert "differences to the paper" not in text
    assert "nan" not in re.findall(r"[a-z]+", text)
    assert "%, %" not in text


def test_networks_under_attack_have_names_of_their_own_and_the_baseline_comes_first(tmp_path):
    kinds = (
        {"model__magnitude": "tanh"},
        {"model__magnitude": None, "model__pool": "huber"},
        {"model__magnitude": None},
    )
    for index, changes in enumerate(kinds):
        place = make_run(tmp_path / f"run-{index}", **changes)
        write(place / "attacks" / "linf.json", attack_tree(recipe_of(changes)))
        write(place / "attacks" / "curve.json", curve_tree(1.0 + index))
    section = section_of(tmp_path, part="robustness")
    names = ["plain, default", "plain, pool huber", "tanh + cosine"]
    assert sorted(row[0].text for row in section.tables[0].rows) == names
    assert section.tables[0].operators == ("baseline", "tanh", "huber")
    assert sorted(line.name for line in section.galleries[0].charts[0].series) == names


def test_a_network_of_which_nothing_is_known_is_no_baseline(tmp_path):
    write(tmp_path / "attack.json", attack_tree({}))
    assert section_of(tmp_path, part="robustness").tables[0].operators == ("",)


@pytest.mark.parametrize(
    "changes, operator",
    [
        ({"model__magnitude": None, "model__pool": "quadratic"}, "baseline"),
        ({"model__magnitude": None, "model__pool": "mean"}, "baseline"),
        ({"model__magnitude": None, "model__pool": "huber(learn_c=True)"}, "huber"),
        ({"model__magnitude": None, "model__name": "pointnet", "model__pool": "mean"}, "quadratic"),
        ({"model__magnitude": None, "model__name": "pointnet", "model__pool": "max"}, "max"),
        ({"model__magnitude": "tanh", "model__pool": "quadratic"}, "tanh"),
    ],
)
def test_plain_pooling_is_an_operator_of_networks_of_points_alone(changes, operator):
    assert family(recipe_of(changes)) == operator


def test_a_figure_of_some_of_a_tables_runs_draws_their_curves_and_what_is_of_them_alone(tmp_path):
    folder = tmp_path / "net-table1-paper"
    rows = ("tanh", "linear")
    for row in rows:
        make_run(folder / f"{row}--cosine/seed-0", model__magnitude=row, epochs=4)
    entries = [number(row, "cosine", 10.0, [10.0]) for row in rows]
    write(folder / "table.json", table_tree("net-table1", entries))
    write(folder / "net-figure2.json", table_tree("net-figure2", entries[:1]))
    line = {"name": "tanh, cosine", "x": [0, 1], "y": [1.0, 2.0]}
    write(folder / "pictures/lengths.json", {"kind": "curves", "title": "Filter lengths", "series": [line]})
    sections = {table: section_of(tmp_path, table=table) for table in ("net-table1", "net-figure2")}
    titles = {
        table: [chart.title for gallery in section.galleries for chart in gallery.charts]
        for table, section in sections.items()
    }
    assert all("Test error, %: cosine" in held for held in titles.values())
    assert "Filter lengths" in titles["net-figure2"]
    assert "Filter lengths" not in titles["net-table1"]


def test_a_chart_names_the_lines_that_it_has_no_room_for(tmp_path):
    for at in range(14):
        make_run(tmp_path / f"t/row{at}--cosine/seed-0", epochs=3, optimizer__lr=0.001 * (at + 1))
    write(tmp_path / "t/table.json", table_tree("t", [number(f"row{at}", "cosine", 10.0, [10.0]) for at in range(14)]))
    (note, *_) = [chart.note for gallery in section_of(tmp_path, table="t").galleries for chart in gallery.charts]
    assert "12 of 14 lines, without row12; row13" in note
