"""Benchmarks: statistics, turns, records, verdicts, tables, predictions and slopes. Nothing here is timed."""

import json
import re
from dataclasses import asdict, replace

import pytest

from hyperball.bench import cards, choice, measure, records, table, timing, warm
from hyperball.bench.case import Aim, Case, Setting
from hyperball.bench.records import Record, Row, Section
from hyperball.bench.run import SECTIONS
from hyperball.bench.sections import scaling


def row(**changes):
    given = {
        "section": "conv", "case": "CNN-9 512×64→64×32² 3×3", "work": "forward+backward", "mode": "graph",
        "dtype": "bf16", "subject": "tanh + cosine", "reference": "nn.Conv2d", "median_ms": 0.45, "p20_ms": 0.44,
        "p80_ms": 0.47, "reference_median_ms": 0.3, "reference_p20_ms": 0.29, "reference_p80_ms": 0.31, "ratio": 1.5,
        "aim": 1.5, "reached": True,
    }  # fmt: skip
    return Row(**{**given, **changes})


def record(*rows, device="NVIDIA H200"):
    return Record(device, {"conv": Section({"device": device, "date": "2026-01-01"}, list(rows))})


def test_a_spread_is_the_median_and_two_percentiles():
    assert timing.spread([5.0, 1.0, 3.0, 2.0, 4.0]) == timing.Spread(3.0, 1.8, 4.2)
    assert timing.spread([2.0]) == timing.Spread(2.0, 2.0, 2.0)


def test_one_slow_round_moves_neither_the_median_nor_the_ratio():
    calm, disturbed = [1.0] * 9, [1.0] * 8 + [100.0]
    assert timing.spread(disturbed).median == 1.0
    assert timing.ratios(disturbed, calm).median == 1.0


def test_a_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="`times` must hold at least one number"):
        timing.spread([])


def test_drift_that_hits_both_sides_cancels_in_the_ratios_of_rounds():
    found = timing.ratios([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (found.median, found.p20, found.p80) == (2.0, 2.0, 2.0)


def test_subjects_take_turns_in_both_orders():
    calls = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "AB"}
    times = timing.in_turn(steps, 4, 1e9, lambda step: step() or 1.0)
    assert "".join(calls) == "ABBAABBA"
    assert times == {"A": [1.0] * 4, "B": [1.0] * 4}


def test_rounds_end_when_their_time_is_over_but_three_are_made():
    times = timing.in_turn({"A": lambda: None}, 30, 0.0, lambda step: 1.0)
    assert len(times["A"]) == timing.LEAST_ROUNDS


@pytest.mark.parametrize(
    "bytes_each, cache, sets", [(2**62, 50, 1), (100, 50, 1), (99, 50, 2), (1, 10**9, 16), (10, 0, 1)]
)
def test_tensors_rotate_until_they_exceed_the_cache_twice(bytes_each, cache, sets):
    assert timing.sets_over_cache(bytes_each, cache) == sets


def test_repeated_steps_go_around_the_sets():
    calls = []
    call = timing.repeated([lambda: calls.append(0), lambda: calls.append(1)], 3)
    call()
    call()
    assert calls == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("milliseconds, count", [(1000.0, 1), (1.0, 1), (0.3, 4), (1e-9, 32)])
def test_short_steps_are_timed_together(milliseconds, count):
    assert timing.enough(milliseconds) == count


def test_launched_steps_are_timed_over_a_longer_time():
    assert (timing.enough(1.0, 10.0), timing.enough(0.9, 10.0), timing.enough(20.0, 10.0)) == (10, 12, 1)


@pytest.mark.parametrize(
    "value, aim, said", [(1.5, 1.5, True), (1.501, 1.5, False), (1.0, None, None), (None, 1.0, None)]
)
def test_a_verdict_compares_with_the_aim(value, aim, said):
    assert records.verdict(value, aim) is said


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("CPU Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "xeon-platinum-8481c"),
        ("", "unknown"),
    ],
)
def test_a_file_is_named_after_its_device(device, name):
    assert records.slug(device) == name


