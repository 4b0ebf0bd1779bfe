"""`reproduce --missing`: the cells that a folder of kept records lacks, and those that they need."""

import json
import shutil
from dataclasses import replace

import pytest
from experiment_cases import tiny_recipe, tiny_table, write_record

from hyperball import verdicts
from hyperball.attacks import parse
from hyperball.attacks.arguments import parse_epsilon
from hyperball.cli import main
from hyperball.experiments import tables
from hyperball.experiments.jobs.attack_jobs import with_attacks
from hyperball.experiments.jobs.conditions import with_conditions
from hyperball.experiments.jobs.lacking import lacking
from hyperball.experiments.jobs.of_table import jobs_of
from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.table import Entry
from hyperball.files import write_json

TESTED, TESTS, OTHER = "mean--clean/seed-0", "mean--clean_tests/seed-0", "max--clean/seed-0"


def kept(job, out, kept_in):
    """A job whose folder is that of its kept record."""
    return replace(job, folder=kept_in / job.folder.relative_to(out))


def names(jobs):
    return [job.cell.name for job in jobs]


def to_do(jobs, out, kept_in):
    """The names of what is left to do, where nothing is that cannot be done."""
    left, stuck = lacking(jobs, out, kept_in)
    assert stuck == []
    return names(left)


def cannot(jobs, out, kept_in):
    """Why by the names of what cannot be done."""
    return {end.job.cell.name: end.reason for end in lacking(jobs, out, kept_in)[1]}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "runs" / "tiny-paper"


@pytest.fixture
def store(tmp_path):
    return tmp_path / "results" / "tiny-paper"


@pytest.fixture
def jobs(out):
    table = tiny_table()
    return with_conditions(table, jobs_of(table, [0], out))


def test_all_is_lacking_where_nothing_is_kept(jobs, out, store):
    assert lacking(jobs, out, store) == (jobs, [])
    assert names(jobs) == [TESTED, TESTS, OTHER]


def test_a_kept_cell_is_left_out_and_its_tests_with_it(jobs, out, store):
    write_record(kept(jobs[0], out, store))
    write_json(store / TESTED / "conditions.json", {"50 %": {"top1": 0.5}})
    assert to_do(jobs, out, store) == [OTHER]
    write_record(kept(jobs[2], out, store))
    assert to_do(jobs, out, store) == []


@pytest.mark.parametrize(
    "conditions",
    [None, {}, {"10 %": {"top1": 0.5}}, {"50 %": {}}, {"50 %": {"top1": None}}, {"50 %": {"top1": 1.7}}],
    ids=["no file", "none", "another", "no metric", "no number", "no accuracy"],
)
def test_a_test_that_a_kept_record_lacks_is_made_of_its_own_run_alone(conditions, jobs, out, store):
    write_record(kept(jobs[0], out, store))
    write_record(kept(jobs[2], out, store))
    if conditions is not None:
        write_json(store / TESTED / "conditions.json", conditions)
    left, stuck = lacking(jobs, out, store)
    assert (left, names(end.job for end in stuck)) == ([], [TESTS])
    place = store / TESTED
    assert stuck[0].reason.startswith(f"{place} is kept without it (conditions are to be measured: 50 %)")
    assert "move that away" in stuck[0].reason

    write_record(jobs[0], top1=0.7)  # another run of the same recipe
    assert list(cannot(jobs, out, store)) == [TESTS]
    write_record(jobs[0])  # the run itself
    assert to_do(jobs, out, store) == [TESTED, TESTS]


def test_a_kept_network_that_did_not_converge_has_no_tests(jobs, out, store):
    write_record(kept(jobs[0], out, store), status="diverged", results={})
    assert to_do(jobs, out, store) == [OTHER]


def with_last(folder, **numbers):
    """The record of a folder with other numbers of its last epoch."""
    tree = json.loads((folder / "record.json").read_text())
    tree["results"]["last"] |= numbers
    (folder / "record.json").write_text(json.dumps(tree))


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "record.json").write_text("{"),
        lambda folder: (folder / "record.json").unlink(),
        lambda folder: with_last(folder, top1=1.5),
        lambda folder: with_last(folder, map_raw=float("nan")),
    ],
    ids=["broken", "no record", "no accuracy", "not finite"],
)
def test_a_record_that_tables_leave_out_is_lacking(harm, jobs, out, store):
    write_record(kept(jobs[2], out, store))
    assert OTHER not in to_do(jobs, out, store)
    harm(store / OTHER)
    assert OTHER in to_do(jobs, out, store)


def test_a_record_of_another_recipe_is_named_before_anything_is_trained(jobs, out, store):
    write_record(kept(jobs[2], out, store))
    write_json(store / OTHER / "recipe.json", tiny_recipe(epochs=9).to_dict())
    reasons = cannot(jobs, out, store)
    assert list(reasons) == [OTHER]
    assert "of another recipe" in reasons[OTHER]


