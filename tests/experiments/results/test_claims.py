"""What papers say and what was found: the file of claims, its table in Markdown, its place on the page."""

import json
import math
import re

import pytest
from places import ROOT
from report_cases import EVIL, make_table, page_of, parsed, section_of, write

from hyperball.experiments.claims import FILE, VERDICTS, Evidence, read_claims, read_words
from hyperball.experiments.layout import layout
from hyperball.experiments.results import markdown
from hyperball.experiments.results.evidence import numbers_of, outdated, words
from hyperball.experiments.scales import SCALES
from hyperball.experiments.tables import TABLES
from hyperball.report import read_folder
from hyperball.report.results import results_page

PLACE = {"rows": ["tanh"], "columns": ["cosine"]}
KEPT = read_claims(json.loads((ROOT / "results" / FILE).read_text(encoding="utf-8")))


def claim(**changes):
    made = {
        "claim": "tanh wins", "verdict": "holds", "found": "it does", "table": "synthetic-table", "scale": "paper",
    }  # fmt: skip
    return {name: value for name, value in {**made, **changes}.items() if value is not None}


def claims(*entries):
    return {"kind": "claims", "claims": list(entries)}


@pytest.mark.parametrize(
    "tree, said",
    [
        ({"kind": "claims"}, "`claims` must be a list"),
        ({"claims": []}, 'it must be an object whose `kind` is "claims"'),
        ([], 'it must be an object whose `kind` is "claims"'),
        (None, 'it must be an object whose `kind` is "claims"'),
        (claims(claim(found="a \ud800 b")), "claim 1: `found` must be a text of printable characters"),
        (claims(claim(see=["a", "javascript:alert(1)"])), "claim 1: `see` must link to a place, a file or http(s)"),
        (claims(claim(see=["a", "#b) [c](d"])), "claim 1: `see` must link to a place"),
        (claims(3), "claim 1 must be an object"),
        (claims(claim(), claim(found=None)), "claim 2 has no `found`"),
        (claims(claim(claim=" \n")), "claim 1 has no `claim`"),
        (claims(claim(found=7)), "claim 1: `found` must be a text"),
        (claims(claim(found="x" * 1001)), "claim 1: `found` must be a text of at most 1000"),
        (claims(claim(verdict="maybe")), "`verdict` must be one of holds, in part, does not hold, not decided"),
        (claims(claim(verdict="maybe")), "got 'maybe'"),
        (claims(claim(verdit="holds")), "an unknown field 'verdit'"),
        (claims(claim(see="table 2")), "`see` must be a text and what it links to"),
        (claims(claim(see=[])), "`see` must be a text and what it links to"),
        (claims(claim(see=["table 2", 3])), "`see` must be a text"),
        (claims(claim(paper=3)), "claim 1: `paper` must be a text"),
        ({**claims(claim()), "words": ["c"]}, "`words` must be a text"),
        (claims(claim(numbers=[3])), "claim 1: `numbers` must map texts of `found`"),
        (claims(claim(numbers={"3.0": PLACE})), "claim 1: `numbers` has '3.0', which `found` does not say"),
        (claims(claim(numbers={"it": {"rows": ["tanh"]}})), "'it' must be an object of `rows`, `columns`"),
        (claims(claim(numbers={"it": {**PLACE, "seed": 0}})), "'it' must be an object of `rows`, `columns`"),
        (claims(claim(numbers={"it": {**PLACE, "rows": "tanh"}})), "'it': `rows` must be a list of texts"),
        (claims(claim(numbers={"it": {**PLACE, "columns": [3]}})), "'it': `columns` must be a text"),
        (claims(claim(numbers={"it": {**PLACE, "of": None}})), "'it': `of` must be a text"),
    ],
)
def test_a_claim_that_is_none_is_refused_by_its_place(tree, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        (read_claims(tree), read_words(tree))


def test_a_broken_file_is_left_out_and_the_page_is_made(tmp_path, capsys):
    pytest.importorskip("jinja2")
    make_table(tmp_path / "table", seeds=1, epochs=2)
    write(tmp_path / FILE, claims(claim(verdict="maybe")))
    assert "got &#39;maybe&#39;" in page_of(tmp_path)
    assert all(section.part != "claims" for section in results_page(read_folder(tmp_path)).sections)
    assert markdown.made("claims", tmp_path) == markdown.NOTHING
    assert "`verdict` must be one of" in capsys.readouterr().err


def test_a_verdict_stands_on_a_length_of_training_and_on_seeds():
    (held,) = read_claims(claims(claim(scale="quarter")))
    assert held.by([3, 1, 3]) == "a quarter of the schedule, 1 to 3 seeds"
    assert held.by([1]) == "a quarter of the schedule, 1 seed"
    assert held.by([]) == "a quarter of the schedule"
    (held,) = read_claims(claims(claim(how="measured")))
    assert held.by([2]) == "measured, 2 seeds"
    (held,) = read_claims(claims(claim(scale="of ours")))
    assert held.by([]) == "of ours"


def test_seeds_are_those_of_the_numbers_that_are_told():
    paper = {**PLACE, "rows": ["ball"], "of": "published"}
    (held,) = read_claims(claims(claim(found="1.0, 2.0", numbers={"1.0": PLACE, "2.0": paper})))
    assert held.stands_on("tanh", "cosine")
    assert not any(held.stands_on(*place) for place in (("ball", "cosine"), ("tanh", "linear")))
    for numbers in (None, {"2.0": paper}):
        (held,) = read_claims(claims(claim(found="1.0, 2.0", numbers=numbers)))
        assert held.stands_on("seg", "linear")


def test_claims_of_one_paper_stand_together(tmp_path):
    pytest.importorskip("jinja2")
    make_table(tmp_path / "table", seeds=1, epochs=2)
    three = [claim(paper="Du", claim="a"), claim(paper="Liu & others", claim="b"), claim(paper="Du", claim="c")]
    write(tmp_path / FILE, {**claims(*three), "words": "c is a\nradius."})
    section = section_of(tmp_path, part="claims")
    assert section.lead.endswith("here: 3 ✓ holds. c is a radius.")
    assert [entry.claim for entry in section.statements] == ["a", "c", "b"]
    text = page_of(tmp_path)
    assert re.findall(r'<div class="statements">\s*<h3>([^<]*)</h3>', text) == ["Du", "Liu &amp; others"]
    assert text.count("<ul") == text.count("</ul>")
    parts = markdown.made("claims", tmp_path).split("\n\n")
    assert [parts[0], parts[1], parts[3]] == ["c is a radius.", "**Du**", "**Liu & others**"]
    assert [part.count("\n") for part in (parts[2], parts[4])] == [3, 2]


def test_texts_are_lines():
    (held,) = read_claims(claims(claim(found="a\n\n| b |\n", see=["a\nb", "#c"])))
    assert (held.found, held.see) == ("a | b |", ("a b", "#c"))


def test_the_page_begins_with_the_claims(tmp_path):
    pytest.importorskip("jinja2")
    make_table(tmp_path / "table", seeds=2, epochs=2)
    write(tmp_path / FILE, claims(claim(), claim(verdict="in part", claim="ball wins"), claim(table="unknown")))
    section = section_of(tmp_path, part="claims")
    assert section.lead == "What the papers say, and what was found here: 2 ✓ holds, 1 ◐ in part."
    assert [entry.by for entry in section.statements] == ["whole schedule, 2 seeds"] * 2 + ["whole schedule"]
    text = page_of(tmp_path)
    assert text.index("What holds") < text.index("At a glance")
    place = re.search(r'<section id="([\w-]+)"[^>]*data-table="synthetic-table"[^>]*data-scale="paper"', text)[1]
    assert text.count(f'<a href="#{place}">synthetic-table</a>') == 2
    assert ">unknown · whole schedule<" in text  # a table that is not there is no link


def test_hostile_claims_are_only_shown(tmp_path):
    pytest.importorskip("jinja2")
    make_table(tmp_path / "table", seeds=1, epochs=2)
    before = parsed(page_of(tmp_path)).tags
    hostile = claim(claim=EVIL, found=EVIL, table=EVIL, scale=EVIL, how=EVIL, paper=EVIL, see=[EVIL, "#a"])
    write(tmp_path / FILE, claims(hostile))
    after = parsed(page_of(tmp_path)).tags
    for tag in ("script", "img"):
        assert after.count(tag) == before.count(tag)
    text = markdown.made("claims", tmp_path)
    assert "<" not in text
    assert "&lt;" in text


@pytest.mark.parametrize("evil", ["<!-- /results -->", "<!-- results: summary -->"])
def test_a_claim_ends_no_marked_part(tmp_path, evil):
    write(tmp_path / FILE, claims(claim(found=f"a {evil} b")))
    once = markdown.fill("<!-- results: claims -->\n<!-- /results -->\n", tmp_path)
    assert markdown.fill(once, tmp_path) == once


@pytest.mark.parametrize("content", ["[]", "3", "null", '"x"', "{", "[" * 100_000])
def test_a_file_that_is_no_object_is_left_out_of_documents(tmp_path, content, capsys):
    (tmp_path / FILE).write_text(content)
    assert markdown.made("claims", tmp_path) == markdown.NOTHING
    assert f"left out {tmp_path / FILE}" in capsys.readouterr().err


def test_the_table_in_markdown_links_each_claim(tmp_path):
    found = claim(see=["table 2", "#table-2"], table="dcnet-table2", found="yes | no")
    write(tmp_path / FILE, claims(found, claim(how="measured", table="nothing")))
    assert markdown.made("claims", tmp_path).splitlines()[2:] == [
        "| tanh wins ([table 2](#table-2)) | **holds** | yes / no | whole schedule |",
        "| tanh wins | **holds** | it does | measured |",
    ]
    assert markdown.made("claims", tmp_path / "nowhere") == markdown.NOTHING


def lines(**numbers):
    """A kept table of one column "cosine", a row a number."""
    return {"numbers": [{"row": row, "column": "cosine", "mean": mean} for row, mean in numbers.items()]}


@pytest.mark.parametrize(
    "kept, said",
    [
        (lines(tanh=30.04, ball=31.96, seg=99), None),
        (lines(tanh=31.96, ball=30.04), None),
        (lines(tanh=30.04, ball=32.06), "it says '30.0 to 32.0', {} has '30.0 to 32.1'"),
        (lines(tanh=30.04, ball=None), "it says '30.0 to 32.0', {} has '30.0'"),
        (lines(tanh=math.nan, seg=30.0), "it says '30.0 to 32.0', {} has no such number"),
        ({"numbers": [3, {}]}, "it says '30.0 to 32.0', {} has no such number"),
        ({"numbers": None}, "it says '30.0 to 32.0', {} has no such number"),
        (None, "its numbers cannot be looked up: "),
    ],
)
def test_a_claim_that_says_otherwise_than_the_kept_table_is_told(tmp_path, capsys, kept, said):
    path = tmp_path / "dcnet-table2-paper" / "table.json"
    numbers = {"30.0 to 32.0": {"rows": ["tanh", "ball"], "columns": ["cosine"]}}
    tree = claims(claim(table="dcnet-table2", found="30.0 to 32.0 % error", numbers=numbers))
    write(tmp_path / FILE, tree)
    if kept:
        write(path, kept)
    told = outdated(read_claims(tree)[0], tmp_path)
    assert len(told) == (said is not None)
    if said:
        assert told[0].startswith(said.format(path))
    assert "30.0 to 32.0 % error" in markdown.made("claims", tmp_path)
    assert (f"{tmp_path / FILE}: claim 1 must be read anew: " in capsys.readouterr().err) == bool(said)


@pytest.mark.parametrize(
    "evidence, told",
    [
        (Evidence(("tanh",), ("cosine",)), "30.5"),
        (Evidence(("tanh",), ("cosine",), "published"), "31.0"),
        (Evidence(("tanh",), ("cosine",), "values"), "30.5"),  # a list is its mean
        (Evidence(("tanh", "seg"), ("cosine", "linear")), "30.5"),  # the same number twice is told once
        (Evidence(("seg",), ("cosine",), "published"), ""),  # a word is no number
    ],
)
def test_what_of_a_table_is_told(evidence, told):
    held = [
        {"row": "tanh", "column": "cosine", "mean": 30.5, "values": [30, 31], "published": 31},
        {"row": "seg", "column": "linear", "mean": 30.51},
        {"row": "seg", "column": "cosine", "mean": None, "published": "N/C"},
    ]
    assert words(numbers_of(evidence, held)) == told


@pytest.mark.parametrize(
    "cells, rows, columns",
    [
        ([("a", "x", ""), ("b", "x", ""), ("a", "y", "")], ("a", "b"), ("x", "y")),
        ([("a", "x", ""), ("b", "x", "")], None, None),  # one column is a list
        ([("a", "x", ""), ("a", "y", "")], None, None),  # and so is one row
        ([("a", "x", ""), ("b", "x", ""), ("a", "y", ""), ("a", "y", "")], None, None),  # two numbers, one place
        ([(row, f"{at}", "") for row in "ab" for at in range(7)], None, None),  # too wide
        ([(row, "x", condition) for row in "ab" for condition in ("", "5 %")], ("a", "b"), ("test set", "5 %")),
        (
            [("a", column, condition) for column in "xy" for condition in ("", "5 %")],
            ("a, x", "a, y"), ("test set", "5 %"),
        ),
    ],
)  # fmt: skip
def test_a_table_is_laid_out_as_printed_where_it_fits(cells, rows, columns):
    laid = layout(cells)
    assert (laid and laid.rows, laid and laid.columns) == (rows, columns)
    if laid:
        assert sorted(laid.places.values()) == list(range(len(cells)))


# The claims that are kept in this repository.


def test_kept_claims_are_of_known_tables():
    assert {entry.table for entry in KEPT} <= set(TABLES)
    assert {entry.scale for entry in KEPT} <= set(SCALES)
    assert {entry.verdict for entry in KEPT} == set(VERDICTS)
    assert len({entry.claim for entry in KEPT}) == len(KEPT)


def anchors(path):
    """What a link to a heading of a Markdown file ends with."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.claim[:40])
def test_kept_claims_link_to_what_says_more(entry):
    name, _, anchor = entry.see[1].partition("#")
    path = ROOT / "docs" / (name or "reproduction.md")
    assert path.exists()
    assert not anchor or anchor in anchors(path)


@pytest.mark.parametrize("entry", KEPT, ids=lambda entry: entry.claim[:40])
def test_numbers_of_kept_claims_are_those_of_the_records(entry):
    """Those with one decimal; others, such as lengths and times, are rounded further or read from pictures."""
    assert outdated(entry, ROOT / "results") == []
    rest = entry.found
    for told in sorted(entry.numbers, key=len, reverse=True):
        rest = rest.replace(told, "")
    assert re.findall(r"(?<![\d.])\d+\.\d(?!\d)", rest) == []


def test_the_summary_begins_with_how_many_claims_hold(tmp_path):
    assert markdown.verdicts(tmp_path) == ""
    verdicts = ["in part", "holds", "in part", "not decided"]
    write(tmp_path / FILE, claims(*(claim(verdict=verdict) for verdict in verdicts)))
    assert markdown.verdicts(tmp_path) == "Claims of the papers, 4: holds 1, in part 2, not decided 1."
