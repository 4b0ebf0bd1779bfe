"""The picture of ours against the paper's, and tables that stand on the page at a longer scale already."""

import json
import re

import pytest
from report_cases import make_table, number, page_of, table_tree, write

from hyperball.report import read_folder
from hyperball.report.kinds import Published
from hyperball.report.results import results_page
from hyperball.report.sections.against import against_paper
from hyperball.report.sections.join import Joined

pytest.importorskip("jinja2")


def picture_of(folder, numbers, **more):
    write(folder / "table.json", table_tree("t", numbers, **more))
    found = read_folder(folder)
    (table,) = found.of(Published)
    return against_paper(Joined(table, found.runs))


def three(*more):
    return [
        number("tanh", "a", 25.0, [26.0, 27.0]),
        number("ball", "a", 30.0, [29.0]),
        number("seg", "a", 60, [40]),
        *more,
    ]


def told(picture):
    """What the page says of every dot, and where the dots are: (paper, ours)."""
    groups = re.findall(r'data-p="([^"]*)" data-told="([^"]*)"', picture.svg)
    texts = [text for _, held in groups for text in json.loads(held.replace("&quot;", '"'))]
    places = [tuple(map(float, pair.split(","))) for points, _ in groups for pair in points.split()]
    return dict(zip(texts, places, strict=True))


def test_every_number_with_a_published_one_is_a_dot(tmp_path):
    rest = [number("log", "a", None, [3.0]), number("mix", "a", 20.0, []), number("sphere", "a", "N/C", [30.0])]
    picture = picture_of(tmp_path, three(*rest))
    assert told(picture) == {
        "tanh, a\nours 26.50 ± 0.71, paper 25.0, difference +1.50, 2 seeds": (25.0, 26.5),
        "ball, a\nours 29.00, paper 30.0, difference -1.00, 1 seed": (30.0, 29.0),
        "seg, a\nours 40.00, paper 60, difference -20.00, 1 seed": (60.0, 40.0),
    }
    assert picture.svg.count("<circle") == 3
    assert [key.name for key in picture.legend] == ["tanh", "ball", "seg"]
    assert "below the line ours is better" in picture.note


def test_dots_stand_where_their_numbers_say(tmp_path):
    picture = picture_of(tmp_path, three())
    places = [
        tuple(map(float, pair)) for pair in re.findall(r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)"', picture.svg)
    ]
    line = [
        tuple(map(float, pair.split()))
        for pair in re.search(r'class="reference" d="M(.*?)"', picture.svg)[1].split("L")
    ]
    (left, bottom), (right, top) = line

    def below(place):
        """How far below the line of equal numbers a dot stands."""
        share = (place[0] - left) / (right - left)
        return place[1] - (bottom + share * (top - bottom))

    assert [below(place) < 0 for place in places] == [True, False, False]  # tanh alone is worse than the paper's


def test_higher_accuracies_are_better(tmp_path):
    assert "above the line ours is better" in picture_of(tmp_path, three(), metric="top1").note


@pytest.mark.parametrize(
    "numbers, more",
    [
        (three(), {"scale": "quick"}),  # shorter schedules are not held against the paper
        (three(), {"metric": "milliseconds"}),
        (three()[:2], {}),
        ([number("tanh", "a", None, [26.0])], {}),
    ],
)
def test_what_cannot_be_compared_has_no_picture(numbers, more, tmp_path):
    assert picture_of(tmp_path, numbers, **more) is None


@pytest.mark.parametrize(
    "values", [[25.0] * 3, [1e-9, 1e-9, 2e-9], [0.0, 100.0, 1e9], [5e-324, 0.0, 0.0], [99.12, 99.16, 99.2]]
)
def test_numbers_that_coincide_or_differ_widely_are_drawn(values, tmp_path):
    numbers = [number(f"row {at}", "a", value, [value]) for at, value in enumerate(values)]
    assert picture_of(tmp_path, numbers).svg.count("<circle") == 3
    assert "Ours against the papers" in page_of(tmp_path)


def test_the_page_begins_with_the_pictures_of_the_published_schedule(tmp_path):
    make_table(tmp_path / "long", seeds=1, epochs=2)
    make_table(tmp_path / "short", seeds=1, epochs=2, scale="quick")
    first = results_page(read_folder(tmp_path)).sections[0]
    assert [(picture.table, picture.scale) for picture in first.charts] == [("synthetic-table", "paper")]


def test_a_table_that_stands_before_at_a_longer_scale_is_folded(tmp_path):
    make_table(tmp_path / "a-quick", seeds=1, epochs=2, scale="quick")
    make_table(tmp_path / "a-paper", seeds=1, epochs=2)
    make_table(tmp_path / "b-quick", name="other", seeds=1, epochs=2, scale="quick")
    sections = [entry for entry in results_page(read_folder(tmp_path)).sections if entry.table and not entry.part]
    assert [(entry.table, entry.scale, entry.folded) for entry in sections] == [
        ("synthetic-table", "paper", False), ("synthetic-table", "quick", True), ("other", "quick", False),
    ]  # fmt: skip


