"""Tables 7 and 8: worst cases, budgets, clean accuracies, and what docs/robustness.md claims of the records."""

import base64
import json
import re

import pytest
import torch
from attack_models import sample, trained
from places import ROOT

pytest.importorskip("lightning_fabric")

from hyperball.attacks import evaluate_robustness
from hyperball.attacks.curves import rises
from hyperball.attacks.methods.task import Verdict
from hyperball.cli import main
from hyperball.experiments.plan import Attacks, Part
from hyperball.experiments.records.robust_numbers import Attacked, budgets, clean_words, located
from hyperball.experiments.records.robustness import assembled, packed, part_path, worst_case
from hyperball.training import Recipe

RECORDS = sorted((ROOT / "results" / "dcnet-robustness-quarter").glob("*/seed-*/robustness.json"))
kept = pytest.mark.skipif(not RECORDS, reason="records are not part of a source distribution")


def line(marks, **changes):
    return {"images": len(marks), "epsilon": 8 / 255, "norm": "linf", "withstood": packed(marks), **changes}


LINES = {
    "none": ([], None),
    "one": ([line("1101")], 0.75),
    "all must be withstood": ([line("1101"), line("0111"), line("1111")], 0.5),
    "fewer images do not count": ([line("11"), line("1101"), line("00")], 0.75),
    "nor does another budget": ([line("1101"), line("0000", epsilon=16 / 255)], 0.75),
    "nor another norm": ([line("1101"), line("0000", norm="l2")], 0.75),
}


@pytest.mark.parametrize("lines, expected", LINES.values(), ids=LINES)
def test_a_worst_case_is_the_share_that_withstands_every_attack_on_most_images(lines, expected):
    assert worst_case(lines) == expected


WEAK = Part("weak", {"noise": "noise(k=2)"}, ("48/255",))
STRONG = Part("strong", {"bim on all images": "bim"}, ("48/255",))
FEW = Part("few", {"fgsm": "fgsm"}, ("48/255",), images=10)
FAR = Part("far", {"bim far": "bim"}, ("1",))


@pytest.fixture(scope="module")
def attacked_parts(tmp_path_factory):
    """A folder with the records of four parts: two on all images at one budget, one on fewer, one at another budget."""
    folder = tmp_path_factory.mktemp("run")
    for part in (WEAK, STRONG, FEW, FAR):
        evaluate_robustness(
            trained(), *sample(part.images or 40),
            epsilon=part.epsilons[0], attacks=list(part.attacks.values()), checks=False, path=part_path(folder, part),
        )  # fmt: skip
    return folder


def whole_record(folder, *parts):
    plan = {"planned": [part.to_dict() for part in parts], "published": {}, "cell": {}}
    return assembled(folder, plan, lambda run_dir, part: True)


@pytest.mark.parametrize("parts", [(WEAK, STRONG), (STRONG, WEAK), (WEAK, FEW, STRONG, FAR)])
def test_the_worst_case_of_a_network_joins_all_parts_on_all_images(attacked_parts, parts):
    found = whole_record(attacked_parts, *parts)
    trees = [json.loads(part_path(attacked_parts, part).read_text()) for part in (WEAK, STRONG)]
    standing = [a == b == "1" for a, b in zip(*(tree["attacks"][0]["correct"] for tree in trees), strict=True)]
    alone = [whole_record(attacked_parts, part)["worst_case"] for part in (WEAK, STRONG)]
    assert found["worst_case"] == sum(standing) / 40
    assert found["worst_case"] <= min(alone) < max(alone)
    assert [entry["name"] for entry in found["attacks"]] == [name for part in parts for name in part.attacks]


def test_parts_on_other_images_or_weights_are_no_part_of_the_worst_case(attacked_parts, tmp_path):
    for key in ("data_sha256", "model_sha256"):
        for part in (WEAK, STRONG):
            tree = json.loads(part_path(attacked_parts, part).read_text())
            tree["conditions"][key] += "" if part is WEAK else "0"
            path = part_path(tmp_path, part)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(tree))
        assert whole_record(tmp_path, WEAK, STRONG)["worst_case"] == whole_record(tmp_path, WEAK)["worst_case"]


@kept
def test_the_worst_case_of_every_kept_record_is_what_its_bits_say():
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        whole = [entry for entry in record["attacks"] if entry["images"] == 10_000]
        standing = (1 << 10_000) - 1
        for entry in whole:
            standing &= int.from_bytes(base64.b64decode(entry["withstood"]), "big")
        assert record["worst_case"] == standing.bit_count() / 10_000, path
        assert record["worst_case"] <= min(entry["accuracy"] for entry in whole), path


