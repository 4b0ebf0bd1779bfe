"""The report: what it reads, what it leaves out, and the page it writes."""

import html.parser
import itertools
import json
import re

import pytest

from hyperball.cli import main
from hyperball.report import Chart, Page, Section, Series, read_runs, render, runs_page, write_page
from hyperball.report.charts import HEIGHT, WIDTH, draw, log_ticks, ticks
from hyperball.report.records import natural
from hyperball.report.tables import group, spread

pytest.importorskip("jinja2")

RECIPE = {
    "data": {"name": "digits"},
    "model": {"name": "digits", "magnitude": "tanh", "angular": "cosine", "options": {}},
    "optimizer": {"lr": 0.001},
    "seed": 0,
}
LAST = {"step": 20, "epoch": 2.0, "samples": 100, "loss": 0.5, "top1": 0.9, "ece": 0.02}


def record(recipe, top1=0.9):
    last = {**LAST, "top1": top1}
    return {
        "format": 1, "recipe": recipe, "status": "finished",
        "results": {"last": last, "best": last, "first_epoch": {**last, "top1": 0.5}},
        "conditions": {}, "engine": {"compiled": False, "captured": False},
        "environment": {"device": "cpu", "versions": {"torch": "2.8.0", "hyperball": "0.1.0"}},
        "timing": {"seconds": 12.5, "images_per_second": 1000.0}, "notes": [],
    }  # fmt: skip


def metrics(epochs=2, top1=0.9):
    lines = []
    for epoch in range(1, epochs + 1):
        lines.append({"kind": "train", "step": 10 * epoch, "epoch": float(epoch), "loss": 1.0 / epoch})
        radii = {"conv": {"min": 0.5, "mean": 1.0 + epoch, "max": 2.0}}
        lines.append(
            {"kind": "evaluation", "step": 10 * epoch, "epoch": float(epoch), "loss": 0.5, "top1": top1, "radii": radii}
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def make_run(folder, *, top1=0.9, finished=True, **changes):
    """A run's folder as training leaves it; `changes` are dotted with two underscores."""
    recipe = json.loads(json.dumps(RECIPE))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = recipe
        for name in parents:
            place = place[name]
        place[last] = value
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "metrics.jsonl").write_text(metrics(top1=top1))
    if finished:
        (folder / "record.json").write_text(json.dumps(record(recipe, top1)))
    return folder


