"""Records held against the papers': foreign and broken ones apart, networks at chance, README and page alike."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_cases import tiny_recipe, tiny_table, write_record

from hyperball.experiments import tables
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.pictures import convergence
from hyperball.experiments.results import markdown
from hyperball.experiments.results.collecting import keep_pictures, write_table
from hyperball.experiments.results.comparison import as_data, compare, table
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.files import write_json
from hyperball.report import read_folder
from hyperball.report.results import results_page
from hyperball.training import Recipe


@pytest.fixture
def tiny(monkeypatch) -> Experiment:
    made = replace(tiny_table(), draws=(convergence,))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: made)
    return made


@pytest.fixture
def papers(monkeypatch) -> Experiment:
    """A table of errors on a set of a paper, whose first cell that paper could not train."""
    recipe = Recipe.from_dict({"data": {"name": "cifar100"}, "model": {"name": "cnn9"}, "epochs": 4})
    cells = [("tanh", "N/C"), ("linear", 30.0), ("seg", 31.5), ("ball", 40.0), ("log", None)]
    entries = tuple(
        Entry(row, "cosine", recipe.override({"model.magnitude": row}), number, kind="published")
        for row, number in cells
    )
    made = Experiment("papers", "A table of a paper", "nobody", "error", entries, Reduction(lambda r: r, "less"))
    monkeypatch.setitem(tables.TABLES, "papers", lambda: made)
    return made


def test_a_record_of_another_recipe_than_beside_it_is_named_and_not_counted(tiny, tmp_path, capsys):
    mean, largest = jobs_of(tiny, [0], tmp_path / "tiny-paper")
    path = write_record(mean, recipe=largest.cell.recipe)
    assert f"{path} is of another recipe than recipe.json beside it: `model.pool` is 'max' there" in mean.missing()
    assert not mean.is_done
    text = markdown.made("tiny", tmp_path)
    assert "0 of 3 numbers. Left out: 1 record of another recipe." in text
    said = f"left out {path}: it is of another recipe than recipe.json beside it: `model.pool`"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "tree, said",
    [(None, "`recipe` must be an object"), ([], "`recipe` must be an object"), ({"epochs": "x"}, "cannot be read")],
)
def test_a_record_whose_recipe_cannot_be_read_is_not_counted(tiny, tmp_path, tree, said):
    job = jobs_of(tiny, [0], tmp_path)[0]
    write_record(job, recipe=None)
    held = json.loads((job.folder / "record.json").read_text())
    write_json(job.folder / "record.json", {**held, "recipe": tree})
    assert said in job.missing()


def test_what_does_not_determine_numbers_may_differ_in_a_record(tiny, tmp_path):
    job = jobs_of(tiny, [0], tmp_path)[0]
    write_record(job, recipe=job.cell.recipe.override({"log.every": 7, "engine.compile": False}))
    assert job.missing() == ""


@pytest.mark.parametrize("name, is_own", [("plain--a/seed-0", True), ("plain--a/seed-1", False)])
def test_the_network_that_a_run_began_with_may_have_lain_elsewhere(tmp_path, name, is_own):
    first = Entry("plain", "a", tiny_recipe())
    second = Entry("tanh", "a", tiny_recipe(**{"model.magnitude": "tanh"}), start=("plain", "a"))
    made = Experiment("two", "Two", "nobody", "error", (first, second), Reduction(lambda r: r, "nothing"))
    job = jobs_of(made, [0], tmp_path)[1]
    write_record(job, recipe=job.cell.recipe.override({"start.weights": f"another/folder/{name}"}))
    assert job.is_done is is_own


def test_foreign_and_broken_records_are_counted_apart(tiny, tmp_path, capsys):
    mean, largest, other, another = jobs_of(tiny, range(2), tmp_path / "tiny-paper")
    write_record(mean)
    write_record(largest, recipe=mean.cell.recipe)
    broken = [write_record(other, top1=50.0), write_record(another)]
    broken[1].write_text("{")
    stray = tmp_path / "tiny-paper" / "no-such--cell" / "seed-0" / "record.json"
    write_json(stray, json.loads((mean.folder / "record.json").read_text()))
    text = markdown.made("tiny", tmp_path)
    assert "Left out: 2 records of another recipe and 2 records that cannot be read." in text
    said = capsys.readouterr().err
    assert f"left out {stray}: it lies in the folder of no cell" in said
    assert all(f"left out {path}" in said for path in broken)


def filled(papers: Experiment, folder: Path) -> list:
    """Records of two seeds: the first two cells end at chance, once each, then one that is near, far, and ours."""
    jobs = jobs_of(papers, range(2), folder)
    errors = {"tanh": 99.0, "linear": 98.9, "seg": 32.5, "ball": 45.0, "log": 99.1}
    for job in jobs:
        write_record(job, 1 - errors[job.cell.label.partition("--")[0]] / 100)
    return jobs


def test_networks_that_end_at_chance_did_not_converge(papers, tmp_path):
    jobs = filled(papers, tmp_path / "papers-paper")
    lines = compare(papers, jobs)
    assert [line.diverged for line in lines] == [(0, 1), (0, 1), (), (), (0, 1)]
    assert [line.values for line in lines[:2]] == [(), ()]
    assert table(papers, lines).count("N/C") == 4
    data = as_data(papers, "paper", lines)
    assert data["numbers"][1]["diverged"] == (0, 1)
    assert "within 3 standard errors of chance" in data["notes"][-1]
    text = markdown.made("papers", tmp_path)
    assert "| tanh | cosine | N/C | – | N/C | – | 2 |" in text
    assert "| linear | cosine | N/C | – | 30.0 | – | 2 |" in text
    assert "within 3 standard errors of chance" in text
    assert as_data(papers, "paper", lines[2:4])["notes"] == []


def summary_cells(name: str, folder: Path) -> dict[str, str]:
    """The line of the summary about a table, by the heads of its columns."""
    head, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.summary(folder).splitlines()
    ]
    (row,) = [row for row in rows if row[0] == name]
    return dict(zip(head, row, strict=True))


def overview_cells(name: str, folder: Path) -> dict[str, str]:
    """The same of the page's overview."""
    pytest.importorskip("jinja2")
    found = results_page(read_folder(folder)).sections[0].tables[0]
    (row,) = [row for row in found.rows if row[0].text == name]
    return dict(zip(found.columns, (cell.text for cell in row), strict=True))


