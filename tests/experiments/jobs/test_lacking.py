"""`reproduce --missing`: the cells that a folder of kept records lacks, and those that they need."""

import json
from dataclasses import replace

import pytest
from experiment_cases import tiny_recipe, tiny_table, write_record

from hyperball.cli import main
from hyperball.experiments import tables
from hyperball.experiments.jobs.attack_jobs import with_attacks
from hyperball.experiments.jobs.conditions import with_conditions
from hyperball.experiments.jobs.lacking import lacking
from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.reproduce import jobs_of
from hyperball.experiments.table import Entry
from hyperball.training.files import write_json

TESTED, OTHER = "mean--clean/seed-0", "max--clean/seed-0"


def kept(job, out, kept_in):
    """A job whose folder is that of its kept record."""
    return replace(job, folder=kept_in / job.folder.relative_to(out))


def names(jobs):
    return [job.cell.name for job in jobs]


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
    assert lacking(jobs, out, store) == jobs
    assert names(jobs) == [TESTED, "mean--clean_tests/seed-0", OTHER]


def test_a_kept_cell_is_left_out_and_its_tests_with_it(jobs, out, store):
    write_record(kept(jobs[0], out, store))
    write_json(store / TESTED / "conditions.json", {"50 %": {"top1": 0.5}})
    assert names(lacking(jobs, out, store)) == [OTHER]
    write_record(kept(jobs[2], out, store))
    assert lacking(jobs, out, store) == []


@pytest.mark.parametrize("conditions", [None, {}, {"10 %": {"top1": 0.5}}], ids=["no file", "none", "another"])
def test_a_cell_of_which_a_test_is_lacking_is_trained_again(conditions, jobs, out, store):
    write_record(kept(jobs[0], out, store))
    if conditions is not None:
        write_json(store / TESTED / "conditions.json", conditions)
    assert lacking(jobs, out, store) == jobs


def test_a_kept_network_that_did_not_converge_has_no_tests(jobs, out, store):
    write_record(kept(jobs[0], out, store), status="diverged", results={})
    assert names(lacking(jobs, out, store)) == [OTHER]


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "record.json").write_text("{"),
        lambda folder: (folder / "record.json").unlink(),
        lambda folder: write_json(folder / "recipe.json", tiny_recipe(epochs=9).to_dict()),
    ],
    ids=["broken", "no record", "another recipe"],
)
def test_a_record_that_is_not_the_cell_s_is_lacking(harm, jobs, out, store):
    write_record(kept(jobs[2], out, store))
    assert OTHER not in names(lacking(jobs, out, store))
    harm(store / OTHER)
    assert OTHER in names(lacking(jobs, out, store))


def test_a_cell_that_begins_with_the_weights_of_a_kept_one_needs_it_trained(out, store):
    begun = Entry("again", "clean", tiny_recipe(), None, start=("mean", "clean"))
    last = Entry("third", "clean", tiny_recipe(), None, start=("again", "clean"))
    table = replace(tiny_table(), entries=(*tiny_table().entries, begun, last))
    made = jobs_of(table, [0], out)
    for job in made[:2]:
        write_record(kept(job, out, store))
    assert names(lacking(made, out, store)) == [TESTED, "again--clean/seed-0", "third--clean/seed-0"]
    for job in made[2:]:
        recipe = job.cell.recipe.override({"start.weights": "/".join(job.cell.recipe.start.weights.split("/")[-2:])})
        write_record(kept(replace(job, cell=replace(job.cell, recipe=recipe)), out, store))
    assert lacking(made, out, store) == []


FEW, MORE = Part("few", {"fgsm": "fgsm"}, images=10), Part("more", {"bim": "bim"}, images=10)


@pytest.mark.parametrize(
    "parts, absent, is_lacking",
    [
        ([FEW, MORE], [], False),
        ([FEW, MORE], ["more"], True),
        ([FEW], [], True),
        ([FEW, replace(MORE, images=20)], [], True),
    ],
    ids=["all", "one is not done", "one is not planned", "of another plan"],
)
def test_attacks_are_kept_where_the_record_says_that_all_are_done(parts, absent, is_lacking, out, store):
    attacks = Attacks((FEW, MORE), tiny_recipe(**{"model.pool": "max"}))
    table = replace(tiny_table(), entries=(Entry("mean", "clean", tiny_recipe(), None, attacks=attacks),))
    made = with_attacks(table, jobs_of(table, [0], out), [0])
    assert names(made) == ["source/seed-0", TESTED, "mean--clean_attacks/seed-0"]
    for job in made[:2]:
        write_record(kept(job, out, store))
    assert lacking(made, out, store) == made  # attacks need both networks
    tree = {"parts": [part.to_dict() for part in parts], "missing": absent}
    write_json(store / TESTED / "robustness.json", tree)
    assert lacking(made, out, store) == (made if is_lacking else [])


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
