"""The report's page in a real browser: it loads, asks for nothing, and can be filtered, sorted, hovered and printed.

One long file, as its tests share a browser and a page, whose making takes longer than most of them.
"""

import json
import os
import re
import shutil

import pytest
from report_cases import (
    EVIL,
    ROWS,
    claims_tree,
    make_results,
    make_robust,
    make_run,
    make_table,
    number,
    page_of,
    table_tree,
    write,
)

from hyperball.experiments.claims import VERDICTS

pytest.importorskip("jinja2")
api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=f"no browser: none of {', '.join(NAMES)} is on the path")
TABLE = "section[data-table='synthetic-table'][data-scale='paper']"


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text(page_of(make_results(folder / "results")), encoding="utf-8")
    return (folder / "page.html").as_uri()


@pytest.fixture
def visit(browser):
    """Open pages, each watched: an error, a message on the console or a request beyond the page fails the test."""
    contexts, troubles = [], []

    def open_page(uri, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def answer(route):
            if route.request.url == uri:
                return route.continue_()
            troubles.append(f"asked for {route.request.url}")
            return route.abort()

        page.route(lambda url: not url.startswith("data:"), answer)
        page.goto(uri)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def visible_rows(page, table):
    return page.locator(f"{table} .scroll").first.locator("tbody tr:visible")


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
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"))
    page = visit((tmp_path / "page.html").as_uri())
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


def test_the_mark_of_the_best_number_makes_no_table_wider(visit, tmp_path):
    columns = ("clean", *(f"clean, {share} %" for share in range(5, 60, 5)))
    numbers = [number(row, column, 80.0, [70.0 + at]) for at, row in enumerate("ab") for column in columns]
    write(tmp_path / "in" / "table.json", table_tree("t", numbers, "top1"))
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"))
    page = visit((tmp_path / "page.html").as_uri(), viewport={"width": 1400, "height": 900})
    scroll = page.locator("section[data-table=t] .scroll").first
    assert scroll.locator("td.best").count() == 12
    assert scroll.evaluate("scroll => scroll.scrollWidth - scroll.clientWidth") == 0


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


def test_the_keyboard_is_seen_on_a_head(visit, address):
    page = visit(address)
    page.locator(f"{TABLE} .scroll").first.focus()
    page.keyboard.press("Tab")
    held = page.evaluate(
        "() => { const at = document.activeElement, style = getComputedStyle(at);"
        " return [at.parentNode.tagName, style.outlineStyle, style.outlineWidth, style.outlineOffset]; }"
    )
    assert held == ["TH", "solid", "2px", "-2px"]  # inside the head, where nothing cuts it off


def test_a_table_that_goes_on_says_so_until_its_end_is_seen(visit, address):
    page = visit(address, viewport={"width": 390, "height": 844})
    frame = page.locator(f"{TABLE} .frame").first
    told = "frame => getComputedStyle(frame, '::before').content"
    page.wait_for_function("frame => frame.matches('.goes-on')", arg=frame.element_handle())
    assert frame.evaluate(told) == '"more columns →"'
    frame.locator(".scroll").evaluate("scroll => { scroll.scrollLeft = scroll.scrollWidth; }")
    page.wait_for_function("frame => !frame.matches('.goes-on')", arg=frame.element_handle())
    assert frame.evaluate(told) == "none"
    page.set_viewport_size({"width": 1400, "height": 844})
    frame.locator(".scroll").evaluate("scroll => { scroll.scrollLeft = 0; }")
    wide = "frame => innerWidth === 1400 && !frame.matches('.goes-on')"
    page.wait_for_function(wide, arg=frame.element_handle())


@pytest.mark.parametrize("width, names", [(390, 0), (1400, 4)])
def test_the_first_table_leaves_out_names_where_there_is_little_room(width, names, visit, address):
    page = visit(address, viewport={"width": width, "height": 844})
    glance = page.locator("section[data-part=overview] table")
    assert glance.locator("td:nth-child(2):visible").count() == names
    assert glance.locator("td:nth-child(3):visible").count() == 4


def test_a_wide_table_of_attacks_fits_a_wide_screen(visit, tmp_path):
    names = ("fgsm", "bim", "transfer fgsm", "transfer bim", "pgd-50x5", "auto on all images")
    make_robust(tmp_path / "in", rows=("baseline", "tanh"), seeds=3)
    for path in (tmp_path / "in").glob("*/*/robustness.json"):
        tree = json.loads(path.read_text())
        share = 0.4 if path.parent.name == "seed-2" else 0.01
        tree["attacks"] = [{**tree["attacks"][0], "name": name, "accuracy": share} for name in names]
        write(path, tree)
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"))
    page = visit((tmp_path / "page.html").as_uri(), viewport={"width": 1400, "height": 900})
    scroll = page.locator("section[data-part=robustness] .scroll").first
    assert scroll.locator("th").count() == 11
    assert "{1.0, 1.0, 40.0}" in scroll.inner_text()
    assert scroll.evaluate("scroll => scroll.scrollWidth - scroll.clientWidth") <= 1


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


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def luminance(color):
    return sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def contrast(*colors):
    """(L1 + 0.05) / (L2 + 0.05) of the relative luminances of two colors, the lighter first, as in WCAG."""

    def relative(color):
        shares = [int(part) / 255 for part in re.findall(r"\d+", color)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(relative, colors))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme, bright", [("light", True), ("dark", False)])
def test_the_page_follows_the_system_until_a_theme_is_chosen(scheme, bright, visit, address):
    page = visit(address, color_scheme=scheme)
    assert (luminance(background(page)) > 128) is bright
    button = page.locator("[data-theme-button]")
    seen = {}
    for _ in range(3):
        button.click()
        seen[button.inner_text()] = luminance(background(page)) > 128
    assert seen == {"Theme: light": True, "Theme: dark": False, "Theme: system": bright}


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_no_width_needs_scrolling_sideways(width, visit, address):
    page = visit(address, viewport={"width": width, "height": 844})
    for part in page.locator("details").all():
        part.evaluate("part => { part.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg.plot").first.bounding_box()["width"] <= width


def test_a_page_on_paper_has_no_controls_and_no_folds(visit, address):
    page = visit(address, color_scheme="dark")
    page.emulate_media(media="print")
    for hidden in (".filter", ".toc", ".theme"):
        assert page.locator(hidden).first.is_hidden()
    assert luminance(background(page)) > 250
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("details.pictures > summary:visible").count() == 0
    assert len(page.pdf()) > 50_000
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0


def test_no_table_makes_a_page_of_paper_shrink(visit, address):
    page = visit(address, viewport={"width": 718, "height": 1050})
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    too_wide = "parts => parts.filter((part) => part.scrollWidth > part.clientWidth + 1).length"
    assert page.locator(".scroll").evaluate_all(too_wide) == 0
    rows_of_a_word = """words => words.filter((word) => !word.textContent.trim().includes(" ")).map((word) => {
      const text = document.createRange();
      text.selectNodeContents(word);
      return new Set([...text.getClientRects()].map((box) => box.top)).size;
    })"""
    words = page.locator("section[data-part=overview]").locator("th button, td:nth-child(3) span")
    assert set(words.evaluate_all(rows_of_a_word)) == {1}
    number = page.locator(f"{TABLE} td:not(.text) span").first
    assert number.evaluate("span => getComputedStyle(span).whiteSpace") == "nowrap"


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


def test_times_are_sorted_by_seconds(visit, tmp_path):
    for name, seconds in (("a", 7300.0), ("b", 130.0), ("c", 30.0)):
        place = make_run(tmp_path / "in" / name, seed=ord(name))
        tree = json.loads((place / "record.json").read_text())
        write(place / "record.json", tree | {"timing": {"seconds": seconds}})
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"))
    page = visit((tmp_path / "page.html").as_uri())
    table = page.locator("section[data-title='Every run'] table")
    table.locator("th", has_text="time").locator("button").click()
    names = table.locator("tbody tr").evaluate_all("rows => rows.map((row) => row.cells[0].innerText)")
    assert names == ["c", "b", "a"]


def test_hostile_texts_are_only_shown(visit, tmp_path):
    make_run(tmp_path / "in" / "run", data__name=EVIL, model__magnitude=EVIL)
    write(tmp_path / "in" / "table.json", table_tree(EVIL, [number(EVIL, "x", 1.0, [2.0], doubts=[EVIL])]))
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in", EVIL))
    page = visit((tmp_path / "page.html").as_uri())
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    assert page.title() == EVIL
    assert page.locator("img").count() == 0
    page.locator("td[data-tip]").first.hover()
    page.fill("[name=text]", "<script>")
    assert page.locator("main > section:visible").count() > 0


def test_a_page_without_records_and_one_with_a_thousand_rows_work(visit, tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none.html").write_text(page_of(tmp_path / "none"))
    assert "No record was found" in visit((tmp_path / "none.html").as_uri()).locator(".lead").inner_text()
    numbers = [number(f"row {index}", "x", 30.0, [float(index)]) for index in range(1000)]
    write(tmp_path / "many" / "table.json", table_tree("many", numbers))
    (tmp_path / "many.html").write_text(page_of(tmp_path / "many"))
    page = visit((tmp_path / "many.html").as_uri())
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
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"), encoding="utf-8")
    page = visit((tmp_path / "page.html").as_uri(), viewport={"width": 1400, "height": 900})
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_can_be_read_in_every_theme(verdict, scheme, visit, tmp_path):
    tree = claims_tree("paper")
    tree["claims"][0]["verdict"] = verdict
    write(tmp_path / "in/claims.json", tree)
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"), encoding="utf-8")
    page = visit((tmp_path / "page.html").as_uri(), color_scheme=scheme)
    mark = page.locator(".statements .verdict b")
    assert mark.inner_text().endswith(verdict)
    colors = mark.evaluate("part => [getComputedStyle(part).color, getComputedStyle(part).backgroundColor]")
    assert contrast(*colors) >= 4.5


def test_every_number_can_be_read_whatever_its_verdict(visit, tmp_path):
    ours = {"better": 20.0, "near": 26.0, "worse": 30.0}
    tree = table_tree("t", [number(row, column, 25.0, [value]) for row, value in ours.items() for column in "ab"])
    write(tmp_path / "in/table.json", tree)
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"), encoding="utf-8")
    shown = "parts => parts.every((part) => getComputedStyle(part).opacity === '1')"
    for scheme in ("light", "dark"):
        page = visit((tmp_path / "page.html").as_uri(), color_scheme=scheme)
        for verdict in ours:
            cells = page.locator(f"section[data-table=t] td.{verdict}")
            assert cells.count() == 4  # two in the short table, two in the long one
            assert cells.evaluate_all(shown)
            assert cells.locator("span, small").evaluate_all(shown)


def test_the_contents_lead_to_the_scales_that_a_filter_leaves(visit, tmp_path):
    for scale in ("paper", "quick"):
        make_table(tmp_path / f"in/{scale}", rows=("baseline", "tanh"), seeds=1, epochs=2, scale=scale)
    (tmp_path / "page.html").write_text(page_of(tmp_path / "in"), encoding="utf-8")
    page = visit((tmp_path / "page.html").as_uri(), viewport={"width": 1400, "height": 900})
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


def tip_of(page):
    return page.locator(".tip").inner_text()
