"""Further tests at every evaluation of a training: what they measure, what is kept of them, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_cases import losses, same, weights, write_images

from hyperball import data
from hyperball.experiments.records.broken import odd_results
from hyperball.files import FileError, read_tree, write_json
from hyperball.training import Recipe, RecipeError, evaluate, resume, sets, train
from hyperball.training.measures.evaluation import Evaluator
from hyperball.training.storage.record import Record, read_metrics

HALF, FEW = {"outliers": 0.5}, {"outliers": 0.1}
TESTED = {"log.conditions": {"half": HALF, "few": FEW}}


def recipe(**changes) -> Recipe:
    """Four epochs of eight steps on clouds of 32 points."""
    made = Recipe.from_dict({
        "data": {"name": "clouds", "train_size": 80, "test_size": 60, "points": 32},
        "model": {"name": "points", "pool": "huber"}, "optimizer": {"lr": 0.02}, "epochs": 4, "batch_size": 10,
        "deterministic": True,
    })  # fmt: skip
    return made.override(changes)


def evaluations(folder: Path) -> list[dict]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "evaluation"]


def test_the_last_test_under_a_condition_is_that_of_an_evaluation_with_its_data(tmp_path: Path):
    record = train(recipe(**TESTED), tmp_path / "run")
    for name, changes in TESTED["log.conditions"].items():
        alone = evaluate(tmp_path / "run", data=recipe().data.override(changes)).as_dict()
        last = record.results["conditions"][name]["last"]
        assert {key: last[key] for key in alone} == alone
        assert last["epoch"] == 4
    clean = evaluate(tmp_path / "run").as_dict()
    assert {key: record.results["last"][key] for key in clean} == clean


def test_the_best_epoch_under_a_condition_is_the_highest_of_its_own_tests(tmp_path: Path):
    record = train(recipe(**TESTED), tmp_path)
    lines = evaluations(tmp_path)
    assert [set(line["conditions"]) for line in lines] == [{"half", "few"}] * 4
    for name in ("half", "few"):
        found = [line["conditions"][name] for line in lines]
        best = record.results["conditions"][name]["best"]
        assert best["top1"] == max(found)
        assert best["epoch"] == 1 + found.index(max(found))
    halves, fews = ([line["conditions"][name] for line in lines] for name in ("half", "few"))
    assert halves != fews


def test_further_tests_change_nothing_of_a_training(tmp_path: Path):
    plain, tested = train(recipe(), tmp_path / "plain"), train(recipe(**TESTED), tmp_path / "tested")
    assert losses(tmp_path / "plain") == losses(tmp_path / "tested")
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "tested"))
    under = tested.results.pop("conditions")
    assert tested.results == plain.results
    assert set(under) == {"half", "few"}
    assert "conditions" not in evaluations(tmp_path / "plain")[0]


def test_a_set_that_is_given_is_not_written_to(tmp_path: Path):
    given = data.load("clouds")
    before = given.test.inputs.clone()
    train(recipe(**TESTED, epochs=1), tmp_path, dataset=given)
    assert torch.equal(given.test.inputs, before)


def test_logits_that_are_not_finite_under_a_condition_are_noted_once(tmp_path: Path, monkeypatch):
    whole = Evaluator.measure_under

    def broken(self, condition):
        return replace(whole(self, condition), nonfinite=3 if condition == "half" else 0)

    monkeypatch.setattr(Evaluator, "measure_under", broken)
    record = train(recipe(**TESTED, epochs=2), tmp_path)
    assert [note for note in record.notes if "finite" in note] == [
        "some logits under the condition 'half' are not finite"
    ]


def test_averaged_weights_are_what_further_tests_see(tmp_path: Path):
    record = train(recipe(**TESTED, **{"regularizers.ema": 0.9}), tmp_path)
    alone = evaluate(tmp_path, data=recipe().data.override(HALF))
    last = evaluate(tmp_path, data=recipe().data.override(HALF), average=False)
    assert record.results["conditions"]["half"]["last"]["loss"] == alone.loss != last.loss


def test_a_resumed_run_remembers_the_best_epoch_before_its_stop(tmp_path: Path):
    whole = train(recipe(**TESTED), tmp_path / "whole")
    without_the_last_epoch(tmp_path / "whole")
    again = resume(tmp_path / "whole")
    assert any("resumed" in note for note in again.notes)
    assert again.results == whole.results


def test_a_finished_run_is_not_begun_anew_for_further_tests(tmp_path: Path):
    """They are no part of what determines a run's numbers."""
    done = train(recipe(), tmp_path)
    assert train(recipe(**TESTED), tmp_path, resume=True).results == done.results


