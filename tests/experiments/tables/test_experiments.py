"""Published tables: every entry is a recipe that can be run, and comparisons say what was measured."""

import json
from dataclasses import replace

import pytest
import torch

from hyperball import models
from hyperball.convert.heads import parse_projection
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.protocols import CIFAR_MILESTONES, CIFAR_STEPS, cifar, shorter
from hyperball.experiments.results.comparison import Comparison
from hyperball.experiments.table import SCALES, published
from hyperball.experiments.tables import TABLES, TIMED, TRAINED, experiment, trained
from hyperball.on_disk import cell_name
from hyperball.training import Recipe

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


def changed_by_a_scale(model):
    return replace(model, options={}, pool=None, projection=None)


def kind_of_projection(recipe):
    """Its set, and whether its radius is learned."""
    if recipe.model.projection is None:
        return None
    name, given = parse_projection(recipe.model.projection)
    return name, given.get("learn", True)


@pytest.mark.parametrize("name", TRAINED)
def test_every_scale_is_shorter_and_changes_no_operator(name):
    paper = trained(name)
    for scale in ("quick", "quarter", "half"):
        reduced = paper.at(scale)
        assert [entry.name for entry in paper.entries] == [entry.name for entry in reduced.entries]
        for full, short in zip(paper.entries, reduced.entries, strict=True):
            if scale == "quick" and "the first 15 epochs as published" in full.row:
                assert short.recipe.total_steps(100) == full.recipe.total_steps(100) == 15 * 100
            else:
                assert short.recipe.total_steps(100) < full.recipe.total_steps(100)
            told = full.recipe.model.override(
                {"magnitude": short.recipe.model.magnitude} if "alpha 10 instead of 1" in reduced.words(scale) else {}
            )
            assert changed_by_a_scale(short.recipe.model) == changed_by_a_scale(told)
            assert kind_of_projection(short.recipe) == kind_of_projection(full.recipe)
            assert short.recipe.model.projection == full.recipe.model.projection or "radii a quarter" in reduced.words(
                scale
            )
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


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TRAINED)
def test_no_two_published_cells_of_a_table_are_the_same_run(name, scale):
    recipes = [entry.recipe for entry in trained(name).at(scale).entries if entry.kind == "published"]
    assert [recipe for recipe in recipes if recipes.count(recipe) > 1] == []


@pytest.mark.parametrize("scale", ["quick", "quarter", "half"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_schedule_is_compressed_once(name, scale):
    reduced = trained(name).at(scale)
    assert reduced.at(scale) == reduced
    for other in {*SCALES} - {scale}:
        with pytest.raises(ValueError, match=f"which is at {scale}, must be {scale}, got '{other}'"):
            reduced.at(other)


@pytest.mark.parametrize("scale, factor", [("quarter", 4), ("half", 2)])
def test_a_quarter_and_a_half_compress_the_schedule_and_change_nothing_else(scale, factor):
    for full, short in zip(trained("dcnet-table3").entries, trained("dcnet-table3").at(scale).entries, strict=True):
        assert short.recipe.steps == CIFAR_STEPS / factor
        assert short.recipe.schedule.milestones == tuple(mark / factor for mark in CIFAR_MILESTONES)
        assert set(full.recipe.differences(short.recipe)) == {"steps", "schedule.milestones"}


@pytest.mark.parametrize(
    "row, column, name",
    [
        ("tanh", "cosine, no relu", "tanh--cosine-no-relu"),
        ("baseline, trained again (control)", "x", "baseline-trained-again-control--x"),
        ("weighting=joint (eq 15)", "tanh+cosine", "weighting=joint-eq-15--tanh+cosine"),
        ("pseudo_huber adaptive", "x", "pseudo_huber-adaptive--x"),
        ("L∞ ball, r = 0.5", "A/B", "l-ball-r-=-0.5--a-b"),
    ],
)
def test_the_folder_of_a_cell_has_a_name_that_every_disk_takes(row, column, name):
    assert cell_name(row, column) == name


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
        assert [entry.published, entry.also["voc6_softmax"]] == pooled[entry.row][entry.column.split()[0]]
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
            assert (entry.published, entry.also["voc6_raw"]) == (held["top1"], held["map"])


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
    for text in ("tank", "TANH"):
        with pytest.raises(ValueError, match=rf"no cell '{text}'; did you mean 'tanh'\?"):
            whole.select([text])
    with pytest.raises(ValueError, match=r"'123'; known: rows \(baseline; .*columns \(cosine, no relu; .*kinds \(publ"):
        whole.select(["123"])


def test_unknown_tables_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'dcnet-table3'"):
        experiment("dcnet-tabel3")
    with pytest.raises(ValueError, match="`scale` must be one of quick, quarter, half, paper, got 'full'"):
        trained("dcnet-table3").at("full")
    with pytest.raises(ValueError, match="is a table of times"):
        trained("pooling-runtime")
    assert set(TABLES) == {*TRAINED, *TIMED}


def test_difference_is_ours_less_the_papers():
    line = Comparison("tanh", "cosine", 25.0, (24.0, 25.0), (23.5,))
    assert (line.mean, line.difference) == (24.5, -0.5)
    assert line.std == pytest.approx(0.7071, abs=1e-4)
    assert Comparison("seg", "cosine", "N/C", (30.0,), ()).difference is None
    assert Comparison("seg", "cosine", 30.0, (), ()).mean is None


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
                assert (entry.published, entry.also["voc6_raw"]) == (numbers["top1"], numbers["map"])
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
    spared, *others = trained("dcnet-table4").select(["control"]).entries
    assert (spared.recipe.optimizer.decay, spared.recipe.optimizer.name) == ("classifier+norms", "adam")
    assert sorted(e.recipe.optimizer.lr for e in others) == [0.03, 0.1, 0.3]
    (updates,) = trained("dcnet-table1").select(["control"]).entries
    assert updates.recipe.regularizers.weighted_gradients == "update"
    assert updates.recipe.projection.every is None
