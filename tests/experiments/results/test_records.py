"""Records of a table: compared, annotated, kept, drawn, and left out where they are none."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiment_cases import tiny_recipe, tiny_table

from hyperball.experiments.jobs import conditions
from hyperball.experiments.jobs.conditions import with_conditions
from hyperball.experiments.jobs.drawing import draw
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.jobs.of_table import Follower, jobs_of
from hyperball.experiments.pictures import errors_under_conditions, under_conditions
from hyperball.experiments.records.broken import odd_results
from hyperball.experiments.records.conditions import conditions_in
from hyperball.experiments.results.annotation import annotate
from hyperball.experiments.results.collecting import Keeper, collect, seeds_in, write_table
from hyperball.experiments.results.comparison import as_data, compare, table
from hyperball.experiments.table import Entry, Experiment, Finished, Reduction
from hyperball.experiments.tables import trained
from hyperball.on_disk import DIVERGED
from hyperball.training import Recipe, evaluate, train
from hyperball.training.storage.record import Record, read_metrics


@pytest.fixture(scope="module")
def tiny() -> Experiment:
    return tiny_table()


def run_tests(table: Experiment, job: Job) -> int:
    """The further tests of a network, in this process; the exit code."""
    handler = signal.getsignal(signal.SIGTERM)
    _, tests = with_conditions(table, [job])
    try:
        return conditions.main(tests.command()[1:])
    finally:
        signal.signal(signal.SIGTERM, handler)


def pass_tests(table: Experiment, job: Job) -> None:
    assert run_tests(table, job) == 0


def test_finished_cells_are_compared_and_the_others_left_open(tiny, tmp_path: Path):
    jobs = jobs_of(tiny, range(2), tmp_path / "runs")
    assert [job.cell.name for job in jobs[:2]] == ["mean--clean/seed-0", "max--clean/seed-0"]
    for job in (jobs[0], jobs[2]):
        train(job.cell.recipe, job.folder)
        pass_tests(tiny, job)
    mean, outliers, largest = compare(tiny, jobs)
    results = Record.read(jobs[0].folder).results
    assert mean.values[0] == pytest.approx(100 * (1 - results["last"]["top1"]))
    assert mean.also["ece"][0] == pytest.approx(100 * results["last"]["ece"])
    assert (mean.seeds, outliers.seeds) == ((0, 1), (0, 1))
    assert (outliers.column, outliers.published) == ("clean, 50 %", 40.0)
    assert largest.values == ()
    text = table(tiny, [mean, outliers, largest])
    assert f"{mean.difference:+.2f}" in text
    data = json.loads(json.dumps(as_data(tiny, "quick", [mean])))
    assert (data["numbers"][0]["published"], data["protocol"]) == (80.0, "nothing")
    assert data["numbers"][0]["map_raw, paper"] == 70.0


def test_a_network_is_tested_as_its_recipe_evaluates_it_and_once(tiny, tmp_path: Path, monkeypatch):
    job, other = jobs_of(tiny, [0], tmp_path)
    assert [one.cell.label for one in with_conditions(tiny, [job, other])] == [
        "mean--clean",
        "mean--clean tests",
        "max--clean",
    ]
    train(job.cell.recipe, job.folder)
    pass_tests(tiny, job)
    alone = evaluate(job.folder, data=job.cell.recipe.data.override({"outliers": 0.5})).as_dict()
    assert conditions_in(job.folder) == {"50 %": alone}
    monkeypatch.setattr(conditions, "evaluate", None)  # there is nothing left to measure
    pass_tests(tiny, job)


def test_the_best_epoch_under_a_condition_stands_beside_the_last_one(tiny, tmp_path: Path):
    tested = {"log.conditions": dict(tiny.entries[0].conditions), "epochs": 3}
    longer = replace(tiny, entries=(replace(tiny.entries[0], recipe=tiny_recipe(**tested)),), draws=(under_conditions,))
    jobs = jobs_of(longer, range(2), tmp_path / "runs")
    for job in jobs:
        train(job.cell.recipe, job.folder)
        pass_tests(longer, job)
    _, outliers = compare(longer, jobs)
    held = [Record.read(job.folder).results["conditions"]["50 %"] for job in jobs]
    assert outliers.values == pytest.approx([100 * (1 - found["last"]["top1"]) for found in held])
    assert outliers.best == pytest.approx([100 * (1 - found["best"]["top1"]) for found in held])
    assert all(best <= last for best, last in zip(outliers.best, outliers.values, strict=True))
    other = replace(longer.entries[0], conditions={"50 %": {"outliers": 0.4}})
    assert compare(replace(longer, entries=(other,)), jobs)[1].best == ()  # which were not the outliers of its epochs
    finished = [Finished(longer.entries[0], job.cell.seed, job.folder) for job in jobs]
    (series,) = under_conditions(finished)["under-50"]["series"]
    assert series["x"] == [1, 2, 3]
    ends = [100 * found["last"]["top1"] for found in held]
    assert series["y"][-1] == pytest.approx(sum(ends) / 2, rel=1e-4)
    (errors,) = errors_under_conditions(finished)["under-50"]["series"]
    assert errors["y"] == pytest.approx([100 - value for value in series["y"]], rel=1e-3)


@pytest.mark.parametrize("under", [None, {}, {"50 %": {}}], ids=str)
def test_a_record_without_a_best_epoch_under_a_condition_is_compared(under, tiny, tmp_path: Path):
    job = jobs_of(tiny, [0], tmp_path)[0]
    record = train(job.cell.recipe, job.folder)
    pass_tests(tiny, job)
    replace(record, results={**record.results, "conditions": under}).write(job.folder)
    _, outliers, _ = compare(tiny, jobs_of(tiny, [0], tmp_path))
    assert (len(outliers.values), outliers.best) == (1, ())


@pytest.mark.parametrize("under", [0, [], "", False, {"50 %": 3}, {"50 %": {"best": {"top1": 7.0}}}], ids=str)
def test_a_record_with_odd_conditions_is_named_and_left_out(under, tiny, tmp_path: Path, capsys):
    job = jobs_of(tiny, [0], tmp_path)[0]
    record = train(job.cell.recipe, job.folder)
    replace(record, results={**record.results, "conditions": under}).write(job.folder)
    assert compare(tiny, jobs_of(tiny, [0], tmp_path))[0].values == ()
    assert "results.conditions" in capsys.readouterr().err


def test_networks_whose_epochs_were_not_tested_have_no_best_epoch_under_a_condition(tiny, tmp_path: Path):
    job = jobs_of(tiny, [0], tmp_path)[0]
    train(job.cell.recipe, job.folder)
    pass_tests(tiny, job)
    assert compare(tiny, [job])[1].best == ()
    assert under_conditions([Finished(tiny.entries[0], 0, job.folder)]) == {}


def test_a_network_that_did_not_converge_is_not_tested(tiny, tmp_path: Path):
    job = jobs_of(tiny, [0], tmp_path)[0]
    train(job.cell.recipe, job.folder)
    replace(Record.read(job.folder), status=DIVERGED, results={}).write(job.folder)
    pass_tests(tiny, job)
    assert conditions_in(job.folder) == {}
    assert with_conditions(tiny, [job])[1].is_done


def test_tests_that_fail_say_why_in_one_line(tiny, tmp_path: Path, capsys):
    job = jobs_of(tiny, [0], tmp_path)[0]
    train(job.cell.recipe, job.folder)
    shutil.rmtree(job.folder / "checkpoints")
    assert run_tests(tiny, job) == 2
    assert capsys.readouterr().err == f"there is no checkpoint in {job.folder / 'checkpoints'}\n"


def test_a_record_says_of_which_cell_it_is_and_by_which_protocol(tiny, tmp_path: Path):
    jobs = jobs_of(tiny, [3], tmp_path)
    train(jobs[0].cell.recipe, jobs[0].folder)
    annotate(tiny, "quick", jobs)
    record = Record.read(jobs[0].folder)
    assert record.experiment == {
        "table": "tiny", "title": "A tiny table", "source": "nobody", "row": "mean", "column": "clean",
        "kind": "published", "published": 80.0, "scale": "quick", "protocol": "nothing", "seed": 3,
    }  # fmt: skip
    assert record.curve == [[1.0, record.results["last"]["top1"]]]
    assert {"commit", "versions", "device"} <= set(record.environment)
    assert jobs[0].is_done


def test_kept_records_are_small_and_never_written_over(tiny, tmp_path: Path):
    runs, results = tmp_path / "runs", tmp_path / "results"
    jobs = jobs_of(tiny, [0], runs)
    train(jobs[0].cell.recipe, jobs[0].folder)
    assert collect(jobs, results) == []
    kept = results / "mean--clean" / "seed-0"
    assert {path.name for path in kept.iterdir()} == {"recipe.json", "record.json", "metrics.jsonl"}
    pass_tests(tiny, jobs[0])
    assert collect(jobs, results) == []
    assert (kept / "conditions.json").exists()
    before = (kept / "record.json").read_text()

    longer = replace(tiny, entries=(replace(tiny.entries[0], recipe=tiny_recipe(epochs=2)),))
    again = jobs_of(longer, [0], tmp_path / "longer")
    train(again[0].cell.recipe, again[0].folder)
    (said,) = collect(again, results)
    assert "of another protocol: `epochs` is 1 there and 2 here" in said
    record = Record.read(jobs[0].folder)
    replace(record, results={**record.results, "last": {**record.results["last"], "top1": 1.0}}).write(jobs[0].folder)
    (said,) = collect(jobs, results)
    assert "another run of the same recipe" in said
    assert (kept / "record.json").read_text() == before


@pytest.mark.parametrize("scale", ["quick", "half"])
@pytest.mark.parametrize("name", ["dcnet-table3", "dcnet-figure4", "architectures", "pooling-outliers"])
def test_what_was_found_is_kept_at_every_scale_even_where_it_is_nothing(name, scale, tmp_path: Path):
    found = trained(name).at(scale)
    Keeper(found, scale, tmp_path / "runs", tmp_path / "kept").keep_all([])
    for folder in ("runs", "kept"):
        (table,) = (json.loads(path.read_text()) for path in (tmp_path / folder).glob("*.json"))
        assert {(number["row"], len(number["values"])) for number in table["numbers"]} == {
            (entry.row, 0) for entry in found.entries
        }


def test_a_kept_table_counts_the_seeds_that_lie_there(tiny, tmp_path: Path):
    for seed in (0, 4):
        jobs = jobs_of(tiny, [seed], tmp_path / f"runs-{seed}")
        train(jobs[0].cell.recipe, jobs[0].folder)
        collect(jobs, tmp_path / "results")
    for name in ("seed-x", "seed-", f"seed-{2**63}", "seed--1"):
        (tmp_path / "results" / "mean--clean" / name).mkdir()
    assert seeds_in(tmp_path / "results") == [0, 4]
    write_table(tiny, "paper", tmp_path / "results")
    data = json.loads((tmp_path / "results" / "table.json").read_text())
    assert data["numbers"][0]["seeds"] == [0, 4]
    assert (data["scale"], data["protocol"]) == ("paper", "the published schedule")


def test_a_cell_that_begins_with_another_is_known_where_its_records_are_kept(tmp_path: Path):
    first = Entry("plain", "a", tiny_recipe())
    second = Entry("tanh", "a", tiny_recipe(**{"model.magnitude": "tanh"}), start=("plain", "a"))
    made = Experiment("two", "Two", "nobody", "error", (first, second), Reduction(lambda r: r, "nothing"))
    jobs = jobs_of(made, [0], tmp_path / "runs")
    assert isinstance(jobs[1], Follower)
    for job in jobs:
        train(job.cell.recipe, job.folder)
    collect(jobs, tmp_path / "results")
    assert all(job.is_done for job in jobs_of(made, [0], tmp_path / "results"))
    assert "no finished run" in jobs_of(made, [1], tmp_path / "results")[1].missing()
    kept = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.json*")}
    assert not [path for path, content in kept.items() if str(tmp_path).encode() in content]
    assert collect(jobs, tmp_path / "results") == []
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_pictures_are_drawn_from_finished_runs(tmp_path: Path):
    from hyperball.experiments.pictures import convergence, filter_lengths, first_filters, learned_radii, two_features

    recipe = Recipe.from_dict({
        "data": {"name": "digits", "train_size": 200, "test_size": 100},
        "model": {"name": "digits", "magnitude": "tanh", "options": {"norm_momentum": 0.005}},
        "epochs": 2, "batch_size": 50, "log": {"norms": True, "every": 1},
    })  # fmt: skip
    draws = (convergence, learned_radii, filter_lengths, first_filters, two_features)
    made = Experiment(
        "drawn", "D", "nobody", "error", (Entry("tanh", "cosine", recipe),), Reduction(lambda r: r, ""), draws=draws
    )
    jobs = jobs_of(made, range(2), tmp_path)
    assert draw(made, jobs, tmp_path)
    assert not (tmp_path / "pictures").exists()
    for job in jobs:
        train(job.cell.recipe, job.folder)
    assert draw(made, jobs, tmp_path)
    pictures = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "pictures").glob("*.json")}
    assert set(pictures) == {
        "convergence", "convergence-training", "radii", "weight-norm", "gradient-norm", "filters-tanh--cosine",
        "features-tanh--cosine",
    }  # fmt: skip
    assert "a momentum of 0.005 about 200 steps old" in pictures["convergence"]["note"]
    (trained,) = pictures["convergence-training"]["series"]
    reports = [line for line in read_metrics(jobs[0].folder / "metrics.jsonl") if line["kind"] == "train"]
    others = [line for line in read_metrics(jobs[1].folder / "metrics.jsonl") if line["kind"] == "train"]
    assert trained["x"] == [line["epoch"] for line in reports]
    assert trained["y"] == pytest.approx(
        [100 - 50 * (a["accuracy"] + b["accuracy"]) for a, b in zip(reports, others, strict=True)], rel=1e-4, abs=1e-4
    )
    (curve,) = pictures["convergence"]["series"]
    assert curve["x"] == [1.0, 2.0]
    assert len(curve["y"]) == len(curve["band"]) == 2
    (lengths,) = pictures["weight-norm"]["series"]
    assert len(lengths["x"]) == 8
    assert all(value > 0 for value in lengths["y"])
    filters = torch.tensor(pictures["filters-tanh--cosine"]["filters"])
    assert filters.shape == (16, 1, 3, 3)
    features = pictures["features-tanh--cosine"]
    assert len(features["points"]) == len(features["labels"]) == 100


@pytest.mark.parametrize(
    "results, reason",
    [
        ({"last": {"top1": 0.5}, "best": "x"}, "`results.best`: must map names to numbers, got 'x'"),
        ({"last": {"top1": float("nan")}}, "`results.last`: `top1` must be a number, got nan"),
        ({"last": {"top1": 50.0}}, "must be an accuracy in [0, 1], got 50.0"),
        ({"last": {"top1": 0.5, "loss": 10**400}}, "`loss` must be a number"),
        ([], "`results` must be a mapping"),
        ({"last": {"top1": 0.5, "loss": None}, "best": None}, ""),
    ],
)
def test_results_that_are_none_are_told(results, reason):
    assert reason in odd_results(results) if reason else odd_results(results) == ""


def test_a_record_with_odd_results_is_named_and_left_out(tiny, tmp_path, capsys):
    jobs = jobs_of(tiny, range(2), tmp_path)
    for job in (jobs[0], jobs[2]):
        train(job.cell.recipe, job.folder)
    path = jobs[0].folder / "record.json"
    held = json.loads(path.read_text())
    held["results"]["best"] = "x"
    path.write_text(json.dumps(held))
    assert compare(tiny, jobs)[0].seeds == (1,)
    assert f"left out {path}: `results.best`" in capsys.readouterr().err
