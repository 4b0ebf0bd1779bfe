"""What table 6 of Decoupled Networks and its questions on Imagewoof share: networks, recipes and notes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hyperball.experiments.protocols import imagenet, shorter
from hyperball.experiments.table import Entry, Reduction, published
from hyperball.training.recipe import Recipe

SOURCE = "Liu et al., Decoupled Networks, CVPR 2018, table 6"
COLUMNS = {
    "standard resnet18 with bn": ("resnet18", "batch"),
    "modified resnet18 with bn": ("resnet18_modified", "batch"),
    "modified resnet18 without bn": ("resnet18_modified", "none"),
}
QUESTIONS = (
    "the standard network starts from the trained plain one of the same seed, and so has had twice its schedule; a "
    "control is the plain one trained again likewise",
    "BatchNorm's eps is 1e-3 as in the authors' code for CIFAR; running statistics begin at the first batch, also "
    "those of a network that starts with the weights of the plain one",
    "PReLU has a slope for every channel, which begins at 0, as ReLU, and is not decayed; the paper says neither",
    "no convolution and no classifier has a bias, so that without BatchNorm nothing shifts what a layer gives; whether "
    "the paper's had one is published nowhere",
)


def unsaid(crops: str) -> str:
    return (
        "the paper does not say its weight decay, label smoothing or crops: here 5e-4 as for CIFAR, none, and "
        f"{crops}; the authors' code for ImageNet, of the modified network with tanh, has 1e-4, 0.01 and crops of "
        "224×224 out of 256×256 pixels"
    )


EPOCHS = 30
CLASSES = {
    "data.name": "imagewoof", "data.image_size": 112, "data.crop": "window", "data.workers": 8, "batch_size": 128,
    "steps": None, "epochs": EPOCHS, "schedule.unit": "epochs",
}  # fmt: skip


def entries(at_imagewoof: bool) -> tuple[Entry, ...]:
    facts = published()["dcnet_table6"]
    made = []
    for row, values in facts["cells"].items():
        operator = {} if row == "baseline" else {"magnitude": row}
        for (column, (model, norm)), value in zip(COLUMNS.items(), values, strict=True):
            recipe = imagenet(model, norm, operator)
            starts = ("baseline", column) if row != "baseline" and column.startswith("standard") else None
            entry_recipe = smaller(recipe) if at_imagewoof else recipe
            made.append(Entry(row, column, entry_recipe, None if at_imagewoof else number(value), start=starts))
    return (*made, trained_again(made[0]))


def trained_again(plain: Entry) -> Entry:
    """The control of an operator that starts from the trained plain network: that network itself, trained as long."""
    return replace(
        plain, row="baseline, trained again (control)", published=None, kind="control", start=(plain.row, plain.column)
    )


def number(value: float | str) -> float | str:
    """A published number without its star, which marks networks that start from the plain one."""
    return float(value.rstrip("*")) if isinstance(value, str) and value.endswith("*") else value


def smaller(recipe: Recipe) -> Recipe:
    """The recipe on Imagewoof: 30 epochs of 112×112 crops in batches of 128, milestones at the same shares."""
    total = recipe.steps or 1
    marks = [EPOCHS * mark / total for mark in recipe.schedule.milestones]
    options: dict[str, Any] = dict(recipe.model.options)
    if "norm_momentum" in options:
        options["norm_momentum"] = 0.05
    return recipe.override({**CLASSES, "schedule.milestones": marks, "model.options": options})


QUICK_RATE = 0.02  # at 0.1 so few steps leave the plain network, from which others start, at chance


def quick(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1000, "data.test_size": 500, "data.workers": 2, "data.image_size": 64}
    start = recipe if recipe.data.name == "imagewoof" else smaller(recipe)
    options = {**start.model.options, "width": 32}
    small = {"batch_size": 32, "optimizer.lr": QUICK_RATE, "model.options": options}
    return shorter(start, 1 / 6, precision="fp32", **sizes, **small)


QUICK = Reduction(
    quick,
    "Imagewoof: 5 epochs of 1,000 images, crops of 64×64 out of 73×73 pixels, in batches of 32, tested on 500; lr 0.02 "
    "instead of 0.1; networks of 32 channels at the start; fp32",
)
