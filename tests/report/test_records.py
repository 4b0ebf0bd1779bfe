"""Broken, foreign and hostile files in a results folder: named, left out, escaped, and the page is still made."""

import copy
import json
import os
import random
import re

import pytest
from report_cases import (
    EVIL,
    attack_tree,
    bench_tree,
    curve_tree,
    curves_tree,
    features_tree,
    filters_tree,
    make_pooling,
    make_robust,
    make_run,
    make_table,
    metrics,
    number,
    page_of,
    parsed,
    recipe_of,
    robust_cell_tree,
    table_tree,
    words_of,
    write,
)

from hyperball.cli import main
from hyperball.report import read_folder, read_runs
from hyperball.report.results import results_page
from hyperball.report.tables import group, group_table

pytest.importorskip("jinja2")


BROKEN = {
    "half a record": ("record.json", lambda text: text[: len(text) // 2], "is not whole JSON"),
    "an empty record": ("record.json", lambda text: "", "is not whole JSON"),
    "a record of bytes": ("record.json", lambda text: "\udcff\udcfe", "is not whole JSON"),
    "a foreign record": ("record.json", lambda text: '{"hello": 1}', "`format` must be 1, got null"),
    "a list": ("record.json", lambda text: "[1, 2]", "must hold an object"),
    "a later format": ("record.json", lambda text: text.replace('"format": 1', '"format": 99'), "got 99"),
    "a text for a number": (
        "record.json",
        lambda text: text.replace('"top1": 0.9,', '"top1": "0.9",'),
        "must be a number",
    ),
    "a number that is none": (
        "record.json",
        lambda text: text.replace('"top1": 0.9,', '"top1": NaN,'),
        "must be a number",
    ),
    "a number beyond all measure": (
        "record.json",
        lambda text: text.replace('"top1": 0.9,', f'"top1": {"9" * 400},'),
        "must be a number",
    ),
    "results of another kind": (
        "record.json",
        lambda text: re.sub(r'"results": {.*?}}', '"results": 3', text),
        "object",
    ),
    "brackets without end": ("record.json", lambda text: "[" * 100_000, "is not whole JSON"),
    "deep nesting": (
        "record.json",
        lambda text: text.replace('"notes": []', '"notes": ' + "[" * 200 + "]" * 200),
        "must be nested at most 100 deep",
    ),
    "half a recipe": ("recipe.json", lambda text: text[:30], "is not whole JSON"),
    "a recipe without a model": ("recipe.json", lambda text: '{"data": {}}', "`model` must be an object"),
    "broken conditions": ("conditions.json", lambda text: "{", "is not whole JSON"),
}


@pytest.mark.parametrize("file, damage, reason", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_is_named_and_left_out_and_the_page_is_still_made(file, damage, reason, tmp_path, capsys):
    make_run(tmp_path / "runs" / "good")
    bad = make_run(tmp_path / "runs" / "bad")
    write(bad / "conditions.json", {})
    text = damage((bad / file).read_text())
    (bad / file).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    assert reason in capsys.readouterr().out
    texts = "".join(parsed(page.read_text()).texts)
    assert "bad" in texts
    assert reason in texts
    assert "good" in texts


def numbers_of(**entry):
    """A table of one good number and one that has these fields alone."""
    entries = [number("a", "x", 1.0, [2.0]), {"row": "row", "column": "column", **entry}]
    return json.dumps(table_tree("t", entries))


FOREIGN = {
    "half a file": ('{"kind": "curves", "ser', "is not whole JSON"),
    "a list": ("[]", "must hold an object"),
    "a foreign object": ('{"hello": 1}', "no kind of record"),
    "a table without numbers": ('{"experiment": "t", "numbers": 3}', "`numbers` must be a list"),
    "a table of texts": ('{"experiment": "t", "numbers": ["x"]}', "must be an object"),
    "an attack without a clean accuracy": (
        '{"attacks": [], "clean": {"accuracy": NaN}, "conditions": {}}',
        "`clean.accuracy` must be a number",
    ),
    "a curve of texts": (
        '{"kind": "robustness curve", "values": ["a"], "accuracies": [1]}',
        '`values` must hold numbers, got "a"',
    ),
    "a curve without a finite point": (
        '{"kind": "robustness curve", "values": [0, 1], "accuracies": [NaN, null]}',
        "share no finite numbers",
    ),
    "a curve that is cut": (
        '{"kind": "robustness curve", "values": [0, 1], "accuracies": [1]}',
        "`values` and `accuracies` must be of one length, got 2 and 1",
    ),
    "a number whose values are texts": (numbers_of(values=["a"]), '`values` must hold numbers, got "a"'),
    "a number one of whose values is none": (numbers_of(values=[1.0, None]), "`values` must hold numbers, got null"),
    "a number without values": (numbers_of(), "row, column: `values` must be a list, got null"),
    "a paper's number that is an object": (numbers_of(values=[], published={}), "`published` must be a number, a text"),
    "best epochs that are texts": (numbers_of(values=[1.0], best=["x"]), "`best` must hold numbers"),
    "seeds that are no list": (numbers_of(values=[1.0], seeds="abc"), "`seeds` must be a list"),
    "a row without a name": (numbers_of(values=[1.0], row=None), "`row` must be a text, got null"),
    "a robust cell of texts": ('{"kind": "robust cell", "natural": 1}', "`natural` must be an object"),
    "a robust cell whose sweep is cut": (
        json.dumps({**robust_cell_tree("a", "b", 0), "sweeps": [{"epsilon": [0, 1], "accuracy": [1]}]}),
        "`epsilon` and `accuracy` must be of one length",
    ),
    "a robust cell with half an attack": (
        json.dumps({**robust_cell_tree("a", "b", 0), "attacks": [{"name": "fgsm"}]}),
        "must have `name` and `accuracy`",
    ),
    "an attack without its accuracy": (
        json.dumps({**attack_tree(recipe_of({})), "attacks": [{"attack": "fgsm", "accuracy": "0.4"}]}),
        "must have `attack` and `accuracy`",
    ),
    "features with fewer labels than points": (
        '{"kind": "features2d", "points": [[1, 2], [2, 3]], "labels": [0]}',
        "`points` and `labels` must be of one length, got 2 and 1",
    ),
    "features one of which is none": (
        '{"kind": "features2d", "points": [[1, 2], null], "labels": [0, 1]}',
        "`points` must be pairs of numbers, one a label, got null",
    ),
    "curves that are cut": (
        '{"kind": "curves", "series": [{"x": [0, 1, 2], "y": [1, 2]}]}',
        "`x` and `y` must be of one length, got 3 and 2",
    ),
    "a band that is cut": (
        '{"kind": "curves", "series": [{"x": [0, 1], "y": [1, 2], "band": [1]}]}',
        "`y` and `band` must be of one length",
    ),
    "features of one dimension": ('{"kind": "features2d", "points": [[1]], "labels": [0]}', "pairs of numbers"),
    "filters of two shapes": ('{"kind": "filters", "filters": [[[[1]]], [[[1, 2]]]]}', "of one shape"),
    "filters of texts": ('{"kind": "filters", "filters": [[[["x"]]]]}', "of one shape"),
    "curves without numbers": ('{"kind": "curves", "series": [{"x": [NaN], "y": [1]}]}', "finite numbers"),
    "curves of texts": ('{"kind": "curves", "series": ["x"]}', "must be an object"),
    "a benchmark without rows": ('{"what": "x", "rows": [1]}', "a list of rows"),
    "a kind that is no text": ('{"kind": ["curves"]}', "no kind of record"),
}


@pytest.mark.parametrize("content, reason", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_named_and_left_out(content, reason, tmp_path):
    (tmp_path / "odd.json").write_text(content)
    make_run(tmp_path / "good")
    found = read_folder(tmp_path)
    (left_out,) = found.left_out
    assert left_out.path == "odd.json"
    assert reason in left_out.reason
    assert "odd.json" in words_of(tmp_path)


def test_metrics_that_are_torn_or_foreign_are_passed_over(tmp_path):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"kind": "evaluation", "step": "x"}\n{"kind": [], "step": 1}\n')
        file.write(b'{"kind": "evaluation", "st')
    (run,) = read_runs(tmp_path).runs
    assert [point.step for point in run.evaluations] == [10, 20]
    (folder / "metrics.jsonl").unlink()
    (run,) = read_runs(tmp_path).runs
    assert run.evaluations == ()
    page_of(tmp_path)


def test_every_text_from_a_file_is_escaped(tmp_path):
    folder = make_run(tmp_path / "evil", data__name=EVIL, model__magnitude=EVIL, model__name=EVIL, optimizer__lr=EVIL)
    tree = json.loads((folder / "record.json").read_text())
    tree["notes"] = [EVIL]
    tree["environment"] = {"device": EVIL, "versions": {"torch": EVIL}}
    (folder / "record.json").write_text(json.dumps(tree))
    (folder / "metrics.jsonl").write_text(metrics().replace('"conv"', json.dumps(EVIL)))
    make_run(tmp_path / "other", data__name=EVIL)
    write(tmp_path / "<b>bad" / "record.json", {"format": EVIL})
    numbers = [number(EVIL, EVIL, EVIL, [1.0], doubts=[EVIL], **{EVIL: EVIL}), number("a", "b", 1.0, [2.0])]
    table = table_tree(EVIL, numbers, EVIL, EVIL, source=EVIL) | {"title": EVIL, "protocol": EVIL, "notes": [EVIL]}
    write(tmp_path / "table.json", table)
    write(tmp_path / "attack.json", attack_tree(recipe_of({"model__magnitude": EVIL}), doubts=[EVIL]))
    write(tmp_path / "robust.json", robust_cell_tree(EVIL, EVIL, 0) | {"doubts": [EVIL]})
    write(tmp_path / "curve.json", curve_tree(1.0) | {"over": EVIL, "doubts": [EVIL], "conditions": {"attack": EVIL}})
    write(tmp_path / "features.json", features_tree(4) | {"title": EVIL, "labels": [EVIL] * 4})
    write(tmp_path / "filters.json", filters_tree(2) | {"title": EVIL})
    series = [{"name": EVIL, "x": [0, 1], "y": [0, 1]}]
    write(tmp_path / "c.json", curves_tree() | {"title": EVIL, "x_label": EVIL, "y_label": EVIL, "series": series})
    write(tmp_path / "b.json", {"what": EVIL, EVIL: [{EVIL: EVIL, "operator": EVIL, "ratio": 1.0}], "device": EVIL})
    write(
        tmp_path / "b2.json",
        {**bench_tree(), "sections": {EVIL: {"rows": [{"case": EVIL, "ratio": 2}], "notes": [EVIL]}}},
    )
    page = parsed(page_of(tmp_path, EVIL))
    assert page.tags.count("script") == 1
    assert not {"img", "b"} & set(page.tags) - {"b"}
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert "".join(page.texts).count(EVIL) > 30


def test_strange_characters_do_not_stop_the_page(tmp_path, capsys):
    make_run(tmp_path / "in" / "a", data__name="lone \ud800 surrogate \x00 \x1b[31m", model__name="\u202e" + "x" * 5000)
    os.mkdir(os.fsencode(tmp_path / "in") + b"/bad-\xff")
    (tmp_path / "in" / os.fsdecode(b"bad-\xff") / "record.json").write_text("{")
    assert main(["report", str(tmp_path / "in"), "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "\x00" not in text
    assert "x" * 500 not in text
    assert "left out: bad-?" in capsys.readouterr().out


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "page.html")]) == 0
    assert "0 runs" in capsys.readouterr().out
    assert "No record was found" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("name, said", [("nowhere", "nowhere is no folder"), ("", "'' is no folder")])
def test_a_missing_folder_is_a_mistake(name, said, tmp_path, capsys):
    folder = str(tmp_path / name) if name else ""
    assert main(["report", folder, "-o", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "page.html").exists()


def test_a_folder_is_no_page(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


ODD = (None, [], {}, "x", float("nan"), 1e308, -1, True, 0, "<b>", [[]], [None], {"a": 1}, 1e-300, 10**200)


def places(tree, path=()):
    """The paths of a tree's values, a few of every list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:5]) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged(tree, draw):
    """The tree with an odd value in three places."""
    tree = json.loads(json.dumps(tree))
    for _ in range(3):
        *parents, last = draw.choice(list(places(tree)) or [("a",)])
        place = tree
        for key in parents:
            place = place[key]
        place[last] = copy.deepcopy(draw.choice(ODD))
    return tree


@pytest.mark.parametrize("seed", range(12))
def test_no_damage_to_a_value_stops_the_page(seed, tmp_path):
    draw = random.Random(seed)
    make_table(tmp_path / "t", rows=("baseline", "tanh"), columns=("a, b", "c"), seeds=2, epochs=3)
    make_pooling(tmp_path / "p", rows=("max", "huber"))
    make_robust(tmp_path / "r")
    trees = (
        attack_tree(recipe_of({})),
        curve_tree(3.0),
        features_tree(9),
        filters_tree(2),
        curves_tree(),
        bench_tree(),
    )
    for index, tree in enumerate(trees):
        write(tmp_path / f"{index}.json", tree)
    for path in sorted(tmp_path.rglob("*.json")):
        if draw.random() < 0.5:
            write(path, damaged(json.loads(path.read_text()), draw))
    parsed(page_of(tmp_path))


def diverge(folder):
    """Make a run's record that of a network that did not converge."""
    held = json.loads((folder / "record.json").read_text())
    held |= {"status": "diverged", "results": {}, "failure": {"step": 3, "message": "the loss is not finite at step 3"}}
    (folder / "record.json").write_text(json.dumps(held))
    return folder


def test_a_network_that_did_not_converge_is_shown_as_such_and_counts_for_nothing(tmp_path):
    make_run(tmp_path / "good")
    diverge(make_run(tmp_path / "bad", seed=1))
    found = read_folder(tmp_path)
    assert not found.left_out
    assert [run.notes for run in found.runs if run.diverged] == [
        ("did not converge: the loss is not finite at step 3",)
    ]
    text = words_of(tmp_path)
    assert "90.00 (1 N/C)" in text
    assert "1 of 2 did not converge" in text


def marked(folder):
    """The accuracies that the page marks as the best of its runs."""
    table = group_table(group(read_folder(folder).runs))
    at = table.columns.index("accuracy, %")
    return [row[at].text for row in table.rows if row[at].best]


def test_the_best_accuracy_is_marked_and_a_network_without_one_never(tmp_path):
    make_run(tmp_path / "plain", model__magnitude=None, top1=0.8)
    sure = make_run(tmp_path / "tanh", top1=0.9)
    assert marked(tmp_path) == ["90.00"]
    diverge(tmp_path / "plain")
    diverge(make_run(tmp_path / "ball", model__magnitude="ball"))
    assert marked(tmp_path) == ["90.00"]
    held = json.loads((sure / "record.json").read_text())
    held["results"]["last"]["nonfinite"] = 3
    write(sure / "record.json", held)
    assert marked(tmp_path) == []


def published_cell(tmp_path, paper, fates, scale="paper"):
    """The section of a table one of whose cells has these runs: True for one that converged."""
    folder = tmp_path / "some-table-paper"
    for seed, fine in enumerate(fates):
        made = make_run(folder / "tanh--cosine" / f"seed-{seed}", seed=seed, top1=0.75)
        if not fine:
            diverge(made)
    make_run(folder / "baseline--cosine" / "seed-0", top1=0.7, model__magnitude=None)
    seeds = [seed for seed, fine in enumerate(fates) if not fine]
    numbers = [
        number("baseline", "cosine", 30.0, [30.0]),
        number("tanh", "cosine", paper, [25.0 for fine in fates if fine], diverged=seeds),
        number("tanh", "linear", "N/C", []),
    ]
    write(folder / "table.json", table_tree("some-table", numbers, scale=scale))
    (section,) = [part for part in results_page(read_folder(tmp_path)).sections if part.table == "some-table"]
    return section


@pytest.mark.parametrize(
    "paper, fates, text, remark, tone",
    [
        ("N/C", [False, False], "N/C", "paper N/C", "better"),
        (31.76, [False], "N/C", "paper 31.76", "worse"),
        (31.76, [True, False, True], "25.00 ± 0.00 (1 N/C)", "paper 31.76 (−6.76)", "worse"),
        ("N/C", [True], "25.00", "paper N/C (contradicts)", "contradicts"),
        (31.76, [True], "25.00", "paper 31.76 (−6.76)", "better"),
    ],
)
def test_a_cell_says_that_networks_did_not_converge_beside_what_the_paper_says(
    tmp_path, paper, fates, text, remark, tone
):
    matrix, detail = published_cell(tmp_path, paper, fates).tables
    cell = matrix.rows[1][1]
    assert (cell.text, cell.remark.replace("\N{NO-BREAK SPACE}", " ")) == (text, remark)
    assert (cell.tone, cell.doubted) == (tone, False)
    assert text in [held.text for held in detail.rows[1]]
    assert ("N/C" in text) == ("did not converge" in cell.tip)
    assert matrix.rows[0][1].best == (False in fates)


def test_networks_that_did_not_converge_are_held_against_the_paper_at_its_own_scale_alone(tmp_path):
    section = published_cell(tmp_path, 31.76, [False], scale="quarter")
    assert section.tables[0].rows[1][1].tone == ""
    assert "1 with networks that did not converge" in section.finding


def test_a_table_without_its_runs_still_says_which_networks_did_not_converge(tmp_path):
    numbers = [number("a", "x", "N/C", [], diverged=[0, 1]), number("b", "x", 30.0, [30.0]), number("a", "y", 1.0, [])]
    write(tmp_path / "t-paper" / "table.json", table_tree("t", numbers))
    text = words_of(tmp_path)
    assert "N/C" in text
    assert "2 of 3 cells have numbers, 1 with networks that did not converge; 2 of 2 are within" in text


def test_a_seed_that_converged_once_and_once_did_not_is_doubted(tmp_path):
    make_run(tmp_path / "t" / "good")
    diverge(make_run(tmp_path / "t" / "other"))
    assert "t/other is another run of this seed, which did not converge, and is not counted" in words_of(tmp_path)
