"""Records of attacks: whose they are, what a further call keeps, and files that are something else."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from attack_models import EPSILON, Around, Quantized, sample, trained
from torch import Tensor, nn

from hyperball.attacks import RecordError, Robustness, evaluate_robustness
from hyperball.attacks.journal import alike, is_line
from hyperball.attacks.lock import alone
from hyperball.attacks.methods.table import parse

FEW = {"epsilon": EPSILON, "checks": False, "batch_size": 16}


class Weighed(Around):
    """Logits times a buffer that no state dict holds."""

    def __init__(self, base: nn.Module, factor: float) -> None:
        super().__init__(base)
        self.register_buffer("factor", torch.linspace(1.0, factor, 10), persistent=False)

    def after(self, logits: Tensor) -> Tensor:
        return logits * self.factor


def hooked() -> nn.Module:
    model = Around(trained()).eval()
    model.register_forward_hook(lambda module, given, logits: logits.roll(1, 1))
    return model


def function(seed: int):
    model = trained(seed=seed)
    return lambda x: model(x)


OTHERS = {
    "functions": (lambda: function(0), lambda: function(1)),
    "buffers": (lambda: Weighed(trained(), 1.0).eval(), lambda: Weighed(trained(), 3.0).eval()),
    "hooks": (lambda: Around(trained()).eval(), hooked),
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_record_of_a_model_is_not_that_of_another_with_the_same_weights(tmp_path, case):
    (x, y), (first, second) = sample(20), (make() for make in OTHERS[case])
    options = {"attacks": "fgsm", "path": tmp_path / "attack.json", **FEW}
    found = evaluate_robustness(first, x, y, **options)
    assert evaluate_robustness(first, x, y, **options).record == found.record
    with pytest.raises(RecordError, match=r"gives other logits here .*--fresh"):
        evaluate_robustness(second, x, y, **options)


def test_another_source_is_refused_and_a_first_one_is_not(tmp_path):
    x, y = sample(20)
    options = {"path": tmp_path / "attack.json", **FEW}
    first, second = function(1), function(2)
    evaluate_robustness(trained(), x, y, attacks="fgsm", **options)
    found = evaluate_robustness(trained(), x, y, attacks="transfer(attack='fgsm')", source=first, **options)
    assert len(found.record["attacks"]) == 2
    with pytest.raises(RecordError, match="the source gives other logits"):
        evaluate_robustness(trained(), x, y, attacks="transfer", source=second, **options)


def stop(text: str, done: int, total: int) -> None:
    if "pgd" in text:
        raise KeyboardInterrupt


def test_files_without_answers_or_versions_go_on(tmp_path):
    x, y = sample(40)
    path, journal = tmp_path / "attack.json", tmp_path / "attack.json.partial.jsonl"
    options = {"path": path, **FEW}
    with pytest.raises(KeyboardInterrupt):
        evaluate_robustness(trained(), x, y, attacks="fgsm,pgd(steps=2)", progress=stop, **options)
    head, *lines = map(json.loads, journal.read_text().splitlines())
    for key in ("answers", "source_answers"):
        del head["evaluation"][key]
    journal.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    seen: list[str] = []
    progress = {"progress": lambda text, done, total: seen.append(text)}
    record = evaluate_robustness(trained(), x, y, attacks="fgsm,pgd(steps=2)", **options, **progress).record
    whole = evaluate_robustness(trained(), x, y, attacks="fgsm,pgd(steps=2)", **FEW)
    assert record["worst_case"] == whole.worst_case
    for key in ("answers", "source_answers"):
        del record["conditions"][key]
    record["conditions"]["versions"] = {"torch": "1.0"}
    for entry in record["attacks"]:
        del entry["versions"]
    path.write_text(json.dumps(record))
    seen.clear()
    found = evaluate_robustness(trained(), x, y, attacks="noise", **options, **progress).record
    assert not any("pgd" in text or "fgsm" in text for text in seen)
    assert [entry["versions"]["torch"] for entry in found["attacks"]] == ["1.0", "1.0", version("torch")]


def test_checks_that_were_run_stay_when_attacks_are_added_without(tmp_path):
    x, y = sample(40)
    options = {"epsilon": EPSILON, "path": tmp_path / "attack.json", "check_images": 4}
    first = evaluate_robustness(trained(), x, y, attacks="fgsm", **options)
    assert first.record["checks"]
    assert "too few" in " ".join(first.doubts)
    again = evaluate_robustness(trained(), x, y, attacks="fgsm", checks=False, **options)
    assert again.record == first.record
    again = evaluate_robustness(trained(), x, y, attacks="fgsm,noise", checks=False, **options)
    assert again.record["checks"] == first.record["checks"]
    assert again.doubts == [*first.doubts, "noise came without masking checks, and no check compared it with others"]
    assert [entry["checked"] for entry in again.record["attacks"]] == [True, False]


def test_checks_compare_an_attack_that_was_added_without_them(tmp_path):
    x, y = sample(40)
    options = {"epsilon": EPSILON, "path": tmp_path / "attack.json", "check_images": 32}
    hidden = Quantized(trained()).eval()
    evaluate_robustness(hidden, x, y, attacks="bim", **options)
    added = evaluate_robustness(hidden, x, y, attacks="square(queries=400)", checks=False, **options)
    assert "square(queries=400) came without" in added.doubts[-1]
    found = evaluate_robustness(hidden, x, y, attacks="square(queries=400)", **options)
    assert any("square(queries=400) leaves" in doubt and "black box" in doubt for doubt in found.doubts)
    assert not any("came without" in doubt for doubt in found.doubts)
    assert evaluate_robustness(hidden, x, y, attacks="bim", **options).record == found.record


def test_a_record_from_before_checks_were_kept_by_attack_counts_as_checked(tmp_path):
    path, (x, y) = tmp_path / "attack.json", sample(40)
    options = {"epsilon": EPSILON, "path": path, "check_images": 4}
    record = evaluate_robustness(trained(), x, y, attacks="fgsm", **options).record
    del record["attacks"][0]["checked"]
    path.write_text(json.dumps(record))
    seen: list[str] = []
    evaluate_robustness(trained(), x, y, attacks="fgsm", progress=lambda *line: seen.append(line[0]), **options)
    assert not seen


@pytest.mark.parametrize("about", [{"a": float("nan")}, {"a": object()}, {"a": torch.ones(2)}])
def test_what_json_cannot_hold_is_refused_before_anything_runs(about):
    calls: list[int] = []

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        return trained()(x)

    with pytest.raises(ValueError, match="`about` must be names and numbers"):
        evaluate_robustness(model, *sample(4), attacks="fgsm", about=about, **FEW)
    assert not calls


def test_a_second_process_on_one_record_is_refused(tmp_path):
    path = tmp_path / "attack.json"
    code = (
        "import sys, pathlib\nfrom hyperball.attacks.lock import alone\n"
        "with alone(pathlib.Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    options = {"attacks": "fgsm", "path": path, **FEW}
    with pytest.raises(RecordError, match="another evaluation is writing"):
        evaluate_robustness(trained(), *sample(4), **options)
    process.communicate("")
    assert evaluate_robustness(trained(), *sample(4), **options).record
    assert [held.name for held in tmp_path.iterdir()] == ["attack.json"]
    with alone(None):
        pass


FOREIGN = [b"[]", b"null", b'"a"', b"5", b"{}", b'{"conditions": {}}', b"\xff\xfe", b"hello"]
HEAD = b'{"evaluation": {}}\n'
UNEVEN = b'{"key": "clean", "correct": "11", "loss": [0.5], "distance": [0.0, 0.0], "seconds": 1}'
JOURNALS = [*FOREIGN, b'{"evaluation": null}', HEAD + b"[]", HEAD + b'{"key": "clean"}', HEAD + b"7", HEAD + UNEVEN]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_that_is_no_record_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "attack.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"attack\.json is (no|not a readable) record"):
        evaluate_robustness(trained(), *sample(4), attacks="fgsm", path=path, **FEW)
    with pytest.raises(RecordError):
        Robustness.read(path)
    assert path.read_bytes() == content


def damaged(**changes: object):
    """The change of a record's first attack."""
    return lambda record: record["attacks"][0].update(changes)


