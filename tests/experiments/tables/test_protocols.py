"""What tables say of their protocols, and the controls that stand beside the published cells."""

import math

import pytest
import torch

from hyperball import models
from hyperball.convert.heads import make_projection
from hyperball.experiments.table import SCALES
from hyperball.experiments.tables import TRAINED, trained
from hyperball.nn import RobustPool1d
from hyperball.on_disk import slug
from hyperball.training import Recipe


@pytest.mark.parametrize(
    "name, told",
    [
        ("projections-cifar10", "32×32 instead of 224×224"),
        ("projections-imagewoof", "112×112 instead of 224×224"),
        ("projections-imagewoof-networks", "112×112 instead of 224×224"),
        ("pooling-test-outliers", "1,024 instead of 2,048 points"),
        ("pooling-outliers", "1,024 instead of 2,048 points"),
    ],
)
def test_words_say_how_large_samples_are(name, told):
    made = trained(name)
    for scale in ("paper", "half", "quarter"):
        assert told in made.words(scale)
    if "imagewoof" in name:
        assert {entry.recipe.data.image_size for entry in made.entries} == {112}
        assert any("order of the official folders" in note for note in made.notes)


@pytest.mark.parametrize("name", ["dcnet-table6", "dcnet-table6-imagewoof"])
def test_table6_says_where_it_is_not_the_authors_code(name):
    told = " ".join(trained(name).notes)
    for entry in trained(name).entries:
        assert (entry.recipe.optimizer.weight_decay, entry.recipe.regularizers.label_smoothing) == (5e-4, 0.0)
    for text in ("here 5e-4", "has 1e-4", "0.01", "out of 256×256"):
        assert text in told


@pytest.mark.parametrize("name", TRAINED)
def test_words_of_a_scale_claim_no_more_than_is_so(name):
    made = trained(name)
    (precision,) = {entry.recipe.precision for entry in made.entries}
    for scale in ("paper", "half", "quarter"):
        assert (f"{precision} instead of the papers' fp32" in made.words(scale)) == (precision != "fp32")
        assert made.words(scale) == made.at(scale).words(scale)
        assert "all else as published" not in made.words(scale)
    assert {entry.recipe.precision for entry in made.at("quick").entries} == {"fp32"}
    assert "instead of the papers'" not in made.words("quick")


@pytest.mark.parametrize("name", [f"dcnet-table{number}" for number in range(1, 6)] + ["dcnet-figure4"])
def test_notes_say_what_the_cifar_tables_take_from_the_authors_code(name):
    made = trained(name)
    told = " ".join(made.notes)
    assert {entry.recipe.regularizers.label_smoothing for entry in made.entries} == {0.01}
    for text in ("bf16", "label smoothing 0.01"):
        assert text in told
    momenta = {entry.recipe.model.options.get("norm_momentum") for entry in made.entries}
    assert ("BatchNorm's momentum is 0.001" in told) == (0.001 in momenta)


def test_table3_has_controls_of_its_plain_networks():
    whole = trained("dcnet-table3")
    plain = {e.column: e.recipe for e in whole.select(["baseline"]).entries}
    spared, pooled = whole.select(["control"]).entries
    changed = plain[spared.column].differences(spared.recipe)
    assert changed == {"optimizer.decay": ("weights+norms", "classifier+norms")}
    assert plain[pooled.column].differences(pooled.recipe) == {"model.pool": (None, "quadratic")}
    for scale in SCALES:
        assert [e.name for e in whole.at(scale).select(["control"]).entries] == [spared.name, pooled.name]


def test_table2_has_controls_of_its_plain_network():
    whole = trained("dcnet-table2")
    (plain,) = whole.select(["baseline"]).entries
    spared, biased = whole.select(["control"]).entries
    assert plain.recipe.differences(spared.recipe) == {"optimizer.decay": ("weights+norms", "classifier+norms")}
    assert plain.recipe.differences(biased.recipe) == {"model.options": ({}, {"bias": True})}
    networks = [models.create("cnn9", 10, width=4, features=8, **e.recipe.model.arguments) for e in (plain, biased)]
    counts = [sum(name.endswith("bias") for name, _ in network.named_parameters()) for network in networks]
    assert counts == [0, 10]
    told = " ".join(whole.notes)
    assert "have no bias" in told
    assert "in a control on its classifier" in told


