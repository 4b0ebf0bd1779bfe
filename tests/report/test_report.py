"""The report's page: what it shows of runs, tables and attacks, and how it is written."""

import json
import re

import pytest
from report_cases import (
    bench_tree,
    make_pooling,
    make_results,
    make_robust,
    make_run,
    make_table,
    number,
    page_of,
    parsed,
    table_tree,
    words_of,
    write,
)

from hyperball.report import Chart, Page, Section, read_folder, read_runs, render, write_page
from hyperball.report.doubts import Doubt, gathered
from hyperball.report.kinds import Attack, Bench, Published, RobustCell, Robustness
from hyperball.report.page import Bar, Bars
from hyperball.report.pictures import Curves, Features, Filters
from hyperball.report.results import results_page
from hyperball.report.sections.join import Joined
from hyperball.report.tables import group, spread

pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_results(tmp_path_factory.mktemp("results"))


def test_a_page_is_one_balanced_file_that_asks_the_network_for_nothing(whole):
    page = parsed(page_of(whole))
    assert page.tags.count("script") == 1
    links = [value for name, value in page.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert all(link.startswith(("#", "data:")) for link in links)
    (policy,) = [value for name, value in page.attributes if name == "content" and "default-src" in value]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


def test_every_kind_of_record_is_read(whole):
    found = read_folder(whole)
    counts = {kind: len(found.of(kind)) for kind in (Published, Attack, Robustness, RobustCell, Bench)}
    assert counts == {Published: 4, Attack: 4, Robustness: 4, RobustCell: 4, Bench: 1}
    assert [len(found.of(kind)) for kind in (Features, Filters, Curves)] == [1, 1, 1]
    assert [entry.path for entry in found.left_out] == ["broken"]


def test_the_page_of_every_kind_has_its_parts(whole):
    text = words_of(whole)
    for part in (
        "At a glance", "Synthetic synthetic-table", "Convergence", "Learned radii", "Against the share of outliers",
        "Robustness curves", "Features in the plane", "First-layer filters", "Synthetic norms", "Time over nn.Conv2d",
        "Time over batch", "How a magnitude warps the plane", "Level sets of the operators", "Every run", "Left out",
        "an invented note", "12 % of the images have a zero gradient",
    ):  # fmt: skip
        assert part in text, part


def test_seeds_are_gathered_with_their_spread(tmp_path):
    for seed, top1 in enumerate((0.75, 0.85, 0.95)):
        make_run(tmp_path / f"tanh/seed-{seed}", top1=top1, seed=seed)
    make_run(tmp_path / "plain", model__magnitude=None, top1=0.7)
    groups = group(read_runs(tmp_path).runs)
    assert [(entry.label, len(entry.runs)) for entry in groups] == [("plain", 1), ("tanh + cosine", 3)]
    text = page_of(tmp_path)
    assert "85.00 ± 10.00" in text
    assert "70.00" in text


def test_an_unfinished_run_is_shown_as_such_and_not_averaged(tmp_path):
    make_run(tmp_path / "done", top1=0.9, seed=0)
    make_run(tmp_path / "going", top1=0.1, seed=1, finished=False)
    text = page_of(tmp_path)
    assert "1 of 2 unfinished" in text
    assert "90.00" in text
    assert "50.00 ±" not in text


def test_a_run_that_failed_says_where(tmp_path):
    folder = make_run(tmp_path / "nan", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "failure", "step": 21, "where": "layer conv (Conv2d)"}\n')
    text = page_of(tmp_path)
    assert "the loss is not finite at step 21; first in layer conv (Conv2d)" in text
    assert "1 of 1 unfinished, 1 of 1 not finite" in text


@pytest.mark.parametrize("change", [{"loss": None}, {"loss": float("nan")}, {"nonfinite": 3}])
def test_a_run_with_numbers_that_are_not_finite_is_flagged(change, tmp_path):
    make_run(tmp_path / "well", seed=0)
    assert "not finite" not in page_of(tmp_path)
    folder = make_run(tmp_path / "ill", seed=1)
    tree = json.loads((folder / "record.json").read_text())
    tree["results"]["last"].update(change)
    (folder / "record.json").write_text(json.dumps(tree))
    text = page_of(tmp_path)
    assert "1 of 2 not finite" in text
    assert "ill (not finite)" in text


def lines_of(folder, which=0):
    found = read_folder(folder)
    return Joined(found.of(Published)[which], found.runs, found.of(RobustCell)).lines


def test_a_table_has_ours_the_papers_and_the_difference(tmp_path):
    errors = (24.0, 25.0, 26.0)
    for seed, error in enumerate(errors):
        make_run(tmp_path / f"t/tanh--cosine-relu/seed-{seed}", top1=1 - error / 100, seed=seed)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine, relu", 24.5, errors, errors)]))
    (line,) = lines_of(tmp_path)
    assert line.mean == pytest.approx(25.0)
    assert line.difference == pytest.approx(0.5)
    assert len(line.best) == 3
    text = page_of(tmp_path)
    for shown in ("25.00 ± 1.00", "24.5", "+0.50", "24.60 ± 1.00"):  # ours, the paper's, their difference, best epoch
        assert shown in text
    (tip,) = {value for name, value in parsed(text).attributes if name == "data-tip" and "last iterate" in value}
    for condition in ("seeds 0, 1, 2", "24.00, 25.00, 26.00", "device cpu", "torch 2.8.0", "commit 0123456789ab"):
        assert condition in tip


def test_runs_of_different_protocols_never_share_a_cell(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8, seed=0)
    make_run(tmp_path / "t/tanh--cosine/seed-1", top1=0.6, seed=1, optimizer__lr=0.1)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 20.0, [20.0, 40.0])]))
    lines = lines_of(tmp_path)
    assert [line.values for line in lines] == [pytest.approx((20.0,)), pytest.approx((40.0,))]
    assert [line.variant for line in lines] == ["lr 0.001", "lr 0.1"]
    for line in lines:
        said = f"runs of other recipes lie in the same cell; these are {line.variant}"
        assert [doubt.text for doubt in line.doubts] == [said]
    assert "30.00" not in page_of(tmp_path)


