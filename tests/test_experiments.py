"""Published tables: every entry is a recipe that can be run, and comparisons say what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hyperball import models
from hyperball.experiments.protocols import CIFAR_MILESTONES, CIFAR_STEPS, cifar, shorter
from hyperball.experiments.reproduce import Comparison, as_data, collect, compare, jobs_of, measure_conditions, table
from hyperball.experiments.table import Entry, Experiment, Reduction, published, slug
from hyperball.experiments.tables import TABLES, experiment
from hyperball.training import Recipe, train

CLASSES = {"cifar10": 10, "cifar100": 100, "modelnet40": 40}


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_names_a_network_that_can_be_built(name):
    for entry in experiment(name).entries:
        recipe = entry.recipe
        if (recipe.model.name, entry.row) in {("resnet32", "sphere"), ("cnn9", "baseline"), ("pointnet", "max")}:
            models.create(recipe.model.name, num_classes=CLASSES[recipe.data.name], **recipe.model.arguments)
        models.registry.Layers(**{
            key: value for key, value in recipe.model.arguments.items() if key in models.registry.LAYER_OPTIONS
        })  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_quick_scale_is_shorter_and_changes_no_operator(name):
    paper, quick = experiment(name), experiment(name).at("quick")
    assert [entry.name for entry in paper.entries] == [entry.name for entry in quick.entries]
    for full, short in zip(paper.entries, quick.entries, strict=True):
        assert short.recipe.total_steps(100) < full.recipe.total_steps(100)
        assert replace(short.recipe.model, options={}) == replace(full.recipe.model, options={})
    assert quick.reduction.words


def test_the_quick_scale_of_the_cifar_tables_is_what_its_words_say():
    quick = experiment("dcnet-table3").at("quick")
    for entry in quick.entries:
        recipe = entry.recipe
        assert (recipe.steps, recipe.batch_size) == (125, 32)
        assert (recipe.data.train_size, recipe.data.test_size) == (125 * 32, 1000)
        assert recipe.schedule.milestones == (59, 88, 110)
        assert recipe.model.options["norm_momentum"] == 0.05
    for text in ("125 steps", "batches of 32", "one pass over 4,000", "tested on 1,000"):
        assert text in quick.reduction.words


def test_table3_has_the_thirty_published_cells():
    entries = experiment("dcnet-table3").entries
    assert len(entries) == 30
    by_place = {(entry.row, entry.column): entry for entry in entries}
    best = by_place["seg", "square_cosine, no relu"]
    assert best.published == 24.29
    assert best.recipe.model.activation == "none"
    assert best.recipe.projection.every == 100
    assert by_place["baseline", "cosine, relu"].recipe.model.magnitude is None


def test_published_numbers_are_where_the_paper_has_them():
    for name, make in TABLES.items():
        if name.startswith("dcnet"):
            facts = json.dumps(published()[name.replace("-", "_")])
            assert all(str(entry.published) in facts for entry in make().entries if entry.published is not None)


def test_cifar_protocol_is_the_published_one():
    recipe = cifar("cifar100", "cnn9", magnitude="tanh")
    assert (recipe.steps, recipe.batch_size, recipe.optimizer.lr) == (CIFAR_STEPS, 128, 1e-3)
    assert recipe.schedule.milestones == CIFAR_MILESTONES
    assert cifar("cifar100", "cnn9").projection.every is None
    assert cifar("cifar100", "cnn9", magnitude="tanh", weighting="linear").projection.every is None


def test_shorter_keeps_the_shape_of_a_schedule():
    recipe = shorter(cifar("cifar10", "cnn9"), 0.1)
    assert recipe.steps == 4250
    assert recipe.schedule.milestones == (2000, 3000, 3750)


def test_cells_are_chosen_by_name_row_or_column():
    whole = experiment("dcnet-table3")
    assert len(whole.select(["tanh"]).entries) == 4
    assert len(whole.select(["cosine, relu"]).entries) == 8
    assert len(whole.select(["tanh--cosine-relu", "baseline"]).entries) == 3
    assert whole.select([]) is whole
    with pytest.raises(ValueError, match=r"no cell 'tank'; did you mean 'tanh'\?"):
        whole.select(["tank"])


def test_unknown_tables_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'dcnet-table3'"):
        experiment("dcnet-tabel3")
    with pytest.raises(ValueError, match="`scale` must be"):
        experiment("dcnet-table3").at("full")


def test_slugs_are_file_names():
    assert slug("pseudo_huber adaptive") == "pseudo_huber-adaptive"
    assert slug("weighting=joint (eq 15)") == "weighting=joint-eq-15"


def test_difference_is_ours_less_the_papers():
    line = Comparison("tanh", "cosine", 25.0, (24.0, 25.0), (23.5,))
    assert (line.mean, line.difference) == (24.5, -0.5)
    assert line.std == pytest.approx(0.7071, abs=1e-4)
    assert Comparison("seg", "cosine", "N/C", (30.0,), ()).difference is None
    assert Comparison("seg", "cosine", 30.0, (), ()).mean is None


@pytest.fixture(scope="module")
def tiny() -> Experiment:
    recipe = Recipe.from_dict({
        "data": {"name": "clouds", "train_size": 20, "test_size": 20, "points": 16},
        "model": {"name": "points", "pool": "mean"}, "epochs": 1, "batch_size": 10,
    })  # fmt: skip
    conditions = {"50 %": {"outliers": 0.5}}
    entry = Entry("mean", "clean", recipe, 80.0, conditions, {"50 %": 40.0})
    other = Entry("max", "clean", recipe.override({"model.pool": "max"}), None)
    return Experiment("tiny", "A tiny table", "nobody", "error", (entry, other), Reduction(lambda r: r, "nothing"))


def test_finished_cells_are_compared_and_the_others_left_open(tiny, tmp_path: Path):
    jobs = jobs_of(tiny, range(2), tmp_path)
    assert [job.cell.name for job in jobs[:2]] == ["mean--clean/seed-0", "max--clean/seed-0"]
    for job in (jobs[0], jobs[2]):
        train(job.cell.recipe, job.folder)
    measure_conditions(tiny, jobs)
    mean, outliers, largest = compare(tiny, jobs)
    record = json.loads((jobs[0].folder / "record.json").read_text())
    assert mean.values[0] == pytest.approx(100 * (1 - record["results"]["last"]["top1"]))
    assert len(mean.values) == len(outliers.values) == 2
    assert (outliers.column, outliers.published) == ("clean, 50 %", 40.0)
    assert largest.values == ()
    text = table(tiny, [mean, outliers, largest])
    assert f"{mean.difference:+.2f}" in text
    data = json.loads(json.dumps(as_data(tiny, "quick", [mean])))
    assert (data["numbers"][0]["published"], data["reduction"]) == (80.0, "nothing")
    assert collect(jobs, tmp_path / "results") == 2
    kept = {path.name for path in (tmp_path / "results" / "mean--clean" / "seed-0").iterdir()}
    assert kept == {"recipe.json", "record.json", "metrics.jsonl", "conditions.json"}
