"""Tables 7 and 8: one record a network, attacks that go on where they were stopped, and what the tables say of them."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from places import ROOT

from hyperball import verdicts

pytest.importorskip("lightning_fabric")

from hyperball.attacks import RecordError, evaluate_robustness
from hyperball.experiments.grid import Cell
from hyperball.experiments.jobs import attacked
from hyperball.experiments.jobs.attack_jobs import attack_jobs, source_job, with_attacks
from hyperball.experiments.jobs.attacked import AttackJob, attack_cell
from hyperball.experiments.jobs.cell import train_cell
from hyperball.experiments.jobs.crew import run_local
from hyperball.experiments.jobs.job import Job
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.records.attack_state import is_done
from hyperball.experiments.records.robust_numbers import attacked_numbers, counted
from hyperball.experiments.records.robustness import crossing, packed, unpacked
from hyperball.experiments.results.collecting import collect
from hyperball.experiments.results.comparison import compare, doubts_of, table
from hyperball.experiments.results.markdown import fill
from hyperball.experiments.table import Entry, Experiment, Reduction
from hyperball.experiments.tables import TABLES
from hyperball.experiments.tables.dcnet import table7, table8
from hyperball.experiments.tables.dcnet.attacks import LAST, PARTS
from hyperball.training import Recipe

RECIPE = Recipe(steps=60).override({"data.train_size": 640, "data.test_size": 60, "optimizer.lr": 1e-2})
MAIN = Part("images", {"fgsm": "fgsm", "transfer fgsm": "transfer(attack='fgsm')"}, ("16/255",), checks=8)
SWEEP = Part("sweep", {"fgsm": "fgsm"}, ("0", "8/255", "255/255"), images=30)
LONG = Part("long", {"noise": "noise(k=3)"}, ("16/255",), images=20)
PLAN = Attacks((MAIN, SWEEP), RECIPE, (LONG,), {"none": 90.0, "fgsm": 45.0}, ("fgsm", "transfer fgsm", "noise"))
ENTRIES = tuple(
    Entry(row, "natural", RECIPE.override({"model.magnitude": magnitude}), 90.0, attacks=PLAN)
    for row, magnitude in (("baseline", None), ("tanh", "tanh"))
)
TABLE = Experiment(
    "toy", "A toy", "nobody", "top1", ENTRIES, Reduction(lambda recipe: recipe, "nothing"), family="toys"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A trained and attacked table of two networks and one seed, and its jobs."""
    out = tmp_path_factory.mktemp("toys")
    jobs = jobs_of(TABLE, [0], out, accelerator="cpu")
    everything = with_attacks(TABLE, jobs, [0])
    for job in everything:
        if job.trains:
            train_cell(job.cell.recipe, job.folder, accelerator="cpu")
    for job in attacks_of(everything):
        run(job)
    return out, jobs, everything


def run(job):
    job.command()
    plan = json.loads((job.folder / "attacks" / f"plan-{job.parts[0].name}.json").read_text())
    attack_cell(plan, job.folder, job.source.folder, None, "cpu")


def attacks_of(everything):
    return [job for job in everything if isinstance(job, AttackJob)]


def record(job):
    return json.loads((job.folder / "robustness.json").read_text())


def test_the_source_is_trained_once_a_seed_with_its_own_seed_and_the_longest_attacks_come_last(tmp_path):
    everything = with_attacks(TABLE, jobs_of(TABLE, [0, 1], tmp_path), [0, 1])
    names = [job.cell.name for job in everything]
    assert [name for name in names if name.startswith("source")] == ["source/seed-0", "source/seed-1"]
    assert [job.cell.recipe.seed for job in everything if job.cell.label == "source"] == [1000, 1001]
    assert names[-2:] == ["baseline--natural_longest_attacks/seed-0", "tanh--natural_longest_attacks/seed-0"]
    assert names.index("tanh--natural_attacks/seed-0") < names.index("baseline--natural/seed-1")
    assert everything[-1].needs == ("tanh--natural/seed-0", "source/seed-0", "tanh--natural_attacks/seed-0")


