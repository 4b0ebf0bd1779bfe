"""Numbers over seeds and their order, in words."""

from __future__ import annotations

import pytest

from hyperball.experiments.text import spread
from hyperball.verdicts import in_order, order_words


@pytest.mark.parametrize(
    "cells, words",
    [
        ([("a", "x", 10.0, 20.0), ("b", "x", 12.0, 30.0), ("a", "y", 11.0, 25.0)], "2 of 2 pairs in a row or column"),
        ([("a", "x", 13.0, 20.0), ("b", "x", 12.0, 30.0), ("a", "y", 14.0, 25.0)], "1 of 2 pairs"),
        ([("a", "x", 13.0, 20.0), ("b", "x", 12.0, 20.9)], ""),
        ([("a", "0 %", 13.0, 20.0), ("a", "90 %", 99.0, 90.0), ("b", "90 %", 98.0, 80.0)], "1 of 1 pairs"),
        ([("a", "natural", 90.0, 85.0), ("a", "natural, fgsm", 4.0, 18.0)], ""),
        ([("a", "x", 13.0, 20.0), ("b", "y", 1.0, 90.0)], ""),
    ],
)
def test_the_order_of_cells_is_held_against_the_papers(cells, words):
    said = order_words(in_order(cells))
    assert said.startswith(words) if words else said == ""


@pytest.mark.parametrize(
    "values, diverged, told",
    [
        ([], 0, "–"),
        ([], 2, "N/C"),
        ([24.1], 0, "24.10"),
        ([24.0, 24.2], 1, "24.10 ± 0.14 (1 N/C)"),
        ([0.0, 0.0, 38.0], 0, "12.67 ± 21.94 {0.0, 0.0, 38.0}"),
    ],
)
def test_seeds_that_lie_far_apart_are_told_one_by_one(values, diverged, told):
    assert spread(values, diverged) == told
