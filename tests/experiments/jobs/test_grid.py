"""Grids: cells from axes, and runners that survive crashes, skip what is done and go on after an interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from places import SOURCE
from runner_cases import RECORD, FakeCells

from hyperball import models
from hyperball.cli import main
from hyperball.experiments import grid as grid_module
from hyperball.experiments import tables
from hyperball.experiments.grid import GridError, expand, read_grid
from hyperball.experiments.jobs import crew
from hyperball.experiments.jobs.cell import main as cell_main
from hyperball.experiments.jobs.ends import End, ended
from hyperball.experiments.jobs.job import LOG, Job
from hyperball.experiments.results.summary import summarize
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.training import Recipe

pytest.importorskip("yaml")

SMALL = {"epochs": 1, "batch_size": 50, "data.train_size": 100, "data.test_size": 50}


def labels(tree):
    return [(cell.label, cell.seed) for cell in expand(tree)]


def test_a_grid_without_axes_is_its_base():
    (cell,) = expand({"base": "digits"})
    assert cell.name == "base/seed-0"
    assert cell.recipe.data.name == "digits"


def test_product_makes_every_combination_with_every_seed():
    tree = {"axes": {"model.magnitude": [None, "tanh"], "optimizer.lr": [1e-3, 1e-2]}, "seeds": [3, 5]}
    cells = expand(tree)
    assert len(cells) == 8
    assert {(cell.recipe.model.magnitude, cell.recipe.optimizer.lr, cell.recipe.seed) for cell in cells} == {
        (m, lr, s) for m in (None, "tanh") for lr in (1e-3, 1e-2) for s in (3, 5)
    }
    assert cells[0].label == "magnitude=none, lr=0.001"


def test_zip_goes_side_by_side():
    tree = {"axes": [{"zip": {"model.magnitude": ["tanh", "ball"], "model.angular": ["cosine", "square_cosine"]}}]}
    assert [(c.recipe.model.magnitude, c.recipe.model.angular) for c in expand(tree)] == [
        ("tanh", "cosine"), ("ball", "square_cosine"),
    ]  # fmt: skip


def test_list_takes_changes_one_by_one_under_their_names():
    tree = {"axes": [{"list": [{"name": "small step", "optimizer.lr": 1e-4}, {"optimizer.lr": 1e-2}]}], "seeds": 2}
    assert labels(tree) == [("small step", 0), ("small step", 1), ("lr=0.01", 0), ("lr=0.01", 1)]


def test_axes_are_multiplied_and_overrides_hold_for_all():
    axes = [{"product": {"model.magnitude": ["tanh", "ball"]}}, {"list": [{"optimizer.lr": 1.0}, {"epochs": 4}]}]
    cells = expand({"base": {"epochs": 3}, "overrides": {"batch_size": 7}, "axes": axes})
    assert [(cell.recipe.epochs, cell.recipe.batch_size) for cell in cells] == [(3, 7), (4, 7), (3, 7), (4, 7)]


def test_a_file_beside_the_grid_is_its_base(tmp_path):
    Recipe(epochs=9).to_file(tmp_path / "base.yaml")
    (tmp_path / "grid.yaml").write_text("base: base.yaml\nseeds: 2\n")
    assert [cell.recipe.epochs for cell in read_grid(tmp_path / "grid.yaml")] == [9, 9]


@pytest.mark.parametrize("where", ["the module", "the document"])
def test_the_example_of_a_grid_is_one(where, tmp_path):
    text = grid_module.__doc__ if where == "the module" else (SOURCE.parent / "docs" / "commands.md").read_text()
    (tmp_path / "grid.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    cells = read_grid(tmp_path / "grid.yaml")
    assert len(cells) == 4 * 2 * 2 * 3
    for recipe in {cell.label: cell.recipe for cell in cells}.values():
        models.create(recipe.model.name, num_classes=10, in_channels=1, **recipe.model.arguments)


def test_epochs_of_a_grid_replace_the_steps_of_its_base():
    (whole,) = expand({"base": "cifar10", "overrides": {"epochs": 2}})
    (cell,) = expand({"base": "cifar10", "axes": {"epochs": [3]}})
    assert [(c.recipe.epochs, c.recipe.steps) for c in (whole, cell)] == [(2, None), (3, None)]


REFUSED = {
    "no mapping": ([], "must be a mapping"),
    "an unknown key": ({"axis": []}, "unknown key `axis`; did you mean 'axes'?"),
    "an unknown axis": ({"axes": [{"prodct": {}}]}, "did you mean 'product'?"),
    "two kinds in one axis": ({"axes": [{"product": {}, "zip": {}}]}, "one key of"),
    "an unknown field": ({"axes": {"model.magnitud": ["tanh"]}}, "did you mean 'magnitude'?"),
    "an impossible value": ({"axes": {"optimizer.lr": [-1.0]}}, "cell 'lr=-1.0': `optimizer.lr` must be > 0"),
    "an unknown base": ({"base": "digts"}, "did you mean 'digits'?"),
    "a base of another kind": ({"base": 3}, "`base` must be"),
    "lists of two lengths": ({"axes": [{"zip": {"epochs": [1, 2], "batch_size": [1]}}]}, "of one length"),
    "a zip of nothing": ({"axes": [{"zip": {}}]}, "a zip must have at least one field"),
    "a product of nothing": ({"axes": [{"product": {}}]}, "a product must have at least one field"),
    "no list": ({"axes": {"epochs": 3}}, "`epochs` must be a list"),
    "an empty list": ({"axes": {"epochs": []}}, "must be a list with entries"),
    "no seeds": ({"seeds": 0}, "`seeds` must be"),
    "seeds of another kind": ({"seeds": [True]}, "`seeds` must be"),
    "one cell twice": ({"axes": {"epochs": [3, 3]}}, "two cells would be written"),
    "one field in two axes": ({"axes": [{"product": {"epochs": [1]}}, {"product": {"epochs": [2]}}]}, "in two axes"),
    "a seed among the axes": ({"axes": {"seed": [1, 2]}}, "stand in `seeds`"),
    "a label of dots": ({"axes": [{"list": [{"name": ".."}]}]}, "dots alone, got '..'"),
    "overrides of another kind": ({"overrides": [1]}, "`overrides` must map"),
}


@pytest.mark.parametrize("tree, message", REFUSED.values(), ids=REFUSED)
def test_a_wrong_grid_is_refused_with_what_would_do(tree, message):
    with pytest.raises(ValueError, match=r"\w") as caught:
        expand(tree)
    assert message in str(caught.value)


def test_a_wrong_grid_is_one_line_with_the_name_of_its_file(tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text("axes: {model.magnitud: [tanh]}\n")
    with pytest.raises(GridError, match=r"grid\.yaml: cell"):
        read_grid(tmp_path / "grid.yaml")
    assert main(["grid", str(tmp_path / "grid.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def write_grid(folder, magnitudes=("tanh", "ball", "sphere"), seeds=1):
    tree = {"base": "digits", "overrides": SMALL, "axes": {"model.magnitude": list(magnitudes)}, "seeds": seeds}
    (folder / "grid.json").write_text(json.dumps(tree))
    return folder / "grid.json"


CRASHES = {
    "ball": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "sphere": "raise SystemExit('ValueError: out of luck')",
}


@pytest.fixture
def fake_cells(monkeypatch):
    """Cells that take no time: each writes a record, except for those in the dictionary."""
    cells = FakeCells(CRASHES)
    monkeypatch.setattr(crew, "start", cells)
    return cells.scripts, cells.started


def test_a_crashed_cell_is_named_and_the_others_go_on(fake_cells, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["grid", str(write_grid(tmp_path)), "--jobs", "2", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "1 of 3 cells done" in captured.out
    assert "not done: magnitude=ball/seed-0: killed by SIGSEGV" in captured.err
    assert "not done: magnitude=sphere/seed-0: ValueError: out of luck" in captured.err
    summary = json.loads((out / "summary.json").read_text())
    assert [entry["cell"] for entry in summary["missing"]] == ["magnitude=ball/seed-0", "magnitude=sphere/seed-0"]


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(fake_cells, tmp_path, capsys):
    crashes, started = fake_cells
    grid, out = write_grid(tmp_path), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 1
    crashes.clear()
    started.clear()
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    assert started == ["magnitude=ball/seed-0", "magnitude=sphere/seed-0"]
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    assert len(started) == 2
    assert "3 of 3 cells done" in capsys.readouterr().out


def test_a_finished_run_of_another_recipe_is_not_taken_for_the_cell(fake_cells, tmp_path):
    grid, out = write_grid(tmp_path, ["tanh"]), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    tree = json.loads(grid.read_text())
    grid.write_text(json.dumps({**tree, "overrides": {**SMALL, "epochs": 2}}))
    fake_cells[1].clear()
    main(["grid", str(grid), "--out", str(out)])
    assert fake_cells[1] == ["magnitude=tanh/seed-0"]


def other_recipe(path, **changes):
    """The grid's file with other overrides."""
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "overrides": {**SMALL, **changes}}))
    return path


