"""Published tables: every entry is a recipe that can be run, and comparisons say what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiment_cases import tiny_recipe, tiny_table

from hyperball import models
from hyperball.experiments.broken import odd_results
from hyperball.experiments.collecting import collect, seeds_in, write_table
from hyperball.experiments.protocols import CIFAR_MILESTONES, CIFAR_STEPS, cifar, shorter
from hyperball.experiments.reproduce import (
    Comparison,
    Follower,
    annotate,
    as_data,
    compare,
    draw,
    jobs_of,
    measure_conditions,
    table,
)
from hyperball.experiments.table import SCALES, Entry, Experiment, Reduction, published, slug
from hyperball.experiments.tables import TABLES, TIMED, TRAINED, experiment, trained
from hyperball.training import Recipe, train
from hyperball.training.record import Record, read_metrics

CLASSES = {"cifar10": 10, "cifar100": 100, "modelnet40": 40, "imagenet": 1000, "imagewoof": 10, "mnist": 10}
SHAPES = {"modelnet40": (4, 16, 3), "mnist": (4, 1, 28, 28)}


@pytest.mark.parametrize("name", TRAINED)
def test_every_entry_names_layers_that_exist(name):
    for entry in trained(name).entries:
        recipe = entry.recipe
        assert recipe.data.name in CLASSES
        if "/" in recipe.model.name:
            continue
        options = models.describe(recipe.model.name).options
        assert set(recipe.model.arguments) <= set(options)
        models.registry.Layers(**{
            key: value for key, value in recipe.model.arguments.items() if key in models.registry.LAYER_OPTIONS
        })  # fmt: skip


def kinds_of_networks() -> dict[str, Recipe]:
    """A recipe for every network, and for every way of ours to change one."""
    found = {}
    for name in TRAINED:
        for entry in trained(name).at("quick").entries:
            model = entry.recipe.model
            key = (model.name, model.norm, model.pool, model.projection, model.options.get("classifier_normalized"))
            if "/" not in model.name and (entry.kind == "ours" or model.magnitude in (None, "tanh")):
                found.setdefault(" ".join(map(str, key)), entry.recipe)
    return found


@pytest.mark.parametrize("recipe", [pytest.param(recipe, id=key) for key, recipe in kinds_of_networks().items()])
def test_every_kind_of_network_can_be_built_and_gives_logits(recipe):
    arguments = recipe.model.arguments
    options = models.describe(recipe.model.name).options
    arguments |= {key: value for key, value in (("width", 4), ("features", 8)) if key in options}
    network = models.create(recipe.model.name, num_classes=CLASSES[recipe.data.name], **arguments)
    size = 64 if recipe.model.name == "resnet18_modified" else 32
    x = torch.randn(SHAPES.get(recipe.data.name, (4, 3, size, size)))
    with torch.no_grad():
        assert network(x).shape == (4, CLASSES[recipe.data.name])


@pytest.mark.parametrize("name", ["torchvision/vgg11_bn", "torchvision/googlenet"])
def test_other_peoples_networks_of_the_architectures_exist(name):
    pytest.importorskip("torchvision")
    rows = {entry.recipe.model.name for entry in trained("architectures").entries}
    assert name in rows
    with torch.device("meta"):
        models.create(name, num_classes=10)


@pytest.mark.parametrize("name", TRAINED)
def test_every_scale_is_shorter_and_changes_no_operator(name):
    paper = trained(name)
    for scale in ("quick", "quarter", "half"):
        reduced = paper.at(scale)
        assert [entry.name for entry in paper.entries] == [entry.name for entry in reduced.entries]
        for full, short in zip(paper.entries, reduced.entries, strict=True):
            assert short.recipe.total_steps(100) < full.recipe.total_steps(100)
            told = full.recipe.model.override(
                {"magnitude": short.recipe.model.magnitude} if "alpha 10 instead of 1" in reduced.words(scale) else {}
            )
            assert replace(short.recipe.model, options={}, pool=None) == replace(told, options={}, pool=None)
            assert short.recipe.model.pool == full.recipe.model.pool or "mean instead of max pooling" in reduced.words(
                scale
            )
        assert reduced.words(scale)


def test_the_quick_scale_of_the_cifar_tables_is_what_its_words_say():
    quick = trained("dcnet-table3").at("quick")
    for entry in quick.entries:
        recipe = entry.recipe
        assert (recipe.steps, recipe.batch_size, recipe.data.name) == (600, 32, "cifar10")
        assert (recipe.data.train_size, recipe.data.test_size) == (600 * 32, 2000)
        assert recipe.schedule.milestones == (282, 424, 529)
        assert (recipe.model.options["norm_momentum"], recipe.model.options["width"]) == (0.05, 16)
        assert recipe.model.pool == "quadratic" or "robust pooling" in entry.row
    for text in (
        "CIFAR-10",
        "600 steps",
        "batches of 32",
        "one pass over 19,200",
        "tested on 2,000",
        "mean instead of",
    ):
        assert text in quick.reduction.words


@pytest.mark.parametrize("scale, factor", [("quarter", 4), ("half", 2)])
def test_a_quarter_and_a_half_compress_the_schedule_and_change_nothing_else(scale, factor):
    for full, short in zip(trained("dcnet-table3").entries, trained("dcnet-table3").at(scale).entries, strict=True):
        assert short.recipe.steps == CIFAR_STEPS / factor
        assert short.recipe.schedule.milestones == tuple(mark / factor for mark in CIFAR_MILESTONES)
        assert set(full.recipe.differences(short.recipe)) == {"steps", "schedule.milestones"}


def test_names_of_cells_are_their_own_in_every_table():
    for name in TRAINED:
        names = [entry.name for entry in trained(name).entries]
        assert len(set(names)) == len(names)
        assert all(part == slug(part) for cell in names for part in cell.split("--"))


def test_table3_has_the_thirty_published_cells():
    entries = trained("dcnet-table3").select(["published"]).entries
    assert len(entries) == 30
    by_place = {(entry.row, entry.column): entry for entry in entries}
    best = by_place["seg", "square_cosine, no relu"]
    assert best.published == 24.29
    assert best.recipe.model.activation == "none"
    assert best.recipe.projection.every == 100
    assert by_place["baseline", "cosine, relu"].recipe.model.magnitude is None


@pytest.mark.parametrize("name", [f"dcnet-table{number}" for number in range(1, 7)])
def test_published_numbers_of_decoupled_networks_are_the_papers(name):
    facts = published()[name.replace("-", "_")]["cells"]
    for entry in trained(name).entries:
        if entry.kind != "published":
            continue
        held = facts[entry.row]
        if isinstance(held, list):
            columns = published()["dcnet_table6"]["columns"]
            assert str(held[columns.index(entry.column)]).rstrip("*") == str(entry.published)
        else:
            assert (held[entry.column] if isinstance(held, dict) else held) == entry.published


def test_published_numbers_of_poolings_and_projections_are_the_papers():
    pooled = published()["ddn_pooling_train_and_test_outliers"]["cells"]
    for entry in trained("pooling-outliers").select(["published"]).entries:
        assert [entry.published, entry.also["map6_raw"]] == pooled[entry.row][entry.column.split()[0]]
    tested = published()["ddn_pooling_test_outliers"]["cells"]
    for entry in trained("pooling-test-outliers").select(["published"]).entries:
        assert {k.split()[0]: v for k, v in entry.published_conditions.items()} == {
            share: pair[0] for share, pair in tested[entry.row].items() if share != "0"
        }
        assert entry.published == tested[entry.row]["0"][0]
    for data in ("cifar10", "imagewoof"):
        facts = published()[f"ddn_projection_{data}"]["cells"]["resnet18"]
        for entry in trained(f"projections-{data}").select(["published"]).entries:
            held = facts[entry.row] if entry.row == "none" else facts[entry.row][entry.column]
            assert (entry.published, entry.also["map6_raw"]) == (held["top1"], held["map"])


@pytest.mark.parametrize("name", TIMED)
def test_published_times_are_the_papers(name):
    facts = published()[f"ddn_{name.replace('projections', 'projection').replace('-', '_')}"]["cells"]
    printed = json.dumps(facts)
    subjects = TIMED[name]().subjects("paper")
    assert sum(subject.published is not None for subject in subjects) >= 9
    assert all(str(subject.published) in printed for subject in subjects if subject.published is not None)


def test_projections_have_all_six_sets_and_a_control():
    entries = trained("projections-cifar10").entries
    assert len(entries) == 2 + 12
    control = next(entry for entry in entries if entry.row == "BatchNorm alone (control)")
    network = models.create("resnet18", 10, width=4, **{"projection": control.recipe.model.projection})
    x = 100 * torch.randn(8, network.num_features)
    head = network.get_classifier()
    torch.testing.assert_close(head.features(x), head.norm(x))


def test_table5_has_the_normalized_softmax_under_adam_and_sgd():
    entries = trained("dcnet-table5").entries
    assert {entry.recipe.optimizer.name for entry in entries} == {"adam", "sgd"}
    assert all(entry.recipe.model.options["classifier_normalized"] for entry in entries)


def test_table6_starts_the_standard_network_from_the_plain_one(tmp_path):
    jobs = {job.cell.name: job for job in jobs_of(trained("dcnet-table6-imagewoof"), range(2), tmp_path)}
    job = jobs["tanh--standard-resnet18-with-bn/seed-1"]
    assert job.needs == ("baseline--standard-resnet18-with-bn/seed-1",)
    assert job.cell.recipe.start.weights == str(tmp_path / job.needs[0])
    assert jobs["tanh--modified-resnet18-with-bn/seed-1"].needs == ()
    chosen = trained("dcnet-table6").select(["tanh"]).entries
    assert [entry.row for entry in chosen] == ["baseline", "tanh", "tanh", "tanh"]


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
    recipe = Recipe.from_dict({"epochs": 20, "schedule": {"name": "step", "milestones": [10, 15], "warmup": 2.0}})
    assert shorter(recipe, 0.25).schedule.milestones == (2.5, 3.75)
    assert shorter(recipe, 0.25).schedule.warmup == 0.5


def test_cells_are_chosen_by_name_row_column_or_kind():
    whole = trained("dcnet-table3")
    assert len(whole.select(["tanh"]).entries) == 4
    assert len(whole.select(["tanh", "baseline"]).entries) == 6
    assert len(whole.select(["cosine, relu"]).select(["published"]).entries) == 8
    assert len(whole.select(["tanh--cosine-relu", "baseline"]).entries) == 3
    assert {entry.kind for entry in whole.select(["ours"]).entries} == {"ours"}
    assert whole.select([]) is whole
    with pytest.raises(ValueError, match=r"no cell 'tank'; did you mean 'tanh'\?"):
        whole.select(["tank"])


def test_unknown_tables_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'dcnet-table3'"):
        experiment("dcnet-tabel3")
    with pytest.raises(ValueError, match="`scale` must be one of quick, quarter, half, paper, got 'full'"):
        trained("dcnet-table3").at("full")
    with pytest.raises(ValueError, match="is a table of times"):
        trained("pooling-runtime")
    assert set(TABLES) == {*TRAINED, *TIMED}


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
    return tiny_table()


def test_finished_cells_are_compared_and_the_others_left_open(tiny, tmp_path: Path):
    jobs = jobs_of(tiny, range(2), tmp_path / "runs")
    assert [job.cell.name for job in jobs[:2]] == ["mean--clean/seed-0", "max--clean/seed-0"]
    for job in (jobs[0], jobs[2]):
        train(job.cell.recipe, job.folder)
    measure_conditions(tiny, jobs, count=2)
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
    measure_conditions(tiny, jobs)
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


def test_a_kept_table_counts_the_seeds_that_lie_there(tiny, tmp_path: Path):
    for seed in (0, 4):
        jobs = jobs_of(tiny, [seed], tmp_path / f"runs-{seed}")
        train(jobs[0].cell.recipe, jobs[0].folder)
        collect(jobs, tmp_path / "results")
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
    assert draw(made, jobs, tmp_path) == []
    for job in jobs:
        train(job.cell.recipe, job.folder)
    pictures = {path.stem: json.loads(path.read_text()) for path in draw(made, jobs, tmp_path)}
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


def test_scales_have_folders_of_their_own():
    assert len({f"{name}-{scale}" for name in TABLES for scale in SCALES}) == len(TABLES) * len(SCALES)


@pytest.mark.parametrize("data", ["cifar10", "imagewoof"])
def test_every_published_network_of_the_projections_has_its_cells_and_controls(data):
    facts = published()[f"ddn_projection_{data}"]["cells"]
    entries = {(entry.row, entry.column): entry for entry in trained(f"projections-{data}-networks").entries}
    assert {row.partition(", ")[0] for row, _ in entries} == set(facts) - {"resnet18"}
    for network in set(facts) - {"resnet18"}:
        for row, held in facts[network].items():
            for how, numbers in {"no projection": held}.items() if row == "none" else held.items():
                entry = entries[f"{network}, {row}", how]
                assert (entry.published, entry.also["map6_raw"]) == (numbers["top1"], numbers["map"])
        assert entries[f"{network}, BatchNorm alone (control)", "no projection"].kind == "control"
        assert entries[f"{network}, linf ball", "adaptive"].kind == "control"
    assert len(entries) == (2 + 12) * (len(facts) - 1)


@pytest.mark.parametrize("name", ["googlenet", "densenet121", "alexnet", "vgg11"])
def test_every_published_network_sees_small_images_enlarged(name):
    pytest.importorskip("torchvision")
    whole = trained("projections-cifar10-networks")
    entry = next(e for e in whole.entries if e.row.startswith(f"{name}, l2 ball"))
    assert entry.recipe.model.options == {"enlarge": 224}
    quick = whole.at("quick").select([entry.name]).entries[0].recipe.model
    network = models.create(quick.name, num_classes=10, **quick.arguments).eval()
    with torch.no_grad():
        assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert "ProjectedLinear" in repr(network)


@pytest.mark.parametrize("side", [0, -3, 64.0, True, "64"])
def test_a_side_that_is_none_is_refused(side):
    pytest.importorskip("torchvision")
    with pytest.raises(ValueError, match=r"`enlarge` must be a whole number >= 1, got"):
        models.create("torchvision/alexnet", num_classes=10, enlarge=side)


def test_the_controls_that_the_papers_lack_are_there():
    rates = [e.recipe.optimizer.lr for e in trained("dcnet-table4").select(["control"]).entries]
    assert sorted(rates) == [0.03, 0.1, 0.3]
    (updates,) = trained("dcnet-table1").select(["control"]).entries
    assert updates.recipe.regularizers.weighted_gradients == "update"
    assert updates.recipe.projection.every is None


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
