"""Numbers before times: a self-check of each section against float64, then its tests where there is a checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hyperball.bench.case import Setting, threads
from hyperball.bench.self_checks import SELF_CHECKS

TOLERANCE = 1e-3  # relative, in float32: a mistake shows far above it, rounding far below
CONV_TESTS = (
    "decoupled/test_native_decoupled.py::test_every_row_equals_its_eager_twin_in_float64",
    "decoupled/test_native_decoupled.py::test_any_number_of_channels_and_positions_equals_the_eager_twin",
    "decoupled/test_decoupled.py::test_per_channel_parameters_equal_the_reference",
    "decoupled/test_decoupled.py::test_linearly_weighted_linear_cosine_is_the_plain_convolution",
    "decoupled/test_decoupled.py::test_linear_square_cosine_equals_a_bcos_convolution",
)
TESTS = {
    "conv": CONV_TESTS,
    "train": ("kernels/test_fused.py::test_a_chain_of_carrying_blocks_gives_the_gradients_of_the_modules",),
    "pool": (
        "pooling/test_pooling.py::test_convex_pooling_finds_the_root_that_bisection_finds",
        "pooling/test_pooling.py::test_lower_precision_agrees_with_float64",
    ),
    "projection": (
        "projection/test_projection.py::test_equals_the_reference",
        "projection/test_projection.py::test_lower_precision_is_the_rounded_float64_answer",
    ),
    "inference": ("library/test_freeze_inference.py::test_frozen_layers_give_what_the_model_gives",),
    "scaling": CONV_TESTS[:2],
}
GPU_CONV_TESTS = ("kernels/test_triton.py::test_a_layer_on_the_gpu_equals_itself_on_the_cpu_in_float64",)
GPU_TESTS = {
    "conv": GPU_CONV_TESTS,
    "train": ("kernels/test_fused.py::test_a_chain_on_the_gpu_equals_its_modules_on_the_cpu",),
    "pool": (
        "pooling/test_gradients.py::test_cuda_agrees_with_the_cpu",
        "batch_norm/test_layer.py::test_cuda_equals_cpu",
    ),
    "projection": ("projection/test_use.py::test_cuda_equals_the_cpu_and_keeps_batch_independence",),
    "inference": (
        "library/test_freeze_gpu.py::test_a_frozen_network_gives_the_unfrozen_ones_outputs_in_half_precision_and_in_a_graph",
    ),
    "scaling": GPU_CONV_TESTS,
}


class CheckFailed(RuntimeError):
    """A number is wrong, so that its time says nothing."""


def checkout() -> Path | None:
    """The checkout that this package is part of, if it has tests and pytest is there."""
    root = Path(__file__).resolve().parents[3]
    there = (root / "src" / "hyperball").is_dir() and (root / "tests" / "conftest.py").is_file()
    return root if there and importlib.util.find_spec("pytest") else None


def check(sections: list[str], setting: Setting, say: Callable[[str], None], tests: bool = True) -> None:
    """The self-check, then the sections' tests where there is a checkout; `CheckFailed` where one fails."""
    self_check(sections, setting, say)
    root = checkout() if tests else None
    table = GPU_TESTS if setting.on_gpu else TESTS
    wanted = list(dict.fromkeys(test for name in sections for test in table[name]))
    if root is None or not wanted:
        return
    say(f"{len(wanted)} tests of the checkout")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in wanted)],
        cwd=root, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise CheckFailed("the tests failed, nothing was timed:\n" + done.stdout[-3000:] + done.stderr[-1000:])


def self_check(sections: list[str], setting: Setting, say: Callable[[str], None]) -> None:
    """Compare what each section times, in float32 on the device, with its definition in float64."""
    for name in sections:
        with threads(1):  # many threads on a busy machine wait for each other
            error = SELF_CHECKS[name](setting)
        say(f"self-check of {name}: relative error {error:.1e} against float64")
        if not error < TOLERANCE:
            raise CheckFailed(f"the self-check of {name} failed: error {error:.1e}, at most {TOLERANCE:g} is right")