def test_a_network_ends_in_one_record_with_every_attack_and_its_conditions(place):
    _, jobs, everything = place
    found = record(jobs[1])
    assert found["cell"] == {
        "row": "tanh", "column": "natural", "kind": "published", "seed": 0, "source_seed": 1000,
    }  # fmt: skip
    assert [(line["name"], line["images"]) for line in found["attacks"]] == [
        ("fgsm", 60), ("transfer fgsm", 60), ("noise", 20),
    ]  # fmt: skip
    assert {line["epsilon"] for line in found["attacks"]} == {16 / 255}
    assert found["attacks"][0]["published"] == 45.0
    assert found["attacks"][2]["conditions"]["k"] == 3
    assert found["natural"]["accuracy"] == pytest.approx(found["natural"]["trained"])
    assert found["missing"] == []
    assert found["check_images"] == 8
    assert {"torch", "hyperball", "python"} <= found["conditions"]["versions"].keys()
    assert all(job.is_done for job in everything)


def test_the_transfer_attack_is_made_on_the_shared_source(place):
    _, jobs, _ = place
    hashes = {record(job)["conditions"]["source_sha256"] for job in jobs}
    assert len(hashes) == 1
    own = {record(job)["conditions"]["model_sha256"] for job in jobs}
    assert len(own | hashes) == 3


def test_the_marks_of_single_images_are_kept_in_bits(place):
    _, jobs, _ = place
    line = record(jobs[0])["attacks"][0]
    marks = unpacked(line["withstood"], line["images"])
    assert sum(marks) / len(marks) == pytest.approx(line["accuracy"])
    assert unpacked(packed("101100011"), 9) == [mark == "1" for mark in "101100011"]


def test_a_sweep_locates_the_budget_of_the_papers_number(place):
    _, jobs, _ = place
    (curve,) = record(jobs[0])["sweeps"]
    assert curve["images"] == 30
    assert curve["epsilon"] == [0.0, 8 / 255, 1.0]
    assert curve["accuracy"][0] > 0.45 > curve["accuracy"][-1]
    assert 0 < curve["located"] < 1


@pytest.mark.parametrize(
    "accuracies, target, expected",
    [
        ([0.9, 0.5, 0.1], 0.7, 0.5),
        ([0.9, 0.5, 0.1], 0.1, 2.0),
        ([0.9, 0.5, 0.1], 0.05, None),
        ([0.9, 0.5, 0.5, 0.1], 0.5, 1.0),
        ([0.2, 0.2, 0.1], 0.2, 0.0),
        ([0.1, 0.2], 0.2, None),
    ],
)
def test_a_crossing_is_the_smallest_budget_at_which_the_line_has_come_down_to_the_target(accuracies, target, expected):
    found = crossing([float(i) for i in range(len(accuracies))], accuracies, target)
    assert found == (None if expected is None else pytest.approx(expected))


def test_what_is_done_is_not_attacked_again(place, monkeypatch):
    _, jobs, everything = place
    before = record(jobs[0])
    monkeypatch.setattr(attacked.Target, "run", lambda self, part: pytest.fail("ran again"))
    for job in attacks_of(everything):
        if job.folder == jobs[0].folder:
            run(job)
    assert record(jobs[0]) == before


def test_a_killed_attack_goes_on_and_ends_with_the_same_record(place, monkeypatch):
    _, jobs, everything = place
    job = attacks_of(everything)[0]
    before = record(jobs[0])
    path = job.folder / "attacks" / "images.json"
    whole = path.read_text()
    path.unlink()
    assert not is_done(job.folder, MAIN)
    assert "images" in job.missing()

    def killed(*arguments, progress=None, **options):
        def stop(text, done, total):
            if text.startswith("transfer"):
                raise KeyboardInterrupt

        return evaluate_robustness(*arguments, progress=stop, **options)

    monkeypatch.setattr(attacked, "evaluate_robustness", killed)
    with pytest.raises(KeyboardInterrupt):
        run(job)
    assert (path.parent / "images.json.partial.jsonl").exists()
    monkeypatch.undo()
    run(job)
    timeless = [{**line, "seconds": 0} for line in record(jobs[0])["attacks"]]
    assert timeless == [{**line, "seconds": 0} for line in before["attacks"]]
    path.write_text(whole)


