"""Learned radii on the page: those that training moved, in as few pictures as show them."""

import json

import pytest
from report_cases import make_run, number, section_of, table_tree, write


def gallery(folder, **networks):
    """The radii of a table with a row an operator; each is given as the radii of its layers, one a test."""
    numbers = []
    for operator, radii in networks.items():
        place = make_run(folder / f"t/{operator}--cosine/seed-0", top1=0.75, model__magnitude=operator)
        lines = [
            {"kind": "evaluation", "step": 10 * (index + 1), "top1": 0.7 + index / 100,
             "radii": {f"layer{depth}": {"mean": mean} for depth, mean in enumerate(means)}}
            for index, means in enumerate(radii)
        ]  # fmt: skip
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        numbers.append(number(operator, "cosine", 20.0, [25.0]))
    write(folder / "t/table.json", table_tree("t", numbers))
    found = [entry for entry in section_of(folder, table="t").galleries if entry.title == "Learned radii"]
    return found[0] if found else None


def test_radii_that_never_move_are_counted_and_not_drawn(tmp_path):
    found = gallery(tmp_path, tanh=[[1.0], [0.9]], ball=[[15.0], [15.0]])
    assert [chart.title for chart in found.charts] == ["Radii: tanh, cosine"]
    assert found.lead == "Not drawn: 1 network whose radii stayed as they began."


def test_networks_of_one_radius_each_share_a_picture_with_the_colors_of_their_operators(tmp_path):
    found = gallery(tmp_path, tanh=[[1.0], [0.9]], ball=[[1.2], [0.1]], seg=[[3.0, 4.0], [2.0, 3.0]])
    together, alone = found.charts
    assert [(line.name, line.operator, line.color) for line in together.series] == [
        ("tanh, cosine", "tanh", 1),
        ("ball, cosine", "ball", 2),
    ]
    assert together.series[1].points == ((10.0, 1.2), (20.0, 0.1))
    assert "the mean of layer0; seed 0" in together.note
    assert [line.name for line in alone.series] == ["layer0", "layer1"]


def test_radii_of_different_sizes_have_pictures_of_their_own(tmp_path):
    found = gallery(tmp_path, tanh=[[250.0], [249.0]], ball=[[3.0], [2.0]])
    assert [chart.title for chart in found.charts] == ["Radii: tanh, cosine", "Radii: ball, cosine"]


def test_radii_measured_once_are_drawn_over_layers_with_the_colors_of_their_operators(tmp_path):
    found = gallery(tmp_path, tanh=[[2.0, 1.0]], seg=[[3.0, 4.0]], ball=[[1.0, 2.0, 3.0]])
    alike, other = found.charts
    assert [(line.operator, line.color, line.points) for line in alike.series] == [
        ("tanh", 1, ((1.0, 2.0), (2.0, 1.0))),
        ("seg", 5, ((1.0, 3.0), (2.0, 4.0))),
    ]
    assert len(other.series[0].points) == 3


@pytest.mark.parametrize("second, lead", [("tanh", "The first network of each operator."), ("ball", "")])
def test_one_network_an_operator_is_drawn(second, lead, tmp_path):
    numbers = []
    for row, magnitude in (("one", "tanh"), ("two", second)):
        make_run(tmp_path / f"t/{row}--cosine/seed-0", top1=0.75, model__magnitude=magnitude)
        numbers.append(number(row, "cosine", 20.0, [25.0]))
    write(tmp_path / "t/table.json", table_tree("t", numbers))
    (found,) = [entry for entry in section_of(tmp_path, table="t").galleries if entry.title == "Learned radii"]
    assert len(found.charts) == (1 if lead else 2)
    assert found.lead == lead
