"""Numbers before times: a section's tests in a checkout; elsewhere, and on a GPU, a self-check against float64."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperball.bench.case import Setting, threads
from hyperball.bench.sections import inference, networks
from hyperball.bench.sections.pool import naive_huber, samples
from hyperball.bench.sections.projection import sorted_l1_ball
from hyperball.freeze import freeze
from hyperball.functional import project, robust_pool
from hyperball.nn import DecoupledConv2d

EPS = 1e-4
FLOOR = 1e-4
TOLERANCE = 1e-3  # relative, in float32: a mistake shows far above it, rounding far below
TESTS = {
    "conv": (
        "test_decoupled.py::test_per_channel_parameters_equal_the_reference",
        "test_decoupled.py::test_linearly_weighted_linear_cosine_is_the_plain_convolution",
        "test_decoupled.py::test_linear_square_cosine_equals_a_bcos_convolution",
    ),
    "train": ("test_fused.py::test_a_chain_of_carrying_blocks_gives_the_gradients_of_the_modules",),
    "pool": ("test_pooling.py::test_convex_pooling_finds_the_root_that_bisection_finds",),
    "projection": ("test_projection.py::test_equals_the_reference",),
    "inference": ("test_freeze_inference.py::test_frozen_layers_give_what_the_model_gives",),
    "scaling": ("test_decoupled.py::test_per_channel_parameters_equal_the_reference",),
}
GPU_TESTS = {
    "conv": ("test_triton.py::test_a_layer_on_the_gpu_equals_itself_on_the_cpu_in_float64",),
    "train": ("test_fused.py::test_a_chain_on_the_gpu_equals_its_modules_on_the_cpu",),
}


class CheckFailed(RuntimeError):
    """A number is wrong, so that its time says nothing."""


def checkout() -> Path | None:
    """The checkout that this package is part of, if it has tests and pytest is there."""
    root = Path(__file__).resolve().parents[3]
    there = (root / "src" / "hyperball").is_dir() and (root / "tests" / "conftest.py").is_file()
    return root if there and importlib.util.find_spec("pytest") else None


def check(sections: list[str], setting: Setting, say: Callable[[str], None], tests: bool = True) -> None:
    """The self-check where there are no tests or on a GPU, then the sections' tests; `CheckFailed` where one fails."""
    root = checkout() if tests else None
    if root is None or setting.on_gpu:
        self_check(sections, setting, say)
    table = GPU_TESTS if setting.on_gpu else TESTS
    wanted = list(dict.fromkeys(test for name in sections for test in table.get(name, ())))
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
    """Compare each section's operation in float32 with a float64 evaluation of its definition."""
    for name in sections:
        with threads(1):  # many threads on a busy machine wait for each other
            error = SELF_CHECKS[name](setting)
        say(f"self-check of {name}: relative error {error:.1e} against float64")
        if not error < TOLERANCE:
            raise CheckFailed(f"the self-check of {name} failed: error {error:.1e}, at most {TOLERANCE:g} is right")


def distance(found: Tensor, truth: Tensor) -> float:
    """‖found − truth‖ / ‖truth‖ in float64."""
    difference = found.detach().cpu().double() - truth.detach().cpu().double()
    return float(difference.norm() / truth.detach().cpu().double().norm())


def exact_tanh(x: Tensor, weight: Tensor, ratio: Tensor) -> Tensor:
    """f = tanh(n/rho)·⟨x, ŵ⟩/n, n² = ‖patch‖² + eps, rho = (ratio² + floor)·mean(n)."""
    n = (F.conv2d(x.square(), torch.ones_like(weight[:1]), padding=1) + EPS).sqrt()
    unit = weight / weight.flatten(1).norm(dim=1)[:, None, None, None]
    rho = (ratio.view(-1, 1, 1).square() + FLOOR) * n.mean()
    return torch.tanh(n / rho) * F.conv2d(x, unit, padding=1) / n


def conv_error(setting: Setting) -> float:
    """Forward and input gradient of tanh + cosine in float32 against the formula in float64."""
    torch.manual_seed(0)
    layer = DecoupledConv2d(16, 64, 3, padding=1, bias=False, magnitude="tanh").to(setting.device)
    ratio = next(parameter for name, parameter in layer.named_parameters() if name.endswith("ratio"))
    x = torch.randn(4, 16, 12, 12, device=setting.device, requires_grad=True)
    twin = x.detach().cpu().double().requires_grad_()
    truth = exact_tanh(twin, layer.weight.detach().cpu().double(), ratio.detach().cpu().double())
    v = torch.randn_like(truth)
    with full_float32():
        found = layer(x)
        (gradient,) = torch.autograd.grad(found, x, v.to(found))
    (exact,) = torch.autograd.grad(truth, twin, v)
    return max(distance(found, truth), distance(gradient, exact))


def full_float32() -> AbstractContextManager[None]:
    """Without tf32 in cuDNN, whose default it is."""
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return flags


def train_error(setting: Setting) -> float:
    """Outputs of a small decoupled network in training, float32 against float64 on the CPU."""
    model = networks.network("cnn9_adv", setting, magnitude="tanh").train()
    x, _ = networks.images(4, 32, setting)
    truth = networks.network("cnn9_adv", Setting("cpu"), magnitude="tanh").double()
    truth.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    with torch.no_grad(), full_float32():
        return distance(model(x), truth.train()(x.cpu().double()))


def pool_error(setting: Setting) -> float:
    """Huber pooling in float32 against weighted means, iterated in float64."""
    x = samples((8, 16, 49), setting, "fp32")
    exact = x.cpu().double()
    y = exact.mean(-1, keepdim=True)
    for _ in range(200):
        weight = 1 / (y - exact).abs().clamp_min(1.0)
        y = (weight * exact).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
    return max(distance(robust_pool(x), y.squeeze(-1)), 0.1 * distance(naive_huber(x), y.squeeze(-1)))


def projection_error(setting: Setting) -> float:
    """The L1 projection in float32 against sorting in float64."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(setting.device)
    return distance(project(x, 10.0, p=1), sorted_l1_ball(x.cpu().double(), 10.0))


def inference_error(setting: Setting) -> float:
    """A frozen ResNet-18 in float32 against the unfrozen one in float64."""
    model = inference.settled(networks.NETWORKS["tanh + cosine"], setting)
    x, _ = networks.images(2, 64, setting, seed=1)
    with torch.no_grad(), full_float32():
        found = freeze(model)(x)
        return distance(found, model.cpu().double()(x.cpu().double()))


SELF_CHECKS: dict[str, Callable[[Setting], float]] = {
    "conv": conv_error,
    "train": train_error,
    "pool": pool_error,
    "projection": projection_error,
    "inference": inference_error,
    "scaling": conv_error,
}