def test_the_table_prints_attacks_doubts_and_budgets(place):
    _, jobs, _ = place
    lines = compare(TABLE, jobs)
    assert [line.column for line in lines[:4]] == [
        "natural", "natural, fgsm", "natural, transfer fgsm", "natural, noise",
    ]  # fmt: skip
    assert lines[1].published == 45.0
    assert lines[1].values == (100 * record(jobs[0])["attacks"][0]["accuracy"],)
    assert lines[1].seeds == (0,)
    assert "natural, fgsm" in table(TABLE, lines)
    texts = doubts_of(TABLE, jobs)
    assert any(text.startswith("budget: baseline, natural: fgsm gives the paper's 45.0 %") for text in texts)
    said = [doubt for job in jobs for doubt in record(job)["doubts"]]
    assert len([text for text in texts if text.startswith("doubt: ")]) == len(said)


def test_doubts_are_of_the_networks_in_the_numbers_alone(place, tmp_path, monkeypatch):
    _, _, everything = place
    collect(everything, tmp_path)
    kept = jobs_of(TABLE, [0], tmp_path)
    assert any("baseline, natural" in text for text in doubts_of(TABLE, kept))
    monkeypatch.setitem(verdicts.CLASSES, RECIPE.data.name, 10)
    held = json.loads((kept[0].folder / "record.json").read_text())
    held["results"]["last"]["top1"] = 0.1
    (kept[0].folder / "record.json").write_text(json.dumps(held))
    assert next(line.diverged for line in compare(TABLE, kept) if line.row == "baseline") == (0,)
    texts = doubts_of(TABLE, kept)
    assert texts
    assert not any("baseline, natural" in text for text in texts)


def test_sentences_that_differ_in_numbers_alone_are_said_once():
    seeds = [["a 1.5 % b", "a 20 % b", "c"], [], ["a 3 % b", "d 1"]]
    assert sorted(counted(seeds)) == [("a 1.5 % b", 2), ("c", 1), ("d 1", 1)]


def test_records_are_kept_with_the_runs_and_the_source(place, tmp_path):
    _, jobs, everything = place
    assert collect(everything, tmp_path) == []
    assert (tmp_path / "source" / "seed-0" / "record.json").exists()
    for job in jobs:
        assert json.loads((tmp_path / job.cell.name / "robustness.json").read_text()) == record(job)
    assert not list(tmp_path.rglob("*.safetensors"))
    folders = {0: tmp_path / jobs[0].cell.name}
    assert [name for name, _, found in attacked_numbers(PLAN, folders) if found] == ["fgsm", "transfer fgsm", "noise"]


OTHER_PLANS = {
    "epsilon": (replace(MAIN, epsilons=("8/255",)), "`epsilon` is 0.0627"),
    "images": (replace(MAIN, images=30), "`images` is 60 there and 30 here"),
    "checks": (replace(MAIN, checks=9), "`check_images` is 8 there and 9 here"),
    "budgets": (replace(SWEEP, epsilons=("0", "4/255", "255/255")), "`epsilons` is"),
    "images of a sweep": (replace(SWEEP, images=20), "`images` is 30 there and 20 here"),
}


@pytest.mark.parametrize("part, message", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_a_changed_plan_is_not_answered_with_the_numbers_of_another(place, part, message):
    _, _, everything = place
    job = replace(attacks_of(everything)[0], parts=(part,))
    assert message in job.missing()
    assert not is_done(job.folder, part)
    with pytest.raises(RecordError, match="of another plan"):
        run(job)


def test_a_further_attack_of_a_part_is_to_be_run(place):
    _, _, everything = place
    more = replace(MAIN, attacks={**MAIN.attacks, "bim": "bim"})
    job = replace(attacks_of(everything)[0], parts=(more,))
    assert job.missing() == "attacks are to be run: images"


def test_attacks_on_other_weights_are_not_those_of_the_network(place):
    _, _, everything = place
    job = attacks_of(everything)[0]
    path = job.folder / "attacks" / "weights.json"
    before = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(before), "network": "0" * 64}))
        assert "attacks on other weights of the network" in job.missing()
        with pytest.raises(RecordError, match="other weights"):
            run(job)
    finally:
        path.write_text(before)
    assert job.is_done


