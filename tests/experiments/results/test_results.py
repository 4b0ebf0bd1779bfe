"""The records that are kept in this repository: their tables are those of today."""

import json
from pathlib import Path

import pytest
from places import RESULTS

from hyperball.experiments.tables import TRAINED, trained


def tables() -> list[Path]:
    """The files of kept tables of networks."""
    trees = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*/*.json"))}
    return [path for path, tree in trees.items() if tree.get("experiment") in TRAINED and "numbers" in tree]


@pytest.mark.parametrize("path", tables(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_kept_table_has_the_protocol_notes_and_cells_of_today(path):
    tree = json.loads(path.read_text())
    table = trained(tree["experiment"]).at(tree["scale"])
    assert tree["protocol"] == table.words(tree["scale"])
    assert set(table.all_notes) <= set(tree["notes"])
    cells = {(entry.row, entry.column) for entry in table.entries}
    cells |= {(entry.row, f"{entry.column}, {name}") for entry in table.entries for name in entry.conditions}
    assert cells <= {(number["row"], number["column"]) for number in tree["numbers"]}


@pytest.mark.parametrize("path", tables(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_kept_table_holds_the_papers_numbers_of_today(path):
    tree = json.loads(path.read_text())
    entries = {(entry.row, entry.column): entry for entry in trained(tree["experiment"]).at(tree["scale"]).entries}
    for number in tree["numbers"]:
        entry = entries.get((number["row"], number["column"]))
        if entry is not None:
            assert number["published"] == entry.published
            assert {
                key.removesuffix(", paper"): value for key, value in number.items() if key.endswith(", paper")
            } == dict(entry.also)
