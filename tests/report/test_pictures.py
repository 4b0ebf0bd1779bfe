"""Which pictures the page shows: their order, their colors, and what stays behind a fold."""

import pytest
from report_cases import bench_tree, curves_tree, filters_tree, make_run, number, section_of, table_tree, write

from hyperball.report import Page, Section, render
from hyperball.report.drawing.svg import Picture, Safe
from hyperball.report.page import parted

pytest.importorskip("jinja2")


def test_projections_are_operators_with_colors_of_their_own(tmp_path):
    rows = ("none", "l1 ball", "l2 ball", "linf sphere")
    for row in rows:
        projection = None if row == "none" else f"{row.replace(' ', '_')}(learn=True)"
        place = tmp_path / f"t/{row.replace(' ', '-')}--adaptive/seed-0"
        make_run(place, top1=0.75, model__magnitude=None, model__projection=projection)
    write(tmp_path / "t/table.json", table_tree("t", [number(row, "adaptive", 20.0, [25.0]) for row in rows]))
    section = section_of(tmp_path, table="t")
    lines = section.galleries[0].charts[0].series
    assert [line.operator for line in lines] == ["baseline", "l1_ball", "l2_ball", "linf_sphere"]
    assert len({line.color for line in lines}) == 4
    assert lines[0].color == 0


def test_a_table_draws_its_curves_although_another_of_its_folder_drew_some(tmp_path):
    for row in ("baseline", "tanh"):
        make_run(tmp_path / f"t/{row}--cosine/seed-0", top1=0.75, model__magnitude=None if row == "baseline" else row)
    cells = [number(row, "cosine", 20.0, [25.0]) for row in ("baseline", "tanh")]
    for name, held in (("a-figure", cells[:1]), ("b-table", cells), ("c-again", cells)):
        write(tmp_path / "t" / f"{name}.json", table_tree(name, held))
    drawn = {
        name: [len(chart.series) for chart in section_of(tmp_path, table=name).galleries[0].charts[:1]]
        for name in ("a-figure", "b-table")
    }
    assert drawn == {"a-figure": [1], "b-table": [2]}
    assert section_of(tmp_path, table="c-again").galleries == ()


def test_pictures_of_a_table_are_in_its_order(tmp_path):
    cells = [number(row, "cosine, relu", 20.0, [25.0]) for row in ("tanh", "baseline", "ball")]
    write(tmp_path / "t/table.json", table_tree("t", cells))
    write(tmp_path / "t/pictures/a.json", filters_tree() | {"title": "of no cell"})
    for row in ("ball", "baseline", "tanh"):
        write(tmp_path / f"t/pictures/filters-{row}--cosine-relu.json", filters_tree() | {"title": row})
    (gallery,) = section_of(tmp_path, table="t").galleries
    assert [picture.title for picture in gallery.charts] == ["tanh", "baseline", "ball", "of no cell"]
    assert [picture.operator for picture in gallery.charts] == ["tanh", "baseline", "ball", ""]


def test_a_label_that_says_the_title_again_is_not_shown(tmp_path):
    write(tmp_path / "c.json", curves_tree() | {"title": "Mean length", "y_label": "mean length"})
    (gallery,) = section_of(tmp_path, part="figures").galleries
    assert gallery.charts[0].y_label == ""


def test_every_part_of_a_benchmark_is_among_the_first_pictures_and_aims_come_first(tmp_path):
    tree = bench_tree()
    rows = tree["sections"]["conv"]["rows"]
    without = {"rows": [{**row, "aim": None} for row in rows]}
    tree["sections"] = {"first": without, "second": {"rows": rows}}
    write(tmp_path / "bench/gpu.json", tree)
    charts = section_of(tmp_path, part="benchmarks").charts
    assert [(chart.title.partition(": ")[2], chart.goals) for chart in charts] == [
        ("second", True),
        ("first", False),
        ("second", True),
        ("first", False),
    ]


@pytest.mark.parametrize("count, small, shown", [(6, False, 6), (7, False, 4), (12, True, 12), (0, False, 0)])
def test_of_many_pictures_the_first_are_shown(count, small, shown):
    held = [Picture(str(index), Safe(""), small=small) for index in range(count)]
    first, others = parted(held)
    assert [len(first), len(others)] == [shown, count - shown]
    page = render(Page("t", "", (Section("s", charts=tuple(held)),)))
    assert ("more pictures</summary>" in page) == (shown < count)


@pytest.mark.parametrize("count, size", [(1, "1 filter of 5×5"), (3, "3 filters of 5×5"), (16, "16 filters of 5×5")])
def test_few_filters_are_no_larger_than_many(count, size, tmp_path):
    write(tmp_path / "few.json", filters_tree(count))
    (gallery,) = section_of(tmp_path, part="figures").galleries
    (picture,) = gallery.charts
    assert f'viewBox="0 0 {8 * (5 * 6 + 4)} ' in picture.svg
    assert size in picture.note
