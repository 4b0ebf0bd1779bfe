"""Themes, widths and paper: how the report's page looks in a real browser."""

import json
import re

import pytest
from browser_cases import TABLE, visit_records
from report_cases import claims_tree, make_robust, number, table_tree, write

from hyperball.experiments.claims import VERDICTS


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_can_be_read_in_every_theme(verdict, scheme, visit, tmp_path):
    tree = claims_tree("paper")
    tree["claims"][0]["verdict"] = verdict
    write(tmp_path / "in/claims.json", tree)
    page = visit_records(visit, tmp_path, color_scheme=scheme)
    mark = page.locator(".statements .verdict b")
    assert mark.inner_text().endswith(verdict)
    colors = mark.evaluate("part => [getComputedStyle(part).color, getComputedStyle(part).backgroundColor]")
    assert contrast(*colors) >= 4.5


def test_every_number_can_be_read_whatever_its_verdict(visit, tmp_path):
    ours = {"better": 20.0, "near": 26.0, "worse": 30.0}
    tree = table_tree("t", [number(row, column, 25.0, [value]) for row, value in ours.items() for column in "ab"])
    write(tmp_path / "in/table.json", tree)
    shown = "parts => parts.every((part) => getComputedStyle(part).opacity === '1')"
    for scheme in ("light", "dark"):
        page = visit_records(visit, tmp_path, color_scheme=scheme)
        for verdict in ours:
            cells = page.locator(f"section[data-table=t] td.{verdict}")
            assert cells.count() == 4  # two in the short table, two in the long one
            assert cells.evaluate_all(shown)
            assert cells.locator("span, small").evaluate_all(shown)


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_no_width_needs_scrolling_sideways(width, visit, address):
    page = visit(address, viewport={"width": width, "height": 844})
    for part in page.locator("details").all():
        part.evaluate("part => { part.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg.plot").first.bounding_box()["width"] <= width


def test_the_mark_of_the_best_number_makes_no_table_wider(visit, tmp_path):
    columns = ("clean", *(f"clean, {share} %" for share in range(5, 60, 5)))
    numbers = [number(row, column, 80.0, [70.0 + at]) for at, row in enumerate("ab") for column in columns]
    write(tmp_path / "in" / "table.json", table_tree("t", numbers, "top1"))
    page = visit_records(visit, tmp_path, viewport={"width": 1400, "height": 900})
    scroll = page.locator("section[data-table=t] .scroll").first
    assert scroll.locator("td.best").count() == 12
    assert scroll.evaluate("scroll => scroll.scrollWidth - scroll.clientWidth") == 0


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
    page = visit_records(visit, tmp_path, viewport={"width": 1400, "height": 900})
    scroll = page.locator("section[data-part=robustness] .scroll").first
    assert scroll.locator("th").count() == 11
    assert "{1.0, 1.0, 40.0}" in scroll.inner_text()
    assert scroll.evaluate("scroll => scroll.scrollWidth - scroll.clientWidth") <= 1


def test_a_page_on_paper_has_no_controls_and_no_folds(visit, address):
    page = visit(address, color_scheme="dark")
    page.emulate_media(media="print")
    for hidden in (".filter", ".toc", ".theme"):
        assert page.locator(hidden).first.is_hidden()
    assert luminance(background(page)) > 250
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    closed = page.locator("details:not([open])")
    whole = page.locator("section > details:first-child:not([open])")
    assert whole.count() > 0  # shorter scales and the list of every run
    assert closed.count() == whole.count() + whole.locator("details:not([open])").count()
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