class Checked(html.parser.HTMLParser):
    """Collects texts and attributes, and checks that tags are balanced."""

    VOID = {"meta", "link", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def parsed(text):
    reader = Checked()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_a_page_is_one_balanced_file_that_asks_the_network_for_nothing(tmp_path):
    make_run(tmp_path / "a")
    page = parsed(render(runs_page(read_runs(tmp_path))))
    assert "script" not in page.tags
    links = [value for name, value in page.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert links == ["data:,"]
    assert any("default-src 'none'" in str(value) for name, value in page.attributes if name == "content")


def test_seeds_are_gathered_with_their_spread(tmp_path):
    for seed, top1 in enumerate((0.8, 0.9, 1.0)):
        make_run(tmp_path / f"tanh/seed-{seed}", top1=top1, seed=seed)
    make_run(tmp_path / "plain", model__magnitude=None, top1=0.7)
    groups = group(read_runs(tmp_path).runs)
    assert [(entry.label, len(entry.runs)) for entry in groups] == [("plain", 1), ("tanh + cosine", 3)]
    text = render(runs_page(read_runs(tmp_path)))
    assert "90.00 ± 10.00" in text
    assert "70.00" in text


def test_an_unfinished_run_is_shown_as_such_and_not_averaged(tmp_path):
    make_run(tmp_path / "done", top1=0.9, seed=0)
    make_run(tmp_path / "going", top1=0.1, seed=1, finished=False)
    text = render(runs_page(read_runs(tmp_path)))
    assert "1 of 2 unfinished" in text
    assert "90.00" in text
    assert "50.00 ±" not in text


def test_a_run_that_failed_says_where(tmp_path):
    folder = make_run(tmp_path / "nan", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "failure", "step": 21, "where": "layer conv (Conv2d)"}\n')
    text = render(runs_page(read_runs(tmp_path)))
    assert "the loss is not finite at step 21; first in layer conv (Conv2d)" in text
    assert "1 of 1 unfinished, 1 of 1 not finite" in text


@pytest.mark.parametrize("change", [{"loss": None}, {"loss": float("nan")}, {"nonfinite": 3}])
def test_a_run_with_numbers_that_are_not_finite_is_flagged(change, tmp_path):
    make_run(tmp_path / "well", seed=0)
    assert "not finite" not in render(runs_page(read_runs(tmp_path)))
    folder = make_run(tmp_path / "ill", seed=1)
    tree = json.loads((folder / "record.json").read_text())
    tree["results"]["last"].update(change)
    (folder / "record.json").write_text(json.dumps(tree))
    text = render(runs_page(read_runs(tmp_path)))
    assert "1 of 2 not finite" in text
    assert "ill (not finite)" in text


BROKEN = {
    "half a record": ("record.json", lambda text: text[: len(text) // 2], "is not whole JSON"),
    "an empty record": ("record.json", lambda text: "", "is not whole JSON"),
    "a record of bytes": ("record.json", lambda text: "\udcff\udcfe", "is not whole JSON"),
    "a foreign record": ("record.json", lambda text: '{"hello": 1}', "`format` must be 1, got null"),
    "a list": ("record.json", lambda text: "[1, 2]", "must hold an object"),
    "a later format": ("record.json", lambda text: text.replace('"format": 1', '"format": 99'), "got 99"),
    "a text for a number": (
        "record.json",
        lambda text: text.replace('"top1": 0.9', '"top1": "0.9"'),
        "must be a number",
    ),
    "a number that is none": (
        "record.json",
        lambda text: text.replace('"top1": 0.9', '"top1": NaN'),
        "must be a number",
    ),
    "results of another kind": (
        "record.json",
        lambda text: re.sub(r'"results": {.*?}}', '"results": 3', text),
        "object",
    ),
    "deep nesting": ("record.json", lambda text: "[" * 100_000, "is not whole JSON"),
    "half a recipe": ("recipe.json", lambda text: text[:30], "is not whole JSON"),
    "a recipe without a model": ("recipe.json", lambda text: '{"data": {}}', "`model` must be an object"),
}


@pytest.mark.parametrize("file, damage, reason", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_is_named_and_left_out_and_the_page_is_still_made(file, damage, reason, tmp_path, capsys):
    make_run(tmp_path / "runs" / "good")
    bad = make_run(tmp_path / "runs" / "bad")
    text = damage((bad / file).read_text())
    (bad / file).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    assert reason in capsys.readouterr().out
    texts = "".join(parsed(page.read_text()).texts)
    assert "bad" in texts
    assert reason in texts
    assert "good" in texts


def test_metrics_that_are_torn_or_foreign_are_passed_over(tmp_path):
    folder = make_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"kind": "evaluation", "step": "x"}\n{"kind": "evaluation", "st')
    (run,) = read_runs(tmp_path).runs
    assert [point.step for point in run.evaluations] == [10, 20]
    (folder / "metrics.jsonl").unlink()
    (run,) = read_runs(tmp_path).runs
    assert run.evaluations == ()
    render(runs_page(read_runs(tmp_path)))


def test_every_text_from_a_file_is_escaped(tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    folder = make_run(tmp_path / "evil", data__name=evil, model__magnitude=evil, model__name=evil, optimizer__lr=evil)
    tree = json.loads((folder / "record.json").read_text())
    tree["notes"] = [evil]
    tree["environment"] = {"device": evil, "versions": {"torch": evil}}
    (folder / "record.json").write_text(json.dumps(tree))
    lines = metrics().replace('"conv"', json.dumps(evil))
    (folder / "metrics.jsonl").write_text(lines)
    make_run(tmp_path / "other", data__name=evil)
    (tmp_path / "<b>bad").mkdir()
    (tmp_path / "<b>bad" / "record.json").write_text(json.dumps({"format": evil}))
    text = render(runs_page(read_runs(tmp_path), evil))
    page = parsed(text)
    assert not {"script", "img", "b"} & set(page.tags)
    assert "".join(page.texts).count(evil) > 5


def test_a_folder_without_runs_gives_a_page_that_says_so(tmp_path):
    assert "No run was found." in render(runs_page(read_runs(tmp_path)))


def test_a_report_about_a_folder_without_runs_is_a_mistake(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "page.html")]) == 2
    assert "holds no runs" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_numbers_in_names_are_sorted_as_numbers():
    assert sorted(["seed-10", "seed-2", "a", "seed-1"], key=natural) == ["a", "seed-1", "seed-2", "seed-10"]


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


def test_a_folder_is_no_page(tmp_path, capsys):
    make_run(tmp_path / "runs" / "a")
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [[0, 1], [0.5, 0.5], [0.0], [-3.0, 1e6], [1e-9, 3e-9], [95.1, 99.9], [1e12, 1e12 + 1], []],
)
def test_ticks_are_round_and_enclose_the_values(values):
    marks = ticks(values)
    assert 2 <= len(marks) <= 9
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)
    if values:
        assert marks[0] <= min(values) + 1e-9 * abs(min(values))
        assert marks[-1] >= max(values) - 1e-9 * abs(max(values))


@pytest.mark.parametrize("values", [[0.019, 1.5], [1.0, 1.0], [1e-8, 1e4], [0.2, 0.21]])
def test_logarithmic_ticks_enclose_the_values(values):
    marks = log_ticks(values)
    assert marks[0] <= min(values)
    assert marks[-1] >= max(values)
    assert marks[0] < marks[-1]


@pytest.mark.parametrize("log", [False, True])
def test_lines_stay_inside_of_the_picture_and_bad_points_are_dropped(log):
    points = ((1.0, 2.0), (2.0, float("nan")), (3.0, float("inf")), (4.0, 5.0))
    drawing = draw(Chart("title", "epoch", "", (Series("a", points), Series("b", ())), log=log))
    assert [line.name for line in drawing.lines] == ["a"]
    numbers = [float(x) for x in re.findall(r"[\d.]+", drawing.lines[0].path)]
    assert len(numbers) == 4
    assert all(0 <= x <= WIDTH for x in numbers[::2])
    assert all(0 <= y <= HEIGHT for y in numbers[1::2])
    assert numbers[1] > numbers[3]


def test_long_curves_are_thinned_and_keep_their_end():
    points = tuple((float(x), float(x)) for x in range(10_001))
    drawing = draw(Chart("title", "epoch", "", (Series("a", points),)))
    assert len(drawing.lines[0].marks) <= 202
    assert drawing.lines[0].marks[-1].text.startswith("a: 1e+04")


def test_a_folded_section_and_remarks_are_drawn():
    text = render(Page("t", "l", (Section("More", remarks=("one", "two"), folded=True),)))
    assert "details" in parsed(text).tags
    assert "<li>two</li>" in text


def test_spread_names_one_value_or_mean_and_deviation():
    assert spread([]) == "–"
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 3.0], 1) == "2.0 ± 1.4"