def test_a_cell_whose_folder_holds_another_recipe_is_not_done(fake_cells, tmp_path, capsys):
    crashes, _ = fake_cells
    grid, out = write_grid(tmp_path, ["tanh"]), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    crashes["tanh"] = "raise SystemExit('refused')"
    other_recipe(grid, epochs=2)
    assert main(["grid", str(grid), "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "0 of 1 cells done" in captured.out
    assert "not done: magnitude=tanh/seed-0: refused" in captured.err
    assert json.loads((out / "summary.json").read_text())["results"][0]["seeds"] == []


def test_a_cell_that_claims_to_be_done_is_looked_at(fake_cells, tmp_path, capsys):
    crashes, _ = fake_cells
    grid, out = write_grid(tmp_path, ["tanh"]), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    crashes["tanh"] = ""  # ends well and does nothing
    other_recipe(grid, epochs=2)
    (job,) = [Job(cell, out / cell.name) for cell in read_grid(grid)]
    assert "`epochs` is 1 there and 2 here" in job.missing()
    assert summarize([job], [End(job)])["done"] == 0
    assert main(["grid", str(grid), "--out", str(out)]) == 1
    assert "`epochs` is 1 there and 2 here" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{"log.every": 7}, {"engine.compile": False}])
def test_how_a_run_speaks_or_is_computed_does_not_make_it_another(fake_cells, tmp_path, changes):
    grid, out = write_grid(tmp_path, ["tanh"]), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    fake_cells[1].clear()
    assert main(["grid", str(other_recipe(grid, **changes)), "--out", str(out)]) == 0
    assert fake_cells[1] == []