def test_longer_schedules_come_first_and_accuracies_before_times(tmp_path):
    kept = [
        ("a-short", "error", "quick"), ("b-both", "error", "quick"), ("b-both", "error", "paper"),
        ("a-time", "ms", "paper"), ("c-quarter", "top1", "quarter"), ("d-other", "error", "of another program"),
        ("b10", "error", "paper"), ("b2", "error", "paper"),
    ]  # fmt: skip
    for name, metric, scale in kept:
        tree = table_tree(name, three(), metric=metric, scale=scale)
        write(tmp_path / f"{name}-{scale}" / "table.json", tree)
    sections = [entry for entry in results_page(read_folder(tmp_path)).sections if entry.table]
    assert [(entry.table, entry.scale) for entry in sections] == [
        ("b2", "paper"), ("b10", "paper"), ("b-both", "paper"), ("b-both", "quick"), ("a-time", "paper"),
        ("c-quarter", "quarter"), ("a-short", "quick"), ("d-other", "of another program"),
    ]  # fmt: skip


def test_tables_made_of_another_s_runs_follow_it(tmp_path):
    for scale in ("quick", "paper"):
        for folder, names in {"net-table2": ("net-table2", "net-figure1"), "net-table10": ("net-table10",)}.items():
            for name in names:
                file = "table.json" if name == folder else f"{name}.json"
                tree = table_tree(name, [number("a", "b", 20.0, [21.0])], scale=scale)
                write(tmp_path / f"{folder}-{scale}" / file, tree)
    sections = [(s.table, s.scale) for s in results_page(read_folder(tmp_path)).sections if s.table]
    names = ("net-table2", "net-figure1", "net-table10")
    assert sections == [(name, scale) for name in names for scale in ("paper", "quick")]


def test_the_contents_name_a_table_once_with_all_its_scales(tmp_path):
    for scale in ("quick", "paper", "quarter"):
        make_table(tmp_path / scale, rows=("tanh",), seeds=1, epochs=2, scale=scale)
    page = results_page(read_folder(tmp_path))
    (entry,) = [entry for entry in page.contents if entry[0][1].table == "synthetic-table"]
    assert [section.scale for _, section in entry] == ["paper", "quarter", "quick"]
    assert [anchor for anchor, _ in entry] == [f"synthetic-table-{scale}" for scale in ("paper", "quarter", "quick")]
    assert [section for held in page.contents for _, section in held] == list(page.sections)


@pytest.mark.parametrize(
    "title, source, wanted",
    [
        ("CNN-9", "Liu et al., CVPR 2018, table 3", "Table 3. CNN-9"),
        ("Features", "Liu et al., CVPR 2018, figures 1, 6 and 7", "Figures 1, 6 and 7. Features"),
        ("Table 6's questions", "Liu et al., CVPR 2018, table 6", "Table 6's questions"),
        ("Lengths", "Liu et al., CVPR 2018, section 3 and table 1", "Lengths"),
        ("Pooling", "Du, Adaptive robust pooling", "Pooling"),
        ("Chairs", "a stable 3", "Chairs"),
    ],
)
def test_a_table_is_headed_by_its_number_in_the_paper(title, source, wanted, tmp_path):
    write(tmp_path / "table.json", table_tree("t", three(), source=source) | {"title": title})
    page = results_page(read_folder(tmp_path))
    glance = next(section for section in page.sections if section.title == "At a glance")
    assert glance.tables[0].rows[0][0].text == wanted
    assert wanted in [section.title for section in page.sections]
    assert page.sections[0].charts[0].title == wanted


def test_a_table_is_folded_for_a_longer_one_with_numbers_alone(tmp_path):
    make_table(tmp_path / "a-quick", rows=("tanh",), seeds=1, epochs=2, scale="quick")
    make_table(tmp_path / "b-quick", rows=("tanh",), seeds=1, epochs=2, scale="quick")  # the same once more
    empty = [number("tanh", "cosine, relu", 25.0, [])]
    write(tmp_path / "a-paper" / "table.json", table_tree("synthetic-table", empty))
    write(tmp_path / "a-other" / "table.json", table_tree("synthetic-table", empty, scale="of another program"))
    assert not any(section.folded for section in results_page(read_folder(tmp_path)).sections if not section.part)


def test_a_table_whose_cells_are_all_anothers_has_no_picture_of_its_own(tmp_path):
    write(tmp_path / "whole.json", table_tree("whole", three(number("mix", "a", 20.0, [21.0]))))
    write(tmp_path / "part.json", table_tree("part", three()))
    first = results_page(read_folder(tmp_path)).sections[0]
    assert [picture.table for picture in first.charts] == ["whole"]


def test_ticks_of_many_characters_stay_inside(tmp_path):
    values = [99.12, 99.16, 99.2]
    picture = picture_of(tmp_path, [number(f"row {at}", "a", value, [value]) for at, value in enumerate(values)])
    texts = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([\d.]+)</text>', picture.svg)
    assert len(texts) >= 6
    for x, anchor, text in texts:
        room = 8.5 * len(text)  # at 15 px, the largest that the page draws them
        left = float(x) - (room if anchor == "end" else room / 2)
        assert left >= 0
        assert left + room <= 320