@pytest.mark.parametrize("scale, close, median", [("paper", "2 of 4", "-3.00"), ("quarter", "–", "–")])
def test_readme_and_page_judge_alike(papers, tmp_path, scale, close, median):
    folder = tmp_path / f"papers-{scale}"
    filled(papers.at(scale), folder)
    write_table(papers.at(scale), scale, folder)
    readme, page = (cells("A table of a paper", tmp_path) for cells in (summary_cells, overview_cells))
    assert readme["median difference, + is better"] == median
    assert readme["within 1.5 points or better"] == close
    assert page.get("within 1.5 points or better", "–") == close
    assert readme["pairs in the paper's order"] == page["pairs in the paper's order"] == "1 of 1"
    assert (readme["numbers"], readme["seeds"]) == (page["cells done"], page["seeds"]) == ("5 of 5", "2")


@pytest.mark.parametrize("scale, close, word", [("paper", "0 of 1", "contradicts"), ("quarter", "–", "–")])
def test_a_network_that_the_paper_could_not_train_and_we_could_contradicts_it(papers, tmp_path, scale, close, word):
    folder = tmp_path / f"papers-{scale}"
    for job in jobs_of(papers.at(scale).select(["tanh"]), range(2), folder):
        write_record(job, 0.6)
    write_table(papers.at(scale), scale, folder)
    text = markdown.made("papers", tmp_path)
    assert f"| tanh | cosine | 40.00 ± 0.00 | 40.00 | N/C | {word} | 2 |" in text
    assert ("the paper's did not converge, ours did" in text) == (scale == "paper")
    readme, page = (cells("A table of a paper", tmp_path) for cells in (summary_cells, overview_cells))
    assert readme["within 1.5 points or better"] == page.get("within 1.5 points or better", "–") == close
    assert readme["median difference, + is better"] == "–"
    shown = str(results_page(read_folder(tmp_path)))
    assert ("1 contradict it: the paper's did not converge, ours did" in shown) == (scale == "paper")
    assert ("tone='contradicts'" in shown) == (scale == "paper")


def test_a_page_made_of_the_table_alone_tells_networks_at_chance_too(papers, tmp_path):
    filled(papers, tmp_path / "papers-paper")
    write_table(papers, "paper", tmp_path / "papers-paper")
    for path in (tmp_path / "papers-paper").glob("*/seed-*/*.json*"):
        path.unlink()
    assert overview_cells("A table of a paper", tmp_path)["within 1.5 points or better"] == "2 of 4"


def test_the_sign_of_a_difference_is_explained(papers, tiny, tmp_path):
    filled(papers, tmp_path / "papers-paper")
    assert "Differences are ours less the paper's: lower is better." in markdown.made("papers", tmp_path)
    accuracy = replace(papers, metric="top1")
    lines = compare(accuracy, jobs_of(accuracy, [0], tmp_path / "papers-paper"))
    assert "difference: ours less the paper's; higher is better" in table(accuracy, lines)


