"""Benchmarks: the checks before anything is timed, and peak memory."""

from dataclasses import replace

import pytest
import torch
from places import ROOT

from hyperball.bench import checks, measure, memory, self_checks
from hyperball.bench.case import Setting
from hyperball.bench.run import SECTIONS
from hyperball.bench.sections import conv, subjects
from hyperball.kernels.decoupled import native as decoupled_native


def test_the_tests_that_run_before_a_benchmark_exist():
    for name in {test for kind in (checks.TESTS, checks.GPU_TESTS) for tests in kind.values() for test in tests}:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name
    assert set(checks.TESTS) == set(checks.SELF_CHECKS) == set(SECTIONS)


def test_tests_of_the_compiled_kernels_in_float32_are_among_those_that_run():
    assert any(test.startswith("decoupled/test_native_decoupled.py::") for test in checks.TESTS["conv"])
    assert any("lower_precision" in test for test in checks.TESTS["pool"])


@pytest.mark.parametrize("section", ["conv", "train", "pool", "projection"])
def test_self_checks_pass_far_below_their_tolerance(section):
    assert checks.SELF_CHECKS[section](Setting("cpu")) < 0.1 * checks.TOLERANCE


def bent(call):
    """The call's values with gradients that are one per cent too large."""

    def wrong(*arguments, **options):
        value = call(*arguments, **options)
        return value.detach() + 1.01 * (value - value.detach())

    return wrong


def bent_pool(name):
    return bent(original_pool(name))


original_pool = self_checks.ours
BENT = {
    "conv": (self_checks.DecoupledConv2d, "forward", bent(self_checks.DecoupledConv2d.forward)),
    "pool": (self_checks, "ours", bent_pool),
    "projection": (self_checks, "project", bent(self_checks.project)),
}


@pytest.mark.parametrize("section", BENT)
def test_a_gradient_that_is_wrong_by_one_per_cent_fails_the_self_check(section, monkeypatch):
    monkeypatch.setattr(*BENT[section])
    with pytest.raises(checks.CheckFailed, match=f"the self-check of {section} failed"):
        checks.self_check([section], Setting("cpu"), lambda text: None)


@pytest.mark.skipif(decoupled_native.library().epilogue is None, reason="no C compiler")
def test_a_wrong_kernel_stops_the_benchmark_of_a_checkout_too(monkeypatch, tmp_path):
    plain = decoupled_native._epilogue

    def wrong(*arguments, **outputs):
        plain(*arguments, **outputs)
        for value in outputs.values():
            if isinstance(value, torch.Tensor):
                value.mul_(1.01)

    monkeypatch.setattr(decoupled_native, "_epilogue", wrong)
    monkeypatch.setattr(checks, "checkout", lambda: tmp_path)
    monkeypatch.setitem(checks.TESTS, "conv", ())
    with pytest.raises(checks.CheckFailed, match="the self-check of conv failed"):
        checks.check(["conv"], Setting("cpu"), lambda text: None)


def test_a_wrong_number_stops_the_benchmark(monkeypatch):
    monkeypatch.setitem(checks.SELF_CHECKS, "conv", lambda setting: float("nan"))
    with pytest.raises(checks.CheckFailed, match="the self-check of conv failed"):
        checks.check(["conv"], Setting("cpu"), lambda text: None, tests=False)


MAP = 2**18  # float32 numbers of one MiB


def test_peak_memory_on_a_cpu_is_that_of_the_steps_tensors_and_of_its_second_call():
    before = torch.zeros(16 * MAP)

    def build():
        x, calls = torch.zeros(MAP), []
        garbage = [torch.zeros(32 * MAP)]
        garbage.append(garbage)

        def step():
            calls.append(torch.zeros(64 * MAP if not calls else 2 * MAP).sum() + before.sum())
            return (x + 1).exp()

        return step

    step, peak = memory.with_peak(build, "cpu")
    assert peak == pytest.approx(3, abs=0.05)
    assert step().shape == (MAP,)


def test_memory_that_is_freed_inside_an_operator_counts():
    x = torch.zeros(512, 2048).t()
    _, peak = memory.with_peak(lambda: lambda: x.reshape(-1).sum(), "cpu")
    assert peak == pytest.approx(4, abs=0.05)


def test_a_cpu_row_has_peaks_and_their_ratio():
    shape = conv.Shape("tiny", 2, 16, 64, 32)
    case = conv.case(shape, "forward+backward", "fp32", Setting(quick=True), peers=True, threads=1)
    layers = {conv.PLAIN: subjects.plain, "again": subjects.plain, conv.NAIVE: subjects.naive}
    made = {
        name: (lambda sets, layer=layer: conv.build(layer, shape, case.work, "fp32", Setting(), sets))
        for name, layer in layers.items()
    }
    rows, failed = measure.measure(replace(case, subjects=made, pairs=(), kept={}), Setting(quick=True))
    found = {entry.subject: entry for entry in rows}
    assert failed == []
    inputs, outputs = 2 * 16 * 32 * 32 * 4 / 2**20, 2 * 64 * 32 * 32 * 4 / 2**20
    assert found["again"].peak_mib == pytest.approx(2 * inputs + 2 * outputs, rel=0.2)
    assert found["again"].memory_ratio == 1.0
    assert found[conv.NAIVE].memory_ratio > 1.5