@pytest.fixture
def chain(out):
    """Jobs of a network, one that begins with its weights, and one that begins with those."""
    begun = Entry("again", "clean", tiny_recipe(), None, start=("mean", "clean"))
    last = Entry("third", "clean", tiny_recipe(), None, start=("again", "clean"))
    return jobs_of(replace(tiny_table(), entries=(*tiny_table().entries, begun, last)), [0], out)


def test_a_cell_that_begins_with_the_weights_of_a_kept_one_needs_it_trained(chain, out, store):
    for job in chain[:2]:
        write_record(kept(job, out, store))
    assert to_do(chain, out, store) == [TESTED, "again--clean/seed-0", "third--clean/seed-0"]
    for job in chain[2:]:
        recipe = job.cell.recipe.override({"start.weights": "/".join(job.cell.recipe.start.weights.split("/")[-2:])})
        write_record(kept(replace(job, cell=replace(job.cell, recipe=recipe)), out, store))
    assert to_do(chain, out, store) == []


@pytest.mark.parametrize("changes", [{"status": "diverged", "results": {}}, {"top1": 1 / 40}], ids=["lost", "chance"])
def test_nothing_is_trained_for_a_cell_that_begins_with_a_kept_network_that_did_not_converge(
    changes, chain, out, store, monkeypatch
):
    monkeypatch.setitem(verdicts.CLASSES, "clouds", 40)
    write_record(kept(chain[0], out, store), **changes)
    first = "it needs mean--clean/seed-0, which did not converge"
    assert lacking(chain, out, store)[0] == [chain[1]]
    assert cannot(chain, out, store) == {
        "again--clean/seed-0": first, "third--clean/seed-0": f"it needs again--clean/seed-0: {first}",
    }  # fmt: skip


FEW, MORE = Part("few", {"fgsm": "fgsm"}, images=10), Part("more", {"bim": "bim"}, ("1/255", "2/255"), images=10)


def robustness(parts, absent=(), **changes):
    """What attacks found, as far as it is read."""
    attacks, sweeps = [], []
    for part in (part for part in parts if part.name not in absent):
        budgets = [parse_epsilon(text) for text in part.epsilons]
        for name, text in part.attacks.items():
            line = {"name": name, "attack": str(parse(text)), "images": part.images, "published": None}
            if part.is_sweep:
                sweeps.append({**line, "epsilon": budgets, "accuracy": [0.5] * len(budgets), "located": None})
            else:
                attacks.append({**line, "epsilon": budgets[0], "accuracy": 0.5})
    return {
        "kind": "robust cell", "conditions": {"seed": 0}, "check_images": None, "doubts": [], "attacks": attacks,
        "sweeps": sweeps, "natural": {"accuracy": 0.75, "trained": 0.75, "images": 10_000},
        "parts": [part.to_dict() for part in parts], "missing": list(absent), **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    "tree, is_kept",
    [
        (robustness([FEW, MORE]), True),
        (robustness([FEW, MORE], ["more"]), False),
        (robustness([FEW]), False),
        (robustness([FEW, replace(MORE, images=20)]), False),
        (robustness([FEW, MORE], attacks=[]), False),
        (robustness([FEW, MORE], sweeps=[]), False),
        (robustness([FEW, MORE], attacks=None), False),
        (robustness([FEW, MORE], kind="another"), False),
        (robustness([FEW, MORE], conditions={"seed": 3}), False),
        ([], False),
    ],
    ids=[
        "all", "one is not done", "one is not planned", "of another plan", "no attack", "no sweep", "broken",
        "another kind", "of another seed", "no object",
    ],
)  # fmt: skip
def test_attacks_are_kept_where_tables_have_them(tree, is_kept, out, store):
    made = attacked_jobs(out)
    for job in made[:2]:
        write_record(kept(job, out, store))
    write_json(store / TESTED / "robustness.json", tree)
    left, stuck = lacking(made, out, store)
    assert left == []  # those of another run would not be kept
    assert names(end.job for end in stuck) == ([] if is_kept else ["mean--clean_attacks/seed-0"])
    for job in made[:2]:
        write_record(job)
    assert to_do(made, out, store) == ([] if is_kept else names(made))


def attacked_jobs(out):
    attacks = Attacks((FEW, MORE), tiny_recipe(**{"model.pool": "max"}))
    table = replace(tiny_table(), entries=(Entry("mean", "clean", tiny_recipe(), None, attacks=attacks),))
    made = with_attacks(table, jobs_of(table, [0], out), [0])
    assert names(made) == ["source/seed-0", TESTED, "mean--clean_attacks/seed-0"]
    return made


