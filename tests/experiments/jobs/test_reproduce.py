"""`hyperball reproduce`: trains, keeps, resumes, measures times, and writes the tables of the README and the docs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from runner_cases import FakeCells

from hyperball import data
from hyperball.cli import main
from hyperball.experiments import runtime, tables
from hyperball.experiments.jobs import crew
from hyperball.experiments.pictures import convergence
from hyperball.experiments.results import markdown
from hyperball.experiments.runtime import Subject, Timing
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.experiments.tables.declarative import pooling_runtime
from hyperball.training import Recipe, train

FILES = ("README.md", "docs/reproduction.md", "docs/robustness.md")


@pytest.fixture
def tiny(monkeypatch) -> Experiment:
    """A table of two cells, the one beside a number of the paper and the other ours."""
    recipe = Recipe.from_dict({
        "data": {"name": "clouds", "train_size": 20, "test_size": 20, "points": 16},
        "model": {"name": "points", "pool": "mean"}, "epochs": 4, "batch_size": 10,
    })  # fmt: skip
    entries = (
        Entry("mean", "clean", recipe, 80.0, also={"map_raw": 50.0}),
        Entry("max", "clean", recipe.override({"model.pool": "max"}), kind="ours"),
    )
    made = Experiment(
        "tiny", "A tiny table", "nobody", "error", entries, Reduction(lambda r: r.override({"epochs": 1}), "1 epoch"),
        notes=("a note",), also=("map_raw",),
    )  # fmt: skip
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: made)
    return made


def test_a_table_is_trained_kept_and_printed_beside_the_paper(tiny, tmp_path, capsys):
    command = ["reproduce", "tiny", "--scale", "quick", "--out", str(tmp_path / "runs"), "--accelerator", "cpu"]
    command += ["--collect", str(tmp_path / "results")]
    assert main([*command, "--cells", "published"]) == 0
    printed = capsys.readouterr().out
    assert "quick: 1 epoch" in printed
    assert "note: a note" in printed
    kept = tmp_path / "results" / "tiny-quick"
    record = json.loads((kept / "mean--clean" / "seed-0" / "record.json").read_text())
    assert (record["experiment"]["scale"], record["experiment"]["protocol"]) == ("quick", "1 epoch")
    data = json.loads((kept / "table.json").read_text())
    assert [len(number["values"]) for number in data["numbers"]] == [1, 0]

    text = markdown.summary(tmp_path / "results")
    assert "| A tiny table | quick | 1 of 2 | 1 |" in text
    filled = markdown.fill("a\n<!-- results: tiny -->\nold\n<!-- /results -->\nb", tmp_path / "results")
    assert filled.startswith("a\n<!-- results: tiny -->\nScale `quick`: 1 epoch. 1 of 2 numbers, 1 seed.")
    assert "old" not in filled
    assert "(50) |\n<!-- /results -->\nb" in filled
    assert main([*command, "--cells", "published"]) == 0
    assert "1 cell, 1 done before" in capsys.readouterr().out


def test_scales_do_not_share_a_folder(tiny, tmp_path, capsys):
    for scale in ("quick", "quarter"):
        command = ["reproduce", "tiny", "--scale", scale, "--cells", "max", "--out", str(tmp_path), "--dry-run"]
        assert main(command) == 0
        assert f"1 cell, 0 done before, in {tmp_path / f'tiny-{scale}'}" in capsys.readouterr().out


def test_a_set_that_is_not_there_is_one_mistake_before_any_cell_is_begun(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HYPERBALL_DATA", raising=False)
    command = ["reproduce", "dcnet-table3", "--scale", "quick", "--cells", "tanh", "--out", str(tmp_path / "runs")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cifar10 needs a folder of data" in line
    assert main([*command, "--data-root", str(tmp_path)]) == 2
    assert "no cifar10 in" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_gpu_that_is_not_there_is_one_mistake_before_any_cell_is_begun(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["reproduce", "tiny", "--out", str(tmp_path / "runs"), "--accelerator", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('must be "cpu" or "auto" where torch finds no GPU, got "cuda"')
    assert not (tmp_path / "runs").exists()


def test_cells_that_need_a_gpu_are_one_mistake_before_any_is_begun(tmp_path, capsys, monkeypatch):
    cells = FakeCells({})
    monkeypatch.setattr(crew, "start", cells)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["reproduce", "pooling-test-outliers", "--out", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert '`accelerator` must be a GPU for cells in tf32, got "auto"' in line
    assert "the scale quick runs on one" in line
    assert not cells.started


@pytest.mark.parametrize("option", ["--out", "--collect"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_cell_is_begun(option, tiny, tmp_path, capsys, monkeypatch):
    cells = FakeCells({})
    monkeypatch.setattr(crew, "start", cells)
    (tmp_path / "file").touch()
    folders = {"--out": tmp_path / "runs", "--collect": tmp_path / "kept", option: tmp_path / "file"}
    command = ["reproduce", "tiny", *(str(part) for pair in folders.items() for part in pair)]
    assert main(command) == 2
    assert capsys.readouterr().err == f"hyperball reproduce: {tmp_path / 'file' / 'tiny-paper'}: Not a directory\n"
    assert not cells.started


def test_several_tables_are_made_one_after_the_other(capsys):
    assert main(["reproduce", "dcnet-table2", "dcnet-figure4", "--scale", "quarter", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(tables.trained('dcnet-table2').entries)} cells, 0 done before" in printed
    assert "Convergence of ResNet-32" in printed
    assert "quarter: the schedule compressed by 4" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a table"),
        (["dcnet-tabel3"], "did you mean 'dcnet-table3'"),
        (["DCNET-TABLE3"], "did you mean 'dcnet-table3'"),
        (["dcnet-table3", "--cells", "tank", "--dry-run"], "did you mean 'tanh'"),
        (["dcnet-table3", "--time-limit", "0"], "--time-limit must be > 0"),
        (["dcnet-table3", "--time-limit", "nan"], "--time-limit must be > 0, got nan"),
        (["pooling-runtime", "--cells", "huber"], "takes no --cells"),
        (["pooling-runtime", "--seeds", "2"], "takes no --seeds"),
        (["projections-runtime", "--scale", "half"], "must be one of quick, paper, got half"),
        (["dcnet-table3", "--seeds", "0"], "--seeds must be from 1 to 1000, got 0"),
        (["dcnet-table3", "--seeds", "100000000"], "--seeds must be from 1 to 1000, got 100000000"),
        (["dcnet-table3", "--first-seed", "-1"], "--first-seed must be >= 0, got -1"),
        (["dcnet-table3", "--jobs", "0"], "--jobs must be >= 1, got 0"),
        (["dcnet-table3", "--cells", " , "], "--cells must name rows, columns or cells"),
        (["--markdown", "no-such-folder"], "is no folder"),
        (["--markdown", ".", "--check"], "--check goes with --into FILE"),
        (["dcnet-table3", "--markdown", ".", "--into", "a.md"], "got dcnet-table3 too"),
        (["dcnet-tabel3", "--markdown", "."], "did you mean 'dcnet-table3'"),
        (["--markdown", ".", "--cells", "tanh"], "--markdown trains nothing: it takes no --cells"),
        (["--markdown", ".", "--first-seed", "1"], "it takes no --first-seed"),
        (["dcnet-table3", "--into", "a.md"], "--into goes with --markdown"),
        (["dcnet-table3", "--check"], "--check goes with --markdown"),
        (["dcnet-table3", "--cells", "cosine, rellu", "--dry-run"], "no cell 'cosine'; did you mean 'cosine, relu'?"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments, message, capsys):
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "cells, count",
    [
        ("cosine, relu", 16),
        ("cosine,relu", 16),
        ("'cosine, relu'", 16),
        ("tanh,cosine, relu", 19),
        ('"cosine, relu", tanh', 19),
        ("baseline, no decay on filters (control)", 1),
        ("baseline, no decay on filters (control), tanh", 5),
        ("tanh--cosine-relu, baseline,", 3),
    ],
)
def test_cells_may_have_commas_in_their_names(cells, count, capsys, tmp_path):
    assert main(["reproduce", "dcnet-table3", "--cells", cells, "--dry-run", "--out", str(tmp_path)]) == 0
    cells = "1 cell" if count == 1 else f"{count} cells"
    assert f"{cells}, 0 done before" in capsys.readouterr().out


def test_markdown_of_tables_that_are_named_is_theirs(tiny, tmp_path, capsys):
    kept_record(tiny, tmp_path)
    assert main(["reproduce", "tiny", "dcnet-table2", "--markdown", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{markdown.made('tiny', tmp_path)}\n\n{markdown.NOTHING}\n"
    assert "| mean | clean | 75.00 |" in printed


@pytest.mark.parametrize("scale", ["quick", "half"])
def test_collecting_a_part_of_a_table_keeps_the_curves_of_the_rest(tiny, scale, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crew, "start", FakeCells({}))
    drawn = replace(tiny, draws=(convergence,))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: drawn)
    figure = replace(drawn, name="figure", title="A figure", entries=drawn.entries[1:], family="tiny")
    monkeypatch.setitem(tables.TABLES, "figure", lambda: figure)
    command = ["--scale", scale, "--accelerator", "cpu", "--collect", str(tmp_path / "results")]
    for own in (["tiny", "--out", "a"], ["tiny", "--cells", "mean", "--first-seed", "1", "--out", "b"]):
        assert main(["reproduce", *own[:-1], str(tmp_path / own[-1]), *command]) == 0
    assert main(["reproduce", "figure", "--out", str(tmp_path / "a"), *command]) == 0
    for place in ("results", "a"):
        picture = json.loads((tmp_path / place / f"tiny-{scale}" / "pictures" / "convergence.json").read_text())
        assert [series["name"] for series in picture["series"]] == ["mean, clean", "max, clean"]
    assert ["band" in series for series in picture["series"]] == [False, False]
    kept = json.loads((tmp_path / "results" / f"tiny-{scale}" / "pictures" / "convergence.json").read_text())
    assert ["band" in series for series in kept["series"]] == [True, False]


def test_times_are_measured_beside_the_published_ones(monkeypatch, tmp_path, capsys):
    subjects = (Subject("a", "forward", 2.5, lambda device: lambda: sum(range(100)), samples=4),)
    made = Timing("timed", "Times", "nobody", "milliseconds", lambda scale: subjects, lambda scale: "a sum")
    monkeypatch.setitem(tables.TABLES, "timed", lambda: made)
    command = ["reproduce", "timed", "--out", str(tmp_path / "runs"), "--collect", str(tmp_path / "results")]
    assert main([*command, "--accelerator", "cpu", "--scale", "quick"]) == 0
    assert "a sum; medians of" in capsys.readouterr().out
    data = json.loads((tmp_path / "results" / "timed-quick" / "table.json").read_text())
    (number,) = data["numbers"]
    assert number["mean"] > 0
    assert len(number["rounds"]) == runtime.ROUNDS
    assert data["environment"]["versions"]["torch"]
    assert "| a | forward |" in markdown.made("timed", tmp_path / "results")


@pytest.mark.parametrize("name", tables.TIMED)
def test_what_is_timed_can_be_called(name, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "ROUNDS", 1)
    monkeypatch.setattr(runtime, "WARMUPS", 0)
    monkeypatch.setitem(pooling_runtime.POOLED, "quick", (2, 3, 16))
    table = tables.TIMED[name]()
    for subject in [*table.subjects("quick")][:: 5 if name == "projections-runtime" else 1]:
        assert runtime.timed(subject, runtime.torch.device("cpu"))["mean"] > 0


@pytest.mark.parametrize("name", ["dcnet-table3", "dcnet-table6", "dcnet-figures-mnist", "pooling-outliers"])
def test_quick_recipes_run_on_the_real_sets(name, tmp_path):
    recipe = tables.trained(name).at("quick").entries[0].recipe
    try:
        data.load(recipe.data.name)
    except data.DataError as error:
        pytest.skip(f"no real {recipe.data.name}: {error}")
    classes = 40 if recipe.data.name == "modelnet40" else 10
    sizes = {"data.train_size": 4 * classes, "data.test_size": 2 * classes, "batch_size": classes}
    schedule = {"schedule.name": "constant", "schedule.milestones": [], "schedule.every": None}
    short = recipe.override({**sizes, **schedule, "steps": 2, "epochs": None, "data.workers": 0})
    assert train(short, tmp_path, accelerator="cpu").status == "finished"


def test_markers_without_records_say_so_and_unknown_ones_are_refused(tmp_path):
    text = "<!-- results: dcnet-table3 -->\n<!-- /results -->"
    assert markdown.NOTHING in markdown.fill(text, tmp_path)
    with pytest.raises(ValueError, match="did you mean 'dcnet-table3'"):
        markdown.fill(text.replace("table3", "tabel3"), tmp_path)


def test_a_record_that_is_none_is_counted_and_left_out(tiny, tmp_path):
    folder = tmp_path / "tiny-paper" / "mean--clean" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{}")
    assert "Left out: 1 record that cannot be read." in markdown.made("tiny", tmp_path)


def test_the_tables_of_readme_and_docs_are_what_the_records_say(capsys):
    for name in FILES:
        assert "<!-- results: " in (ROOT / name).read_text(encoding="utf-8")
    files = [str(ROOT / name) for name in FILES]
    code = main(["reproduce", "--markdown", str(ROOT / "results"), "--into", *files, "--check"])
    assert code == 0, capsys.readouterr().out


def test_no_record_names_a_folder_of_the_machine_it_was_made_on():
    absolute = re.compile(r'"(/|[A-Za-z]:\\\\)[^"]{,300}"')  # longer ones are not paths but bits of images
    records = [path for path in (ROOT / "results").rglob("*.json") if absolute.search(path.read_text())]
    assert records == []


def test_a_stale_file_is_named_and_then_filled(tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text("<!-- results: summary -->\nold\n<!-- /results -->\n")
    command = ["reproduce", "--markdown", str(tmp_path), "--into", str(path)]
    assert main([*command, "--check"]) == 1
    assert "is not what the records say" in capsys.readouterr().out
    assert main(command) == 0
    assert main([*command, "--check"]) == 0
    assert markdown.NOTHING in path.read_text()


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_filled_file_keeps_its_line_endings(ending, tmp_path):
    path = tmp_path / "a.md"
    lines = ["before", "<!-- results: summary -->", "old", "<!-- /results -->", "ende — gut", ""]
    path.write_bytes(ending.join(lines).encode())
    command = ["reproduce", "--markdown", str(tmp_path), "--into", str(path)]
    assert main(command) == 0
    expected = [*lines[:2], markdown.NOTHING, *lines[3:]]
    assert path.read_bytes() == ending.join(expected).encode()
    assert main([*command, "--check"]) == 0


def test_a_file_that_is_no_text_is_refused(tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_bytes(b"caf\xe9\n")
    assert main(["reproduce", "--markdown", str(tmp_path), "--into", str(path)]) == 2
    assert "must be a text in UTF-8: byte 3 is not" in capsys.readouterr().err
    assert path.read_bytes() == b"caf\xe9\n"


def test_cells_are_looked_for_in_every_table_before_any_is_trained(tmp_path, capsys):
    command = ["reproduce", "dcnet-table3", "dcnet-table7", "--cells", "seg", "--out", str(tmp_path / "runs")]
    assert main(command) == 2
    assert "dcnet-table7 has no cell 'seg'" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("no marker", "there is no marker"),
        ("<!-- results: summary -->\n<!-- results: dcnet-table3 -->\n<!-- /results -->\n", "2 that begin, 1 that end"),
        ("<!-- results: summary -->\n<!-- /results -->\n<!-- /results -->\n", "1 that begin, 2 that end"),
        ("<!-- results: sum mary -->\n<!-- /results -->\n", "and 0 pairs"),
        ("<!-- results: sumary -->\n<!-- /results -->\n", "a.md: unknown table 'sumary'; did you mean 'summary'?"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_markers_that_are_none_are_refused_with_their_file(text, message, options, tmp_path, capsys):
    path = tmp_path / "a.md"
    path.write_text(text)
    assert main(["reproduce", "--markdown", str(tmp_path), "--into", str(path), *options]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == text


def kept_record(tiny, folder: Path, **changes) -> Path:
    """A record of the table's first cell, without training."""
    recipe = tiny.entries[0].recipe.override({"seed": 0}).to_dict()
    last = {"top1": 0.25, "map_raw": 0.5}
    tree = {
        "recipe": recipe, "status": "finished", "results": {"last": last, "best": last, "first_epoch": last},
        "conditions": {}, "engine": {}, "environment": {}, "timing": {"seconds": 1.0}, **changes,
    }  # fmt: skip
    place = folder / "tiny-paper" / "mean--clean" / "seed-0"
    place.mkdir(parents=True)
    (place / "recipe.json").write_text(json.dumps(recipe))
    (place / "record.json").write_text(json.dumps(tree))
    return place / "record.json"