def page_about(row, tmp_path):
    """The words of the report's page about a row of the tables."""
    pytest.importorskip("jinja2")
    folder, page = ROOT / "results" / "dcnet-robustness-quarter" / f"{row}--adversarial", tmp_path / "page.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    return re.sub(r"<[^>]+>|\s+", " ", page.read_text(encoding="utf-8"))


@kept
def test_the_report_joins_no_worst_cases_of_different_attacks(tmp_path):
    """AutoAttack ran on all images of one network of three, so that the others' worst cases are of fewer attacks."""
    assert len(re.findall(r"38\.11 +\[1 of 3\]", page_about("baseline", tmp_path))) == 2


@kept
def test_the_report_tells_budgets_that_are_far_apart_one_by_one(tmp_path):
    text = page_about("sphere", tmp_path)
    assert "0.50, 0.52, 8.98" in text
    assert "3.33" not in text


def seed(located_at, clean=None, trained_at=None):
    return Attacked({}, {"bim": {"published": 17.38, "located": located_at}}, [], clean, trained_at)


@pytest.mark.parametrize(
    "at, said",
    [
        ([2.0, 2.5, 3.0], "2.50/255 (3 of 3 seeds)"),
        ([15.51, 0.87, 15.45], "{15.51, 0.87, 15.45}/255 (3 of 3 seeds)"),
        ([2.0, None, 3.01], "{2.00, 3.01}/255 (2 of 3 seeds)"),
        ([0.0, 0.0], "0.00/255 (2 of 2 seeds)"),
        ([0.0, 0.5], "{0.00, 0.50}/255 (2 of 2 seeds)"),
        ([None], "none of the budgets"),
    ],
)
def test_budgets_that_are_far_apart_are_told_one_by_one(at, said):
    plan = Attacks((), Recipe(), shown=("bim",))
    records = [seed(None if value is None else value / 255) for value in at]
    assert list(located(plan, records)) == [f"bim gives the paper's 17.38 % at {said}"]
    assert budgets([2.0, 3.0]) == "2.50"


def test_a_table_says_how_far_its_clean_accuracy_is_from_that_under_attack():
    (said,) = clean_words([seed(None, 0.7053, 0.7069), seed(None, 0.9, 0.9), seed(None)])
    assert "0.08 points on average and 0.16 at most (2 networks)" in said
    assert clean_words([seed(None)]) == []


def right(count, first=0, images=1000):
    marks = torch.zeros(images, dtype=torch.bool)
    marks[first : first + count] = True
    return Verdict(marks, torch.zeros(images), torch.zeros(images))


RISES = {
    "no rise": (right(200), right(200), False),
    "a fall": (right(200), right(100), False),
    "one per cent": (right(200), right(210), False),
    "more than that, the same images and others": (right(200), right(211), True),
    "more than that, but within two deviations of the pairs": (right(200), right(230, 200), False),
    "beyond two deviations of the pairs": (right(200), right(250, 200), True),
}


@pytest.mark.parametrize("less, more, is_doubt", RISES.values(), ids=RISES)
def test_a_rise_is_a_doubt_beyond_one_per_cent_and_two_deviations(less, more, is_doubt):
    for budgets_given, verdicts in (([0.1, 0.2], [less, more]), ([0.2, 0.1], [more, less])):
        assert len(rises(budgets_given, verdicts)) == is_doubt
    if is_doubt:
        share = float(more.correct.double().mean())
        assert f"from 20.0 % at epsilon 0.1 to {100 * share:.1f} % at 0.2" in rises([0.1, 0.2], [less, more])[0]


def text_of(name):
    return re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def networks():
    """Of every network: its cell, seed, accuracies in percent by attack, record of attacks and record of training."""
    found = []
    for path in RECORDS:
        record = json.loads(path.read_text(encoding="utf-8"))
        training = json.loads((path.parent / "record.json").read_text(encoding="utf-8"))
        shares = {entry["name"]: 100 * entry["accuracy"] for entry in record["attacks"]}
        found.append((path.parents[1].name, record["cell"]["seed"], shares, record, training))
    return found


def surface(record):
    return next(entry["numbers"] for entry in record["checks"] if entry["name"] == "the gradient points uphill")


@kept
def test_the_document_names_every_fgsm_training_that_was_interrupted(networks):
    notes = {(name, seed): held["notes"] for name, seed, *_, held in networks if name.endswith("adversarial")}
    assert {key: said for key, said in notes.items() if said} == {
        ("ball--adversarial", 1): ["there was no checkpoint to resume from; begun anew"],
        ("tanh--adversarial", 2): ["resumed at step 7648"],
        ("tanh-robustbatchnorm--adversarial", 2): ["resumed at step 10600"],
    }
    assert {held["conditions"]["steps"] for *_, held in networks} == {10_625}
    text = text_of("robustness.md")
    assert "interrupted and resumed, at steps 7,648 and 10,600 of 10,625" in text
    assert '"1 of 3" is unverified' in text
    assert "ball with the second seed, was interrupted before its first checkpoint and begun anew" in text