def test_a_run_of_another_scale_does_not_count(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8)
    place = make_run(tmp_path / "t/tanh--cosine/seed-1", top1=0.3, seed=1)
    tree = json.loads((place / "record.json").read_text()) | {"experiment": {"table": "t", "scale": "quick"}}
    (place / "record.json").write_text(json.dumps(tree))
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 20.0, [20.0])]))
    (line,) = lines_of(tmp_path)
    assert line.values == pytest.approx((20.0,))


def test_a_table_without_runs_shows_its_own_numbers(tmp_path):
    write(tmp_path / "table.json", table_tree("t", [number("a", "x", "N/C", [31.5]), number("b", "x", 22.0, [])]))
    text = words_of(tmp_path)
    assert "31.50" in text
    assert "N/C" in text
    assert "1 of 2 cells have numbers" in text


def test_numbers_that_disagree_with_their_records_are_doubted(tmp_path):
    make_run(tmp_path / "t/tanh--cosine/seed-0", top1=0.8)
    write(tmp_path / "t/table.json", table_tree("t", [number("tanh", "cosine", 20.0, [11.0])]))
    (line,) = lines_of(tmp_path)
    assert line.values == pytest.approx((20.0,))
    assert [doubt.text for doubt in line.doubts] == ["table.json says 11.00"]


def test_a_quick_table_is_not_held_against_the_paper(tmp_path):
    make_table(tmp_path / "quick", rows=("baseline", "tanh"), seeds=1, scale="quick", epochs=2)
    text = page_of(tmp_path)
    assert "only the ordering can be compared" in text
    assert 'class=" worse"' not in text
    assert 'class=" better"' not in text