DAMAGES = {
    "short": (damaged(correct="101"), "`correct` of fgsm is not of 20 images"),
    "no marks": (damaged(correct=[1] * 20), "an attack lacks its text, accuracy, stages or images"),
    "losses": (damaged(loss=[0.0]), "`loss` of fgsm is not of 20 images"),
    "a text among the losses": (damaged(loss=["x"] * 20), "`loss` of fgsm holds something else than numbers"),
    "lists of distances": (damaged(distance=[[1.0]] * 20), "`distance` of fgsm holds something else than numbers"),
    "distance": (damaged(distance=3), "`distance` of fgsm is not of 20 images"),
    "attack": (damaged(attack="frob"), "unknown attack 'frob'"),
    "parameter": (damaged(attack="pgd(frob=1)"), "pgd has no parameter 'frob'"),
    "kind": (damaged(attack="pgd(steps='x')"), "`steps` must be a whole number"),
    "accuracy": (damaged(accuracy="x"), "an attack lacks its text, accuracy"),
    "twice": (lambda record: record["attacks"].append(record["attacks"][0]), "`attacks` has fgsm twice"),
    "clean": (lambda record: record["clean"].update(correct="1"), "`correct` of clean is not of 20 images"),
    "images": (lambda record: record["conditions"].update(images=19), "is not of 19 images"),
    "check": (lambda record: record["checks"].append({"name": "x"}), "a check says nothing of its doubt"),
    "conditions": (lambda record: record["conditions"].pop("norm"), "is no record of robustness"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_record_is_named_and_left_alone(tmp_path, case):
    (change, message), path, (x, y) = DAMAGES[case], tmp_path / "attack.json", sample(20)
    options = {"attacks": "fgsm", "path": path, **FEW}
    record = evaluate_robustness(trained(), x, y, **options).record
    change(record)
    path.write_text(json.dumps(record))
    for use in (lambda: Robustness.read(path), lambda: evaluate_robustness(trained(), x, y, **options)):
        with pytest.raises(RecordError, match=r"attack\.json is no record of robustness") as caught:
            use()
        assert message in str(caught.value)
    assert json.loads(path.read_text()) == record


@pytest.mark.parametrize("content", JOURNALS)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "attack.json.partial.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"is no (readable )?journal.*; move it away"):
        evaluate_robustness(trained(), *sample(4), attacks="fgsm", path=tmp_path / "attack.json", **FEW)
    assert path.read_bytes() == content


def test_a_slim_record_goes_on(tmp_path):
    path, (x, y) = tmp_path / "attack.json", sample(20)
    whole = evaluate_robustness(trained(), x, y, attacks="fgsm", path=path, **FEW)
    whole.slim().write(path)
    verdict = Robustness.read(path).verdict("fgsm")
    assert torch.equal(verdict.correct, whole.verdict("fgsm").correct)
    assert verdict.loss.isnan().all()
    found = evaluate_robustness(trained(), x, y, attacks="fgsm,noise", path=path, **FEW)
    assert found.accuracy("fgsm") == whole.accuracy("fgsm")


@pytest.mark.parametrize("text", ["fgsm()", " fgsm", "pgd(steps=20)", "pgd(restarts=1, steps=20)"])
def test_an_attack_is_found_by_any_of_its_texts(text):
    found = evaluate_robustness(trained(), *sample(4), attacks="fgsm,pgd", **FEW)
    assert found.accuracy(text) == found.accuracy("fgsm" if "fgsm" in text else "pgd")


class Extra(Around):
    def __init__(self, base: nn.Module, extra: object) -> None:
        super().__init__(base)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


def test_extra_state_is_part_of_a_model():
    digests = [
        evaluate_robustness(Extra(trained(), extra).eval(), *sample(4), attacks="fgsm", **FEW).record["conditions"]
        for extra in ({"a": 1}, {"a": 1}, {"a": 2}, torch.ones(2))
    ]
    first, same, *others = (conditions["model_sha256"] for conditions in digests)
    assert first == same
    assert first not in others


@pytest.mark.parametrize("loss", [["x"], [[1.0]], [True], [1.0, 2.0], 3])
def test_a_line_of_a_journal_holds_numbers(loss):
    sound = {"key": "fgsm", "correct": "1", "loss": [None], "distance": [0.5], "seconds": 1.0}
    assert is_line(sound)
    assert not is_line({**sound, "loss": loss})


@pytest.mark.parametrize("odd", ["x", [1.0, 2.0], {}])
def test_logits_that_are_none_are_like_no_others(odd):
    table = {"logits": [[1.0, 2.0]], "within": 1e-3}
    assert alike(table, table)
    assert not alike({"logits": [[1.0, odd]], "within": 1e-3}, table)


def test_a_sum_of_attacks_is_refused():
    with pytest.raises(ValueError, match="give parameters by name"):
        parse("pgd(steps=5)+fgsm()")