@kept
def test_what_the_document_says_of_masked_and_robust_networks_is_what_the_records_say(networks):
    adversarial = [entry for entry in networks if entry[0].endswith("adversarial")]
    masked = [entry for entry in adversarial if entry[2]["pgd-50x5"] < 1]
    robust = [entry for entry in adversarial if entry not in masked]
    tanh_robust = {(name, seed) for name, seed, *_ in robust if name.startswith("tanh")}
    assert (len(masked), len(robust), len(tanh_robust)) == (7, 11, 2)
    assert all(training["notes"] for name, seed, *_, training in robust if (name, seed) in tanh_robust)
    beaten = [100 * surface(record)["random_beats_gradient"] for *_, record, _ in masked]
    calm = [100 * surface(entry[3])["random_beats_gradient"] for entry in networks if entry not in masked]
    assert max(calm) < 2
    said = "of images (the threshold is 10 %; robust and naturally trained networks have at most 2 %)"
    assert f"for {min(beaten):.1f} to {max(beaten):.1f} % {said}" in text_of("robustness.md")
    majority = {name for name, _, _, record, _ in masked if surface(record)["random_beats_gradient"] > 0.5}
    assert majority == {"sphere--adversarial"}
    for name, _, _, record, _ in masked:
        along, aside = (surface(record)[f"margin_along_{key}"][2] for key in ("gradient", "random"))
        assert (along > aside) == (name not in majority)
    assert all(any("rises" in doubt for doubt in record["doubts"]) for *_, record, _ in masked)
    assert not any(record["doubts"] for *_, record, _ in robust)
    above = [shares["fgsm"] > shares["transfer fgsm"] for _, _, shares, *_ in masked]
    foreign = [any("another network" in doubt for doubt in record["doubts"]) for *_, record, _ in masked]
    assert (sum(above), sum(foreign)) == (5, 4)
    assert all(shares["bim"] == 0 for _, _, shares, *_ in masked)
    assert not any(shares["fgsm"] > shares["transfer fgsm"] for _, _, shares, *_ in robust)


@kept
def test_the_derived_time_of_pgd_20_follows_from_the_records(networks):
    lines = [entry for *_, record, _ in networks for entry in record["attacks"] if entry["name"] == "pgd-50x5"]
    times = [entry["seconds"] for entry in lines]
    derived = [
        20 * 10_000 * entry["seconds"] / (50 * sum(stage["attacked"] for stage in entry["stages"])) for entry in lines
    ]
    said = f"took {min(times):.1f} to {max(times):.1f} s while other jobs shared the card: at the seconds an image and "
    said += f"step that each of the {len(lines)} networks took there, PGD-20 on 10,000 images takes "
    assert f"{said}{min(derived):.1f} to {max(derived):.1f} s." in text_of("robustness.md")


@kept
def test_the_measured_cost_of_fgsm_training_is_that_of_the_records():
    ratios = []
    for name in ("h200", "cpu-epyc"):
        rows = json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text(encoding="utf-8"))["sections"][
            "train"
        ]
        ratios += [row["ratio"] for row in rows["rows"] if row["work"] == "FGSM training step"]
    plain, tanh, *cpu = ratios
    said = f"measured it is {plain:.2f} for a plain CNN-9 and {tanh:.2f} for tanh on an H200, "
    assert f"{said}{cpu[0]:.2f} and {cpu[1]:.2f} on a CPU" in text_of("robustness.md")


@kept
def test_the_one_doubt_about_a_naturally_trained_network_is_explained(networks):
    natural = [entry for entry in networks if entry[0].endswith("natural")]
    doubted = [record for *_, record, _ in natural if record["doubts"]]
    (said,) = (doubt for record in doubted for doubt in record["doubts"])
    assert "from 4.5 % at epsilon 0.04706 to 5.8 % at 0.06275" in said
    assert len(natural) == 18
    curve = next(entry for entry in doubted[0]["sweeps"] if entry["name"] == "bim")
    left = [share for budget, share in zip(curve["epsilon"], curve["accuracy"], strict=True) if budget > 5.9 / 255]
    assert max(left) == 0
    said = "One of the 18 naturally trained networks below does, from 4.5 % under FGSM at 12/255 to 5.8 % at 16/255"
    assert said in text_of("robustness.md")