@pytest.mark.parametrize("name", ["dcnet-table6", "dcnet-table6-imagewoof"])
def test_table6_says_how_its_networks_begin_and_normalize(name):
    told = " ".join(trained(name).notes)
    for text in ("eps is 1e-3", "begin at the first batch", "begins at 0", "is not decayed", "has a bias"):
        assert text in told
    assert ("momentum is 0.001" in told) == (name == "dcnet-table6")
    network = models.create("resnet18_modified", 10, width=4, activation="prelu", norm=None)
    slopes = [module.weight for module in network.modules() if isinstance(module, torch.nn.PReLU)]
    assert slopes
    assert all(torch.equal(slope, torch.zeros_like(slope)) for slope in slopes)
    assert not any(key.endswith("bias") for key, _ in network.named_parameters())


def test_table5_counts_the_papers_numbers_once_and_says_how_sgd_is_run():
    whole = trained("dcnet-table5")
    controls = whole.select(["control"]).entries
    assert [entry.published for entry in controls] == [None] * 4
    assert all("SGD (control)" in entry.row for entry in controls)
    assert sorted(entry.published for entry in whole.select(["published"]).entries) == [4.75, 5.34, 20.23, 21.12]
    told = " ".join(whole.notes)
    for text in ("lr 0.1, Nesterov momentum 0.9", "radii learn at 0.1", "not decayed"):
        assert text in told


UNPUBLISHED = {
    "dcnet-figures-mnist": "a schedule chosen here",
    "architectures": "in a table that no paper has",
    "projections-cifar10-networks": "lr 0.01 to the end for AlexNet and VGG-11",
    "projections-imagewoof": "112×112 instead of 224×224 images",
    "dcnet-table6-imagewoof": "instead of 700,000 steps",
}


@pytest.mark.parametrize("name", UNPUBLISHED)
def test_a_schedule_that_no_paper_has_is_not_called_published(name):
    for scale in ("paper", "half"):
        words = trained(name).words(scale)
        assert UNPUBLISHED[name] in words
        assert not words.startswith("the published schedule;")
        assert words != "the published schedule"


@pytest.mark.parametrize("name", [name for name in TRAINED if name.startswith("projections")])
def test_projections_are_trained_on_parts_of_images_as_in_the_published_code_and_say_so(name):
    whole = trained(name)
    assert {entry.recipe.data.crop for entry in whole.entries} == {"part"}
    assert "training sees random parts of 8 to 100 % of an image" in " ".join(whole.notes)
    shorter = {entry.recipe.data.crop for entry in whole.at("quick").entries}
    assert shorter == {"part"} or "instead of parts of 8 to 100 %" in whole.words("quick")


@pytest.mark.parametrize("name", [name for name in TRAINED if name.startswith("projections")])
def test_projections_say_that_a_radius_stays_positive_and_logits_are_whole(name):
    told = " ".join(trained(name).notes)
    assert "r stays positive" in told
    assert "the classifier in fp32" in told


@pytest.mark.parametrize("name", TRAINED)
def test_notes_are_sentences_of_their_own(name):
    for note in trained(name).all_notes:
        assert not note.startswith(("but ", "and ", "or "))
        assert not note.endswith(".")


def test_the_quick_scale_of_table6_is_what_its_words_say():
    made = trained("dcnet-table6-imagewoof").at("quick")
    for entry in made.entries:
        recipe = entry.recipe
        assert (recipe.optimizer.lr, recipe.epochs, recipe.batch_size) == (0.02, 5, 32)
        assert (recipe.data.image_size, recipe.data.crop, recipe.data.train_size) == (64, "window", 1000)
    for text in ("lr 0.02 instead of 0.1", "64×64 out of 73×73", "1,000 images"):
        assert text in made.reduction.words


