"""The papers' protocols in literal values, so that a slip in a recipe or in a published number fails here."""

import hashlib
import json

import pytest

from hyperball.experiments.protocols import cifar, imagenet, mnist_features, pointnet, projected
from hyperball.experiments.table import published
from hyperball.experiments.tables import TABLES, trained
from hyperball.experiments.tables.dcnet import attacks
from hyperball.training import Recipe
from hyperball.training.recipe.fields import Section, hints

FREE = ("log.", "engine.")  # how a run speaks and computes; no numbers
SGD = {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.nesterov": False}
PLAIN_NORM = {"norm_eps": 0.001, "norm_momentum": 0.001}
CIFAR = {
    "data.name": "cifar100", "data.crop": "mirror", "data.pad": 4, "data.flip": True, "data.cutout": 0,
    "model.name": "cnn9", "model.angular": "cosine", "model.weighting": "none", "model.options": PLAIN_NORM,
    "optimizer.name": "adam", "optimizer.lr": 0.001, "optimizer.betas": (0.9, 0.999), "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.0005, "optimizer.decay": "weights+norms", "optimizer.radius_lr": None,
    "schedule.name": "step", "schedule.unit": "steps", "schedule.milestones": (20000, 30000, 37500),
    "schedule.gamma": 0.1, "schedule.warmup": 0, "steps": 42500, "epochs": None, "batch_size": 128,
    "regularizers.label_smoothing": 0.01, "precision": "bf16",
}  # fmt: skip
DECOUPLED = {
    "model.magnitude": "tanh", "projection.every": 100, "projection.scale": 1.0,
    "regularizers.orthogonality": 0.000005, "regularizers.orthogonality_unit": True,
}  # fmt: skip
PLAIN = {"model.magnitude": None, "projection.every": None, "regularizers.orthogonality": 0.0}
POINTNET = {
    "data.name": "modelnet40", "data.points": None, "data.outliers": 0, "model.name": "pointnet",
    **SGD, "optimizer.lr": 0.001, "optimizer.weight_decay": 0.0,
    "schedule.name": "step", "schedule.unit": "epochs", "schedule.every": 20, "schedule.gamma": 0.5,
    "epochs": 60, "steps": None, "batch_size": 24, "precision": "fp32",
}  # fmt: skip
PROJECTED = {
    "model.name": "resnet18", **SGD, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0001, "optimizer.decay": "all",
    "optimizer.radius_schedule": "constant", "schedule.name": "step", "schedule.unit": "epochs",
    "schedule.every": 30, "schedule.gamma": 0.1, "epochs": 90, "steps": None, "batch_size": 128, "precision": "bf16",
    "regularizers.label_smoothing": 0.0, "data.flip": True, "data.cutout": 0,
}  # fmt: skip
PARTS = {"data.name": "cifar10", "data.crop": "part"}
IMAGENET = {
    "data.name": "imagenet", "data.crop": None, "data.flip": True, "data.image_size": 224, "data.workers": 16,
    "model.activation": "prelu", **SGD, "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0005,
    "optimizer.decay": "weights+norms", "schedule.name": "step", "schedule.unit": "steps",
    "schedule.milestones": (200000, 375000, 550000), "schedule.gamma": 0.1, "steps": 700000, "epochs": None,
    "batch_size": 40, "regularizers.label_smoothing": 0.0, "precision": "bf16",
}  # fmt: skip
MNIST = {
    "data.name": "mnist", "data.crop": None, "data.flip": False, "model.name": "cnn9_features",
    "optimizer.name": "adam", "optimizer.lr": 0.003, "optimizer.weight_decay": 0.0, "schedule.name": "step",
    "schedule.unit": "epochs", "schedule.milestones": (10, 15), "schedule.gamma": 0.1, "epochs": 20, "steps": None,
    "batch_size": 128, "precision": "fp32", "projection.every": None, "regularizers.orthogonality": 0.0,
}  # fmt: skip
WOOF = {"data.name": "imagewoof", "data.crop": "part", "data.image_size": 112, "data.flip": True, "data.workers": 8}


def entry(table: str, row: str, column: str) -> Recipe:
    return next(e.recipe for e in trained(table).entries if (e.row, e.column) == (row, column))


PROTOCOLS = {
    "cifar, decoupled": (cifar("cifar100", "cnn9", magnitude="tanh"), CIFAR | DECOUPLED),
    "cifar, plain": (cifar("cifar100", "cnn9"), CIFAR | PLAIN),
    "cifar, weighted": (
        cifar("cifar100", "cnn9", magnitude="tanh", weighting="linear"),
        CIFAR | DECOUPLED | {"model.weighting": "linear", "projection.every": None},
    ),
    "cifar, no normalization": (
        cifar("cifar100", "cnn9", norm="none"), CIFAR | PLAIN | {"model.norm": "none", "model.options": {}},
    ),
    "cifar, for attacks": (
        attacks.network("tanh"),
        CIFAR | PLAIN | {
            "data.name": "cifar10", "model.name": "cnn9_adv", "model.magnitude": "tanh",
            "regularizers.label_smoothing": 0.0,
        },
    ),
    "points": (pointnet("huber"), POINTNET | {"model.pool": "huber", "optimizer.radius_lr": None}),
    "points, learned shape": (
        pointnet("barron(learn_shape=True)"),
        POINTNET | {"model.pool": "barron(learn_shape=True)", "optimizer.radius_lr": pytest.approx(0.00225)},
    ),
    "points, in a table": (
        entry("pooling-outliers", "max", "50 %"),
        POINTNET | {
            "model.pool": "max", "optimizer.radius_lr": None, "precision": "tf32", "data.outliers": 0.5,
        },
    ),
    "projections, learned": (
        projected("cifar10", "resnet18", "l2_ball"),
        PROJECTED | PARTS | {
            "model.projection": "l2_ball", "model.options": {}, "optimizer.radius_lr": pytest.approx(0.01 / 225),
        },
    ),
    "projections, none": (
        projected("cifar10", "resnet18", None),
        PROJECTED | PARTS | {"model.projection": None, "model.options": {}, "optimizer.radius_lr": None},
    ),
    "projections, files": (
        entry("projections-imagewoof", "l1 ball", "adaptive"),
        PROJECTED | WOOF | {
            "model.projection": "l1_ball(learn=True)", "model.options": {"classifier_bias": True},
            "optimizer.radius_lr": pytest.approx(0.01 / 62500),
        },
    ),
    "imagenet, plain": (
        imagenet("resnet18", "batch", {}),
        IMAGENET | PLAIN | {"model.name": "resnet18", "model.norm": "batch", "model.options": PLAIN_NORM},
    ),
    "imagenet, decoupled without normalization": (
        imagenet("resnet18_modified", "none", {"magnitude": "tanh"}),
        IMAGENET | DECOUPLED | {"model.name": "resnet18_modified", "model.norm": "none", "model.options": {}},
    ),
    "imagenet's questions on files": (
        entry("dcnet-table6-imagewoof", "baseline", "modified resnet18 with bn"),
        IMAGENET | PLAIN | WOOF | {"data.crop": "window"} | {
            "model.name": "resnet18_modified", "model.norm": "batch",
            "model.options": {"norm_eps": 0.001, "norm_momentum": 0.05}, "steps": None, "epochs": 30,
            "batch_size": 128, "schedule.unit": "epochs",
            "schedule.milestones": pytest.approx((60 / 7, 225 / 14, 165 / 7)),
        },
    ),
    "digits, natural": (mnist_features({}, False), MNIST | {"adversarial.method": "none"}),
    "digits, adversarial": (
        mnist_features({"magnitude": "ball"}, True),
        MNIST | {
            "model.magnitude": "ball", "adversarial.method": "fgsm", "adversarial.epsilon": 0.1,
            "adversarial.share": 0.5,
        },
    ),
    "sgd with cosine": (
        entry("dcnet-table4", "baseline, SGD with cosine (control)", "cosine"),
        CIFAR | PLAIN | SGD | {
            "model.name": "resnet32", "model.options": {}, "optimizer.lr": 0.1, "optimizer.nesterov": True,
            "optimizer.decay": "all", "schedule.name": "cosine", "schedule.milestones": (),
        },
    ),
    "sgd beside far deeper networks": (
        entry("dcnet-table5", "dcnet32 tanh+cosine, SGD (control)", "cifar10"),
        CIFAR | DECOUPLED | SGD | {
            "data.name": "cifar10", "model.name": "resnet32", "optimizer.lr": 0.1, "optimizer.nesterov": True,
            "model.options": PLAIN_NORM | {"classifier_normalized": True},
        },
    ),
}  # fmt: skip


def flat(section: Section) -> dict[str, object]:
    """Every field of a recipe by its dotted name."""
    found: dict[str, object] = {}
    for name in hints(type(section)):
        value = getattr(section, name)
        found |= flat(value) if isinstance(value, Section) else {section.dotted(name): value}
    return found


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_has_these_values_and_no_others_than_the_defaults(name):
    recipe, told = PROTOCOLS[name]
    held = flat(recipe)
    assert {key: held[key] for key in told} == told
    chosen = {key for key in Recipe().differences(recipe) if not key.startswith(FREE)}
    assert chosen <= set(told)


def test_the_published_numbers_are_those_that_were_read_from_the_papers():
    text = json.dumps(published(), sort_keys=True, ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "3077a61b30daeb10ce4fd4b3d02977583bee17ffb43f41f9313cd64a20d87580"


@pytest.mark.parametrize(
    "table, row, column, number",
    [
        ("dcnet-table1", "gradients=projection", "tanh+cosine", 21.17),
        ("dcnet-table1", "weighting=split (eq 16)", "tanh+cosine", 23.38),
        ("dcnet-table2", "baseline", "cosine", 35.3),
        ("dcnet-table2", "seg", "square_cosine", "N/C"),
        ("dcnet-table3", "baseline", "cosine, no relu", 58.24),
        ("dcnet-table3", "linear", "square_cosine, no relu", 24.36),
        ("dcnet-table3", "mix", "cosine, relu", 25.27),
        ("dcnet-table4", "baseline", "cosine", 26.69),
        ("dcnet-table4", "seg", "linear", 20.86),
        ("dcnet-table5", "dcnet32 linear+square_cosine", "cifar100", 20.23),
        ("dcnet-table6", "sphere", "standard resnet18 with bn", 12.68),
        ("dcnet-table6", "baseline", "modified resnet18 without bn", "N/C"),
        ("dcnet-table7", "tanh", "natural", 91.45),
        ("dcnet-table8", "ball", "adversarial", 87.47),
        ("pooling-outliers", "max", "90 %", 29.7),
        ("pooling-outliers", "barron adaptive", "0 %", 82.9),
        ("pooling-test-outliers", "welsch adaptive", "trained clean", 85.9),
        ("projections-cifar10", "l2 ball", "adaptive", 93.48),
        ("projections-imagewoof", "none", "no projection", 62.23),
        ("projections-imagewoof-networks", "densenet121, l1 ball", "fixed", 55.03),
        ("projections-cifar10-networks", "vgg11, l2 sphere", "adaptive", 91.39),
    ],
)
def test_a_cell_stands_beside_the_number_that_the_paper_prints(table, row, column, number):
    held = {(entry.row, entry.column): entry.published for entry in trained(table).entries}
    assert held[row, column] == number


def test_conditions_and_attacks_stand_beside_the_numbers_that_the_paper_prints():
    tested = {entry.row: entry for entry in trained("pooling-test-outliers").entries}
    assert tested["max"].published_conditions["1 %"] == 32.6
    assert tested["pseudo_huber fixed"].published_conditions["50 %"] == 52.4
    assert tested["quadratic"].also_conditions["90 %"] == {"voc6_softmax": 8.2}
    attacked = {(entry.row, entry.column): entry.attacks for entry in trained("dcnet-table7").entries}
    assert attacked["sphere", "adversarial"].published["bim"] == 35.07
    assert attacked["baseline", "natural"].published["transfer fgsm"] == 50.9


def test_every_table_has_a_file_of_its_own():
    files = [make.__module__ for make in TABLES.values()]
    assert len(set(files)) == len(TABLES)
    for name, module in zip(TABLES, files, strict=True):
        assert name.replace("-", "_").endswith(module.rpartition(".")[2])