def test_kept_numbers_of_another_plan_are_named_and_left_out(place, tmp_path, capsys):
    _, jobs, everything = place
    collect(everything, tmp_path)
    folders = {0: tmp_path / jobs[0].cell.name}
    changed = replace(PLAN, parts=(replace(MAIN, epsilons=("8/255",)), SWEEP))
    found = {name: values for name, _, values in attacked_numbers(changed, folders)}
    assert (found["fgsm"], list(found["noise"])) == ({}, [0])
    assert "fgsm is of another plan: `epsilon` is" in capsys.readouterr().err


def lines_without_the_first(tree):
    return {**tree, "attacks": tree["attacks"][1:]}


def lines_with_another_number(tree):
    first, *rest = tree["attacks"]
    return {**tree, "attacks": [{**first, "accuracy": first["accuracy"] / 2 + 0.01}, *rest]}


@pytest.mark.parametrize("changed", [lines_without_the_first, lines_with_another_number])
def test_kept_attacks_are_not_replaced_by_fewer_or_by_others(place, changed, tmp_path):
    _, jobs, _ = place
    run = tmp_path / "runs" / jobs[0].cell.name
    shutil.copytree(jobs[0].folder, run)
    job = replace(jobs[0], folder=run)
    kept = tmp_path / "kept" / job.cell.name / "robustness.json"
    assert collect([job], tmp_path / "kept") == []
    whole = kept.read_bytes()
    (run / "robustness.json").write_text(json.dumps(changed(record(jobs[0]))))
    (said,) = collect([job], tmp_path / "kept")
    assert said.startswith(f"kept {kept} as it is: {run / 'robustness.json'} lacks what that has of fgsm")
    assert kept.read_bytes() == whole


def test_kept_attacks_grow_and_are_replaced_where_they_cannot_be_read(place, tmp_path):
    _, jobs, _ = place
    assert collect(jobs[:1], tmp_path) == []
    kept = tmp_path / jobs[0].cell.name / "robustness.json"
    for text in (json.dumps(lines_without_the_first(record(jobs[0]))), "{", '{"attacks": [3], "sweeps": []}'):
        kept.write_text(text)
        assert collect(jobs[:1], tmp_path) == []
        assert json.loads(kept.read_text()) == record(jobs[0])


def broken_records():
    yield "no keys", {"kind": "robust cell"}
    yield "no doubts", {"doubts": None}
    yield "no lines", {"attacks": [3]}
    yield "a word for a number", {"attacks": [{"name": "fgsm", "accuracy": "x", "epsilon": 1.0, "published": None}]}


@pytest.mark.parametrize("changes", [pytest.param(tree, id=name) for name, tree in broken_records()])
def test_a_broken_record_of_attacks_is_named_and_left_out(place, changes, tmp_path, capsys):
    _, jobs, everything = place
    collect(everything, tmp_path)
    path = tmp_path / jobs[0].cell.name / "robustness.json"
    path.write_text(json.dumps({**({} if "kind" in changes else record(jobs[0])), **changes}))
    kept = jobs_of(TABLE, [0], tmp_path)
    lines = {(line.row, line.column): line.values for line in compare(TABLE, kept)}
    assert lines["baseline", "natural, fgsm"] == ()
    assert lines["tanh", "natural, fgsm"] != ()
    assert all("baseline" not in text for text in doubts_of(TABLE, kept))
    assert f"left out {path}" in capsys.readouterr().err


def test_notes_say_what_is_attacked_at_the_scale():
    quick, whole = (table7.table().at(scale).all_notes[-1] for scale in ("quick", "paper"))
    assert "square at 8/255 on 40 images" in quick
    assert "masking checks on 16" in quick
    assert "auto" not in quick
    assert "square, auto at 8/255 on 1,000 images" in whole
    assert "for the first seed auto on all images at 8/255 on all images" in whole


def test_a_network_that_did_not_converge_has_nothing_to_attack(place, tmp_path, capsys):
    _, jobs, everything = place
    job = attacks_of(everything)[0]
    tree = json.loads((jobs[0].folder / "record.json").read_text())
    failure = {"step": 3, "where": "layer a"}
    for name in ("recipe.json", "record.json"):
        (tmp_path / name).write_text((jobs[0].folder / name).read_text())
    (tmp_path / "record.json").write_text(json.dumps({**tree, "status": "diverged", "results": {}, "failure": failure}))
    moved = replace(job, folder=tmp_path)
    assert moved.is_done
    run(moved)
    assert "nothing to attack" in capsys.readouterr().out
    assert not (tmp_path / "robustness.json").exists()