def test_outliers_and_attacks_are_columns_of_their_tables(tmp_path):
    make_pooling(tmp_path / "pooling")
    make_robust(tmp_path / "robust")
    found = read_folder(tmp_path)
    tables = {section.table: section.tables[0] for section in results_page(found).sections if section.table}
    assert tables["synthetic-pooling"].columns == ("", "test set", "0 %", "10 %", "30 %", "50 %", "90 %")
    assert tables["synthetic-attacks"].columns == ("", "test set", "fgsm", "bim", "auto")
    fgsm = tables["synthetic-attacks"].rows[0][2]
    assert fgsm.text == "41.00 ± 1.41"
    assert "doubt: seed 0: an invented doubt about masked gradients" in fgsm.tip


def test_networks_of_two_scales_never_share_a_table_of_attacks(tmp_path):
    for scale in ("quick", "paper"):
        make_robust(tmp_path / scale, rows=("tanh",), seeds=1)
        (place,) = (tmp_path / scale).glob("*/seed-0")
        tree = json.loads((place / "record.json").read_text()) | {"experiment": {"scale": scale}}
        (place / "record.json").write_text(json.dumps(tree))
    (section,) = [entry for entry in results_page(read_folder(tmp_path)).sections if entry.part == "robustness"]
    assert [table.heading for table in section.tables if "1,000" in table.heading] == [
        "digits, linf 8/255, 1,000 images, scale paper", "digits, linf 8/255, 1,000 images, scale quick",
    ]  # fmt: skip
    assert [len(chart.series) for chart in section.galleries[0].charts] == [1, 1]


def test_a_table_of_times_has_no_percent(tmp_path):
    numbers = [number("pool", "forward", 3.0, [1.5]), number("pool", "backward", 4.0, [2.5])]
    write(tmp_path / "table.json", table_tree("times", numbers, "milliseconds"))
    text = words_of(tmp_path)
    assert "milliseconds, %" not in text
    assert "only ratios can be compared" in text


@pytest.mark.parametrize("metric, near", [("milliseconds", "–"), ("error", "1 of 2")])
def test_times_are_not_counted_as_near_the_paper_in_points(tmp_path, metric, near):
    numbers = [number("pool", "forward", 3.0, [4.0]), number("pool", "backward", 4.0, [9.0])]
    write(tmp_path / "table.json", table_tree("times", numbers, metric) | {"scale": "paper"})
    (table,) = results_page(read_folder(tmp_path)).sections[0].tables
    shown = dict(zip(table.columns, (cell.text for cell in table.rows[0]), strict=True))
    assert shown.get("within 1.5 points or better", "–") == near


def test_further_metrics_have_columns_of_their_own(tmp_path):
    numbers = [
        number("a", "x", 80.0, [81.0], **{"map6_raw": 95.123, "map6_raw, paper": 96.0}),
        number("b", "x", 1.0, []),
    ]
    write(tmp_path / "table.json", table_tree("t", numbers, "top1"))
    (section,) = [entry for entry in results_page(read_folder(tmp_path)).sections if entry.table]
    (table,) = section.tables
    assert table.columns[-2:] == ("map6_raw", "map6_raw, paper")
    assert [cell.text for cell in table.rows[0][-2:]] == ["95.12", "96.00"]
    assert [cell.text for cell in table.rows[1][-2:]] == ["–", "–"]


