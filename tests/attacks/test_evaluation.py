"""Evaluations: records with conditions and doubts, repeatable, resumable, and clear about bad input."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from attack_models import EPSILON, Detached, Noisy, Quantized, digits, sample, trained
from torch import nn

from hyperball import attacks
from hyperball.attacks import NoGradient, RecordError, Robustness, evaluate_robustness, parse, parse_epsilon, perturb
from hyperball.attacks.arguments import budget_text
from hyperball.attacks.bench import make_bench
from hyperball.attacks.methods.auto import MissingExtra, members
from hyperball.attacks.methods.table import parse_all

FEW = {"epsilon": EPSILON, "checks": False, "batch_size": 16}


def timeless(record: dict) -> dict:
    """A record without what differs from run to run."""
    copy = json.loads(json.dumps(record))
    for entry in copy["attacks"]:
        del entry["seconds"]
    return copy


def test_a_record_holds_every_image_and_its_accuracies_are_their_means():
    model, (x, y) = trained(), sample(60)
    result = evaluate_robustness(model, x, y, attacks="fgsm,pgd(restarts=3),noise", **FEW)
    clean = model(x).argmax(1) == y
    assert result.clean_accuracy == pytest.approx(float(clean.float().mean()))
    standing = clean
    for text in ("fgsm", "pgd(restarts=3)", "noise"):
        verdict = result.verdict(text)
        moved = perturb(model, x, y, EPSILON, text)[0]
        assert torch.equal(verdict.correct, clean & (model(moved).argmax(1) == y))
        assert result.accuracy(text) == pytest.approx(float(verdict.correct.float().mean()))
        assert float(verdict.distance[~clean].max()) == 0  # what is wrong already is not attacked
        assert float(verdict.distance.max()) <= EPSILON * 1.00001
        standing = standing & verdict.correct
    assert result.worst_case == pytest.approx(float(standing.float().mean()))
    stages = result.record["attacks"][1]["stages"]
    assert [stage["stage"] for stage in stages] == ["restart 1", "restart 2", "restart 3"]
    assert stages[-1]["accuracy"] == result.accuracy("pgd(restarts=3)") <= stages[0]["accuracy"]


def test_bytes_and_floats_give_the_same_record():
    model, (x, y) = trained(), sample(40)
    first = evaluate_robustness(model, (255 * x).round().to(torch.uint8), y, attacks="bim", **FEW)
    second = evaluate_robustness(model, x, y, attacks="bim", **FEW)
    assert timeless(first.record) == timeless(second.record)


@pytest.mark.parametrize("text", ["pgd(steps=5)", "apgd(steps=5)", "square(queries=30)", "noise"])
def test_one_seed_gives_one_record_and_leaves_torch_generator_alone(text):
    model, (x, y) = Noisy(trained()).eval() if text == "noise" else trained(), sample(40)
    before = torch.get_rng_state()
    records = [timeless(evaluate_robustness(model, x, y, attacks=text, seed=seed, **FEW).record) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert records[0] == records[1]
    assert records[0]["attacks"][0]["loss"] != records[2]["attacks"][0]["loss"]


@pytest.mark.parametrize("text", ["pgd(steps=5)", "square(queries=80)", "noise(k=3)"])
def test_random_numbers_of_an_image_do_not_depend_on_its_batch(text):
    model, (x, y) = trained(), sample(40)
    options = {"epsilon": EPSILON, "checks": False, "attacks": text}
    one, other = (evaluate_robustness(model, x, y, batch_size=size, **options).verdict(text) for size in (7, 40))
    assert torch.equal(one.correct, other.correct)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-3, atol=1e-4)


class Stop(Exception):
    pass


def interrupted_after(batches: int):
    seen = []

    def progress(text: str, done: int, total: int) -> None:
        seen.append(text)
        if len(seen) >= batches:
            raise Stop

    return progress


@pytest.mark.parametrize("batches", [1, 4, 9])
def test_an_interrupted_evaluation_goes_on_and_ends_in_the_same_record(tmp_path, batches):
    model, (x, y) = trained(), sample(60)
    path = tmp_path / "runs" / "attack.json"
    options = {"attacks": "fgsm,pgd(steps=3, restarts=2)", "path": path, **FEW}
    with pytest.raises(Stop):
        evaluate_robustness(model, x, y, progress=interrupted_after(batches), **options)
    journal = path.with_name("attack.json.partial.jsonl")
    assert not path.exists()
    lines = journal.read_text().splitlines()
    assert len(lines) == batches + 1
    journal.write_text("\n".join(lines) + '\n{"key": "torn')
    again = evaluate_robustness(model, x, y, **options)
    assert not journal.exists()
    whole = evaluate_robustness(model, x, y, **{**options, "path": None})
    assert timeless(again.record) == timeless(whole.record)
    assert Robustness.read(path).record == again.record


def test_what_is_done_is_not_done_again(tmp_path):
    model, (x, y) = trained(), sample(60)
    path = tmp_path / "attack.json"
    seen: list[str] = []
    options = {"path": path, "progress": lambda text, done, total: seen.append(text), **FEW}
    first = evaluate_robustness(model, x, y, attacks="fgsm,bim", **options)
    seen.clear()
    second = evaluate_robustness(model, x, y, attacks="bim,noise", **options)
    assert not any("bim" in text for text in seen)
    assert any("noise" in text for text in seen)
    assert [entry["attack"] for entry in second.record["attacks"]] == ["fgsm", "bim", "noise"]
    assert second.record["attacks"][:2] == first.record["attacks"]
    seen.clear()
    assert evaluate_robustness(model, x, y, attacks="noise", **options).record == second.record
    assert not seen


@pytest.mark.parametrize("change", [{"epsilon": 0.2}, {"seed": 5}, {"norm": "l2"}])
def test_a_record_of_another_evaluation_is_refused(tmp_path, change):
    model, (x, y) = trained(), sample(20)
    options = {"attacks": "fgsm", "path": tmp_path / "attack.json", **FEW}
    evaluate_robustness(model, x, y, **options)
    with pytest.raises(RecordError, match=f"`{next(iter(change))}` is"):
        evaluate_robustness(model, x, y, **{**options, **change})
    assert evaluate_robustness(model, x, y, **{**options, **change, "resume": False}).record["attacks"]


def test_other_weights_are_another_evaluation(tmp_path):
    x, y = sample(20)
    options = {"attacks": "fgsm", "path": tmp_path / "attack.json", **FEW}
    evaluate_robustness(trained(), x, y, **options)
    with pytest.raises(RecordError, match="`model_sha256`"):
        evaluate_robustness(trained(seed=1), x, y, **options)


def test_checks_run_by_default_and_every_table_prints_the_doubts():
    x, y = sample(40)
    result = evaluate_robustness(
        Quantized(trained()).eval(), x, y,
        epsilon=EPSILON, attacks=["bim", "transfer"], source=trained(), check_images=20,
    )  # fmt: skip
    assert len(result.doubts) >= 4
    assert all(doubt in result.table() for doubt in result.doubts)
    assert any("black box should not be stronger" in doubt for doubt in result.doubts)
    assert f"linf {EPSILON}, n=40, seed 0" in result.table()
    conditions = result.record["conditions"]
    assert {"epsilon", "norm", "images", "seed", "device", "versions", "classes", "tf32"} <= set(conditions)
    json.dumps(result.record, allow_nan=False)


def test_a_slim_record_keeps_accuracies_and_masks():
    x, y = sample(60)
    whole = evaluate_robustness(trained(), x, y, attacks="fgsm,noise", **FEW)
    slim = whole.slim()
    assert slim.table() == whole.table()
    assert slim.record["attacks"][0]["correct"] == whole.record["attacks"][0]["correct"]
    assert "loss" in whole.record["attacks"][0]
    assert len(json.dumps(slim.record["attacks"])) < len(json.dumps(whole.record["attacks"])) / 2


def test_checks_that_were_switched_off_are_a_doubt():
    x, y = sample(10)
    assert "switched off" in evaluate_robustness(trained(), x, y, attacks="fgsm", **FEW).doubts[0]


def test_a_budget_of_zero_is_the_clean_accuracy():
    x, y = sample(40)
    result = evaluate_robustness(trained(), x, y, attacks="fgsm,apgd,square", **{**FEW, "epsilon": 0})
    assert {result.accuracy(text) for text in ("fgsm", "apgd", "square")} == {result.clean_accuracy}


@pytest.mark.parametrize("epsilon", [0, "1e-400"])
def test_a_budget_of_zero_is_a_doubt(epsilon):
    result = evaluate_robustness(trained(), *sample(40), epsilon=epsilon, attacks="fgsm")
    assert result.doubts == ["epsilon is 0: nothing was attacked"]
    assert "doubts: none" not in result.table()


def test_progress_tells_masking_checks_from_the_attacks_asked_for():
    seen: set[str] = set()
    progress = lambda text, done, total: seen.add(text)  # noqa: E731
    evaluate_robustness(trained(), *sample(20), epsilon=EPSILON, attacks="fgsm", check_images=4, progress=progress)
    asked = {text for text in seen if not text.startswith("masking checks: ")}
    assert {text.split()[0] for text in asked} == {"clean", "fgsm"}
    assert any(text.startswith("masking checks: square(queries=500)") for text in seen)


def perceptron() -> nn.Module:
    """A network of two linear layers, so sure that only the targeted members of AutoAttack have a gradient."""
    inputs, labels, _, _ = digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(150):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    for parameter in model[3].parameters():
        parameter.data *= 1e3
    return model.eval().requires_grad_(False)


def test_autoattack_breaks_the_images_that_pyautoattack_breaks():
    from pyautoattack import AutoAttack

    model, (x, y) = perceptron(), sample(100)
    theirs = AutoAttack(model, norm="Linf", eps=0.12, seed=0, version="standard")
    theirs.square.n_queries = 100
    _, labels = theirs.run_standard_evaluation(x, y, batch_size=100)
    ours = evaluate_robustness(model, x, y, epsilon=0.12, attacks="auto(queries=100)", checks=False, batch_size=100)
    assert torch.equal(ours.verdict("auto(queries=100)").correct, labels == y)
    stages = {stage["stage"]: stage["accuracy"] for stage in ours.record["attacks"][0]["stages"]}
    assert list(stages) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    assert stages["apgd-t"] < stages["apgd-ce"] - 0.5  # by the targets


@pytest.mark.parametrize("classes, targets", [(10, 9), (4, 3), (100, 9)])
def test_members_of_autoattack_have_the_settings_of_the_standard_version(classes, targets):
    x = torch.rand(2, 1, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, classes)).eval()
    task = make_bench(model, x, torch.zeros(2).long(), epsilon=0.1).task(torch.arange(2))
    found = members(task)
    assert (found.apgd_targeted.n_target_classes, found.fab.n_target_classes) == (targets, targets)
    assert (found.apgd.n_iter, found.apgd_targeted.n_iter, found.fab.n_iter) == (100, 100, 100)
    assert (found.apgd.n_restarts, found.apgd_targeted.n_restarts, found.square.n_queries) == (1, 1, 5000)
    assert found.apgd.eps == found.apgd_targeted.eps == found.fab.eps == found.square.eps == 0.1


def test_autoattack_with_two_classes_leaves_out_what_does_not_exist():
    x, _ = sample(6)
    model = nn.Sequential(trained(), nn.Linear(10, 2)).eval()
    labels = model(x).argmax(1)
    result = evaluate_robustness(model, x, labels, attacks="auto(queries=20)", **FEW)
    assert [stage["stage"] for stage in result.record["attacks"][0]["stages"]] == ["apgd-ce", "fab", "square"]
    with pytest.raises(ValueError, match="dlr needs at least 3 classes, got 2"):
        evaluate_robustness(model, x, labels, attacks="apgd-dlr", **FEW)


def test_square_breaks_images_without_gradients_and_more_with_more_queries():
    x, y = sample(60)
    model = Detached(trained()).eval()
    shares = [evaluate_robustness(model, x, y, attacks=f"square(queries={n})", **FEW).worst_case for n in (2, 50, 400)]
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.5


def test_images_made_on_another_model_harm_less_than_those_made_on_the_model():
    x, y = sample(100)
    result = evaluate_robustness(
        trained(), x, y, attacks=["bim", "transfer(attack='bim')"], source=trained(seed=1), **FEW
    )
    assert result.accuracy("bim") < result.accuracy("transfer(attack='bim')") < result.clean_accuracy


def test_a_missing_extra_is_named(monkeypatch):
    x, y = sample(4)
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    with pytest.raises(MissingExtra, match=r"pip install 'hyperball\[attack\]'"):
        evaluate_robustness(trained(), x, y, attacks="fgsm,auto", **FEW)


def test_importing_attacks_imports_no_extra():
    extras = ("pyautoattack", "foolbox", "torchvision", "timm", "lightning_fabric")
    code = f"import sys, hyperball.attacks; print([name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


GOOD = {"8/255": 8 / 255, " 8 / 255 ": 8 / 255, "0.03": 0.03, "1e-2": 0.01, ".5": 0.5, 0: 0.0, 0.25: 0.25, "0": 0.0}
BAD = ["-1/255", -0.1, "8/0", "8//255", "8/255/2", "nan", "inf", float("nan"), float("inf"), "", "2**3", "open('x')"]


@pytest.mark.parametrize("texts", [("8/255", " 8 / 255 ", 8 / 255, "16/510"), ("0.03", 0.03, "3e-2"), ("0.5", "1/2")])
def test_one_budget_has_one_text(texts):
    assert {budget_text(parse_epsilon(text)) for text in texts} == {texts[0]}


@pytest.mark.parametrize("text", ["0", "1", "0.2", "1/255", "254/255", "1e-300"])
def test_the_text_of_a_budget_is_that_budget(text):
    assert budget_text(parse_epsilon(text)) == text


@pytest.mark.parametrize("text", GOOD)
def test_budgets_are_numbers_or_fractions(text):
    assert parse_epsilon(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_other_budgets_are_refused(text):
    with pytest.raises(ValueError, match="`epsilon` must"):
        parse_epsilon(text)


MISTAKES = {
    "above one": (lambda: {"inputs": 2 * sample(4)[0]}, r"`inputs` must be pixels in \[0, 1\], got values from 0 to"),
    "NaN": (lambda: {"inputs": torch.full((4, 1, 8, 8), float("nan"))}, r"`inputs` must be pixels in \[0, 1\]"),
    "shape": (lambda: {"inputs": torch.zeros(4, 8)}, r"must be at least one image \[N, C, H, W\], got \(4, 8\)"),
    "training": (lambda: {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}, r"call model.eval\(\) first"),
    "part in training": (lambda: {"model": half_training()}, r"1 of its modules are training \(1\)"),
    "no model": (lambda: {"model": 3}, "`model` must be a module or a function"),
    "no logits": (lambda: {"model": nn.Flatten(0).eval()}, r"logits \[2, classes >= 2\], got \(128,\)"),
    "negative budget": (lambda: {"epsilon": -0.1}, "`epsilon` must be finite and >= 0, got -0.1"),
    "budget in bytes": (lambda: {"epsilon": 8}, "did you mean 8/255?"),
    "label": (lambda: {"labels": torch.tensor([0, 1, 2, 10])}, r"`labels` must be in 0..9, .* got 10"),
    "negative label": (lambda: {"labels": torch.tensor([0, 1, 2, -1])}, r"`labels` must be in 0..9, .* got -1"),
    "labels": (lambda: {"labels": torch.zeros(3, dtype=torch.int64)}, "`labels` must be 4 integers"),
    "attack": (lambda: {"attacks": "fgms"}, "unknown attack 'fgms'; did you mean 'fgsm'?"),
    "parameter": (lambda: {"attacks": "pgd(step_size=1)"}, "pgd has no parameter 'step_size'; did you mean 'step'?"),
    "code": (lambda: {"attacks": "pgd(steps=int('3'))"}, "as literals"),
    "steps": (lambda: {"attacks": "pgd(steps=0)"}, "`steps` must be a whole number >= 1, got 0"),
    "twice": (lambda: {"attacks": "pgd,pgd(steps=20)"}, "`attacks` has pgd twice"),
    "nothing": (lambda: {"attacks": ""}, "`attacks` must name at least one of fgsm"),
    "norm": (lambda: {"norm": "l3"}, "unknown norm 'l3'"),
    "no source": (lambda: {"attacks": "transfer"}, "`source` must be given"),
    "no gradient": (lambda: {"model": Detached(trained()).eval()}, "gives no gradient with respect to its input"),
    "no layers": (lambda: {"attacks": "surrogate"}, "`model` must have a declarative layer"),
    "batch": (lambda: {"batch_size": 0}, "`batch_size` must be a whole number >= 1"),
    "seed": (lambda: {"seed": 1.0}, r"`seed` must be a whole number >= 0, got 1\.0"),
    "a number": (lambda: {"attacks": 3}, '`attacks` must be texts such as "fgsm,pgd.*got 3'),
    "path": (lambda: {"path": ""}, "`path` must be the name of a file, got ''"),
    "a path that is none": (lambda: {"path": 3}, "`path` must be the name of a file, got 3"),
    "source without gradients": (
        lambda: {"attacks": "transfer(attack='apgd')", "source": Detached(trained()).eval()},
        r"`source` gives no gradient .*transfer\(attack='square'\)",
    ),
}


@pytest.mark.parametrize("text", ["transfer", "transfer(attack='fgsm')", "transfer(attack='apgd')"])
def test_a_source_without_gradients_is_named_by_perturb_too(text):
    source = Detached(trained()).eval()
    with pytest.raises(NoGradient, match="`source` gives no gradient"):
        perturb(trained(), *sample(4), EPSILON, text, source=source)
    moved, _ = perturb(trained(), *sample(4), EPSILON, "transfer(attack='square(queries=5)')", source=source)
    assert moved.shape == (4, 1, 8, 8)


def test_a_source_without_gradients_does_not_end_the_checks():
    found = evaluate_robustness(
        trained(), *sample(40), epsilon=EPSILON, attacks="fgsm", source=Detached(trained()).eval(), check_images=32
    )
    assert len(found.record["checks"]) > 8
    assert found.doubts == [
        "white box is at least as strong as transfer: this check was left out, for the source gives no gradient"
    ]


def half_training() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 10)).eval()
    model[1].train()
    return model


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_at_the_door(mistake):
    given, message = MISTAKES[mistake]
    x, y = sample(4)
    arguments = {"model": trained(), "inputs": x, "labels": y, "attacks": "fgsm", **FEW, **given()}
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate_robustness(arguments.pop("model"), arguments.pop("inputs"), arguments.pop("labels"), **arguments)


def test_a_model_without_gradients_is_an_error_of_its_own():
    x, y = sample(4)
    with pytest.raises(NoGradient):
        perturb(Detached(trained()).eval(), x, y, EPSILON, "fgsm")


@pytest.mark.parametrize("name", attacks.names())
def test_every_attack_is_its_text(name):
    attack = parse(name)
    assert str(attack) == name
    assert parse(str(attack)) == attack
    json.dumps(attack.conditions(EPSILON))


def test_commas_inside_parentheses_do_not_separate():
    found = parse_all("fgsm, pgd(steps=5, restarts=2),transfer(attack='bim(steps=3, step=\"2/255\")')")
    assert [str(attack) for attack in found][:2] == ["fgsm", "pgd(steps=5, restarts=2)"]
    assert parse_all([str(attack) for attack in found]) == found