def test_shorter_scales_stand_behind_a_fold(tiny, tmp_path):
    for scale in ("quick", "paper"):
        write_record(jobs_of(tiny.at(scale), [0], tmp_path / f"tiny-{scale}")[0])
    parts = markdown.made("tiny", tmp_path).split("\n\n<details>\n")
    assert len(parts) == 2
    assert parts[0].startswith("Scale `paper`")
    assert parts[1].startswith("<summary>The scale <code>quick</code>: 1 of 3 numbers</summary>\n\nScale `quick`")
    assert parts[1].endswith("|\n\n</details>")


@pytest.fixture
def part(tiny, monkeypatch) -> Experiment:
    """A figure of one cell of the tiny table."""
    made = replace(tiny, name="part", title="A part", entries=tiny.entries[:1], family="tiny")
    monkeypatch.setitem(tables.TABLES, "part", lambda: made)
    return made


def test_the_summary_has_a_table_once_at_its_longest_scale(tiny, tmp_path):
    for scale in ("quick", "paper"):
        for job in jobs_of(tiny.at(scale), [0], tmp_path / f"tiny-{scale}"):
            write_record(job)
        assert [line.split(" | ")[1] for line in markdown.summary(tmp_path).splitlines()[2:]] == [scale]


def test_a_part_of_another_table_repeats_none_of_its_numbers(tiny, part, tmp_path):
    pytest.importorskip("jinja2")
    folder = tmp_path / "tiny-paper"
    for job in jobs_of(tiny, [0], folder):
        write_record(job)
    for table_of_them in (tiny, part):
        write_table(table_of_them, "paper", folder)
    assert markdown.summary(tmp_path).count("| paper |") == 1
    text = markdown.made("part", tmp_path)
    assert "Its numbers are among those of tiny." in text
    assert "Left out" not in text
    overview = results_page(read_folder(tmp_path)).sections[0].tables[0]
    assert [row[1].text for row in overview.rows] == ["tiny"]


def series_in(folder: Path) -> list[str]:
    return [entry["name"] for entry in json.loads((folder / "pictures" / "convergence.json").read_text())["series"]]


def test_kept_curves_are_drawn_from_all_kept_records_and_never_replaced_by_fewer(tiny, tmp_path):
    jobs = jobs_of(tiny, [0], tmp_path)
    for job in jobs:
        write_record(job)
    assert keep_pictures(tiny, [], tmp_path) == []
    assert series_in(tmp_path) == ["mean, clean", "max, clean"]
    (jobs[1].folder / "record.json").unlink()
    (said,) = keep_pictures(tiny, [], tmp_path)
    assert "the records in" in said
    assert "have no curve of max, clean" in said
    assert series_in(tmp_path) == ["mean, clean", "max, clean"]


def test_curves_of_runs_that_are_not_kept_are_not_kept_either(tiny, tmp_path):
    jobs = jobs_of(tiny, [0], tmp_path / "runs")
    write_record(jobs[1])
    keep_pictures(tiny, [], tmp_path / "runs")
    drawn = [tmp_path / "runs" / "pictures" / "convergence.json"]
    assert keep_pictures(tiny, drawn, tmp_path / "kept") == []
    assert not (tmp_path / "kept" / "pictures").exists()
    write_record(jobs_of(tiny, [0], tmp_path / "kept")[0])
    assert keep_pictures(tiny, drawn, tmp_path / "kept") == []
    assert series_in(tmp_path / "kept") == ["mean, clean"]


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "evaluation", "step": 1}',
        '{"kind": "evaluation", "step": 1, "epoch": 1.0, "top1": Infinity}',
        '{"kind": "evaluation", "step": 1, "epoch": NaN, "top1": 0.5}',
    ],
)
def test_kept_metrics_that_are_broken_are_named_and_the_others_drawn(line, tiny, tmp_path, capsys):
    jobs = jobs_of(tiny, [0], tmp_path)
    for job in jobs:
        write_record(job)
    (jobs[0].folder / "metrics.jsonl").write_text(f"{line}\n")
    assert keep_pictures(tiny, [], tmp_path) == []
    assert series_in(tmp_path) == ["max, clean"]
    assert f"left out {jobs[0].folder}: it cannot be drawn" in capsys.readouterr().err


def test_a_kept_picture_of_a_network_is_not_replaced_by_that_of_another_seed(tiny, tmp_path):
    drawn = tmp_path / "runs" / "filters-mean--clean.json"
    for seed in (0, 1):
        write_json(drawn, {"kind": "filters", "seed": seed})
        keep_pictures(tiny, [drawn], tmp_path / "kept")
    assert json.loads((tmp_path / "kept" / "pictures" / drawn.name).read_text())["seed"] == 0
