"""The filter and the order of rows on the report's page, in a real browser."""

import json

import pytest
from browser_cases import TABLE, visible_rows, visit_records
from report_cases import make_run, make_table, number, table_tree, write


def test_the_text_filter_keeps_what_matches(visit, address):
    page = visit(address)
    page.fill("[name=text]", "sphere")
    rows = visible_rows(page, TABLE)
    assert rows.count() == 1
    assert "sphere" in rows.first.inner_text()
    assert page.locator("main > section:visible").count() < page.locator("main > section").count()
    assert " of " in page.locator("output").inner_text()
    page.fill("[name=text]", "no such words anywhere")
    assert page.locator(".nothing").is_visible()
    page.click("form button[type=reset]")
    page.wait_for_function("document.querySelector('.nothing').hidden")
    assert visible_rows(page, TABLE).count() == 8


def test_tables_operators_and_scales_can_be_chosen(visit, address):
    page = visit(address)
    page.select_option("[name=operator]", "tanh")
    assert visible_rows(page, TABLE).count() == 1
    faint = page.locator(f"{TABLE} svg.plot g.dim")
    assert faint.count() > 0
    assert set(faint.evaluate_all("groups => groups.map((group) => group.dataset.operator)")).isdisjoint({"tanh"})
    page.select_option("[name=operator]", "")
    page.select_option("[name=table]", "synthetic-table")
    page.select_option("[name=scale]", "quick")
    shown = page.locator("main > section:visible:not([data-part=claims])")
    assert shown.count() == 1
    assert shown.first.get_attribute("data-scale") == "quick"
    assert page.locator(".toc li:visible").count() == 1 + 1
    page.select_option("[name=table]", "")
    scales = shown.evaluate_all("parts => parts.map((part) => part.dataset.scale)")
    assert set(scales) == {"quick"}  # neither benchmarks nor the geometry are of a scale


def test_pictures_of_other_operators_go_away(visit, address):
    page = visit(address)
    page.select_option("[name=operator]", "tanh")
    geometry = page.locator("section[data-part=geometry]")
    assert geometry.locator("figure.small:visible figcaption").all_inner_texts() == [
        "tanh\nh(n) = α·tanh(n/ρ)", "tanh · cosine", "tanh · square cosine", "tanh · linear",
    ]  # fmt: skip
    radii = page.locator(f"{TABLE} .gallery", has_text="Learned radii").locator("figure")
    assert radii.count() > 1
    assert [text.startswith("Radii: tanh") for text in radii.locator("visible=true").all_inner_texts()] == [True]


def test_pictures_behind_a_fold_are_found_by_the_filter_and_put_back(visit, address):
    page = visit(address)
    gallery = page.locator(f"{TABLE} .gallery", has_text="Convergence")
    assert gallery.locator("figure:visible").count() == 4
    fold = gallery.locator("details.pictures")
    assert fold.locator("summary").inner_text().endswith("more pictures")
    page.fill("[name=text]", '"training loss: cosine, no relu"')
    assert gallery.locator("figure:visible").count() == 1
    assert fold.get_attribute("open") is not None
    page.fill("[name=text]", "")
    assert fold.get_attribute("open") is None
    page.fill("[name=text]", '"cosine, no relu"')  # the first pictures have it too
    assert gallery.locator("figure:visible").count() > 0
    assert fold.get_attribute("open") is None
    page.fill("[name=text]", "tanh")
    runs = page.locator("section[data-part=runs] > details")
    assert runs.get_attribute("open") is not None
    page.click("form button[type=reset]")
    page.wait_for_function("document.querySelector('section[data-part=runs] > details').open === false")


def test_all_words_must_match_in_a_row_or_the_heads_of_its_table(visit, address):
    page = visit(address)
    attacks = "section[data-table='synthetic-attacks']"
    page.fill("[name=text]", "FGSM tanh")
    assert visible_rows(page, attacks).evaluate_all("rows => rows.map((row) => row.cells[0].innerText)") == ["tanh"]
    page.fill("[name=text]", "fgsm sphere")
    assert page.locator(f"{attacks} .held:visible").count() == 0
    assert page.locator(f"{attacks} .caption:visible").count() == 0


def test_parts_of_the_robustness_section_belong_to_tables(visit, address):
    page = visit(address)
    page.select_option("[name=table]", "synthetic-attacks")
    shown = page.locator("section[data-part=robustness] .held:visible")
    assert shown.count() == 3  # two of attacks, one of budgets
    assert set(shown.evaluate_all("parts => parts.map((part) => part.dataset.table)")) == {"synthetic-attacks"}