def test_a_record_that_was_written_is_read_back(tmp_path):
    path = tmp_path / "deep" / "h200.json"
    records.write(record(row(), row(mode="eager", aim=None, reached=None)), path)
    assert records.read(path) == record(row(), row(mode="eager", aim=None, reached=None))
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]


def test_a_section_that_is_measured_again_replaces_its_own_alone(tmp_path):
    path = tmp_path / "h200.json"
    records.write(
        Record("NVIDIA H200", {"conv": Section({}, [row()]), "pool": Section({}, [row(section="pool")])}), path
    )
    records.write(Record("NVIDIA H200", {"conv": Section({}, [row(ratio=1.2)])}), path)
    held = records.read(path).sections
    assert held["conv"].rows[0].ratio == 1.2
    assert held["pool"].rows == [row(section="pool")]


def test_a_section_without_rows_replaces_none_that_has_them(tmp_path):
    path = tmp_path / "h200.json"
    records.write(record(row()), path)
    records.write(record(), path)
    assert records.read(path) == record(row())


def test_records_of_two_devices_are_not_joined(tmp_path):
    path = tmp_path / "h200.json"
    records.write(record(row()), path)
    with pytest.raises(ValueError, match="times of NVIDIA H100 cannot be joined with those of NVIDIA H200"):
        records.write(record(row(), device="NVIDIA H100"), path)
    assert records.read(path) == record(row())


def without(key):
    return {name: value for name, value in asdict(row()).items() if name != key}


BROKEN = {
    "no JSON": ("{", "holds no JSON"),
    "another file": ('{"op": []}', "is no record of `hyperball bench`"),
    "no sections": ('{"schema": 1, "device": "x"}', "must hold `device` and `sections`"),
    "a part that is none": ('{"schema": 1, "device": "x", "sections": {}, "partial": []}', "must hold `device` and"),
    "no rows": ('{"schema": 1, "device": "x", "sections": {"conv": {}}}', "must hold `conditions` and `rows`"),
    "a missing field": (without("ratio"), "missing ratio"),
    "an unknown field": ({**asdict(row()), "speed": 1}, "unknown field speed"),
    "a verdict that is wrong": ({**asdict(row()), "reached": False}, "is not what ratio 1.5 and aim 1.5 say"),
}