class Stub(Job):
    """A job whose process runs another module."""

    def command(self):
        return list(MODULES[self.cell.label])


MODULES = {"broken": ("no_such_module",), "endless": ("timeit", "-n1", "-r1", "import time; time.sleep(99)")}


def test_jobs_wait_for_what_they_need_and_fall_with_it(tmp_path):
    first = Stub(Cell("broken", 0, RECIPE), tmp_path / "broken")
    entry = replace(ENTRIES[0], recipe=RECIPE)
    attacks = [replace(job, trained=first) for job in attack_jobs(entry, Job(first.cell, first.folder), True)]
    ends = run_local([first, *attacks], 2, lambda text: None)
    reasons = [end.reason for end in ends]
    assert "no_such_module" in reasons[0]
    assert reasons[1].startswith("it needs broken/seed-0")
    assert reasons[2].startswith("it needs broken")


def test_the_end_of_the_time_stops_what_runs_and_what_waits(tmp_path):
    jobs = [Stub(Cell("endless", seed, RECIPE), tmp_path / str(seed)) for seed in (0, 1)]
    ends = run_local(jobs, 1, lambda text: None, seconds=1)
    assert [end.interrupted for end in ends] == [True, True]
    assert ends[1].reason == "not begun"


@pytest.mark.parametrize("make", [table7.table, table8.table])
def test_published_tables_have_every_network_and_attack(make):
    entries = {(entry.row, entry.column): entry for entry in make().entries}
    paper = entries["tanh", "natural"]
    assert paper.attacks.published == {
        "none": 91.45, "fgsm": 52.6, "bim": 10.18, "transfer fgsm": 50.61, "transfer bim": 29.06,
    }  # fmt: skip
    assert entries["baseline", "adversarial"].recipe.adversarial.method == "fgsm"
    assert entries["tanh, RobustBatchNorm", "adversarial"].recipe.model.norm == "robust"
    assert all(entry.recipe.regularizers.orthogonality == 0 for entry in entries.values())
    assert paper.attacks.parts == PARTS
    assert paper.attacks.last == LAST
    (entry,) = (held for held in make().at("quick").entries if (held.row, held.column) == ("ball", "natural"))
    assert entry.attacks.source.steps == entry.recipe.steps
    assert entry.attacks.last == ()
    assert math.isclose(make().at("quarter").entries[0].attacks.source.steps, 42500 / 4, rel_tol=1e-3)


def test_both_tables_are_about_the_same_runs(tmp_path):
    jobs = [jobs_of(make(), [0], tmp_path) for make in (table7.table, table8.table)]
    assert [(job.cell, job.folder) for job in jobs[0]] == [(job.cell, job.folder) for job in jobs[1]]
    assert {held.family for held in (table7.table(), table8.table())} == {"dcnet-robustness"}
    plans = [attack_jobs(make().entries[0], jobs[0][0], True)[0].plan for make in (table7.table, table8.table)]
    assert plans[0] == plans[1]
    assert source_job(table7.table().entries[0], jobs[0][0]).cell.recipe.seed == 1000


def test_the_tables_of_the_document_are_those_of_the_records():
    text = (ROOT / "docs" / "robustness.md").read_text(encoding="utf-8")
    assert "<!-- results: dcnet-table7 -->" in text
    assert "<!-- results: dcnet-table8 -->" in text
    assert fill(text, ROOT / "results") == text


def test_markdown_holds_the_attacks_and_the_doubts(place, monkeypatch, tmp_path):
    _, _, everything = place
    monkeypatch.setitem(TABLES, "toy", lambda: TABLE)
    collect(everything, tmp_path / "toys-paper")
    text = fill("<!-- results: toy -->\n<!-- /results -->", tmp_path)
    assert "|  | training | clean | fgsm | transfer fgsm | noise | seeds |" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| baseline | natural |"))
    assert "(45)" in line.split("|")[4]
    assert "- budget: baseline, natural: fgsm gives the paper's 45.0 % at " in text
    assert "other recipes" not in text