def test_a_broken_record_is_named_and_left_out(tiny, tmp_path, capsys):
    path = kept_record(tiny, tmp_path, results={"last": {"top1": "x"}})
    assert main(["reproduce", "--markdown", str(tmp_path)]) == 0
    assert f"left out {path}: `results.last.top1` must be a number, got 'x'" in capsys.readouterr().err
    assert "Left out: 1 record that cannot be read." in markdown.made("tiny", tmp_path)


def test_a_network_that_did_not_converge_is_shown_as_the_papers_do(tiny, tmp_path):
    kept_record(tiny, tmp_path, status="diverged", results={}, failure={"step": 7, "where": "layer a"})
    text = markdown.made("tiny", tmp_path)
    assert "| mean | clean | N/C | – | 80.0 | – | 1 |" in text
    assert "1 of 2 numbers" in text
    assert "1 of 2" in markdown.summary(tmp_path)


TIMES = {"experiment": "timed", "metric": "ms", "protocol": "p", "environment": {"device": "another GPU"}}


@pytest.fixture
def timed(monkeypatch):
    subjects = (Subject("a", "forward", 2.5, lambda device: lambda: None),)
    made = Timing("timed", "Times", "nobody", "milliseconds", lambda scale: subjects, lambda scale: "nothing")
    monkeypatch.setitem(tables.TABLES, "timed", lambda: made)