def test_the_contents_lead_to_the_scales_that_a_filter_leaves(visit, tmp_path):
    for scale in ("paper", "quick"):
        make_table(tmp_path / f"in/{scale}", rows=("baseline", "tanh"), seeds=1, epochs=2, scale=scale)
    page = visit_records(visit, tmp_path, viewport={"width": 1400, "height": 900})
    entry = page.locator(".toc li", has=page.locator("a.scale"))
    title, scales = entry.locator("a").first, entry.locator("a.scale")
    quick = page.locator("section[data-scale=quick]")
    assert (entry.count(), scales.all_inner_texts()) == (1, ["paper", "quick"])
    assert title.get_attribute("href") == scales.first.get_attribute("href")
    page.select_option("[name=scale]", "quick")
    assert [link.is_visible() for link in scales.all()] == [False, True]
    assert title.get_attribute("href") == f"#{quick.get_attribute('id')}"
    page.select_option("[name=scale]", "")
    assert [link.is_visible() for link in scales.all()] == [True, True]
    assert title.get_attribute("href") == scales.first.get_attribute("href")
    page.fill("[name=text]", "no such words anywhere")
    assert not entry.is_visible()


def test_a_click_on_a_head_sorts_and_a_second_one_turns_it_round(visit, address):
    page = visit(address)
    page.locator(f"{TABLE} details.more:not(.pictures) summary").click()
    table = page.locator(f"{TABLE} details.more table")
    head = table.locator("th", has_text="ours").first

    def column():
        values = "cells => cells.map((cell) => Number(cell.dataset.value))"
        return table.locator("tbody tr td:nth-child(3)").evaluate_all(values)

    before = column()
    head.locator("button").click()
    assert column() == sorted(before) != before
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    assert column() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"


def test_cells_without_a_number_stay_last_and_a_third_click_brings_back_the_order(visit, tmp_path):
    values = {"a": [30.0], "b": [], "c": [20.0], "d": [25.0]}
    numbers = [number(row, column, 24.0, held) for row, held in values.items() for column in ("x", "y")]
    numbers += [number("e", column, "N/C", [], diverged=["0"]) for column in ("x", "y")]
    numbers += [number("b", "z", 24.0, [9.0])]
    write(tmp_path / "in" / "table.json", table_tree("t", numbers))
    page = visit_records(visit, tmp_path)
    table = page.locator("section[data-table=t] table").first

    def order():
        return "".join(table.locator("tbody td:first-child span").all_inner_texts())

    head = table.locator("th").nth(1).locator("button")
    seen = [order()]
    for _ in range(3):
        head.click()
        seen.append(order())
    assert seen == ["abcde", "cdabe", "adcbe", "abcde"]
    assert table.locator("th[aria-sort]").count() == 0


@pytest.mark.parametrize("width", [390, 1400])
def test_the_whole_head_of_a_column_sorts(width, visit, address):
    page = visit(address, viewport={"width": width, "height": 1000})
    page.locator("section[data-part=robustness] .held").first.scroll_into_view_if_needed()
    heads = page.locator("section[data-part=robustness] table").first.locator("th")
    head = heads.nth(1)  # below words of two lines beside it, so that it has room to spare
    head.evaluate("head => { head.nextElementSibling.firstElementChild.style.paddingTop = '4rem'; }")
    box, inner = head.bounding_box(), head.locator("button").bounding_box()
    assert inner["width"] == pytest.approx(box["width"], abs=1)
    assert inner["height"] == pytest.approx(box["height"], abs=2)
    assert box["height"] >= 40
    for index, (across, down) in enumerate(((2, 3), (box["width"] - 3, 3), (2, box["height"] - 4))):
        page.mouse.click(box["x"] + across, box["y"] + down)
        assert head.get_attribute("aria-sort") == ("ascending", "descending", None)[index]


def test_times_are_sorted_by_seconds(visit, tmp_path):
    for name, seconds in (("a", 7300.0), ("b", 130.0), ("c", 30.0)):
        place = make_run(tmp_path / "in" / name, seed=ord(name))
        tree = json.loads((place / "record.json").read_text())
        write(place / "record.json", tree | {"timing": {"seconds": seconds}})
    page = visit_records(visit, tmp_path)
    table = page.locator("section[data-title='Every run'] table")
    table.locator("th", has_text="time").locator("button").click()
    names = table.locator("tbody tr").evaluate_all("rows => rows.map((row) => row.cells[0].innerText)")
    assert names == ["c", "b", "a"]