@pytest.mark.parametrize("held, message", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_record_is_refused(held, message, tmp_path):
    path = tmp_path / "x.json"
    whole = {"schema": 1, "device": "x", "sections": {"conv": {"conditions": {}, "rows": [held]}}}
    path.write_text(held if isinstance(held, str) else json.dumps(whole), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        records.read(path)


def test_conditions_name_versions_threads_and_load():
    held = records.conditions(Setting("cpu"), 0.25)
    assert {"hyperball", "torch", "python"} <= {name for name, text in held["versions"].items() if text}
    assert {"date", "device", "threads", "busy", "statistic", "timer", "memory"} <= set(held)
    assert held["load_average"] == 0.25
    json.dumps(held)


def tiny(**changes):
    steps = {name: (lambda sets: [lambda: None] * sets) for name in ("plain", "ours")}
    given = {"subjects": steps, "references": ("plain",), "aims": {("ours", "plain"): Aim(1e9)}}
    return Case(**{"section": "conv", "name": "tiny", "work": "forward", "dtype": "fp32", **given, **changes})


def test_every_subject_is_compared_with_every_reference():
    rows, failed = measure.measure(tiny(kept={"ours": lambda: 1.0}, notes={"ours": lambda: "why"}), Setting(quick=True))
    (found,) = rows
    assert (found.subject, found.reference, found.reached, found.kept_maps, found.note) == (
        "ours",
        "plain",
        True,
        1.0,
        "why",
    )
    assert failed == []


def test_a_subject_that_fails_is_named_and_the_others_are_measured():
    def broken(sets):
        raise RuntimeError("no memory\nfor this")

    case = tiny()
    rows, failed = measure.measure(replace(case, subjects={**case.subjects, "broken": broken}), Setting(quick=True))
    assert [found.subject for found in rows] == ["ours"]
    assert failed == ["tiny, fp32, broken: RuntimeError: no memory"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_has_cases_whose_pairs_and_aims_name_their_subjects(section, quick, device):
    cases = warm.section_cases(section, Setting(device, None, quick))
    assert cases
    for case in cases:
        assert case.section == section
        assert {name for pair in case.compared for name in pair} <= set(case.subjects)
        assert {key[:2] for key in case.aims if key[1] in case.subjects} <= set(case.compared)
        assert case.modes == ("eager",) if device == "cpu" else case.modes[0] in ("graph", "eager")


def test_cases_have_names_of_their_own():
    for section in SECTIONS:
        for device in ("cpu", "cuda"):
            keys = [(c.name, c.work, c.dtype, *c.subjects) for c in warm.section_cases(section, Setting(device))]
            assert len(keys) == len(set(keys)), section


def test_one_dtype_for_all_is_the_dtype_of_every_case():
    cases = [
        case
        for name in ("conv", "train", "inference", "scaling")
        for case in warm.section_cases(name, Setting("cuda", "fp16"))
    ]
    assert {case.dtype for case in cases} == {"fp16"}


def test_every_long_case_is_compiled_in_a_process_of_its_own():
    made = warm.groups(choice.planned(SECTIONS, Setting("cuda")), 16)
    labels = [label for group in made for label in group]
    assert len(labels) == len(set(labels))
    assert len(made) <= 16
    assert all(len(group) == 1 for group in made if next(iter(group)).startswith(warm.ALONE))


def test_a_table_is_aligned_and_ends_in_verdicts():
    text = table.aligned([row(), row(subject="x", ratio=1.6, reached=False), row(aim=None, reached=None)])
    constant, head, first, second, third = text.splitlines()
    assert constant == "dtype bf16, mode graph"
    assert head.endswith("verdict")
    assert first.endswith("reached") and not first.endswith("not reached")  # noqa: PT018
    assert second.endswith("not reached")
    assert not third.endswith("reached")
    assert head.index("verdict") == first.index("reached")


def test_memory_has_a_verdict_of_its_own():
    found = row(memory_ratio=1.2, memory_aim=1.1, memory_reached=False)
    assert table.verdict(found) == "memory not reached"
    assert "peak memory 1.20 (aim 1.1)" in table.summary(record(found))


def test_memory_is_a_ratio_of_peaks_and_the_maps_that_are_kept():
    assert table.memory(row(memory_ratio=1.258, kept_maps=1.0)) == "1.26, 1.00 maps"
    assert table.memory(row(kept_maps=1.0)) == "1.00 maps"


def test_markdown_has_one_line_a_subject_and_says_what_was_not_reached():
    text = table.markdown(record(row(), row(mode="eager", aim=1.6, ratio=1.7, reached=False)))
    assert "| forward+backward, graph | forward+backward, eager |" in text
    assert "| 1.50 | 1.70 |" in text
    assert "**Aims**: 1 of 2 reached." in text
    assert "forward+backward, bf16, eager: tanh + cosine over nn.Conv2d 1.70 (aim 1.60)" in text
    assert "Predictions, not measurements" in text


def test_a_reference_is_timed_in_the_same_column_on_every_line_that_has_it():
    rows = [
        row(work="forward", mode="graph", subject="x", reference_median_ms=0.1, aim=None, reached=None),
        row(work="forward", mode="eager", subject="x", reference_median_ms=0.2, aim=None, reached=None),
        row(mode="graph", subject="x", reference_median_ms=0.3, aim=None, reached=None, memory_ratio=1.25),
        row(mode="eager", subject="x", reference_median_ms=0.4, aim=None, reached=None, memory_ratio=7.0),
        row(mode="eager", reference_median_ms=0.4, memory_ratio=7.0),
        row(mode="graph", reference_median_ms=0.3, memory_ratio=1.5),
        row(work="forward", case="other", reference_median_ms=0.6, aim=None, reached=None),
    ]
    head, _, unaimed, aimed, other = table.pivot(rows)
    assert "| reference | ref. ms: forward+backward, graph | forward, graph |" in head
    assert "| x | nn.Conv2d | 0.300 | 1.50 |" in unaimed
    assert "| 1.25 |" in unaimed
    assert "| tanh + cosine | nn.Conv2d | 0.300 |" in aimed
    assert "| 1.50 | ≤ 1.50 |" in aimed
    assert "| nn.Conv2d | 0.600 (forward, graph) |" in other


def test_a_section_says_to_the_minute_when_it_was_measured():
    held = Section({"device": "NVIDIA H200", "date": "2026-01-02T03:07:47+00:00"}, [row()])
    assert table.tables("conv", held).startswith("**One convolution** (NVIDIA H200, 2026-01-02 03:07)")


def test_notes_about_slopes_are_printed():
    rows = [row(case="batch 16"), row(case="batch 32")]
    text = table.slopes(Section({}, rows, ["taken with other kernels"], scaling.fits(rows)))
    assert text.endswith("\n\n- taken with other kernels")


def card(bandwidth, rate):
    return cards.Card("card", bandwidth, rate, (9, 0))


def test_a_card_with_half_the_bandwidth_pays_twice_for_the_extra_passes():
    base, half = card(4.0, 1000), card(2.0, 1000)
    assert cards.predict(1.0, 0.25, 10**6, base, base) == pytest.approx(1.25)
    assert cards.predict(1.0, 0.25, 10**6, base, half) == pytest.approx(1.5)


def test_a_convolution_is_never_faster_than_its_bytes():
    base, fast = card(1.0, 100), card(1.0, 10**9)
    least_ms = cards.PASSES * cards.BYTES * 10**9 / 1e12 * 1e3
    assert cards.predict(1.0, 6.0, 10**9, base, fast) == pytest.approx(1 + 6.0 / least_ms)


def test_cards_without_data_are_not_predicted_from():
    assert cards.card_of("NVIDIA H200").name == "H200"
    assert cards.card_of("NVIDIA H100 PCIe") is None
    assert cards.predictions(record(row(), device="NVIDIA T4")) == []


@pytest.mark.parametrize(
    "device, conditions, names",
    [
        ("NVIDIA H200", {}, {"H100 SXM"}),
        ("NVIDIA H200", {"implicit_gemms": False}, {"A100 80GB SXM", "RTX 4090", "L4"}),
        ("NVIDIA L4", {}, {"A100 80GB SXM", "RTX 4090"}),
    ],
)
def test_a_card_is_predicted_from_times_of_the_kernels_that_it_runs(device, conditions, names):
    held = record(row(), device=device)
    held.sections["conv"].conditions.update(conditions)
    ((_, ratios),) = cards.predictions(held)
    assert set(ratios) == names


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_a_slope_is_the_power_of_growth(power):
    sizes = [16, 32, 64, 128]
    assert scaling.slope(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)


def test_a_slope_needs_two_times():
    assert scaling.slope([1, 2], [1.0, 0.0]) is None


def test_fits_hold_plain_ours_and_the_difference_by_size():
    rows = [row(case=f"channels {c}", reference_median_ms=c**2.0, median_ms=c**2.0 + c) for c in (64, 16, 32)]
    plain, ours, extra = scaling.fits([*rows, row()])
    assert plain["sizes"] == [16, 32, 64]
    assert (plain["slope"], extra["slope"]) == (2.0, 1.0)
    assert 1.0 < ours["slope"] < 2.0