REFUSED = {
    "no mapping": (3, "must map fields of `data` to other values"),
    "nothing": ({}, "must map fields of `data` to other values"),
    "names that are no texts": ({50: 0.5}, "must map fields of `data` to other values"),
    "an unknown field": ({"outlier": 0.5}, "unknown key `data.outlier`; did you mean 'outliers'?"),
    "a wrong value": ({"outliers": 2.0}, "`data.outliers` must be a share in [0, 1)"),
    "what acts on training": ({"rotate": True}, "`data.rotate` acts on training alone"),
    "fewer points": ({"points": 8}, "must keep the samples of the test split and their shape"),
    "fewer samples": ({"test_size": 10}, "must keep the samples of the test split and their shape"),
    "another set": ({"name": "modelnet40"}, "must keep the samples of the test split and their shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_condition_is_refused_by_name(case, tmp_path: Path):
    changes, words = REFUSED[case]
    with pytest.raises(RecipeError, match=r"`log\.conditions\.odd`") as raised:
        train(recipe(**{"log.conditions": {"odd": changes}}), tmp_path / "run")
    assert words in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_condition_without_a_name_is_refused():
    with pytest.raises(RecipeError, match=r"`log\.conditions\.` must map"):
        recipe(**{"log.conditions": {"": HALF}})


def test_a_set_is_read_once_for_all_conditions(tmp_path: Path, monkeypatch):
    read = []
    monkeypatch.setattr(
        sets.data, "load", lambda *given, load=data.load, **more: read.append(given) or load(*given, **more)
    )
    train(recipe(**TESTED, epochs=1), tmp_path)
    assert len(read) == 1


def test_image_files_have_no_conditions(tmp_path: Path):
    write_images(tmp_path)
    config = {"data": {"name": "folder", "image_size": 16}, "model": {"name": "resnet18", "options": {"width": 4}}}
    asked = Recipe.from_dict({**config, "batch_size": 2, "epochs": 1, "log": {"conditions": {"odd": {"workers": 1}}}})
    with pytest.raises(RecipeError, match=r"`log\.conditions` is for sets in memory, got the files of folder"):
        train(asked, tmp_path / "run", data_root=tmp_path)


@pytest.mark.parametrize(
    "under, words",
    [
        (3, "`results.conditions` must map names to results"),
        ({"half": 0.5}, "`results.conditions` must map names to results"),
        ([], "`results.conditions` must map names to results"),
        ({"half": {"best": 3}}, "`results.conditions.'half'.best` must hold metrics, got 3"),
        ({"half": {"best": {"top1": "0.5"}}}, "`results.conditions.'half'.best.top1` must be a number"),
        ({"a\n" * 500: {"best": 3}}, "must hold metrics"),
    ],
)
def test_a_record_with_odd_conditions_is_refused(under, words, tmp_path: Path):
    train(recipe(**TESTED, epochs=1), tmp_path)
    tree = read_tree(tmp_path / "record.json")
    write_json(tmp_path / "record.json", {**tree, "results": {**tree["results"], "conditions": under}})
    with pytest.raises(FileError) as raised:
        Record.read(tmp_path)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("changes", [{}, {"conditions": None}], ids=["absent", "null"])
def test_a_record_may_have_no_conditions(changes, tmp_path: Path):
    record = train(recipe(epochs=1), tmp_path)
    replace(record, results={**record.results, **changes}).write(tmp_path)
    assert Record.read(tmp_path).results == {**record.results, **changes}
    assert odd_results(Record.read(tmp_path).results) == ""


def without_the_last_epoch(folder: Path) -> None:
    max((folder / "checkpoints").iterdir()).unlink()
    (folder / "record.json").unlink()


def test_a_run_that_goes_on_with_other_conditions_forgets_those_of_before(tmp_path: Path):
    train(recipe(**TESTED), tmp_path)
    without_the_last_epoch(tmp_path)
    again = train(
        recipe(**{"log.conditions": {"half": {"outliers": 0.9}, "few": FEW, "more": HALF}}), tmp_path, resume=True
    )
    under = again.results["conditions"]
    assert set(under) == {"half", "few", "more"}
    for name in ("half", "more"):
        assert under[name]["best"] == under[name]["last"]
        assert any(f"the condition {name!r} is tested from step 24 on" in note for note in again.notes)
    lines = evaluations(tmp_path)
    assert under["few"]["best"]["top1"] == max(line["conditions"]["few"] for line in lines)
    assert not any("'few'" in note for note in again.notes)


def test_a_run_that_stopped_before_its_first_test_misses_none_of_a_condition(tmp_path: Path):
    asked = {**TESTED, "log.evaluate_every": 4}
    train(recipe(**asked), tmp_path)
    without_the_last_epoch(tmp_path)
    again = train(recipe(**asked), tmp_path, resume=True)
    assert any("resumed at step 24" in note for note in again.notes)
    assert not any("is tested from step" in note for note in again.notes)


def test_a_run_that_goes_on_without_conditions_has_none(tmp_path: Path):
    train(recipe(**TESTED), tmp_path)
    without_the_last_epoch(tmp_path)
    assert "conditions" not in train(recipe(), tmp_path, resume=True).results
