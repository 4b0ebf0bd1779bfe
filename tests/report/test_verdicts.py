"""How numbers are held against a paper's: chance, nearness, signs."""

import math
from typing import get_args

import pytest

from hyperball.experiments.tables import TRAINED, trained
from hyperball.verdicts import AGREES, CLASSES, Verdict, compares, ends_at_chance, gain, verdict


@pytest.mark.parametrize(
    "data, top1, images, at_chance",
    [
        ("cifar10", 0.10, 10_000, True),
        ("cifar10", 0.1089, 10_000, True),
        ("cifar10", 0.1091, 10_000, False),
        ("cifar10", 0.0911, 10_000, True),
        ("cifar10", 0.0909, 10_000, False),
        ("cifar10", 0.1091, 5_000, True),
        ("cifar100", 0.01, 10_000, True),
        ("cifar100", 0.10, 10_000, False),
        ("modelnet40", 0.025, 2_468, True),
        ("modelnet40", 100 / 2_468, 2_468, True),
        ("modelnet40", 0.0152, 2_468, False),
        ("modelnet40", 0.0525, 2_468, False),
        ("mnist", 0.1135, 10_000, True),
        ("mnist", 0.1231, 10_000, False),
        ("mnist", 0.0909, 10_000, False),
        ("imagewoof", 0.11, 3_929, True),
        ("imagenet", 0.001, 50_000, True),
        ("imagenet", 0.0, 1_000, True),
        ("no such set", 0.1, 10_000, False),
        (None, 0.1, 10_000, False),
        ("cifar10", None, 10_000, False),
        ("cifar10", math.nan, 10_000, False),
        ("cifar10", 0.1, 0, False),
        ("cifar10", 0.1, 10**400, False),
    ],
)
def test_a_network_at_chance_is_within_three_standard_errors_of_what_guessing_gives(data, top1, images, at_chance):
    assert ends_at_chance(data, {"top1": top1, "samples": images}) is at_chance
    assert ends_at_chance(data, {"top1": top1}, images) is at_chance
    assert not ends_at_chance(data, {"top1": top1})


@pytest.mark.parametrize("off, at_chance", [(0.0, True), (1e-7, True), (-1e-7, True), (1e-5, False), (-1e-5, False)])
def test_a_network_whose_loss_is_that_of_guessing_has_learned_nothing(off, at_chance):
    loss = math.log(100) * (1 + off)
    assert ends_at_chance("cifar100", {"top1": 0.0138, "samples": 10_000, "loss": loss}) is at_chance
    assert ends_at_chance("cifar100", {"top1": 0.0100, "samples": 10_000, "loss": loss})


def test_every_set_of_the_papers_tables_has_a_number_of_classes():
    assert {entry.recipe.data.name for name in TRAINED for entry in trained(name).entries} <= set(CLASSES)


@pytest.mark.parametrize(
    "metric, published, difference, lost, word",
    [
        ("error", 30.0, -0.1, False, "better"),
        ("error", 30.0, 1.5, False, "near"),
        ("error", 30.0, 1.6, False, "worse"),
        ("top5_error", 30.0, 1.6, False, "worse"),
        ("top1", 70.0, 1.6, False, "better"),
        ("top1", 70.0, -1.5, False, "near"),
        ("top1", 70.0, -1.6, False, "worse"),
        ("error", "N/C", None, True, "better"),
        ("error", "N/C", None, False, "contradicts"),
        ("top1", "N/C", None, False, "contradicts"),
        ("error", 30.0, None, True, "worse"),
        ("error", 30.0, 0.0, True, "worse"),
    ],
)
def test_ours_is_better_near_or_worse_and_a_network_lost_on_one_side_alone_is_a_miss_or_contradicts(
    metric, published, difference, lost, word
):
    assert compares(published, difference, lost)
    assert verdict(metric, published, difference, lost) == word


def test_a_gain_is_positive_where_ours_is_better():
    assert gain("error", -2.0) == gain("top5_error", -2.0) == gain("top1", 2.0) == 2.0


@pytest.mark.parametrize("published, difference, lost", [(None, None, False), (None, None, True), (30.0, None, False)])
def test_what_the_paper_lacks_or_was_not_measured_is_not_held_against_it(published, difference, lost):
    assert not compares(published, difference, lost)


def test_near_and_better_agree_with_the_paper_and_nothing_else_does():
    assert set(AGREES) == {"better", "near"}
    assert set(AGREES) < set(get_args(Verdict)) == {"better", "near", "worse", "contradicts"}