def test_benchmarks_are_bars_of_time_and_memory_against_their_aims(tmp_path):
    tree = bench_tree()
    for row in tree["sections"]["conv"]["rows"]:
        row |= {"memory_ratio": 1.1, "memory_aim": 1.05}
    write(tmp_path / "gpu.json", tree)
    (section,) = [entry for entry in results_page(read_folder(tmp_path)).sections if entry.part == "benchmarks"]
    bars = [figure for figure in section.charts if isinstance(figure, Bars)]
    titles = ["Time over nn.Conv2d: conv", "Peak memory over nn.Conv2d: conv"]
    assert [figure.title for figure in bars] == 2 * titles
    assert [figure.note for figure in bars[::2]] == ["forward+backward, graph, bf16", "forward+backward, eager, bf16"]
    assert [bar.heading for bar in bars[0].bars] == ["64x64x32x32"] * 2 + ["512x64x32x32"] * 2
    assert [bar.goal for bar in bars[0].bars] == [1.5] * 4
    assert [bar.goal for bar in bars[1].bars] == [1.05] * 4
    assert bars[0].bars[0].text == "1.26×"
    assert [chart.title for chart in section.charts if isinstance(chart, Chart)] == ["Time over batch: conv, graph"]


@pytest.mark.parametrize("values, log", [((0.5, 1.2, 2.0), False), ((0.01, 1.0, 200.0), True)])
def test_bars_of_ratios_that_differ_widely_are_logarithmic_and_begin_at_one(values, log):
    bars = Bars("t", tuple(Bar("b", value, "") for value in values), mark=1.0)
    assert (bars.ends[0] > 0) is log
    places = [bars.place(value) for value in values]
    assert places == sorted(places)
    assert 0 <= places[0] < places[-1] <= 100
    left, width = bars.span(values[0])
    assert left == (places[0] if log else 0.0)
    assert left + width == pytest.approx(bars.place(1.0) if log else places[0], abs=0.02)


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    page = Page("title", "lead", ())
    target = tmp_path / "page.html"
    target.write_text("old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_page(target, page)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_thousand_records_make_a_small_page(tmp_path):
    rows = tuple(f"operator {index}" for index in range(100))
    make_table(tmp_path / "big", rows=rows, columns=("a", "b"), seeds=5, epochs=20)
    text = page_of(tmp_path)
    assert len(text.encode()) < 5e6
    assert "operator 99" in text


def test_doubts_that_differ_in_numbers_are_said_once():
    said = gathered([
        ("a", Doubt("r0", "12 % zero", "0")), ("a", Doubt("r1", "13.5 % zero", "1")),
        ("b", Doubt("r2", "12 % zero", "0")), ("b", Doubt("r2", "12 % zero", "0")),
    ])  # fmt: skip
    assert said == ("a, seeds 0, 1: 12 % zero (2 such doubts, the first is quoted)", "b, seed 0: 12 % zero")


def test_a_folded_section_and_remarks_are_drawn():
    text = render(Page("t", "l", (Section("More", remarks=("one", "two"), folded=True),)))
    assert "details" in parsed(text).tags
    assert "<li>two</li>" in text


def test_spread_names_one_value_or_mean_and_deviation():
    assert spread([]) == "–"
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 3.0], 1) == "2.0 ± 1.4"


def test_a_section_has_an_address_of_its_own_that_stays_when_others_come(tmp_path):
    sections = [Section("What holds"), Section("Table 3", table="dcnet-table3", scale="paper"), Section("Main"),
                Section("Runs on π"), Section("ø"), Section("What holds"), Section("what holds 2")]  # fmt: skip
    page = Page("Results", "", tuple(sections))
    assert page.anchors == [
        "what-holds", "dcnet-table3-paper", "main-2", "runs-on", "section", "what-holds-2", "what-holds-2-2",
    ]  # fmt: skip
    assert page.place("dcnet-table3", "paper") == "dcnet-table3-paper"
    assert page.place("dcnet-table3", "quick") == page.place("", "") == ""


def test_every_link_within_a_page_leads_somewhere(tmp_path):
    make_table(tmp_path / "t")
    text = page_of(tmp_path)
    links, places = (set(re.findall(rf'{name}="#?([^"]*)"', text)) for name in ("href", "id"))
    assert "synthetic-table-paper" in links
    assert {link for link in links if not link.startswith(("data:", "http"))} <= places