def test_the_plain_network_without_relu_is_linear_with_mean_pooling_alone():
    whole = trained("dcnet-table3")
    pooled = whole.select(["control"]).entries[1]
    (plain,) = whole.select([f"baseline--{slug(pooled.column)}"]).entries
    x, y = torch.randn(2, 5, 3, 32, 32, dtype=torch.float64)
    gaps = []
    for entry in (pooled, plain):
        torch.manual_seed(0)
        network = models.create("cnn9", 10, width=4, features=8, **entry.recipe.model.arguments).double().eval()
        with torch.no_grad():
            gaps.append((network(x) + network(y) - network(x + y) - network(torch.zeros_like(x))).abs().max())
    assert gaps[0] < 1e-9 < 1e-3 < gaps[1]


def adaptive() -> dict[str, Recipe]:
    """A recipe for every projection with a learned radius."""
    entries = trained("projections-cifar10").entries
    return {entry.row: entry.recipe for entry in entries if entry.column == "adaptive"}


@pytest.mark.parametrize("row", adaptive())
def test_the_first_step_of_a_learned_radius_is_that_of_the_radius_itself_at_the_published_rate(row):
    recipe = adaptive()[row]
    layer = make_projection(recipe.model.projection).double()
    start = float(layer.radius.detach())
    slope = 1e-3  # of a loss in the radius
    optimizer = torch.optim.SGD([layer.log_radius], lr=recipe.optimizer.radius_lr)
    (slope * layer.radius).backward()
    optimizer.step()
    assert float(layer.radius.detach()) - start == pytest.approx(-0.01 * slope, rel=1e-4)
    assert recipe.optimizer.radius_schedule == "constant"


@pytest.mark.parametrize("scale", ["paper", "quick"])
def test_what_learns_no_radius_has_no_rate_for_one(scale):
    entries = trained("projections-cifar10").at(scale).entries
    assert {entry.recipe.optimizer.radius_lr for entry in entries if entry.column != "adaptive"} == {None}


@pytest.mark.parametrize("row", adaptive())
def test_a_quarter_of_the_features_lies_beyond_a_quick_radius_as_often_as_all_do_beyond_the_published_one(row):
    entries = {entry.row: entry for entry in trained("projections-cifar10").at("quick").entries}
    full, quick = adaptive()[row], entries[row].recipe  # the last entry of a row is its adaptive one
    widths = [models.create("resnet18", 10, **recipe.model.options).num_features for recipe in (full, quick)]
    assert widths == [512, 128]
    layers = [make_projection(recipe.model.projection) for recipe in (full, quick)]
    lengths = [
        torch.linalg.vector_norm(torch.randn(4000, n, generator=torch.Generator().manual_seed(0)), layer.p, -1)
        / layer.radius.detach()
        for n, layer in zip(widths, layers, strict=True)
    ]
    assert float(lengths[0].median()) == pytest.approx(float(lengths[1].median()), rel=0.2)
    assert quick.optimizer.radius_lr == pytest.approx(0.01 / float(layers[1].radius.detach()) ** 2)


@pytest.mark.parametrize("row", ["huber adaptive", "barron adaptive"])
def test_the_first_step_of_a_learned_pooling_is_that_of_its_parameter_at_the_shared_rate(row):
    (entry,) = trained("pooling-outliers").select([f"{slug(row)}--0"]).entries
    config = entry.recipe.optimizer
    layer = RobustPool1d(penalty=entry.recipe.model.pool).double()
    (raw,) = layer.parameters()
    value = {"log_c": torch.exp, "logit_shape": lambda given: 3 * torch.sigmoid(given)}[
        next(name for name, _ in layer.named_parameters())
    ]
    slope, start = 1e-3, float(value(raw.detach()))
    assert start == pytest.approx(1.0)
    optimizer = torch.optim.SGD([raw], lr=config.radius_lr or config.lr)
    (slope * value(raw)).backward()
    optimizer.step()
    assert float(value(raw.detach())) - start == pytest.approx(-config.lr * slope, rel=1e-4)