def test_a_broken_table_of_times_is_named_and_left_out(timed, tmp_path, capsys):
    path = tmp_path / "timed-paper" / "table.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**TIMES, "numbers": [{"row": "a", "column": "b", "mean": "x", "published": None}]}))
    assert markdown.made("timed", tmp_path) == markdown.NOTHING
    assert f"left out {path}" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["more than nothing; medians of 15 rounds, synchronized, on cpu", "p"])
def test_a_kept_table_of_another_device_or_other_work_is_not_written_over(protocol, timed, tmp_path, capsys):
    path = tmp_path / "kept" / "timed-quick" / "table.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**TIMES, "protocol": protocol, "environment": {"device": "cpu"}, "numbers": []}))
    command = ["reproduce", "timed", "--scale", "quick", "--accelerator", "cpu", "--out", str(tmp_path / "runs")]
    assert main([*command, "--collect", str(tmp_path / "kept")]) == 0
    assert f"kept {path} as it is: it is of another protocol: {protocol}" in capsys.readouterr().out
    assert json.loads(path.read_text())["numbers"] == []


def test_times_of_a_gpu_that_is_not_there_are_one_mistake(timed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["reproduce", "timed", "--out", str(tmp_path / "runs"), "--accelerator", "cuda"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith('must be "cpu" or "auto" where torch finds no GPU, got "cuda"')


def test_times_end_with_the_time(timed, tmp_path, capsys):
    command = ["reproduce", "timed", "--scale", "quick", "--out", str(tmp_path), "--time-limit", "1e-9"]
    assert main(command) == 130
    assert "the time was over" in capsys.readouterr().err
    assert not list(tmp_path.rglob("table.json"))
