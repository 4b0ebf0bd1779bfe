"""Benchmarks of attacks: aims for FGSM training and for PGD-20, in seconds too, and what is left out on a CPU."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
from places import ROOT

from hyperball.bench import choice, measure, records, table, warm
from hyperball.bench.case import Aim, Case, Setting
from hyperball.bench.records import Record, Row, Section
from hyperball.bench.sections import train
from hyperball.bench.sections.networks import attack_step, clean_step, network

GPU_RECORD = ROOT / "results" / "bench" / "h200.json"
ROW = Row(
    "train", "cnn9_adv, 10,000 images", "PGD-20", "eager", "tf32", "PGD-20", "clean", 2345.0, None, None, 40.0, None,
    None, 58.6, seconds_aim=10.0, seconds_reached=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "setting", [Setting("cpu"), Setting("cpu", None, True), Setting("cuda"), Setting("cuda", "fp16")]
)
def test_fgsm_training_is_to_cost_at_most_2_2_of_natural_training(setting):
    cases = [case for case in train.cases(setting) if case.work == "FGSM training step"]
    assert len(cases) == 2
    assert {case.aim("FGSM", "natural", mode) for case in cases for mode in case.modes} == {Aim(2.2)}


def test_pgd_20_on_ten_thousand_images_is_to_take_ten_seconds_on_a_gpu():
    (case,) = (case for case in train.cases(Setting("cuda")) if case.work == "PGD-20")
    assert (case.name, case.dtype) == ("cnn9_adv, 10,000 images", "tf32")
    assert case.aim("PGD-20", "clean", "eager") == Aim(seconds=10.0)
    assert train.notes(Setting("cuda")) == []


@pytest.mark.parametrize("setting", [Setting("cpu"), Setting("cuda", None, True), Setting("cuda", "bf16")])
def test_where_pgd_20_is_not_measured_a_note_says_so(setting):
    assert not [case for case in train.cases(setting) if case.work == "PGD-20"]
    assert "PGD-20 was left out: it is measured in TF32 on a GPU without --quick" in train.notes(setting)


def test_no_process_compiles_kernels_for_attacks():
    setting = Setting("cuda")
    works = [case.work for case in warm.section_cases("train", setting)]
    labels = [label for group in warm.groups(choice.planned(["train"], setting), 16) for label in group]
    assert {works[int(label.partition(":")[2])] for label in labels} == {"training step"}


def test_the_step_that_is_timed_attacks_every_image_with_twenty_steps():
    setting = Setting("cpu", None, True)
    model = network("cnn9_adv", setting).eval()
    (entry,) = attack_step(model, 4, 32, setting)().record["attacks"]
    assert entry["stages"][0]["attacked"] == 4
    assert (entry["conditions"]["steps"], entry["conditions"]["restarts"]) == (20, 1)
    assert clean_step(model, 4, 32, setting)().shape == (4,)


def test_the_subjects_of_the_case_are_the_pass_and_the_attack():
    case = train.pgd_case(Setting("cpu", None, True), 2)
    assert case.name == "cnn9_adv, 2 images"
    (clean,), (attack,) = case.subjects["clean"](1), case.subjects["PGD-20"](1)
    assert torch.is_tensor(clean())
    assert attack().record["conditions"]["images"] == 2


@pytest.mark.parametrize("aim, reached", [(1e9, True), (0.0, False), (None, None)])
def test_a_case_may_aim_at_seconds(aim, reached):
    steps = {name: (lambda sets: [lambda: None] * sets) for name in ("plain", "ours")}
    case = Case("conv", "tiny", "forward", "fp32", steps, ("plain",), aims={("ours", "plain"): Aim(seconds=aim)})
    (found,), failed = measure.measure(case, Setting(quick=True))
    assert (found.seconds_aim, found.seconds_reached, found.reached, failed) == (aim, reached, None, [])


def test_an_aim_in_seconds_is_printed_with_the_time():
    slow = replace(ROW, case="slow", median_ms=12_000.0, seconds_reached=False)
    held = Record("NVIDIA H200", {"train": Section({"device": "NVIDIA H200"}, [ROW, slow])})
    text = table.markdown(held)
    assert "| PGD-20 | clean | 40.0 | 58.60 | ≤ 10 s | reached, 2.35 s |" in text
    assert "| ≤ 10 s | not reached, 12.0 s |" in text
    assert "**Aims**: 1 of 2 reached." in text
    assert "slow, PGD-20, tf32, eager: PGD-20 over clean 12.0 s (aim 10 s)" in text
    assert table.aligned([ROW]).splitlines()[1].endswith("≤ 10 s  reached")


def test_a_wrong_verdict_on_seconds_is_refused(tmp_path):
    path = tmp_path / "x.json"
    wrong = {**asdict(ROW), "median_ms": 10_001.0}
    path.write_text(
        json.dumps({"schema": 1, "device": "x", "sections": {"train": {"conditions": {}, "rows": [wrong]}}})
    )
    with pytest.raises(ValueError, match=re.escape("`seconds_reached` is not what 10.001 s and aim 10.0 say")):
        records.read(path)


@pytest.mark.skipif(not GPU_RECORD.exists(), reason="records are not part of a source distribution")
def test_the_kept_times_of_fgsm_training_have_the_aim_and_its_verdict():
    for path in (GPU_RECORD, GPU_RECORD.with_name("cpu-epyc.json")):
        rows = [row for row in records.read(path).sections["train"].rows if row.work == "FGSM training step"]
        assert [(row.aim, row.reached) for row in rows] == [(train.FGSM_AIM, row.ratio <= 2.2) for row in rows]
        assert len(rows) == 2
