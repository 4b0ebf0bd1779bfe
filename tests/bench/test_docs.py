"""What README.md and docs/ say of benchmarks is what the records hold."""

import json
import re

import numpy as np
import pytest
from places import ROOT

from hyperball.bench import records, table

FOLDER = ROOT / "results" / "bench"
GPU, CPU = FOLDER / "h200.json", FOLDER / "cpu-epyc.json"
CUDNN = FOLDER / "h200-cudnn.json"  # of the time when cuDNN did all convolutions
KERNELS = FOLDER / "h200-kernels.json"
LAYERS = ("tanh + cosine", "linear + square_cosine")

pytestmark = pytest.mark.skipif(not GPU.exists(), reason="records are not part of a source distribution")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def rows(path, section, **wanted):
    found = records.read(path).sections[section].rows
    return [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())]


def ends(found):
    """The least and the largest ratio, as "1.4 to 3.1"."""
    ratios = [row.ratio for row in found]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


@pytest.mark.parametrize("path", [GPU, CUDNN], ids=lambda path: path.stem)
def test_the_documented_tables_are_what_the_command_prints(path):
    name = re.escape(path.relative_to(ROOT).as_posix())
    found = re.findall(rf"<!-- bench: {name} -->\n(.*?)\n<!-- /bench -->", text_of("docs/performance.md"), re.DOTALL)
    assert found == [table.markdown(records.read(path))]


def test_every_committed_record_is_one():
    for path in FOLDER.glob("*.json"):
        if path != KERNELS:
            assert records.read(path).sections


def test_the_layers_without_and_with_implicit_gemms_are_those_of_the_records():
    text = text_of("docs/performance.md").partition("| layer | without, tanh / linear |")[2].partition("\n\n")[0]
    lines = re.findall(r"^\| (\d+)×(\d+)×(\d+)².*? \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    assert len(lines) == 10
    for batch, channels, side, *said in lines:
        shape = f" {batch}×{channels}→{channels}×{side}² 3×3"
        assert said == [" / ".join(layer_ratios(path, shape)) for path in (CUDNN, GPU)], shape


def layer_ratios(path, shape):
    """The ratios of tanh and linear, forward and backward in a graph in bf16, as text."""
    held = rows(path, "conv", work="forward+backward", mode="graph", dtype="bf16", reference="nn.Conv2d")
    found = {row.subject: f"{row.ratio:.2f}" for row in held if row.case.endswith(shape)}
    return [found[subject] for subject in LAYERS]


def test_the_documented_kernels_have_the_times_of_their_record():
    held = json.loads(KERNELS.read_text(encoding="utf-8"))["kernels"]
    times = [(kernel["floor_us"], kernel["us"]) for kernel in held if kernel["shape"] == "512x64x32x32"]
    text = text_of("docs/performance.md").partition("| kernel | floor | measured |")[2].partition("\n\n")[0]
    said = [tuple(map(int, found)) for found in re.findall(r"\| (\d+) \| (\d+) \|", text)]
    assert len(said) == len(times) == text.count("\n") - 1
    assert np.abs(np.subtract(said, times)).max() <= 0.5


def test_the_readme_has_the_range_of_launched_3x3_convolutions():
    held = rows(GPU, "conv", work="forward+backward", mode="eager", dtype="bf16", reference="nn.Conv2d")
    found = [row for row in held if row.subject in LAYERS and "3×3" in row.case]
    assert f"and {ends(found)} times where Python launches every kernel" in text_of("README.md")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_readme_has_the_range_of_robust_pooling_on_a_cpu(threads):
    held = rows(CPU, "pool", work="forward", reference="x.mean(-1)", threads=threads)
    convex = ends([row for row in held if row.subject in ("huber", "pseudo_huber")])
    welsch = " to ".join(f"{ratio:.0f}" for ratio in sorted(row.ratio for row in held if row.subject == "welsch"))
    (said,) = re.findall(r"^Robust pooling, forward,.*", text_of("README.md"), re.MULTILINE)
    form = "takes {} times as long" if threads == 1 else "({} on two), with"
    assert form.format(convex) in said
    assert ("deepest minimum, {} times" if threads == 1 else "({} on two).").format(welsch) in said


@pytest.mark.parametrize("subject", ["huber", "pseudo_huber", "welsch"])
def test_the_page_about_pooling_has_the_ratios_of_the_record(subject):
    held = rows(CPU, "pool", work="forward", subject=subject, reference="x.mean(-1)")
    found = {(row.case.partition(",")[0], row.threads): f"{row.ratio:.1f}" for row in held}
    cells = [f"{found[shape, 1]}, {found[shape, 2]}" for shape in ("16×512×49", "2×512×1024")]
    assert f"| {subject} | {' | '.join(cells)} |" in text_of("docs/pooling.md")


def test_the_page_about_batch_norm_has_the_ratios_of_the_record():
    huber, pseudo_huber = rows(CPU, "pool", reference="nn.BatchNorm2d")
    said = f"{huber.ratio:.1f} (huber) and {pseudo_huber.ratio:.1f} times (pseudo_huber)"
    assert said in text_of("docs/batch_norm.md")


def test_what_was_measured_on_a_busy_machine_is_named():
    busy = {name for name, section in records.read(CPU).sections.items() if section.conditions["busy"]}
    assert busy == {"inference", "projection"}
    assert "otherwise idle, but for frozen inference and projections" in text_of("docs/performance.md")
