"""The report's page in a real browser: it loads, asks for nothing, and tells what lies behind its numbers."""

import re

import pytest
from browser_cases import TABLE, tip_of, visit_records
from report_cases import EVIL, ROWS, make_run, make_table, number, table_tree, write


def test_the_page_loads_with_its_charts(visit, address):
    page = visit(address)
    assert page.title() == "Results"
    assert page.locator("svg.plot").count() > 15
    assert page.locator("svg.plot g .line").count() > 50
    assert page.locator("svg.plane").count() == 8 + 12 + 1
    assert page.locator(".bar").count() == 8
    box = page.locator("svg.plot").first.bounding_box()
    assert box["width"] > 200
    assert box["height"] > 100
    # Every image that the page carries can be decoded.
    images = "() => Promise.all([...document.querySelectorAll('image')].map((i) => i.decode ? i.decode() : null))"
    page.evaluate(images)


def test_every_entry_of_the_contents_leads_somewhere(visit, address):
    page = visit(address)
    links = page.locator(".toc a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert len(links) > 8
    for link in links:
        assert page.locator(link).count() == 1


@pytest.mark.parametrize("motion, scrolls", [("reduce", "auto"), ("no-preference", "smooth")])
def test_the_page_moves_only_for_those_who_like_it(motion, scrolls, visit, address):
    page = visit(address, reduced_motion=motion)
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == scrolls


def test_the_keyboard_is_seen_on_a_head(visit, address):
    page = visit(address)
    page.locator(f"{TABLE} .scroll").first.focus()
    page.keyboard.press("Tab")
    held = page.evaluate(
        "() => { const at = document.activeElement, style = getComputedStyle(at);"
        " return [at.parentNode.tagName, style.outlineStyle, style.outlineWidth, style.outlineOffset]; }"
    )
    assert held == ["TH", "solid", "2px", "-2px"]  # inside the head, where nothing cuts it off


def test_hovering_over_a_number_tells_its_conditions(visit, address):
    page = visit(address)
    page.locator(f"{TABLE} td[data-tip]").first.hover()
    text = page.locator(".tip").inner_text()
    for part in ("seeds 0, 1, 2", "device cpu", "torch 2.8.0", "commit 0123456789ab", "last iterate", "best epoch"):
        assert part in text


def test_hovering_over_a_line_tells_its_numbers(visit, address):
    page = visit(address)
    plot = page.locator(f"{TABLE} svg.plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.75)
    assert "(step)" in page.locator(".tip").inner_text()
    assert " ± " in page.locator(".tip").inner_text()
    assert plot.locator(".cursor").count() == 1


def test_the_keyboard_reaches_numbers_and_lines(visit, address):
    page = visit(address)
    plot = page.locator(f"{TABLE} svg.plot").first
    plot.focus()
    page.keyboard.press("ArrowRight")
    first = page.locator(".tip").inner_text()
    page.keyboard.press("ArrowRight")
    second = page.locator(".tip").inner_text()
    page.keyboard.press("ArrowDown")
    third = page.locator(".tip").inner_text()
    assert "baseline" in first
    assert len({first, second, third}) == 3
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()
    page.locator(f"{TABLE} .scroll").first.locator("th button").last.focus()
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.tip !== undefined"):
            break
    assert "last iterate" in page.locator(".tip").inner_text()


STANDS_STILL = """new Promise((done) => {
  let last = null, frames = 0;
  const look = () => {
    frames = scrollY === last ? frames + 1 : 0;
    last = scrollY;
    if (frames < 10) requestAnimationFrame(look); else done();
  };
  look();
})"""


def test_every_tap_on_a_phone_shows_the_conditions_of_its_number(visit, address):
    page = visit(address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    rows = page.locator(f"{TABLE} .scroll").first.locator("tbody tr")
    rows.nth(3).scroll_into_view_if_needed()
    page.evaluate(STANDS_STILL)  # scrolling hides what a tap showed
    for index in (0, 1, 2, 0):
        rows.nth(index).locator("td").nth(1).tap()
        page.wait_for_function("row => document.querySelector('.tip').textContent.startsWith(row)", arg=ROWS[index])
        assert page.locator(".tip").is_visible()
    plot = page.locator(f"{TABLE} svg.plot").first
    plot.scroll_into_view_if_needed()
    page.evaluate(STANDS_STILL)  # scrolling hides what a tap showed
    box = plot.bounding_box()
    plot.tap(position={"x": box["width"] * 0.9, "y": box["height"] * 0.7})
    page.wait_for_function("document.querySelector('.tip').textContent.includes('(step)')")


def test_hostile_texts_are_only_shown(visit, tmp_path):
    make_run(tmp_path / "in" / "run", data__name=EVIL, model__magnitude=EVIL)
    write(tmp_path / "in" / "table.json", table_tree(EVIL, [number(EVIL, "x", 1.0, [2.0], doubts=[EVIL])]))
    page = visit_records(visit, tmp_path, EVIL)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    assert page.title() == EVIL
    assert page.locator("img").count() == 0
    page.locator("td[data-tip]").first.hover()
    page.fill("[name=text]", "<script>")
    assert page.locator("main > section:visible").count() > 0


def test_a_page_without_records_and_one_with_a_thousand_rows_work(visit, tmp_path):
    (tmp_path / "in").mkdir()
    assert "No record was found" in visit_records(visit, tmp_path).locator(".lead").inner_text()
    numbers = [number(f"row {index}", "x", 30.0, [float(index)]) for index in range(1000)]
    write(tmp_path / "in" / "table.json", table_tree("many", numbers))
    page = visit_records(visit, tmp_path)
    page.fill("[name=text]", '"row 77"')
    assert page.locator("tbody tr:visible").count() == 11


def test_a_dot_says_which_number_it_is(visit, address):
    page = visit(address)
    plot = page.locator("section[data-part=against] figure[data-table='synthetic-table'] svg.plot")
    plot.scroll_into_view_if_needed()
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert tip_of(page).startswith("baseline, ")
    plot.locator("circle.dot").last.hover(force=True)
    assert re.search(r"^mix, .*\nours [\d.]+ ± [\d.]+, paper [\d.]+, difference [+-][\d.]+, 3 seeds$", tip_of(page))


def test_a_link_of_the_contents_opens_the_section_it_leads_to(visit, tmp_path):
    for scale in ("paper", "quick"):
        make_table(tmp_path / f"in/{scale}", rows=("baseline", "tanh"), seeds=1, epochs=2, scale=scale)
    page = visit_records(visit, tmp_path, viewport={"width": 1400, "height": 900})
    folded = page.locator("section[data-table='synthetic-table'][data-scale=quick] > details:first-child")
    assert "scale: quick" in folded.locator("> summary").inner_text()
    assert not folded.locator("table").first.is_visible()
    table, link = folded.locator("table").first, page.locator(".toc a", has_text="quick")
    link.click()
    table.wait_for(state="visible")
    folded.locator("> summary").click()
    table.wait_for(state="hidden")
    link.click()  # the address is the same as before
    table.wait_for(state="visible")
    assert page.locator("details.more[open]").count() == 0


def test_a_claim_leads_to_its_table_and_is_filtered_with_it(visit, address):
    page = visit(address, viewport={"width": 1400, "height": 900})
    claims = page.locator("section[data-part=claims] .statements li")
    assert claims.count() == 2
    folded = page.locator("section[data-table='synthetic-table'][data-scale=quick]").locator("table").first
    assert not folded.is_visible()
    claims.nth(1).locator("a").click()
    folded.wait_for(state="visible")
    page.select_option("[name=scale]", "quick")
    assert [claim.is_visible() for claim in claims.all()] == [False, True]
    page.select_option("[name=scale]", "")
    page.fill("[name=text]", '"scale paper"')
    assert [claim.is_visible() for claim in claims.all()] == [True, False]
    page.fill("[name=text]", '"no such claim"')
    assert not page.locator("section[data-part=claims]").is_visible()