def robust_pointnets():
    """The rows with RobustBatchNorm by their dropout."""
    entries = [e for e in trained("pooling-test-outliers").entries if e.recipe.model.norm == "robust"]
    return {entry.recipe.model.options.get("dropout", 0.3): entry for entry in entries}


def test_the_zeros_of_dropout_take_scales_of_a_robust_pointnet_to_zero():
    torch.manual_seed(0)
    largest = {}
    for dropout, entry in robust_pointnets().items():
        network = models.create(entry.recipe.model.name, **entry.recipe.model.arguments)
        clouds = torch.randn(5, entry.recipe.batch_size, 32, 3)
        largest[dropout] = max(float(network.forward_features(batch).detach().max()) for batch in clouds)
    assert largest[0.0] < 30.0
    assert largest[0.3] > 100.0  # where eps alone divides


def test_a_control_differs_from_the_robust_pointnet_without_dropout_in_its_normalization_alone():
    plain = robust_pointnets()[0.0].recipe.override({"model.norm": None})
    assert plain in [e.recipe for e in trained("pooling-test-outliers").select(["control"]).entries]


def test_controls_of_the_learning_rate_differ_from_their_rows_in_nothing_else():
    rows = {entry.row: entry for entry in trained("pooling-test-outliers").entries}
    controls = {row: entry for row, entry in rows.items() if row.endswith(", learning rate 0.01")}
    assert len(controls) == 4
    for row, entry in controls.items():
        plain = rows[row.removesuffix(", learning rate 0.01")]
        assert (entry.kind, entry.published, plain.kind) == ("control", None, "published")
        assert (plain.recipe.optimizer.lr, entry.recipe.optimizer.lr) == (0.001, 0.01)
        assert entry.recipe.override({"optimizer.lr": 0.001}) == plain.recipe
        assert entry.conditions == plain.conditions
    assert not any("learning rate" in entry.row for entry in trained("pooling-outliers").entries)


def test_a_slower_c_moves_at_first_as_one_behind_a_softplus():
    rows = {entry.row: entry for entry in trained("pooling-test-outliers").entries}
    raw = torch.tensor(math.log(math.e - 1), dtype=torch.float64, requires_grad=True)
    c = torch.nn.functional.softplus(raw)
    c.backward()
    assert float(c.detach()) == pytest.approx(1.0)
    for penalty in ("pseudo_huber", "huber", "welsch"):
        plain, slower = rows[f"{penalty} adaptive"], rows[f"{penalty} adaptive, c at 0.4 of the rate"]
        assert (slower.kind, slower.published, slower.conditions) == ("control", None, plain.conditions)
        assert slower.recipe.override({"optimizer.radius_lr": None}) == plain.recipe
        # dc = (dc/draw)²·rate·grad behind a softplus, and rate·grad for log c at c = 1
        assert slower.recipe.optimizer.radius_lr == pytest.approx(float(raw.grad) ** 2 * plain.recipe.optimizer.lr)


def test_networks_that_normalize_nothing_have_a_lower_rate_to_the_end():
    entries = trained("projections-cifar10-networks").entries
    rates = {
        entry.row.partition(",")[0]: (
            entry.recipe.optimizer.lr,
            entry.recipe.schedule.name,
            entry.recipe.schedule.every,
        )
        for entry in entries
    }
    falling, constant = (0.1, "step", 30.0), (0.01, "constant", None)
    assert rates == {"googlenet": falling, "densenet121": falling, "alexnet": constant, "vgg11": constant}
    assert any("have lr 0.01 to the end" in note for note in trained("projections-cifar10-networks").notes)


LONGER = ", four times as long (control)"