def test_a_damaged_record_is_not_done(fake_cells, tmp_path, capsys):
    grid, out = write_grid(tmp_path, ["tanh"]), tmp_path / "out"
    assert main(["grid", str(grid), "--out", str(out)]) == 0
    fake_cells[0]["tanh"] = ""
    (out / "magnitude=tanh/seed-0/record.json").write_text('{"recipe": ')
    assert main(["grid", str(grid), "--out", str(out)]) == 1
    assert "record.json: is not valid JSON" in capsys.readouterr().err


@pytest.fixture
def tiny_table(monkeypatch):
    """A table of one quick entry."""
    recipe = expand({"base": "digits", "overrides": SMALL})[0].recipe
    made = Experiment("tiny", "A table", "nobody", "error", (Entry("a", "b", recipe),), Reduction(lambda r: r, "none"))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: made)
    return made


def test_reproduce_does_not_count_a_cell_of_another_recipe(fake_cells, tiny_table, tmp_path, capsys, monkeypatch):
    command = ["reproduce", "tiny", "--out", str(tmp_path)]
    assert main(command) == 0
    fake_cells[0][None] = "raise SystemExit('refused')"
    entry = replace(tiny_table.entries[0], recipe=tiny_table.entries[0].recipe.override({"epochs": 2}))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: replace(tiny_table, entries=(entry,)))
    assert main(command) == 1
    assert "not done: a--b/seed-0: refused" in capsys.readouterr().err
    (number,) = json.loads((tmp_path / "tiny-paper" / "table.json").read_text())["numbers"]
    assert number["values"] == []


def test_the_summary_has_mean_and_deviation_over_seeds(fake_cells, tmp_path, capsys):
    assert main(["grid", str(write_grid(tmp_path, ["tanh"], seeds=3)), "--out", str(tmp_path / "out")]) == 0
    assert "60.00 ± 10.00" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out" / "summary.json").read_text())["results"]
    expected = {"mean": pytest.approx(0.6), "std": pytest.approx(0.1), "values": [0.5, 0.6, 0.7], "nonfinite": 0}
    assert entry["last.top1"] == expected


@pytest.mark.parametrize("loss", ["None", "float('nan')"])
def test_a_loss_that_is_not_finite_is_said_and_not_averaged(fake_cells, tmp_path, capsys, loss):
    broken = RECORD.replace('"loss": 1.0', f'"loss": 1.0 if recipe["seed"] else {loss}')
    fake_cells[0]["tanh"] = broken
    assert main(["grid", str(write_grid(tmp_path, ["tanh"], seeds=3)), "--out", str(tmp_path / "out")]) == 0
    assert "not finite" in capsys.readouterr().out
    (entry,) = json.loads((tmp_path / "out" / "summary.json").read_text())["results"]
    assert entry["last.loss"] == {"mean": None, "std": None, "values": [None, 1.0, 1.0], "nonfinite": 1}
    assert entry["last.top1"]["mean"] == pytest.approx(0.6)