def test_attacks_need_both_networks(out, store):
    made = attacked_jobs(out)
    write_record(kept(made[0], out, store))
    assert to_do(made, out, store) == names(made)


def test_attacks_nested_without_end_are_none(out, store):
    made = attacked_jobs(out)
    for job in made[:2]:
        write_record(kept(job, out, store))
    (store / TESTED / "robustness.json").write_text("[" * 100_000)
    assert list(cannot(made, out, store)) == ["mean--clean_attacks/seed-0"]


def test_what_a_kept_record_lacks_is_named_and_the_command_fails(tmp_path, monkeypatch, capsys):
    """Also where another machine's run, whose numbers differ, would be trained for it."""
    monkeypatch.setitem(tables.TABLES, "tiny", tiny_table)
    results = ["--collect", str(tmp_path / "results"), "--accelerator", "cpu", "--cells", "mean"]
    assert main(["reproduce", "tiny", "--out", str(tmp_path / "first"), *results]) == 0
    place = tmp_path / "results" / "tiny-paper" / TESTED
    (place / "conditions.json").unlink()
    with_last(place, loss=json.loads((place / "record.json").read_text())["results"]["last"]["loss"] * 1.01)
    before = (place / "record.json").read_bytes()
    capsys.readouterr()
    command = ["reproduce", "tiny", "--missing", "--out", str(tmp_path / "second"), *results]
    for options in ([], ["--dry-run"]):
        assert main([*command, *options]) == 1
        told = capsys.readouterr()
        assert "0 cells, 0 done before" in told.out
        assert f"not done: {TESTS}: {place} is kept without it" in told.err
        assert "move that away" in told.err
    assert (place / "record.json").read_bytes() == before
    assert not (tmp_path / "second" / "tiny-paper" / TESTED).exists()


def test_a_kept_record_says_that_it_began_with_another_run_than_the_kept_one(tmp_path, monkeypatch):
    table = tiny_table()
    plain = replace(table.entries[0], conditions={}, published_conditions={})
    begun = Entry("again", "clean", tiny_recipe(), None, start=("mean", "clean"))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: replace(table, entries=(plain, begun)))
    results = tmp_path / "results" / "tiny-paper"
    command = ["reproduce", "tiny", "--missing", "--collect", str(tmp_path / "results"), "--accelerator", "cpu"]
    assert main([*command, "--out", str(tmp_path / "first")]) == 0
    assert json.loads((results / "again--clean/seed-0/record.json").read_text())["notes"] == []
    shutil.rmtree(results / "again--clean")
    with_last(results / TESTED, top1=0.9)
    assert main([*command, "--out", str(tmp_path / "second")]) == 0
    (note,) = json.loads((results / "again--clean/seed-0/record.json").read_text())["notes"]
    assert note.startswith("it begins with another run of mean--clean/seed-0 than the one kept beside it: top-1 0.")
    assert note.endswith(" instead of 0.9000")


def test_the_command_trains_what_is_missing_and_prints_all_that_is_kept(tmp_path, monkeypatch, capsys):
    table = replace(tiny_table(), entries=(tiny_table().entries[1], Entry("mean", "clean", tiny_recipe())))
    monkeypatch.setitem(tables.TABLES, "tiny", lambda: table)
    results = ["--collect", str(tmp_path / "results"), "--accelerator", "cpu"]
    assert main(["reproduce", "tiny", "--cells", "max", "--out", str(tmp_path / "first"), *results]) == 0
    kept_record = tmp_path / "results" / "tiny-paper" / OTHER / "record.json"
    before = kept_record.read_bytes()
    capsys.readouterr()

    command = ["reproduce", "tiny", "--missing", "--out", str(tmp_path / "second"), *results]
    assert main([*command, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "1 cell, 0 done before" in told
    assert f"left out, as {tmp_path / 'results' / 'tiny-paper'} has them: 1 cell\n" in told

    assert main(command) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines() if " clean " in line]
    assert [row[0] for row in rows] == ["max", "mean"]
    assert all(float(row[2]) >= 0 for row in rows)  # the kept one has its number too
    assert kept_record.read_bytes() == before
    assert not (tmp_path / "second" / "tiny-paper" / OTHER).exists()
    held = json.loads((tmp_path / "results" / "tiny-paper" / "table.json").read_text())
    assert [len(number["values"]) for number in held["numbers"]] == [1, 1]

    assert main(command) == 0
    assert "0 cells, 0 done before" in capsys.readouterr().out


def test_missing_without_a_folder_of_records_and_for_times_is_one_mistake(tmp_path, capsys):
    assert main(["reproduce", "dcnet-table3", "--missing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--missing goes with --collect FOLDER" in line
    assert main(["reproduce", "pooling-runtime", "--missing", "--collect", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "it takes no --missing" in line