def test_networks_tested_after_every_epoch_are_those_of_the_table_of_last_epochs():
    whole = {entry.row: entry for entry in trained("pooling-test-outliers").entries}
    rows = {"quadratic", "pseudo_huber fixed", "huber fixed", "welsch fixed"}
    for scale in ("paper", "quick"):
        chosen = trained("pooling-epochs").at(scale).entries
        assert {entry.row for entry in chosen if entry.kind == "published"} == rows
        for entry in chosen:
            assert set(entry.recipe.log.conditions) == set(entry.conditions) == {"10 %", "30 %", "50 %", "70 %"}
    for entry in (entry for entry in trained("pooling-epochs").entries if entry.kind == "published"):
        assert entry.recipe == whole[entry.row].recipe
        shares = {name: whole[entry.row].published_conditions[name] for name in entry.conditions}
        assert (entry.published, entry.published_conditions) == (whole[entry.row].published, shares)


def test_networks_trained_longer_have_the_published_epochs_at_the_scale_quick():
    table = trained("pooling-epochs").at("quick")
    held = {entry.row: entry for entry in table.entries}
    longer = [entry for entry in table.entries if entry.row.endswith(LONGER)]
    assert {entry.row.removesuffix(LONGER) for entry in longer} == {"quadratic", "pseudo_huber fixed"}
    for entry in longer:
        assert (entry.kind, entry.published, entry.recipe.epochs, entry.recipe.schedule.every) == (
            "control",
            None,
            60,
            20,
        )
        same = {"epochs": entry.recipe.epochs, "schedule.every": entry.recipe.schedule.every}
        assert held[entry.row.removesuffix(LONGER)].recipe.override(same) == entry.recipe


@pytest.mark.parametrize("row", ["pseudo_huber fixed", "welsch fixed", "pseudo_huber adaptive", "huber adaptive"])
def test_the_first_epochs_are_those_of_the_published_schedule_at_the_scale_quick_too(row):
    whole = next(entry.recipe for entry in trained("pooling-test-outliers").entries if entry.row == row)
    for scale, precision in (("paper", "tf32"), ("quick", "fp32")):
        held = {entry.row: entry for entry in trained("pooling-epochs").at(scale).entries}
        entry = held[f"{row}, the first 15 epochs as published (control)"]
        assert (entry.kind, entry.published) == ("control", None)
        assert entry.recipe == whole.override({"epochs": 15, "precision": precision})


def test_controls_of_heads_differ_from_their_rows_in_the_learning_rate_alone():
    table = trained("projections-imagewoof")
    held = {(entry.row, entry.column): entry.recipe for entry in table.entries}
    ends = ", learning rate 0.01 (control)"
    slower = {entry.row.removesuffix(ends): entry for entry in table.entries if entry.row.endswith(ends)}
    assert set(slower) == {"none", "BatchNorm alone", "l2 sphere"}
    for row, entry in slower.items():
        of = held.get((row, entry.column)) or held[f"{row} (control)", entry.column]
        assert of.optimizer.lr == 0.1
        assert entry.recipe == of.override({"optimizer.lr": 0.01})
        assert entry.published is None


@pytest.mark.parametrize("name", ["pooling-test-outliers", "pooling-outliers", "pooling-epochs", "projections-cifar10"])
def test_tables_of_declarative_layers_say_that_the_paper_may_print_best_epochs(name):
    assert any("the paper's numbers may be of best epochs" in note for note in trained(name).notes)


@pytest.mark.parametrize("name", ["projections-cifar10", "projections-imagewoof"])
def test_the_projected_resnet18_has_a_bias_as_torchvisions(name):
    for scale in SCALES:
        assert all(entry.recipe.model.options["classifier_bias"] for entry in trained(name).at(scale).entries)


def test_vgg_of_the_architectures_has_a_head_for_small_images():
    pytest.importorskip("torchvision")
    recipe = next(e.recipe for e in trained("architectures").entries if (e.row, e.column) == ("baseline", "vgg11"))
    network = models.create(recipe.model.name, num_classes=10, **recipe.model.arguments).eval()
    assert sum(weight.numel() for weight in network.parameters()) < 10e6
    with torch.no_grad():
        assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)
