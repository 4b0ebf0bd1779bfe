"""What the tables of projections share: heads before the classifiers of the published networks, and BatchNorm alone.

ResNet-18 has tables of its own, on CIFAR-10 at 32×32 pixels; there the other networks see images as large as published.
On Imagewoof all see 112×112 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hyperball.convert.heads import PROJECTIONS, parse_projection
from hyperball.experiments.protocols import projected, radius_rate, shorter
from hyperball.experiments.table import Entry, Kind, Reduction, published
from hyperball.experiments.tables.declarative.pooling import BESIDE
from hyperball.nn.projection import DEFAULT_RADIUS
from hyperball.training.recipe import Recipe

SETS = {f"{norm} {surface}": f"{norm}_{surface}" for norm in ("l1", "l2", "linf") for surface in ("sphere", "ball")}
BATCH_NORM = "l2_ball(radius=1000000.0, learn=False)"  # no feature vector is that long: BatchNorm alone
NETWORKS = {  # by the names of the published tables
    "googlenet": "torchvision/googlenet", "densenet121": "torchvision/densenet121",
    "alexnet": "torchvision/alexnet", "vgg11": "torchvision/vgg11",
}  # fmt: skip
PUBLISHED_SIZE, DOG_SIZE = 224, 112
SMALL_DOGS = (
    f"the published schedule, but {DOG_SIZE}×{DOG_SIZE} instead of {PUBLISHED_SIZE}×{PUBLISHED_SIZE} images, which is "
    "what the copy of Imagewoof used here has"
)
CROPS = (
    "training sees random parts of 8 to 100 % of an image, and flips, as in the published code, here of the central "
    "128×128 pixels and at 112×112, there of all and at 224×224; tests see the center of 128×128, there of 256×256"
)
BEST = (
    "the paper's numbers may be of best epochs: the code published with it prints the highest accuracy and the highest "
    "mAP of all tests, one after each epoch; ours are of the last epoch"
)
DOGS = (
    "classes are in the order of the official folders, whatever a copy calls them: mAP is of the first six there, "
    "Shih-Tzu to Australian terrier"
)
NOTES = (
    "the published networks saw 224×224 images",
    BEST,
    "the paper's mAP, as its code computes it, is voc6_raw: the interpolated one of the first six classes, ranked by "
    "raw logits, which projections change by construction; records of before it was measured here have map6_raw alone, "
    "which is not interpolated; map_raw and map_softmax cover all classes, ece is the calibration error",
    "the slides say that the adaptive L∞ projections fail; no number is published for any L∞",
    '"BatchNorm alone" is the head without its projection',
    "a radius r is learned as log r, at 0.01/r² for the r at the start: its first steps are those of r itself at the "
    "published 0.01; r stays positive that way, so that a radius that falls to zero or below it, as an r learned "
    "itself can, and may have for the slides' L∞, is no way of failing here",
    "except at the scale quick, networks compute in bf16; tests compute the classifier in fp32, as rounded logits "
    "would tie, which lowers mAP",
)
PAPERS_MAP = "voc6_raw"
ALSO = (PAPERS_MAP, *BESIDE)
BIAS = "the classifier has a bias, as torchvision's ResNet-18"


def projection_text(projection: str, how: str) -> str:
    return f"{projection}(learn={how == 'adaptive'})"


def with_fewer_features(projection: str | None, share: float) -> dict[str, Any]:
    """The changes with which a set holds as much of a share of the features as it did of all.

    Normalized features are √n long by the L2 norm and n by the L1 norm, but for a factor, and so are the radii.
    """
    if projection is None:
        return {}
    name, given = parse_projection(projection)
    p = PROJECTIONS[name][0]
    radius = (given.get("radius") or DEFAULT_RADIUS[p]) * share ** (1 / p)
    text = f"{name}(radius={radius:g}, learn={given.get('learn', True)})"
    return {"model.projection": text, "optimizer.radius_lr": radius_rate(text)}


def entries(facts: dict[str, Any], make: Callable[[str | None], Recipe], of: str = "") -> tuple[Entry, ...]:
    """No projection, BatchNorm alone, and the six sets with fixed and learned radii; `of` begins every row."""
    none = facts["none"]
    made = [
        Entry(f"{of}none", "no projection", make(None), none["top1"], also={PAPERS_MAP: none["map"]}),
        Entry(f"{of}BatchNorm alone (control)", "no projection", make(BATCH_NORM), kind="control"),
    ]
    for row, projection in SETS.items():
        for how in ("fixed", "adaptive"):
            held = facts.get(row, {}).get(how, {})
            also = {PAPERS_MAP: held["map"]} if held else {}
            recipe = make(projection_text(projection, how))
            kind: Kind = "published" if held else "control"
            made.append(Entry(f"{of}{row}", how, recipe, held.get("top1"), kind=kind, also=also))
    return tuple(made)


def dogs(network: str, projection: str | None, **options: Any) -> Recipe:
    """A projected classifier on Imagewoof, whose images are decoded once."""
    held = {"data.workers": 8, "data.image_size": DOG_SIZE, "log.evaluate_every": 5}
    return projected("imagewoof", network, projection, **options).override(held)


def network_entries(table: str, make: Callable[[str, str | None], Recipe]) -> tuple[Entry, ...]:
    """The entries of every published network but ResNet-18; `make` takes a network and a projection."""
    made: list[Entry] = []
    for name, facts in published()[table]["cells"].items():
        if name in NETWORKS:
            made += entries(facts, partial(make, NETWORKS[name]), f"{name}, ")
    return tuple(made)


def quick_networks(recipe: Recipe) -> Recipe:
    sizes = {"data.train_size": 1000, "data.test_size": 500, "precision": "fp32", "batch_size": 32}
    side = {"model.options": {"enlarge": 64}} if recipe.model.options else {"data.image_size": 64, "data.workers": 2}
    return shorter(recipe, 1 / 30, **sizes, **side)


QUICK_NETWORKS = Reduction(
    quick_networks, "3 of 90 epochs on 1,000 images of 64×64 pixels in batches of 32, tested on 500; fp32"
)