def test_a_dry_run_lists_the_cells_and_starts_none(fake_cells, tmp_path, capsys):
    assert main(["grid", str(write_grid(tmp_path)), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "to do  magnitude=ball/seed-0" in capsys.readouterr().out
    assert fake_cells[1] == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_stops_every_cell_and_says_how_to_go_on(
    number, code, fake_cells, tmp_path, capsys, monkeypatch
):
    crashes, _ = fake_cells
    before = signal.getsignal(signal.SIGTERM)
    wait = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(143)); "
    crashes.update(tanh=wait + "open(sys.argv[1] + '/up', 'w'); time.sleep(60)")
    grid, out = write_grid(tmp_path, ["tanh", "ball"]), tmp_path / "out"

    asked = []

    def pause(seconds):
        if not asked and (out / "magnitude=tanh" / "seed-0" / "up").exists():
            asked.append(seconds)
            signal.raise_signal(number)
        os.sched_yield()

    monkeypatch.setattr(crew.time, "sleep", pause)
    assert main(["grid", str(grid), "--out", str(out)]) == code
    assert signal.getsignal(signal.SIGTERM) is before
    captured = capsys.readouterr()
    assert "the same command goes on" in captured.err
    assert "magnitude=ball/seed-0: not begun" in captured.err


MISTAKES = {
    "a batch larger than the set": ({"batch_size": 100_000}, "`batch_size` must be at most", 2),
    "a set that is not there": ({"data.name": "cifar10", "model.name": "cnn9"}, "nowhere", 2),
}


@pytest.mark.parametrize("changes, message, code", MISTAKES.values(), ids=MISTAKES)
def test_a_cell_fails_with_one_line_in_the_words_of_the_command_line(changes, message, code, tmp_path, capsys):
    (cell,) = expand({"base": "digits", "overrides": {**SMALL, "data.train_size": None, "epochs": 3, **changes}})
    cell.recipe.to_file(tmp_path / "cell.json")
    job = Job(cell, tmp_path / "run")
    assert cell_main([str(tmp_path / "cell.json"), str(job.folder), str(tmp_path / "nowhere"), "cpu"]) == code
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    job.folder.mkdir(exist_ok=True)
    (job.folder / LOG).write_text(errors)
    assert ended(job, code).reason == errors.strip()


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


@pytest.mark.slow
def test_real_cells_run_in_processes_and_a_killed_grid_goes_on(tmp_path):
    grid = write_grid(tmp_path, [None, "tanh"])
    tree = json.loads(grid.read_text())
    grid.write_text(json.dumps({**tree, "overrides": {**SMALL, "epochs": 40, "deterministic": True}}))
    command = [sys.executable, "-m", "hyperball", "grid", "grid.json", "--jobs", "2", "--accelerator", "cpu", "--out"]
    process = subprocess.Popen(
        [*command, "a"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while process.poll() is None and not list((tmp_path / "a").rglob("*.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    text = process.communicate()[0].decode()
    assert process.returncode == 130, text
    subprocess.run([*command, "a"], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
    subprocess.run([*command, "b"], cwd=tmp_path, env=ENVIRONMENT, check=True, capture_output=True)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in "ab"]
    values = [[entry["last.loss"]["values"] for entry in summary["results"]] for summary in summaries]
    assert values[0] == values[1]
    notes = [json.loads(path.read_text())["notes"] for path in (tmp_path / "a").rglob("record.json")]
    assert any("resumed" in note for entry in notes for note in entry)


@pytest.mark.slow
def test_a_local_ray_runs_cells_and_names_the_one_that_fails(tmp_path):
    pytest.importorskip("ray")
    grid = write_grid(tmp_path, [None, "tanh"])
    tree = json.loads(grid.read_text())
    # One batch is larger than the set, which training refuses.
    tree["axes"] = [{"list": [{"name": "fits"}, {"name": "fails", "batch_size": 100_000}]}]
    grid.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "hyperball", "grid", "grid.json", "--executor", "ray", "--out", "out"]
    done = subprocess.run(
        [*command, "--jobs", "1", "--accelerator", "cpu"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 2 cells done" in done.stdout
    assert "not done: fails/seed-0: `batch_size` must be at most" in done.stderr
